"""Kimi Delta Attention in two forms: the recurrence, and the same in chunks for training.

Both take q, k, v, g [B, H, T, D] and beta [B, H, T] and give o [B, H, T, D]; q and k are already
normalised and q scaled, g is the logarithm of the decay, in (gate_lower_bound, 0). The state is
zero at the start.

The chunked form unrolls the recurrence inside a chunk of C tokens. With G the running sum of g in
the chunk and S the state [D, D] at its start, each token writes k_t u_t^T, where

    u_t = beta_t (v_t - (k_t * e^G_t) S - sum_{i<t} ((k_t * e^(G_t - G_i)) . k_i) u_i)

which is one unit lower triangular system for the chunk; the state then goes through the chunk by
S' = M S + N. The pairs e^(G_t - G_i) are products of two factors about the chunk's middle: with a
bound of -5 and 16 tokens no factor exceeds e^40 and no product, masked or not, e^80.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as fn
from torch import Tensor

CHUNK = 16
"""Tokens; 16 * |gate_lower_bound| must stay below 88, the logarithm of the largest float32."""


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token, as the model is defined."""
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        write = beta[:, :, t, None] * (v[:, :, t] - read)
        state = state + k[:, :, t, :, None] * write[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, 2)


class _UnitInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [..., C, C]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
        x = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        xt = x.transpose(-1, -2)
        return -(xt @ grad @ xt)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """The same, chunk by chunk; the last one is filled up with tokens that do nothing."""
    b, h, length, d = q.shape
    n = -(-length // chunk)
    missing = n * chunk - length
    q, k, v, g = (fn.pad(x, (0, 0, 0, missing)) for x in (q, k, v, g))
    beta = fn.pad(beta, (0, missing))
    q, k, v, g = (x.reshape(b * h, n, chunk, -1) for x in (q, k, v, g))
    beta = beta.reshape(b * h, n, chunk, 1)
    total = g.cumsum(2)
    centred = total - total[:, :, chunk // 2 - 1, None]
    rise, fall = centred.exp(), (-centred).exp()
    grown = total.exp()
    pairs = torch.cat((k * rise * beta, q * rise), 2) @ (k * fall).transpose(2, 3)
    inverse = _UnitInverse.apply(pairs[:, :, :chunk].tril(-1))
    seen = pairs[:, :, chunk:].tril()
    solved = inverse @ (torch.cat((k * grown, v), 3) * beta)  # what is read and written
    left = (k * (total[:, :, -1:] - total).exp()).transpose(2, 3)
    step = left @ solved  # [D, D + Dv]: the state's loss and gain
    decay = torch.diag_embed(grown[:, :, -1]) - step[..., :d]
    states = [q.new_zeros(b * h, d, v.shape[3])]
    for m, gain in zip(decay.unbind(1)[:-1], step[..., d:].unbind(1)[:-1], strict=True):
        states.append(torch.baddbmm(gain, m, states[-1]))
    within = seen @ solved
    out = (q * grown - within[..., :d]) @ torch.stack(states, 1) + within[..., d:]
    return out.reshape(b, h, n * chunk, -1)[:, :, :length]
