"""Saves of what fuzzing has found the smallest inputs that reach something new.

`python -m fuzz.keep TARGET...`, run in tests/: from build/fuzz/TARGET into fuzz/corpus/TARGET. What
is reached is a pair of lines of kimi_cli, one run after the other.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import kimi_cli
from kimi_cli.errors import KimiError

from .target import Reader
from .targets import CORPUS, TARGETS, saved

WORK = Path(__file__).parents[2] / "build" / "fuzz"
LARGEST, MOST = 6000, 16_000
"""Bytes of one input, and of all that are saved for a target."""
_SOURCES = str(Path(kimi_cli.__file__).parent)

Pair = tuple[str, int, int]


def reached(read: Reader, data: bytes) -> set[Pair]:
    """The pairs of lines that reading `data` runs one after the other."""
    pairs: set[Pair] = set()

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        name, before = frame.f_code.co_filename, 0
        if not name.startswith(_SOURCES):
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            pairs.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(begin)
    try:
        with suppress(KimiError):
            read(data)
    finally:
        sys.settrace(None)
    return pairs


def keep(name: str) -> None:
    target = TARGETS[name]
    into = CORPUS / name
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kimi-fuzz-") as scratch:
        read = target.make(Path(scratch))
        known: set[Pair] = set()
        for data in (*target.seeds(), *(path.read_bytes() for path in saved(name))):
            known |= reached(read, data)
        size = sum(path.stat().st_size for path in saved(name))
        found = sorted((WORK / name).glob("*"), key=lambda path: (path.stat().st_size, path.name))
        kept = 0
        for path in found:
            data = path.read_bytes()
            if len(data) > LARGEST or size + len(data) > MOST:
                break
            more = reached(read, data) - known
            if more:
                known |= more
                size += len(data)
                kept += 1
                (into / path.name[:12]).write_bytes(data)
    print(f"{name}: {kept} of {len(found)} kept, {size} bytes in all")


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        keep(chosen)
