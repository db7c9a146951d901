"""What persists from token to token: KDA matrices, conv histories, latent cache, position."""

from __future__ import annotations

import numpy as np

from kimi_cli.config import Config
from kimi_cli.native import F32
from kimi_cli.stream import allocate


class State:
    """State of one sequence of at most `context` positions, initially at position 0.

    `kda[layer]` is [heads, dim, dim] (key by value); `history[layer]` is [3, taps - 1, width], the
    raw q, k, v columns before the next token; `latent[layer]` is [context, rank + rope]. All
    float32, keyed by zero-based layer number. Memory is touched as it is used.
    """

    def __init__(self, config: Config, context: int) -> None:
        self.context = context
        self.position = 0
        self.kda: dict[int, F32] = {}
        self.history: dict[int, F32] = {}
        self.latent: dict[int, F32] = {}
        heads, dim = config.kda_num_heads, config.kda_head_dim
        width = config.kv_lora_rank + config.qk_rope_head_dim
        for layer in range(config.num_hidden_layers):
            if config.is_mla(layer):
                self.latent[layer] = _zeros(context, width)
            else:
                self.kda[layer] = _zeros(heads, dim, dim)
                self.history[layer] = _zeros(3, config.conv_size - 1, heads * dim)

    def clear(self) -> None:
        """Back to position 0; the latent cache is written before it is read."""
        self.position = 0
        for matrices in (self.kda, self.history):
            for array in matrices.values():
                array.fill(0.0)


def _zeros(*shape: int) -> F32:
    size = int(np.prod(shape))
    return np.frombuffer(allocate(max(size, 1) * 4), dtype=np.float32)[:size].reshape(shape)
