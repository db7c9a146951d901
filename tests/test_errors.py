"""Errors that no other test meets: their text and their exit code, a row of a table each."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import linked_model, own_trunk, replace_file

from kimi_cli import console, engine, gauge, ledger, manifest, native, selftest
from kimi_cli.builtin import TINY
from kimi_cli.cli import cli
from kimi_cli.config import load_config
from kimi_cli.errors import KimiError, SessionError, TokenizerError, TrunkError, UsageError
from kimi_cli.layout import unit_tensors
from kimi_cli.ledger import Ledger
from kimi_cli.manifest import MANIFEST, read_manifest
from kimi_cli.native import crc32c
from kimi_cli.packing import Packer
from kimi_cli.repack import repack
from kimi_cli.session import join
from kimi_cli.snapshot import check_state, read_snapshot
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.trunk import Trunk, open_unit

Ended = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ended(capfd: pytest.CaptureFixture[str]) -> Iterator[Ended]:
    """The command in this process: its exit code, stdout, and the last line it says."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = console.run(lambda: cli.main([str(w) for w in words], standalone_mode=False))
        out, said = capfd.readouterr()
        assert "Traceback" not in said
        return int(code), out, (said.splitlines() or [""])[-1].removeprefix("kimi: ")

    yield run
    signal.signal(signal.SIGTERM, before)


# ---- the command line ----

USAGE = [
    (("generate", "hi", "--save-every", 2), "--save-every says how often a session is saved: give"),
    (("generate", "--prompts", "x"), "--prompts and --out go together: give both"),
    (("verify", "--deep"), "--deep writes checksums beside a trunk: name the model with -m DIR"),
    (("bench", "kernels", "--plot", "x.svg"), "--plot draws what decode measures: add decode to"),
    (("bench", "kernels", "--trace-time", "x"), "--trace-time shows what stream measures: add"),
    (
        ("bench", "stream", "--slice", "small", "--work-dir", "none"),
        "give a directory with --work-",
    ),
    (("replay", "empty"), "empty: an empty trace: write one with kimi generate --trace"),
    (("replay", "odd", "--slots", "4,1" + "0" * 11), "--slots wants numbers with commas between"),
    (("replay", "odd"), "odd: line 1: not a line of a trace: want position, layer and experts"),
    (("generate", "--messages", "call.json"), ".tool_calls[0].type wants 'function', found 'x'"),
]


@pytest.mark.parametrize(("words", "text"), USAGE)
def test_usage(
    ended: Ended,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("odd").write_text("{}\n")
    call = {"type": "x", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    Path("call.json").write_text(json.dumps([*said, said[0]]))
    code, out, line = ended(*words)
    assert (code, out) == (2, "") and text in line, line


def test_a_slice_in_memory(ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "filesystem", lambda path: "tmpfs")
    code, out, line = ended("bench", "stream", "--slice", "small", "--work-dir", tmp_path)
    assert (code, out) == (2, "")
    assert line == f"{tmp_path} is in memory (tmpfs): give a directory on disk with --work-dir"


def test_other_terms_for_a_session(ended: Ended, tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert ended("generate", "hi", "-n", 1, "--session", path, "--quiet")[0] == 0
    for words in (("generate", "more", "--thinking", "high"), ("chat", "--system", "x")):
        code, out, line = ended(*words, "--session", path, "--quiet")
        assert (code, out) == (2, "") and line.startswith(f"{path}: ")
        assert line.endswith("; give another --session to begin anew")


def test_no_tokenizer(ended: Ended, tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m", without=("tiktoken.model", "tokenizer_config.json"))
    code, out, line = ended("chat", "-m", model)
    assert (code, out) == (3, "")
    assert line == "the checkpoint has no tiktoken.model: kimi chat needs it"
    (tmp_path / "p").write_text('{"ids": [1], "stop": ["x"]}\n')
    code, _, line = ended(
        "generate", "-m", model, "--prompts", tmp_path / "p", "--out", tmp_path / "o"
    )
    assert code == 1 and line.startswith("1 of 1 prompts could not be answered")
    text = "the checkpoint has no tiktoken.model: stop cannot be used"
    assert json.loads((tmp_path / "o").read_text())["error"] == text


def test_threads_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"^0 threads are not possible: 1 to ") as caught:
        native.set_threads(0)
    assert caught.value.exit_code == 2


# ---- memory and disk ----


def test_a_program_that_has_needed_more(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "peak_rss", lambda: 1 << 40)
    code, out, line = ended("generate", "--ids", "1", "--ram", "4G")
    assert (code, out) == (4, "")
    assert line == "the program has needed 1048577 MiB already: use --ram 1048577M or more"


def test_no_room_to_measure_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "_free", lambda directory: 1 << 20)
    with (
        pytest.raises(
            KimiError, match=r"has 1\.00 MiB free: too little to measure its speed"
        ) as caught,
        gauge.scratch_file(tmp_path, 1 << 30),
    ):
        pass
    assert caught.value.exit_code == 1


def test_results_that_cannot_be_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(old: Path, new: Path) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "o.jsonl"
    with Ledger(path) as results:
        results.add(2, "b", True, {})
        results.add(1, "a", True, {})
        before = path.read_bytes()
        monkeypatch.setattr(ledger, "rename", full)
        with pytest.raises(KimiError) as caught:
            results.sort()
    assert str(caught.value) == (
        f"{path} has every result, but cannot be put in order: No space left on device"
    )
    assert caught.value.exit_code == 1 and path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["o.jsonl"]


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lines: [], "is empty: wanted one token and its rank a line, found none"),
        (lambda lines: [b"AA==\n", *lines[1:]], "line 1 is malformed: wanted a base64 token"),
        (lambda lines: [*lines, b"/////w== 0\n"], "repeats rank 0: wanted every rank once"),
        (lambda lines: lines[:-1], "wants ids from 511 to 766, which follow the ranks of tiktoken"),
    ],
)  # fmt: skip
def test_tokenizers(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], text: str
) -> None:
    lines = (TINY / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(change(lines)))
    shutil.copy(TINY / "tokenizer_config.json", tmp_path)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert text in str(caught.value) and str(caught.value).startswith(str(tmp_path))
    assert caught.value.exit_code == 3


def test_an_index_and_a_header(ended: Ended, tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    replace_file(model / "model.safetensors.index.json", b'{"weight_map": {"' + b"x" * (3 << 20))
    code, _, line = ended("repack", "-m", model, "--out", tmp_path / "t", "--quiet")
    assert code == 3 and "holding a name of more than a million bytes" in line
    shard = model / "model-00007-of-000007.safetensors"
    raw = shard.read_bytes()
    odd = raw.replace(b'{"format":"pt"}', b'["format","pt"]')
    assert odd != raw
    replace_file(shard, odd)
    code, _, line = ended("repack", "-m", model, "--out", tmp_path / "t", "--quiet")
    assert (
        code == 3 and f"{shard.name}: __metadata__ is " in line and "wanted texts by name" in line
    )


def test_a_checkpoint_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Packer._pack

    def more(self: Packer, *args: Any) -> Any:
        counts, escapes = real(self, *args)
        return counts, np.append(escapes, np.uint32(0))

    monkeypatch.setattr(Packer, "_pack", more)
    with pytest.raises(KimiError, match=r"safetensors: the checkpoint changed while it was read"):
        repack(TINY, tmp_path / "t")
    assert not (tmp_path / "t" / "trunk.json").exists()


def test_an_expert_that_differs_from_its_checksum(ended: Ended, tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    own_trunk(model)
    assert ended("verify", "--deep", "-m", model)[0] == 0
    sums = model / "kimi-trunk" / "expert-checksums.bin"
    raw = bytearray(sums.read_bytes())
    for at in range(52 + 4, len(raw) - 4, 4):
        raw[at] ^= 1
    raw[-4:] = crc32c(bytes(raw[:-4])).to_bytes(4, "little")
    sums.write_bytes(raw)
    code, out, line = ended("generate", "-m", model, "--ids", "1,2", "-n", 2, "--quiet")
    assert code == 1 and not out.strip()
    assert (
        "experts." in line and " has checksum " in line and ": the file is damaged, run hf " in line
    )
    sums.write_bytes(raw[:-1])
    code, out, line = ended("generate", "-m", model, "--ids", "1,2", "-n", 2, "--quiet")
    assert (code, out) == (3, "")
    assert line.startswith(f"{sums} is damaged") and ": delete it, then run kimi verify" in line


# ---- trunks ----


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("fingerprint", [], "damaged: [] where a fingerprint belongs"),
        ("fingerprint", {"shards": [{}]}, "where a shard's fingerprint belongs"),
        ("embedding", [], "damaged: [] where the embedding's place belongs"),
        ("embedding", {"dtype": "U8"}, "where the embedding's place belongs"),
    ],
)
def test_manifests(ended: Ended, tmp_path: Path, key: str, value: object, text: str) -> None:
    model = linked_model(tmp_path / "m")
    path = own_trunk(model) / MANIFEST
    data = json.loads(path.read_text())
    merged = key == "embedding" and isinstance(value, dict)
    data[key] = {**data[key], **value} if merged else value  # type: ignore[dict-item]
    facts = {name: data[name] for name in manifest._FACTS}
    path.write_text(json.dumps({**data, "crc32c": crc32c(manifest._compact(facts))}))
    code, out, line = ended("generate", "-m", model, "--ids", "1")
    assert (code, out) == (3, "") and line.startswith(f"{path} is damaged: ") and text in line


def test_trunk_files(ended: Ended, tmp_path: Path) -> None:
    config = load_config(TINY)
    trunk = Trunk.open(TINY / "kimi-trunk", TINY, config)
    listed = read_manifest(trunk.directory / MANIFEST).files[0]
    path = trunk.directory / listed.name
    with pytest.raises(TrunkError, match=r": its first block is \[0, 0, 0\], wanted a header$"):
        open_unit(path, (), replace(listed, blocks=[]), config)
    raw = path.read_bytes()
    length = listed.blocks[0][1]
    other = raw[:length].replace(b".escapes", b".escapez") + raw[length:]
    copy = tmp_path / listed.name
    copy.write_bytes(other)
    blocks = [[0, length, crc32c(other[:length])], *listed.blocks[1:]]
    tensors = unit_tensors(config)[0][1]
    with pytest.raises(
        TrunkError, match=r"does not fit the config: .*\.escapes is absent$"
    ) as caught:
        open_unit(copy, tensors, replace(listed, blocks=blocks), config)
    assert caught.value.exit_code == 3
    (tmp_path / "file").touch()
    code, out, line = ended("generate", "--trunk", tmp_path / "file", "--ids", "1")
    assert (code, out) == (3, "")
    assert f"{tmp_path}/file is not a directory, wanted a repacked trunk" in line


# ---- sessions ----


@pytest.fixture
def session(ended: Ended, tmp_path: Path) -> Path:
    path = tmp_path / "s"
    words = ("generate", "hi", "-n", 3, "--session", path, "--save-every", 1, "--quiet")
    assert ended(*words)[0] == 0
    return path


def test_snapshots_that_change_while_they_are_read(session: Path, tmp_path: Path) -> None:
    snapshot = read_snapshot(session)
    assert snapshot is not None
    whole = session.read_bytes()
    session.write_bytes(whole[:-1])
    with pytest.raises(SessionError, match=r"/s has changed since it was opened$") as caught:
        check_state(snapshot)
    assert caught.value.exit_code == 3
    session.unlink()
    with pytest.raises(SessionError, match=r"/s has gone since it was opened$"):
        check_state(snapshot)
    session.write_bytes(whole)
    table = snapshot.entries["checksums"]
    entries = {**snapshot.entries, "checksums": table._replace(offset=len(whole) + 8)}
    with pytest.raises(SessionError, match=r"/s has become shorter while it was read$"):
        check_state(replace(snapshot, entries=entries))


def test_a_snapshot_whose_journal_is_none(session: Path) -> None:
    snapshot = read_snapshot(session)
    assert snapshot is not None
    with pytest.raises(
        SessionError, match=r"/s: its journal is not a session's list of ids$"
    ) as caught:
        join(session, replace(snapshot, journal=b"none"), b"")
    assert caught.value.exit_code == 3


def test_reading_a_session_fails(session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SessionError, match=r"/s: reading \d+ bytes at \d+ failed: Input/output"):
        read_snapshot(session)


# ---- the self-test ----


def test_a_selftest_that_fails(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    check = selftest.Check("x", False, "y")
    monkeypatch.setattr(selftest, "_checks", lambda isas: iter([check]))
    code, out, line = ended("selftest")
    assert (code, out.split()) == (5, ["FAIL", "x", "y"])
    assert line == "1 checks failed: do not trust this build on this CPU"
