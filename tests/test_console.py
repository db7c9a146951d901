"""Text out, signals, and one sentence for every error: in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

PREFIX = "import sys, os, signal\nfrom kimi_cli import console\nfrom kimi_cli.errors import *\n"


def python(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    program = PREFIX + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], timeout=60, **options)  # type: ignore
    if done.stderr:
        assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    return done


def raising(error: str) -> subprocess.CompletedProcess[bytes]:
    return python(
        f"""
        def command():
            raise {error}
        sys.exit(console.run(command))
        """
    )


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("KimiError('it broke')", 1, "kimi: it broke"),
        ("ReadError('x')", 1, "kimi: x"),
        ("NumericError('x')", 1, "kimi: x"),
        ("UsageError('x')", 2, "kimi: x"),
        ("CheckpointError('x')", 3, "kimi: x"),
        ("ConfigError('x')", 3, "kimi: x"),
        ("TokenizerError('x')", 3, "kimi: x"),
        ("TrunkError('x')", 3, "kimi: x"),
        ("BudgetError('x')", 4, "kimi: x"),
        ("VerifyError('x')", 5, "kimi: x"),
        ("KeyboardInterrupt", 130, ""),
        ("console.Terminated", 143, ""),
        ("console.OutputClosed", 0, ""),
        ("__import__('click').Abort", 130, ""),
        ("__import__('click').UsageError('x')", 2, "kimi: x"),
        ("__import__('click').UsageError('a\\nb')", 2, "a\nb"),
        ("OSError(2, 'No such file', '/a')", 1, "kimi: /a: No such file"),
        ("OSError(28, 'No space')", 1, "kimi: No space"),
        ("SystemExit(1)", 0, ""),
    ],
)
def test_every_end_has_its_code_and_at_most_a_sentence(error: str, code: int, said: str) -> None:
    done = raising(error)
    assert (done.returncode, done.stderr.decode().strip("\n"), done.stdout) == (code, said, b"")


def test_memory_error() -> None:
    done = raising("MemoryError")
    assert done.returncode == 1 and b"lower --ram" in done.stderr


def test_success() -> None:
    done = python("sys.exit(console.run(lambda: console.put('h\\u00e9\\n')))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "h\u00e9\n".encode(), b"")


def test_text_is_utf8_whatever_the_locale() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = python("console.put('h\\u00e9\\ud800'); console.note('\\u4e16')", env=environment)
    assert done.stdout == "h\u00e9?".encode()
    assert done.stderr == "\u4e16\n".encode()


def test_a_note_obeys_no_control_character() -> None:
    done = python("console.note('a\\x1b[31mb\\r\\nc\\td\\x00\\u202ee\\udc80')")
    assert done.stderr == rb"a\x1b[31mb\r\nc\td\x00\u202ee\udc80" + b"\n"


def test_closed_reader_is_quiet_and_no_failure() -> None:
    read, write = os.pipe()
    os.close(read)
    done = python(
        "sys.exit(console.run(lambda: [console.put('x') for _ in range(9)]))", stdout=write
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_full_disk_is_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = python("sys.exit(console.run(lambda: console.put('x')))", stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"kimi: standard output cannot be written: No space left on device\n"


def test_closed_streams() -> None:
    """`>&-` and `2>&-`: nowhere to write to is nothing to fail of."""
    code = PREFIX + "sys.exit(console.run(lambda: (console.note('n'), console.put('x'))))"
    for redirection in (">&-", "2>&-", ">&- 2>&-", "<&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code],
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_command(number: signal.Signals, code: int) -> None:
    for command in ("command", "lambda: cli.main(args=[], standalone_mode=False)"):
        done = python(
            f"""
            import click
            def command():
                os.kill(os.getpid(), {int(number)})
                signal.pause()
            cli = click.Command("x", callback=command)
            sys.exit(console.run({command}))
            """
        )
        assert done.returncode == code
        assert done.stderr.strip() == b"" and done.stdout == b""


def test_quiet_or_not_a_terminal_draws_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    from kimi_cli.progress import Progress

    for quiet in (True, False):
        with Progress("x", "B", quiet) as report:
            report(1, 2)
            report(2, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from kimi_cli.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("load", "B") as report:
        for done in (0, 1 << 20, 2 << 20):
            report(done, 2 << 20)
    assert "load" in terminal.getvalue() and "\n" not in terminal.getvalue().strip("\r\n")
