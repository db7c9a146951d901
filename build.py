"""Builds the cffi extension from csrc/ while hatchling makes a wheel or an editable install."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from cffi import FFI
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent

FLAGS = [
    "-std=c99",
    "-D_POSIX_C_SOURCE=200809L",
    "-O3",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
"""No -march and no -ffast-math: one build runs on any CPU of its kind and means what it says."""


def cdef() -> str:
    """The declarations between the cdef markers of kimi.h."""
    text = (ROOT / "csrc" / "kimi.h").read_text()
    match = re.search(r"/\* cdef begin \*/(.*)/\* cdef end \*/", text, re.DOTALL)
    if not match:
        raise RuntimeError("csrc/kimi.h has lost its cdef markers")
    declarations = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
    return re.sub(r"(#define \w+ \S+).*", r"\1", declarations)


def compile_extension(out: Path) -> Path:
    """Compiles csrc/ into `out` and returns the extension's path. KIMI_CFLAGS adds flags."""
    ffi = FFI()
    ffi.cdef(cdef())
    extra = os.environ.get("KIMI_CFLAGS", "").split()
    ffi.set_source(
        "kimi_cli._native",
        '#include "kimi.h"',
        sources=[str(path) for path in sorted((ROOT / "csrc").glob("*.c"))],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=FLAGS + extra,
        extra_link_args=["-fopenmp", *extra],
        libraries=["m"],
    )
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(ffi.compile(tmpdir=scratch))
        target = out / built.name
        shutil.copy2(built, target.with_suffix(".tmp"))
        os.replace(target.with_suffix(".tmp"), target)
    return target


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles the extension and marks the wheel as belonging to this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        built = compile_extension(ROOT / "kimi_cli")
        build_data["artifacts"].append(f"kimi_cli/{built.name}")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        build_data["tag"] = f"{tag}-{tag}-{platform}"
        build_data["pure_python"] = False


if __name__ == "__main__":
    print(compile_extension(ROOT / "kimi_cli"))
