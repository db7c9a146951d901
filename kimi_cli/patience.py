"""Interruptions that wait for the end of a token, where that is near.

Between two tokens everything is whole and can be saved; in the middle of one the state is of no
use. So the first Ctrl-C or SIGTERM waits where a token is quick; a second never does.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from kimi_cli.console import Terminated

QUICK = 2.0
"""Seconds that a person is made to wait at most."""


class Patience:
    """Holds back the first SIGINT or SIGTERM while `seconds`, what a token takes, is at most QUICK;
    `check` then raises it. One that is not held back is left to the handler that was there before.
    A context manager, for the main thread; `seconds` None: not known."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._held: type[KeyboardInterrupt] | None = None
        self._before: dict[int, signal._HANDLER] = {}

    @property
    def held(self) -> bool:
        """Whether an interruption waits."""
        return self._held is not None

    def check(self) -> None:
        """Raises the interruption that was held back: KeyboardInterrupt or Terminated."""
        held, self._held = self._held, None
        if held is not None:
            raise held

    def __enter__(self) -> Patience:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        stop = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self._held is None and self.seconds is not None and self.seconds <= QUICK:
            self._held = stop
            return
        before = self._before[number]
        if self._held is None and callable(before):
            before(number, frame)
            return
        self._held = None
        raise stop
