"""Sessions: what is interrupted goes on to the same bytes; what is damaged is refused."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from command import KIMI, environment, generate, kimi, linked_model, replace_file, sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli import journal, session, snapshot
from kimi_cli.builtin import PSALM
from kimi_cli.cli import cli
from kimi_cli.config import load_config
from kimi_cli.console import Terminated
from kimi_cli.conversation import check_tools
from kimi_cli.errors import Exit, KimiError, SessionError, UsageError
from kimi_cli.model import Model
from kimi_cli.native import crc32c, supported_isas
from kimi_cli.patience import Patience
from kimi_cli.resume import Keeper
from kimi_cli.session import Session, due, worthwhile
from kimi_cli.snapshot import check_state, load_state, read_snapshot
from kimi_cli.state import State
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import Head, History, Turn

CONFIG = load_config(PSALM)
TOKENIZER = Tokenizer.load(PSALM)

Run = Callable[..., dict[str, Any]]


class Fed(list[tuple[int, int]]):
    """(position, tokens) of every pass over the model."""

    @property
    def prefill(self) -> int:
        return self[0][1] if self else 0


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Fed:
    seen, forward = Fed(), Model.forward

    def counted(self: Model, state: State, ids: list[int], *args: Any) -> Any:
        seen.append((state.position, len(ids)))
        return forward(self, state, ids, *args)

    monkeypatch.setattr(Model, "forward", counted)
    return seen


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], fed: Fed) -> Run:
    """`kimi generate --json` in this process; `fed` then tells what it fed."""

    def call(*args: object) -> dict[str, Any]:
        fed.clear()
        capsysbinary.readouterr()
        words = ["generate", *map(str, args), "--json", "--quiet", "--threads", "1"]
        cli.main(words, standalone_mode=False)
        result: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
        return result

    return call


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    keys = ("prompt_ids", "ids", "text", "reasoning", "stop_reason")
    assert {k: found.get(k) for k in keys} == {k: wanted.get(k) for k in keys}


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p.name.startswith(path.name))


def history_of(path: Path) -> History:
    found, _, _ = journal.parse(path.with_name(path.name + ".ids").read_bytes())
    assert found is not None
    return found


# --- the same bytes ------------------------------------------------------------------------------


def test_a_session_changes_nothing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    same(run("hi", "-n", 5, "--session", path, "--save-every", 2), run("hi", "-n", 5))
    assert files(path) == ["s", "s.ids"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", "1", "--seed", "7", "--top-p", "0.9"],
        ["--thinking", "low", "--system", "be"],
        ["--raw"],
    ],
)
def test_an_answer_goes_on_to_the_same_bytes(
    run: Run, fed: Fed, tmp_path: Path, options: list[str]
) -> None:
    path, logits = tmp_path / "s", tmp_path / "l.npy"
    wanted = run("hello", "-n", 12, "--logits", logits, *options)
    rows = np.load(logits)
    kept = ("--session", path, "--save-every", 3)
    for count in (0, 1, 5, 6, 12):
        before = len(history_of(path).turns[0].ids) if count else 0
        found = run("hello", "-n", count, "--logits", logits, *options, *kept)
        assert found["ids"] == wanted["ids"][:count]
        assert found["stats"]["resumed_tokens"] == before
        assert np.array_equal(np.load(logits), rows[before:count])
        assert sum(n for _, n in fed) <= (len(wanted["prompt_ids"]) - 1 if not count else 7)
    same(found, wanted)
    same(run("hello", "-n", 12, *options, *kept), wanted)
    assert fed == []


def test_any_budget_threads_instruction_set_and_chunk(tmp_path: Path) -> None:
    path, logits = tmp_path / "s", tmp_path / "l.npy"
    wanted = generate("hello there", "-n", 12, "--logits", logits)
    rows = np.load(logits)
    ways = [["--ram", "80M", "--threads", 1], ["--threads", 2, "--prefill-chunk", 3],
            *(["--isa", isa, "--context", 300] for isa in supported_isas())]  # fmt: skip
    before = 0
    for count, way in zip((3, 6, 8, 10, 12), [*ways, *ways], strict=False):
        found = generate("hello there", "-n", count, *way, "--session", path, "--logits", logits)
        assert np.array_equal(np.load(logits), rows[before:count])
        before = count
    while before < 12:
        before, found = 12, generate("hello there", "-n", 12, "--session", path)
    same(found, wanted)


def test_a_seed_that_nobody_gave_is_kept(run: Run, tmp_path: Path) -> None:
    hot = ("--temperature", 2)
    first = run("hi", "-n", 4, *hot, "--session", tmp_path / "s")
    seed = first["stats"]["seed"]
    whole = run("hi", "-n", 12, *hot, "--session", tmp_path / "s")
    assert whole["stats"]["seed"] == seed
    same(whole, run("hi", "-n", 12, *hot, "--seed", seed))


def test_what_is_finished_is_printed_again(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    text = run("hi", "-n", 12)["text"]
    stop = text[3:5]
    wanted = run("hi", "-n", 30, "--stop", stop)
    assert wanted["stop_reason"] == "stop"
    same(run("hi", "-n", 30, "--stop", stop, "--session", path), wanted)
    logits = tmp_path / "l.npy"
    for more in (["-n", 90], ["-n", 3], ["--stop", "q"], ["--logits", logits]):
        same(run("hi", *more, "--session", path), wanted)
        assert fed == []
    assert np.load(logits).shape == (0, CONFIG.vocab_size)
    done = kimi("generate", "hi", "--quiet", "--session", path)
    assert done.stdout.decode() == wanted["text"] + "\n"
    run("yo", "-n", 2, "--session", path, "--stop", "zzz")
    with pytest.raises(UsageError, match="other --stop texts"):
        run("yo", "-n", 3, "--session", path, "--stop", "yyy")


def test_an_end_token_finishes(run: Run, fed: Fed, tmp_path: Path) -> None:
    ids = run("--ids", "3,4,5", "-n", 6, "--ignore-eos")["ids"]
    model = linked_model(tmp_path / "model", source=PSALM)
    config = json.loads((PSALM / "config.json").read_text())
    config["eos_token_id"] = ids[3]
    replace_file(model / "config.json", json.dumps(config).encode())
    path = tmp_path / "s"
    asked = ("-m", model, "--ids", "3,4,5", "--session", path)
    found = run(*asked)
    assert (found["ids"], found["stop_reason"]) == (ids[: ids.index(ids[3]) + 1], "eos")
    same(run(*asked, "-n", 50, "--ignore-eos"), found)
    assert fed == []


# --- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--thinking", "high"]])
def test_a_new_turn_reads_nothing_twice(
    run: Run, fed: Fed, tmp_path: Path, options: list[str]
) -> None:
    path = tmp_path / "s"
    kept = ("--session", path, "--save-every", 1)
    first = run("hi", "-n", 5, *options, *kept)
    old = len(first["prompt_ids"]) + 5
    second = run("and then?", "-n", 5, *kept)
    assert fed[0][0] == old - 1  # all but the last id, which nobody had fed
    assert fed.prefill == len(second["prompt_ids"]) - old + 1
    assert second["prompt_ids"][:old] == [*first["prompt_ids"], *first["ids"]]
    text = TOKENIZER.decode_bytes(second["prompt_ids"][old:]).decode()
    assert text.endswith("<|sep|>") and "and then?" in text and ">hi<" not in text
    commas = ",".join(map(str, second["prompt_ids"]))
    assert run("--ids", commas, "-n", 5)["ids"] == second["ids"]
    assert second["stats"]["resumed_tokens"] == 0
    same(run("and then?", "-n", 5, *kept), second)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "and then?"}]  # fmt: skip
    conversation = tmp_path / "m.json"
    conversation.write_text(json.dumps(said))
    same(run("--messages", conversation, "-n", 5, *kept), second)
    said += [{"role": "assistant", "content": second["text"]}, {"role": "user", "content": "so"}]
    conversation.write_text(json.dumps(said))
    run("--messages", conversation, "-n", 2, *kept)
    assert fed[0][0] == len(second["prompt_ids"]) + 4
    assert len(history_of(path).turns) == 3
    said[2]["content"] = "and now?"
    conversation.write_text(json.dumps(said))
    with pytest.raises(UsageError, match=r"messages\[2\] parts from the session at character 4"):
        run("--messages", conversation, "-n", 2, *kept)


def test_a_raw_text_is_appended_to(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = run("one", "--raw", "-n", 3, "--session", path, "--save-every", 9)
    second = run("two", "--raw", "-n", 3, "--session", path)
    assert second["prompt_ids"] == [
        *first["prompt_ids"], *first["ids"], *TOKENIZER.encode("two")
    ]  # fmt: skip
    assert fed.prefill == len(TOKENIZER.encode("two")) + 1
    third = run("--ids", "9,8", "-n", 3, "--session", path)
    commas = ",".join(map(str, third["prompt_ids"]))
    assert run("--ids", commas, "-n", 3)["ids"] == third["ids"]


def test_a_prompt_can_be_read_ahead(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    wanted = run("hi", "-n", 4)
    assert run("hi", "-n", 0, "--session", path, "--save-every", 1)["ids"] == []
    same(run("hi", "-n", 4, "--session", path), wanted)
    assert fed.prefill == 1
    run("--ids", "5", "-n", 0, "--session", tmp_path / "t", "--save-every", 1)
    assert fed == []
    assert (
        run("--ids", "5", "-n", 3, "--session", tmp_path / "t")["ids"]
        == (run("--ids", "5", "-n", 3)["ids"])
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["hi", "--thinking", "low"], "was begun with --thinking off, found low"),
        (["hi", "--system", "be"], "begun with none as its --system, found 'be'"),
        (["hi", "--raw"], "a conversation, which --raw and --ids cannot continue"),
        (["--ids", "1"], "a conversation, which --raw and --ids cannot continue"),
        (["hi", "-n", "9", "--all-logits", "x.npy"], "--all-logits needs a new session"),
        (["hi", "-n", "9", "--context", "20"], "more than --context of 20"),
        (["yo", "-n", "9", "--context", "50"], "more than --context of 50"),
    ],
)
def test_what_a_session_cannot_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run("hi", "-n", 3, "--session", "s")
    before = {name: Path(name).read_bytes() for name in ("s", "s.ids")}
    with pytest.raises(UsageError) as caught:
        run(*options, "--session", "s")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert {name: Path(name).read_bytes() for name in before} == before
    assert files(Path("s")) == ["s", "s.ids"]


def test_too_small_a_budget_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = sentence(kimi("generate", "hi", "--quiet", "--session", path, "--ram", "20M", check=4))
    assert "use --ram" in said and files(path) == []
    generate("hi", "-n", 3, "--session", path)
    raw = (tmp_path / "s.ids").read_bytes()
    kimi("generate", "yo", "--quiet", "--session", path, "--ram", "20M", check=4)
    assert (tmp_path / "s.ids").read_bytes() == raw


def test_save_every_needs_a_session() -> None:
    assert "--session" in sentence(kimi("generate", "hi", "--save-every", 2, "--quiet", check=2))


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


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "s"
    generate("hi", "-n", 6, "--session", path, "--save-every", 4)
    return path


def checked(path: Path) -> None:
    """Reads all of FILE, as a run and as `kimi session` do."""
    found = read_snapshot(path)
    assert found is not None
    try:
        check_state(found)
    except SessionError:
        with pytest.raises(SessionError):
            load_state(found, State(CONFIG, found.position))
        raise
    load_state(found, State(CONFIG, found.position))


def refused(path: Path) -> str:
    with pytest.raises(SessionError) as caught:
        checked(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    assert caught.value.exit_code == Exit.CHECKPOINT
    return text


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


@pytest.mark.fault("damage: a flipped bit or a cut in a session", "refused, exit code 3", times=60)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_file_is_refused(made: Path, data: st.DataObject) -> None:
    raw = made.read_bytes()
    cut = data.draw(st.integers(0, len(raw) - 1))
    path = made.with_name("cut")
    path.write_bytes(raw[:cut])
    refused(path)
    path.write_bytes(raw + b"\0")
    refused(path)


@pytest.mark.fault("damage: a flipped bit or a cut in a session", "refused, exit code 3", times=100)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused(made: Path, data: st.DataObject) -> None:
    raw = bytearray(made.read_bytes())
    at = data.draw(st.one_of(st.integers(0, 9000), st.integers(0, len(raw) - 1)))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path = made.with_name("flipped")
    path.write_bytes(raw)
    refused(path)


def test_every_flipped_bit_of_the_ids_is_refused_or_the_last_id_lost(made: Path) -> None:
    raw = made.with_name("s.ids").read_bytes()
    whole, _, _ = journal.parse(raw)
    assert whole is not None
    last = len(raw) - 28
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        if at >= last:
            found, _, end = journal.parse(bytes(bad))
            assert found is not None and end == last
            assert found.turns[0].ids == whole.turns[0].ids[:-1]
        else:
            with pytest.raises(ValueError, match=r"is damaged|is not a session's|is of version"):
                journal.parse(bytes(bad))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3), st.binary(max_size=60))
def test_journals_of_junk_never_fail_otherwise(junk: bytes, kind: int, text: bytes) -> None:
    head = Head("s", "m", True)
    first = journal.session_record(head)
    payload = text + b" " * (-len(text) % 4)
    forged = journal._record(1, kind, payload)
    for raw in (junk, first + junk, first + forged, journal._record(0, kind, payload)):
        try:
            journal.parse(raw)
        except ValueError as error:
            assert "\n" not in str(error)


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


@pytest.mark.parametrize(
    "facts",
    [
        {"thinking": "no such"},
        {"thinking": ["off"]},
        {"tools": ""},
        {"tools": "# Tools"},
        {"tools": check_tools([{"a": 1}]) + " "},
        {"tools": check_tools([{"a": 1}]).replace('{"a":1}', '{"a": 1}')},
        {"tools": check_tools([{"a": 1}]).replace("1", "[" * 2000)},
    ],
)
def test_a_head_that_no_run_wrote(facts: dict[str, Any]) -> None:
    head = {"session": "s", "model": "m", "chat": True, "thinking": "off", "tools": None}
    whole = {"format": "kimi-session", "version": 1, **head, **facts}
    with pytest.raises(ValueError, match="is damaged: its record 0 makes no sense"):
        journal.parse(journal._record(0, 1, journal._json(whole)))


def test_a_turn_without_a_prompt() -> None:
    raw = journal.session_record(Head("s", "m", False)) + journal.turn_record(1, Turn([], []))
    with pytest.raises(ValueError, match="is damaged: its record 1 makes no sense"):
        journal.parse(raw)


def test_the_search_behind_a_torn_end_is_short() -> None:
    """Every 20 bytes of this may begin a record of all the rest; each would be summed."""
    frame = journal._FRAME.pack(b"KIMI", 9, 9, 0, 0)
    count = 20_000
    raw = b"".join(
        journal._FRAME.pack(b"KIMI", 9, 9, len(frame) * (count - n - 1), 0) for n in range(count)
    )
    started = time.monotonic()
    with pytest.raises(ValueError, match="is damaged at byte 0"):
        journal.parse(raw)
    assert time.monotonic() - started < 0.5


def test_other_versions_and_other_files(made: Path, tmp_path: Path, run: Run) -> None:
    raw = made.read_bytes()
    path, ids = tmp_path / "s", tmp_path / "s.ids"
    path.write_bytes(raw.replace(b'"version":"1"', b'"version":"2"', 1))
    assert refused(path) == f"{path} is of version 2, wanted 1"
    path.write_bytes((PSALM / "model-00001-of-000004.safetensors").read_bytes())
    assert refused(path) == f"{path} is not a session of kimi"
    for junk in (b"", b"# Notes\n" * 99, bytes(5000)):
        path.write_bytes(junk)
        assert "is not a session of kimi" in refused(path)
        with pytest.raises(SessionError):
            run("hi", "--session", path)
        assert path.read_bytes() == junk and files(path) == ["s"]
    path.unlink()
    ids.write_bytes(b"my own notes")
    with pytest.raises(SessionError, match=r"s\.ids is not a session's list of ids$"):
        run("hi", "--session", path)
    assert ids.read_bytes() == b"my own notes"
    facts = {"format": "kimi-session", "version": 2}
    ids.write_bytes(journal._record(0, 1, journal._json(facts)))
    with pytest.raises(SessionError, match=r"s\.ids is of version 2, wanted 1$"):
        run("hi", "--session", path)


def test_files_of_two_sessions(made: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "s"
    run("yo", "-n", 3, "--session", path)
    path.write_bytes(made.read_bytes())
    with pytest.raises(SessionError, match=r"s\.ids is of another session than "):
        run("yo", "--session", path)


def test_damage_names_the_way_out(run: Run, tmp_path: Path) -> None:
    path, ids = tmp_path / "s", tmp_path / "s.ids"
    wanted = run("hi", "-n", 8)
    run("hi", "-n", 4, "--session", path, "--save-every", 2)
    good, raw = ids.read_bytes(), bytearray(path.read_bytes())
    bad = bytearray(good)
    bad[40] ^= 1
    ids.write_bytes(bad)
    with pytest.raises(SessionError, match=r"s\.ids is damaged at byte 0; delete it to go back to"):
        run("hi", "-n", 8, "--session", path)
    ids.write_bytes(good)
    raw[-4000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SessionError, match=r"delete it to have the session read again from s\.ids"):
        run("hi", "-n", 8, "--session", path)
    path.unlink()
    same(run("hi", "-n", 8, "--session", path), wanted)


def test_another_model(made: Path, tmp_path: Path) -> None:
    model = linked_model(tmp_path / "model", source=PSALM)
    config = json.loads((PSALM / "config.json").read_text())
    config["text_config"]["attn_res_block_size"] = 12
    replace_file(model / "config.json", json.dumps(config).encode())
    for name in ("s", "s.ids"):
        (tmp_path / name).write_bytes(made.with_name(name).read_bytes())
    path = tmp_path / "s"
    done = kimi("generate", "hi", "-m", model, "--session", path, "--quiet", check=3)
    assert "s was made with another model" in sentence(done)
    assert path.read_bytes() == made.read_bytes()


# --- where it is written -------------------------------------------------------------------------


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
def test_links_are_not_followed(run: Run, tmp_path: Path) -> None:
    path, victim = tmp_path / "s", tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "s.tmp").symlink_to(victim)
    run("hi", "-n", 2, "--session", path, "--save-every", 1)
    assert victim.read_bytes() == b"mine" and files(path) == ["s", "s.ids"]
    for name in ("a", "b.ids"):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(SessionError, match="is a symbolic link: name the file itself"):
            run("hi", "--session", tmp_path / name[0])
    os.mkfifo(tmp_path / "c")
    os.mkfifo(tmp_path / "d.ids")
    for name in "cd":
        with pytest.raises(SessionError, match="is not a regular file"):
            run("hi", "--session", tmp_path / name)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        run("hi", "--session", tmp_path / "none" / "s")
    assert victim.read_bytes() == b"mine"


def test_the_mask_of_the_user_is_kept(tmp_path: Path) -> None:
    for mask, mode in ((0o077, 0o600), (0o022, 0o644)):
        path = tmp_path / f"{mask}"
        generate("hi", "-n", 2, "--session", path, "--save-every", 1, umask=mask)
        for file in (path, path.with_name(path.name + ".ids")):
            assert file.stat().st_mode & 0o777 == mode


@pytest.mark.fault("disk: two runs with one session", "the second is refused, exit code 1")
def test_one_process_at_a_time(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Session(path):
        with pytest.raises(KimiError, match="s is in use by another kimi: let it finish"):
            run("hi", "--session", path)
        done = kimi("generate", "hi", "--session", path, "--quiet", check=1)
        assert "in use" in sentence(done)
    assert files(path) == []
    run("hi", "-n", 1, "--session", path)


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.fault(
    "disk: full while a session is kept",
    "said, exit code 1; the old state and every id are kept",
    times=2,
)
def test_a_full_disk_keeps_the_old_state_and_every_id(tmp_path: Path) -> None:
    path = tmp_path / "s"
    wanted = generate("hi", "-n", 9)
    kept = ("--session", path, "--save-every", 2, "--quiet")
    kimi("generate", "hi", "-n", 3, *kept)
    old = path.read_bytes()
    done = kimi("generate", "hi", "-n", 8, *kept, preexec_fn=limited(100_000), check=1)
    assert done.stdout.decode().startswith(wanted["text"][:4])
    said = done.stderr.decode()
    assert "s: the state cannot be saved: File too large; the state saved before is kept" in said
    assert path.read_bytes() == old and files(path) == ["s", "s.ids"]
    found = generate("hi", "-n", 9, "--session", path)
    assert found["stats"]["resumed_tokens"] == 8
    same(found, wanted)
    size = (tmp_path / "s.ids").stat().st_size
    done = kimi("generate", "hi", "-n", 30, *kept, preexec_fn=limited(size + 60), check=1)
    assert "s.ids cannot be written: File too large" in done.stderr.decode()
    assert (tmp_path / "s.ids").stat().st_size == size + 56
    assert len(history_of(path).turns[0].ids) == 11


def test_a_failing_disk_in_any_write(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    run("hi", "-n", 2, "--session", path, "--save-every", 1)
    old = path.read_bytes()
    for number in range(40):
        left = number

        def failing(fd: int, offset: int, data: Any, write: Any = snapshot.write_at) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            write(fd, offset, data)

        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "write_at", failing)
            count = 3 + number
            try:
                run("hi", "-n", count, "--ignore-eos", "--session", path, "--save-every", 999)
            except KimiError as error:
                assert "No space left on device" in str(error)
                assert path.read_bytes() == old and files(path) == ["s", "s.ids"]
            else:
                break
    assert number > 5 and path.read_bytes() != old


# --- interruptions -------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
from kimi_cli.cli import cli
import kimi_cli.answer
rng, path = random.Random(int(sys.argv[1])), sys.argv[2]
for number in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        cli.main(["generate", *sys.argv[4:]], standalone_mode=False)
        os._exit(0)
    time.sleep(rng.uniform(0.0, 0.2 + number / 100))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    size = os.stat(path + ".ids").st_size if os.path.exists(path + ".ids") else 0
    print(size, os.path.exists(path + ".tmp"))
"""


@pytest.mark.fault(
    "disk: kill -9 of a run with a session", "it goes on to the same text, no id is lost", times=50
)
def test_fifty_power_cuts(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    asked = ["hi", "--ignore-eos", "--temperature", "1", "--seed", "3"]
    kept = ["--session", str(path), "--save-every", "3"]
    words = [sys.executable, "-c", KILLED, "7", str(path), "50", *asked, *kept]
    words += ["-n", "5000", "--context", "6000", "--json", "--quiet"]
    done = subprocess.run(words, capture_output=True, timeout=100, env=environment())
    assert done.stderr == b""
    seen = [line.split() for line in done.stdout.decode().splitlines()]
    sizes = [int(size) for size, _ in seen]
    assert len(sizes) == 50
    assert len(set(sizes)) > 3, "the machine is too slow for this test"
    ids = history_of(path).turns[0].ids
    wanted = run(*asked, "-n", len(ids) + 3)
    found = run(*asked, "-n", len(ids) + 3, *kept)
    same(found, wanted)
    assert found["stats"]["resumed_tokens"] == len(ids) > 3
    assert fed.prefill <= 4 and fed[0][0] > len(wanted["prompt_ids"])
    assert files(path) == ["s", "s.ids"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_the_last_token(tmp_path: Path, number: int, code: int) -> None:
    path, ids = tmp_path / "s", tmp_path / "s.ids"
    asked = ["hi", "--ignore-eos", "--session", path, "--save-every", 100_000]
    words = [KIMI, "generate", *asked, "-n", 5000, "--json", "--quiet"]
    process = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    while not ids.exists() or ids.stat().st_size < 900:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (code, b"")
    first = json.loads(out)
    assert first["stop_reason"] == "interrupted"
    assert first["ids"] == history_of(path).turns[0].ids
    saved = read_snapshot(path)  # the token was quick: its end was waited for
    assert saved is not None
    assert saved.position == len(first["prompt_ids"]) + len(first["ids"]) - 1
    count = len(first["ids"])
    same(generate(*asked, "-n", count + 3), generate(*asked[:2], "-n", count + 3))


def test_patience() -> None:
    def interrupt(number: int) -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Patience() as patience:
        patience.check()
        for seconds in (None, 2.5):
            patience.seconds = seconds
            with pytest.raises(KeyboardInterrupt):
                interrupt(signal.SIGINT)
        patience.seconds = 0.1
        for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
            interrupt(number)
            assert patience.held
            with pytest.raises(kind):
                patience.check()
            interrupt(number)
            with pytest.raises(kind):
                interrupt(number)
            assert not patience.held
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Signalled:
    """A session to which a Ctrl-C comes while it is asked whether to save."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def decided(self, token: int, reason: str | None) -> None:
        """Nothing is written down."""

    def boundary(self, state: State, last: bool) -> None:
        self.asked.append(last)
        if len(self.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_at_the_end_of_a_token_waits_for_a_saving_one() -> None:
    """What is raised has been saved: a signal after the question waits for the next token."""
    kept = Signalled()
    with Keeper(cast(Session, kept), State(CONFIG, 8)) as keeper:
        keeper.decided(1, None)
        keeper.decided(2, None)  # at once: a token is quick
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                keeper.boundary(False)
    assert kept.asked == [False, True]


# --- when to save --------------------------------------------------------------------------------

K3 = 521_000_000


@pytest.mark.parametrize(
    ("every", "fed", "elapsed", "size", "cost", "wanted"),
    [
        (4, 3, 1e9, 1, 0, False), (4, 4, 0, K3, 99, True),
        (None, 0, 1e9, 1, 0, False), (None, 60, 520, K3, 0, False), (None, 60, 522, K3, 0, True),
        (None, 60, 522, K3, 5.2, True), (None, 60, 999, K3, 10, False),
        (None, 60, 1001, K3, 10, True),
        (None, 1, 0.2, 300_000, 0, False), (None, 1, 0.4, 300_000, 0, True),
    ],
)  # fmt: skip
def test_due(
    every: int | None, fed: int, elapsed: float, size: int, cost: float, wanted: bool
) -> None:
    assert due(every, fed, elapsed, size, cost) is wanted


@pytest.mark.parametrize(
    ("every", "fed", "elapsed", "size", "cost", "wanted"),
    [
        (4, 0, 1e9, 1, 0, False), (4, 1, 0, K3, 99, True), (None, 1, 20, K3, 0, False),
        (None, 1, 21, K3, 0, True), (None, 9, 21, K3, 6, False), (None, 0, 99, 1, 0, False),
    ],
)  # fmt: skip
def test_worthwhile(
    every: int | None, fed: int, elapsed: float, size: int, cost: float, wanted: bool
) -> None:
    assert worthwhile(every, fed, elapsed, size, cost) is wanted


def test_saving_seldom_by_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = snapshot.write_snapshot
    monkeypatch.setattr(
        session,
        "write_snapshot",
        lambda path, state, *rest: (written.append(state.position), write(path, state, *rest)),
    )
    run("hi", "-n", 40, "--session", tmp_path / "s")
    assert len(written) < 20


# --- kimi session --------------------------------------------------------------------------------


def test_show(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = run("hi", "-n", 3, "--session", path, "--system", "be brief", "--save-every", 2)
    second = run("more", "-n", 2, "--session", path, "--save-every", 2)
    facts = json.loads(kimi("session", path, "--json").stdout)
    assert facts["tokens"] == len(second["prompt_ids"]) + 2
    assert facts["state_position"] == facts["tokens"] - 1
    assert facts["state_bytes"] == path.stat().st_size
    assert abs(facts["saved"] - time.time()) < 600
    assert (facts["chat"], facts["thinking"], facts["system"]) == (True, "off", "be brief")
    assert (facts["finished"], facts["tools"]) == (False, False)
    assert [turn["answer_tokens"] for turn in facts["turns"]] == [3, 2]
    prompts = len(first["prompt_ids"]), len(second["prompt_ids"]) - len(first["prompt_ids"]) - 3
    assert tuple(turn["prompt_tokens"] for turn in facts["turns"]) == prompts
    assert len(facts["model"]) == 64
    text = kimi("session", path).stdout.decode()
    for word in (facts["model"][:16], "'be brief'", "turn 2", "answer 3, not finished", "saved 20"):
        assert word in text
    path.unlink()
    facts = json.loads(kimi("session", path, "--json").stdout)
    assert (facts["state_position"], facts["saved"]) == (0, None)
    assert "none saved" in kimi("session", path).stdout.decode()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (b"nan", "it does not say when it was saved"),
        (b"-inf", "it does not say when it was saved"),
        (b"", "it does not say where it is"),
        (b"1e17", "saved at 100000000000000000 seconds"),
        (b"-1e300", "saved at -1"),
    ],
)
def test_any_time_of_saving_is_shown_or_refused(
    made: Path, tmp_path: Path, saved: bytes, said: str
) -> None:
    whole = made.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    before = json.loads(whole[8:size])["__metadata__"]["saved"].encode()
    head = whole[8:size].replace(b'"%s"' % before, b'"%s"' % saved).rstrip(b" ")
    head = whole[:8] + head + b" " * (size - 8 - len(head))
    start = snapshot.read_snapshot(made).entries["checksums"].offset  # type: ignore[union-attr]
    sums = crc32c(head).to_bytes(4, "little") + whole[start + 4 : -4]
    sums += crc32c(sums).to_bytes(4, "little")
    (tmp_path / "s").write_bytes(head + whole[size:start] + sums)
    done = kimi("session", tmp_path / "s", check=None)
    assert said in (done.stdout + done.stderr).decode()
    assert done.returncode == (0 if said.startswith("saved") else 3)


def test_show_refuses_what_is_bad(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert "is no session" in sentence(kimi("session", path, check=3))
    raw = bytearray(made.read_bytes())
    raw[-3000] ^= 8
    path.write_bytes(raw)
    assert "differ from their checksum" in sentence(kimi("session", path, check=3))
    (tmp_path / "t.ids").write_bytes(b"KIMInonsense")
    assert "is no session" in sentence(kimi("session", tmp_path / "t", check=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "t.ids"]
