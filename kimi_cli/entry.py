"""Where the process begins: an interruption has its exit code before anything heavy is imported."""

import contextlib
import os
import sys


def main() -> None:
    """The `kimi` command."""
    try:
        _hold_standard_streams()
        from kimi_cli.cli import cli
        from kimi_cli.console import run

        code = run(lambda: cli.main(standalone_mode=False))
    except KeyboardInterrupt:
        code = 130
    except (ImportError, MemoryError) as error:  # a limit on memory, or a broken installation
        code = 1
        _say(f"kimi: the program cannot be loaded: {_reason(error)}")
    sys.exit(code)


def _hold_standard_streams() -> None:
    """Where stdin, stdout or stderr is closed, no file shall get its number, and what a library
    then writes there."""
    with contextlib.suppress(OSError):  # a system without /dev/null
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(fd)


def _reason(error: BaseException) -> str:
    """The first line of what came first."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return ascii(str(error).partition("\n")[0])[1:-1] or "not enough memory"


def _say(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr)
