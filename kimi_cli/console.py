"""The process around a command: text out as UTF-8, signals, and one sentence for every error."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import BinaryIO

from kimi_cli.errors import Exit, KimiError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: handled as an interruption, with its own exit code."""


class Stopped(Exception):
    """An interruption on its way out through click, which would write an empty line for a
    KeyboardInterrupt; `__cause__` is the interruption."""


class OutputClosed(Exception):
    """The reader of stdout has gone away; there is nobody left to write for."""


def put(text: str) -> None:
    """Writes product text to stdout at once, as UTF-8 whatever the locale. A terminal shows control
    characters other than newline and tab, it does not obey them."""
    _write(visible(text) if on_terminal() else text)


def dim(on: bool) -> None:
    """Whether what follows on stdout is to be faint, where that is a terminal."""
    if on_terminal() and os.environ.get("TERM") != "dumb":
        _write("\x1b[2m" if on else "\x1b[0m")


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def visible(text: str) -> str:
    """`text` with its control characters, but for newline and tab, as escapes."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _write(text: str) -> None:
    if sys.stdout is None:
        raise OutputClosed
    try:
        _write_all(sys.stdout.buffer, text.encode("utf-8", "replace"))
    except BrokenPipeError:
        _silence_stdout()
        raise OutputClosed from None
    except OSError as error:
        _silence_stdout()
        raise KimiError(f"standard output cannot be written: {error.strerror}") from None


def _write_all(stream: BinaryIO, data: bytes) -> None:
    """All of `data`, however much the stream takes at once: it has no buffer where the environment
    says so. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]
    stream.flush()


def note(text: str) -> None:
    """One line for the person, on stderr; control characters are shown, not obeyed."""
    if sys.stderr is None:
        return
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + "\n"
    with suppress(OSError):
        _write_all(sys.stderr.buffer, line.encode("utf-8", "backslashreplace"))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def run(command: Callable[[], None]) -> int:
    """Runs `command` and turns however it ends into an exit code."""
    import click

    signal.signal(signal.SIGTERM, _terminate)
    try:
        command()
    except OutputClosed:
        return Exit.DONE
    except (KeyboardInterrupt, Stopped, click.Abort) as stop:
        terminated = isinstance(stop.__cause__ or stop, Terminated)
        return Exit.TERMINATED if terminated else Exit.INTERRUPTED
    except SystemExit:  # how click takes a closed stdout
        _silence_stdout()
        return Exit.DONE
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        text = error.format_message()
        # where a command is missing, click's message is the whole help
        for line in text.splitlines() if "\n" in text else [f"kimi: {text}"]:
            note(line)
        return Exit.USAGE
    except KimiError as error:
        note(f"kimi: {error}")
        return error.exit_code
    except MemoryError:
        note("kimi: the system refused memory that the plan had counted on; lower --ram")
        return Exit.FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        note(f"kimi: {where}{error.strerror or error}")
        if not where:
            _silence_stdout()
        return Exit.FAILED
    return Exit.DONE


def _silence_stdout() -> None:
    """Keeps the interpreter from complaining about what stdout would not take when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
