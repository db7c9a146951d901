"""Predictions from rates and plans, by tables a person can check in the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kimi_cli.plan import Plan, Request, make_plan
from kimi_cli.planning import Target
from kimi_cli.predict import PROMPT, Kernel, Rates, Work, distinct, predict, work_of
from kimi_cli.units import GIB, MIB

K3 = Target.open(None, None)
WORK = Work(
    trunk=100,
    beside=20,
    head=10,
    head_share=0.1,
    expert=5,
    expert_bytes=3,
    chosen=2,
    experts=8,
    layers=4,
)
ASKED = 4 * 2 * 3
BASE = make_plan(K3.config, K3.units, Request(1024, 1024, 1, 4), 8 * GIB, {})


def plan(trunk: int, experts: int = ASKED, chunk: int = PROMPT) -> Plan:
    return replace(BASE, trunk_per_token=trunk, expert_per_token=experts, chunk=chunk)


def rates(blocks: float, extents: float, trunk: float, expert: float) -> Rates:
    return Rates(blocks, extents, Kernel(trunk, trunk / 4), Kernel(expert, expert / 4))


@pytest.mark.parametrize(
    "held, speed, seconds, limit",
    [
        # all streamed, arithmetic free: 50 / 10 of trunk + 24 / 12 of experts
        (plan(50), rates(10, 12, 0, 0), 5 + 2, "disk"),
        # disk free: 110 trunk weights at 0.1, 4 layers x 2 experts x 5 weights at 0.5
        (plan(50), rates(1e12, 1e12, 0.1, 0.5), 11 + 20, "compute"),
        # trunk pinned: 9 of it, then experts are read (24) while 2 are multiplied
        (plan(0), rates(10, 1, 0.1, 0), 9 + 24, "disk"),
        # the same, but reads (1) hide behind the shared experts (2)
        (plan(0), rates(10, 24, 0.1, 0), 9 + 2, "compute"),
        # the last of two experts of a layer is multiplied when all are there
        (plan(0), rates(10, 1, 0.1, 0.5), 9 + 24 + 10, "compute"),
        # everything resident
        (plan(0, 0), rates(1, 1, 0.1, 0.5), 11 + 20, "compute"),
        # half of the experts resident
        (plan(0, ASKED // 2), rates(1, 1, 0, 0), 12, "disk"),
    ],
)
def test_seconds_a_token(held: Plan, speed: Rates, seconds: float, limit: str) -> None:
    found = predict(held, WORK, speed)
    assert found.token_seconds == pytest.approx(seconds)
    assert found.token_limit == limit


def test_prefill_reads_the_trunk_once_a_chunk_without_lm_head() -> None:
    free = rates(10, 1e15, 0, 0)
    assert predict(plan(50, chunk=1000), WORK, free).prefill_seconds == pytest.approx(4.5)
    assert predict(plan(50, chunk=250), WORK, free).prefill_seconds == pytest.approx(4 * 4.5)
    assert predict(plan(50, chunk=300), WORK, free).prefill_seconds == pytest.approx(4 * 4.5)


def test_prefill_reads_each_expert_once_a_chunk() -> None:
    found = predict(plan(0, chunk=1000), WORK, rates(1, 1, 0, 0))
    assert found.prefill_seconds == pytest.approx(4 * 8 * 3)
    assert found.prefill_limit == "disk"


def test_prefill_multiplies_further_columns_at_their_own_rate() -> None:
    found = predict(plan(0, 0, chunk=1000), WORK, rates(1, 1, 0.1, 0))
    assert found.prefill_seconds == pytest.approx(100 * (0.1 + 999 * 0.025))
    assert found.prefill_limit == "compute"


@pytest.mark.parametrize("tokens, count", [(1, 2), (2, 3.5), (1000, 8)])
def test_distinct_experts(tokens: int, count: float) -> None:
    assert distinct(WORK, tokens) == pytest.approx(count)


def test_work_of_the_released_model() -> None:
    work = work_of(K3.config, K3.units)
    active = work.trunk + work.head + work.layers * work.chosen * work.expert
    assert 103e9 < active < 106e9
    assert work.expert == 33_030_144 and work.expert_bytes == 17_547_264
    assert work.layers * work.experts == 82_432
    assert work.beside == 92 * (3584 * 7168 + 3 * 6144 * 7168)
    assert 0.02 < work.head_share < 0.022


def test_more_memory_is_never_slower_for_the_released_model() -> None:
    base = {"interpreter": 45 * MIB, "tokenizer": 70 * MIB}
    speed = Rates(2e9, 2e9, Kernel(5e-11, 2e-11), Kernel(5e-11, 2e-11))
    work, request = work_of(K3.config, K3.units), Request(1024, 1024, 8, 4)
    found = [
        predict(make_plan(K3.config, K3.units, request, size * GIB, base), work, speed)
        for size in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 1536)
    ]
    seconds = [prediction.token_seconds for prediction in found]
    assert seconds == sorted(seconds, reverse=True)
    assert found[0].token_limit == "disk" and found[-1].token_limit == "compute"
    assert seconds[0] == pytest.approx(109e9 / 2e9, rel=0.02)
