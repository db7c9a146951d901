"""Inputs that break kernels, outputs that show trespass, and the one comparison of bits."""

from __future__ import annotations

import numpy as np

from kimi_cli import native

from . import reference

GUARD, SENTINEL, POISON = 80, 0x7FC0BEEF, 0x7FA5A5A5
"""Guard floats around an output, their bits, and a signalling NaN no arithmetic can produce."""

SPECIAL = np.array(
    [
        np.inf,
        -np.inf,
        np.nan,
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.17549435e-38,
        3.4028235e38,
        -3.4028235e38,
    ],
    np.float32,
)
KINDS = ["plain", "tiny", "huge", "wide", "special"]
PAIRS = [
    ("plain", "plain"),
    ("plain", "tiny"),
    ("tiny", "plain"),
    ("tiny", "tiny"),
    ("tiny", "huge"),
    ("huge", "huge"),
    ("wide", "wide"),
    ("plain", "special"),
    ("special", "special"),
]
"""Kinds of (weights, x)."""


def generator(*seed):
    """A random generator that depends on nothing but these integers and strings."""
    return np.random.default_rng([int.from_bytes(str(s).encode(), "little") for s in seed])


def floats(rng, shape, kind="plain"):
    """float32 values: normal, subnormal and zero, near overflow, any finite, or with infinities."""
    sign = rng.integers(0, 2, shape, dtype=np.uint32) << 31
    if kind == "tiny":
        bits = rng.integers(0, 0x01800000, shape, dtype=np.uint32)
        return (np.where(rng.random(shape) < 0.1, 0, bits).astype(np.uint32) | sign).view(
            np.float32
        )
    if kind == "huge":
        return (rng.integers(0x7D000000, 0x7F800000, shape, dtype=np.uint32) | sign).view(
            np.float32
        )
    if kind == "wide":
        return (rng.integers(0, 0x7F800000, shape, dtype=np.uint32) | sign).view(np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if kind == "special":
        return np.where(rng.random(shape) < 0.06, rng.choice(SPECIAL, shape), values)
    return values


def bf16(rng, shape, kind="plain"):
    """bf16 bit patterns of the same kinds."""
    return (floats(rng, shape, kind).view(np.uint32) >> 16).astype(np.uint16)


def shifted(array, elements):
    """The same values, starting `elements` into a fresh buffer that ends where they end."""
    buffer = np.empty(elements + array.size, array.dtype)
    buffer[elements:] = array.ravel()
    return buffer[elements:].reshape(array.shape)


def strided(array, gap, fill=np.nan):
    """The same rows, `gap` elements of `fill` after each."""
    buffer = np.full((len(array), array.shape[1] + gap), fill, array.dtype)
    buffer[:, : array.shape[1]] = array
    return buffer[:, : array.shape[1]]


class Output:
    """A poisoned float32 output between guard zones; two-dimensional rows may be `gap` apart."""

    def __init__(self, shape, gap=0, offset=0):
        rows, cols = shape if gap else (1, int(np.prod(shape)))
        self.buffer = np.full(2 * GUARD + offset + rows * (cols + gap), SENTINEL, np.uint32)
        inner = self.buffer[GUARD + offset : len(self.buffer) - GUARD].view(np.float32)
        self.view = inner.reshape(rows, cols + gap)[:, :cols] if gap else inner.reshape(shape)
        self.view.view(np.uint32)[...] = POISON

    def check(self, written=True, **parameters):
        """Nothing around the output was touched, and all of it was written."""
        inside = self.view.view(np.uint32)
        left = int((inside == POISON).sum())
        assert not (written and left), f"{parameters}: {left} outputs were never written"
        result = inside.copy()
        inside[...] = SENTINEL
        touched = np.flatnonzero(self.buffer != SENTINEL)
        inside[...] = result
        assert not len(touched), f"{parameters}: wrote outside the output, at {touched[:4]}"


def bits(array):
    """Bit patterns, all NaN alike."""
    array = np.ascontiguousarray(array, np.float32)
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def same(got, want, **parameters):
    """Equal bit for bit, NaN payload aside."""
    assert got.shape == want.shape, f"{parameters}: shape {got.shape}, want {want.shape}"
    differ = np.argwhere(bits(got) != bits(want))
    if len(differ):
        at = tuple(int(i) for i in differ[0])
        raise AssertionError(
            f"{parameters}: {len(differ)} of {got.size} differ, first at {at}: "
            f"got {got[at]!r} {bits(got)[at]:#010x}, want {want[at]!r} {bits(want)[at]:#010x}"
        )


def close(got, want, bound, **parameters):
    """|got - want| <= bound, element by element; `want` and `bound` in float64."""
    error = np.abs(got.astype(np.float64) - want)
    bad = np.argwhere(~(error <= bound))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        limit = np.broadcast_to(bound, error.shape)[at]
        raise AssertionError(
            f"{parameters}: {len(bad)} of {got.size} beyond the bound, first at {at}: "
            f"got {got[at]!r}, want {want[at]!r}, error {error[at]:.3g} > {limit:.3g}"
        )


def everywhere(run, *shapes, threads=(1,), gap=0, offset=0, **parameters):
    """Runs `run(*outputs)` per instruction set and thread count; all must give the same bits.

    Outputs are poisoned and guarded each time. Returns copies of what scalar gave on one thread:
    one array, or a list of several.
    """
    first = None
    for isa in native.supported_isas():
        for count in threads:
            native.set_isa(isa)
            native.set_threads(count)
            outputs = [Output(shape, gap, offset) for shape in shapes]
            run(*(o.view for o in outputs))
            where = {**parameters, "isa": isa, "threads": count}
            for output in outputs:
                output.check(**where)
            results = [o.view.copy() for o in outputs]
            first = first or results
            for got, want in zip(results, first, strict=True):
                same(got, want, **where)
    return first[0] if len(first) == 1 else first


def matrix(fmt, weights, offset=0, table=None, first=0):
    """A Matrix of bf16 `weights` (float32 ones, for Format.F32) whose arrays start misaligned."""
    rows, cols = weights.shape
    if fmt != native.Format.PACKED:
        data = shifted(np.ascontiguousarray(weights), offset)
        return native.Matrix(fmt, rows, cols, data.reshape(-1).view(np.uint8))
    table = reference.common_bytes(weights) if table is None else table
    packed, starts, escapes = reference.pack(weights, table, first)
    return native.Matrix(
        fmt,
        rows,
        cols,
        shifted(packed, offset),
        shifted(table, offset),
        shifted(starts, offset),
        shifted(escapes, offset),
    )


def values(fmt, weights):
    """The float32 values that `matrix` would multiply."""
    return weights if fmt == native.Format.F32 else reference.widen(weights)


def weights_of(rng, fmt, shape, kind="plain"):
    """Random weights as `matrix` wants them."""
    return floats(rng, shape, kind) if fmt == native.Format.F32 else bf16(rng, shape, kind)


def multiply(w, x, y):
    """native.product with poisoned, guarded scratch of exactly the size asked for."""
    work = Output((native.scratch_floats(w.cols, len(x)),))
    native.product(w, x, y, work.view)
    work.check(written=False, rows=w.rows, cols=w.cols, count=len(x))


def multiply_mxfp4(packed, scales, x, y):
    """The same for native.product_mxfp4."""
    work = Output((native.scratch_floats(x.shape[1], len(x)),))
    native.product_mxfp4(packed, scales, x, y, work.view)
    work.check(written=False, rows=len(packed), cols=x.shape[1], count=len(x))


def scalar_exp(x):
    """kimi_exp as the scalar instruction set computes it."""
    return applied(native.exp, x)


def applied(function, x):
    """An elementwise function of float32 x, by scalar."""
    before = native.isa()
    native.set_isa("scalar")
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    function(x, y)
    native.set_isa(before)
    return y
