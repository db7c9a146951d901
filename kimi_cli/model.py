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

_KDA_IN = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "f_a"))
_KDA_GATES = ("self_attn.b_proj", "self_attn.g_proj")
_OUT = ("self_attn.o_proj",)
_DENSE_IN = ("mlp.gate_proj", "mlp.up_proj")
_MOE_IN = tuple(
    f"block_sparse_moe.{name}_proj"
    for name in ("routed_expert_down", "shared_experts.gate", "shared_experts.up")
)

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
        self._phases["layer"] = {name: self._common[name] for name in ("mixed", "normed", "branch")}
        self._one = {name: _first(views, 1) for name, views in self._phases.items()}
        self._chunk = buffers.common["prefix"][0]
        self._scratch = self._common["scratch"]
        self._embedding = Embedding(trunk)
        self._scheduled = 0
        self._ids = np.empty((self._chunk, config.num_experts_per_token), dtype=np.int32)
        self._kept: dict[tuple[int, str], native.Calls | None] = {}
        """Operations of a single token, on the arrays of `_state`; None: not to be repeated."""
        self._state: State | None = None
        self._in_pieces = False
        """Whether weights were used since it was cleared that are gone afterwards."""

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
        if state is not self._state:
            self._state, self._kept = state, {}
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
        buffers = self._buffers("layer", count)
        mixed, x, branch = buffers["mixed"], buffers["normed"], buffers["branch"]

        def norm(name: str, weight: str) -> None:
            h = prefix
            if blocks:
                h = mixed
                with self._span(KERNEL, "mix"):
                    sources = [*blocks, prefix]
                    native.mix(sources, v[f"{name}_norm"], v[f"{name}_proj"], eps, mixed)
            native.rmsnorm(h, v[weight], eps, x)

        def again(part: str, compute: Callable[[], None]) -> None:
            self._repeat((number, part), count, compute)

        again("before attention", lambda: norm("self_attention_res", "input_layernorm"))
        with self._span(LAYER, "attention"):
            if config.is_mla(number):
                self._mla(state, number, layer, x, branch)
            else:
                again("attention", lambda: self._kda(state, number, layer, x, branch))
        if number % config.attn_res_block_size == 0:
            snapshot = self._common["blocks"][len(blocks)].reshape(-1)[: prefix.size]
            snapshot = snapshot.reshape(prefix.shape)
            snapshot[:] = prefix
            blocks.append(snapshot)
            prefix[:] = branch
        else:
            native.add(branch, prefix)
        again("before mlp", lambda: norm("mlp_res", "post_attention_layernorm"))
        with self._span(LAYER, "mlp"):
            if config.is_moe(number):
                self._moe(state, number, layer, x, branch)
            else:
                again("mlp", lambda: self._dense(layer, x, branch))
        native.add(branch, prefix)
        return prefix

    def _buffers(self, phase: str, count: int) -> dict[str, F32]:
        """Cut to `count` tokens; for one always the same arrays."""
        return self._one[phase] if count == 1 else _first(self._phases[phase], count)

    def _repeat(self, key: tuple[int, str], count: int, compute: Callable[[], None]) -> None:
        """Does `compute`, which is operations and nothing else, with the same arrays for every
        single token. Where all its weights stay in memory, those of a single token are kept under
        `key` and repeated: the Python around each is out of every cache whenever it is needed, and
        took 3 % of a token."""
        if count > 1 or self._span is not no_span:
            compute()
            return
        if key not in self._kept:
            self._in_pieces = False
            with native.recording() as calls:
                compute()
            self._kept[key] = None if self._in_pieces else calls
            return
        kept = self._kept[key]
        if kept is None:
            compute()
        else:
            kept()

    def _products(self, layer: Layer, names: Sequence[str], x: F32, ys: Sequence[F32]) -> None:
        """ys[i] [T, rows] = x [T, cols] times matrix names[i]; one operation if they all stay in
        memory, else one after the other."""
        held = [weights for weights in map(layer.held, names) if weights is not None]
        if len(held) < len(names):
            for name, y in zip(names, ys, strict=True):
                self._product(layer, name, x, y)
            return
        with self._span(KERNEL, " ".join(names)):
            try:
                native.products(held, x, ys, self._scratch)
            except CheckpointError:
                for name, y in zip(names, ys, strict=True):
                    self._product(layer, name, x, y)  # to tell whose fault it is
                raise

    def _product(self, layer: Layer, name: str, x: F32, y: F32) -> None:
        """y [T, rows] = x [T, cols] times matrix `name`, piece by piece."""
        self._in_pieces = True
        for row, piece in layer.rows(name):
            part = y if piece.rows == y.shape[1] else y[:, row : row + piece.rows]
            with self._span(KERNEL, name):
                try:
                    native.product(piece, x, part, self._scratch, row > 0)
                except CheckpointError as error:
                    raise layer.refused(name, error) from None

    def _kda(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count = self._config, layer.vectors, len(x)
        buffers = self._buffers("kda", count)
        heads, dim, taps = config.kda_num_heads, config.kda_head_dim, config.conv_size
        raws = buffers["raw"], buffers["gate_flat"], buffers["out_flat"]
        bottleneck, beta, o = buffers["bottleneck"], buffers["beta"], buffers["out"]
        self._products(layer, _KDA_IN, x, (*raws, bottleneck))
        for place, (name, raw) in enumerate(zip("qkv", raws, strict=True)):
            kernel = v[f"self_attn.{name}_conv1d"].reshape(-1, taps)
            native.conv(raw, kernel, state.history[number][place], buffers[name + "_flat"])
        native.l2norm(buffers["q"], L2_EPS, dim**-0.5)
        native.l2norm(buffers["k"], L2_EPS, 1.0)
        z = buffers["raw"]
        self._products(layer, ("self_attn.f_b_proj",), bottleneck, (z,))
        native.decay(
            z.reshape(count, heads, dim),
            v["self_attn.A_log"][:heads],
            v["self_attn.dt_bias"],
            config.gate_lower_bound,
            buffers["decay"],
        )
        self._products(layer, _KDA_GATES, x, (beta, buffers["gate_flat"]))
        native.sigmoid(beta, beta)
        with self._span(KERNEL, "delta"):
            native.delta(
                state.kda[number],
                buffers["q"],
                buffers["k"],
                buffers["v"],
                buffers["decay"],
                beta,
                o,
            )
        native.gated_norm(o, buffers["gate"], v["self_attn.o_norm"], config.rms_norm_eps, o)
        self._products(layer, _OUT, buffers["out_flat"], (out,))

    def _mla(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count = self._config, layer.vectors, len(x)
        buffers = self._buffers("mla", count)
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        rank, start = config.kv_lora_rank, state.position
        q_rank, q, kv = buffers["q_rank"], buffers["q"], buffers["kv"]
        o, gate = buffers["out"], buffers["gate"]
        latent = kv[:, :rank]

        def enter() -> None:
            self._products(layer, ("self_attn.q_a_proj",), x, (q_rank,))
            native.rmsnorm(q_rank, v["self_attn.q_a_layernorm"], LATENT_EPS, q_rank)
            self._products(layer, ("self_attn.q_b_proj",), q_rank, (q,))
            self._products(layer, ("self_attn.kv_a_proj_with_mqa",), x, (kv,))
            native.rmsnorm(latent, v["self_attn.kv_a_layernorm"], LATENT_EPS, latent)

        def leave() -> None:
            self._products(layer, ("self_attn.g_proj",), x, (gate,))
            native.gate(o, gate, o)
            self._products(layer, _OUT, o, (out,))

        self._repeat((number, "queries"), count, enter)
        cache = state.latent[number]
        cache[start : start + count] = kv
        for row, piece in layer.rows("self_attn.kv_b_proj"):  # whole heads at a time
            first, heads = row // (nope + value), piece.rows // (nope + value)
            queries = _part(buffers["q_latent"], count, heads, rank + rope)
            attended = _part(buffers["latent"], count, heads, rank)
            mine = q[:, first * (nope + rope) : (first + heads) * (nope + rope)]
            into = o[:, first * value : (first + heads) * value]
            with self._span(KERNEL, "attend"):
                try:
                    native.mla(
                        piece,
                        nope,
                        rope,
                        cache,
                        start,
                        mine,
                        (nope + rope) ** -0.5,
                        queries,
                        attended,
                        buffers["attend"],
                        into,
                        self._scratch,
                    )
                except CheckpointError as error:
                    raise layer.refused("self_attn.kv_b_proj", error) from None
        self._repeat((number, "after attention"), count, leave)

    def _dense(self, layer: Layer, x: F32, out: F32) -> None:
        buffers = self._buffers("dense", len(x))
        gate = buffers["gate"]
        self._products(layer, _DENSE_IN, x, (gate, buffers["up"]))
        self._situ(gate, buffers["up"])
        self._products(layer, ("mlp.down_proj",), gate, (out,))

    def _situ(self, gate: F32, up: F32) -> None:
        """Into `gate`."""
        native.situ(gate, up, self._config.situ_beta, self._config.situ_linear_beta, gate)

    def _moe(self, state: State, number: int, layer: Layer, x: F32, out: F32) -> None:
        config, v, count, moe = self._config, layer.vectors, len(x), "block_sparse_moe."
        buffers = self._buffers("moe", count)
        ids, weights, latent = self._ids[:count], buffers["weights"], buffers["latent"]
        router, gate, up = buffers["router"], buffers["gate"], buffers["up"]
        shared, bias = buffers["shared"], v[moe + "gate.e_score_correction_bias"]

        def choose() -> None:
            self._products(layer, (moe + "gate",), x, (router,))
            native.route(router, bias, config.routed_scaling_factor, ids, weights)

        def share() -> None:
            self._products(layer, _MOE_IN, x, (latent, gate, up))
            self._situ(gate, up)
            self._products(layer, (moe + "shared_experts.down_proj",), gate, (shared,))

        def join() -> None:
            native.expert_sum(buffers["experts"], weights, latent)
            norm = v[moe + "routed_expert_norm"]
            native.rmsnorm(latent, norm, config.rms_norm_eps, latent)
            self._products(layer, (moe + "routed_expert_up_proj",), latent, (out,))
            native.add(shared, out)

        try:
            self._repeat((number, "router"), count, choose)
        except NumericError:
            raise NumericError(
                f"the router of layer {number} gives NaN or infinity: the weights before it, or "
                "this machine's memory, are damaged; run kimi verify"
            ) from None
        if self._trace:
            self._trace(number, state.position, ids.copy(), weights)
        wanted, last = list(dict.fromkeys(ids.T.ravel().tolist())), ids[-1].tolist()
        ranks = [last.index(e) if e in last else len(last) for e in wanted]
        self._experts.request(number, wanted, ranks)
        self._repeat((number, "shared experts"), count, share)
        self._routed(ids, latent, buffers)
        self._repeat((number, "after experts"), count, join)

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
    """The buffers cut to `count` tokens, those without a token axis as they are; where one is
    [T, heads, dim], `out` say, also `out_flat` [T, heads dim]."""
    cut = {name: b[:count] if b.ndim > 1 else b for name, b in buffers.items()}
    flat = {f"{name}_flat": b.reshape(count, -1) for name, b in cut.items() if b.ndim == 3}
    return {**cut, **flat}


def _part(buffer: F32, *shape: int) -> F32:
    """The beginning of a flat buffer, in this shape."""
    return buffer[: int(np.prod(shape))].reshape(shape)
