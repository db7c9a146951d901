"""The roofs do the work they are counted for, on every thread and instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import ffi, lib

from .hostile import generator

LENGTHS = [0, 1, 7, 31, 32, 33, 63, 64, 65, 1000, 4096, 100_003]


@pytest.mark.parametrize("n", LENGTHS)
def test_read_sums_every_word(n):
    words = generator("roof").integers(0, 1 << 64, n + 3, np.uint64)
    for offset in (0, 1, 3):
        part = words[offset : offset + n]
        want = int(np.sum(part, dtype=np.uint64))
        for isa in native.supported_isas():
            for threads in (1, 2, 3, 8):
                native.set_isa(isa)
                native.set_threads(threads)
                assert native.roof_read(part) == want, (isa, threads, offset)


def test_read_of_large_words_wraps():
    words = np.full(1 << 17, (1 << 64) - 1, np.uint64)
    native.set_threads(4)
    assert native.roof_read(words) == (1 << 64) - (1 << 17)


def test_multiply_adds_are_counted_once_a_thread():
    for isa in native.supported_isas():
        native.set_isa(isa)
        counts = {}
        for threads in (1, 2, 5):
            native.set_threads(threads)
            counts[threads], mean = native.roof_fma(100_000)
            assert mean == pytest.approx(0.5, rel=1e-5)
        assert counts[1] >= 100_000 * 2 * 12 * 4
        assert [counts[2], counts[5]] == [2 * counts[1], 5 * counts[1]]
        native.set_threads(1)
        assert native.roof_fma(200_000)[0] == 2 * counts[1]


def test_arguments_are_refused():
    out = ffi.new("uint64_t *"), ffi.new("int64_t *"), ffi.new("float *")
    word = ffi.new("uint64_t *", 5)
    assert lib.kimi_roof_read(ffi.NULL, 1, out[0]) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_roof_read(word, -1, out[0]) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_roof_read(word, 1, ffi.NULL) == lib.KIMI_E_ARGUMENT
    for rounds in (0, -1, 1 << 31):
        assert lib.kimi_roof_fma(rounds, out[1], out[2]) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_roof_fma(1, ffi.NULL, out[2]) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_roof_read(word, 1, out[0]) == 0 and out[0][0] == 5
    with pytest.raises(ValueError):
        native.roof_read(np.zeros(4, np.uint64)[::2])
    with pytest.raises(ValueError):
        native.roof_read(np.zeros(4, np.int64))
