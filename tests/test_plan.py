"""The memory plan: sums, refusals, what more memory buys; and `kimi plan` as installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli.builtin import TINY
from kimi_cli.errors import BudgetError, Exit
from kimi_cli.plan import (
    MAX_CHUNK,
    SLACK,
    SLOT_OBJECTS,
    Request,
    expert_reads,
    longest_context,
    make_plan,
    smallest_plan,
    spread,
    walk,
)
from kimi_cli.planning import Target
from kimi_cli.units import GIB, MIB, parse_size

KIMI = Path(sys.executable).parent / "kimi"
K3 = Target.open(None, None)
SMALL = Target.open(TINY, None)
BASE = {"interpreter": 45 * MIB, "tokenizer": 70 * MIB, "manifest": 14 * MIB}
REQUEST = Request(context=1024, prompt=1024, threads=8, readers=4)
FLOOR = smallest_plan(K3.config, K3.units, REQUEST, BASE).total


def plan(budget: int, request: Request = REQUEST, target: Target = K3) -> Any:
    return make_plan(target.config, target.units, request, budget, BASE, target.contiguous)


def kimi(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    return subprocess.run([KIMI, *arguments], capture_output=True, text=True, timeout=60, env=env)


def test_floor_of_the_released_dimensions() -> None:
    assert plan(GIB).total <= GIB
    assert FLOOR <= 820 * MIB
    items = plan(FLOOR).items
    mib = {name: round(size / MIB) for name, size in items.items()}
    assert mib["kda_state"] == 414 and mib["latent_cache"] == 54 and mib["conv_histories"] == 29
    assert items["pinned_trunk"] == 0 and mib["ring"] == 64 and mib["expert_slots"] == 100


def test_floor_of_the_builtin_checkpoint() -> None:
    request = replace(REQUEST, context=1024)
    assert smallest_plan(SMALL.config, SMALL.units, request, BASE).total <= 160 * MIB


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(FLOOR, 2048 * GIB) | st.integers(FLOOR, 16 * GIB),
    threads=st.integers(1, 64),
    chunk=st.none() | st.integers(1, 300),
    context=st.integers(1, 4096),
)
def test_items_sum_to_the_total_within_the_budget(
    budget: int, threads: int, chunk: int | None, context: int
) -> None:
    request = Request(context, context, threads, 4, chunk)
    try:
        found = plan(budget, request)
    except BudgetError:
        assert smallest_plan(K3.config, K3.units, request, BASE).total > budget
        return
    assert found.total == sum(found.items.values()) <= found.budget == budget
    assert found.floor <= found.total
    assert all(size >= 0 for size in found.items.values())
    assert found.items["pinned_trunk"] == found.pinned_bytes
    assert found.items["activations"] == found.buffers.size
    assert found.items["expert_slots"] == found.slots * (found.slot_bytes + SLOT_OBJECTS)
    assert found.buffers.common["prefix"][0] == found.chunk <= max(chunk or 0, MAX_CHUNK)
    segments = walk(K3.units)
    streamed = sum(s.length for place, s in enumerate(segments) if place not in found.pinned)
    assert found.trunk_per_token == streamed


def test_more_memory_never_holds_less() -> None:
    budgets = [FLOOR + step * 97 * MIB for step in range(20)]
    budgets += [4 * GIB, 11 * GIB, 40 * GIB, 80 * GIB, 100 * GIB, 512 * GIB, 1536 * GIB]
    plans = [plan(budget) for budget in budgets]
    for less, more in pairwise(plans):
        assert less.floor == more.floor
        assert less.chunk <= more.chunk and less.slots <= more.slots
        assert less.total <= more.total
        if (less.chunk, less.slots) == (more.chunk, more.slots):
            assert less.pinned_bytes <= more.pinned_bytes
            assert less.trunk_per_token >= more.trunk_per_token
        assert less.expert_per_token >= more.expert_per_token
    assert plans[-1].trunk_per_token == 0 == plans[-1].expert_per_token


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_twice_the_memory_reads_less(size: int) -> None:
    assert plan(2 * size * GIB).trunk_per_token < plan(size * GIB).trunk_per_token


def test_little_of_the_budget_is_left_over() -> None:
    for budget in (1 * GIB, 3 * GIB, 8 * GIB, 40 * GIB, 200 * GIB):
        assert plan(budget).total > budget - 32 * MIB


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_pinned_blocks_are_spread_evenly(share: float) -> None:
    segments = walk(K3.units)
    blocks = [s for s in segments if s.matrix >= 0]
    total, largest = sum(s.size for s in blocks), max(s.size for s in blocks)
    room = int(total * share)
    chosen, held = spread(segments, room)
    assert room - largest < held <= room
    assert all(segments[place].matrix >= 0 for place in chosen)
    passed = pinned = 0
    for place, segment in enumerate(segments):
        if segment.matrix >= 0:
            passed += segment.size
            pinned += segment.size if place in chosen else 0
            assert passed * share - 2 * largest < pinned <= passed * share + 1


@pytest.mark.parametrize("slots, share", [(4, 1), (1471, 1), (41216, 0.5), (82432, 0)])
def test_expert_bytes_a_token(slots: int, share: float) -> None:
    """Least-recently-used slots are of no use before they hold what one token asks for."""
    assert expert_reads(K3.config, slots) == share * 92 * 16 * 17_547_264


def test_refusal_names_budget_and_context_that_work() -> None:
    budget = FLOOR - 10 * MIB
    started = time.monotonic()
    with pytest.raises(BudgetError) as caught:
        plan(budget)
    assert time.monotonic() - started < 1
    words = str(caught.value).split()
    assert caught.value.exit_code == Exit.BUDGET and "\n" not in str(caught.value)
    wanted = parse_size(words[words.index("use") + 2])
    assert FLOOR + SLACK <= wanted < FLOOR + SLACK + MIB
    assert plan(wanted).total <= wanted
    context = int(words[words.index("--context") + 1])
    assert plan(budget, replace(REQUEST, context=context, prompt=context)).total <= budget


def test_refusal_without_any_context_that_fits() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(300 * MIB)
    assert "--context" not in str(caught.value)


@settings(max_examples=20, deadline=None)
@given(budget=st.integers(500 * MIB, 8 * GIB), prompt=st.integers(1, 2000))
def test_longest_context_is_the_longest(budget: int, prompt: int) -> None:
    request = Request(prompt, prompt, 4, 4)

    def least(context: int) -> int:
        asked = replace(request, context=context, prompt=min(prompt, context))
        return smallest_plan(K3.config, K3.units, asked, BASE).total

    longest = longest_context(K3.config, K3.units, request, budget, BASE)
    assert longest == 0 or least(longest) <= budget
    assert least(longest + 1) > budget


def test_command_prints_what_a_person_reads() -> None:
    done = kimi("plan", "--ram", "8G", "--threads", "2")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("kda state", "pinned trunk", "total", "floor", "read per token", "of experts"):
        assert word in done.stdout


def test_command_prints_json() -> None:
    done = kimi("plan", "--ram", "1G", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert list(found) == [
        "budget_bytes", "items", "total_bytes", "floor_bytes", "pinned_bytes", "per_token",
        "context", "fits",
    ]  # fmt: skip
    assert found["budget_bytes"] == GIB and found["context"] == 1024 and found["fits"] is True
    assert sum(found["items"].values()) == found["total_bytes"] <= GIB
    assert found["floor_bytes"] <= 820 * MIB
    assert found["pinned_bytes"] == found["items"]["pinned_trunk"]
    assert found["per_token"]["expert_bytes"] == 92 * 16 * 17_547_264
    trunk = sum(s.length for s in walk(K3.units))
    assert 0.95 * trunk < found["per_token"]["trunk_bytes"] < trunk


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_command_refuses_with_the_table(form: tuple[str, ...]) -> None:
    started = time.monotonic()
    done = kimi("plan", "--ram", "512M", *form)
    assert time.monotonic() - started < 3
    assert done.returncode == Exit.BUDGET
    assert done.stderr.startswith("kimi: ") and done.stderr.count("\n") == 1
    if form:
        found = json.loads(done.stdout)
        assert found["fits"] is False and found["total_bytes"] == found["floor_bytes"]
    else:
        assert "DOES NOT FIT" in done.stdout


def test_command_plans_for_a_checkpoint_with_and_without_a_trunk(tmp_path: Path) -> None:
    with_trunk = json.loads(kimi("plan", "--ram", "160M", "-m", str(TINY), "--json").stdout)
    assert with_trunk["fits"] and with_trunk["per_token"] == {"trunk_bytes": 0, "expert_bytes": 0}
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    done = kimi("plan", "--ram", "160M", "-m", str(tmp_path), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["fits"]
    missing = kimi("plan", "-m", str(tmp_path), "--trunk", str(tmp_path / "none"))
    assert missing.returncode == Exit.CHECKPOINT
    assert kimi("plan", "--trunk", str(tmp_path)).returncode == Exit.USAGE


def test_command_takes_options_into_account() -> None:
    def items(*options: str) -> dict[str, int]:
        found = json.loads(kimi("plan", "--ram", "4G", "--json", *options).stdout)
        return dict(found["items"])

    usual = items("--threads", "1")
    assert items("--threads", "1", "--context", "2048")["latent_cache"] == 2 * usual["latent_cache"]
    assert items("--threads", "1", "--prefill-chunk", "2")["activations"] < usual["activations"]
    assert kimi("plan", "--context", "2000000").returncode == Exit.USAGE
    assert kimi("plan", "--context", "0").returncode == Exit.USAGE
