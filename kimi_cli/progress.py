"""What a person sees while something long goes on: one line on stderr, redrawn in place.

The only place that knows tqdm. On a stream that is not a terminal, or when asked to be quiet,
nothing is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm


class Progress:
    """A bar over `done` of `total`; a context manager. `report` fits every long call here."""

    def __init__(self, label: str, unit: str, quiet: bool = False) -> None:
        self._label, self._unit = label, unit
        self._quiet = quiet or sys.stderr is None or not sys.stderr.isatty()
        self._bar: tqdm[None] | None = None

    def report(self, done: int, total: int) -> None:
        """Shows that `done` of `total` is done."""
        if self._quiet:
            return
        if self._bar is None:
            self._bar = tqdm(
                total=total,
                desc=self._label,
                unit=self._unit,
                unit_scale=self._unit == "B",
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Callable[[int, int], None]:
        return self.report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
