"""Which tensors a config demands, by name, shape and order of use. Pure: reads nothing.

The names are the checkpoint's own (k3-architecture section 3). A *matrix* is multiplied by rows and
keeps its stored format; a *vector* is anything else and is widened to float32 when it is loaded.
The order of matrices within a layer is the order in which `model.py` consumes them, and therefore
the order of the trunk files and of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from kimi_cli.config import Config

PREFIX = "language_model."
EMBEDDING = PREFIX + "model.embed_tokens.weight"
LM_HEAD = PREFIX + "lm_head.weight"
IGNORED = ("vision_tower.", "mm_projector.")
"""Prefixes of tensors that are present in the checkpoint and have no part in text."""

EXPERT_PARTS = (
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
)
"""The six tensors of one expert, in the order of the official shards."""


@dataclass(frozen=True)
class Tensor:
    """One tensor that is not part of a routed expert.

    `name` is the full checkpoint name. `shapes` lists the shapes that may be stored, the official
    one first. `kind` is "matrix" or "vector". `padded` marks A_log, whose one dimension may be
    longer than wanted if the rest is zero.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    kind: str
    padded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def layer_prefix(layer: int) -> str:
    """Name prefix of zero-based `layer`."""
    return f"{PREFIX}model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """Name prefix of one routed expert's six tensors."""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}."


def expert_shapes(config: Config) -> tuple[tuple[int, int], ...]:
    """Shapes of EXPERT_PARTS, all U8: [out, in/2] packed, [out, in/32] scales."""
    latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    return (
        (inter, latent // 2),
        (inter, latent // 32),
        (latent, inter // 2),
        (latent, inter // 32),
        (inter, latent // 2),
        (inter, latent // 32),
    )


def expert_bytes(config: Config) -> int:
    """Bytes of one routed expert."""
    return sum(a * b for a, b in expert_shapes(config))


@lru_cache(maxsize=256)
def layer_tensors(config: Config, layer: int) -> tuple[Tensor, ...]:
    """The tensors of zero-based `layer` but experts: vectors, then matrices in order of use."""
    hidden, prefix = config.hidden_size, layer_prefix(layer)

    def vector(name: str, *shapes: tuple[int, ...], padded: bool = False) -> Tensor:
        return Tensor(prefix + name, shapes, "vector", padded)

    def matrix(name: str, rows: int, cols: int) -> Tensor:
        return Tensor(prefix + name, ((rows, cols),), "matrix")

    vectors = [
        vector("self_attention_res_norm.weight", (hidden,)),
        vector("self_attention_res_proj.weight", (1, hidden)),
        vector("input_layernorm.weight", (hidden,)),
        vector("mlp_res_norm.weight", (hidden,)),
        vector("mlp_res_proj.weight", (1, hidden)),
        vector("post_attention_layernorm.weight", (hidden,)),
    ]
    matrices = []
    if config.is_mla(layer):
        heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        rope, q_rank, kv_rank = config.qk_rope_head_dim, config.q_lora_rank, config.kv_lora_rank
        vectors += [
            vector("self_attn.q_a_layernorm.weight", (q_rank,)),
            vector("self_attn.kv_a_layernorm.weight", (kv_rank,)),
        ]
        matrices += [
            matrix("self_attn.q_a_proj.weight", q_rank, hidden),
            matrix("self_attn.q_b_proj.weight", heads * (nope + rope), q_rank),
            matrix("self_attn.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden),
            matrix("self_attn.kv_b_proj.weight", heads * (nope + value), kv_rank),
            matrix("self_attn.g_proj.weight", heads * value, hidden),
            matrix("self_attn.o_proj.weight", hidden, heads * value),
        ]
    else:
        heads, dim, taps = config.kda_num_heads, config.kda_head_dim, config.conv_size
        width = heads * dim
        vectors += [
            vector(f"self_attn.{c}_conv1d.weight", (width, 1, taps), (width, taps)) for c in "qkv"
        ]
        vectors += [
            vector("self_attn.A_log", (heads,), (1, 1, heads, 1), padded=True),
            vector("self_attn.dt_bias", (width,)),
            vector("self_attn.o_norm.weight", (dim,)),
        ]
        matrices += [
            matrix("self_attn.q_proj.weight", width, hidden),
            matrix("self_attn.k_proj.weight", width, hidden),
            matrix("self_attn.v_proj.weight", width, hidden),
            matrix("self_attn.f_a_proj.weight", dim, hidden),
            matrix("self_attn.f_b_proj.weight", width, dim),
            matrix("self_attn.b_proj.weight", heads, hidden),
            matrix("self_attn.g_proj.weight", width, hidden),
            matrix("self_attn.o_proj.weight", hidden, width),
        ]
    if config.is_moe(layer):
        latent, moe = config.routed_expert_hidden_size, "block_sparse_moe."
        shared = config.num_shared_experts * config.moe_intermediate_size
        vectors += [
            vector(moe + "gate.e_score_correction_bias", (config.num_experts,)),
            vector(moe + "routed_expert_norm.weight", (latent,)),
        ]
        matrices += [
            matrix(moe + "gate.weight", config.num_experts, hidden),
            matrix(moe + "routed_expert_down_proj.weight", latent, hidden),
            matrix(moe + "shared_experts.gate_proj.weight", shared, hidden),
            matrix(moe + "shared_experts.up_proj.weight", shared, hidden),
            matrix(moe + "shared_experts.down_proj.weight", hidden, shared),
            matrix(moe + "routed_expert_up_proj.weight", hidden, latent),
        ]
    else:
        inter = config.intermediate_size
        matrices += [
            matrix("mlp.gate_proj.weight", inter, hidden),
            matrix("mlp.up_proj.weight", inter, hidden),
            matrix("mlp.down_proj.weight", hidden, inter),
        ]
    return tuple(vectors + matrices)


def head_tensors(config: Config) -> tuple[Tensor, ...]:
    """The tensors used after the last layer: final mix, final norm, lm_head."""
    hidden = config.hidden_size
    return (
        Tensor(PREFIX + "model.output_attn_res_norm.weight", ((hidden,),), "vector"),
        Tensor(PREFIX + "model.output_attn_res_proj.weight", ((1, hidden),), "vector"),
        Tensor(PREFIX + "model.norm.weight", ((hidden,),), "vector"),
        Tensor(LM_HEAD, ((config.vocab_size, hidden),), "matrix"),
    )


def embedding(config: Config) -> Tensor:
    """The embedding table; its rows are read one by one and never held."""
    return Tensor(EMBEDDING, ((config.vocab_size, config.hidden_size),), "matrix")
