"""exp, sigmoid, tanh and what is built on them, against float64 over the whole float32 range."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import Format, ffi, lib

from . import reference
from .hostile import KINDS, applied, close, everywhere, floats, generator, same, shifted

TRUTH = {
    native.exp: np.exp,
    native.sigmoid: reference.sigmoid64,
    native.tanh: np.tanh,
}
FUNCTIONS = pytest.mark.parametrize("function", TRUTH, ids=lambda f: f.__name__)
SIZES = [*range(1, 36), 63, 64, 65, 127, 129, 1023, 1024, 1025, 2047, 2049, 3100]

BORDERS = [
    *(0.0, 1e-45, 1.17549435e-38, 1.1754942e-38, 1e-30, 2.0**-24, 2.0**-12, 0.625, 1.0),
    *(9.0, 9.01091, 10.0, 16.6, 17.33, 44.0, 44.36, 87.0, 87.33655, 88.0, 88.37626, 88.72283),
    *(88.72284, 89.0, 89.5, 100.0, 103.0, 103.27893, 103.97207, 103.97208, 104.0, 104.5, 128.0),
    *(150.0, 1e3, 1e10, 1e38, 3.4028235e38, 0.34657359, 0.34657362, 0.6931472, 1.0397208),
]


def sweep():
    """Every sign and exponent with 3,000 mantissas, and 64 neighbours of each border."""
    rng = generator("sweep")
    high = np.arange(512, dtype=np.uint32)[:, None] << 23
    dense = (high | rng.integers(0, 1 << 23, (512, 3000), dtype=np.uint32)).ravel()
    near = np.array(BORDERS, np.float32).view(np.uint32)[:, None] + np.arange(-64, 65)
    near = np.clip(near, 0, 0x7F800000).astype(np.uint32).ravel()
    halves = np.arange(-20800, 17800, dtype=np.float32) * np.float32(np.log(2) / 200)
    every = np.concatenate([dense, near, near | 0x80000000, halves.view(np.uint32)])
    return every.view(np.float32)


@FUNCTIONS
def test_within_three_ulp(function):
    x = sweep()
    y = everywhere(lambda y: function(x, y), x.shape, function=function.__name__)
    with np.errstate(all="ignore"):
        distance = reference.ulps(y, TRUTH[function](x.astype(np.float64)))
    worst = int(distance.argmax())
    assert distance[worst] <= 3, (
        f"{function.__name__}({x[worst]!r}) = {y[worst]!r}: {distance[worst]}"
    )


def test_the_ulp_measure_counts_subnormal_steps():
    for y, truth, want in (
        (1e-45, 0.0, 1.0),
        (0.0, 1.5 * 2.0**-149, 1.5),
        (2.0**-126, 2.0**-126 - 2.0**-149, 1.0),
        (1.0, 1.0 + 2.0**-23, 1.0),
        (np.inf, 2.0**128 - 2.0**104, 1.0),
        (np.inf, np.inf, 0.0),
        (np.nan, np.nan, 0.0),
        (np.nan, 1.0, np.inf),
        (1.0, np.nan, np.inf),
    ):
        assert reference.ulps(np.float32(y), np.float64(truth)) == want, (y, truth)


@pytest.mark.parametrize(
    "function, x, want",
    [
        (
            native.exp,
            [-np.inf, -1e4, -104, np.inf, 1e4, 88.8, 0, -0.0],
            [0, 0, 0, *[np.inf] * 3, 1, 1],
        ),
        (native.sigmoid, [-np.inf, -1e4, np.inf, 1e4, 0, -0.0], [0, 0, 1, 1, 0.5, 0.5]),
        (native.tanh, [-np.inf, -1e4, -10, 10, 1e4, np.inf, 0], [-1, -1, -1, 1, 1, 1, 0]),
    ],
    ids=["exp", "sigmoid", "tanh"],
)
def test_limits_are_exact(function, x, want):
    x, want = np.array(x, np.float32), np.array(want, np.float32)
    same(everywhere(lambda y: function(x, y), x.shape), want, function=function.__name__)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(everywhere(lambda y: function(nans, y), nans.shape)).all()


def test_subnormals_pass_through_tanh():
    x = np.array([1e-45, -1e-45, 1e-40, -1e-40, 1.17549435e-38], np.float32)
    same(everywhere(lambda y: native.tanh(x, y), x.shape), x)


@FUNCTIONS
def test_every_size_start_and_thread_count(function):
    rng = generator("sizes", function.__name__)
    for n in SIZES:
        offset = n % 4
        x = shifted(floats(rng, n, KINDS[n % 5]), offset)
        y = everywhere(lambda y, x=x: function(x, y), (n,), offset=offset, n=n)
        alone = np.array([applied(function, x[i : i + 1])[0] for i in range(0, n, 1 + n // 40)])
        same(y[:: 1 + n // 40], alone, n=n)
    x = floats(rng, 70001, "special")
    everywhere(lambda y: function(x, y), (70001,), threads=(1, 2, 3))
    empty = np.zeros(0, np.float32)
    function(empty, empty)


@FUNCTIONS
def test_in_place(function):
    x = floats(generator("place"), 1500, "special")

    def run(y):
        y[...] = x
        function(y, y)

    same(everywhere(run, x.shape), applied(function, x), function=function.__name__)


def test_gate():
    for n in SIZES:
        rng = generator("gate", n)
        x, by = floats(rng, n, KINDS[n % 5]), floats(rng, n, "special")
        y = everywhere(lambda y, x=x, by=by: native.gate(x, by, y), (n,), n=n)
        with np.errstate(all="ignore"):
            same(y, x * applied(native.sigmoid, by), n=n)
    rng = generator("gate")
    x, by = floats(rng, 50000, "wide"), 20 * floats(rng, 50000)
    everywhere(lambda y: native.gate(x, by, y), x.shape, threads=(1, 2, 3))

    def in_place(y):
        y[...] = x
        native.gate(y, by, y)

    same(everywhere(in_place, x.shape), x * applied(native.sigmoid, by))


@pytest.mark.parametrize("beta, linear_beta", [(4.0, 25.0), (1.0, 1.0), (0.5, 3.0)])
def test_situ(beta, linear_beta):
    for n in (*SIZES, 40000):
        rng = generator("situ", n)
        g, u = floats(rng, n) * 6, floats(rng, n) * 40
        if n % 3 == 0:
            g[::7], u[::5] = floats(rng, len(g[::7]), "wide"), floats(rng, len(u[::5]), "wide")
        y = everywhere(
            lambda y, g=g, u=u: native.situ(g, u, beta, linear_beta, y),
            (n,),
            threads=(1, 3) if n == 40000 else (1,),
            n=n,
        )
        want = reference.situ64(g, u, beta, linear_beta)
        # three functions of 3 ulp, six more roundings; then what underflow may lose
        close(y, want, 12 * 2.0**-23 * np.abs(want) + 40 * 2.0**-149, n=n, beta=beta)
    for place in (0, 1):

        def in_place(y, place=place):
            y[...] = (g, u)[place]
            native.situ(*((y, u) if place == 0 else (g, y)), beta, linear_beta, y)

        same(everywhere(in_place, y.shape), y, place=place)


def test_add():
    for n in (*SIZES, 60000):
        rng = generator("add", n)
        x, start = floats(rng, n, KINDS[n % 5]), floats(rng, n, KINDS[n // 2 % 5])

        def run(y, x=x, start=start):
            y[...] = start
            native.add(x, y)

        with np.errstate(all="ignore"):
            same(everywhere(run, (n,), threads=(1, 3), n=n), start + x, n=n)


def test_widen():
    every = np.arange(65536, dtype=np.uint16)
    for offset in range(4):
        raw = shifted(every.view(np.uint8), offset)
        y = everywhere(lambda y, raw=raw: native.widen(Format.BF16, raw, y), (65536,))
        same(y, reference.widen(every), offset=offset)
        raw = shifted(sweep()[:999].view(np.uint8), offset)
        y = everywhere(lambda y, raw=raw: native.widen(Format.F32, raw, y), (999,))
        assert np.array_equal(y.view(np.uint8), raw), offset


def test_wrong_arrays_are_refused():
    x, wide = np.zeros(6, np.float32), np.zeros(6)
    for function in (*TRUTH, native.add):
        for bad in ((wide, x), (x, wide), (x, x[:5]), (x[::2], x[:3]), (x[:3], x[::2])):
            with pytest.raises(ValueError):
                function(*bad)
    for bad in ((wide, x, x), (x, wide, x), (x, x, wide), (x, x[:5], x), (x, x, x[:5])):
        with pytest.raises(ValueError):
            native.gate(*bad)
        with pytest.raises(ValueError):
            native.situ(bad[0], bad[1], 4.0, 25.0, bad[2])
    raw = np.zeros(12, np.uint8)
    for fmt, source, out in (
        (Format.BF16, raw, x[:5]),
        (Format.F32, raw, x),
        (Format.BF16, raw.astype(np.float64), x),
        (Format.BF16, np.zeros(24, np.uint8)[::2], x),
        (Format.BF16, raw, wide),
    ):
        with pytest.raises(ValueError):
            native.widen(fmt, source, out)


def test_c_refuses_nulls():
    x, null, bad = ffi.new("float[]", 8), ffi.NULL, lib.KIMI_E_ARGUMENT
    for function in (lib.kimi_exp, lib.kimi_sigmoid, lib.kimi_tanh, lib.kimi_add):
        assert function(x, 8, x) == function(x, 0, x) == 0
        assert function(null, 8, x) == function(x, 8, null) == function(x, -1, x) == bad
    for arguments in ((null, x, x), (x, null, x), (x, x, null)):
        assert lib.kimi_gate(arguments[0], arguments[1], 8, arguments[2]) == bad
        assert lib.kimi_situ(arguments[0], arguments[1], 8, 4.0, 25.0, arguments[2]) == bad
    assert lib.kimi_widen(Format.BF16, null, 4, x) == bad
    assert lib.kimi_widen(Format.BF16, x, 4, null) == bad
    assert lib.kimi_widen(Format.PACKED, x, 4, x) == bad
    assert lib.kimi_widen(Format.F32, x, -1, x) == bad
