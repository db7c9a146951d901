"""Threads, or a sentence where the system has no more: a limit on processes, or on memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


def require(count: int) -> None:
    """Raises KimiError unless `count` more threads can be had, for a library to start."""
    enough = threading.Event()
    asked = [threading.Thread(target=enough.wait, daemon=True) for _ in range(count)]
    begun: list[threading.Thread] = []
    try:
        with starting():
            for thread in asked:
                thread.start()
                begun.append(thread)
    finally:
        enough.set()
        for thread in begun:
            thread.join()
