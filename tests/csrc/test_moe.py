"""The router and the weighted sum of experts; the greedy choice of a token."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import NumericError
from kimi_cli.native import ffi, lib

from . import reference
from .hostile import KINDS, Output, applied, close, everywhere, floats, generator, same, shifted


def route(logits, bias, k, factor=2.5, threads=(1,)):
    """(ids, weights), equal on every instruction set and thread count; ids are guarded too."""
    count, first = len(logits), None

    def run(weights):
        nonlocal first
        guarded = np.full((count + 2, k), -7, np.int32)
        native.route(logits, bias, factor, guarded[1:-1], weights)
        assert (guarded[0] == -7).all() and (guarded[-1] == -7).all()
        first = guarded[1:-1] if first is None else first
        assert np.array_equal(first, guarded[1:-1]), (native.isa(), logits.shape, k)

    weights = everywhere(run, (count, k), threads=threads, experts=logits.shape[1], k=k)
    return first, weights


@pytest.mark.parametrize("kind", ["plain", "tiny", "huge", "wide"])
def test_route_literal(kind):
    for experts, k in ((1, 1), (2, 1), (2, 2), (7, 3), (33, 33), (64, 8), (896, 16), (300, 256)):
        for count in (1, 3):
            rng = generator("route", kind, experts, k, count)
            logits, bias = floats(rng, (count, experts), kind), floats(rng, experts)
            ids, weights = route(logits, bias, k)
            scores = applied(native.sigmoid, logits)
            for t in range(count):
                want, shares = reference.route(scores[t], bias, k, 2.5)
                assert list(ids[t]) == want, (kind, experts, k, t)
                same(weights[t], np.array(shares, np.float32), kind=kind, experts=experts, k=k)


def test_weights_against_float64():
    logits = floats(generator("weights"), (4, 896)) * 2
    ids, weights = route(logits, np.zeros(896, np.float32), 16, 2.827)
    for t in range(4):
        truth = np.sort(reference.sigmoid64(logits[t]))[::-1][:16]
        want = truth / truth.sum() * 2.827
        close(weights[t], want, 8 * 2.0**-23 * want, token=t)
        assert len(set(ids[t])) == 16


def test_ties_go_to_the_lower_index():
    for experts, k in ((5, 5), (64, 16), (896, 16)):
        ids, weights = route(np.zeros((1, experts), np.float32), np.zeros(experts, np.float32), k)
        assert list(ids[0]) == list(range(k)), (experts, k)
        assert len(set(weights[0])) == 1
    logits = np.zeros((1, 10), np.float32)
    logits[0, [9, 4, 6]] = 1
    assert list(route(logits, np.zeros(10, np.float32), 5)[0][0]) == [4, 6, 9, 0, 1]
    zeros = np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32)
    assert list(route(zeros, zeros[0], 3)[0][0]) == [0, 1, 2]


def test_bias_steers_the_choice_only():
    logits = np.array([[3, 2, 1, 0]], np.float32)
    bias = np.array([-9, 0, 0, 9], np.float32)
    ids, weights = route(logits, bias, 2, 1.0)
    assert list(ids[0]) == [3, 1]
    s = reference.sigmoid64(logits[0])
    close(weights[0], s[[3, 1]] / (s[3] + s[1]), 2.0**-21)


def test_all_experts_may_be_chosen():
    rng = generator("all")
    logits, bias = floats(rng, (2, 256)), floats(rng, 256)
    ids, _ = route(logits, bias, 256)
    for row in ids:
        assert sorted(row) == list(range(256))


def test_nothing_chosen_scores_nothing_else():
    """Logits so low that every score is zero: the weights are zero, not NaN."""
    logits = np.full((1, 8), -1e4, np.float32)
    ids, weights = route(logits, np.zeros(8, np.float32), 3)
    assert list(ids[0]) == [0, 1, 2] and (weights == 0).all()


@pytest.mark.parametrize("k", [1, 4, 40])
def test_biases_of_junk_give_distinct_ids_in_range(k):
    rng = generator("junk", k)
    for junk in (np.nan, np.inf):
        logits, bias = floats(rng, (6, 40)), floats(rng, 40)
        bias[::3], bias[1::3] = junk, -np.inf
        ids, _ = route(logits, bias, k)
        for row in ids:
            assert len(set(row)) == k and row.min() >= 0 and row.max() < 40, (junk, k, row)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(junk):
    for count in (1, 65):
        for at in {0, count - 1}:
            logits = np.zeros((count, 40), np.float32)
            logits[at, 39] = junk
            with pytest.raises(NumericError):
                route(logits, np.zeros(40, np.float32), 5, threads=(1, 2))


def test_route_tokens_alone_and_threads():
    rng = generator("tokens")
    logits, bias = floats(rng, (65, 128), "wide"), floats(rng, 128)
    ids, weights = route(logits, bias, 16, threads=(1, 2, 3))
    for t in (0, 1, 63, 64):
        one, alone = route(logits[t : t + 1], bias, 16)
        assert np.array_equal(one[0], ids[t]), t
        same(alone, weights[t : t + 1], token=t)


# ---- the sum of experts ----


@pytest.mark.parametrize("kind", KINDS)
def test_expert_sum_literal_order(kind):
    for i, n in enumerate((*range(1, 36), 63, 64, 65, 127, 1025)):
        count, k = (1, 2, 5)[i % 3], (1, 2, 8, 16)[i % 4]
        rng = generator("sum", kind, n)
        x, weights = floats(rng, (count, k, n), kind), floats(rng, (count, k))
        at = [shifted(x, i % 3), shifted(weights, i % 2)]
        parameters = {"kind": kind, "n": n, "k": k, "count": count}
        y = everywhere(
            lambda y, at=at: native.expert_sum(*at, y), (count, n), offset=i % 3, **parameters
        )
        for t in range(count):
            same(y[t], reference.expert_sum(x[t], weights[t]), token=t, **parameters)
        if kind == "plain":
            terms = np.abs(weights[..., None].astype(np.float64) * x)
            want = (weights[..., None].astype(np.float64) * x).sum(axis=1)
            close(y, want, k * 2.0**-24 * terms.sum(axis=1), **parameters)


def test_expert_sum_threads():
    rng = generator("sum threads")
    x, weights = floats(rng, (20, 16, 300), "special"), floats(rng, (20, 16))
    everywhere(lambda y: native.expert_sum(x, weights, y), (20, 300), threads=(1, 2, 3))


# ---- argmax ----


def test_argmax():
    rng = generator("argmax")
    for n in (1, 2, 15, 16, 17, 1000):
        for kind in ("plain", "tiny", "huge", "wide"):
            x = floats(rng, n, kind)
            assert native.argmax(x) == int(np.argmax(x)), (n, kind)
        for at in {0, n // 2, n - 1}:
            for junk in (np.nan, np.inf, -np.inf):
                x = floats(rng, n)
                x[at] = junk
                assert native.argmax(x) == -1, (n, at, junk)
    assert native.argmax(np.array([1, 3, 2, 3], np.float32)) == 1
    assert native.argmax(np.array([-0.0, 0.0], np.float32)) == 0
    assert native.argmax(np.zeros(0, np.float32)) == -1


# ---- refusals ----


def test_wrong_arrays_are_refused():
    logits, bias = np.zeros((2, 6), np.float32), np.zeros(6, np.float32)
    ids, weights = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
    native.route(logits, bias, 1.0, ids, weights)
    for bad in (
        (logits.astype(np.float64), bias, ids, weights),
        (logits[0], bias, ids, weights),
        (logits, bias[:5], ids, weights),
        (logits, bias.astype(np.float64), ids, weights),
        (logits, bias, ids.astype(np.int64), weights),
        (logits, bias, ids[:1], weights),
        (logits, bias, np.zeros((2, 6), np.int32)[:, ::2], weights),
        (logits, bias, ids, weights[:, :2]),
        (logits, bias, ids, weights.astype(np.float64)),
        (np.zeros((2, 12), np.float32)[:, ::2], bias, ids, weights),
    ):
        with pytest.raises(ValueError):
            native.route(bad[0], bad[1], 1.0, bad[2], bad[3])
    x, y = np.zeros((2, 3, 4), np.float32), np.zeros((2, 4), np.float32)
    for bad in (
        (x.astype(np.float64), weights, y),
        (x, weights[:1], y),
        (x, weights.astype(np.float64), y),
        (x, weights, y[:, :3]),
        (x, weights, np.zeros((2, 8), np.float32)[:, ::2]),
    ):
        with pytest.raises(ValueError):
            native.expert_sum(*bad)
    for bad in (np.zeros(4), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]):
        with pytest.raises(ValueError):
            native.argmax(bad)


def test_c_refuses_nulls_and_empty_shapes():
    v, ids, null = ffi.new("float[]", 4096), ffi.new("int32_t[]", 512), ffi.NULL

    def route(logits=v, bias=v, count=1, experts=300, k=2, ids=ids, weights=v):
        return lib.kimi_route(logits, bias, count, experts, k, 1.0, ids, weights)

    def expert_sum(x=v, weights=v, count=1, k=2, n=4, y=v):
        return lib.kimi_expert_sum(x, weights, count, k, n, y)

    assert route() == expert_sum() == 0
    for bad in (
        *({name: null} for name in ("logits", "bias", "ids", "weights")),
        *({name: 0} for name in ("count", "experts", "k")),
        *({"experts": 1}, {"k": lib.KIMI_MAX_TOP + 1}),
    ):
        assert route(**bad) == lib.KIMI_E_ARGUMENT, bad
    for bad in (
        *({name: null} for name in ("x", "weights", "y")),
        *({name: 0} for name in ("count", "k", "n")),
    ):
        assert expert_sum(**bad) == lib.KIMI_E_ARGUMENT, bad


def test_guards_notice_a_trespass():
    """The guard itself: a write before, after or between rows is seen, and so is a hole."""
    for at in (79, 80 + 3, 80 + 2 * 5 + 3, 95):
        output = Output((3, 3), gap=2)
        output.view[...] = 1
        output.buffer[at] = 1
        with pytest.raises(AssertionError, match="outside"):
            output.check()
    output = Output((3, 3))
    output.view[:2] = 1
    with pytest.raises(AssertionError, match="never written"):
        output.check()
