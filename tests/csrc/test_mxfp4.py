"""The MXFP4 product and its written order; the scan for scale bytes that mean NaN."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import ffi, lib

from . import reference
from .hostile import (
    KINDS,
    close,
    everywhere,
    floats,
    generator,
    multiply_mxfp4,
    same,
    shifted,
    strided,
)

COUNTS = [1, 2, 3, 4, 5, 32, 33, 63, 64, 65, 130]
GROUPS = [*range(1, 14), 15, 16, 17, 19, 31, 32, 33, 35, 63, 65]
"""Groups a row: 32 make one chunk of 1024 columns."""

SCALES = {
    "usual": [120, 121, 122, 123, 124],
    "ends": [0, 1, 127, 252, 254],
    "least": [0],
    "greatest": [254],
}


def experts(rng, rows, groups, scales="usual"):
    """Random packed weights, negative zeros among them, and scale bytes of one sort."""
    packed = rng.integers(0, 256, (rows, groups * 16), dtype=np.uint8)
    packed = np.where(rng.random(packed.shape) < 0.1, np.uint8(0x88), packed)
    return packed, rng.choice(SCALES[scales], (rows, groups)).astype(np.uint8)


def run(rows, groups, count, scales="usual", kind="plain", literal=True, **layout):
    """One product on every instruction set, held against the literal order."""
    rng = generator("mxfp4", rows, groups, count, scales, kind)
    packed, scale = experts(rng, rows, groups, scales)
    x = floats(rng, (count, groups * 32), kind)
    gap, offset = layout.get("gap"), layout.get("offset", 0)
    moved = strided(x, gap) if gap else shifted(x, offset)
    at = [shifted(packed, offset), shifted(scale, offset), moved]
    parameters = {"rows": rows, "groups": groups, "count": count, "scales": scales, "x": kind}
    y = everywhere(lambda y: multiply_mxfp4(*at, y), (count, rows), **layout, **parameters)
    if literal:
        same(y, reference.mxfp4(packed, scale, x), **parameters)
    return y, packed, scale, x


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_literal_order(scales, kind):
    for groups in (1, 2, 3, 4, 5, 7, 33):
        for count in (1, 2, 5):
            run(3, groups, count, scales, kind)


@pytest.mark.parametrize("groups", GROUPS)
def test_shapes(groups):
    for rows in (*range(1, 10), 12, 13, 16, 17, 24, 25):
        for count in (1, COUNTS[(rows + groups) % 8]):
            run(rows, groups, count, literal=count < 4 and rows < 4)


@pytest.mark.parametrize(
    "layout", [{"gap": 3}, {"gap": 128}, {"offset": 1}, {"offset": 5}], ids=str
)
def test_strides_and_misaligned_starts(layout):
    for groups in (1, 4, 7, 33):
        for rows, count in ((1, 1), (5, 1), (3, 4), (2, 65)):
            run(rows, groups, count, "ends", **layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_gives_the_bits_it_gives_alone(kind):
    rng = generator("alone", kind)
    packed, scale = experts(rng, 5, 35, "ends")
    x = floats(rng, (130, 35 * 32), kind)
    alone = everywhere(
        lambda y: [multiply_mxfp4(packed, scale, x[t : t + 1], y[t : t + 1]) for t in range(130)],
        (130, 5),
    )
    for count in COUNTS:
        y = everywhere(lambda y, n=count: multiply_mxfp4(packed, scale, x[:n], y), (count, 5))
        same(y, alone[:count], kind=kind, count=count)


def test_a_row_reads_nothing_of_its_neighbours():
    """Odd rows have scale bytes of 255, which no checkpoint may hold: they must stay theirs."""
    for groups in GROUPS:
        rng = generator("neighbours", groups)
        packed, scale = experts(rng, 7, groups)
        scale[1::2] = 255
        for count in (1, 3, 5):
            x = floats(rng, (count, groups * 32))
            y = everywhere(lambda y, p=packed, s=scale, x=x: multiply_mxfp4(p, s, x, y), (count, 7))
            assert np.isfinite(y[:, ::2]).all() and not np.isfinite(y[:, 1::2]).any(), groups


def test_each_nibble_stands_in_its_place():
    """One weight at a time: its column, its value and its group's scale, by plain arithmetic."""
    groups = 5
    x = (1 + np.arange(groups * 32, dtype=np.float32))[None]
    scale = (125 + np.arange(groups, dtype=np.uint8))[None]
    for c in range(groups * 32):
        packed = np.zeros((1, groups * 16), np.uint8)
        nibble = 1 + c % 15
        packed[0, c // 2] = nibble << 4 if c % 2 else nibble
        y = everywhere(lambda y, p=packed: multiply_mxfp4(p, scale, x, y), (1, 1), column=c)
        assert y[0, 0] == reference.MXFP4[nibble] * (c + 1) * 2.0 ** (c // 32 - 2), c


def test_scale_byte_zero_is_a_subnormal_not_nothing():
    packed = np.full((1, 16), 0x22, np.uint8)
    x = np.full((1, 32), 1, np.float32)
    y = everywhere(
        lambda y: multiply_mxfp4(packed, np.zeros((1, 1), np.uint8), x, y), (1, 1), scale=0
    )
    assert y[0, 0] == 2.0**-122


def test_missing_groups_turn_negative_zero_lanes_positive():
    """Every group underflows its lanes to -0; the padding to four groups adds +0."""
    for groups in range(1, 14):
        packed, scale = np.full((3, groups * 16), 0x22, np.uint8), np.zeros((3, groups), np.uint8)
        for count in (1, 2):
            x = np.full((count, groups * 32), -1e-45, np.float32)
            y = everywhere(lambda y, p=packed, s=scale, x=x: multiply_mxfp4(p, s, x, y), (count, 3))
            assert (y == 0).all() and (np.signbit(y) == (groups % 4 == 0)).all(), (groups, count)


def test_error_against_float64():
    for groups in (2, 33, 112):
        y, packed, scale, x = run(6, groups, 3, literal=False)
        factor = np.ldexp(1.0, np.repeat(scale, 32, axis=1).astype(np.int64) - 127)
        w = reference.mxfp4_values(packed) * factor
        terms = np.abs(x.astype(np.float64)) @ np.abs(w.T)
        # eight roundings in a group, one per four groups, four in the tree
        close(y, x @ w.T, (8 + groups / 4 + 5) * 2.0**-24 * terms, groups=groups)


@pytest.mark.parametrize("kind", ["plain", "tiny", "special"])
def test_threads(kind):
    for rows, count in ((131, 1), (9, 17), (3, 66), (64, 2)):
        rng = generator("threads", rows, count, kind)
        packed, scale = experts(rng, rows, 35, "ends")
        x = floats(rng, (count, 35 * 32), kind)
        everywhere(
            lambda y, p=packed, s=scale, x=x: multiply_mxfp4(p, s, x, y),
            (count, rows),
            threads=(1, 2, 3),
            kind=kind,
        )


def test_scale_nan():
    for n in (1, 2, 15, 16, 17, 63, 64, 65, 1000):
        scales = np.full(n, 254, np.uint8)
        assert native.scale_nan(scales) == -1, n
        for at in {0, n // 2, n - 1}:
            marked = scales.copy()
            marked[at:] = 255
            assert native.scale_nan(marked) == at, (n, at)
    assert native.scale_nan(np.zeros(0, np.uint8)) == -1


def test_wrong_arrays_are_refused():
    packed, scale = np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.uint8)
    x, y, work = (np.zeros(s, np.float32) for s in ((2, 64), (2, 4), (256,)))
    native.product_mxfp4(packed, scale, x, y, work)
    for bad in (
        (packed.astype(np.int32), scale, x, y, work),
        (packed, scale.astype(np.int32), x, y, work),
        (packed[:3], scale, x, y, work),
        (packed, scale[:, :1], x, y, work),
        (packed[:, :31], scale, x, y, work),
        (np.zeros((4, 64), np.uint8)[:, ::2], scale, x, y, work),
        (packed, np.zeros((4, 4), np.uint8)[:, ::2], x, y, work),
        (packed, scale, x.astype(np.float64), y, work),
        (packed, scale, x[:, :63], y, work),
        (packed, scale, x[:1], y, work),
        (packed, scale, x, y[:, :3], work),
        (packed, scale, x, y, work[:255]),
    ):
        with pytest.raises(ValueError):
            native.product_mxfp4(*bad)


def test_c_refuses_nulls_and_empty_shapes():
    data, numbers = ffi.new("uint8_t[]", 512), ffi.new("float[]", 1024)

    def call(
        packed=data, scales=data, rows=2, cols=32, x=numbers, count=1, y=numbers, work=numbers
    ):
        return lib.kimi_product_mxfp4(packed, scales, rows, cols, x, 32, count, y, 2, work)

    assert call() == 0
    for name in ("packed", "scales", "x", "y", "work"):
        assert call(**{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
    for bad in ({"rows": 0}, {"cols": 0}, {"cols": 31}, {"cols": 33}, {"count": 0}, {"rows": -1}):
        assert call(**bad) == lib.KIMI_E_ARGUMENT, bad
