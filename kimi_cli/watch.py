"""What is told of a run while it goes on: to a person, on a terminal or in a log, or to a program.

    Silent                nothing (--quiet)
    `- Notes              the plan, the time expected, the summary (--progress none)
       |- Lines           and how far it is, every half a minute
       `- Terminal        and how far it is, in one line redrawn in place
    `- Events             JSON objects, one a line (--progress json)

All of it goes to stderr. The text that is generated goes through `put`, which knows when a terminal
is shared with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from kimi_cli import console
from kimi_cli.pace import LOAD, PREFILL, Expected, Moment
from kimi_cli.screen import Screen
from kimi_cli.units import format_duration, format_size

LINE_SECONDS = 30.0
"""Between two lines where nothing can be redrawn."""
DRAW_SECONDS, EVENT_SECONDS = 0.1, 1.0
"""Between two drawings, two events, of the same phase."""
WAIT = 0.5
"""Seconds that a wait must last before anything is drawn."""
WORTH = 1.0
"""Seconds that a run must be expected to take, to tell a person."""
STOPPING = "stopping after this {}; Ctrl-C again stops at once"


class Silent:
    """Tells nothing. A context manager; its methods are those of all."""

    def __init__(self) -> None:
        self.line = 0
        """Of the prompt in hand, where there are several."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    @property
    def silent(self) -> bool:
        """Whether nobody is told anything, so that nothing need be measured for it."""
        return True

    def note(self, text: str) -> None:
        """A sentence for a person."""

    def plan(self, lines: list[str], facts: dict[str, Any]) -> None:
        """What will be held and read: for a person, and for a program."""

    def expected(self, expected: Expected, tokens: int) -> None:
        """How long it should take, for up to `tokens` tokens."""

    def moment(self, moment: Moment) -> None:
        """How far it is."""

    def token(self, number: int, token: int) -> None:
        """The token `number`, from 1, was decided."""

    def put(self, text: str) -> None:
        """Writes generated text to stdout. Raises OutputClosed, KimiError."""
        console.put(text)

    def stopping(self, after: str = "layer") -> None:
        """Somebody asked for an end, which comes `after` what is in hand; called in a signal's
        handler."""

    def done(self, summary: str, facts: dict[str, Any]) -> None:
        """A prompt is done with."""

    def clear(self) -> None:
        """Leaves a terminal as it was."""


class Notes(Silent):
    """Sentences for a person, none of them while it computes."""

    @property
    def silent(self) -> bool:
        return False

    def note(self, text: str) -> None:
        self.clear()
        console.note(text)

    def plan(self, lines: list[str], facts: dict[str, Any]) -> None:
        for line in lines:
            self.note(line)

    def expected(self, expected: Expected, tokens: int) -> None:
        if expected.total(tokens) < WORTH:
            return
        words = [f"{format_duration(expected.prompt_seconds)} for the prompt"]
        if tokens > 1:
            words.append(f"{format_duration(expected.token_seconds)} a token")
            words.append(f"{format_duration(expected.total(tokens))} for all {tokens}")
        how = (
            "a guess" if expected.guess else f"an estimate; limited by the {_LIMIT[expected.limit]}"
        )
        self.note(f"expected: {', '.join(words)} ({how})")

    def stopping(self, after: str = "layer") -> None:
        if sys.stderr.isatty():
            with contextlib.suppress(OSError):  # not through a buffer: it may be in use
                os.write(sys.stderr.fileno(), f"\r{STOPPING.format(after)}\n".encode())

    def done(self, summary: str, facts: dict[str, Any]) -> None:
        self.note(self._prefix() + summary)

    def _text(self, moment: Moment) -> str:
        return self._prefix() + moment_text(moment)

    def _prefix(self) -> str:
        return f"line {self.line}: " if self.line else ""


_LIMIT = {"disk": "disk", "compute": "processor"}


class Lines(Notes):
    """A line every LINE_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def moment(self, moment: Moment) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self.note(self._text(moment))


class Terminal(Notes):
    """A line redrawn in place; `shared`: the generated text goes to the same terminal."""

    def __init__(self, fd: int, shared: bool) -> None:
        super().__init__()
        self._screen, self._shared = Screen(fd), shared
        self._begun = self._last = time.monotonic()
        self._stopping = False

    def moment(self, moment: Moment) -> None:
        now = time.monotonic()
        waited = moment.seconds if self._shared else now - self._begun
        if waited >= WAIT and now - self._last >= DRAW_SECONDS and not self._stopping:
            self._last = now
            self._screen.draw(self._text(moment))

    def put(self, text: str) -> None:
        if self._shared:
            self.clear()
        super().put(text)
        if self._shared:
            self._screen.passed(console.visible(text))

    def stopping(self, after: str = "layer") -> None:
        self._stopping = True
        self._screen.draw(STOPPING.format(after))

    def clear(self) -> None:
        self._screen.clear()


class Events(Silent):
    """JSON objects for a program, one a line; each has `event` and, where there are several
    prompts, `line`."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0.0
        self._moment: Moment | None = None

    @property
    def silent(self) -> bool:
        return False

    def plan(self, lines: list[str], facts: dict[str, Any]) -> None:
        self._event("plan", facts)

    def expected(self, expected: Expected, tokens: int) -> None:
        facts = {
            "prompt_seconds": expected.prompt_seconds,
            "token_seconds": expected.token_seconds,
            "total_seconds": expected.total(tokens),
            "limit": expected.limit,
            "guess": expected.guess,
        }
        self._event("expected", facts)

    def moment(self, moment: Moment) -> None:
        self._moment, now = moment, time.monotonic()
        load = moment.phase == LOAD
        whole = moment.done == moment.total if load else moment.layer == moment.layers
        if now - self._last < EVENT_SECONDS and not (whole and moment.phase in (LOAD, PREFILL)):
            return
        self._last = now
        name = moment.phase if moment.phase in (LOAD, PREFILL) else "layer"
        place = {} if load else {"layer": moment.layer, "layers": moment.layers}
        self._event(name, {"done": moment.done, "total": moment.total, **place, **_cost(moment)})

    def token(self, number: int, token: int) -> None:
        self._last = time.monotonic()
        cost = _cost(self._moment) if self._moment else {}
        self._event("token", {"number": number, "id": token, **cost})

    def done(self, summary: str, facts: dict[str, Any]) -> None:
        self._event("done", facts)

    def _event(self, name: str, facts: dict[str, Any]) -> None:
        line = {"line": self.line} if self.line else {}
        console.note(json.dumps({"event": name, **line, **facts}))


def _cost(moment: Moment) -> dict[str, Any]:
    return {
        "bytes": moment.bytes,
        "bytes_per_second": moment.rate,
        "seconds": moment.seconds,
        "seconds_left": moment.left,
        "total_seconds_left": moment.run_left,
    }


def moment_text(moment: Moment) -> str:
    """How far a run is, in one line."""
    words = [f"layer {moment.layer} of {moment.layers}"]
    if moment.phase == LOAD:
        words = [f"load: {format_size(moment.done)} of {format_size(moment.total)}"]
    elif moment.phase == PREFILL:
        words.insert(0, f"prompt: {moment.done} of {moment.total} tokens")
    else:
        words.insert(0, f"token {moment.done} of {moment.total}")
    if moment.left is not None:
        words.append(f"{format_duration(moment.left)} left")
    if moment.run_left is not None and moment.run_left != moment.left:
        words.append(f"{format_duration(moment.run_left)} for all")
    if moment.bytes:
        words.append(f"{format_size(moment.bytes)} at {format_size(round(moment.rate))}/s")
    return ", ".join(words)


def watching(mode: str, quiet: bool, streams: bool) -> Silent:
    """The one for `--progress` and `--quiet`; `streams`: text is written to stdout as it comes."""
    if quiet or sys.stderr is None:
        return Silent()
    if mode == "json":
        return Events()
    if mode == "none":
        return Notes()
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return Lines()
    fd = sys.stderr.fileno()
    return Terminal(fd, streams and _same_terminal(fd))


def _same_terminal(fd: int) -> bool:
    """Whether stdout is the terminal `fd`."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    with contextlib.suppress(OSError, ValueError):
        return os.fstat(sys.stdout.fileno()).st_rdev == os.fstat(fd).st_rdev
    return False
