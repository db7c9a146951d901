"""A `kimi` on a machine that fails on command: see shim.c for the rules."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from command import environment, kimi


@lru_cache(maxsize=1)
def _library() -> Path:
    """The shim, compiled once."""
    compiler = os.environ.get("CC", "cc")
    path = Path(tempfile.mkdtemp(prefix="kimi-shim-")) / "shim.so"
    words = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", path]
    source = Path(__file__).with_name("shim.c")
    subprocess.run([*words, source, "-ldl", "-pthread"], check=True)
    return path


def faulty(
    fired: Path, rules: str, *args: object, check: int | None = 0, **options: Any
) -> tuple[subprocess.CompletedProcess[bytes], list[tuple[str, str]]]:
    """Runs `kimi` under `rules`; with it, the calls and paths that they were applied to. `fired` is
    a file to be written."""
    fired.unlink(missing_ok=True)
    env = options.pop("env", environment())
    env = {**env, "LD_PRELOAD": str(_library()), "FAULTS": rules, "FAULTS_FIRED": str(fired)}
    done = kimi(*args, check=check, env=env, **options)
    lines = fired.read_text().splitlines() if fired.exists() else []
    return done, [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def spread(total: int, most: int) -> list[int]:
    """At most `most` of 1..total, evenly apart."""
    return sorted({1 + total * (2 * n + 1) // (2 * most) for n in range(most)} - {total + 1})
