"""Presets: names, what each holds, and `--preset` in place of `--ram`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_cli.builtin import TINY
from kimi_cli.errors import Exit, UsageError
from kimi_cli.plan import Request, make_plan, routed_experts, walk
from kimi_cli.planning import Target
from kimi_cli.presets import PRESETS, preset_budget, preset_table
from kimi_cli.units import MIB, parse_size

KIMI = Path(sys.executable).parent / "kimi"
K3 = Target.open(None, None)
BASE = {"interpreter": 45 * MIB, "tokenizer": 70 * MIB, "manifest": 14 * MIB}
REQUEST = Request(1024, 1024, 8, 4)


def kimi(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    return subprocess.run([KIMI, *arguments], capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_means_what_it_says(name: str) -> None:
    assert preset_budget(name) == preset_budget(name.upper()) == parse_size(name)


def test_names_are_in_order_of_size() -> None:
    assert list(PRESETS.values()) == sorted(PRESETS.values())


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError) as caught:
        preset_budget("3g")
    assert all(name in str(caught.value) for name in PRESETS)


def test_table_is_the_plan_of_each_budget() -> None:
    table = preset_table(K3.config, K3.units, REQUEST, BASE)
    assert [preset.name for preset in table] == list(PRESETS)
    for preset in table:
        assert preset.plan == make_plan(K3.config, K3.units, REQUEST, preset.budget, BASE)


def test_the_last_preset_holds_everything_and_the_first_little() -> None:
    table = preset_table(K3.config, K3.units, REQUEST, BASE)
    first, last = table[0].plan, table[-1].plan
    assert first is not None and first.pinned_bytes < 512 * MIB
    assert last is not None and last.slots == routed_experts(K3.config)
    assert len(last.pinned) == len(walk(K3.units))


def test_a_long_context_leaves_small_presets_out() -> None:
    table = preset_table(K3.config, K3.units, Request(100_000, 100_000, 8, 4), BASE)
    fits = [preset.plan is not None for preset in table]
    assert fits[:2] == [False, False] and fits[-1] and fits == sorted(fits)


def test_command_prints_a_line_each() -> None:
    done = kimi("presets")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == list(PRESETS)


def test_command_prints_json() -> None:
    found = json.loads(kimi("presets", "--context", "100000", "--json").stdout)
    assert [preset["name"] for preset in found] == list(PRESETS)
    assert found[0] == {"name": "1g", "budget_bytes": 1 << 30, "fits": False}
    assert found[-1]["fits"] and found[-1]["per_token"] == {"trunk_bytes": 0, "expert_bytes": 0}
    assert found[-1]["expert_slots"] == 92 * 896


def test_preset_equals_its_ram() -> None:
    def budget(*options: str) -> int:
        return int(json.loads(kimi("plan", "--json", *options).stdout)["budget_bytes"])

    assert budget("--preset", "8g") == budget("--ram", "8G") == 8 << 30


def test_preset_is_the_budget_of_generate() -> None:
    done = kimi("generate", "-m", str(TINY), "--ids", "1,2", "-n", "1", "--preset", "1g", "--json")
    assert json.loads(done.stdout)["stats"]["ram_budget_bytes"] == 1 << 30


@pytest.mark.parametrize("command", [("plan",), ("generate", "--ids", "1")])
def test_command_refuses_two_budgets_and_unknown_names(command: tuple[str, ...]) -> None:
    both = kimi(*command, "--preset", "8g", "--ram", "8G")
    assert both.returncode == Exit.USAGE and both.stdout == ""
    unknown = kimi(*command, "--preset", "3g")
    assert unknown.returncode == Exit.USAGE and "1g, 2g, 4g" in unknown.stderr
