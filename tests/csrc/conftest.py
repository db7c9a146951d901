"""Settings put back after each test, and builds of csrc/ that differ from the installed one."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from ctypes import CDLL, c_ulong
from pathlib import Path

import pytest

from kimi_cli import native

ROOT = Path(__file__).resolve().parents[2]

FLOAT_STATE = {
    "x86_64": r"""
#include <xmmintrin.h>
unsigned long state_get(void) { return _mm_getcsr(); }
void state_set(unsigned long s) { _mm_setcsr((unsigned)s); }
""",
    "aarch64": r"""
unsigned long state_get(void) {
    unsigned long s;
    __asm__ volatile("mrs %0, fpcr" : "=r"(s));
    return s;
}
void state_set(unsigned long s) { __asm__ volatile("msr fpcr, %0" : : "r"(s)); }
""",
}


@pytest.fixture(autouse=True)
def settings():
    """The best instruction set and one thread, before and after every test."""
    native.set_isa("auto")
    native.set_threads(1)
    yield
    native.set_isa("auto")
    native.set_threads(1)


@pytest.fixture(scope="session")
def float_state(tmp_path_factory):
    """state_get and state_set: this thread's MXCSR (x86-64) or FPCR (arm64)."""
    if platform.machine() not in FLOAT_STATE:
        pytest.skip(f"no float environment helper for {platform.machine()}")
    folder = tmp_path_factory.mktemp("float_state")
    source, library = folder / "state.c", folder / "state.so"
    source.write_text(FLOAT_STATE[platform.machine()])
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    state = CDLL(str(library))
    state.state_get.restype, state.state_set.argtypes = c_ulong, [c_ulong]
    return state


@pytest.fixture(scope="session")
def featureless(tmp_path_factory):
    """The extension built so that it finds no CPU feature: what the oldest CPU would run."""
    spec = importlib.util.spec_from_file_location("kimi_build", ROOT / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI_CFLAGS", "-D__builtin_cpu_supports(feature)=0 -O1")
        path = build.compile_extension(tmp_path_factory.mktemp("featureless"))
    spec = importlib.util.spec_from_file_location("kimi_cli._native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
