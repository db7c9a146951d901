"""Weights as the checkpoint will store them, while they are trained: straight-through rounding.

The forward pass uses the rounded value, the gradient passes to the float32 master unchanged.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_MIN = -40
"""No scale below 2^-40: a group of zeros gets this one."""

_MIDPOINTS = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)])


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(nibbles uint8 [..., in], exponents int32 [..., in / 32]) nearest to `weight` [..., in].

    The exponent is the one whose largest magnitude, 6, is nearest to the group's: a largest value
    of 7 * 2^e or more gets e + 1. Halves round away from zero.
    """
    groups = weight.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(most)  # most = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 3 + (mantissa >= 0.875).int()
    exponent = torch.where(most > 0, exponent, EXPONENT_MIN).clamp_min(EXPONENT_MIN)
    scaled = torch.ldexp(groups, -exponent[..., None])
    codes = torch.bucketize(scaled.abs(), _MIDPOINTS, right=True)
    codes = codes + 8 * (torch.signbit(scaled) & (codes > 0))
    return codes.flatten(-2).to(torch.uint8), exponent


def mxfp4(weight: Tensor) -> Tensor:
    """`weight` [..., in] rounded to MXFP4, as float32; same rule as `mxfp4_codes`."""
    groups = weight.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**EXPONENT_MIN)
    mantissa, exponent = torch.frexp(most)
    scale = torch.ldexp(torch.ones_like(most), exponent - 3 + (mantissa >= 0.875).int())
    scaled = groups / scale
    size = scaled.abs().clamp_max(6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = torch.floor(size / step + 0.5) * step
    return (torch.copysign(rounded, scaled) * scale).flatten(-2)


class _StraightMxfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return mxfp4(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _StraightBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def is_expert(name: str) -> bool:
    """Whether the parameter `name` is a stack of one routed matrix of every expert."""
    return ".experts." in name


def is_float32(name: str) -> bool:
    """Whether the checkpoint stores the tensor `name` in float32."""
    ends = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    return name.endswith(ends)


def stored(name: str, weight: Tensor) -> Tensor:
    """`weight` as the checkpoint stores the tensor `name`, with a straight-through gradient."""
    if is_expert(name):
        return _StraightMxfp4.apply(weight)
    return weight if is_float32(name) else _StraightBf16.apply(weight)
