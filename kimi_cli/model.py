"""The K3 graph over buffers: one forward pass of one or many tokens, one C call an operation.

Reads like sections 5 to 8 of the architecture page. `x` is always the normed layer input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kimi_cli import native
from kimi_cli.buffers import UNIT, Buffers, Shapes
from kimi_cli.config import Config
from kimi_cli.embedding import Embedding
from kimi_cli.errors import CheckpointError, NumericError
from kimi_cli.experts import Experts
from kimi_cli.native import F32
from kimi_cli.state import State
from kimi_cli.stream import allocate
from kimi_cli.timing import KERNEL, LAYER, Spans, no_span
from kimi_cli.trunk import Trunk
from kimi_cli.weights import Layer, Weights

LATENT_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm: the reference class's default, not rms_norm_eps."""
L2_EPS = 1e-6

Trace = Callable[[int, int, NDArray[np.int32], F32], None]
"""Called with (layer, position of the first token, expert ids [T, k], their weights [T, k])."""
Progress = Callable[[int, int], None]
"""Called with (units done, units in all) as a pass goes on."""


class Model:
    """One model over one set of weights. Not for two threads at once.

    `forward` moves `state` on; the arrays it returns are its own buffers, good until the next call.
    """

    def __init__(
        self,
        config: Config,
        trunk: Trunk,
        weights: Weights,
        experts: Experts,
        buffers: Buffers,
        trace: Trace | None = None,
        progress: Progress | None = None,
        span: Spans = no_span,
    ) -> None:
        self._config, self._weights, self._experts, self._span = config, weights, experts, span
        self._trace, self._progress = trace, progress
        memory = np.frombuffer(allocate(buffers.size), dtype=np.uint8)
        self._common, used = _views(memory, 0, buffers.common)
        self._phases = {
            name: _views(memory, used, shapes)[0] for name, shapes in buffers.phases.items()
        }
        self._chunk = buffers.common["prefix"][0]
        self._scratch = self._common["scratch"]
        self._embedding = Embedding(trunk)
        self._scheduled = 0

    def close(self) -> None:
        """Closes the embedding's file."""
        self._embedding.close()

    def rewind(self) -> None:
        """Between two calls: the next one need not be the `then` of the one before."""
        self._weights.rewind()
        self._scheduled = 0

    def forward(
        self, state: State, ids: Sequence[int], logits: str = "last", then: str | None = None
    ) -> F32 | None:
        """Feeds tokens at `state.position` and moves it on.

        `logits` is "last" ([1, vocab]), "all" ([T, vocab]) or "none" (returns None). `then` is
        what the next call will ask for, so that reading can run ahead into it; None: no next.
        Raises ReadError, CheckpointError, NumericError; the state is then of no use.
        """
        if not self._scheduled:
            self._weights.schedule(logits != "none")
            self._scheduled += 1
        if then is not None:
            self._weights.schedule(then != "none")
            self._scheduled += 1
        config, count = self._config, len(ids)
        prefix = self._common["prefix"][:count]
        for t, token in enumerate(ids):
            self._embedding.read(token, prefix[t])
        blocks: list[F32] = []
        layers = config.num_hidden_layers
        units = layers + (logits != "none")
        for number in range(layers):
            layer = self._weights.enter(number)
            with self._span(LAYER, f"layer {number}"):
                prefix = self._layer(state, number, layer, blocks, prefix)
            if self._progress:
                self._progress(number + 1, units)
        result = None
        if logits != "none":
            with self._span(LAYER, "head"):
                result = self._head(blocks, prefix, count if logits == "all" else 1)
            if self._progress:
                self._progress(units, units)
        state.position += count
        self._scheduled -= 1
        return result

    def _layer(
        self, state: State, number: int, layer: Layer, blocks: list[F32], prefix: F32
    ) -> F32:
        config, count = self._config, len(prefix)
        v, eps = layer.vectors, config.rms_norm_eps
        mixed = self._common["mixed"][:count]
        x = self._common["normed"][:count]
        branch = self._common["branch"][:count]

        def mix(name: str) -> F32:
            norm, proj = v[f"{name}_norm"], v[f"{name}_proj"]
            with self._span(KERNEL, "mix"):
                native.mix([*blocks, prefix], norm, proj, eps, mixed)
            return mixed

        h = mix("self_attention_res") if blocks else prefix
        native.rmsnorm(h, v["input_layernorm"], eps, x)
        attention = self._mla if config.is_mla(number) else self._kda
        with self._span(LAYER, "attention"):
            attention(state, number, layer, x, branch)
        if number % config.attn_res_block_size == 0:
            snapshot = self._common["blocks"][len(blocks)].reshape(-1)[: prefix.size]
            snapshot = snapshot.reshape(prefix.shape)
            snapshot[:] = prefix
            blocks.append(snapshot)
            prefix[:] = branch
        else:
            native.add(branch, prefix)
        native.rmsnorm(mix("mlp_res"), v["post_attention_layernorm"], eps, x)
        with self._span(LAYER, "mlp"):
            if config.is_moe(number):
                self._moe(state, number, layer, x, branch)
            else:
                self._dense(layer, x, branch)
        native.add(branch, prefix)
        return prefix

    def _product(self, layer: Layer, name: str, x: F32, y: F32) -> F32:
        """y [T, rows] = x [T, cols] times matrix `name`, piece by piece."""
        for row, piece in layer.rows(name):
            part = y if piece.rows == y.shape[1] else y[:, row : row + piece.rows]
            with self._span(KERNEL, name):
                try:
                    native.product(piece, x, part, self._scratch, row > 0)
                except CheckpointError as error:
                    raise layer.refused(name, error) from None
        return y

    def _kda(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count = self._config, layer.vectors, len(x)
        buffers = _first(self._phases["kda"], count)
        heads, dim, taps = config.kda_num_heads, config.kda_head_dim, config.conv_size
        flat = (count, heads * dim)
        for place, name in enumerate("qkv"):
            raw = self._product(layer, f"self_attn.{name}_proj", x, buffers["raw"])
            kernel = v[f"self_attn.{name}_conv1d"].reshape(-1, taps)
            history = state.history[number][place]
            native.conv(raw, kernel, history, buffers[name].reshape(flat))
        native.l2norm(buffers["q"], L2_EPS, dim**-0.5)
        native.l2norm(buffers["k"], L2_EPS, 1.0)
        bottleneck = self._product(layer, "self_attn.f_a_proj", x, buffers["bottleneck"])
        z = self._product(layer, "self_attn.f_b_proj", bottleneck, buffers["raw"])
        native.decay(
            z.reshape(count, heads, dim),
            v["self_attn.A_log"][:heads],
            v["self_attn.dt_bias"],
            config.gate_lower_bound,
            buffers["decay"],
        )
        beta = self._product(layer, "self_attn.b_proj", x, buffers["beta"])
        native.sigmoid(beta, beta)
        with self._span(KERNEL, "delta"):
            native.delta(
                state.kda[number],
                buffers["q"],
                buffers["k"],
                buffers["v"],
                buffers["decay"],
                beta,
                buffers["out"],
            )
        self._product(layer, "self_attn.g_proj", x, buffers["gate"].reshape(flat))
        o, weight = buffers["out"], v["self_attn.o_norm"]
        native.gated_norm(o, buffers["gate"], weight, config.rms_norm_eps, o)
        self._product(layer, "self_attn.o_proj", o.reshape(flat), out)

    def _mla(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count = self._config, layer.vectors, len(x)
        buffers = _first(self._phases["mla"], count)
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        rank, start = config.kv_lora_rank, state.position
        q_rank = self._product(layer, "self_attn.q_a_proj", x, buffers["q_rank"])
        native.rmsnorm(q_rank, v["self_attn.q_a_layernorm"], LATENT_EPS, q_rank)
        q = self._product(layer, "self_attn.q_b_proj", q_rank, buffers["q"])
        kv = self._product(layer, "self_attn.kv_a_proj_with_mqa", x, buffers["kv"])
        latent = kv[:, :rank]
        native.rmsnorm(latent, v["self_attn.kv_a_layernorm"], LATENT_EPS, latent)
        cache = state.latent[number]
        cache[start : start + count] = kv
        o = buffers["out"]
        for row, piece in layer.rows("self_attn.kv_b_proj"):  # whole heads at a time
            first, heads = row // (nope + value), piece.rows // (nope + value)
            queries = _part(buffers["q_latent"], count, heads, rank + rope)
            attended = _part(buffers["latent"], count, heads, rank)
            mine = q[:, first * (nope + rope) : (first + heads) * (nope + rope)]
            with self._span(KERNEL, "attend"):
                try:
                    native.mla_absorb(piece, heads, nope, rope, mine, queries.reshape(count, -1))
                except CheckpointError as error:
                    raise layer.refused("self_attn.kv_b_proj", error) from None
                native.mla_attend(
                    cache, start, rope, queries, (nope + rope) ** -0.5, attended, buffers["attend"]
                )
                into = o[:, first * value : (first + heads) * value]
                flat = attended.reshape(count, -1)
                native.mla_values(piece, heads, nope, flat, into, self._scratch)
        gate = self._product(layer, "self_attn.g_proj", x, buffers["gate"])
        native.gate(o, gate, o)
        self._product(layer, "self_attn.o_proj", o, out)

    def _dense(self, layer: Layer, x: F32, out: F32) -> None:
        buffers = _first(self._phases["dense"], len(x))
        self._mlp(layer, "mlp", x, buffers["gate"], buffers["up"], out)

    def _mlp(self, layer: Layer, name: str, x: F32, gate: F32, up: F32, out: F32) -> None:
        """out = down situ(gate x, up x)."""
        self._product(layer, f"{name}.gate_proj", x, gate)
        self._product(layer, f"{name}.up_proj", x, up)
        beta, linear_beta = self._config.situ_beta, self._config.situ_linear_beta
        native.situ(gate, up, beta, linear_beta, gate)
        self._product(layer, f"{name}.down_proj", gate, out)

    def _moe(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count, moe = self._config, layer.vectors, len(x), "block_sparse_moe."
        buffers = _first(self._phases["moe"], count)
        ids = np.empty((count, config.num_experts_per_token), dtype=np.int32)
        weights = buffers["weights"]
        router = self._product(layer, moe + "gate", x, buffers["router"])
        if native.argmax(router.reshape(-1)) < 0:  # the choice would pass over what is NaN
            raise NumericError(
                f"the router of layer {number} gives NaN or infinity: the weights before it, or "
                "this machine's memory, are damaged; run kimi verify"
            )
        bias = v[moe + "gate.e_score_correction_bias"]
        native.route(router, bias, config.routed_scaling_factor, ids, weights)
        if self._trace:
            self._trace(number, state.position, ids, weights)
        wanted, last = list(dict.fromkeys(ids.T.ravel().tolist())), ids[-1].tolist()
        ranks = [last.index(e) if e in last else len(last) for e in wanted]
        self._experts.request(number, wanted, ranks)
        latent = self._product(layer, moe + "routed_expert_down_proj", x, buffers["latent"])
        shared = buffers["shared"]
        self._mlp(layer, moe + "shared_experts", x, buffers["gate"], buffers["up"], shared)
        self._routed(ids, latent, buffers)
        native.expert_sum(buffers["experts"], weights, latent)
        native.rmsnorm(latent, v[moe + "routed_expert_norm"], config.rms_norm_eps, latent)
        self._product(layer, moe + "routed_expert_up_proj", latent, out)
        native.add(shared, out)

    def _routed(self, ids: NDArray[np.int32], latent: F32, buffers: dict[str, F32]) -> None:
        """Fills buffers["experts"] [T, k, latent], each expert for all its tokens as it arrives."""
        beta, linear_beta = self._config.situ_beta, self._config.situ_linear_beta
        places: dict[int, list[int]] = {}
        for place, expert in enumerate(ids.ravel().tolist()):
            places.setdefault(expert, []).append(place)
        for arrived in self._experts.arrivals():
            with self._span(KERNEL, f"expert {', '.join(str(expert) for expert, _ in arrived)}"):
                native.experts(
                    [(w, places[expert]) for expert, w in arrived],
                    latent,
                    buffers["w1"],
                    buffers["w3"],
                    buffers["expert"],
                    buffers["experts"],
                    beta,
                    linear_beta,
                    self._scratch,
                )

    def _head(self, blocks: list[F32], prefix: F32, count: int) -> F32:
        """Logits [count, vocab] of the last `count` tokens."""
        config = self._config
        layer = self._weights.enter(config.num_hidden_layers)
        v, eps = layer.vectors, config.rms_norm_eps
        mixed = self._common["mixed"][: len(prefix)]
        x = self._common["normed"][: len(prefix)]
        norm, proj = v["output_attn_res_norm"], v["output_attn_res_proj"]
        native.mix([*blocks, prefix], norm, proj, eps, mixed)
        native.rmsnorm(mixed, v["norm"], eps, x)
        logits = self._phases["head"]["logits"][:count]
        self._product(layer, "lm_head", x[-count:], logits)
        for row in logits:
            if native.argmax(row) < 0:
                raise NumericError(
                    "the logits hold NaN or infinity: the weights, or this machine's memory, are "
                    "damaged; run kimi verify"
                )
        return logits


def _views(memory: native.U8, at: int, shapes: Shapes) -> tuple[dict[str, F32], int]:
    """Arrays of these shapes laid one after another from byte `at` on, and where they end."""
    views = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 4
        views[name] = memory[at : at + size].view(np.float32).reshape(shape)
        at += -(-size // UNIT) * UNIT
    return views, at


def _first(buffers: dict[str, F32], count: int) -> dict[str, F32]:
    """The buffers cut to `count` tokens; those without a token axis as they are."""
    return {name: b[:count] if b.ndim > 1 else b for name, b in buffers.items()}


def _part(buffer: F32, *shape: int) -> F32:
    """The beginning of a flat buffer, in this shape."""
    return buffer[: int(np.prod(shape))].reshape(shape)
