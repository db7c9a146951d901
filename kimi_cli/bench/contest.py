"""Taking turns: each contender's best rate of several rounds, so that all meet the same machine.

A busy or throttled machine slows everybody alike; best of five passes leaves that out. The threads
of the operations are held on cores of their own while one is timed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from kimi_cli.threads import working
from kimi_cli.units import MIB

ROUNDS = 5

Contender = Callable[[float], float]
"""Works for about so many seconds; returns its rate."""


@dataclass(frozen=True)
class Effort:
    """How long is measured. Kernels run through `buffer` bytes or `caches` times the caches, if
    memory allows; `tokens` are timed per budget, fewer once `patience` seconds have passed."""

    seconds: float
    disk_seconds: float
    buffer: int
    caches: int
    tokens: int
    patience: float


EFFORTS = {
    "full": Effort(0.2, 0.4, 512 * MIB, 4, 5, 60.0),
    "small": Effort(0.01, 0.05, 32 * MIB, 0, 2, 5.0),
}


def best(
    contenders: Mapping[str, Contender], seconds: float, rounds: int = ROUNDS
) -> dict[str, float]:
    """The best rate of each contender over `rounds` rounds in which they take turns."""
    found = dict.fromkeys(contenders, 0.0)
    for _ in range(rounds):
        for name, contender in contenders.items():
            found[name] = max(found[name], contender(seconds))
    return found


def turns(calls: Sequence[Callable[[], object]], amount: float) -> Contender:
    """Makes `calls` one after another, each worth `amount`, and goes on where it stopped."""
    following = cycle(calls)

    def contender(seconds: float) -> float:
        next(following)()  # wakes the threads, or makes them
        with pinned():
            done, started = 0.0, time.perf_counter()
            while True:
                next(following)()
                done += amount
                spent = time.perf_counter() - started
                if spent >= seconds:
                    return done / spent

    return contender


@contextmanager
def pinned() -> Iterator[None]:
    """This thread and the workers of the operations each on a core of its own, as far as there are
    cores and the system allows it; as before afterwards. Python's other threads stay as they are.
    """
    allowed = os.sched_getaffinity(0)
    mine = threading.get_native_id()
    others = {thread.native_id for thread in threading.enumerate()} | working()
    tasks = [mine, *(task for task in _tasks() if task not in others)]
    places = apart(allowed, _siblings)
    if len(tasks) > len(places):
        yield
        return
    for task, place in zip(tasks, places, strict=False):
        _place(task, {place})
    try:
        yield
    finally:
        for task in tasks:
            _place(task, allowed)


def apart(allowed: set[int], siblings: Callable[[int], set[int]]) -> list[int]:
    """The processors `allowed`: one of every core first, then their siblings."""
    first, rest, seen = list[int](), list[int](), set[int]()
    for cpu in sorted(allowed):
        (rest if cpu in seen else first).append(cpu)
        seen |= siblings(cpu)
    return first + rest


def cpu_list(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the largest caches of all cores together; 0 if the system does not tell."""
    levels: dict[int, dict[str, int]] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError):
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
            scale = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            levels.setdefault(level, {})[shared] = int(size.rstrip("KM")) * scale
    return sum(levels[max(levels)].values()) if levels else 0


def _siblings(cpu: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return cpu_list(path.read_text())
    except (OSError, ValueError):
        return {cpu}


def _tasks() -> list[int]:
    with suppress(OSError):
        return sorted(int(name) for name in os.listdir("/proc/self/task"))
    return []


def _place(task: int, cpus: set[int]) -> None:
    with suppress(OSError):  # it has ended, or a container forbids it
        os.sched_setaffinity(task, cpus)
