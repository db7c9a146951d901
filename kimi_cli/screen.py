"""One line of a terminal written again and again, also while text streams to the same terminal.

    Once upon a ti_           the text, and the cursor, which stays there
    token 3 of 128, ...       the line, below it

The cursor is never hidden and no mode of the terminal is changed, so there is nothing to restore
but the line itself, which `clear` removes.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata

UP, DOWN, INDEX = "\x1b[A", "\x1b[B", "\x1bD"
SAVE, RESTORE, ERASE = "\x1b7", "\x1b8", "\x1b[K"
WIDTH = 80
"""Columns of a terminal that does not tell."""
_TAB = 8


class Screen:
    """The line of the terminal `fd`. Safe in a signal handler: each change is one write."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._column = 0
        self._drawn = False

    @property
    def width(self) -> int:
        """Columns of the terminal as it is now."""
        try:
            return os.get_terminal_size(self._fd).columns or WIDTH
        except OSError:
            return WIDTH

    def draw(self, line: str) -> None:
        """Shows `line`, cut to the width, in place of the one before."""
        width = self.width
        line = line[: width - 1] + ERASE
        if not self._drawn and self._column >= width:  # the next character would wrap
            self._write("\r\n")
            self._column = 0
        if not self._column:
            self._write("\r" + line)
        else:
            room = "" if self._drawn else INDEX + UP  # where the text is on the last line
            self._write(f"{room}{SAVE}{DOWN}\r{line}{RESTORE}")
        self._drawn = True

    def clear(self) -> None:
        """Removes the line; the cursor is where the text goes on."""
        if not self._drawn:
            return
        self._drawn = False
        if self._column:
            self._write(f"{SAVE}{DOWN}\r{ERASE}{RESTORE}")
        else:
            self._write("\r" + ERASE)

    def passed(self, text: str) -> None:
        """Notes that `text` was written to the terminal, after `clear`."""
        width = self.width
        for character in text:
            if character in "\r\n":
                self._column = 0
            elif character == "\t":
                self._column = min((self._column // _TAB + 1) * _TAB, width - 1)
            elif not unicodedata.combining(character) and character.isprintable():
                cells = 2 if unicodedata.east_asian_width(character) in "WF" else 1
                fits = self._column + cells <= width
                self._column = self._column + cells if fits else cells

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that has gone away
            os.write(self._fd, text.encode("ascii", "replace"))
