"""What ran when: spans of reading, waiting and computing, and the Chrome trace that shows them.

    MainThread     | token .................................................... |
                   |  | layer 3 ............................................ |
                   |  |  | mla ................ | moe ..................... |
                   |  |  |  | q_a_proj | wait .. |   | expert 3.17 | wait .. |
    kimi-read-0    | lm_head ...... | 3.17 ........ | .......
                   |        | check | |      | check |

A `Span` is a named time on one thread; spans of one thread nest. Model and Reader are given a
`Spans`, a function that opens one; without a recorder it is `no_span`, which does nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kimi_cli.durable import create, scratch
from kimi_cli.errors import KimiError

TOKEN, LAYER, KERNEL, READ, CHECK, WAIT = "token", "layer", "kernel", "read", "check", "wait"
"""Kinds of span: a pass over the model, a part of it, one product or the like, a request to the
disk, the checksum inside it, and the model waiting for a request."""


class Span(NamedTuple):
    """`begin` and `end` are nanoseconds of the monotonic clock."""

    kind: str
    name: str
    thread: str
    begin: int
    end: int


Sink = Callable[[Span], None]
"""Takes a span that has ended; called by the thread whose span it is."""
Spans = Callable[[str, str], AbstractContextManager[None]]
"""`with spans(kind, name):` makes a span of what is inside."""

_NOTHING = nullcontext()


def no_span(kind: str, name: str) -> AbstractContextManager[None]:
    """Nobody is listening."""
    return _NOTHING


class _Open:
    """A span that has begun."""

    __slots__ = ("_begin", "_kind", "_name", "_sink")

    def __init__(self, sink: Sink, kind: str, name: str) -> None:
        self._sink, self._kind, self._name = sink, kind, name

    def __enter__(self) -> None:
        self._begin = time.monotonic_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = time.monotonic_ns()
        thread = threading.current_thread().name
        self._sink(Span(self._kind, self._name, thread, self._begin, end))


def recorder(sink: Sink) -> Spans:
    """Spans that are given to `sink` as they end."""

    def spans(kind: str, name: str) -> AbstractContextManager[None]:
        return _Open(sink, kind, name)

    return spans


class TraceFile:
    """A Chrome trace (JSON; Perfetto and chrome://tracing open it) written as spans end.

    A context manager; `add` is a Sink for any number of threads. The file appears under its name
    at the end, whole even if what was traced was interrupted.
    """

    def __init__(self, path: Path) -> None:
        """Raises KimiError if the file cannot be written; so do the other methods."""
        self._path = path
        self._part = scratch(path)
        self._lock = threading.Lock()
        self._threads: dict[str, int] = {}
        self._origin = time.monotonic_ns()
        self._failure: OSError | None = None
        try:
            self._file = os.fdopen(create(self._part), "w", encoding="utf-8")
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            self._file.write(_event("process_name", 0, ph="M", args={"name": "kimi"}))
        except OSError as error:
            raise self._failed(error) from None

    def add(self, span: Span) -> None:
        """Appends one span. A failure is kept for the end: it is no reason to stop computing."""
        with self._lock:
            try:
                known = self._threads.get(span.thread)
                if known is None:
                    known = self._threads[span.thread] = len(self._threads)
                    args = {"name": span.thread}
                    self._file.write(",\n" + _event("thread_name", known, ph="M", args=args))
                micro = (span.begin - self._origin) / 1000, (span.end - span.begin) / 1000
                event = _event(span.name, known, ph="X", cat=span.kind, ts=micro[0], dur=micro[1])
                self._file.write(",\n" + event)
            except OSError as error:
                self._failure = self._failure or error
            except ValueError:  # closed: a reader's last request, after an interruption
                pass

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            try:
                self._file.write("\n]}\n")
                self._file.close()
                if self._failure is not None:
                    raise self._failure
                os.replace(self._part, self._path)
            except OSError as failure:
                with suppress(OSError):
                    self._part.unlink()
                if error is None:
                    raise self._failed(failure) from None

    def _failed(self, error: OSError) -> KimiError:
        return KimiError(f"{self._path}: cannot be written: {error.strerror}")


def _event(name: str, thread: int, **rest: object) -> str:
    return json.dumps({"name": name, "pid": 0, "tid": thread, **rest}, separators=(",", ":"))


class Split(NamedTuple):
    """Seconds of one stretch of time. The disk works beside the cores: `disk` may overlap both
    others, `computing` and `waiting` are all there is."""

    total: float
    disk: float
    computing: float
    waiting: float


def split(spans: Sequence[Span], begin: int, end: int) -> Split:
    """How the time from `begin` to `end` (nanoseconds) was spent.

    The disk is busy while any read is under way that is not being checksummed; the model waits
    while it is in a span of that kind.
    """
    checks: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        if span.kind == CHECK:
            checks.setdefault(span.thread, []).append((span.begin, span.end))
    reads: list[tuple[int, int]] = []
    for span in spans:
        if span.kind == READ:
            reads += _without((span.begin, span.end), checks.get(span.thread, []))
    waits = [(span.begin, span.end) for span in spans if span.kind == WAIT]
    waiting = covered(waits, begin, end) / 1e9
    total = (end - begin) / 1e9
    return Split(total, covered(reads, begin, end) / 1e9, total - waiting, waiting)


def covered(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """How much of `begin`..`end` at least one interval covers."""
    total, at = 0, begin
    for low, high in sorted(intervals):
        low, high = max(low, at), min(high, end)
        if high > low:
            total += high - low
            at = high
    return total


def _without(whole: tuple[int, int], parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of `whole` where `parts` (in order, apart) are taken out."""
    left, at = [], whole[0]
    for low, high in parts:
        if whole[0] <= low and high <= whole[1]:
            left.append((at, low))
            at = high
    return [*left, (at, whole[1])]
