"""Rows of achieved, limit and ratio, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_cli.units import format_duration, format_size

BYTES, FLOPS, WEIGHTS, SECONDS, SHARE = "B/s", "op/s", "weights/s", "s", "share"
"""Units of a row; only SECONDS is better when less."""


@dataclass(frozen=True)
class Row:
    """One measurement. `against` says what the limit is: reads of memory, multiply-adds, disk."""

    part: str
    name: str
    unit: str
    achieved: float
    limit: float
    against: str

    @property
    def ratio(self) -> float:
        """1 is as fast as the limit, less is slower."""
        if self.unit == SECONDS:
            return self.limit / self.achieved if self.achieved else 0.0
        return self.achieved / self.limit if self.limit else 0.0


def row_object(row: Row) -> dict[str, Any]:
    """The row in `bench --json`: bytes, operations or weights per second, seconds, or a share."""
    return {
        "name": row.name,
        "unit": row.unit,
        "achieved": row.achieved,
        "limit": row.limit,
        "ratio": row.ratio,
        "against": row.against,
    }


HEADING = f"{'':<42}{'achieved':>13}{'limit':>13}{'ratio':>7}  against\n"


def rows_text(part: str, rows: Sequence[Row]) -> str:
    """The rows of one part under its name."""
    lines = [part]
    for row in rows:
        lines.append(
            f"  {row.name:<40}{quantity(row.achieved, row.unit):>13}"
            f"{quantity(row.limit, row.unit):>13}{row.ratio:>7.2f}  {row.against}"
        )
    return "\n".join(lines) + "\n"


def quantity(value: float, unit: str) -> str:
    """`value` as a person reads it: `21.5 GiB/s`, `180 G/s`, `0.42 s`, `12.3 ms`, `97 %`."""
    if unit == BYTES:
        return f"{format_size(int(value))}/s"
    if unit == SHARE:
        return f"{100 * value:.0f} %"
    if unit == SECONDS:
        return f"{1000 * value:.2f} ms" if value < 0.1 else format_duration(value)
    return f"{value / 1e9:.{1 if value < 1e11 else 0}f} G/s"
