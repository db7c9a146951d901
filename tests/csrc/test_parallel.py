"""Threads and the float environment around every operation."""

from __future__ import annotations

import platform
import threading

import numpy as np
import pytest

from kimi_cli import native

from .battery import CASES
from .hostile import bits, same

FLUSH = {"x86_64": 0x8040, "aarch64": 0x1000000}
"""MXCSR's FTZ and DAZ; FPCR's FZ."""
ROUND = {"x86_64": (0x2000, 0x4000, 0x6000), "aarch64": (0x800000, 0x400000, 0xC00000)}
"""Rounding down, up and towards zero."""


def environments():
    """Name -> bits to set in the float state of this CPU."""
    flush, rounding = FLUSH.get(platform.machine(), 0), ROUND.get(platform.machine(), (0,))
    return {"flush": flush, **{f"round {r:#x}": r for r in rounding}, "both": flush | max(rounding)}


def raw(arrays):
    """Bit patterns, NaN payload aside."""
    return [bits(a) for a in arrays]


def in_thread(work):
    """Runs `work` on a thread of its own, whose OpenMP workers are born in its float state."""
    caught = []

    def target():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@pytest.mark.parametrize("name", CASES)
def test_threads_and_instruction_sets_agree(name):
    want = CASES[name]()
    for isa in native.supported_isas():
        for threads in (1, 2, 3, 8):
            native.set_isa(isa)
            native.set_threads(threads)
            for got, expected in zip(CASES[name](), want, strict=True):
                same(got, expected, case=name, isa=isa, threads=threads)


@pytest.mark.parametrize("environment", environments())
def test_float_environment_changes_nothing(environment, float_state):
    """Every operation with the caller's state spoilt, on the calling thread and its workers."""
    extra = environments()[environment]

    def work():
        usual = float_state.state_get()
        for isa in native.supported_isas():
            native.set_isa(isa)
            for threads in (1, 3):
                native.set_threads(threads)
                for name, case in CASES.items():
                    float_state.state_set(usual | extra)
                    try:
                        got = case()
                        left = float_state.state_get()
                    finally:
                        float_state.state_set(usual)
                    where = {"case": name, "isa": isa, "threads": threads, "state": environment}
                    assert left & ~0x3F == (usual | extra) & ~0x3F, where
                    for a, b in zip(got, wants[name], strict=True):
                        same(a, b, **where)

    wants = {name: case() for name, case in CASES.items()}
    in_thread(work)


def test_the_spoilt_state_is_felt_by_others(float_state):
    """The helper works: plain numpy arithmetic is flushed and rounded otherwise under it."""
    tiny, three = np.full(64, 1e-40, np.float32), np.full(64, 3, np.float32)
    seven = np.full(64, 7, np.float32)
    usual = float_state.state_get()
    before = raw([tiny * three, three / seven, -three / seven])
    for extra in environments().values():
        float_state.state_set(usual | extra)
        try:
            spoilt = [tiny * three, three / seven, -three / seven]
        finally:
            float_state.state_set(usual)
        assert any(not np.array_equal(a, b) for a, b in zip(raw(spoilt), before, strict=True))
    assert float_state.state_get() & ~0x3F == usual & ~0x3F


def test_calls_from_several_threads_at_once():
    """The GIL is released: independent calls may overlap."""
    names = ["product PACKED x5", "product_mxfp4 x1", "delta", "mla_attend", "mix", "situ"]
    wants = {name: CASES[name]() for name in names}
    native.set_threads(2)
    failures = []

    def work(name):
        for _ in range(5):
            for got, want in zip(CASES[name](), wants[name], strict=True):
                if not np.array_equal(bits(got), bits(want)):
                    failures.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
