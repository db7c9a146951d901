"""Which float32 buffers a forward pass needs, by name and shape. Pure: `plan.py` counts them,
`model.py` fills them.

Attention and MLP never run at the same time, so their buffers share one region: a *phase* is a set
of buffers that are live together, and the region is as large as the largest phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kimi_cli.config import Config

Shapes = dict[str, tuple[int, ...]]

FLOAT = 4
UNIT = 64
"""Every buffer begins on a multiple of this many bytes."""


@dataclass(frozen=True)
class Buffers:
    """Shapes for chunks of up to `chunk` tokens: `common` live throughout, `phases` in turn."""

    common: Shapes
    phases: dict[str, Shapes]

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return _bytes(self.common) + max(_bytes(shapes) for shapes in self.phases.values())


def _bytes(shapes: Shapes) -> int:
    return sum(-(-prod(shape) * FLOAT // UNIT) * UNIT for shape in shapes.values())


def snapshots(config: Config) -> int:
    """Residual blocks snapshotted in one pass: one at every attn_res_block_size-th layer."""
    return -(-config.num_hidden_layers // config.attn_res_block_size)


def model_buffers(
    config: Config, chunk: int, logits: int, heads: int, scratch: int, attend: int
) -> Buffers:
    """Buffers of one forward pass.

    `chunk` tokens at once, `logits` rows of them; `heads` is the most heads that one block of
    kv_b_proj holds, `scratch` the floats the widest product wants, `attend` those of attention.
    """
    t, hidden = chunk, config.hidden_size
    width = config.kda_num_heads * config.kda_head_dim
    kda = (t, config.kda_num_heads, config.kda_head_dim)
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    values = config.num_attention_heads * config.v_head_dim
    latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    shared, k = config.num_shared_experts * inter, config.num_experts_per_token
    return Buffers(
        common={
            "prefix": (t, hidden),
            "blocks": (snapshots(config), t, hidden),
            "mixed": (t, hidden),
            "normed": (t, hidden),
            "branch": (t, hidden),
            "scratch": (scratch,),
        },
        phases={
            "kda": {
                "raw": (t, width),
                "q": kda,
                "k": kda,
                "v": kda,
                "bottleneck": (t, config.kda_head_dim),
                "decay": kda,
                "beta": (t, config.kda_num_heads),
                "gate": kda,
                "out": kda,
            },
            "mla": {
                "q_rank": (t, config.q_lora_rank),
                "q": (t, config.num_attention_heads * (config.qk_nope_head_dim + rope)),
                "kv": (t, rank + rope),
                "q_latent": (t * heads * (rank + rope),),
                "latent": (t * heads * rank,),
                "gate": (t, values),
                "out": (t, values),
                "attend": (attend,),
            },
            "moe": {
                "router": (t, config.num_experts),
                "weights": (t, k),
                "latent": (t, latent),
                "w1": (t, inter),
                "w3": (t, inter),
                "expert": (t, latent),
                "experts": (t, k, latent),
                "gate": (t, shared),
                "up": (t, shared),
                "shared": (t, hidden),
            },
            "dense": {
                "gate": (t, config.intermediate_size),
                "up": (t, config.intermediate_size),
            },
            "head": {
                "logits": (logits, config.vocab_size),
            },
        },
    )
