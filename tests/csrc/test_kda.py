"""KDA's own steps: short convolution, decay gate, delta rule, gated norm."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import ffi, lib

from . import reference
from .hostile import KINDS, applied, close, everywhere, floats, generator, same, shifted

CHANNELS = [*range(1, 20), 31, 32, 33, 63, 64, 65, 130]


def conv_inputs(count, channels, taps, kind="plain"):
    rng = generator("conv", count, channels, taps, kind)
    return (
        floats(rng, (count, channels), kind),
        floats(rng, (channels, taps)),
        floats(rng, (taps - 1, channels), kind),
    )


def conv(x, weight, history, **parameters):
    """(y, history after) on every instruction set."""

    def run(y, after):
        after[...] = history
        native.conv(x, weight, after, y)

    if not len(history):
        y = everywhere(lambda y: native.conv(x, weight, history, y), x.shape, **parameters)
        return y, history
    return everywhere(run, x.shape, history.shape, **parameters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_conv_literal_order(taps, kind):
    for i, channels in enumerate(CHANNELS):
        count = (1, 2, 3, 5, 63, 65)[i % 6]
        x, weight, history = conv_inputs(count, channels, taps, kind)
        parameters = {"taps": taps, "channels": channels, "count": count, "kind": kind}
        at = [shifted(a, i % 3) for a in (x, weight, history)]
        y, after = conv(*at, offset=i % 3, **parameters)
        sums = reference.conv_sums(x, weight, history)
        with np.errstate(all="ignore"):
            same(y, sums * applied(native.sigmoid, sums), **parameters)
        same(after, np.concatenate([history, x])[count:], **parameters)


def test_conv_carries_its_history_over_any_cut():
    x, weight, history = conv_inputs(40, 37, 4)
    whole, end = conv(x, weight, history)
    for sizes in ([1] * 40, [2] * 20, [3, 37], [37, 3], [1, 2, 3, 34], [39, 1], [4, 4, 32]):
        state, parts, at = history, [], 0
        for size in sizes:
            y, state = conv(np.ascontiguousarray(x[at : at + size]), weight, state)
            parts.append(y)
            at += size
        same(np.concatenate(parts), whole, sizes=sizes)
        same(state, end, sizes=sizes)


def test_conv_last_tap_multiplies_the_current_token():
    weight = np.zeros((3, 4), np.float32)
    weight[:, 3] = (1, 2, 3)
    x = np.full((1, 3), 50, np.float32)
    y, after = conv(x, weight, np.zeros((3, 3), np.float32))
    close(y, np.array([[50.0, 100, 150]]), 1e-4)
    same(after, np.array([[0] * 3, [0] * 3, [50] * 3], np.float32))


def test_conv_against_float64():
    x, weight, history = conv_inputs(20, 100, 4)
    y, _ = conv(x, weight, history)
    columns = np.concatenate([history, x]).astype(np.float64)
    terms = np.stack([columns[j : j + 20] * weight[:, j] for j in range(4)])
    total = terms.sum(axis=0)
    # the sum's four roundings, scaled by SiLU's slope of at most 1.1, then 5 ulp of SiLU
    bound = 1.1 * 4 * 2.0**-24 * np.abs(terms).sum(axis=0) + 5 * 2.0**-23 * np.abs(total)
    close(y, total * reference.sigmoid64(total), bound)


# ---- decay ----


def decay64(z, a_log, dt_bias, lower):
    z, bias = z.astype(np.float64), dt_bias.astype(np.float64).reshape(z.shape[1:])
    gate = np.exp(a_log.astype(np.float64))[None, :, None] * (z + bias)
    return np.exp(lower * reference.sigmoid64(gate))


@pytest.mark.parametrize("lower", [-5.0, -1.0])
def test_decay_against_float64(lower):
    for i, dim in enumerate((1, 2, 7, 8, 9, 31, 33, 64, 65, 128)):
        count, heads = (1, 2, 5)[i % 3], (1, 3, 4)[i % 3]
        rng = generator("decay", dim)
        z = floats(rng, (count, heads, dim)) * 3
        a_log, bias = floats(rng, heads), floats(rng, heads * dim)
        y = everywhere(
            lambda y, z=z, a=a_log, b=bias: native.decay(z, a, b, lower, y), z.shape, dim=dim
        )
        want = decay64(z, a_log, bias, lower)
        spread = np.exp(a_log)[None, :, None] * (np.abs(z) + np.abs(bias.reshape(heads, dim)))
        # exp(a) 3 ulp, two roundings, sigmoid 3 ulp with slope 1/4, times |lower|, exp 3 ulp
        bound = want * 2.0**-23 * (np.abs(lower) * (0.25 * 6 * spread + 5) + 4)
        close(y, want, bound, dim=dim, lower=lower)
        assert (y > 0).all() and (y <= 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_decay_hostile_values(kind):
    rng = generator("decay", kind)
    z, a_log, bias = floats(rng, (3, 4, 37), kind), floats(rng, 4, kind), floats(rng, 148, kind)
    y = everywhere(lambda y: native.decay(z, a_log, bias, -5.0, y), z.shape, kind=kind)
    if kind != "special":
        finite = y[np.isfinite(y)]
        assert (finite >= np.float32(np.exp(-5)) * (1 - 1e-6)).all() and (finite <= 1).all()


# ---- delta rule ----


def delta_inputs(count, heads, dim, kind="plain"):
    """Inputs as the model makes them: unit q and k, decays and beta in (0, 1)."""
    rng = generator("delta", count, heads, dim, kind)
    state = floats(rng, (heads, dim, dim), kind)
    q, k, v = (floats(rng, (count, heads, dim), kind) for _ in range(3))
    if kind == "plain":
        q = q / np.linalg.norm(q, axis=-1, keepdims=True) * np.float32(dim**-0.5)
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    decay = np.exp(-5 * rng.random((count, heads, dim))).astype(np.float32)
    return state, q, k, v, decay, rng.random((count, heads)).astype(np.float32)


def delta(state, *rest, threads=(1,), **parameters):
    """(state after, o) on every instruction set."""

    def run(after, o):
        after[...] = state
        native.delta(after, *rest, o)

    return everywhere(run, state.shape, rest[0].shape, threads=threads, **parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_delta_literal_order(kind):
    for i, dim in enumerate((1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64)):
        count, heads = (1, 2, 4)[i % 3], (1, 3)[i % 2]
        inputs = delta_inputs(count, heads, dim, kind)
        at = [shifted(a, i % 3) for a in inputs]
        after, o = delta(*at, offset=i % 3, kind=kind, dim=dim, heads=heads)
        with np.errstate(all="ignore"):
            for h in range(heads):
                one = (a[:, h] for a in inputs[1:])
                s, want = reference.delta(inputs[0][h], *one)
                same(after[h], s, kind=kind, dim=dim, head=h)
                same(o[:, h], want, kind=kind, dim=dim, head=h)


@pytest.mark.parametrize("dim", [1, 5, 64, 128])
def test_delta_against_the_recurrence_in_float64(dim):
    count, heads = 24, 2
    inputs = delta_inputs(count, heads, dim)
    after, o = delta(*inputs)
    for h in range(heads):
        s, want = reference.delta64(inputs[0][h], *(a[:, h] for a in inputs[1:]))
        scale = max(np.abs(inputs[0]).max(), np.abs(inputs[3]).max(), np.abs(s).max())
        # sums of dim terms of at most `scale`, k of unit length; errors decay with the state
        bound = 8 * (dim + 8) * 2.0**-24 * scale
        close(after[h], s, bound, dim=dim, head=h)
        close(o[:, h], want, bound, dim=dim, head=h)


def test_delta_over_any_cut():
    state, *rest = delta_inputs(13, 3, 33)
    end, whole = delta(state, *rest)
    for sizes in ([1] * 13, [2, 11], [12, 1], [5, 5, 3]):
        s, parts, at = state, [], 0
        for size in sizes:
            s, o = delta(s, *(np.ascontiguousarray(a[at : at + size]) for a in rest))
            parts.append(o)
            at += size
        same(np.concatenate(parts), whole, sizes=sizes)
        same(s, end, sizes=sizes)


def test_delta_stores_and_recalls():
    """With beta 1 and no decay, what was written under a unit key is read back by it."""
    dim = 16
    state = np.zeros((1, dim, dim), np.float32)
    key = np.zeros((1, 1, dim), np.float32)
    key[..., 3] = 1
    value = floats(generator("recall"), (1, 1, dim))
    one = np.ones((1, 1, dim), np.float32)
    state, o = delta(state, key, key, value, one, np.ones((1, 1), np.float32))
    same(o, value)
    state, o = delta(state, key, key, -value, one, np.ones((1, 1), np.float32))
    same(o, -value)


@pytest.mark.parametrize("dim", [1023, 1024])
def test_delta_largest_head(dim):
    inputs = delta_inputs(1, 1, dim)
    after, _ = delta(*inputs)
    s, _ = reference.delta64(inputs[0][0], *(a[:, 0] for a in inputs[1:]))
    close(after[0], s, 8 * dim * 2.0**-24 * np.abs(s).max())


# ---- gated norm ----


@pytest.mark.parametrize("kind", KINDS)
def test_gated_norm(kind):
    for i, dim in enumerate((1, 2, 7, 8, 9, 16, 33, 127, 128, 129)):
        count, heads = (1, 2, 5)[i % 3], (1, 3)[i % 2]
        rng = generator("gated", kind, dim)
        x, by = floats(rng, (count, heads, dim), kind), 9 * floats(rng, (count, heads, dim))
        weight = floats(rng, dim)
        y = everywhere(
            lambda y, x=x, by=by, w=weight: native.gated_norm(x, by, w, 1e-5, y), x.shape, dim=dim
        )
        flat = x.reshape(-1, dim)
        normed = everywhere(
            lambda y, x=flat, w=weight: native.rmsnorm(x, w, 1e-5, y), flat.shape, dim=dim
        )
        with np.errstate(all="ignore"):
            want = normed.reshape(x.shape) * applied(native.sigmoid, by)
        same(y, want, kind=kind, dim=dim)
        if kind == "plain":
            truth = reference.rmsnorm64(x, weight, 1e-5) * reference.sigmoid64(by)
            close(y, truth, 6 * 2.0**-23 * np.abs(truth), dim=dim)


# ---- threads, refusals ----


def test_threads():
    x, weight, history = conv_inputs(17, 1000, 4, "special")
    conv(x, weight, history, threads=(1, 2, 3))
    state, *rest = delta_inputs(3, 7, 96)
    delta(state, *rest, threads=(1, 2, 3))
    rng = generator("threads")
    z, a_log, bias = floats(rng, (5, 7, 300)), floats(rng, 7), floats(rng, 2100)
    everywhere(lambda y: native.decay(z, a_log, bias, -5.0, y), z.shape, threads=(1, 2, 3))
    gate, norm = floats(rng, z.shape), floats(rng, 300)
    everywhere(lambda y: native.gated_norm(z, gate, norm, 1e-5, y), z.shape, threads=(1, 2, 3))


def wrong(arrays):
    """Each array in turn with another dtype, another shape, and not contiguous."""
    for i, array in enumerate(arrays):
        spread = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
        for bad in (array.astype(np.float64), array[..., :-1], spread):
            yield [bad if j == i else a for j, a in enumerate(arrays)]


def test_wrong_arrays_are_refused():
    zeros = [np.zeros(s, np.float32) for s in ((3, 5), (5, 4), (3, 5), (3, 5))]
    native.conv(*zeros)
    for x, weight, history, y in wrong(zeros):
        with pytest.raises(ValueError):
            native.conv(x, weight, history, y)
    zeros = [np.zeros(s, np.float32) for s in ((3, 2, 4), (2,), (8,), (3, 2, 4))]
    native.decay(*zeros[:3], -5.0, zeros[3])
    for z, a_log, bias, y in wrong(zeros):
        with pytest.raises(ValueError):
            native.decay(z, a_log, bias, -5.0, y)
    shapes = [(2, 4, 4), *[(3, 2, 4)] * 4, (3, 2), (3, 2, 4)]
    zeros = [np.zeros(s, np.float32) for s in shapes]
    native.delta(*zeros)
    for bad in wrong(zeros):
        with pytest.raises(ValueError):
            native.delta(*bad)
    zeros = [np.zeros(s, np.float32) for s in ((3, 2, 4), (3, 2, 4), (4,), (3, 2, 4))]
    native.gated_norm(*zeros[:3], 1e-5, zeros[3])
    for x, by, weight, y in wrong(zeros):
        with pytest.raises(ValueError):
            native.gated_norm(x, by, weight, 1e-5, y)


def test_c_refuses_nulls_and_empty_shapes():
    v = ffi.new("float[]", 256)
    calls = {
        "kimi_conv": [v, 2, 4, 3, v, v, v],
        "kimi_decay": [v, 2, 2, 4, v, v, -5.0, v],
        "kimi_delta": [v, 2, 2, 4, v, v, v, v, v, v],
        "kimi_gated_norm": [v, v, 2, 2, 4, v, 1e-5, v],
    }
    for name, good in calls.items():
        function = getattr(lib, name)
        assert function(*good) == 0, name
        for i, value in enumerate(good):
            if isinstance(value, float):
                continue
            bad = 0 if isinstance(value, int) else ffi.NULL
            arguments = [*good[:i], bad, *good[i + 1 :]]
            assert function(*arguments) == lib.KIMI_E_ARGUMENT, (name, i)
    too_large = [v, 1, 1, lib.KIMI_MAX_DIM + 1, v, v, v, v, v, v]
    assert lib.kimi_delta(*too_large) == lib.KIMI_E_ARGUMENT
