"""Lines from standard input: edited and remembered on a terminal, as they come from elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress

from kimi_cli import console


class Keyboard:
    """Where a person's lines come from. What was typed is remembered until the end, in no file."""

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        """Whether somebody sits there."""
        self._edited = self.interactive and console.on_terminal()
        if self._edited:
            with suppress(ImportError):  # a Python without it reads plain lines
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")
                readline.set_auto_history(True)

    def line(self, prompt: str) -> str | None:
        """The next line without its end, None where there are no more; a pasted text is one line
        with newlines in it. The prompt is shown to a terminal only, never as a product."""
        if sys.stdin is None:
            return None
        if self._edited:
            try:
                return input(prompt)
            except EOFError:
                console.put("\n")
                return None
        if self.interactive and sys.stderr is not None:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        text = line.decode("utf-8", "surrogateescape")
        return text.removesuffix("\n").removesuffix("\r") if line else None
