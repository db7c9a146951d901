"""The K3 graph in torch, for whole sequences that begin at position 0.

A second implementation of the architecture, independent of the engine: parameters come by their
official names from a dict (see `shape.initial`), a config is the decoded text_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor

from tests.builtin import pieces
from tests.builtin.experts import Routing, route, routed_sum
from tests.builtin.pieces import rmsnorm

Weights = Mapping[str, Tensor]
LATENT_EPS = 1e-6
"""Of the two latent norms of MLA; every other norm uses rms_norm_eps."""


class Output(NamedTuple):
    """Normed hidden states [B, T, hidden] before lm_head, and each expert layer's routing."""

    hidden: Tensor
    routing: dict[int, Routing]


def forward(w: Weights, text: dict[str, Any], ids: Tensor, ops: ModuleType = pieces) -> Output:
    """The model on `ids` [B, T]; `ops` is `pieces`, or `fused` for training."""
    eps, full = text["rms_norm_eps"], text["linear_attn_config"]["full_attn_layers"]
    batch, length = ids.shape
    prefix = fn.embedding(ids, w["model.embed_tokens.weight"]).flatten(0, 1)
    blocks: list[Tensor] = []
    routing: dict[int, Routing] = {}

    def mix(which: str, norm: str) -> Tensor:
        weight = w[f"{which}_norm.weight"] * w[f"{which}_proj.weight"][0]
        return ops.mix([*blocks, prefix], weight, w[norm + ".weight"], eps)

    for layer in range(text["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        if blocks:
            x = mix(name + "self_attention_res", name + "input_layernorm")
        else:
            x = rmsnorm(prefix, w[name + "input_layernorm.weight"], eps)
        attention = _mla if layer + 1 in full else _kda
        a = attention(w, text, name + "self_attn.", x.unflatten(0, (batch, length)), ops)
        a = a.flatten(0, 1)
        if layer % text["attn_res_block_size"] == 0:
            blocks.append(prefix)
            prefix = a
        else:
            prefix = prefix + a
        x = mix(name + "mlp_res", name + "post_attention_layernorm")
        if layer < text["first_k_dense_replace"]:
            y = _mlp(w, text, name + "mlp.", x, ops)
        else:
            y, routing[layer] = _moe(w, text, name + "block_sparse_moe.", x, ops)
        prefix = prefix + y
    h = mix("model.output_attn_res", "model.norm")
    return Output(h.unflatten(0, (batch, length)), routing)


def _kda(w: Weights, text: dict[str, Any], name: str, x: Tensor, ops: ModuleType) -> Tensor:
    linear = text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width, shape = heads * dim, (heads, dim)
    parts = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    joined = x @ torch.cat([w[f"{name}{part}.weight"] for part in parts]).T
    raw, gate, low, beta = joined.split((3 * width, width, dim, heads), -1)
    taps = torch.stack([w[f"{name}{part}_conv1d.weight"] for part in "qkv"])
    z = low @ w[name + "f_b_proj.weight"].T
    o = ops.kda(
        raw.unflatten(-1, (3, *shape)),
        taps.view(3, *shape, -1),
        z.unflatten(-1, shape),
        beta,
        w[name + "A_log"],
        w[name + "dt_bias"],
        linear["gate_lower_bound"],
    )
    o = ops.gated_norm(
        o, w[name + "o_norm.weight"], gate.unflatten(-1, shape), text["rms_norm_eps"]
    )
    return o.flatten(2) @ w[name + "o_proj.weight"].T


def _mla(w: Weights, text: dict[str, Any], name: str, x: Tensor, ops: ModuleType) -> Tensor:
    heads, value, rank = text["num_attention_heads"], text["v_head_dim"], text["kv_lora_rank"]
    nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    low = rmsnorm(x @ w[name + "q_a_proj.weight"].T, w[name + "q_a_layernorm.weight"], LATENT_EPS)
    q = (low @ w[name + "q_b_proj.weight"].T).unflatten(-1, (heads, nope + rope)).transpose(1, 2)
    c, shared = (x @ w[name + "kv_a_proj_with_mqa.weight"].T).split((rank, rope), -1)
    c = rmsnorm(c, w[name + "kv_a_layernorm.weight"], LATENT_EPS)
    kv = (c @ w[name + "kv_b_proj.weight"].T).unflatten(-1, (heads, nope + value)).transpose(1, 2)
    k, v = kv.split((nope, value), -1)
    k = torch.cat((k, shared[:, None].expand(-1, heads, -1, -1)), -1)
    v = fn.pad(v, (0, nope + rope - value))  # of one width, for torch's fused kernel
    o = fn.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(nope + rope) ** -0.5)
    gate = (x @ w[name + "g_proj.weight"].T).sigmoid()
    o = o[..., :value].transpose(1, 2).flatten(2)
    return (o * gate) @ w[name + "o_proj.weight"].T


def _mlp(w: Weights, text: dict[str, Any], name: str, x: Tensor, ops: ModuleType) -> Tensor:
    """A dense or shared MLP on x [N, hidden]."""
    both = x @ torch.cat((w[name + "gate_proj.weight"], w[name + "up_proj.weight"])).T
    return _situ(text, both, ops) @ w[name + "down_proj.weight"].T


def _situ(text: dict[str, Any], both: Tensor, ops: ModuleType) -> Tensor:
    return ops.situ(both, text["activation_situ_beta"], text["activation_situ_linear_beta"])


def _moe(
    w: Weights, text: dict[str, Any], name: str, x: Tensor, ops: ModuleType
) -> tuple[Tensor, Routing]:
    routing = route(
        x @ w[name + "gate.weight"].T,
        w[name + "gate.e_score_correction_bias"],
        text["num_experts_per_token"],
        text["routed_scaling_factor"],
    )
    z = x @ w[name + "routed_expert_down_proj.weight"].T
    first = torch.cat((w[name + "experts.w1"], w[name + "experts.w3"]), 1)
    second = w[name + "experts.w2"]
    y = routed_sum(z, routing, first, second, lambda both: _situ(text, both, ops), ops)
    y = rmsnorm(y, w[name + "routed_expert_norm.weight"], text["rms_norm_eps"])
    y = y @ w[name + "routed_expert_up_proj.weight"].T
    return y + _mlp(w, text, name + "shared_experts.", x, ops), routing
