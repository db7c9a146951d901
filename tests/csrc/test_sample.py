"""Drawing a token and log-probabilities: against kimi.h read literally, and against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kimi_cli import native
from kimi_cli.errors import NumericError
from kimi_cli.native import ffi, lib

from .hostile import Output, applied, floats, generator, shifted
from .test_parallel import environments, in_thread

ALL = dict(top_k=0, top_p=1.0, min_p=0.0)
SETTINGS = [
    dict(temperature=1.0, **ALL),
    dict(temperature=0.3, top_k=7, top_p=1.0, min_p=0.0),
    dict(temperature=1.0, top_k=0, top_p=0.6, min_p=0.0),
    dict(temperature=1.5, top_k=0, top_p=1.0, min_p=0.2),
    dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05),
    dict(temperature=4.0, top_k=40, top_p=0.999999, min_p=1e-9),
    dict(temperature=100.0, top_k=1, top_p=1.0, min_p=0.0),
    dict(temperature=100.0, top_k=0, top_p=1e-300, min_p=0.0),
    dict(temperature=100.0, top_k=0, top_p=1.0, min_p=1.0),
    dict(temperature=1e-300, **ALL),
    dict(temperature=5e-324, top_k=3, top_p=0.5, min_p=0.5),
    dict(temperature=1e300, **ALL),
]


def hostile_logits():
    """Name -> finite logits."""
    rng = generator("sample")
    cliff = np.full(300, -3.4028235e38, np.float32)
    cliff[77] = 3.4028235e38
    zeros = np.where(rng.random(65) < 0.5, np.float32(0.0), np.float32(-0.0))
    return {
        "one": np.array([-5.0], np.float32),
        "two": np.array([1.0, 1.0], np.float32),
        "equal": np.full(129, 2.5, np.float32),
        "zeros of both signs": zeros,
        "one far above the rest": cliff,
        "ascending": np.arange(64, dtype=np.float32),
        "descending": -np.arange(64, dtype=np.float32) / 8,
        "few values": rng.integers(-3, 4, 200).astype(np.float32),
        "plain": floats(rng, 1500) * 3,
        "tiny": floats(rng, 100, "tiny"),
        "huge": floats(rng, 100, "huge"),
        "wide": floats(rng, 257, "wide"),
        "flat": floats(rng, 1025) / 1000,
        "a tail of subnormal weights": -np.linspace(0, 110, 999).astype(np.float32),
    }


def draw(logits, temperature, top_k, top_p, min_p, seed=1, index=0):
    """native.sample with poisoned, guarded scratch."""
    weights, order = Output(logits.shape), Output(logits.shape)
    order_ids = order.view.view(np.int32)
    token = native.sample(
        logits, temperature, top_k, top_p, min_p, seed, index, weights.view, order_ids
    )
    weights.check(n=logits.size)
    order.check(written=False, n=logits.size)
    return token


# ---- the generator ----

KNOWN = [
    # Random123 1.14.0, tests/kat_vectors: counter, key, what philox4x32-10 makes of them
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter, key):
    """kimi_philox on lists of words."""
    out = ffi.new("uint32_t[4]")
    status = lib.kimi_philox(ffi.new("uint32_t[]", counter), ffi.new("uint32_t[]", key), out)
    assert status == 0
    return list(out)


def uniform(seed, index):
    """u of kimi.h."""
    words = [index & 0xFFFFFFFF, index >> 32, 0, 0]
    r = philox(words, [seed & 0xFFFFFFFF, seed >> 32])
    return ((r[0] << 32 | r[1]) >> 11) / 2**53


@pytest.mark.parametrize("counter, key, want", KNOWN)
def test_philox_known_vectors(counter, key, want):
    assert philox(counter, key) == want


def test_every_word_of_counter_and_key_counts():
    seen = {tuple(philox([0] * 4, [0] * 2))}
    for bit in range(128):
        word = [0, 0, 0, 0]
        word[bit // 32] = 1 << bit % 32
        seen.add(tuple(philox(word, [0, 0])))
    for bit in range(64):
        word = [0, 0]
        word[bit // 32] = 1 << bit % 32
        seen.add(tuple(philox([0] * 4, word)))
    assert len(seen) == 1 + 128 + 64


def test_uniform_is_uniform_over_indices_and_seeds():
    for values in (
        [uniform(7, index) for index in range(4000)],
        [uniform(seed, 7) for seed in range(4000)],
        [uniform(2**63 + 5, 2**40 + index) for index in range(4000)],
    ):
        assert min(values) >= 0 and max(values) < 1
        assert chi_square(np.histogram(values, 50, (0, 1))[0], np.full(50, 1 / 50)) < 49 + 50


def chi_square(counts, probabilities):
    """Pearson's statistic; its mean is len - 1, its deviation sqrt(2 (len - 1))."""
    wanted = probabilities * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


# ---- draws ----


def literal(logits, temperature, top_k, top_p, min_p, seed, index):
    """What kimi.h says: the id drawn, and all that could have been."""
    with np.errstate(all="ignore"):
        x = (logits.astype(np.float64) - np.float64(logits.max())) / temperature
    e = applied(native.exp, np.maximum(x, -104.0).astype(np.float32)).tolist()

    def total(ids):
        result = 0.0
        for i in sorted(ids):
            result += e[i]
        return result

    kept = sorted(range(len(e)), key=lambda i: (-float(logits[i]), i))
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        enough, sum_ = top_p * total(kept), 0.0
        for place, i in enumerate(kept):
            sum_ += e[i]
            if sum_ >= enough:
                kept = kept[: place + 1]
                break
    kept = sorted(i for i in kept if e[i] >= min_p)
    target, sum_ = uniform(seed, index) * total(kept), 0.0
    for i in kept:
        sum_ += e[i]
        if sum_ > target:
            return i, kept
    raise AssertionError("nothing was drawn")


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("name", hostile_logits())
def test_draws_are_what_the_header_says(name, how):
    logits = shifted(hostile_logits()[name], 3)
    for seed, index in ((0, 0), (1, 2), (2**64 - 1, 2**63), (123456789012345, 10**12), (5, 77)):
        want, kept = literal(logits, **how, seed=seed, index=index)
        assert draw(logits, **how, seed=seed, index=index) == want, (seed, index)
        assert want in kept


def shares64(logits, temperature, top_k, top_p, min_p):
    """Probabilities in float64, in the conventional way."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    order = np.lexsort((np.arange(len(p)), -x))
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


DISTRIBUTIONS = [
    dict(temperature=1.0, **ALL),
    dict(temperature=0.5, **ALL),
    dict(temperature=2.0, **ALL),
    dict(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0),
    dict(temperature=1.0, top_k=0, top_p=0.7, min_p=0.0),
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.15),
    dict(temperature=1.3, top_k=15, top_p=0.93, min_p=0.04),
]


@pytest.mark.parametrize("how", DISTRIBUTIONS, ids=str)
def test_distribution(how):
    """Chi-square of 20,000 positions of one seed, against float64."""
    logits = floats(generator("distribution"), 24) * np.float32(1.5)
    p = shares64(logits, **how)
    weights, order = np.empty(24, np.float32), np.empty(24, np.int32)
    args = (how["temperature"], how["top_k"], how["top_p"], how["min_p"], 2024)
    ids = [native.sample(logits, *args, index, weights, order) for index in range(20000)]
    counts = np.bincount(ids, minlength=24)
    assert not counts[p == 0].any()
    used = p * 20000 >= 5
    freedom = int(used.sum()) - 1
    assert chi_square(counts[used], p[used] / p[used].sum()) < freedom + 4 * math.sqrt(2 * freedom)


def test_filters_keep_what_float64_keeps():
    """Except where a sum lies within rounding of a border, which these do not."""
    rng = generator("kept")
    for number in range(40):
        logits = floats(rng, 300) * 4
        how = dict(
            temperature=float(rng.uniform(0.2, 3)),
            top_k=int(rng.integers(0, 60)),
            top_p=float(rng.uniform(0.05, 1)),
            min_p=float(rng.uniform(0, 0.2)),
        )
        _, kept = literal(logits, **how, seed=1, index=number)
        assert kept == np.flatnonzero(shares64(logits, **how)).tolist(), how


def test_ties_go_to_the_lower_index():
    logits = np.array([1, 3, 3, 2, 3, 2, 2], np.float32)
    for top_k, kept in (
        (1, {1}),
        (2, {1, 2}),
        (3, {1, 2, 4}),
        (4, {1, 2, 4, 3}),
        (5, {1, 2, 4, 3, 5}),
    ):
        args = dict(temperature=50.0, top_k=top_k, top_p=1.0, min_p=0.0)
        assert {draw(logits, **args, index=index) for index in range(400)} == kept
    zeros = np.array([-0.0, 0.0, -0.0], np.float32)
    assert {draw(zeros, 1.0, 1, 1.0, 0.0, index=index) for index in range(50)} == {0}
    assert {draw(zeros, 1.0, 2, 1.0, 0.0, index=index) for index in range(50)} == {0, 1}


@pytest.mark.parametrize("name", hostile_logits())
def test_settings_that_leave_only_the_largest(name):
    logits = hostile_logits()[name]
    best = native.argmax(logits)
    ties = np.flatnonzero(logits == logits.max()).tolist()
    for index in range(20):
        assert draw(logits, 100.0, 1, 1.0, 0.0, index=index) == best
        assert draw(logits, 1.0, 0, 1e-12, 0.0, index=index) == best
        assert draw(logits, 1e-300, 0, 1.0, 1.0, index=index) in ties


def test_filters_that_filter_nothing():
    logits = hostile_logits()["plain"]
    for index in range(30):
        want = draw(logits, 1.0, 0, 1.0, 0.0, index=index)
        assert draw(logits, 1.0, logits.size, 1.0, 0.0, index=index) == want
        assert draw(logits, 1.0, 2**62, 1.0, 0.0, index=index) == want


def test_every_size():
    rng = generator("sizes")
    for n in [*range(1, 70), 255, 256, 257, 1023, 1024, 1025]:
        logits = shifted(floats(rng, n) * 2, n % 4)
        for how in (SETTINGS[0], SETTINGS[4]):
            assert draw(logits, **how, index=n) == literal(logits, **how, seed=1, index=n)[0], n


# ---- log-probabilities ----


def logprobs(logits, ids, top):
    """(of ids, top ids, of those) into guarded outputs."""
    outputs = [Output((2 * len(ids),)), Output((top,)), Output((2 * top,))]
    values, top_values = (outputs[i].view.view(np.float64) for i in (0, 2))
    top_ids = outputs[1].view.view(np.int32)
    native.logprobs(logits, np.array(ids, np.int32), values, top_ids, top_values)
    for output in outputs:
        output.check(n=logits.size, top=top)
    return values.copy(), top_ids.tolist(), top_values.copy()


def logprobs64(logits):
    """The log-softmax in long double."""
    x = logits.astype(np.longdouble)
    x = x - x.max()
    return (x - np.log(np.exp(x).sum())).astype(np.float64)


@pytest.mark.parametrize("name", hostile_logits())
def test_logprobs(name):
    logits = shifted(hostile_logits()[name], 1)
    n, want = logits.size, logprobs64(logits)
    order = sorted(range(n), key=lambda i: (-float(logits[i]), i))
    for top in sorted({0, 1, min(n, 20), min(n, 256)}):
        values, top_ids, top_values = logprobs(logits, [*range(n), 0, n - 1], top)
        assert top_ids == order[:top]
        error = np.abs(values - want[[*range(n), 0, n - 1]])
        assert (error <= 1e-6 + 1e-15 * np.abs(want).max()).all(), error.max()
        assert np.array_equal(top_values, values[top_ids])
        assert (values <= 1e-7).all()


def test_logprobs_are_normalised():
    logits = floats(generator("normal"), 5000) * 5
    values, _, _ = logprobs(logits, range(5000), 0)
    assert abs(np.exp(values).sum() - 1) < 1e-6
    equal, _, _ = logprobs(np.full(4096, -7.25, np.float32), [0, 4095], 0)
    assert equal.tolist() == [-math.log(4096)] * 2
    alone, top, same = logprobs(np.array([3.0], np.float32), [0], 1)
    assert (alone.tolist(), top, same.tolist()) == ([0.0], [0], [0.0])


def distance(found, truth):
    """In units of the last place of the double nearest to long double `truth`."""
    unit = np.spacing(np.abs(truth.astype(np.float64))).astype(np.longdouble)
    return float((np.abs(found.astype(np.longdouble) - truth) / unit).max())


def test_log_within_three_ulp():
    rng = generator("log")
    x = np.concatenate(
        [
            np.exp2(rng.uniform(-1074, 1024, 20000)),
            rng.uniform(0.4, 2.5, 20000),
            1 + rng.uniform(-1, 1, 5000) * 2.0 ** -rng.integers(1, 50, 5000),
            np.arange(1, 3000, dtype=np.float64),
            [5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, math.sqrt(0.5)],
        ]
    )
    x = np.concatenate([x, np.nextafter(x, 0)[x > 5e-324], np.nextafter(x[:100], 1)])
    found = np.array([lib.kimi_log(float(v)) for v in x])
    assert lib.kimi_log(1.0) == 0.0
    assert distance(found[x != 1], np.log(x[x != 1].astype(np.longdouble))) <= 3


def test_perplexity_within_four_ulp():
    rng = generator("perplexity")
    totals = np.concatenate([rng.uniform(-7090, 7090, 20000), -rng.uniform(0, 100, 20000)])
    found = np.array([native.perplexity(float(t), 10) for t in totals])
    assert distance(found, np.exp((-totals / 10).astype(np.longdouble))) <= 4
    assert native.perplexity(0.0, 5) == native.perplexity(-0.0, 1) == 1.0
    assert native.perplexity(-7.2e3, 10) == native.perplexity(-1e300, 1) == math.inf
    assert native.perplexity(-math.inf, 1) == math.inf
    assert native.perplexity(1e300, 1) == 0.0


# ---- the same bits ----


def case():
    """Bytes of draws and log-probabilities of every hostile row, and of one of K3's size."""
    large = floats(generator("large"), 163840) * 3
    rows = [*hostile_logits().values(), large]
    ids = [
        draw(row, **how, seed=11, index=index)
        for row in rows
        for how in (SETTINGS if row is not large else SETTINGS[4:5])
        for index in range(3)
    ]
    kept = [logprobs(row, [0, row.size - 1], min(row.size, 20)) for row in rows]
    values = b"".join(a.tobytes() + b.tobytes() for a, _, b in kept)
    logs = [lib.kimi_log(x) for x in (1e-310, 0.3, 3.0, 163840.0)]
    return ids, [top for _, top, _ in kept], values, logs, native.perplexity(-77.7, 13)


def test_threads_and_instruction_sets_agree():
    want = case()
    for isa in native.supported_isas():
        for threads in (1, 3):
            native.set_isa(isa)
            native.set_threads(threads)
            assert case() == want, (isa, threads)


@pytest.mark.parametrize("environment", environments())
def test_float_environment_changes_nothing(environment, float_state):
    extra, want = environments()[environment], spoilt(lambda: None)

    def work():
        usual = float_state.state_get()
        for isa in native.supported_isas():
            native.set_isa(isa)
            got = spoilt(lambda: float_state.state_set(usual | extra))
            left = float_state.state_get()
            float_state.state_set(usual)
            assert got == want, isa
            assert left & ~0x3F == (usual | extra) & ~0x3F

    in_thread(work)


def spoilt(spoil):
    """Draws and log-probabilities with nothing but calls into C after `spoil`."""
    rows = list(hostile_logits().values())
    scratch = [(np.empty(r.size, np.float32), np.empty(r.size, np.int32)) for r in rows]
    ids = [np.array([0, r.size - 1], np.int32) for r in rows]
    top_ids = [np.zeros(min(r.size, 20), np.int32) for r in rows]
    values = [np.zeros(2) for _ in rows]
    top_values = [np.zeros(len(top)) for top in top_ids]
    spoil()
    drawn = [
        native.sample(row, *how.values(), 3, index, *work)
        for row, work in zip(rows, scratch, strict=True)
        for how in SETTINGS
        for index in range(3)
    ]
    for arguments in zip(rows, ids, values, top_ids, top_values, strict=True):
        native.logprobs(*arguments)
    numbers = [lib.kimi_log(0.3), lib.kimi_log(163840.0), native.perplexity(-77.7, 13)]
    arrays = [array.tobytes() for group in (values, top_ids, top_values) for array in group]
    return drawn, arrays, [number.hex() for number in numbers]


def test_a_cpu_without_features_gives_the_same_bits(featureless, monkeypatch):
    want = spoilt(lambda: None)
    monkeypatch.setattr(native, "ffi", featureless.ffi)
    monkeypatch.setattr(native, "lib", featureless.lib)
    assert native.supported_isas() == ["scalar"]
    assert spoilt(lambda: None) == want


# ---- refusals ----


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(junk):
    for n in (1, 2, 65, 1500):
        for at in {0, n // 2, n - 1}:
            logits = floats(generator("junk", n), n)
            logits[at] = junk
            for how in SETTINGS[:3]:
                with pytest.raises(NumericError, match="NaN or infinity"):
                    native.sample(
                        logits, *how.values(), 1, 0, np.empty_like(logits), np.empty(n, np.int32)
                    )
            with pytest.raises(NumericError):
                native.logprobs(
                    logits, np.zeros(1, np.int32), np.zeros(1), np.zeros(1, np.int32), np.zeros(1)
                )


def test_wrong_arrays_are_refused():
    x, ids, wide = np.zeros(6, np.float32), np.zeros(6, np.int32), np.zeros(6)
    for logits, weights, order in (
        (wide, x, ids), (x, wide, ids), (x, x, wide), (x, x, x), (x, x[:5], ids), (x, x, ids[:5]),
        (np.zeros(12, np.float32)[::2], x, ids), (x, x, np.zeros(12, np.int32)[::2]),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.sample(logits, 1.0, 0, 1.0, 0.0, 1, 0, weights, order)
    for arguments in (
        (wide, ids, wide, ids, wide), (x, x, wide, ids, wide), (x, ids, x, ids, wide),
        (x, ids, wide, x, wide), (x, ids, wide, ids, x), (x, ids, wide[:5], ids, wide),
        (x, ids, wide, ids, wide[:5]), (x, ids.astype(np.int64), wide, ids, wide),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.logprobs(*arguments)


def test_c_refuses_what_it_cannot_use():
    x, ids, values = ffi.new("float[8]"), ffi.new("int32_t[8]"), ffi.new("double[8]")
    null, bad = ffi.NULL, lib.KIMI_E_ARGUMENT
    good = [x, 8, 1.0, 0, 1.0, 0.0, 1, 0, ffi.new("float[8]"), ffi.new("int32_t[8]"), ids]
    assert lib.kimi_sample(*good) == 0
    for place, value in (
        (0, null), (8, null), (9, null), (10, null), (1, 0), (1, -1), (1, 2**31), (2, 0.0),
        (2, -1.0), (2, math.inf), (2, math.nan), (3, -1), (4, 0.0), (4, 1.5), (4, math.nan),
        (5, -0.1), (5, 1.1), (5, math.nan),
    ):  # fmt: skip
        assert lib.kimi_sample(*good[:place], value, *good[place + 1 :]) == bad, (place, value)
    good = [x, 8, ids, 3, values, 4, ffi.new("int32_t[4]"), ffi.new("double[4]")]
    assert lib.kimi_logprobs(*good) == 0
    assert lib.kimi_logprobs(x, 8, null, 0, null, 0, null, null) == 0
    for place, value in (
        (0, null), (1, 0), (1, 2**31), (2, null), (3, -1), (4, null), (5, -1), (5, 9), (6, null),
        (7, null), (2, ffi.new("int32_t[]", [0, 1, 8])), (2, ffi.new("int32_t[]", [0, -1, 2])),
    ):  # fmt: skip
        assert lib.kimi_logprobs(*good[:place], value, *good[place + 1 :]) == bad, (place, value)
    wide = [ffi.new("float[]", 300), 300, ids, 1, values, 257]
    assert lib.kimi_logprobs(*wide, ffi.new("int32_t[257]"), ffi.new("double[257]")) == bad
    assert lib.kimi_philox(null, ffi.new("uint32_t[2]"), ffi.new("uint32_t[4]")) == bad
    assert lib.kimi_philox(ffi.new("uint32_t[4]"), null, ffi.new("uint32_t[4]")) == bad
    assert lib.kimi_philox(ffi.new("uint32_t[4]"), ffi.new("uint32_t[2]"), null) == bad
