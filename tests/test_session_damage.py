"""Sessions cut, flipped, forged or of another model: refused, and the way out is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from command import kimi, linked_model, replace_file, sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import Run, checked, files, same

from kimi_cli import journal
from kimi_cli.builtin import PSALM
from kimi_cli.conversation import check_tools
from kimi_cli.errors import Exit, SessionError
from kimi_cli.turns import Head, Turn

# --- damage --------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(SessionError) as caught:
        checked(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    assert caught.value.exit_code == Exit.CHECKPOINT
    return text


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
