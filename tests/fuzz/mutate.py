"""Changes to inputs that keep their form: one value of a JSON text, or one line of several.

Bytes changed at random seldom leave a JSON text whole; what is behind the parser would not be met.
"""

from __future__ import annotations

import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 31, 255, 4096, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1,
    1 << 63, 10**18, 10**40, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "a", "0", "-1", "\0",
    "../x", "/", "\ud800", "\x1b[2J", "é" * 50, "x" * 5000, [], [0], [[]], {}, {"": 0},
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    """`data` with one change to one of its JSON texts; None where it holds none."""
    before, rest = b"", data
    if rest[:1].isdigit():  # of `either`
        before, rest = rest[:1], rest[1:]
    if _framed(rest) is None and b"\0" in rest:  # of the tokenizer's two files
        ranks, zero, rest = rest.partition(b"\0")
        before += ranks + zero
    changed = _mutate_header(rest, rng) or mutate_json(rest, rng) or _mutate_line(rest, rng)
    return None if changed is None else before + changed


def _mutate_header(data: bytes, rng: random.Random) -> bytes | None:
    framed = _framed(data)
    changed = mutate_json(framed[1], rng) if framed else None
    if framed is None or changed is None:
        return None
    if rng.random() < 0.9:
        changed += b" " * max(0, framed[0] - len(changed))
    return len(changed).to_bytes(8, "little") + changed + framed[2]


def _mutate_line(data: bytes, rng: random.Random) -> bytes | None:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if rng.random() < 0.2:
        lines.insert(at, rng.choice(lines))
        return b"\n".join(lines)
    line = mutate_json(lines[at], rng)
    if line is None:
        return None
    lines[at] = line
    return b"\n".join(lines)


def _framed(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Length, header and rest of what begins as a safetensors file does."""
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= len(data) - 8 or data[8:9] != b"{":
        return None
    return size, data[8 : 8 + size], data[8 + size :]


def mutate_json(text: bytes, rng: random.Random) -> bytes | None:
    """A JSON text with one value or key changed; None if `text` is not JSON."""
    try:
        value = json.loads(text)
        places: list[tuple[Any, Any]] = []
        if isinstance(value, dict | list):
            _collect(value, places)
        if not places:
            return json.dumps(rng.choice(VALUES)).encode()
        _change(places, rng)
        return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        places.append((value, key))
        if isinstance(inner, dict | list):
            _collect(inner, places)


def _change(places: list[tuple[Any, Any]], rng: random.Random) -> None:
    holder, key = rng.choice(places)
    other, from_key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = other[from_key] if other[from_key] is not holder else None
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(("", "a", "\ud800", str(from_key)))] = holder.pop(key)
    elif kind == 3 and isinstance(holder, list):
        holder.insert(key, rng.choice(VALUES))
    elif kind == 4 and type(holder[key]) is int:
        holder[key] += rng.choice((-4096, -1, 1, 4096, 1 << 32, -2 * holder[key]))
    elif kind == 5 and isinstance(holder[key], str) and holder[key]:
        cut = rng.randrange(len(holder[key]))
        holder[key] = holder[key][:cut] + rng.choice(("", '"', "\0", "é", holder[key]))
    elif kind == 6:
        for _ in range(rng.choice((1, 3, 950))):
            holder[key] = [holder[key]]
    else:
        holder[key] = rng.choice(VALUES)
