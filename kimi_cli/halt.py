"""Ctrl-C that waits for the end of the layer in hand; a second one does not wait."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType


class Halt:
    """Keeps the first SIGINT until `check`; a second is a KeyboardInterrupt where it arrives.

    A context manager, for the main thread. `say` is called from the signal's handler when the first
    arrives. Where SIGINT is ignored (a job in the background), it stays so.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self.asked = False
        """Whether somebody wants an end."""
        self._say = say
        self._before: signal._HANDLER = None

    def check(self) -> None:
        """Raises KeyboardInterrupt once an end is asked for; called where it is convenient."""
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Halt:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say()
