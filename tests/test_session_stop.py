"""Sessions interrupted or killed at any moment: no id is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from command import KIMI, environment, generate
from sessions import CONFIG, Fed, Run, files, history_of, same

from kimi_cli.console import Terminated
from kimi_cli.patience import Patience
from kimi_cli.resume import Keeper
from kimi_cli.session import Session
from kimi_cli.snapshot import read_snapshot
from kimi_cli.state import State

# --- interruptions -------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from kimi_cli.cli import cli
import kimi_cli.answer
rng, path = random.Random(int(sys.argv[1])), sys.argv[2]
for number in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        cli.main(["generate", *sys.argv[4:]], standalone_mode=False)
        os._exit(0)
    time.sleep(rng.uniform(0.0, 0.2 + number / 100))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    size = os.stat(path + ".ids").st_size if os.path.exists(path + ".ids") else 0
    print(size, os.path.exists(path + ".tmp"))
"""


@pytest.mark.fault(
    "disk: kill -9 of a run with a session", "it goes on to the same text, no id is lost", times=50
)
def test_fifty_power_cuts(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    asked = ["hi", "--ignore-eos", "--temperature", "1", "--seed", "3"]
    kept = ["--session", str(path), "--save-every", "3"]
    words = [sys.executable, "-c", KILLED, "7", str(path), "50", *asked, *kept]
    words += ["-n", "5000", "--context", "6000", "--json", "--quiet"]
    done = subprocess.run(words, capture_output=True, timeout=100, env=environment())
    assert done.stderr == b""
    seen = [line.split() for line in done.stdout.decode().splitlines()]
    sizes = [int(size) for size, _ in seen]
    assert len(sizes) == 50
    assert len(set(sizes)) > 3, "the machine is too slow for this test"
    ids = history_of(path).turns[0].ids
    wanted = run(*asked, "-n", len(ids) + 3)
    found = run(*asked, "-n", len(ids) + 3, *kept)
    same(found, wanted)
    assert found["stats"]["resumed_tokens"] == len(ids) > 3
    assert fed.prefill <= 4 and fed[0][0] > len(wanted["prompt_ids"])
    assert files(path) == ["s", "s.ids"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_the_last_token(tmp_path: Path, number: int, code: int) -> None:
    path, ids = tmp_path / "s", tmp_path / "s.ids"
    asked = ["hi", "--ignore-eos", "--session", path, "--save-every", 100_000]
    words = [KIMI, "generate", *asked, "-n", 5000, "--json", "--quiet"]
    process = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    while not ids.exists() or ids.stat().st_size < 900:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (code, b"")
    first = json.loads(out)
    assert first["stop_reason"] == "interrupted"
    assert first["ids"] == history_of(path).turns[0].ids
    saved = read_snapshot(path)  # the token was quick: its end was waited for
    assert saved is not None
    assert saved.position == len(first["prompt_ids"]) + len(first["ids"]) - 1
    count = len(first["ids"])
    same(generate(*asked, "-n", count + 3), generate(*asked[:2], "-n", count + 3))


def test_patience() -> None:
    def interrupt(number: int) -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Patience() as patience:
        patience.check()
        for seconds in (None, 2.5):
            patience.seconds = seconds
            with pytest.raises(KeyboardInterrupt):
                interrupt(signal.SIGINT)
        patience.seconds = 0.1
        for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
            interrupt(number)
            assert patience.held
            with pytest.raises(kind):
                patience.check()
            interrupt(number)
            with pytest.raises(kind):
                interrupt(number)
            assert not patience.held
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Signalled:
    """A session to which a Ctrl-C comes while it is asked whether to save."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def decided(self, token: int, reason: str | None) -> None:
        """Nothing is written down."""

    def boundary(self, state: State, last: bool) -> None:
        self.asked.append(last)
        if len(self.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_at_the_end_of_a_token_waits_for_a_saving_one() -> None:
    """What is raised has been saved: a signal after the question waits for the next token."""
    kept = Signalled()
    with Keeper(cast(Session, kept), State(CONFIG, 8)) as keeper:
        keeper.decided(1, None)
        keeper.decided(2, None)  # at once: a token is quick
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                keeper.boundary(False)
    assert kept.asked == [False, True]
