"""Routing, and the weighted sum of the chosen experts' MLPs by one product per matrix for all.

The tokens of each expert are spread into rows of equal number, empty rows being zero, so that
every expert is a slice of a batched product. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """`chosen` int64 and `weights` float32, both [N, k], in no order within a row; `load` [E] is
    how many tokens chose each expert."""

    chosen: Tensor
    weights: Tensor
    load: Tensor


def route(scores: Tensor, bias: Tensor, k: int, scaling: float) -> Routing:
    """Chooses k experts for each row of `scores` [N, E], before the sigmoid; the bias steers the
    choice only."""
    s = scores.sigmoid()
    chosen = (s.detach() + bias).topk(k, -1, sorted=False).indices
    weights = s.gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
    return Routing(chosen, weights, torch.bincount(chosen.flatten(), minlength=len(bias)))


def routed_sum(
    z: Tensor,
    routing: Routing,
    first: Tensor,
    second: Tensor,
    activation: Callable[[Tensor], Tensor],
    ops: ModuleType,
) -> Tensor:
    """sum_e weight_e * w2_e act(w1_e z, w3_e z) for each row of z [N, latent].

    `first` is w1 above w3 [E, 2 * inner, latent], `second` w2 [E, latent, inner].
    """
    tokens, k = routing.chosen.shape
    experts, flat = len(first), routing.chosen.flatten()
    rows = int(routing.load.max())
    order = flat.argsort(stable=True)
    owner = flat[order]
    starts = routing.load.cumsum(0) - routing.load
    places = owner * rows + torch.arange(len(flat)) - starts[owner]
    slots = torch.empty(len(flat), dtype=torch.int32)
    slots[order] = places.int()
    slots = slots.view(tokens, k)
    there = torch.full((experts * rows,), -1, dtype=torch.int32)
    there[places] = (order // k).int()
    x = ops.spread(z, there, slots).view(experts, rows, -1)
    y = torch.bmm(activation(torch.bmm(x, first.transpose(1, 2))), second.transpose(1, 2))
    return ops.gather(y.flatten(0, 1), slots, routing.weights)
