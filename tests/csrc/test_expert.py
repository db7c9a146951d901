"""Routed experts as one operation: the same bits as their three products and SiTU one by one."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import KimiError
from kimi_cli.native import Expert, ffi, lib

from .hostile import Output, everywhere, floats, generator, multiply_mxfp4, same
from .test_mxfp4 import experts

SHAPES = [(32, 32), (64, 32), (32, 96), (128, 128), (160, 544), (416, 288), (256, 1056)]
"""(latent, inter): whole super-blocks and odd ones, fewer rows than threads and more."""
BETA, LINEAR_BETA = 4.0, 25.0


def draw(latent, inter, *more):
    """Weights as `native.Expert` takes them."""
    rng = generator("expert", latent, inter, *more)
    shapes = [(inter, latent), (latent, inter), (inter, latent)]
    return [part for rows, cols in shapes for part in experts(rng, rows, cols // 32)]


def parts(weights, x):
    """The expert's three products and SiTU, one by one."""
    w1, s1, w2, s2, w3, s3 = weights
    gate, up = (np.empty((len(x), len(w1)), np.float32) for _ in range(2))
    y = np.empty_like(x)
    multiply_mxfp4(w1, s1, x, gate)
    multiply_mxfp4(w3, s3, x, up)
    native.situ(gate, up, BETA, LINEAR_BETA, gate)
    multiply_mxfp4(w2, s2, gate, y)
    return y


@pytest.mark.parametrize("latent, inter", SHAPES)
@pytest.mark.parametrize("count, k", [(1, 1), (1, 3), (5, 2), (33, 1), (9, 4)])
def test_is_its_parts(latent, inter, count, k):
    rng = generator("experts", latent, inter, count, k)
    x, order = floats(rng, (count, latent)), rng.permutation(count * k).tolist()
    cuts = sorted(rng.choice(range(1, count * k), min(3, count * k - 1), False).tolist())
    chosen = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count * k], strict=True)]
    weights = [draw(latent, inter, count, k, n) for n in range(len(chosen))]
    most = max(map(len, chosen))

    def whole(out):
        work = Output((native.experts_scratch_floats(latent, inter, most),))
        gate, up, y = (Output((most, n)) for n in (inter, inter, latent))
        wanted = [(Expert(w), places) for w, places in zip(weights, chosen, strict=True)]
        room = (gate.view, up.view, y.view, out, BETA, LINEAR_BETA, work.view)
        native.experts(wanted, x, *room)
        for guarded in (work, gate, up, y):
            guarded.check(written=False, latent=latent, inter=inter, count=count)

    got = everywhere(whole, (count, k, latent), threads=(1, 2, 3, 8), latent=latent, inter=inter)
    for w, places in zip(weights, chosen, strict=True):
        want = parts(w, x[[place // k for place in places]])
        same(got.reshape(-1, latent)[places], want, latent=latent, inter=inter, count=count)


def test_wrong_arrays_are_refused():
    weights = draw(64, 96)
    x, out = np.zeros((2, 64), np.float32), np.zeros((2, 3, 64), np.float32)
    gate, up, y = (np.zeros((4, n), np.float32) for n in (96, 96, 64))
    work = np.zeros(native.experts_scratch_floats(64, 96, 4), np.float32)
    e = Expert(weights)

    def call(wanted=((e, [0, 5]),), x=x, gate=gate, up=up, y=y, out=out, work=work):
        native.experts(wanted, x, gate, up, y, out, BETA, LINEAR_BETA, work)

    call()
    for bad in (
        {"wanted": [(e, [0]), (Expert(draw(96, 64)), [1])]},
        {"x": x[:1]},
        {"x": x[:, :32]},
        {"gate": gate[:, :64]},
        {"up": up[:1]},
        {"y": y[:, :32]},
        {"out": out[:, :, :32]},
        {"work": work[:-1]},
    ):
        with pytest.raises(ValueError):
            call(**bad)
    for places in ([], [-1], [6], [0, 1, 2, 3, 4]):
        with pytest.raises(KimiError):
            call(wanted=[(e, places)])
    for bad in (
        [*weights[2:], *weights[:2]],
        [weights[0].astype(np.int32), *weights[1:]],
        [*weights[:5], weights[5][:, :1]],
    ):
        with pytest.raises(ValueError):
            Expert(bad)


def test_c_refuses_nulls_and_odd_shapes():
    data, numbers = ffi.new("uint8_t[]", 512), ffi.new("float[]", 1024)
    matrix = {"packed": data, "scales": data}
    whole = ffi.new("kimi_expert *", {"w1": matrix, "w2": matrix, "w3": matrix})

    def call(experts=(whole,), latent=32, inter=32, starts=(0, 1), places=(0,), **rest):
        gate, up, y, out, work = (rest.get(n, numbers) for n in ("gate", "up", "y", "out", "work"))
        n, count, k, most = (rest.get(n, 1) for n in ("n", "count", "k", "most"))
        x = rest.get("x", numbers)
        return lib.kimi_experts(
            experts, n, starts, places, latent, inter, 1.0, 1.0, x, count, k, most, gate, up, y,
            out, work,
        )  # fmt: skip

    assert call() == 0
    for name in ("experts", "starts", "places", "x", "gate", "up", "y", "out", "work"):
        assert call(**{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
    assert call(experts=[ffi.NULL]) == lib.KIMI_E_ARGUMENT
    for name in ("w1", "w3", "w2"):
        for part in ("packed", "scales"):
            half = ffi.new("kimi_expert *", {"w1": matrix, "w2": matrix, "w3": matrix})
            setattr(getattr(half, name), part, ffi.NULL)
            assert call(experts=[half]) == lib.KIMI_E_ARGUMENT, name
    for bad in (
        {"latent": 0}, {"latent": 33}, {"inter": 31}, {"inter": -32}, {"count": 0}, {"k": 0},
        {"n": 0}, {"most": 0}, {"starts": (1, 2)}, {"starts": (0, 0)}, {"starts": (0, -1)},
        {"starts": (0, 2), "places": (0, 0)}, {"places": (1,)}, {"places": (-1,)},
    ):  # fmt: skip
        assert call(**bad) == lib.KIMI_E_ARGUMENT, bad
