"""Many tokens under a small budget: nothing grows, and the text is that of a large one."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import KIMI, environment, smallest_ram

from kimi_cli.builtin import PSALM
from kimi_cli.config import load_config
from kimi_cli.plan import latent_bytes

Record = Callable[[str, object], None]
STEADY = 100
"""Tokens after which everything has been used once."""
GROWTH = 256 << 10
"""Bytes that a run may grow by after that: what the ids and text of its answer take."""


class Held:
    """What a process holds while it runs, as the system has it, once `ids` has STEADY records."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.files: list[int] = []
        self.threads: list[int] = []

    def watch(self, process: subprocess.Popen[bytes], ids: Path) -> None:
        place, page = Path(f"/proc/{process.pid}"), os.sysconf("SC_PAGE_SIZE")
        while process.poll() is None:
            time.sleep(0.05)
            if not ids.exists() or ids.stat().st_size < 28 * STEADY:
                continue
            try:
                threads, files = len(os.listdir(place / "task")), len(os.listdir(place / "fd"))
                memory = int((place / "statm").read_text().split()[1]) * page
            except (OSError, IndexError):
                continue  # it has ended
            self.memory.append(memory)
            self.files.append(files)
            self.threads.append(threads)


@pytest.mark.fault(
    "long runs: tokens generated under the smallest budget",
    "memory, descriptors and threads stay flat; the text is that of a run that holds everything",
)
def test_many_tokens(tmp_path: Path, long: bool, record_property: Record) -> None:
    tokens = 2_000 if long else 300
    asked = ("hi", "--ignore-eos", "-n", tokens, "--context", tokens + 100, "--threads", 1)

    def started(*more: object) -> subprocess.Popen[bytes]:
        words = [str(KIMI), "generate", *map(str, (*asked, *more)), "--quiet"]
        return subprocess.Popen(words, stdout=subprocess.PIPE, env=environment())

    good = started().communicate(timeout=3600)[0]
    held, session = Held(), tmp_path / "s"
    with started("--ram", smallest_ram(*asked), "--session", session) as process:
        held.watch(process, tmp_path / "s.ids")
        assert process.stdout is not None and process.stdout.read() == good
    assert process.returncode == 0 and len(good) > tokens // 2
    end = next((n for n, count in enumerate(held.threads) if count < held.threads[0]), None)
    memory, files, threads = (series[:end] for series in (held.memory, held.files, held.threads))
    assert len(memory) > 5
    cache = latent_bytes(load_config(PSALM), tokens)  # planned, and touched position by position
    assert max(memory) - memory[0] <= GROWTH + cache, memory
    assert max(files) - min(files) <= 1, files  # a state that is being saved
    assert len(set(threads)) == 1, threads
    record_property("tried", tokens)
