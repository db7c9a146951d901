"""Latent attention: absorb, attend, values; against their order and against expanded keys."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.native import Format, ffi, lib

from . import reference
from .hostile import (
    KINDS,
    Output,
    bf16,
    close,
    everywhere,
    floats,
    generator,
    matrix,
    same,
    scalar_exp,
    shifted,
    strided,
    values,
    weights_of,
)

FORMATS = pytest.mark.parametrize("fmt", Format, ids=lambda f: f.name)
POSITIONS = [1, 2, 127, 128, 129, 255, 256, 257, 300]


def ranks(fmt):
    return (64, 192, 1088) if fmt == Format.PACKED else (1, 15, 17, 64, 1023, 1025)


def attend(cache, start, rope, q, scale, out):
    """native.mla_attend with poisoned, guarded scratch of exactly the size asked for."""
    work = Output((native.mla_scratch_floats(start + len(q), q.shape[1], q.shape[2]),))
    native.mla_attend(cache, start, rope, q, scale, out, work.view)
    work.check(written=False, start=start, q=q.shape)


def apply_values(kv_b, heads, nope, latent, y):
    """native.mla_values with the same care."""
    work = Output((native.scratch_floats(kv_b.cols, len(latent) * heads),))
    native.mla_values(kv_b, heads, nope, latent, y, work.view)
    work.check(written=False, heads=heads, nope=nope, latent=latent.shape)


# ---- absorb ----


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_absorb_literal_order(fmt, kind):
    for i, rank in enumerate(ranks(fmt)):
        heads, nope, value, rope = ((1, 1, 1, 0), (3, 5, 2, 3), (2, 8, 8, 4))[i % 3]
        for count in (1, 3):
            rng = generator("absorb", fmt, kind, rank, count)
            weights = weights_of(rng, fmt, (heads * (nope + value), rank), kind)
            q = floats(rng, (count, heads * (nope + rope)), kind)
            w, moved = matrix(fmt, weights, offset=i % 2), strided(q, 5)
            parameters = {"format": fmt.name, "rank": rank, "heads": heads, "kind": kind}

            def run(out, w=w, q=moved, heads=heads, nope=nope, rope=rope):
                native.mla_absorb(w, heads, nope, rope, q, out)

            out = everywhere(run, (count, heads * (rank + rope)), gap=3, **parameters)
            wide = values(fmt, weights).reshape(heads, nope + value, rank)
            for t in range(count):
                for h in range(heads):
                    query = q[t].reshape(heads, -1)[h]
                    got = out[t].reshape(heads, -1)[h]
                    same(got[:rank], reference.absorb(wide[h, :nope], query[:nope]), **parameters)
                    same(got[rank:], query[nope:], **parameters)


def test_absorb_formats_agree_with_escapes():
    rng = generator("absorb escapes")
    weights = bf16(rng, (24, 1088), "wide") & 0xBFFF
    q = floats(rng, (2, 24))
    outs = [
        everywhere(lambda out, w=w: native.mla_absorb(w, 2, 8, 4, q, out), (2, 2 * 1092))
        for w in (
            matrix(Format.BF16, weights),
            matrix(Format.PACKED, weights, first=3),
            matrix(Format.F32, reference.widen(weights)),
        )
    ]
    same(outs[1], outs[0])
    same(outs[2], outs[0])


# ---- attend ----


def attend_inputs(positions, count, heads, rank, rope, kind="plain"):
    rng = generator("attend", positions, count, heads, rank, rope, kind)
    return floats(rng, (positions, rank + rope), kind), floats(rng, (count, heads, rank + rope))


@pytest.mark.parametrize("positions", POSITIONS)
def test_attend_literal_order(positions):
    for i, (rank, rope) in enumerate(((1, 0), (16, 0), (17, 3), (31, 1), (64, 16), (33, 7))):
        heads = 1 + (i + positions) % 9
        cache, q = attend_inputs(positions, 1, heads, rank, rope)
        at = [shifted(cache, i % 3), shifted(q, i % 2)]
        parameters = {"positions": positions, "rank": rank, "rope": rope, "heads": heads}

        def run(out, at=at, rope=rope):
            attend(at[0], positions - 1, rope, at[1], 0.11, out)

        out = everywhere(run, (1, heads, rank), offset=i % 3, **parameters)
        for h in {0, heads - 1}:
            want = reference.attend(cache, q[0, h], rank, 0.11, scalar_exp)
            same(out[0, h], want, head=h, **parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_attend_hostile_values(kind):
    for heads in range(1, 10):
        for positions in (1, 129, 260):
            cache, q = attend_inputs(positions, 1, heads, 37, 5, kind)
            everywhere(
                lambda out, c=cache, q=q: attend(c, len(c) - 1, 5, q, 0.2, out),
                (1, heads, 37),
                kind=kind,
                heads=heads,
                positions=positions,
            )


def test_attend_sees_only_the_past_and_tokens_stand_alone():
    for start, count in ((0, 1), (0, 5), (0, 130), (126, 4), (3, 2)):
        cache, q = attend_inputs(start + count + 3, count, 5, 32, 4)
        cache[start + count :] = np.nan
        together = everywhere(
            lambda out, c=cache, q=q, s=start: attend(c, s, 4, q, 0.2, out), (count, 5, 32)
        )
        assert np.isfinite(together).all(), (start, count)
        for t in range(0, count, 1 + count // 7):
            seen = np.ascontiguousarray(cache[: start + t + 1])
            alone = everywhere(
                lambda out, c=seen, q=q[t : t + 1]: attend(c, len(c) - 1, 4, q, 0.2, out),
                (1, 5, 32),
            )
            same(together[t : t + 1], alone, start=start, token=t)


def test_heads_stand_alone():
    cache, q = attend_inputs(200, 2, 7, 48, 16)
    together = everywhere(lambda out: attend(cache, 198, 16, q, 0.1, out), (2, 7, 48))
    for h in range(7):
        one = np.ascontiguousarray(q[:, h : h + 1])
        alone = everywhere(lambda out, q=one: attend(cache, 198, 16, q, 0.1, out), (2, 1, 48))
        same(together[:, h : h + 1], alone, head=h)


def test_a_score_far_above_the_rest_takes_all():
    cache, _ = attend_inputs(150, 1, 1, 16, 0)
    q = np.zeros((1, 1, 16), np.float32)
    q[..., 0] = 1
    cache[:, 0] = 0
    cache[77, 0] = 1e6
    out = everywhere(lambda out: attend(cache, 149, 0, q, 1.0, out), (1, 1, 16))
    same(out[0, 0], cache[77])


# ---- values ----


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_values_literal_order(fmt, kind):
    for i, rank in enumerate(ranks(fmt)):
        heads, nope, value = ((1, 0, 1), (3, 5, 2), (2, 8, 9))[i % 3]
        for count in (1, 2, 66):
            rng = generator("values", fmt, kind, rank, count)
            weights = weights_of(rng, fmt, (heads * (nope + value), rank), kind)
            latent = floats(rng, (count, heads * rank), kind)
            w, moved = matrix(fmt, weights, offset=i % 2), strided(latent, 5)
            parameters = {"format": fmt.name, "rank": rank, "count": count, "kind": kind}

            def run(y, w=w, latent=moved, heads=heads, nope=nope):
                apply_values(w, heads, nope, latent, y)

            y = everywhere(run, (count, heads * value), gap=3, **parameters)
            wide = values(fmt, weights).reshape(heads, nope + value, rank)
            for h in range(heads):
                want = reference.dense(wide[h, nope:], latent[:3, h * rank : (h + 1) * rank])
                same(y[:3, h * value : (h + 1) * value], want, head=h, **parameters)


# ---- all three ----


@FORMATS
@pytest.mark.parametrize("positions", [1, 127, 128, 129, 300])
def test_against_attention_with_expanded_keys(fmt, positions):
    heads, nope, rope, value, rank = 5, 24, 8, 20, 64
    rng = generator("expanded", fmt, positions)
    weights = weights_of(rng, fmt, (heads * (nope + value), rank))
    wide = values(fmt, weights).astype(np.float64).reshape(heads, nope + value, rank) / 8
    small = (
        values(fmt, weights) / np.float32(8)
        if fmt == Format.F32
        else (reference.widen(weights) / np.float32(8)).view(np.uint32) >> 16
    )
    w = matrix(fmt, small if fmt == Format.F32 else small.astype(np.uint16))
    count = min(positions, 2)
    start = positions - count
    cache = floats(rng, (positions, rank + rope))
    q = floats(rng, (count, heads * (nope + rope)))
    scale = (nope + rope) ** -0.5

    def run(y):
        queries = np.full((count, heads * (rank + rope)), np.nan, np.float32)
        native.mla_absorb(w, heads, nope, rope, q, queries)
        latent = np.full((count, heads, rank), np.nan, np.float32)
        attend(cache, start, rope, queries.reshape(count, heads, -1), scale, latent)
        apply_values(w, heads, nope, latent.reshape(count, -1), y)

    y = everywhere(run, (count, heads * value), positions=positions, format=fmt.name)
    for t in range(count):
        c = cache[: start + t + 1, :rank].astype(np.float64)
        k_rope = cache[: start + t + 1, rank:].astype(np.float64)
        for h in range(heads):
            k = np.concatenate([c @ wide[h, :nope].T, k_rope], axis=1)
            v = c @ wide[h, nope:].T
            query = q[t].reshape(heads, -1)[h].astype(np.float64)
            want = reference.attention64(query, k, v, scale)
            # scores of size |q||k| scale err by some 2^-20 of it; then the sum over positions
            reach = (np.abs(k) @ np.abs(query)).max() * scale
            terms = np.abs(c).max(axis=0) @ np.abs(wide[h, nope:]).T
            bound = (4 * reach + 40) * 2.0**-24 * 4 * terms
            close(
                y[t, h * value : (h + 1) * value], want, bound, token=t, head=h, positions=positions
            )


@FORMATS
def test_threads(fmt):
    heads, nope, rope, value, rank = 7, 32, 16, 32, 192
    rng = generator("threads", fmt)
    w = matrix(fmt, weights_of(rng, fmt, (heads * (nope + value), rank)))
    q = floats(rng, (5, heads * (nope + rope)))
    everywhere(
        lambda out: native.mla_absorb(w, heads, nope, rope, q, out),
        (5, heads * (rank + rope)),
        threads=(1, 2, 3),
    )
    latent = floats(rng, (5, heads * rank), "special")
    everywhere(
        lambda y: apply_values(w, heads, nope, latent, y), (5, heads * value), threads=(1, 2, 3)
    )
    cache, q = attend_inputs(205, 5, heads, rank, rope)
    everywhere(
        lambda out: attend(cache, 200, rope, q, 0.1, out), (5, heads, rank), threads=(1, 2, 3)
    )


# ---- refusals ----


def test_wrong_arrays_are_refused():
    w = matrix(Format.BF16, np.zeros((2 * 7, 16), np.uint16))  # 2 heads, nope 4, value 3, rank 16
    q, out = np.zeros((3, 2 * 6), np.float32), np.zeros((3, 2 * 18), np.float32)
    native.mla_absorb(w, 2, 4, 2, q, out)
    for bad in (
        (q.astype(np.float64), out),
        (q, out.astype(np.float64)),
        (q[:, :11], out),
        (q, out[:, :35]),
        (q, out[:2]),
        (np.zeros((3, 24), np.float32)[:, ::2], out),
        (q, np.zeros((3, 72), np.float32)[:, ::2]),
    ):
        with pytest.raises(ValueError):
            native.mla_absorb(w, 2, 4, 2, *bad)

    latent, y, work = (
        np.zeros((3, 32), np.float32),
        np.zeros((3, 6), np.float32),
        np.zeros(768, np.float32),
    )
    native.mla_values(w, 2, 4, latent, y, work)
    for bad in (
        (latent.astype(np.float64), y, work),
        (latent, y.astype(np.float64), work),
        (latent[:, :31], y, work),
        (latent, y[:, :5], work),
        (latent, y[:2], work),
        (latent, y, work[:767]),
        (latent, np.zeros((3, 12), np.float32)[:, ::2], work),
    ):
        with pytest.raises(ValueError):
            native.mla_values(w, 2, 4, *bad)

    cache, q = np.zeros((4, 18), np.float32), np.zeros((2, 3, 18), np.float32)
    out = np.zeros((2, 3, 16), np.float32)
    work = np.zeros(native.mla_scratch_floats(4, 3, 18), np.float32)
    native.mla_attend(cache, 2, 2, q, 1.0, out, work)
    for c, start, rope, query, into, scratch in (
        (cache.astype(np.float64), 2, 2, q, out, work),
        (cache, 3, 2, q, out, work),
        (cache[:, :17], 2, 2, q, out, work),
        (np.zeros((4, 36), np.float32)[:, ::2], 2, 2, q, out, work),
        (cache, 2, 3, q, out, work),
        (cache, 2, 2, q.astype(np.float64), out, work),
        (cache, 2, 2, q[0], out, work),
        (cache, 2, 2, q, out[:1], work),
        (cache, 2, 2, q, out.astype(np.float64), work),
        (cache, 2, 2, q, out, work[:-1]),
    ):
        with pytest.raises(ValueError):
            native.mla_attend(c, start, rope, query, 1.0, into, scratch)


@FORMATS
@pytest.mark.parametrize(("count", "start"), [(1, 0), (1, 200), (5, 3)])
def test_the_three_in_turn(fmt, count, start):
    heads, nope, rope, value, rank = 3, 8, 4, 6, 64
    rng = generator("in turn", fmt, count, start)
    w = matrix(fmt, weights_of(rng, fmt, (heads * (nope + value), rank)))
    q, cache = (floats(rng, s) for s in ((count, heads * 12), (start + count, rank + rope)))
    queries, latent = np.empty((count, heads, 68), "f4"), np.empty((count, heads, 64), "f4")

    def one(y):
        works = [
            Output((native.mla_scratch_floats(start + count, heads, 68),)),
            Output((native.scratch_floats(rank, count * heads),)),
        ]
        first, last = (work.view for work in works)
        native.mla(w, nope, rope, cache, start, q, 0.25, queries, latent, first, y, last)
        for work in works:
            work.check(written=False, count=count)

    def three(y):
        native.mla_absorb(w, heads, nope, rope, q, queries.reshape(count, -1))
        attend(cache, start, rope, queries, 0.25, latent)
        apply_values(w, heads, nope, latent.reshape(count, -1), y)

    shape = (count, heads * value)
    same(everywhere(one, shape, threads=(1, 2), gap=5), everywhere(three, shape), start=start)
    y, work = np.empty(shape, "f4"), np.empty(4096, "f4")
    good = [w, nope, rope, cache, start, q, 0.25, queries, latent, work, y, work]
    native.mla(*good)
    for at, bad in (
        (3, cache[:-1]),
        (3, cache[:, :-1].copy()),
        (2, rope + 1),
        (4, start + 1),
        (5, q[:, :-1]),
        (5, q[:0]),
        (7, queries[..., :-1].copy()),
        (9, work[:8]),
        (10, y[:, :-1]),
        (11, work[:8]),
    ):
        with pytest.raises(ValueError):
            native.mla(*good[:at], bad, *good[at + 1 :])


def test_c_refuses_nulls_and_empty_shapes():
    v, data = ffi.new("float[]", 40000), ffi.new("uint8_t[]", 4096)
    w = ffi.new("kimi_matrix *")
    w.format, w.rows, w.cols, w.data = Format.BF16, 14, 16, data
    argument = lib.KIMI_E_ARGUMENT

    def absorb(w=w, heads=2, nope=4, rope=2, q=v, count=1, out=v):
        return lib.kimi_mla_absorb(w, heads, nope, rope, q, 12, count, out, 36)

    def attend(cache=v, start=0, count=1, heads=2, rank=16, rope=2, q=v, out=v, scratch=v):
        return lib.kimi_mla_attend(cache, start, count, heads, rank, rope, q, 1.0, out, scratch)

    def values(w=w, heads=2, nope=4, rank=16, latent=v, count=1, y=v, scratch=v):
        return lib.kimi_mla_values(w, heads, nope, rank, latent, 32, count, y, 6, scratch)

    null = ffi.NULL

    def mla(w=w, cache=v, q=v, queries=v, latent=v, work=v, y=v, scratch=v):
        return lib.kimi_mla(
            w, 2, 4, 2, cache, 0, 1, q, 12, 1.0, queries, latent, work, y, 6, scratch
        )

    assert absorb() == attend() == values() == mla() == 0
    for name in ("w", "cache", "q", "queries", "latent", "work", "y", "scratch"):
        assert mla(**{name: null}) == argument, name
    for bad in (
        *({name: null} for name in ("w", "q", "out")),
        *({name: 0} for name in ("heads", "nope", "count")),
        *({"heads": 3}, {"nope": 8}, {"rope": -1}),
    ):
        assert absorb(**bad) == argument, bad
    for bad in (
        *({name: null} for name in ("cache", "q", "out", "scratch")),
        *({name: 0} for name in ("heads", "rank", "count")),
        *({"start": -1}, {"rope": -1}, {"rank": lib.KIMI_MAX_RANK + 1}),
    ):
        assert attend(**bad) == argument, bad
    for bad in (
        *({name: null} for name in ("w", "latent", "y", "scratch")),
        *({"heads": 0}, {"count": 0}, {"nope": -1}, {"nope": 7}, {"heads": 4}, {"rank": 17}),
    ):
        assert values(**bad) == argument, bad
