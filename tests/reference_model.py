"""Kimi K3 in float64, as the architecture page writes it: the oracle of the engine's tests.

Nothing of `kimi_cli` is used here. Weights are read with the safetensors library and widened
exactly; every formula is written for one token or one head at a time, the plain way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from numpy.typing import NDArray

F64 = NDArray[np.float64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Result(NamedTuple):
    """What a prompt gives. `routed[layer]` is [T, k], ascending ids; `weights` go with them;
    `margin` is the least distance by which any choice of experts was made."""

    logits: F64
    routed: dict[int, NDArray[np.int64]]
    weights: dict[int, F64]
    margin: float


def read_tensors(directory: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of the checkpoint's shards, floats as float64, bytes as uint8."""
    tensors: dict[str, NDArray[Any]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(shard.read_bytes()):
            raw, shape = bytes(tensor["data"]), tensor["shape"]
            if tensor["dtype"] == "BF16":
                words = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
                values: NDArray[Any] = words.view(np.float32).astype(np.float64)
            elif tensor["dtype"] == "F32":
                values = np.frombuffer(raw, "<f4").astype(np.float64)
            else:
                assert tensor["dtype"] == "U8", name
                values = np.frombuffer(raw, np.uint8)
            tensors[name] = values.reshape(shape)
    return tensors


def sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def rmsnorm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean() + eps) * weight


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return e / e.sum()


def mxfp4(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> F64:
    """[out, in] from [out, in/2] nibbles, low one first, and [out, in/32] exponents."""
    weights = np.empty((packed.shape[0], packed.shape[1] * 2))
    weights[:, 0::2] = E2M1[packed & 15]
    weights[:, 1::2] = E2M1[packed >> 4]
    return weights * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)


class ReferenceModel:
    """The checkpoint in `directory`, with `config` in place of its own config.json if given."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.text = config["text_config"]
        self.linear = self.text["linear_attn_config"]
        self._tensors = read_tensors(directory)
        self._experts: dict[tuple[int, int], tuple[F64, F64, F64]] = {}

    def tensor(self, name: str) -> NDArray[Any]:
        return self._tensors["language_model." + name]

    def run(self, ids: list[int]) -> Result:
        """Logits [T, vocab] after each token of a sequence that begins at position 0."""
        text, eps = self.text, self.text["rms_norm_eps"]
        table = self.tensor("model.embed_tokens.weight")
        prefix = [table[token] for token in ids]
        blocks: list[list[F64]] = [[] for _ in ids]
        routed, weights = {}, {}
        self._margin = np.inf
        for layer in range(text["num_hidden_layers"]):
            name = f"model.layers.{layer}."

            def mix(t: int, which: str, name: str = name) -> F64:
                norm, proj = (
                    self.tensor(f"{name}{which}_res_{part}.weight") for part in ("norm", "proj")
                )
                return self._mix([*blocks[t], prefix[t]], norm, proj)

            inputs = []
            for t in range(len(ids)):
                h = mix(t, "self_attention") if blocks[t] else prefix[t]
                inputs.append(rmsnorm(h, self.tensor(name + "input_layernorm.weight"), eps))
            snapshot = layer % text["attn_res_block_size"] == 0
            full = layer + 1 in self.linear["full_attn_layers"]
            attended = (self._mla if full else self._kda)(name + "self_attn.", inputs)
            for t in range(len(ids)):
                if snapshot:
                    blocks[t].append(prefix[t])
                    prefix[t] = attended[t]
                else:
                    prefix[t] = prefix[t] + attended[t]
            inputs = []
            for t in range(len(ids)):
                norm = self.tensor(name + "post_attention_layernorm.weight")
                inputs.append(rmsnorm(mix(t, "mlp"), norm, eps))
            if layer < text["first_k_dense_replace"]:
                outputs = [self._mlp(name + "mlp.", x) for x in inputs]
            else:
                moe = [self._moe(layer, name + "block_sparse_moe.", x) for x in inputs]
                outputs = [y for y, _, _ in moe]
                routed[layer] = np.array([chosen for _, chosen, _ in moe])
                weights[layer] = np.array([w for _, _, w in moe])
            for t in range(len(ids)):
                prefix[t] = prefix[t] + outputs[t]
        logits = []
        for t in range(len(ids)):
            norm = self.tensor("model.output_attn_res_norm.weight")
            proj = self.tensor("model.output_attn_res_proj.weight")
            h = self._mix([*blocks[t], prefix[t]], norm, proj)
            x = rmsnorm(h, self.tensor("model.norm.weight"), eps)
            logits.append(self.tensor("lm_head.weight") @ x)
        return Result(np.array(logits), routed, weights, float(self._margin))

    def _mix(self, sources: list[F64], norm: F64, proj: F64) -> F64:
        eps = self.text["rms_norm_eps"]
        scores = [(rmsnorm(v, norm, eps) * proj.ravel()).sum() for v in sources]
        p = softmax(np.array(scores))
        return sum((p[s] * v for s, v in enumerate(sources)), np.zeros_like(sources[0]))

    def _kda(self, name: str, inputs: list[F64]) -> list[F64]:
        heads, dim = self.linear["num_heads"], self.linear["head_dim"]
        taps, bound = self.linear["short_conv_kernel_size"], self.linear["gate_lower_bound"]
        eps = self.text["rms_norm_eps"]
        streams = {}
        for c in "qkv":
            raw = [self.tensor(f"{name}{c}_proj.weight") @ x for x in inputs]
            kernel = self.tensor(f"{name}{c}_conv1d.weight").reshape(heads * dim, taps)
            rows = []
            for t in range(len(inputs)):
                y = np.zeros(heads * dim)
                for tap in range(taps):
                    s = t - (taps - 1 - tap)
                    if s >= 0:
                        y += kernel[:, tap] * raw[s]
                rows.append((y * sigmoid(y)).reshape(heads, dim))
            streams[c] = rows
        rate = np.exp(self.tensor(name + "A_log").ravel()[:heads])
        bias = self.tensor(name + "dt_bias").reshape(heads, dim)
        state = np.zeros((heads, dim, dim))
        out = []
        for t, x in enumerate(inputs):
            beta = sigmoid(self.tensor(name + "b_proj.weight") @ x)
            z = self.tensor(name + "f_b_proj.weight") @ (self.tensor(name + "f_a_proj.weight") @ x)
            z = z.reshape(heads, dim)
            gate = (self.tensor(name + "g_proj.weight") @ x).reshape(heads, dim)
            joined = np.empty((heads, dim))
            for h in range(heads):
                q, k, v = (streams[c][t][h] for c in "qkv")
                q = q / np.sqrt((q * q).sum() + 1e-6) * dim**-0.5
                k = k / np.sqrt((k * k).sum() + 1e-6)
                g = bound * sigmoid(rate[h] * (z[h] + bias[h]))
                state[h] *= np.exp(g)[:, None]
                state[h] += beta[h] * np.outer(k, v - state[h].T @ k)
                o = state[h].T @ q
                joined[h] = rmsnorm(o, self.tensor(name + "o_norm.weight"), eps) * sigmoid(gate[h])
            out.append(self.tensor(name + "o_proj.weight") @ joined.ravel())
        return out

    def _mla(self, name: str, inputs: list[F64]) -> list[F64]:
        text, heads = self.text, self.text["num_attention_heads"]
        nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        value, rank = text["v_head_dim"], text["kv_lora_rank"]
        keys, shared_keys, values = [], [], []
        out = []
        for x in inputs:
            low = rmsnorm(
                self.tensor(name + "q_a_proj.weight") @ x,
                self.tensor(name + "q_a_layernorm.weight"),
                1e-6,
            )
            q = (self.tensor(name + "q_b_proj.weight") @ low).reshape(heads, nope + rope)
            both = self.tensor(name + "kv_a_proj_with_mqa.weight") @ x
            c = rmsnorm(both[:rank], self.tensor(name + "kv_a_layernorm.weight"), 1e-6)
            kv = (self.tensor(name + "kv_b_proj.weight") @ c).reshape(heads, nope + value)
            keys.append(kv[:, :nope])
            values.append(kv[:, nope:])
            shared_keys.append(both[rank:])
            joined = np.empty((heads, value))
            for h in range(heads):
                scores = [
                    (q[h, :nope] @ keys[s][h] + q[h, nope:] @ shared_keys[s])
                    * (nope + rope) ** -0.5
                    for s in range(len(keys))
                ]
                p = softmax(np.array(scores))
                joined[h] = sum(p[s] * values[s][h] for s in range(len(keys)))
            gate = sigmoid(self.tensor(name + "g_proj.weight") @ x)
            out.append(self.tensor(name + "o_proj.weight") @ (joined.ravel() * gate))
        return out

    def _situ(self, g: F64, u: F64) -> F64:
        beta, linear = (
            self.text["activation_situ_beta"],
            self.text["activation_situ_linear_beta"],
        )
        return beta * np.tanh(g / beta) * sigmoid(g) * linear * np.tanh(u / linear)

    def _mlp(self, name: str, x: F64) -> F64:
        gate, up, down = (
            self.tensor(f"{name}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        return down @ self._situ(gate @ x, up @ x)

    def _moe(self, layer: int, name: str, x: F64) -> tuple[F64, list[int], list[float]]:
        text, k = self.text, self.text["num_experts_per_token"]
        s = sigmoid(self.tensor(name + "gate.weight") @ x)
        steered = s + self.tensor(name + "gate.e_score_correction_bias")
        order = sorted(range(len(s)), key=lambda e: (-steered[e], e))
        if k < len(order):
            self._margin = min(self._margin, steered[order[k - 1]] - steered[order[k]])
        chosen = sorted(order[:k])
        total = sum(s[e] for e in chosen) + 1e-20
        weights = [s[e] / total * text["routed_scaling_factor"] for e in chosen]
        z = self.tensor(name + "routed_expert_down_proj.weight") @ x
        y = np.zeros_like(z)
        for e, weight in zip(chosen, weights, strict=True):
            w1, w2, w3 = self._expert(layer, name, e)
            y += weight * (w2 @ self._situ(w1 @ z, w3 @ z))
        y = rmsnorm(y, self.tensor(name + "routed_expert_norm.weight"), text["rms_norm_eps"])
        routed = self.tensor(name + "routed_expert_up_proj.weight") @ y
        return routed + self._mlp(name + "shared_experts.", x), chosen, weights

    def _expert(self, layer: int, name: str, expert: int) -> tuple[F64, F64, F64]:
        if (layer, expert) not in self._experts:
            w1, w2, w3 = (
                mxfp4(
                    self.tensor(f"{name}experts.{expert}.{w}.weight_packed"),
                    self.tensor(f"{name}experts.{expert}.{w}.weight_scale"),
                )
                for w in ("w1", "w2", "w3")
            )
            self._experts[layer, expert] = (w1, w2, w3)
        return self._experts[layer, expert]
