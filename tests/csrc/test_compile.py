"""csrc/ compiles without a warning, and the wheel's flags promise any CPU and honest arithmetic."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRICT = ["-std=c99", "-O1", "-fopenmp", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]


def compiler(name: str) -> str:
    """A compiler that can do OpenMP. clang is no part of what the project installs: where it or its
    OpenMP is missing, its warnings go unseen and only gcc's are held to."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"no {name} here")
    probe = [program, "-fopenmp", "-fsyntax-only", "-x", "c", "-"]
    if subprocess.run(probe, input=b"#include <omp.h>\n", capture_output=True).returncode:
        pytest.skip(f"{name} has no OpenMP here")
    return program


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_no_warnings(name: str) -> None:
    program = compiler(name)
    for path in sorted((ROOT / "csrc").glob("*.c")):
        command = [program, *STRICT, f"-I{ROOT / 'csrc'}", "-fsyntax-only", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{path.name}: {done.stderr}"


def test_flags_promise_any_cpu_and_exact_arithmetic() -> None:
    flags = re.search(r"FLAGS = \[(.*?)\]", (ROOT / "build.py").read_text(), re.DOTALL)
    assert flags is not None
    assert "-ffp-contract=off" in flags[1]
    assert not re.search(r"-march|-mtune|-ffast-math|-Ofast|-funsafe", flags[1])


def test_lines_are_at_most_100_columns() -> None:
    for path in sorted((ROOT / "csrc").glob("*.[ch]")):
        long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
        assert not long, f"{path.name}: lines {long}"
