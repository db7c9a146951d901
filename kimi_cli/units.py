"""Sizes and durations as people write and read them. Pure functions, no I/O."""

from __future__ import annotations

import re

from kimi_cli.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SCALE = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([bkmgt]?)(?:ib?|b)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes meant by `text`: `8G`, `8GiB`, `1.5g`, `160M`, `1073741824`.

    Every prefix is binary: 8G is 8 GiB. Raises UsageError when `text` is not a positive size.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _SCALE[match[2].lower()]) if match and len(match[1]) < 20 else 0
    if size <= 0:
        raise UsageError(f"size {text!r} is not understood: write 8G, 512M, 1.5GiB or plain bytes")
    return size


def format_size(count: int) -> str:
    """`count` bytes with a binary unit and three significant digits or so: `1.50 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < (1024 if unit == "B" else 1023.5):  # which is shown as 1024
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.{2 if abs(value) < 100 else 0}f} {unit}"


def format_duration(seconds: float) -> str:
    """`seconds` as a person says it: `0.42 s`, `12 s`, `3 min 05 s`, `2 h 14 min`, `3 d 4 h`."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
