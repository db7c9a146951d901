"""A pseudo-terminal to run `kimi` in, and the screen that a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

from command import environment

COLUMNS, ROWS = 100, 12
SLOW = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from kimi_cli.model import Model
layer = Model._layer
def slow(*args):
    time.sleep(float(sys.argv[1]))
    return layer(*args)
Model._layer = slow
from kimi_cli import console
from kimi_cli.cli import cli
sys.exit(console.run(lambda: cli.main(sys.argv[2:], standalone_mode=False)))
"""
"""`kimi`, with a model whose layers take so many seconds."""
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b([78D])|([\r\n\b\x07])|([^\x1b])", re.DOTALL)


class Screen:
    """What a terminal shows of the bytes written to it: the sequences that `kimi` may use, no
    others."""

    def __init__(self, columns: int = COLUMNS, rows: int = ROWS) -> None:
        self._columns, self._rows = columns, rows
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._saved = (0, 0)
        self.hidden = False

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            match = _PIECE.match(text, at)
            assert match, repr(text[at : at + 20])
            at = match.end()
            numbers, final, escape, control, plain = match.groups()
            if plain is not None:
                self._print(plain)
            elif control is not None:
                self._control(control)
            elif escape is not None:
                self._escape(escape)
            else:
                self._sequence(final, numbers)

    def _print(self, character: str) -> None:
        if self._column == self._columns:
            self._column = 0
            self._down()
        self._cells[self._row][self._column] = character
        self._column += 1

    def _control(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self._column = max(self._column - 1, 0)

    def _escape(self, final: str) -> None:
        if final == "7":
            self._saved = self._row, self._column
        elif final == "8":
            self._row, self._column = self._saved
        else:
            self._down()

    def _sequence(self, final: str, numbers: str) -> None:
        if final in "AB":
            self._column = min(self._column, self._columns - 1)
            step = int(numbers or 1) * (1 if final == "B" else -1)
            self._row = min(max(self._row + step, 0), self._rows - 1)
        elif final == "K" and not numbers:
            row = self._cells[self._row]
            row[self._column :] = [" "] * (self._columns - self._column)
        elif (numbers, final) in (("?25", "l"), ("?25", "h")):
            self.hidden = final == "l"
        else:
            raise AssertionError(f"sequence {numbers}{final}")

    def _down(self) -> None:
        if self._row + 1 < self._rows:
            self._row += 1
        else:
            self._cells = [*self._cells[1:], [" "] * self._columns]

    @property
    def lines(self) -> list[str]:
        """Lines that are not empty."""
        rows = ["".join(row).rstrip() for row in self._cells]
        return [row for row in rows if row]


class Session:
    """`kimi` on a terminal, with layers of `slow` seconds; a context manager.

    `words` are its arguments; stdout goes to `out` instead if that is given.
    """

    def __init__(self, slow: float, *words: object, out: int | None = None) -> None:
        self._master, self._slave = pty.openpty()
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)
        self.screen, self.raw = Screen(), ""
        self.before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(slow), *map(str, words)],
            stdin=self._slave,
            stdout=self._slave if out is None else out,
            stderr=self._slave,
            env=environment(TERM="xterm"),
            start_new_session=True,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def type(self, text: str) -> None:
        """Keys pressed by a person: \\x03 is Ctrl-C."""
        os.write(self._master, text.encode())

    def until(self, done: Callable[[], object], seconds: float = 60.0) -> None:
        """Reads until `done`."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, (self.raw, self.screen.lines)
            self._read(0.05)

    def finish(self) -> int:
        """Reads to the end; the exit code."""
        self.until(lambda: self.process.poll() is not None)
        while self._read(0.05):
            pass
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def after(self) -> object:
        """The terminal's modes."""
        return termios.tcgetattr(self._slave)

    def _read(self, wait: float) -> bool:
        if not select.select([self._master], [], [], wait)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._master, 1 << 16)
        text = data.decode("utf-8", "replace")
        self.raw += text
        self.screen.write(text)
        return bool(data)
