"""The model's dimensions as a config.json, and its parameters at the start of training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kimi_cli.synth import make_config

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 13,
    "intermediate_size": 192,
    "attn_res_block_size": 4,
    "num_heads": 3,
    "head_dim": 32,
    "full_attn_layers": [4, 8, 12, 13],
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
}


def config(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """The config.json of the model for `vocab_size` ids, the last 256 of them special."""
    return make_config(**{**DIMENSIONS, "vocab_size": vocab_size, **changes})


def initial(text: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Parameters by official name (less `language_model.`), float32; experts' are stacked [E, ...].

    `text` is a config's text_config. Matrices are normal with deviation 1 / sqrt(columns), smaller
    where they feed the residual sum; the mixes begin as plain averages.
    """
    random = torch.Generator().manual_seed(seed)
    hidden, vocab, linear = text["hidden_size"], text["vocab_size"], text["linear_attn_config"]
    out: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        deviation = gain / math.sqrt(shape[-1])
        out[name] = torch.randn(*shape, generator=random) * deviation

    def ones(name: str, size: int) -> None:
        out[name] = torch.ones(size)

    def mixer(name: str) -> None:
        ones(f"{name}_norm.weight", hidden)
        out[f"{name}_proj.weight"] = torch.zeros(1, hidden)

    matrix("model.embed_tokens.weight", vocab, hidden, gain=0.7 * math.sqrt(hidden))
    matrix("lm_head.weight", vocab, hidden, gain=0.3)
    ones("model.norm.weight", hidden)
    mixer("model.output_attn_res")
    for layer in range(text["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        ones(name + "input_layernorm.weight", hidden)
        ones(name + "post_attention_layernorm.weight", hidden)
        mixer(name + "self_attention_res")
        mixer(name + "mlp_res")
        attn = name + "self_attn."
        if layer + 1 in linear["full_attn_layers"]:
            heads, value = text["num_attention_heads"], text["v_head_dim"]
            nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
            q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
            matrix(attn + "q_a_proj.weight", q_rank, hidden)
            ones(attn + "q_a_layernorm.weight", q_rank)
            matrix(attn + "q_b_proj.weight", heads * (nope + rope), q_rank)
            matrix(attn + "kv_a_proj_with_mqa.weight", kv_rank + rope, hidden)
            ones(attn + "kv_a_layernorm.weight", kv_rank)
            matrix(attn + "kv_b_proj.weight", heads * (nope + value), kv_rank)
            matrix(attn + "g_proj.weight", heads * value, hidden, gain=0.5)
            matrix(attn + "o_proj.weight", hidden, heads * value, gain=0.5)
        else:
            heads, dim, taps = (
                linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
            )  # fmt: skip
            width = heads * dim
            for part in "qkv":
                matrix(f"{attn}{part}_proj.weight", width, hidden)
                kernel = torch.randn(width, 1, taps, generator=random) * 0.1
                kernel[:, :, -1] += 1
                out[f"{attn}{part}_conv1d.weight"] = kernel
            matrix(attn + "f_a_proj.weight", dim, hidden)
            matrix(attn + "f_b_proj.weight", width, dim)
            matrix(attn + "b_proj.weight", heads, hidden)
            matrix(attn + "g_proj.weight", width, hidden, gain=0.5)
            matrix(attn + "o_proj.weight", hidden, width, gain=0.5)
            ones(attn + "o_norm.weight", dim)
            out[attn + "A_log"] = torch.zeros(heads)
            # the decay per token begins between e^-0.01 and e^-1.5
            out[attn + "dt_bias"] = torch.rand(width, generator=random) * 5.3 - 6.2
        if layer < text["first_k_dense_replace"]:
            inner = text["intermediate_size"]
            _mlp(matrix, name + "mlp.", hidden, inner)
            continue
        moe, experts = name + "block_sparse_moe.", text["num_experts"]
        latent, inner = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
        matrix(moe + "gate.weight", experts, hidden)
        out[moe + "gate.e_score_correction_bias"] = torch.zeros(experts)
        matrix(moe + "routed_expert_down_proj.weight", latent, hidden)
        matrix(moe + "routed_expert_up_proj.weight", hidden, latent, gain=0.5)
        ones(moe + "routed_expert_norm.weight", latent)
        _mlp(matrix, moe + "shared_experts.", hidden, text["num_shared_experts"] * inner)
        matrix(moe + "experts.w1", experts, inner, latent)
        matrix(moe + "experts.w3", experts, inner, latent)
        matrix(moe + "experts.w2", experts, latent, inner)
    return out


def _mlp(matrix: Any, name: str, hidden: int, inner: int) -> None:
    matrix(name + "gate_proj.weight", inner, hidden)
    matrix(name + "up_proj.weight", inner, hidden)
    matrix(name + "down_proj.weight", hidden, inner, gain=0.5)
