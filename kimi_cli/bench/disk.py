"""Reading the model's files as the engine does, against the most their disk gives.

The engine's way: READERS threads, buffers asked for ahead, every block of the trunk checksummed.
The limit: the same ranges, read directly by many threads that do nothing else.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kimi_cli import gauge, native
from kimi_cli.bench.contest import Contender, best
from kimi_cli.bench.table import BYTES, Row
from kimi_cli.engine import READERS
from kimi_cli.layout import BLOCK
from kimi_cli.plan import FLOOR_SLOTS, RING
from kimi_cli.stream import ALIGN, DirectFile, Reader, Ticket, allocate, round_up
from kimi_cli.threads import Worker

MOST = 8
"""Threads that read at once to find the limit."""
HUGE = 64 << 20
"""Bytes of buffers that are sure to be given huge pages, which direct reads are fastest into."""

Place = tuple[DirectFile, int]
"""A file, and where in it to begin."""


@dataclass(frozen=True)
class Files:
    """What is read: files of trunk blocks, files of experts, and bytes of one expert."""

    blocks: Sequence[Path]
    extents: Sequence[Path]
    extent: int


@dataclass(frozen=True)
class Speeds:
    """Bytes a second: as the engine reads, and at most. `direct`: past the page cache."""

    blocks: float
    extents: float
    most_blocks: float
    most_extents: float
    direct: bool

    @property
    def rows(self) -> list[Row]:
        against = f"the same reads, {MOST} at once"
        return [
            Row("disk", "trunk blocks in order", BYTES, self.blocks, self.most_blocks, against),
            Row("disk", "experts at random", BYTES, self.extents, self.most_extents, against),
        ]


class Disk:
    """The files of a model, open for reading. `close` it; one thread uses it."""

    def __init__(self, files: Files) -> None:
        """Raises ReadError."""
        self._files = contextlib.ExitStack()
        try:
            self._blocks = self._open(files.blocks)
            self._extents = self._open(files.extents)
        except BaseException:
            self.close()
            raise
        self._block = min(BLOCK, max(file.size for file in self._blocks))
        self._extent = min(files.extent, max(file.size for file in self._extents))
        self._chance = random.Random(0)
        self._order = self._in_order()
        # as the engine has them: a ring as in the smallest plan, and as many slots
        self._ring = _cut(allocate(RING), round_up(self._block) + ALIGN, gauge.IN_FLIGHT)
        size = round_up(self._extent) + ALIGN
        self._slots = _cut(allocate(FLOOR_SLOTS * size), size, FLOOR_SLOTS)
        size = max(size, round_up(self._block) + ALIGN)
        self._most = _cut(allocate(max(MOST * size, HUGE)), size, MOST)

    def _open(self, paths: Sequence[Path]) -> list[DirectFile]:
        opened = []
        for path in paths:
            opened.append(DirectFile(path))
            self._files.callback(opened[-1].close)
        return opened

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    @property
    def direct(self) -> bool:
        """Whether all are read past the page cache."""
        return all(file.direct for file in (*self._blocks, *self._extents))

    def _in_order(self) -> Iterator[Place]:
        while True:
            for file in self._blocks:
                for offset in range(0, file.size - self._block + 1, self._block):
                    yield file, offset

    def _at_random(self) -> Iterator[Place]:
        whole = [file for file in self._extents if file.size >= self._extent]
        while True:
            file = self._chance.choice(whole)
            yield file, self._chance.randrange(file.size - self._extent + 1)

    def blocks(self, seconds: float) -> float:
        """Trunk blocks one after another as the engine reads them, bytes a second. A Contender."""
        return self._as_engine(self._order, self._block, self._ring, native.crc32c, seconds)

    def extents(self, seconds: float) -> float:
        """Experts at random as the engine reads them, bytes a second. A Contender."""
        return self._as_engine(self._at_random(), self._extent, self._slots, None, seconds)

    def most_blocks(self, seconds: float) -> float:
        """The most that reading trunk blocks gives, bytes a second. A Contender."""
        return self._at_most(self._order, self._block, seconds)

    def most_extents(self, seconds: float) -> float:
        """The most that reading experts gives, bytes a second. A Contender."""
        return self._at_most(self._at_random(), self._extent, seconds)

    def _as_engine(
        self,
        places: Iterator[Place],
        size: int,
        buffers: Sequence[memoryview],
        check: Callable[[memoryview], int] | None,
        seconds: float,
    ) -> float:
        reader = Reader(READERS)
        flying: deque[tuple[memoryview, Ticket]] = deque()
        free = deque(buffers)
        done, started = 0, time.perf_counter()
        try:
            while flying or not done:
                while free and time.perf_counter() - started < seconds:
                    buffer = free.popleft()
                    flying.append((buffer, reader.submit(_work(next(places), size, buffer, check))))
                buffer, ticket = flying.popleft()
                ticket.wait()
                free.append(buffer)
                done += size
            return done / (time.perf_counter() - started)
        finally:
            reader.close()

    def _at_most(self, places: Iterator[Place], size: int, seconds: float) -> float:
        lock, failures = threading.Lock(), list[BaseException]()
        done = 0

        def serve(buffer: memoryview) -> None:
            nonlocal done
            try:
                while True:
                    with lock:
                        file, offset = next(places)
                    file.read(offset, size, buffer)
                    with lock:
                        done += size
                    if time.perf_counter() - started >= seconds:
                        return
            except BaseException as error:  # carried to the thread that waits
                failures.append(error)

        started = time.perf_counter()
        workers = [Worker(partial(serve, b), "kimi-read") for b in self._most]
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return done / (time.perf_counter() - started)


def measure_disk(disk: Disk, seconds: float) -> Speeds:
    """Each way of reading, best of several turns."""
    contenders: dict[str, Contender] = {
        "blocks": disk.blocks,
        "most_blocks": disk.most_blocks,
        "extents": disk.extents,
        "most_extents": disk.most_extents,
    }
    return Speeds(**best(contenders, seconds), direct=disk.direct)


def model_files(trunk: Path, shards: Sequence[Path], extent: int) -> Files:
    """The files of a model's trunk and experts, the small ones left out."""
    return Files(_larger(sorted(trunk.glob("*.safetensors"))), _larger(shards), extent)


def _larger(paths: Sequence[Path]) -> list[Path]:
    sizes = {path: path.stat().st_size for path in paths}
    return [path for path, size in sizes.items() if 2 * size >= max(sizes.values())]


def _cut(memory: memoryview, size: int, most: int) -> list[memoryview]:
    """Up to `most` buffers of `size` bytes."""
    count = min(most, len(memory) // size)
    return [memory[n * size : (n + 1) * size] for n in range(count)]


def _work(
    place: Place, size: int, buffer: memoryview, check: Callable[[memoryview], int] | None
) -> Callable[[], int]:
    file, offset = place

    def work() -> int:
        lead = file.read(offset, size, buffer)
        if check is not None:
            check(buffer[lead : lead + size])
        return lead

    return work
