"""Where `kimi` finds itself: streams that are closed or full, no HOME, no locale, odd clocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command import KIMI, environment, generate, kimi
from shim import faulty

from kimi_cli.builtin import TINY

IDS = ("generate", "--ids", "1,2", "-n", 2, "--quiet")
PRODUCTS = {
    "generate": IDS,
    "generate --json": (*IDS, "--json"),
    "score": ("score", "--ids", "1,2,3", "--quiet"),
    "chat": ("chat", "-n", 1, "--quiet"),
    "plan": ("plan", "--ram", "8G"),
    "presets": ("presets",),
    "verify": ("verify", "-m", TINY),
    "session": ("session", "{}"),
    "--help": ("--help",),
    "generate --help": ("generate", "--help"),
    "--version": ("--version",),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("session") / "s"
    kimi(*IDS, "--session", path, "--save-every", 1)
    return path


def shell(redirection: str, *words: object, typed: bytes = b"hi\n") -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of `kimi` as a shell redirects it."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirection}', KIMI, *map(str, words)],
        input=typed, capture_output=True, timeout=60, env=environment(),
    )  # fmt: skip
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.fault("streams: stdout is a full disk (/dev/full)", "said, exit code 1")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_full_stdout(name: str, session: Path) -> None:
    words = [str(word).replace("{}", str(session)) for word in PRODUCTS[name]]
    code, _, said = shell("> /dev/full", *words)
    assert (code, said.count(b"\n")) == (1, 1), said
    assert said.startswith(b"kimi: ") and said.endswith(b"No space left on device\n")


@pytest.mark.fault("streams: the reader of stdout has gone (| head)", "quiet, exit code 0")
@pytest.mark.parametrize("name", ["generate --json", "score", "chat", "verify", "--help"])
def test_a_reader_that_has_gone(name: str, session: Path) -> None:
    words = [str(word).replace("{}", str(session)) for word in PRODUCTS[name]]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [KIMI, *words], input=b"hi\n", stdout=write, stderr=subprocess.PIPE, timeout=60,
        env=environment(),
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.fault(
    "streams: stdin, stdout or stderr closed", "quiet, exit code 0 (2 without stdin)"
)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    session = tmp_path / "s"
    code, out, said = shell(closed, *IDS, "--session", session, "--save-every", 1)
    assert (code, said) == (0, b"")
    assert bool(out) == (">&-" not in closed.replace("2>&-", ""))
    assert shell("", "session", session)[0] == 0  # nothing was written over
    if "<&-" in closed:
        assert shell(closed, "chat", "-n", 1, "--quiet") == (0, b"", b"")
    code, out, said = shell(closed, "generate", "--prompt-file", "-", "-n", 1, "--quiet")
    if "<&-" in closed:
        assert code == 2 and out == b"" and said in (
            b"kimi: -: cannot be read: standard input is closed\n" * ("2>&-" not in closed), b""
        )  # fmt: skip
    else:
        assert code == 0 and said == b""


@pytest.mark.fault("streams: stderr closed", "its number is given to no file")
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    probe = "import os, sys; from kimi_cli import entry; entry._hold_standard_streams(); "
    probe += "open(sys.argv[1], 'w').write(os.readlink('/proc/self/fd/2'))"
    python = KIMI.with_name("python")
    where = tmp_path / "where"
    subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" 2>&-', python, "-c", probe, where], check=True, timeout=60
    )
    assert where.read_text() == os.devnull


PROMPT = "s\u00e9n 世界"


@pytest.fixture(scope="module")
def wanted() -> str:
    return str(generate(PROMPT, "-n", 8)["text"])


BARE = {"PATH": "/usr/bin:/bin"}
"""Nothing else: no HOME, no locale, no TERM, no temporary directory by name."""


@pytest.mark.fault("environment: no HOME, no locale, nothing at all", "the same text")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "no_SUCH.locale", "HOME": "/nonexistent"}, {"HOME": "", "TMPDIR": "/none"},
        {"PYTHONIOENCODING": "ascii:strict"},
    ],
)  # fmt: skip
def test_a_bare_environment(settings: dict[str, str], tmp_path: Path) -> None:
    wanted = generate(PROMPT, "-n", 8, "-m", TINY)["text"]
    python = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    model = tmp_path / "K\u00fcche 世"
    model.symlink_to(TINY)
    words = ("generate", PROMPT, "-n", 8, "-m", model, "--json", "--quiet")
    done = kimi(*words, env={**python, **BARE, **settings})
    assert done.stderr == b"" and json.loads(done.stdout)["text"] == wanted


@pytest.mark.fault(
    "clock: jumps ten years back and forth, or moves once in a tenth of a second", "the same text"
)
@pytest.mark.parametrize("effect", ["%2 jump", "1+ coarse"])
def test_an_odd_clock(effect: str, wanted: str, tmp_path: Path) -> None:
    asked = (PROMPT, "-n", 8, "--ram", "70M")
    fired, rules, session = tmp_path / "fired", f"clock * {effect}", tmp_path / "s"
    kept = ("--session", session, "--save-every", 3, "--trace-time", tmp_path / "t.json")
    done, _ = faulty(fired, rules, "generate", *asked, *kept)
    assert done.stdout.decode() == wanted + "\n" and b" generated" in done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    trunk = tmp_path / "t"
    shutil.copytree(TINY / "kimi-trunk", trunk)
    faulty(fired, rules, "verify", "-m", TINY, "--trunk", trunk, "--deep")
