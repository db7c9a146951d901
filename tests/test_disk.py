"""A disk that is full, fails or is pulled out: nothing half-published, and a rerun completes."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from command import KIMI, environment, kimi, linked_model, own_trunk
from shim import faulty, spread
from streamed import Streamed

from kimi_cli.builtin import TINY

Record = Callable[[str, object], None]
WRITING = ("write", "sync", "rename", "truncate")


def contents(directory: Path) -> dict[str, bytes]:
    """The files there, but for locks."""
    paths = (path for path in directory.iterdir() if path.suffix != ".lock")
    return {path.name: path.read_bytes() for path in paths}


# ---- full ----


class Writer(NamedTuple):
    """A command that writes into `{}`; `volatile` files differ from run to run."""

    words: tuple[object, ...]
    volatile: tuple[str, ...] = ()
    typed: str = ""


IDS = ("generate", "--ids", "1,2", "-n", 2, "--quiet")
WRITERS = {
    "repack": Writer(("repack", "-m", TINY, "--out", "{}", "--quiet")),
    "a session": Writer(
        (*IDS[:-2], 5, "--quiet", "--session", "{}/s", "--save-every", 2), ("s", "s.ids")
    ),
    "JSONL": Writer(
        ("generate", "--prompts", "{}/../p.jsonl", "--out", "{}/o.jsonl", "--quiet"), ("o.jsonl",)
    ),
    "logits": Writer((*IDS, "--logits", "{}/l.npy")),
    "the prompt's logits": Writer((*IDS, "--all-logits", "{}/l.npy")),
    "a routing trace": Writer((*IDS, "--trace", "{}/t.jsonl")),
    "a timing trace": Writer((*IDS, "--trace-time", "{}/t.json"), ("t.json",)),
    "a conversation": Writer(("chat", "-n", 2, "--quiet"), (), "hi\n/save {}/c.json\n"),
    "checksums": Writer(
        ("verify", "--deep", "-m", TINY, "--trunk", "{}"), ("expert-checksums.partial.bin",)
    ),
}


@pytest.mark.fault(
    "disk: full at any write, sync or rename of a repack, session, JSONL, logits, traces, a saved "
    "conversation, a table of checksums",
    "said, exit code 1, nothing half-published; the rerun completes to the same bytes",
)
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(name: str, tmp_path: Path, long: bool, record_property: Record) -> None:
    writer, out, fired = WRITERS[name], tmp_path / "out", tmp_path / "fired"
    lines = [{"ids": [1, 2], "max_tokens": 2}, {"ids": [3], "max_tokens": 2}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [str(word).replace("{}", str(out)) for word in writer.words]
    options = {"input": writer.typed.replace("{}", str(out)).encode()}

    def fresh() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if name == "checksums":
            shutil.copytree(TINY / "kimi-trunk", out)
        else:
            out.mkdir()

    fresh()
    rules = "; ".join(f"{call} {out} 1+ none" for call in WRITING)
    good, calls = faulty(fired, rules, *words, **options)
    whole = contents(out)
    tried = 0
    for call in WRITING if long else WRITING[:1]:
        for number in spread(sum(called == call for called, _ in calls), 5 if long else 1):
            fresh()
            rules = f"{call} {out} {number} ENOSPC"
            done, hit = faulty(fired, rules, *words, check=None, **options)
            said = done.stderr.decode()
            assert len(hit) == 1
            if done.returncode == 0:  # a state of a session that a later one has replaced
                assert name == "a session" and done.stdout == good.stdout and said == ""
            else:
                assert done.returncode == 1 and said.count("\n") == 1, (call, number, said)
                assert "No space left on device" in said and str(out) in said, said
                assert name == "checksums" or good.stdout.startswith(done.stdout.rstrip())
                assert b"checksums written" not in done.stdout
            assert not [*out.glob("*.part"), *out.glob("*.tmp")], (call, number)
            done = kimi(*words, **options)
            assert done.stdout == good.stdout or name == "checksums"
            found = contents(out)
            assert found.keys() == whole.keys()
            for file in whole.keys() - set(writer.volatile):
                assert found[file] == whole[file], (call, number, file)
            tried += 1
    record_property("tried", tried)


# ---- pulled out ----


@pytest.mark.fault(
    "disk: kill -9 at any point of a repack", "the rerun gives byte-identical files, no other"
)
def test_killed_anywhere(tmp_path: Path, long: bool, record_property: Record) -> None:
    fired, dice = tmp_path / "fired", random.Random(3)
    calls = ("open", "write", "sync", "rename", "unlink")

    def run(out: Path, rules: str, check: int) -> list[tuple[str, str]]:
        words = ("repack", "-m", TINY, "--out", out, "--quiet")
        return faulty(fired, rules, *words, check=check)[1]

    count = "; ".join(f"{call} {tmp_path}/ 1+ none" for call in calls)
    made = [call for call, _ in run(tmp_path / "whole", count, 0)]
    assert len(made) > 200
    whole = contents(tmp_path / "whole")
    chosen = dice.sample(range(len(made)), 100 if long else 5)
    for at in chosen:
        call, out = made[at], tmp_path / f"at {at}"
        number = made[: at + 1].count(call)
        run(out, f"{call} {tmp_path}/ {number} kill", -signal.SIGKILL)
        assert not (out / "trunk.json").exists() or contents(out) == whole
        kimi("repack", "-m", TINY, "--out", out, "--quiet")
        assert contents(out) == whole, (at, call)
        shutil.rmtree(out)
    record_property("tried", len(chosen))


# ---- shared ----


def started(*words: object) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    argv = [str(KIMI), *map(str, words)]
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, bufsize=0, env=environment())


@pytest.mark.fault(
    "disk: two repacks to one directory at once",
    "one is refused with exit code 1, or finds it done",
)
def test_two_repacks_at_once(tmp_path: Path) -> None:
    out = tmp_path / "t"
    both = [started("repack", "-m", TINY, "--out", out, "--quiet") for _ in range(2)]
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1]), said
    if codes == [0, 1]:
        assert f"kimi: {out}: another kimi repack is writing there: let it finish\n" in said
    whole, found = contents(TINY / "kimi-trunk"), contents(out)
    assert {name: found[name] for name in whole} == whole


@pytest.mark.fault("disk: a repack while generate reads the trunk", "the same text, or a refusal")
def test_a_repack_while_generate_reads(streamed: Streamed, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    for path in streamed.model.iterdir():
        if path.is_file():
            (model / path.name).symlink_to(path)
    shutil.copytree(streamed.model / "kimi-trunk", model / "kimi-trunk")
    words = ("generate", "-m", model, *streamed.words[3:], "-n", 60)
    good = kimi(*words).stdout
    reading = started(*words)
    assert reading.stdout is not None
    first = reading.stdout.read(1)
    kimi("repack", "-m", model, "--plain", "--quiet")  # other files, by the same names
    assert reading.poll() is None, "the machine is too slow for this test"
    out, said = reading.communicate(timeout=60)
    assert (reading.returncode, said, first + out) == (0, b"", good)
    starting = started(*words)
    kimi("repack", "-m", model, "--quiet")
    out, said = starting.communicate(timeout=60)
    if starting.returncode:
        assert starting.returncode in (1, 3) and said.startswith(b"kimi: ") and not out.strip()
    else:
        assert out == good
    assert kimi(*words).stdout == good


# ---- forbidden ----


@pytest.mark.fault("disk: a directory or file that may not be written", "said, exit code 1 or 2")
@pytest.mark.parametrize(
    ("words", "code", "path"),
    [
        (("repack", "-m", "{}/m", "--out", "{}/t", "--quiet"), 1, "t/repack.lock"),
        (("repack", "-m", "{}/m", "--quiet"), 2, "m/kimi-trunk/repack.lock"),
        ((*IDS, "--session", "{}/s"), 2, "s.ids"),
        ((*IDS, "--logits", "{}/l.npy"), 1, "l.npy"),
        ((*IDS, "--trace", "{}/t.jsonl"), 1, "t.jsonl"),
        ((*IDS, "--trace-time", "{}/t.json"), 1, "t.json"),
        (("generate", "--prompts", "{}/p", "--out", "{}/o.jsonl", "--quiet"), 2, "o.jsonl"),
        (("verify", "--deep", "-m", "{}/m"), 1, "m/kimi-trunk/verify.lock"),
    ],
)
def test_what_may_not_be_written(
    tmp_path: Path, words: tuple[object, ...], code: int, path: str
) -> None:
    model = linked_model(tmp_path / "m")
    own_trunk(model)
    if "repack" in words:
        (model / "kimi-trunk" / "trunk.json").unlink()
    (tmp_path / "p").write_text('{"ids": [1], "max_tokens": 1}\n')
    asked = [str(word).replace("{}", str(tmp_path)) for word in words]
    done, hit = faulty(tmp_path / "fired", f"open {path} 1+ EACCES", *asked, check=code)
    said = done.stderr.decode()
    assert hit and said.startswith("kimi: ") and said.count("\n") == 1
    assert "cannot be written" in said and str(tmp_path) in said and "Permission denied" in said


@pytest.mark.fault("disk: a file that may not be read", "said, exit code 2 or 3")
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("config.json", 3), ("tiktoken.model", 3), ("trunk.json", 3), ("tables.safetensors", 3),
        ("layer-003.safetensors", 3), ("model-00004", 3), ("prompt.txt", 2),
    ],
)  # fmt: skip
def test_what_may_not_be_read(tmp_path: Path, path: str, code: int) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hi")
    words = ("generate", "--prompt-file", prompt, "-n", 1, "--quiet")
    done, _ = faulty(tmp_path / "fired", f"open {path} 1+ EACCES", *words, check=code)
    said = done.stderr.decode()
    assert done.stdout == b"" and said.count("\n") == 1
    assert path in said and "Permission denied" in said
