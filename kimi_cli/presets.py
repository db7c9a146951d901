"""Names for common budgets, and what each of them holds. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kimi_cli.config import Config
from kimi_cli.errors import UsageError
from kimi_cli.plan import Plan, Request, grow, smallest_plan, walk
from kimi_cli.trunk import Unit
from kimi_cli.units import GIB

PRESETS = {
    **{f"{size}g": size * GIB for size in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384)},
    **{"512g": 512 * GIB, "768g": 768 * GIB, "1t": 1024 * GIB, "1.5t": 1536 * GIB},
}
"""Bytes of each preset; with the last one the released model is resident as a whole."""


@dataclass(frozen=True)
class Preset:
    """One line of the table. `plan` is None where the budget does not fit."""

    name: str
    budget: int
    plan: Plan | None


def preset_budget(name: str) -> int:
    """Bytes of the preset called `name`. Raises UsageError, which lists them."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise UsageError(f"there is no preset {name!r}: wanted {', '.join(PRESETS)}") from None


def preset_table(
    config: Config,
    units: Sequence[Unit],
    request: Request,
    base: dict[str, int],
    contiguous: bool = True,
) -> list[Preset]:
    """Every preset with its plan; the arguments are those of `make_plan`."""
    segments = walk(units)
    floor = smallest_plan(config, units, request, base, contiguous, segments)

    def planned(budget: int) -> Plan | None:
        if floor.total > budget:
            return None
        return grow(config, units, request, replace(floor, budget=budget), segments)

    return [Preset(name, budget, planned(budget)) for name, budget in PRESETS.items()]
