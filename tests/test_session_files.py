"""The two files of a session: what they hold comes back, and either alone is a session."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sessions import CONFIG, Fed, Run, checked, history_of, same

from kimi_cli import journal, snapshot
from kimi_cli.conversation import check_tools
from kimi_cli.session import Session
from kimi_cli.snapshot import load_state, read_snapshot
from kimi_cli.state import State
from kimi_cli.turns import Head, History, Turn

# --- either file alone ---------------------------------------------------------------------------


def test_either_file_is_a_session(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    wanted = run("hi", "-n", 9)
    prompt = len(wanted["prompt_ids"])
    kept = ("--session", path, "--save-every", 1)
    run("hi", "-n", 5, *kept)
    path.unlink()
    found = run("hi", "-n", 7, *kept)
    assert fed.prefill == prompt + 5 and found["stats"]["resumed_tokens"] == 5
    (tmp_path / "s.ids").unlink()
    found = run("hi", "-n", 9, *kept)
    assert fed[0] == (prompt + 6, 1)
    same(found, wanted)
    assert history_of(path).turns[0].ids == wanted["ids"]


@pytest.mark.parametrize("every", [1, 4, 100])
def test_a_journal_cut_anywhere(run: Run, fed: Fed, tmp_path: Path, every: int) -> None:
    """Alone it loses what was cut; beside a state nothing that the state has."""
    path, ids = tmp_path / "s", tmp_path / "s.ids"
    wanted = run("--ids", "3,4,5", "-n", 9, "--ignore-eos")
    asked = ("--ids", "3,4,5", "--ignore-eos", "--session", path, "--save-every", every)
    run(*asked, "-n", 6)
    raw, state = ids.read_bytes(), path.read_bytes()
    kept = read_snapshot(path)
    assert kept is not None
    for cut in [*range(0, len(raw), 23), len(raw) - 1]:
        for alone in (False, True):
            ids.write_bytes(raw[:cut])
            path.unlink(missing_ok=True)
            if not alone:
                path.write_bytes(state)
            with Session(path) as opened:
                history = opened.history
                found = history.turns[-1].ids if history and history.turns else []
                assert found == wanted["ids"][: len(found)]
                assert len(found) == 6 or alone or cut > len(kept.journal)
    same(run(*asked, "-n", 9), wanted)


# --- what they hold ------------------------------------------------------------------------------


def test_the_state_comes_back(made: Path) -> None:
    checked(made)
    found = read_snapshot(made)
    assert found is not None
    states = [State(CONFIG, found.position + room) for room in (0, 50)]
    for state in states:
        load_state(found, state)
    one, other = ([a.tobytes() for _, a in snapshot.arrays(s, found.position)] for s in states)
    assert one == other and any(any(array) for array in one)


def test_the_state_is_neither_copied_out_nor_in(tmp_path: Path) -> None:
    state = State(CONFIG, 100_000)
    state.position = 100_000
    for array in state.latent.values():
        array[...] = 1.5
    path = tmp_path / "s"
    raw = journal.session_record(Head("s", "m", False))
    tracemalloc.start()
    snapshot.write_snapshot(path, state, [raw], len(raw))
    found = read_snapshot(path)
    assert found is not None and found.size > 60_000_000
    other = State(CONFIG, 100_001)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    load_state(found, other)
    assert peak < 3 * snapshot.BLOCK
    assert tracemalloc.get_traced_memory()[1] < snapshot.BLOCK
    tracemalloc.stop()
    assert all((array[:100_000] == 1.5).all() for array in other.latent.values())


def test_any_safetensors_reader_opens_it(made: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(made)
    assert tensors["kda.000"].dtype == np.float32
    found = read_snapshot(made)
    assert found is not None and tensors["journal"].tobytes() == found.journal
    assert tensors["latent.003"].shape[0] == found.position


def test_records_come_back() -> None:
    tools = check_tools([{"b": "tools \ud800 \u20ac", "a": [1e300, -0.0, None]}])
    head = Head("s", "m" * 64, True, "max", tools)
    turns = [
        Turn(["a\ud800b", "\u20ac"], [1, 2, 3], 0, {"seed": 2**64 - 1}, ["x"], [7, 8], "stop"),
        Turn([], [0], 1, {}, [], [], None),
        Turn(["x" * 1001], [2**32 - 1], 0, {}, [], [4] * 9, "eos"),
    ]
    raw = journal.session_record(head)
    count = 1
    for turn in turns:
        raw += journal.turn_record(count, turn)
        count += 1
        for number, token in enumerate(turn.ids, 1):
            reason = turn.reason if number == len(turn.ids) else None
            raw += journal.token_record(count, token, reason)
            count += 1
    assert journal.parse(raw) == (History(head, turns), count, len(raw))
    assert len(raw) % 4 == 0
    for cut in range(len(raw)):
        found, _, end = journal.parse(raw[:cut])
        assert end <= cut and (found is None) == (end == 0)
    assert journal.parse(b"") == (None, 0, 0)
