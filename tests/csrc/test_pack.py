"""Packed rows: bytes as kimi.h draws them, escapes, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import CheckpointError, KimiError
from kimi_cli.native import Format, ffi, lib

from . import reference
from .hostile import KINDS, bf16, generator, shifted

GUARD = 0xABCD


def pack(weights, table, first=0):
    """native.pack_rows into guarded arrays of exactly the size needed."""
    rows, cols = weights.shape
    count = native.pack_escapes(weights, table)
    packed = np.full((rows + 1, cols // 64 * 96), 0xA5, np.uint8)
    starts = np.full(rows + 2, GUARD, np.uint32)
    escapes = np.full(first + count + 1, GUARD, np.uint32)
    starts[0] = first
    native.pack_rows(weights, table, packed[:-1], starts[:-1], escapes[:-1])
    assert (packed[-1] == 0xA5).all() and starts[-1] == GUARD and escapes[-1] == GUARD
    assert (escapes[:first] == GUARD).all()
    return packed[:-1], starts[:-1], escapes[:-1]


def unpack(rows, cols, packed, table, starts, escapes):
    """native.unpack_rows on every thread count, into a guarded array."""
    w = native.Matrix(Format.PACKED, rows, cols, packed, table, starts, escapes)
    results = []
    for threads in (1, 3):
        native.set_threads(threads)
        out = np.full((rows + 2, cols), GUARD, np.uint16)
        native.unpack_rows(w, out[1:-1])
        assert (out[0] == GUARD).all() and (out[-1] == GUARD).all()
        results.append(out[1:-1])
    assert np.array_equal(*results)
    return results[0]


def matrices():
    """Named hostile bf16 matrices."""
    for kind in KINDS:
        for rows, cols in ((1, 64), (3, 128), (5, 1088)):
            yield f"{kind} {rows}x{cols}", bf16(generator("pack", kind, rows), (rows, cols), kind)
    rng = generator("pack")
    yield "every pattern", np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    yield "shuffled", rng.permutation(65536).astype(np.uint16).reshape(16, 4096)
    yield "one value", np.full((2, 64), 0x3F80, np.uint16)
    yield "zeros", np.zeros((4, 192), np.uint16)
    yield "negative zeros", np.full((4, 192), 0x8000, np.uint16)
    yield "widest", bf16(rng, (2, 65536), "wide")


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_as_drawn_and_come_back(threads):
    native.set_threads(threads)
    for name, weights in matrices():
        fixed = np.arange(0x38, 0x48, dtype=np.uint8)
        for table in (reference.common_bytes(weights), fixed, np.full(16, 0x3F, np.uint8)):
            for first in (0, 5):
                packed, starts, escapes = pack(weights, table, first)
                want = reference.pack(weights, table, first)
                assert np.array_equal(packed, want[0]), (name, first)
                assert np.array_equal(starts, want[1]), (name, first)
                assert np.array_equal(escapes[first:], want[2][first:]), (name, first)
                back = unpack(*weights.shape, packed, table, starts, escapes)
                assert np.array_equal(back, weights), (name, first)
                native.set_threads(threads)


def test_misaligned_bytes_unpack():
    weights = bf16(generator("misaligned"), (5, 192))
    table = reference.common_bytes(weights)
    packed, starts, escapes = reference.pack(weights, table)
    for k in (1, 3, 7):
        moved = (shifted(a, k) for a in (packed, table, starts, escapes))
        assert np.array_equal(unpack(5, 192, *moved), weights), k


def test_one_column_at_a_time():
    """A lone weight is found where the drawing says: its low byte, its nibble, no other."""
    table = np.arange(16, dtype=np.uint8)
    for column in range(128):
        weights = np.zeros((1, 128), np.uint16)
        weights[0, column] = 0x0B5A
        packed, _, escapes = pack(weights, table)
        block, inner = packed[0, column // 64 * 96 :][:96], column % 64
        h, rest = divmod(inner, 32)
        p = next(p for p in range(32) if 16 * (p >> 3 & 1) + 8 * (p >> 4) + (p & 7) == rest)
        assert block[32 * h + p] == 0x5A and block[64 + p] == (0xB0 if h else 0x0B), column
        assert np.count_nonzero(packed) == 2 and not len(escapes), column


def test_an_escape_only_matrix():
    rng = generator("only escapes")
    weights = bf16(rng, (3, 128), "wide") | 0x4000
    table = np.arange(16, dtype=np.uint8)
    packed, starts, escapes = pack(weights, table)
    assert list(starts) == [0, 128, 256, 384]
    assert np.array_equal(escapes & 0xFFFF, weights.ravel())
    assert np.array_equal(escapes >> 16, np.tile(np.arange(128), 3))
    assert np.array_equal(unpack(3, 128, packed, table, starts, escapes), weights)


def test_histogram_adds_up():
    weights = bf16(generator("histogram"), (7, 191), "special")
    counts = np.full(256, 3, np.int64)
    native.pack_histogram(weights, counts)
    assert np.array_equal(counts - 3, np.bincount((weights >> 8).ravel(), minlength=256))
    native.pack_histogram(np.zeros(0, np.uint16), counts)
    assert counts.sum() == weights.size + 3 * 256


def test_escapes_are_counted():
    rng = generator("count")
    for n in (0, 1, 63, 64, 65, 1000):
        weights = bf16(rng, n, "wide")
        table = rng.integers(0, 256, 16).astype(np.uint8)
        want = int((~np.isin(weights >> 8, table)).sum())
        assert native.pack_escapes(weights, table) == want, n


def test_wrong_arrays_are_refused():
    weights, table = np.zeros((2, 64), np.uint16), np.zeros(16, np.uint8)
    packed, starts, escapes = (
        np.zeros((2, 96), np.uint8),
        np.zeros(3, np.uint32),
        np.zeros(4, np.uint32),
    )
    native.pack_rows(weights, table, packed, starts, escapes)
    for bad in (
        (weights.astype(np.int16), table, packed, starts, escapes),
        (np.zeros((2, 128), np.uint16)[:, ::2], table, packed, starts, escapes),
        (weights[0], table, packed, starts, escapes),
        (weights, table[:15], packed, starts, escapes),
        (weights, table.astype(np.int64), packed, starts, escapes),
        (weights, table, packed[:1], starts, escapes),
        (weights, table, packed.astype(np.int64), starts, escapes),
        (weights, table, packed, starts[:2], escapes),
        (weights, table, packed, starts.astype(np.int64), escapes),
        (weights, table, packed, starts + np.uint32(5), escapes),
        (weights + np.uint16(0x0100), table, packed, starts, escapes),
        (weights, table, packed, starts, escapes.astype(np.uint16)),
        (weights, table, packed, starts, np.zeros(8, np.uint32)[::2]),
    ):
        with pytest.raises(ValueError):
            native.pack_rows(*bad)
    with pytest.raises(ValueError):
        native.pack_histogram(weights.astype(np.int16), np.zeros(256, np.int64))
    with pytest.raises(ValueError):
        native.pack_histogram(weights, np.zeros(256, np.int32))
    with pytest.raises(ValueError):
        native.pack_histogram(weights, np.zeros(255, np.int64))
    w = native.Matrix(Format.PACKED, 2, 64, packed, table, starts, escapes)
    for out in (
        np.zeros((2, 64), np.int16),
        np.zeros((2, 63), np.uint16),
        np.zeros((2, 128), np.uint16)[:, ::2],
    ):
        with pytest.raises(ValueError):
            native.unpack_rows(w, out)
    plain = native.Matrix(Format.BF16, 2, 64, np.zeros(256, np.uint8))
    with pytest.raises(KimiError):
        native.unpack_rows(plain, np.zeros((2, 64), np.uint16))


def test_c_refuses_nulls_and_empty_shapes():
    w, table, out = ffi.new("uint16_t[]", 256), ffi.new("uint8_t[]", 16), ffi.new("uint8_t[]", 512)
    starts, escapes = ffi.new("uint32_t[]", 16), ffi.new("uint32_t[]", 16)

    def call(w=w, rows=2, cols=64, table=table, packed=out, starts=starts, escapes=escapes):
        return lib.kimi_pack_rows(w, rows, cols, table, packed, starts, escapes)

    assert call() == 0
    for name in ("w", "table", "packed", "starts", "escapes"):
        assert call(**{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
    for bad in ({"rows": 0}, {"cols": 0}, {"cols": 65}, {"cols": 65600}, {"rows": -1}):
        assert call(**bad) == lib.KIMI_E_ARGUMENT, bad
    counts = ffi.new("int64_t[]", 256)
    assert lib.kimi_pack_histogram(ffi.NULL, 1, counts) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_pack_histogram(w, 1, ffi.NULL) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_pack_histogram(w, -1, counts) == lib.KIMI_E_ARGUMENT

    matrix = ffi.new("kimi_matrix *")
    fields = {"data": out, "table": table, "starts": starts, "escapes": escapes}

    def back(into=w, **changes):
        matrix.format, matrix.rows, matrix.cols = Format.PACKED, 2, 64
        for name, value in {**fields, **changes}.items():
            setattr(matrix, name, value)
        return lib.kimi_unpack_rows(matrix, into)

    assert back() == 0
    assert back(into=ffi.NULL) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_unpack_rows(ffi.NULL, w) == lib.KIMI_E_ARGUMENT
    for bad in (*({name: ffi.NULL} for name in fields), {"rows": 0}, {"cols": 0}, {"format": 0}):
        assert back(**bad) == lib.KIMI_E_ARGUMENT, bad


@pytest.mark.parametrize("escapes", [[5 << 16, 5 << 16], [9 << 16, 3 << 16], [64 << 16, 70 << 16]])
def test_escapes_out_of_order_or_range_are_refused(escapes: list[int]) -> None:
    packed = np.zeros((1, 96), dtype=np.uint8)
    table = np.zeros(16, dtype=np.uint8)
    starts = np.array([0, 2], dtype=np.uint32)
    matrix = native.Matrix(
        native.Format.PACKED, 1, 64, packed, table, starts, np.array(escapes, dtype=np.uint32)
    )
    x, y = np.ones((1, 64), dtype=np.float32), np.zeros((1, 1), dtype=np.float32)
    with pytest.raises(CheckpointError, match="escapes out of order"):
        native.product(matrix, x, y, np.zeros(native.scratch_floats(64, 1), dtype=np.float32))
