"""Threads, or a sentence where the system has no more: a limit on processes, or on memory."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kimi_cli.errors import KimiError


@contextmanager
def starting() -> Iterator[None]:
    """For code that starts threads. Raises KimiError where there are no more."""
    try:
        yield
    except RuntimeError:  # all that Python says
        raise KimiError(
            "the system refused a thread that was planned: lower --threads, or allow the process "
            "more threads or memory"
        ) from None


_working: set[int] = set()


def working() -> frozenset[int]:
    """The system's numbers of the Workers that run. Python's own registry of threads keeps theirs
    when they have ended, and gives them to others."""
    return frozenset(_working)


class Worker:
    """A daemon thread that runs `target`, once it is made. Raises KimiError where it cannot be.

    threading.Thread waits for ever for a thread that got its stack but no memory for its first
    frame; this one looks whether the thread is still there. Made by one thread at a time.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        begun, self._over = threading.Event(), threading.Event()

        def run() -> None:
            threading.current_thread().name = name
            number = threading.get_native_id()
            _working.add(number)
            begun.set()
            try:
                target()
            finally:
                _working.discard(number)
                self._over.set()

        hook = sys.unraisablehook
        sys.unraisablehook = id  # nothing, by a built-in: there is no memory for a frame
        try:
            with starting():
                before = _tasks()
                _thread.start_new_thread(run, ())
                while not begun.wait(0.1):
                    if not _tasks() - before and not begun.is_set():
                        raise RuntimeError
        finally:
            sys.unraisablehook = hook

    def join(self) -> None:
        """Waits for its end."""
        self._over.wait()


def _tasks() -> set[str]:
    """This process's threads, as the system numbers them."""
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError as error:
        raise RuntimeError from error


def require(count: int) -> None:
    """Raises KimiError unless `count` more threads can be had, for a library to start."""
    enough = threading.Event()
    begun: list[Worker] = []
    try:
        for _ in range(count):
            begun.append(Worker(enough.wait, "kimi-asked"))
    finally:
        enough.set()
        for worker in begun:
            worker.join()
