"""config.json, read strictly: refused by name for whatever is missing, mistyped or unsupported.

It never substitutes a default: a half-understood config is a different model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """The text model's dimensions and constants, named as in config.json where it has a name.

    `mla_layers` holds zero-based layer numbers (the file's lists are one-based).
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    first_k_dense_replace: int
    rms_norm_eps: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    conv_size: int
    gate_lower_bound: float
    mla_layers: frozenset[int]
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int
    max_position_embeddings: int
    eos_token_id: int

    def is_mla(self, layer: int) -> bool:
        """Whether zero-based `layer` attends by gated latent attention; otherwise by KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether zero-based `layer` has a mixture of experts; otherwise a dense MLP."""
        return layer >= self.first_k_dense_replace
