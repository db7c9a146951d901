"""The optimiser: Muon for the matrices of the layers, Adam for everything else.

Muon (Jordan et al., 2024) steps along the momentum made orthogonal by Newton-Schulz iterations;
the step is scaled to Adam's root mean square as in Moonlight (Liu et al., 2025). Matrices of one
shape, all experts' among them, go through the iterations together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

MUON_RATE, ADAM_RATE, DECAY = 8e-3, 4e-3, 0.05
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTUM, _BETAS, _EPS = 0.95, (0.9, 0.95), 1e-10


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """x [n, r, c] with every singular value moved near 1."""
    a, b, c = _COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it: a matrix between hidden widths, so no router, mix or table."""
    if ".layers." not in name or "conv1d" in name:
        return False
    return parameter.dim() > 1 and min(parameter.shape[-2:]) >= 16 and ".gate.weight" not in name


class Optimiser:
    """Both, over a dict of parameters that it updates in place; not for routing biases."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters
        self._groups: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        self._momentum: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._steps = 0
        for name, p in parameters.items():
            if is_matrix(name, p):
                self._groups[p.shape[-2], p.shape[-1]].append(name)
                self._momentum[name] = torch.zeros_like(p)
            else:
                self._moments[name] = torch.zeros_like(p), torch.zeros_like(p)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the peak rates; gradients are used up."""
        self._steps += 1
        for (rows, columns), names in self._groups.items():
            self._muon(names, rows, columns, factor * MUON_RATE)
        b1, b2 = _BETAS
        size = factor * ADAM_RATE * (1 - b2**self._steps) ** 0.5 / (1 - b1**self._steps)
        for name, (first, second) in self._moments.items():
            p = self._parameters[name]
            if p.grad is None:
                continue
            first.lerp_(p.grad, 1 - b1)
            second.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            p.addcdiv_(first, second.sqrt().add_(_EPS), value=-size)
            p.grad = None

    def _muon(self, names: list[str], rows: int, columns: int, rate: float) -> None:
        directions = []
        for name in names:
            grad, momentum = self._parameters[name].grad, self._momentum[name]
            assert grad is not None, name
            momentum.mul_(_MOMENTUM).add_(grad)
            directions.append(grad.add_(momentum, alpha=_MOMENTUM).view(-1, rows, columns))
        counts = [len(direction) for direction in directions]
        updates = orthogonal(torch.cat(directions)).split(counts)
        for name, update in zip(names, updates, strict=True):
            p = self._parameters[name]
            p.mul_(1 - rate * DECAY)
            p.add_(update.reshape(p.shape), alpha=-rate * 0.2 * max(rows, columns) ** 0.5)
            p.grad = None

    def state(self) -> dict[str, Any]:
        """What `load` takes back."""
        return {"momentum": self._momentum, "moments": self._moments, "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self._momentum, self._moments = state["momentum"], state["moments"]
        self._steps = state["steps"]
