"""Fuzzes one target by coverage, with atheris: `python -m fuzz.run TARGET --seconds 300`.

Run it in tests/. What it finds lies in build/fuzz/TARGET, a finding as `crash-...`: fix it, and put
the input into fuzz/corpus/TARGET with a name that says what it was. `python -m fuzz.keep TARGET`
adds the smallest of the rest that reach something new.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kimi_cli"]):
    from kimi_cli.errors import KimiError

    from .mutate import mutate
    from .targets import CORPUS, TARGETS

WORK = Path(__file__).parents[2] / "build" / "fuzz"
ROOM = 512 << 20
"""Bytes of address space that a target may add to what is mapped when it begins."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=300)
    options = parser.parse_args()
    name, target = options.target, TARGETS[options.target]
    found = WORK / name
    with tempfile.TemporaryDirectory(prefix="kimi-fuzz-") as scratch:
        seeds, folder = Path(scratch) / "seeds", Path(scratch) / "folder"
        for directory in (seeds, folder, found, CORPUS / name):
            directory.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds()):
            (seeds / f"seed-{number:03d}").write_bytes(seed)
        read = target.make(folder)

        def run(data: bytes) -> None:
            with suppress(KimiError):
                read(data)

        def change(data: bytes, most: int, seed: int) -> bytes:
            rng = random.Random(seed)
            changed = mutate(data, rng) if rng.random() < 0.6 else None
            if changed is None or len(changed) > most:
                changed = atheris.Mutate(data, most)
            return bytes(changed)

        os.fsync = os.fdatasync = lambda fd: None  # no power cut is meant: a thousand times faster
        _limit_memory()
        words = [
            sys.argv[0],
            f"-max_total_time={options.seconds}",
            "-timeout=20",
            "-rss_limit_mb=0",
            "-max_len=65536",
            "-print_final_stats=1",
            f"-artifact_prefix={found}/",
            str(found),
            str(CORPUS / name),
            str(seeds),
        ]
        atheris.Setup(words, run, custom_mutator=change)
        atheris.Fuzz()


def _limit_memory() -> None:
    """A request for much memory fails: it becomes a MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
