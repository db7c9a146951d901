"""RMS norm, L2 norm and the attention residual mix."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import ffi, lib

from . import reference
from .hostile import KINDS, close, everywhere, floats, generator, same, scalar_exp, shifted, strided

WIDTHS = [*range(1, 36), 63, 64, 65, 127, 128, 129, 1023, 1025]
COUNTS = [1, 2, 3, 5, 64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [{}, {"gap": 3}, {"offset": 1}], ids=str)
def test_rmsnorm(kind, layout):
    for i, n in enumerate(WIDTHS):
        count = COUNTS[i % 5]
        rng = generator("rmsnorm", kind, n)
        x, weight = floats(rng, (count, n), kind), floats(rng, n)
        if "gap" in layout:
            moved = strided(x, layout["gap"])
        else:
            moved = shifted(x, layout.get("offset", 0))
        parameters = {"kind": kind, "n": n, "count": count}

        def run(y, x=moved, weight=weight):
            native.rmsnorm(x, weight, 1e-5, y)

        y = everywhere(run, (count, n), **layout, **parameters)
        for t in (0, count - 1):
            alone = everywhere(lambda y, x=moved[t : t + 1]: run(y, x), (1, n), **parameters)
            same(y[t : t + 1], alone, token=t, **parameters)
        if kind != "special":
            want = reference.rmsnorm64(x, weight, 1e-5)
            # two roundings to float32; below the normal range each loses half a step
            bound = 2.0**-23 * 1.01 * np.abs(want) + 2.0**-149 * (1 + np.abs(weight))
            close(y, want, bound, **parameters)


def test_rmsnorm_in_place():
    rng = generator("place")
    x, weight = floats(rng, (5, 131)), floats(rng, 131)
    want = everywhere(lambda y: native.rmsnorm(x, weight, 1e-5, y), (5, 131))

    def run(y):
        y[...] = x
        native.rmsnorm(y, weight, 1e-5, y)

    same(everywhere(run, (5, 131), gap=7), want)


def test_rmsnorm_eps_stands_inside_the_root():
    x = np.full((1, 64), 1e-3, np.float32)
    y = everywhere(lambda y: native.rmsnorm(x, np.ones(64, np.float32), 1e-6, y), (1, 64))
    close(y, np.full((1, 64), 0.5**0.5), 2e-7)
    zero = np.zeros((2, 64), np.float32)
    y = everywhere(lambda y: native.rmsnorm(zero, np.ones(64, np.float32), 1e-5, y), (2, 64))
    same(y, zero)


@pytest.mark.parametrize("kind", KINDS)
def test_l2norm(kind):
    for i, dim in enumerate(WIDTHS):
        count, heads = COUNTS[i % 4], 1 + i % 3
        x = floats(generator("l2norm", kind, dim), (count, heads, dim), kind)

        def run(y, x=x):
            y[...] = x
            native.l2norm(y, 1e-6, 0.25)

        y = everywhere(run, x.shape, offset=i % 2, kind=kind, dim=dim)
        if kind != "special":
            v = x.astype(np.float64)
            want = v / np.sqrt((v * v).sum(axis=-1, keepdims=True) + 1e-6) * 0.25
            bound = 2.0**-24 * 1.01 * np.abs(want) + 2.0**-150
            close(y, want, bound, kind=kind, dim=dim)


def mix_inputs(s, count, n, kind="plain"):
    rng = generator("mix", s, count, n, kind)
    sources = np.stack([floats(rng, (count, n), kind) for _ in range(s)])
    return sources, floats(rng, n), floats(rng, n) / np.float32(n**0.5)


@pytest.mark.parametrize("kind", ["plain", "tiny", "special"])
@pytest.mark.parametrize("s", [1, 2, 3, 9, 256])
def test_mix_literal_order(s, kind):
    for n in (1, 2, 7, 8, 9, 16, 33, 128, 129, 1025):
        sources, norm, proj = mix_inputs(s, 2, n, kind)
        y = everywhere(
            lambda y, a=sources, b=norm, c=proj: native.mix(list(a), b, c, 1e-5, y),
            (2, n),
            s=s,
            n=n,
        )
        if kind != "special" and s * n < 20000:
            for t in range(2):
                want = reference.mix(sources[:, t], norm, proj, 1e-5, scalar_exp)
                same(y[t], want, s=s, n=n, token=t, kind=kind)


@pytest.mark.parametrize("s, count, n", [(1, 1, 16), (2, 3, 100), (9, 5, 1024), (9, 2, 7168)])
def test_mix_against_float64(s, count, n):
    sources, norm, proj = mix_inputs(s, count, n)
    y = everywhere(lambda y: native.mix(list(sources), norm, proj, 1e-5, y), (count, n))
    want = reference.mix64(sources, norm, proj, 1e-5)
    # a score of size m is rounded once, so p moves by m 2^-24; then 3 ulp of exp, s + 1 roundings
    close(y, want, (16 + s) * 2.0**-24 * np.abs(sources).sum(axis=0), s=s, n=n)


def test_mix_weighs_the_raw_sources_with_no_overflow():
    big = np.full((1, 64), 1e30, np.float32)
    ones = np.ones(64, np.float32)
    y = everywhere(lambda y: native.mix([big, -big], ones, ones * 9, 1e-5, y), (1, 64))
    close(y, big, 1e30 * 2.0**-22)
    same(everywhere(lambda y: native.mix([big], ones, ones, 1e-5, y), (1, 64)), big)


def test_mix_tokens_alone_and_threads():
    sources, norm, proj = mix_inputs(5, 40, 515)
    y = everywhere(
        lambda y: native.mix(list(sources), norm, proj, 1e-5, y), (40, 515), threads=(1, 2, 3)
    )
    for t in (0, 1, 39):
        one = [np.ascontiguousarray(a[t : t + 1]) for a in sources]
        alone = everywhere(lambda y, one=one: native.mix(one, norm, proj, 1e-5, y), (1, 515))
        same(y[t : t + 1], alone, token=t)


def test_norm_threads():
    rng = generator("threads")
    x, weight = floats(rng, (90, 700), "special"), floats(rng, 700)
    everywhere(lambda y: native.rmsnorm(x, weight, 1e-5, y), x.shape, threads=(1, 2, 3))

    def run(y):
        y[...] = x.reshape(9, 10, 700)
        native.l2norm(y, 1e-6, 0.125)

    everywhere(run, (9, 10, 700), threads=(1, 2, 3))


def test_wrong_arrays_are_refused():
    x, weight = np.zeros((3, 8), np.float32), np.zeros(8, np.float32)
    for bad in (
        (x.astype(np.float64), weight, x),
        (x, weight.astype(np.float64), x),
        (x, weight, x.astype(np.float64)),
        (x, weight[:7], x),
        (x, weight, x[:2]),
        (x, weight, x[:, :7]),
        (np.zeros((3, 16), np.float32)[:, ::2], weight, x),
        (x, np.zeros(16, np.float32)[::2], x),
    ):
        with pytest.raises(ValueError):
            native.rmsnorm(bad[0], bad[1], 1e-5, bad[2])
    for bad in (np.zeros((2, 2, 8)), np.zeros((2, 2, 16), np.float32)[:, :, ::2]):
        with pytest.raises(ValueError):
            native.l2norm(bad, 1e-6, 1.0)
    y = np.zeros((3, 8), np.float32)
    for sources, norm, proj, out in (
        ([x, x[:2]], weight, weight, y),
        ([x, x.astype(np.float64)], weight, weight, y),
        ([x], weight[:7], weight, y),
        ([x], weight, weight.astype(np.float64), y),
        ([x], weight, weight, np.zeros((3, 16), np.float32)[:, ::2]),
        ([np.zeros((3, 16), np.float32)[:, ::2]], weight, weight, y),
    ):
        with pytest.raises(ValueError):
            native.mix(sources, norm, proj, 1e-5, out)


def test_c_refuses_nulls_and_empty_shapes():
    v, null, bad = ffi.new("float[]", 64), ffi.NULL, lib.KIMI_E_ARGUMENT

    def rmsnorm(x=v, count=2, n=4, weight=v, y=v):
        return lib.kimi_rmsnorm(x, 4, count, n, weight, 1e-5, y, 4)

    def l2norm(x=v, count=2, heads=2, dim=4):
        return lib.kimi_l2norm(x, count, heads, dim, 1e-6, 1.0)

    pointers = ffi.new("float *[]", [v, v])

    def mix(sources=pointers, s=2, count=2, n=4, norm=v, proj=v, y=v):
        return lib.kimi_mix(sources, s, count, n, norm, proj, 1e-5, y)

    assert rmsnorm() == l2norm() == mix() == 0
    for change in ({"x": null}, {"weight": null}, {"y": null}, {"count": 0}, {"n": 0}):
        assert rmsnorm(**change) == bad, change
    for change in ({"x": null}, {"count": 0}, {"heads": 0}, {"dim": 0}):
        assert l2norm(**change) == bad, change
    for change in (
        *({name: null} for name in ("sources", "norm", "proj", "y")),
        *({name: 0} for name in ("s", "count", "n")),
        {"s": lib.KIMI_MAX_SOURCES + 1},
    ):
        assert mix(**change) == bad, change
