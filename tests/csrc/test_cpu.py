"""Choosing the instruction set and the thread count; a CPU without any feature."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import NumericError, UsageError
from kimi_cli.native import ffi, lib

from .battery import CASES
from .hostile import same


def test_scalar_is_always_there_and_comes_first():
    isas = native.supported_isas()
    assert isas[0] == "scalar"
    assert len(set(isas)) == len(isas) and set(isas) <= set(native.ISAS)


def test_auto_is_the_best_there_is():
    assert native.set_isa("auto") == native.supported_isas()[-1] == native.isa()


def test_each_supported_set_can_be_chosen():
    for name in native.supported_isas():
        assert native.set_isa(name) == name == native.isa()


def test_an_unknown_or_missing_set_is_refused_and_changes_nothing():
    native.set_isa("scalar")
    missing = [name for name in native.ISAS if name not in native.supported_isas()]
    for name in [*missing, "sse9", "", "SCALAR"]:
        with pytest.raises(UsageError, match="this CPU has scalar"):
            native.set_isa(name)
        assert native.isa() == "scalar"
    for number in (-1, 4, 99, -(2**31), 2**31 - 1):
        assert lib.kimi_isa_supported(number) == 0
        assert lib.kimi_isa_set(number) == lib.KIMI_E_UNSUPPORTED
    assert native.isa() == "scalar"


def test_thread_counts():
    def done():
        """Operations, as many a thread, of a call that has work for dozens."""
        return native.roof_fma(100_000)[0]

    native.set_threads(native.MAX_THREADS)
    native.set_threads(1)
    alone = done()
    for count in (2, 3):
        native.set_threads(count)
        assert done() == alone * count
    for count in (0, -1, native.MAX_THREADS + 1, 2**31 - 1):
        with pytest.raises(UsageError):
            native.set_threads(count)
        assert lib.kimi_threads_set(count) == lib.KIMI_E_ARGUMENT
    assert done() == alone * 3


def test_more_threads_than_work():
    native.set_threads(native.MAX_THREADS)
    x, y = np.ones((1, 4096), np.float32), np.zeros((1, 1), np.float32)
    w = native.Matrix(native.Format.F32, 1, 4096, np.ones(4096, np.float32).view(np.uint8))
    native.product(w, x, y, np.zeros(4096, np.float32))
    assert y[0, 0] == 4096


def test_a_cpu_without_features_gives_the_same_bits(featureless, monkeypatch):
    """No FMA, no AVX2, no SSE4.2: soft fmaf, plain loops and look-up tables."""
    assert ffi is not featureless.ffi
    wants = {name: case() for name, case in CASES.items()}
    monkeypatch.setattr(native, "ffi", featureless.ffi)
    monkeypatch.setattr(native, "lib", featureless.lib)
    assert native.supported_isas() == ["scalar"]
    for threads in (1, 2):
        native.set_threads(threads)
        for name, case in CASES.items():
            for got, want in zip(case(), wants[name], strict=True):
                same(got, want, case=name, build="featureless", threads=threads)


def test_recorded_operations_are_done_again():
    x, y = np.array([1, 2, 3], np.float32), np.zeros(3, np.float32)
    with native.recording() as calls:
        native.add(x, y)
        native.add(x, y)
    native.add(x, y)  # is not
    assert y.tolist() == [3, 6, 9]
    x[:] = (10, 20, 30)
    calls()
    assert y.tolist() == [23, 46, 69]
    logits, ids = np.zeros((1, 4), np.float32), np.zeros((1, 2), np.int32)
    with native.recording() as calls:
        native.route(logits, np.zeros(4, np.float32), 1.0, ids, np.zeros((1, 2), np.float32))
    logits[0, 1] = np.inf
    with pytest.raises(NumericError):
        calls()
