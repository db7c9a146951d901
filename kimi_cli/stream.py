"""Reading files at disk speed into buffers that exist already: direct, many in flight, counted.

`DirectFile` hides whether a file system can do O_DIRECT. `Reader` is a pool of threads that fills
buffers in the order asked for, urgent requests first. `Ring` hands out buffer space first in, first
out. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kimi_cli.errors import KimiError, ReadError
from kimi_cli.threads import Worker
from kimi_cli.timing import READ, WAIT, Spans, no_span
from kimi_cli.units import format_size

ALIGN = 4096
"""Offsets, lengths and buffers of direct reads are multiples of this."""
HUGE_FROM = 4 << 20
"""Allocations from here on ask for huge pages: direct reads into small pages, a thousand pieces a
request, have been measured at a third of the disk's speed. A region takes no more for it than its
own size, so this is for memory that is planned in full."""
CALL_BYTES = 8 << 20
"""One read call asks for at most this much."""


def round_up(count: int, unit: int = ALIGN) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit


def allocate(size: int) -> memoryview:
    """`size` zeroed bytes on page boundaries, huge pages advised; untouched pages cost nothing."""
    try:
        region = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise KimiError(
            f"the system refused {format_size(size)} of the memory that was planned "
            f"({error.strerror}): lower --ram, or allow the process more"
        ) from None
    if size >= HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


class DirectFile:
    """A file open for reading past the page cache where its file system allows that.

    Direct reads are tried for real once, since some file systems accept O_DIRECT at open and fail
    at the read. Otherwise reads are buffered and the pages dropped behind. Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._direct_fd = -1
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            raise ReadError(f"{path}: cannot be opened: {error.strerror}") from None
        self._try_direct()

    def _try_direct(self) -> None:
        direct = -1
        try:
            direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            with allocate(ALIGN) as probe:
                os.preadv(direct, [probe], 0)
        except OSError:
            if direct >= 0:
                os.close(direct)
            return
        os.close(self._fd)
        self._fd = self._direct_fd = direct

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._fd == self._direct_fd

    def read(self, offset: int, length: int, buffer: memoryview, name: str = "") -> int:
        """Reads `length` bytes at `offset` into `buffer`; returns where in it they begin.

        `buffer` is page-aligned and holds the surrounding aligned range. Raises ReadError, whose
        text has the `name` of what lies there.
        """
        start = offset // ALIGN * ALIGN
        lead = offset - start
        want = lead + length
        room = round_up(want)
        if len(buffer) < room:
            raise ValueError(f"buffer of {len(buffer)} bytes for {room}")
        done = 0
        while done < want:
            end = min(room, done + CALL_BYTES)
            fd = self._fd
            direct = fd == self._direct_fd  # another thread may fall back meanwhile
            try:
                count = os.preadv(fd, [buffer[done:end]], start + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._fall_back()
                    continue
                raise ReadError(
                    f"{self.path}: reading {_what(length, name)} at {offset} failed: "
                    f"{error.strerror}"
                ) from None
            done += count
            if count == 0 or (done < want and start + done >= os.fstat(fd).st_size):
                raise ReadError(
                    f"{self.path}: ends at byte {start + done}, wanted {_what(length, name)} at "
                    f"{offset}: the file has been cut short"
                )
            if done < want and count % ALIGN and direct:
                done -= count % ALIGN  # a direct read must go on from an aligned offset
                if count < ALIGN:
                    self._fall_back()
        if not self.direct:
            os.posix_fadvise(self._fd, start, room, os.POSIX_FADV_DONTNEED)
        return lead

    def _fall_back(self) -> None:
        """Buffered reads from now on: this file system only pretends to read directly.

        The direct descriptor stays open: another thread may be reading from it.
        """
        with self._lock:
            if not self.direct:
                return
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ReadError(f"{self.path}: cannot be opened: {error.strerror}") from None

    def close(self) -> None:
        """Closes the file; no read may be running."""
        for fd in {self._fd, self._direct_fd} - {-1}:
            os.close(fd)
        self._fd = self._direct_fd = -1


def _what(length: int, name: str) -> str:
    return f"{length} bytes of {name}" if name else f"{length} bytes"


class Ticket:
    """One request in flight. `wait` returns when its buffer is filled and checked."""

    __slots__ = ("_error", "_event", "_label", "_span", "lead", "work")

    def __init__(self, work: Callable[[], int], label: str = "", span: Spans = no_span) -> None:
        self.work = work
        self._label, self._span = label, span
        self.lead = 0
        self._error: BaseException | None = None
        self._event = threading.Event()

    def run(self) -> None:
        """Called by a reader thread, once."""
        try:
            with self._span(READ, self._label):
                self.lead = self.work()
        except BaseException as error:  # carried to the thread that waits
            self._error = error
        self._event.set()

    @property
    def ready(self) -> bool:
        return self._event.is_set()

    def wait(self) -> int:
        """Blocks until done; returns what `work` returned or raises what it raised."""
        if not self.ready:
            with self._span(WAIT, self._label):
                self._event.wait()
        if self._error is not None:
            raise self._error
        return self.lead


class Reader:
    """A pool of threads that run requests in order, urgent ones before all others.

    One thread submits; `close` waits for the requests that have begun and drops the rest. Requests
    and waits are spans of `span`, which requests may use for parts of theirs. Raises KimiError
    where the system has no more threads.
    """

    def __init__(self, threads: int, span: Spans = no_span) -> None:
        self.span = span
        self._queues: tuple[deque[Ticket], deque[Ticket]] = (deque(), deque())
        self._wake = threading.Condition()
        self._closed = False
        self._threads: list[Worker] = []
        try:
            for i in range(threads):
                self._threads.append(Worker(self._serve, f"kimi-read-{i}"))
        except BaseException:
            self.close()
            raise

    def submit(self, work: Callable[[], int], urgent: bool = False, label: str = "") -> Ticket:
        """Queues `work`, which reads and checks one buffer and returns where the bytes begin."""
        ticket = Ticket(work, label, self.span)
        with self._wake:
            self._queues[0 if urgent else 1].append(ticket)
            self._wake.notify()
        return ticket

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not (self._queues[0] or self._queues[1]):
                    self._wake.wait()
                if self._closed:
                    return
                ticket = (self._queues[0] or self._queues[1]).popleft()
            ticket.run()

    def close(self) -> None:
        """Stops the threads; requests not begun are never run."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()


class Ring:
    """Buffer space handed out and given back in the same order, never split.

    |....[tail: oldest in use ... newest in use :head]....|      or wrapped:
    |newest :head]............[tail: oldest ...  ][unused]|
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._head = 0
        self._held: deque[tuple[int, int]] = deque()

    def take(self, length: int) -> memoryview | None:
        """`length` bytes (rounded up to ALIGN), or None while there is no room."""
        length = round_up(length)
        if length > self._size:
            raise ValueError(f"{length} bytes never fit a ring of {self._size}")
        start = self._head
        if self._held:
            tail = self._held[0][0]
            if start > tail and start + length > self._size:
                start = 0
            if start <= tail and start + length > tail:
                return None
        elif start + length > self._size:
            start = 0
        self._held.append((start, length))
        self._head = start + length
        return self._buffer[start : start + length]

    def give_back(self) -> None:
        """Frees the oldest piece still held."""
        self._held.popleft()
