"""Traces written and replayed: hit rates by hand, and on routing like the real model's."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_cli.cache import Lru, Ranked
from kimi_cli.errors import UsageError
from kimi_cli.replay import Step, TraceWriter, hit_rate, optimal_hit_rate, read_trace

KIMI = Path(sys.executable).parent / "kimi"


def routing(tokens: int, layers: int, experts: int, k: int, seed: int) -> list[Step]:
    """A walk in which an expert of rank r comes again at the next token as often as measured."""
    dice = random.Random(seed)
    last: dict[int, list[int]] = {}
    steps = []
    for _ in range(tokens):
        for layer in range(layers):
            kept = [
                e for r, e in enumerate(last.get(layer, [])) if dice.random() < 0.74 - 0.034 * r
            ]
            fresh = [e for e in dice.sample(range(experts), 2 * k) if e not in kept]
            chosen = (kept + fresh)[:k]
            dice.shuffle(chosen)
            last[layer] = chosen
            steps.append(Step(layer, tuple(chosen)))
    return steps


def test_by_hand() -> None:
    steps = [Step(0, (1, 2)), Step(1, (3, 4)), Step(0, (1, 5)), Step(1, (3, 6))]
    assert hit_rate(steps, Lru(2)) == 0.0
    assert hit_rate(steps, Lru(8)) == 0.25
    assert optimal_hit_rate(steps, 2) == 0.25
    assert optimal_hit_rate(steps, 1) == 0.125


@pytest.mark.parametrize("slots_per_layer", [1, 4, 8])
def test_ranked_beats_lru_on_routing_like_the_models(slots_per_layer: int) -> None:
    steps = routing(tokens=60, layers=12, experts=128, k=16, seed=1)
    slots = 12 * slots_per_layer
    lru, ranked = hit_rate(steps, Lru(slots)), hit_rate(steps, Ranked(slots))
    best = optimal_hit_rate(steps, slots)
    assert lru < 0.01
    assert 0.5 * best < ranked <= best


def test_everything_held_is_hit_after_its_first_use() -> None:
    steps = routing(tokens=20, layers=3, experts=32, k=4, seed=2)
    first = len({(s.layer, e) for s in steps for e in s.experts})
    wanted = 1 - first / sum(len(s.experts) for s in steps)
    for rate in (
        hit_rate(steps, Lru(96)),
        hit_rate(steps, Ranked(96)),
        optimal_hit_rate(steps, 96),
    ):
        assert rate == pytest.approx(wanted)


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        for layer in (1, 2):
            ids = np.array([[3, 1], [2, 0]], dtype=np.int32) + layer
            writer.trace(layer, 5, ids, np.zeros((2, 2), dtype=np.float32))
    assert read_trace(path) == [Step(1, (4, 2)), Step(2, (5, 3)), Step(1, (3, 1)), Step(2, (4, 2))]


@pytest.mark.parametrize(
    "line", ["", "{}", " " * 70_000, '{"position": 1, "layer": 0, "experts": [1, 1]}', "[1]"]
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"position": 0, "layer": 0, "experts": [1]}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_trace(path)


def test_through_the_command(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run = [KIMI, "generate", "--ids", "1,2,3", "-n", "6", "--quiet", "--trace", path]
    subprocess.run(run, check=True, capture_output=True)
    assert len(read_trace(path)) == 12 * (3 + 5)
    shown = subprocess.run(
        [KIMI, "replay", path, "--slots", "4,48"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["slots", "4", "48"]
