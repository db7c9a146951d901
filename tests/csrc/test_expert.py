"""A routed expert as one operation: the same bits as its three products and SiTU one by one."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import ffi, lib

from .hostile import Output, everywhere, floats, generator, multiply_mxfp4, same
from .test_mxfp4 import experts

SHAPES = [(32, 32), (64, 32), (32, 96), (128, 128), (160, 544), (416, 288), (256, 1056)]
"""(latent, inter): whole super-blocks and odd ones, fewer rows than threads and more."""
BETA, LINEAR_BETA = 4.0, 25.0


def draw(latent, inter, count):
    """Weights as `native.expert` takes them, and x."""
    rng = generator("expert", latent, inter, count)
    shapes = [(inter, latent), (latent, inter), (inter, latent)]
    weights = [part for rows, cols in shapes for part in experts(rng, rows, cols // 32)]
    return weights, floats(rng, (count, latent))


@pytest.mark.parametrize("latent, inter", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_is_its_parts(latent, inter, count):
    weights, x = draw(latent, inter, count)

    def whole(gate, up, y):
        work = Output((native.expert_scratch_floats(latent, inter, count),))
        native.expert(native.Expert(weights), x, gate, up, y, BETA, LINEAR_BETA, work.view)
        work.check(written=False, latent=latent, inter=inter, count=count)

    def parts(gate, up, y):
        w1, s1, w2, s2, w3, s3 = weights
        multiply_mxfp4(w1, s1, x, gate)
        multiply_mxfp4(w3, s3, x, up)
        native.situ(gate, up, BETA, LINEAR_BETA, gate)
        multiply_mxfp4(w2, s2, gate, y)

    shapes = (count, inter), (count, inter), (count, latent)
    got = everywhere(whole, *shapes, threads=(1, 2, 3, 8), latent=latent, inter=inter)
    want = everywhere(parts, *shapes, latent=latent, inter=inter)
    for name, a, b in zip(("gate", "up", "y"), got, want, strict=True):
        same(a, b, name=name, latent=latent, inter=inter, count=count)


def test_wrong_arrays_are_refused():
    weights, x = draw(64, 96, 2)
    gate, up, y = (np.zeros((2, n), np.float32) for n in (96, 96, 64))
    work = np.zeros(native.expert_scratch_floats(64, 96, 2), np.float32)

    def call(weights=weights, x=x, gate=gate, up=up, y=y, work=work):
        native.expert(native.Expert(weights), x, gate, up, y, BETA, LINEAR_BETA, work)

    call()
    for bad in (
        {"weights": [*weights[2:], *weights[:2]]},
        {"weights": [weights[0].astype(np.int32), *weights[1:]]},
        {"weights": [*weights[:5], weights[5][:, :1]]},
        {"x": x[:1]},
        {"x": x[:, :32]},
        {"gate": gate[:, :64]},
        {"up": up[:1]},
        {"y": y[:, :32]},
        {"work": work[:-1]},
    ):
        with pytest.raises(ValueError):
            call(**bad)


def test_c_refuses_nulls_and_odd_shapes():
    data, numbers = ffi.new("uint8_t[]", 512), ffi.new("float[]", 1024)
    whole = ffi.new("kimi_mxfp4 *", {"packed": data, "scales": data})
    half = ffi.new("kimi_mxfp4 *", {"packed": data, "scales": ffi.NULL})

    def call(w1=whole, w3=whole, w2=whole, latent=32, inter=32, x=numbers, count=1, **rest):
        gate, up, y, work = (rest.get(n, numbers) for n in ("gate", "up", "y", "work"))
        return lib.kimi_expert(
            w1, w3, w2, latent, inter, 1.0, 1.0, x, 32, count, gate, up, y, 32, work
        )

    assert call() == 0
    for name in ("w1", "w3", "w2", "x", "gate", "up", "y", "work"):
        assert call(**{name: ffi.NULL}) == lib.KIMI_E_ARGUMENT, name
    for name in ("w1", "w3", "w2"):
        assert call(**{name: half}) == lib.KIMI_E_ARGUMENT, name
    for bad in ({"latent": 0}, {"latent": 33}, {"inter": 31}, {"inter": -32}, {"count": 0}):
        assert call(**bad) == lib.KIMI_E_ARGUMENT, bad
