"""The fuzz targets on their seeds and saved inputs: an error of ours, in time, in little memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from fuzz.mutate import mutate
from fuzz.targets import CORPUS, TARGETS, saved

from kimi_cli.errors import KimiError

SLOWER = 10
"""Times that a busy machine under tracemalloc may take as long."""
PER_BYTE = 64
"""Bytes that an input may take in memory for each of its own, beside its target's share."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_input_ends_in_success_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    inputs = {f"seed {number}": data for number, data in enumerate(target.seeds())}
    inputs |= {path.name: path.read_bytes() for path in saved(name)}
    read = target.make(tmp_path)
    whole = 0
    for label, data in inputs.items():
        tracemalloc.start()
        started = time.monotonic()
        try:
            read(data)
            whole += 1
        except KimiError as error:
            assert str(error) and "\n" not in str(error), label
        except BaseException as error:
            error.args = (*error.args, f"target {name}, input {label}")
            raise
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert time.monotonic() - started < target.seconds * SLOWER, label
        assert peak < (target.megabytes << 20) + PER_BYTE * len(data), label
    assert whole, "not one input is sound: the target looks at nothing behind its first check"


def test_the_saved_inputs_are_few_and_all_used() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 300_000


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_inputs_end_no_otherwise(name: str, tmp_path: Path) -> None:
    """A few of what fuzzing tries: seeds with one to three changes that keep their form."""
    read, rng = TARGETS[name].make(tmp_path), random.Random(name)
    seeds = list(TARGETS[name].seeds())
    began = time.monotonic()
    for number in range(100):
        data = rng.choice(seeds)
        for _ in range(rng.randint(1, 3)):
            data = mutate(data, rng) or data
        try:
            read(data)
        except KimiError as error:
            assert str(error) and "\n" not in str(error), data
        except BaseException as error:
            error.args = (*error.args, f"target {name}, input {number}: {data[:2000]!r}")
            raise
        if time.monotonic() - began > 4:
            break
