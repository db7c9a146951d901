"""The dense product: bf16, float32 and packed weights in one written order."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import CheckpointError
from kimi_cli.native import Format, ffi, lib

from . import reference
from .hostile import (
    KINDS,
    PAIRS,
    bf16,
    close,
    everywhere,
    floats,
    generator,
    matrix,
    multiply,
    same,
    shifted,
    strided,
    values,
    weights_of,
)

COUNTS = [1, 2, 3, 4, 5, 32, 33, 63, 64, 65, 130]
ROWS = [11, 12, 13, 16, 22, 23, 24, 25, 26, 27, 33, 47, 48, 49, 64, 65, 95, 97, 193]
"""Row counts around any tile or block of rows."""
BORDERS = [
    240,
    255,
    256,
    257,
    271,
    273,
    383,
    385,
    511,
    512,
    513,
    769,
    1008,
    1023,
    1024,
    1025,
    1040,
    2047,
    2048,
    2049,
    3100,
]
PACKED_COLS = [64, 128, 192, 256, 320, 512, 576, 960, 1024, 1088, 2048, 2112, 3136]


def column_cases(fmt):
    return PACKED_COLS if fmt == Format.PACKED else [*range(1, 131), *BORDERS]


def product(w, x, **parameters):
    """y on every instruction set."""
    return everywhere(lambda y: multiply(w, x, y), (len(x), w.rows), **parameters)


def run(fmt, rows, cols, count, kinds=("plain", "plain"), **layout):
    """One product on every instruction set; returns it and the literal answer."""
    rng = generator("product", fmt, rows, cols, count, *kinds)
    weights = weights_of(rng, fmt, (rows, cols), kinds[0])
    x = floats(rng, (count, cols), kinds[1])
    w = matrix(fmt, weights, offset=layout.get("offset", 0))
    parameters = {"format": fmt.name, "rows": rows, "cols": cols, "count": count, "kinds": kinds}
    moved = strided(x, layout["gap"]) if "gap" in layout else shifted(x, layout.get("offset", 0))
    y = everywhere(lambda y: multiply(w, moved, y), (count, rows), **layout, **parameters)
    return y, values(fmt, weights), x, parameters


def test_reference_fma_is_exact():
    rng = generator("fma")
    for kind in [k for k in KINDS if k != "special"]:
        a, b, c = (floats(rng, 300, kind) for _ in range(3))
        with np.errstate(all="ignore"):
            c[::3] = -(a * b)[::3] * (1 + rng.integers(-1, 2, 100) * 2.0**-23)
        c[~np.isfinite(c)] = 1
        for x, y, z, got in zip(a, b, c, reference.fma(a, b, c), strict=True):
            want = reference.round_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            assert float(got) == want, (kind, x, y, z)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_literal_order(fmt, kinds):
    for cols in column_cases(fmt)[:: 1 if fmt == Format.PACKED else 3]:
        for count in (1, 3):
            y, w, x, parameters = run(fmt, 5, cols, count, kinds)
            same(y, reference.dense(w, x), **parameters)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
def test_every_tail_and_chunk_border(fmt):
    for i, cols in enumerate(column_cases(fmt)):
        for j, rows in enumerate((1 + i % 9, 1 + (i + 4) % 9)):
            for count in (1, COUNTS[(i + j) % 8]):
                y, w, x, parameters = run(fmt, rows, cols, count)
                if count < 6:
                    same(y, reference.dense(w, x), **parameters)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
@pytest.mark.parametrize("count", COUNTS)
def test_rows_times_columns(fmt, count):
    for rows in (*range(1, 10), *ROWS):
        for cols in (64, 1088) if fmt == Format.PACKED else (33, 1030):
            y, w, x, parameters = run(fmt, rows, cols, count, ("plain", "special"))
            if rows * count < 300:
                same(y, reference.dense(w, x), **parameters)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
@pytest.mark.parametrize("layout", [{"gap": 3}, {"gap": 64}, {"offset": 1}, {"offset": 5}], ids=str)
def test_strides_and_misaligned_starts(fmt, layout):
    for cols in (64, 192, 1088) if fmt == Format.PACKED else (1, 15, 17, 129, 1025):
        for rows, count in ((1, 1), (5, 1), (7, 4), (9, 65)):
            y, w, x, parameters = run(fmt, rows, cols, count, ("wide", "plain"), **layout)
            same(y, reference.dense(w, x), **parameters)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
def test_a_row_reads_nothing_of_its_neighbours(fmt):
    for cols in column_cases(fmt):
        rng = generator("neighbours", fmt, cols)
        weights = weights_of(rng, fmt, (7, cols))
        weights[1::2] = np.nan if fmt == Format.F32 else 0x7FC0
        for count in (1, 3):
            x = floats(rng, (count, cols))
            y = product(matrix(fmt, weights), x, format=fmt.name, cols=cols, count=count)
            assert np.isfinite(y[:, ::2]).all() and np.isnan(y[:, 1::2]).all(), (cols, count)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_column_gives_the_bits_it_gives_alone(fmt, kinds):
    rng = generator("alone", fmt, *kinds)
    cols = 1088 if fmt == Format.PACKED else 1043
    w = matrix(fmt, weights_of(rng, fmt, (9, cols), kinds[0]))
    x = floats(rng, (130, cols), kinds[1])
    alone = everywhere(
        lambda y: [multiply(w, x[t : t + 1], y[t : t + 1]) for t in range(130)], (130, 9)
    )
    for count in COUNTS:
        together = product(w, x[:count])
        same(together, alone[:count], format=fmt.name, kinds=kinds, count=count)


def test_the_three_formats_agree():
    for kinds in PAIRS:
        rng = generator("agree", *kinds)
        for rows, cols, count in ((1, 64, 1), (5, 192, 3), (6, 1088, 66), (9, 2112, 1)):
            weights, x = bf16(rng, (rows, cols), kinds[0]), floats(rng, (count, cols), kinds[1])
            stored = [
                matrix(Format.BF16, weights),
                matrix(Format.F32, reference.widen(weights)),
                matrix(Format.PACKED, weights),
            ]
            ys = [product(w, x) for w in stored]
            same(ys[1], ys[0], kinds=kinds, cols=cols, count=count, format="F32")
            same(ys[2], ys[0], kinds=kinds, cols=cols, count=count, format="PACKED")


# ---- escapes ----

TABLE = np.arange(0x38, 0x48, dtype=np.uint8)


def escaped(rng, rows, cols, where):
    """bf16 weights that escape TABLE exactly where the mask [rows, cols] says."""
    inside = rng.integers(0x3800, 0x4800, (rows, cols))
    outside = rng.choice(
        [0x0000, 0x8000, 0x0001, 0xBF80, 0x7F00, 0x8100, 0x4800, 0x37FF], inside.shape
    )
    return np.where(where, outside, inside).astype(np.uint16)


def masks(rows, cols):
    """Named patterns of escapes."""
    r, c = np.arange(rows)[:, None], np.arange(cols)[None]
    return {
        "none": (r < 0) | (c < 0),
        "first": (c == 0) | (r < 0),
        "last": (c == cols - 1) | (r < 0),
        "all": (r >= 0) & (c >= 0),
        "odd rows": (r % 2 == 1) & (c >= 0),
        "block ends": (c % 64 == 63) | (c % 64 == 0) | (r < 0),
        "chunk border": (abs(c - 1024) <= 1) | (r < 0),
        "one a row": c == (r * 67 + 5) % cols,
        "last row": (r == rows - 1) & (c >= 0),
        "diagonal blocks": c // 64 == r % (cols // 64),
    }


@pytest.mark.parametrize("cols", [64, 128, 1024, 1088, 2112])
def test_escapes_anywhere(cols):
    for rows, count in ((1, 1), (2, 1), (5, 1), (9, 1), (3, 2), (4, 5), (5, 67)):
        for name, where in masks(rows, cols).items():
            rng = generator("escapes", cols, rows, count, name)
            weights, x = escaped(rng, rows, cols, where), floats(rng, (count, cols))
            parameters = {"rows": rows, "cols": cols, "count": count, "escapes": name}
            packed = matrix(Format.PACKED, weights, offset=1, table=TABLE, first=rows % 3)
            assert int(packed._kept[2][-1]) - rows % 3 == where.sum(), parameters
            y = product(packed, x, **parameters)
            same(y, product(matrix(Format.BF16, weights), x, **parameters), **parameters)
            if count < 3:
                same(y, reference.dense(reference.widen(weights), x), **parameters)


def test_rows_of_a_longer_matrix():
    rng = generator("slices")
    weights, x = escaped(rng, 12, 192, rng.random((12, 192)) < 0.2), floats(rng, (3, 192))
    packed, starts, escapes = reference.pack(weights, TABLE)
    whole = product(matrix(Format.BF16, weights), x)
    for lo, hi in ((0, 1), (3, 8), (5, 12), (11, 12)):
        part = native.Matrix(
            Format.PACKED, hi - lo, 192, packed[lo:hi], TABLE, starts[lo : hi + 1], escapes
        )
        y = product(part, x)
        same(y, np.ascontiguousarray(whole[:, lo:hi]), lo=lo, hi=hi)


def test_the_widest_packed_row():
    rng = generator("widest")
    weights = escaped(rng, 2, 65536, rng.random((2, 65536)) < 0.001)
    weights[:, -1] = 0xBF80
    x = floats(rng, (2, 65536))
    for count in (1, 2):
        ys = [
            product(w, x[:count])
            for w in (matrix(Format.PACKED, weights, table=TABLE), matrix(Format.BF16, weights))
        ]
        same(ys[0], ys[1], count=count)


# ---- signs, bounds, threads ----


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
def test_a_tail_turns_negative_zero_lanes_positive(fmt):
    """Every product underflows to -0; only the padding of a tail adds +0 to a lane."""
    for cols in (64, 128) if fmt == Format.PACKED else range(1, 50):
        weights = np.full((3, cols), 0.25, np.float32)
        if fmt != Format.F32:
            weights = (weights.view(np.uint32) >> 16).astype(np.uint16)
        for count in (1, 2):
            x = np.full((count, cols), -1e-45, np.float32)
            y = product(matrix(fmt, weights), x, cols=cols)
            assert (y == 0).all() and (np.signbit(y) == (cols % 16 == 0)).all(), (cols, count)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
def test_error_against_float64(fmt):
    for cols in (64, 1088, 4096):
        y, w, x, parameters = run(fmt, 7, cols, 3)
        terms = np.abs(x.astype(np.float64)) @ np.abs(w.T.astype(np.float64))
        # a lane rounds once per 16 columns, the tree four times
        bound = (cols / 16 + 4) * 2.0**-24 * terms
        close(y, x.astype(np.float64) @ w.T.astype(np.float64), bound, **parameters)


@pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
@pytest.mark.parametrize("kinds", [("plain", "plain"), ("tiny", "plain"), ("special", "special")])
def test_threads(fmt, kinds):
    for rows, count in ((131, 1), (9, 17), (3, 66), (64, 2)):
        rng = generator("threads", fmt, rows, count)
        w = matrix(fmt, weights_of(rng, fmt, (rows, 1088), kinds[0]))
        x = floats(rng, (count, 1088), kinds[1])
        product(w, x, threads=(1, 2, 3), format=fmt.name, kinds=kinds)


# ---- refusals ----


def test_wrong_arrays_are_refused():
    w = matrix(Format.BF16, np.zeros((4, 32), np.uint16))
    x, y, work = (np.zeros(s, np.float32) for s in ((2, 32), (2, 4), (256,)))
    for bad in (
        (x.astype(np.float64), y, work),
        (x, y.astype(np.float64), work),
        (x, y, work.astype(np.float64)),
        (x[:, :31], y, work),
        (x[0], y, work),
        (x[:1], y, work),
        (x, y[:1], work),
        (x, np.zeros((2, 5), np.float32), work),
        (np.zeros((2, 64), np.float32)[:, ::2], y, work),
        (x, np.zeros((4, 2), np.float32).T, work),
        (x, y, work[:255]),
        (x, y, np.zeros(512, np.float32)[::2]),
    ):
        with pytest.raises(ValueError):
            native.product(w, *bad)


def test_wrong_matrices_are_refused():
    data = np.zeros((3, 96), np.uint8)
    table, starts = np.zeros(16, np.uint8), np.zeros(4, np.uint32)
    escapes = np.zeros(2, np.uint32)
    native.Matrix(Format.PACKED, 3, 64, data, table, starts, escapes)
    for bad in (
        (data[:2], table, starts, escapes),
        (np.zeros((3, 192), np.uint8)[:, ::2], table, starts, escapes),
        (data, None, starts, escapes),
        (data, table, None, escapes),
        (data, table, starts, None),
        (data, table[:15], starts, escapes),
        (data, table.astype(np.int64), starts, escapes),
        (data, np.zeros(32, np.uint8)[::2], starts, escapes),
        (data, table, starts[:3], escapes),
        (data, table, starts.astype(np.int64), escapes),
        (data, table, np.zeros(8, np.uint32)[::2], escapes),
        (data, table, starts, escapes.astype(np.int64)),
        (data, table, starts, np.zeros(4, np.uint32)[::2]),
    ):
        with pytest.raises(ValueError):
            native.Matrix(Format.PACKED, 3, 64, *bad)
    for fmt, size in ((Format.BF16, 2), (Format.F32, 4)):
        with pytest.raises(ValueError):
            native.Matrix(fmt, 3, 5, np.zeros(15 * size - 1, np.uint8))


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_pieces_of_one_matrix_prepare_x_once(fmt, count):
    rng = generator("again", fmt, count)
    weights, x = weights_of(rng, fmt, (230, 320)), floats(rng, (count, 320))

    def pieces(y):
        scratch = np.empty(native.scratch_floats(320, count), np.float32)
        for row in (0, 128):
            piece = matrix(fmt, weights[row : row + 128])
            native.product(piece, x, y[:, row : row + piece.rows], scratch, row > 0)

    got = everywhere(pieces, (count, 230), threads=(1, 2), fmt=fmt, count=count)
    whole = everywhere(lambda y: multiply(matrix(fmt, weights), x, y), (count, 230), fmt=fmt)
    same(got, whole, fmt=fmt, count=count)


def test_c_refuses_nulls_and_empty_shapes():
    w = ffi.new("kimi_matrix *")
    data, floats_ = ffi.new("uint8_t[]", 4096), ffi.new("float[]", 1024)
    words = ffi.new("uint32_t[]", 16)

    def call(fmt=Format.BF16, rows=2, cols=64, count=1, **nulls):
        w.format, w.rows, w.cols = fmt, rows, cols
        w.data, w.table, w.starts, w.escapes = (
            nulls.get(name, pointer)
            for name, pointer in (
                ("data", data),
                ("table", data),
                ("starts", words),
                ("escapes", words),
            )
        )
        x, y, work = (nulls.get(name, floats_) for name in ("x", "y", "scratch"))
        return lib.kimi_product(nulls.get("w", w), x, 64, count, y, 2, work)

    assert call() == 0
    assert call(Format.PACKED) == 0
    assert call(x=ffi.NULL) == 0  # what the first call left in scratch
    for name in ("w", "data", "y", "scratch"):
        assert call(**{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
    for name in ("table", "starts", "escapes"):
        assert call(Format.PACKED, **{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
        assert call(**{name: ffi.NULL}) == 0, name
    for bad in ({"rows": 0}, {"cols": 0}, {"count": 0}, {"fmt": 3}, {"fmt": -1}, {"rows": -1}):
        assert call(**bad) == lib.KIMI_E_ARGUMENT, bad
    for cols in (1, 63, 65, 65600):
        assert call(Format.PACKED, cols=cols) == lib.KIMI_E_ARGUMENT, cols


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("formats", [[f] for f in Format] + [list(Format), [2, 2, 0, 0, 2, 1]])
def test_several_products_are_each_alone(formats, count):
    rng = generator("several", formats, count)
    x, rows = floats(rng, (count, 320)), [130, 3, 96, 1, 70, 5]
    ws = [
        matrix(Format(fmt), weights_of(rng, Format(fmt), (n, 320)))
        for fmt, n in zip(formats, rows, strict=False)
    ]
    ends = np.cumsum([0, *(w.rows for w in ws)])

    def together(y):
        scratch = np.empty(native.scratch_floats(320, count), np.float32)
        native.products(ws, x, [y[:, a:b] for a, b in pairwise(ends)], scratch)

    def alone(y):
        for w, a, b in zip(ws, ends, ends[1:], strict=False):
            part = np.empty((count, w.rows), np.float32)
            multiply(w, x, part)
            y[:, a:b] = part

    got = everywhere(together, (count, ends[-1]), threads=(1, 2, 3), count=count)
    same(got, everywhere(alone, (count, ends[-1])), count=count)


def test_products_that_do_not_fit_are_refused():
    rng = generator("unfit")
    w, other = (matrix(Format.BF16, weights_of(rng, Format.BF16, (4, c))) for c in (64, 128))
    x, y, work = np.zeros((2, 64), np.float32), np.zeros((2, 4), np.float32), np.zeros(512, "f4")
    native.products([w, w], x, [y, y], work)
    for ws, ys in (([w, other], [y, y]), ([w], [y[:1]]), ([w, w], [y]), ([w], [y[:, :3]])):
        with pytest.raises(ValueError):
            native.products(ws, x, ys, work)
    structs, ys = ffi.new("kimi_matrix *[]", [w.struct, other.struct]), [ffi.new("float[]", 8)] * 2
    strides, floats_ = [4, 4], ffi.new("float[]", 512)
    assert lib.kimi_products(structs, 1, floats_, 64, 2, ys, strides, floats_) == 0
    for n in (0, 2):
        found = lib.kimi_products(structs, n, floats_, 64, 2, ys, strides, floats_)
        assert found == lib.KIMI_E_ARGUMENT
    null = [ffi.NULL] * 2
    assert lib.kimi_products(null, 1, floats_, 64, 2, ys, strides, floats_) == lib.KIMI_E_ARGUMENT
    assert lib.kimi_products(structs, 1, floats_, 64, 2, null, strides, floats_) == (
        lib.KIMI_E_ARGUMENT
    )
    mixed = matrix(Format.F32, np.zeros((4, 64), np.float32))
    structs[1] = mixed.struct
    assert lib.kimi_products(structs, 2, ffi.NULL, 64, 2, ys, strides, floats_) == (
        lib.KIMI_E_ARGUMENT  # scratch cannot be as both of them want it
    )


def test_escapes_out_of_order_in_any_row_are_refused():
    rng = generator("refused escapes")
    weights = weights_of(rng, Format.PACKED, (64, 64))
    good = matrix(Format.PACKED, weights)
    x, y = floats(rng, (1, 64)), np.zeros((1, 64), np.float32)
    work = np.zeros(native.scratch_floats(64, 1), np.float32)
    for row in (0, 31, 63):
        data, table, starts, _ = good._kept
        starts = np.zeros(65, np.uint32)
        starts[row + 1 :] = 2
        bad = native.Matrix(
            Format.PACKED, 64, 64, data, table, starts, np.array([9, 9], "u4") << 16
        )
        for threads in (1, 2):
            native.set_threads(threads)
            with pytest.raises(CheckpointError, match="out of order"):
                native.products([good, bad], x, [y, y.copy()], work)
    native.set_threads(1)
