"""The process around a command: text out as UTF-8, signals, and one sentence for every error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from kimi_cli.errors import Exit, KimiError


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: handled as an interruption, with its own exit code."""


class OutputClosed(Exception):
    """The reader of stdout has gone away; there is nobody left to write for."""


def put(text: str) -> None:
    """Writes product text to stdout at once, as UTF-8 whatever the locale."""
    if sys.stdout is None:
        raise OutputClosed
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise KimiError(f"standard output cannot be written: {error.strerror}") from None


def note(text: str) -> None:
    """One line for the person, on stderr; control characters are shown, not obeyed."""
    if sys.stderr is None:
        return
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + "\n"
    try:
        sys.stderr.buffer.write(line.encode("utf-8", "backslashreplace"))
        sys.stderr.buffer.flush()
    except OSError:
        pass


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def run(command: Callable[[], None]) -> int:
    """Runs `command` and turns however it ends into an exit code."""
    import click

    signal.signal(signal.SIGTERM, _terminate)
    try:
        command()
    except OutputClosed:
        _silence_stdout()
        return Exit.DONE
    except Terminated:
        return Exit.TERMINATED
    except (KeyboardInterrupt, click.Abort):
        return Exit.INTERRUPTED
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        note(f"kimi: {error.format_message()}")
        return Exit.USAGE
    except KimiError as error:
        note(f"kimi: {error}")
        return error.exit_code
    except MemoryError:
        note("kimi: the system refused memory that the plan had counted on; lower --ram")
        return Exit.FAILED
    except OSError as error:
        note(f"kimi: {error.filename or 'a file'}: {error.strerror or error}")
        return Exit.FAILED
    return Exit.DONE


def _silence_stdout() -> None:
    """Keeps the interpreter from complaining about the closed pipe when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
