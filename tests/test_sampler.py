"""Sampling options, and that a seed means the same draws however the work is done."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from command import generate, kimi, sentence, smallest_ram

from kimi_cli import native
from kimi_cli.errors import NumericError, UsageError
from kimi_cli.sampler import GREEDY, Sampler, Sampling

LOGITS = np.random.default_rng(5).standard_normal(500).astype(np.float32) * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(temperature=-0.1), "--temperature wants 0 (greedy) to 100, not -0.1"),
        (dict(temperature=101.0), "--temperature wants 0 (greedy) to 100, not 101"),
        (dict(temperature=math.nan), "--temperature wants 0 (greedy) to 100, not nan"),
        (dict(temperature=math.inf), "--temperature wants 0 (greedy) to 100, not inf"),
        (dict(top_p=0.0), "--top-p wants more than 0, at most 1 (all), not 0"),
        (dict(top_p=1.01), "--top-p wants more than 0, at most 1 (all), not 1.01"),
        (dict(top_p=math.nan), "--top-p wants more than 0, at most 1 (all), not nan"),
        (dict(top_k=-1), "--top-k wants 0 (all) or more, not -1"),
        (dict(min_p=-0.5), "--min-p wants 0 (all) to 1, not -0.5"),
        (dict(min_p=1.5), "--min-p wants 0 (all) to 1, not 1.5"),
        (dict(min_p=math.nan), "--min-p wants 0 (all) to 1, not nan"),
        (dict(seed=-1), "--seed wants 0 to 18446744073709551615, not -1"),
        (dict(seed=2**64), "--seed wants 0 to 18446744073709551615, not 18446744073709551616"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**options)
    assert str(caught.value) == said


def test_borders_are_in_range() -> None:
    Sampling(0.0, 1.0, 0, 0.0, 0)
    Sampling(100.0, 5e-324, 10**30, 1.0, 2**64 - 1)
    assert Sampler(Sampling(100.0, 5e-324, 10**30, 1.0, 2**64 - 1), 500).choose(
        LOGITS, 2**64 - 1
    ) == (native.argmax(LOGITS))


def test_greedy_is_the_default_and_needs_no_seed() -> None:
    assert Sampling() == GREEDY and GREEDY.greedy
    assert GREEDY.seeded() is GREEDY
    sampler = Sampler(Sampling(top_p=0.5, top_k=3, seed=9), 500)
    assert [sampler.choose(LOGITS, index) for index in range(9)] == [native.argmax(LOGITS)] * 9
    assert Sampler(GREEDY, 3).choose(np.array([1, 2, 2], np.float32), 0) == 1


def test_a_seed_is_made_when_one_is_needed() -> None:
    sampling = Sampling(temperature=1.0)
    seeds = {sampling.seeded().seed for _ in range(8)}
    assert None not in seeds and len(seeds) > 1
    assert Sampling(temperature=1.0, seed=0).seeded().seed == 0
    again = Sampler(sampling, 500).sampling
    assert Sampler(again, 500).sampling == again


def test_a_draw_depends_on_position_and_seed_alone() -> None:
    one, other = (Sampler(Sampling(temperature=1.0, seed=4), 500) for _ in range(2))
    forward = [one.choose(LOGITS, index) for index in range(60)]
    backward = [other.choose(LOGITS, index) for index in reversed(range(60))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 20
    different = Sampler(Sampling(temperature=1.0, seed=5), 500)
    assert forward != [different.choose(LOGITS, index) for index in range(60)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_logits_that_are_not_finite(sampling: Sampling) -> None:
    for junk in (math.nan, math.inf, -math.inf):
        row = LOGITS.copy()
        row[17] = junk
        with pytest.raises(NumericError, match="NaN or infinity"):
            Sampler(sampling, 500).choose(row, 0)


# --- as a command --------------------------------------------------------------------------------

DRAWN = ("Hello", "-n", 24, "--ignore-eos", "--temperature", 1.2, "--top-p", 0.97, "--seed", 42)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return generate(*DRAWN)


@pytest.mark.parametrize(
    "options",
    [
        ["--threads", 1], ["--threads", 2, "--prefill-chunk", 1], ["--isa", "scalar"],
        ["--prefill-chunk", 7], ["--ram", "100M"], ["--context", 500],
        ["--ram", "smallest", "--threads", 1],
    ],
    ids=str,
)  # fmt: skip
def test_the_same_seed_gives_the_same_text(drawn: dict[str, Any], options: list[Any]) -> None:
    words = [smallest_ram(*DRAWN) if word == "smallest" else word for word in options]
    again = generate(*DRAWN, *words)
    assert (again["ids"], again["text"]) == (drawn["ids"], drawn["text"])
    assert again["stats"]["seed"] == 42


def test_every_instruction_set_gives_the_same_text(drawn: dict[str, Any]) -> None:
    for isa in native.supported_isas():
        assert generate(*DRAWN, "--isa", isa)["ids"] == drawn["ids"]


def test_draws_continue_where_they_were_cut(drawn: dict[str, Any]) -> None:
    """The token at a position is the same, whether what is before it was prompt or drawn."""
    ids = [*drawn["prompt_ids"], *drawn["ids"][:10]]
    rest = generate("--ids", ",".join(map(str, ids)), *DRAWN[1:], "-n", 14)
    assert rest["ids"] == drawn["ids"][10:]


def test_different_seeds_differ(drawn: dict[str, Any]) -> None:
    others = [generate(*DRAWN, "--seed", seed)["ids"] for seed in (1, 2**64 - 1)]
    assert drawn["ids"] not in others and others[0] != others[1]


def test_settings_that_draw_the_likeliest() -> None:
    greedy = generate("Hello", "-n", 8)
    assert "seed" not in greedy["stats"]
    for options in (["--top-k", 1], ["--top-p", 1e-9], ["--temperature", 1e-9], ["--min-p", 1]):
        found = generate("Hello", "-n", 8, "--temperature", 5, "--seed", 1, *options)
        assert found["ids"] == greedy["ids"], options
    unused = ["--temperature", 0, "--top-p", 0.5, "--top-k", 9, "--min-p", 0.1, "--seed", 3]
    assert generate("Hello", "-n", 8, *unused)["ids"] == greedy["ids"]


def test_an_unasked_seed_is_reported_and_repeats_the_run() -> None:
    options = ("Hello", "-n", 12, "--ignore-eos", "--temperature", 2)
    done = kimi("generate", *options, "--json")
    first = json.loads(done.stdout)
    seed = first["stats"]["seed"]
    assert f"seed {seed}: give --seed to draw the same again\n".encode() in done.stderr
    assert generate(*options, "--seed", seed)["ids"] == first["ids"]
    told = kimi("generate", *options, "--seed", seed)
    assert b"seed" not in told.stderr
    assert b"seed" not in kimi("generate", "Hello", "-n", 1).stderr


def test_options_out_of_range_are_refused() -> None:
    for options, said in (
        (["--temperature", "nan"], "--temperature wants"),
        (["--temperature", "x"], "Invalid value for '--temperature'"),
        (["--top-p", 0], "--top-p wants"),
        (["--top-k", -1], "--top-k wants"),
        (["--min-p", 2], "--min-p wants"),
        (["--seed", -1], "--seed wants"),
        (["--seed", "1.5"], "Invalid value for '--seed'"),
    ):
        assert said in sentence(kimi("generate", "Hello", *options, check=2))


def test_the_budget_holds_while_drawing() -> None:
    options = ("--temperature", 1, "--top-p", 0.9, "--logprobs", 20, "-n", 40)
    for ram in ("100M", smallest_ram("Hello", *options, "--json")):
        stats = generate("Hello", *options, "--ram", ram)["stats"]
        assert stats["peak_rss_bytes"] <= stats["ram_budget_bytes"] == int(ram[:-1]) << 20
