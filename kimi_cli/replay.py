"""Routing traces: written by a run, replayed against every cache policy at any capacity.

A trace is a text file, one line per token and layer in the order of the run:

    {"position": 12, "layer": 3, "experts": [17, 4, 211, ...]}          best-ranked first

The replay is of single tokens, as in decoding. A hit is an expert that was in memory before its
layer began. The ceiling is Belady's policy, which knows the future: it evicts what is needed last.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kimi_cli import console
from kimi_cli.cache import Key, Lru, Policy, Ranked
from kimi_cli.durable import create, scratch
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.jsonfile import parse_json
from kimi_cli.native import F32

_LONGEST_LINE = 1 << 16
"""Bytes; a layer's choice of 256 experts takes 2 KB."""
POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "ranked": Ranked}


@dataclass(frozen=True)
class Step:
    """One layer's choice for one token, best-ranked expert first."""

    layer: int
    experts: tuple[int, ...]


class TraceWriter:
    """Writes a trace while a model runs; a context manager whose `trace` fits `Model`.

    The file appears under its name at the end, also of a run that was interrupted. Raises KimiError
    if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = scratch(path)
        try:
            self._file = os.fdopen(create(self._part), "w", encoding="ascii")
        except OSError as error:
            raise self._failed(error) from None

    def trace(self, layer: int, position: int, ids: NDArray[np.int32], weights: F32) -> None:
        """Appends one line for each of the tokens of `ids` [T, k], the first at `position`."""
        for offset, experts in enumerate(ids.tolist()):
            line = {"position": position + offset, "layer": layer, "experts": experts}
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as failure:
                raise self._failed(failure) from None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
            os.replace(self._part, self._path)
        except OSError as failure:
            with suppress(OSError):
                self._part.unlink()
            if error is None:
                raise self._failed(failure) from None

    def _failed(self, error: OSError) -> KimiError:
        return KimiError(f"{self._path}: cannot be written: {error.strerror}")


def read_trace(path: Path) -> list[Step]:
    """The steps of a trace, by position and then layer. Raises UsageError naming a bad line."""
    steps = []
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE)
                if not line:
                    break
                steps.append(_parse(line, f"{path}: line {number}"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if not steps:
        raise UsageError(f"{path}: an empty trace: write one with kimi generate --trace")
    return [step for _, step in sorted(steps, key=lambda found: found[0])]


def _parse(line: bytes, where: str) -> tuple[tuple[int, int], Step]:
    try:
        data = parse_json(line)
        position, layer, experts = data["position"], data["layer"], data["experts"]
        whole = all(type(n) is int and n >= 0 for n in (position, layer, *experts))
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole or not experts or len(set(experts)) != len(experts):
        raise UsageError(f"{where}: not a line of a trace: want position, layer and experts")
    return (position, layer), Step(layer, tuple(experts))


def hit_rate(steps: Sequence[Step], policy: Policy) -> float:
    """Share of requested experts that were in memory before their layer began."""
    hits = requests = 0
    for step in steps:
        policy.visit(step.layer, step.experts, range(len(step.experts)))
        slots = [policy.lookup((step.layer, expert)) for expert in step.experts]
        busy = {slot for slot in slots if slot is not None}
        hits += len(busy)
        requests += len(slots)
        for expert, slot in zip(step.experts, slots, strict=True):
            if slot is None:  # the slots of this layer come free again as it is computed
                place = policy.place((step.layer, expert), busy)
                if place is None:
                    policy.place((step.layer, expert), ())
    return hits / requests


def optimal_hit_rate(steps: Sequence[Step], capacity: int) -> float:
    """The hit rate of Belady's policy: what no policy of this capacity can exceed."""
    uses: dict[Key, list[int]] = defaultdict(list)
    for time, step in enumerate(steps):
        for expert in step.experts:
            uses[step.layer, expert].append(time)

    def following(key: Key, time: int) -> int:
        times = uses[key]
        at = bisect_right(times, time)
        return times[at] if at < len(times) else len(steps)

    held: dict[Key, int] = {}
    hits = requests = 0
    for time, step in enumerate(steps):
        keys = [(step.layer, expert) for expert in step.experts]
        hits += sum(key in held for key in keys)
        requests += len(keys)
        for key in keys:
            held[key] = following(key, time)
        if len(held) > capacity:
            kept = sorted(held.items(), key=lambda item: item[1])[:capacity]
            held = dict(kept)
    return hits / requests


def table(steps: Sequence[Step], capacities: Iterable[int]) -> Iterator[dict[str, float]]:
    """For each capacity: `slots`, the hit rate of every policy, and `optimal`."""
    for capacity in capacities:
        rates = {name: hit_rate(steps, make(capacity)) for name, make in POLICIES.items()}
        yield {"slots": capacity, **rates, "optimal": optimal_hit_rate(steps, capacity)}


def show(path: Path, slots: str) -> None:
    """Prints a table of hit rates; `slots` is `4,48,...`. Raises UsageError."""
    words = slots.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", word, re.ASCII) for word in words):
        raise UsageError(f"--slots wants numbers with commas between, like 4,48, not {slots!r}")
    steps = read_trace(path)
    console.put("  slots" + "".join(f"{name:>10}" for name in (*POLICIES, "optimal")) + "\n")
    for row in table(steps, map(int, words)):
        rates = "".join(f"{rate:>9.1%} " for name, rate in row.items() if name != "slots")
        console.put(f"{row['slots']:>7}{rates}".rstrip() + "\n")
