"""`kimi session`: what it shows of a session, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command import kimi, sentence
from sessions import Run

from kimi_cli import snapshot
from kimi_cli.native import crc32c

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
