"""Stretches of many files read once each, several at a time, in memory that does not grow.

What the bytes mean is the caller's; it keeps what it learns in its own jobs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kimi_cli.stream import ALIGN, CALL_BYTES, DirectFile, Reader, Ticket, allocate

PIECE = CALL_BYTES
"""The most bytes that are looked at together."""
IN_FLIGHT = 8
"""Jobs at work at once, each with a buffer and a thread that mostly waits for the disk."""

Job = TypeVar("Job")


class Files:
    """Files opened as they are needed; a context manager. Threads may share it."""

    def __init__(self) -> None:
        self._files: dict[Path, DirectFile] = {}
        self._lock = threading.Lock()

    def pieces(
        self, path: Path, offset: int, length: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """The `length` bytes at `offset` of the file at `path`, in order, in `buffer`, at most
        PIECE at once; a piece is gone with the next. Raises ReadError."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = DirectFile(path)
        for at in range(0, length, PIECE):
            size = min(PIECE, length - at)
            lead = file.read(offset + at, size, buffer)
            yield buffer[lead : lead + size]

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def sweep(
    jobs: Iterable[Job], work: Callable[[Job, memoryview], None]
) -> Generator[Job, None, None]:
    """Every one of `jobs` in their order, once `work` has been called with it.

    `work` runs on other threads, IN_FLIGHT at once, each with a buffer fit for Files.pieces. What
    it raises is raised here. Close the iterator: no work is running after that.
    """
    reader = Reader(IN_FLIGHT)
    free = [allocate(PIECE + 2 * ALIGN) for _ in range(IN_FLIGHT)]
    flying = deque[tuple[Job, memoryview, Ticket]]()

    def submit(job: Job, buffer: memoryview) -> Ticket:
        def run() -> int:
            work(job, buffer)
            return 0

        return reader.submit(run)

    try:
        for job in jobs:
            if not free:
                first, buffer, ticket = flying.popleft()
                ticket.wait()
                free.append(buffer)
                yield first
            buffer = free.pop()
            flying.append((job, buffer, submit(job, buffer)))
        for first, _, ticket in flying:
            ticket.wait()
            yield first
    finally:
        reader.close()
