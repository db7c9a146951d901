"""The pieces of the model between its matrix products, in plain torch: what they mean.

`fused.py` has the same functions for training, each one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as fn
from torch import Tensor

from tests.builtin.kda import chunked


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, eps inside the root."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mix(sources: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The normed mix of `sources`, each [N, hidden]: their softmax-weighted sum, then rmsnorm.

    A source's score is its own normed value times `weight`, which is the mix's norm weight times
    its projection; the sum is of the raw sources.
    """
    ones = torch.ones_like(weight)
    scores = torch.stack([rmsnorm(v, ones, eps) @ weight for v in sources], -1)
    p = scores.softmax(-1)
    h = sum((p[:, n, None] * v for n, v in enumerate(sources)), torch.zeros_like(sources[0]))
    return rmsnorm(h, norm, eps)


def kda(
    raw: Tensor,
    taps: Tensor,
    z: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    bound: float,
) -> Tensor:
    """KDA from the projections to o [B, T, heads, D], before its norm.

    raw [B, T, 3, heads, D] are Wq x, Wk x, Wv x and taps [3, heads, D, 4] their kernels, the last
    tap the current token's; z [B, T, heads, D] and beta [B, T, heads] are before bias and sigmoid.
    """
    length, dim = raw.shape[1], raw.shape[-1]
    past = fn.pad(raw, (0, 0, 0, 0, 0, 0, taps.shape[-1] - 1, 0))
    conv = sum(past[:, n : n + length] * taps[..., n] for n in range(taps.shape[-1]))
    q, k, v = fn.silu(conv).permute(2, 0, 3, 1, 4)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    rate = a_log.exp()[:, None]
    g = bound * torch.sigmoid(rate * (z + dt_bias.view(z.shape[-2:]))).transpose(1, 2)
    o = chunked(q * dim**-0.5, k, v, g, beta.sigmoid().transpose(1, 2))
    return o.transpose(1, 2)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rmsnorm over the last dimension of x [B, T, heads, D], then times sigmoid(gate)."""
    return rmsnorm(x, weight, eps) * gate.view_as(x).sigmoid()


def situ(both: Tensor, beta: float, linear: float) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear tanh(u / linear), g and u the halves of `both`."""
    g, u = both.chunk(2, -1)
    return beta * torch.tanh(g / beta) * g.sigmoid() * linear * torch.tanh(u / linear)


def spread(x: Tensor, there: Tensor, slots: Tensor) -> Tensor:
    """rows[r] = x[there[r]], zeros where that is -1; token n is in the rows slots[n] [k]."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))[there.long()]


def gather(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights[n, k] rows[slots[n, k]]."""
    return (rows[slots.long()] * weights[..., None]).sum(1)


def entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Nats [N] of `wanted` under logits [N, vocab]."""
    return fn.cross_entropy(logits, wanted, reduction="none")
