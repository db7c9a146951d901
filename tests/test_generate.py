"""`kimi generate` as installed: golden numbers, the same bits, the promises of its options."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import (
    KIMI,
    environment,
    generate,
    kimi,
    linked_model,
    own_trunk,
    replace_file,
    sentence,
    smallest_ram,
)

from kimi_cli.builtin import PSALM, ROOT, TINY
from kimi_cli.native import supported_isas
from kimi_cli.repack import repack
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.units import MIB

BOUND = 5e-4
GOLDEN = {"golden": TINY / "config.json", "golden_block12": ROOT / "config_block12.json"}


def golden(name: str) -> dict[str, Any]:
    with np.load(ROOT / f"{name}.npz") as arrays:
        return dict(arrays)


def commas(ids: Any) -> str:
    return ",".join(str(int(i)) for i in ids)


PROMPT = commas(golden("golden")["prompt_ids"])


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden(name: str, tmp_path: Path) -> None:
    data = golden(name)
    model = linked_model(tmp_path / "model")
    replace_file(model / "config.json", GOLDEN[name].read_bytes())
    count = len(data["gen_ids"])
    result = generate(
        "-m", model, "--ids", commas(data["prompt_ids"]), "-n", count, "--ignore-eos",
        "--all-logits", tmp_path / "all.npy", "--logits", tmp_path / "own.npy",
    )  # fmt: skip
    assert result["prompt_ids"] == data["prompt_ids"].tolist()
    assert result["ids"] == data["gen_ids"].tolist()
    prompt, own = np.load(tmp_path / "all.npy"), np.load(tmp_path / "own.npy")
    assert prompt.dtype == own.dtype == np.float32
    assert prompt.shape == data["logits"].shape and len(own) == count
    assert np.abs(prompt - data["logits"]).max() <= BOUND
    assert np.abs(own[1:] - data["gen_logits"]).max() <= BOUND
    assert own[0].tobytes() == prompt[-1].tobytes()
    assert [int(row.argmax()) for row in own] == result["ids"]
    assert result["stop_reason"] == "length"
    assert sorted(os.listdir(tmp_path)) == ["all.npy", "model", "own.npy"]


def test_same_bytes_for_every_option_that_may_not_matter(tmp_path: Path) -> None:
    plain = repack(TINY, tmp_path / "plain", plain=True)
    asked = ("-m", TINY, "--ids", PROMPT, "-n", 6)
    variants: dict[str, tuple[object, ...]] = {
        "default": (),
        "1 thread": ("--threads", 1),
        "2 threads": ("--threads", 2, "--ram", "64G"),
        "chunk 1": ("--prefill-chunk", 1),
        "chunk 7": ("--prefill-chunk", 7, "--threads", 2),
        "chunk 64": ("--prefill-chunk", 64),
        "plain": ("--trunk", plain),
        "160M": ("--ram", "160M", "--context", 4000),
        "smallest": ("--ram", smallest_ram(*asked, "--threads", 1)),
    } | {isa: ("--isa", isa) for isa in supported_isas()}
    found = {}
    for name, options in variants.items():
        own, whole = tmp_path / f"{name}.own.npy", tmp_path / f"{name}.all.npy"
        result = generate(*asked, "--logits", own, "--all-logits", whole, *options)
        found[name] = (result["ids"], own.read_bytes(), whole.read_bytes())
        if name in supported_isas():
            assert result["stats"]["isa"] == name
    assert all(value == found["default"] for value in found.values())


# --- JSON and its figures ------------------------------------------------------------------------


def test_json_has_the_keys_of_the_design() -> None:
    result = generate("hi", "-n", 3, "--ram", "1G", "--threads", 1, "--context", 100)
    assert list(result) == ["prompt_ids", "ids", "text", "stop_reason", "stats"]
    stats = result["stats"]
    assert list(stats) == [
        "peak_rss_bytes", "ram_budget_bytes", "context", "prefill_seconds", "decode_seconds",
        "seconds_per_token", "trunk_bytes_read", "expert_bytes_read", "expert_requests",
        "expert_hits", "resumed_tokens", "threads", "isa",
    ]  # fmt: skip
    assert stats["ram_budget_bytes"] == 1 << 30
    assert (stats["context"], stats["threads"], stats["resumed_tokens"]) == (100, 1, 0)
    assert stats["isa"] == supported_isas()[-1]
    assert stats["seconds_per_token"] == stats["decode_seconds"] / 2
    assert 0 < stats["expert_hits"] < stats["expert_requests"]
    misses = stats["expert_requests"] - stats["expert_hits"]
    assert stats["expert_bytes_read"] % misses == 0
    assert stats["trunk_bytes_read"] == 0
    assert isinstance(result["text"], str)
    thinking = generate("hi", "-n", 1, "--thinking", "low")
    assert list(thinking) == ["prompt_ids", "ids", "text", "reasoning", "stop_reason", "stats"]
    assert thinking["stats"]["seconds_per_token"] is None
    assert thinking["stats"]["context"] == len(thinking["prompt_ids"]) + 1


def watch(*args: object) -> tuple[dict[str, Any], int]:
    """The result, and the peak resident bytes as the kernel had them just before the end."""
    process = subprocess.Popen(
        [KIMI, "generate", *map(str, args), "--json", "--quiet"],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    peak = 0
    while process.poll() is None:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.002)
    assert process.stdout is not None and process.returncode == 0
    with process.stdout as out:
        return json.loads(out.read()), peak


@pytest.mark.parametrize("ram", ["smallest", "160M", "2G"])
def test_ram_is_a_promise(ram: str) -> None:
    asked = ("--ids", PROMPT, "-n", 4, "--context", 3000)
    ram = smallest_ram(*asked) if ram == "smallest" else ram
    result, peak = watch(*asked, "--ram", ram)
    stats = result["stats"]
    assert stats["peak_rss_bytes"] <= stats["ram_budget_bytes"]
    assert peak <= stats["ram_budget_bytes"]
    assert stats["peak_rss_bytes"] == pytest.approx(peak, rel=0.02)


def test_too_small_a_budget_names_one_that_does(tmp_path: Path) -> None:
    for prompt in (("--ids", PROMPT), ("hello there",)):
        asked = (*prompt, "-n", 5)
        needed = int(smallest_ram(*asked).removesuffix("M"))
        result = generate(*asked, "--ram", f"{needed}M")
        assert result["stats"]["peak_rss_bytes"] <= needed * MIB
        if prompt[0] == "--ids":  # known before anything is loaded: the smallest, to 3 MiB
            kimi("generate", *asked, "--ram", f"{needed - 3}M", check=4)


# --- what is generated ---------------------------------------------------------------------------


def test_end_token_stops_and_ignore_eos_goes_on(tmp_path: Path) -> None:
    first = golden("golden")["gen_ids"].tolist()
    end = next(i for i in range(2, 10) if first[i] not in first[:i])
    model = linked_model(tmp_path / "model")
    config = json.loads((TINY / "config.json").read_text())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = first[end]
    replace_file(model / "config.json", json.dumps(config).encode())
    asked = ("-m", model, "--ids", PROMPT, "-n", 12)
    stopped = generate(*asked, "--logits", tmp_path / "l.npy")
    assert stopped["ids"] == first[: end + 1] and stopped["stop_reason"] == "eos"
    assert len(np.load(tmp_path / "l.npy")) == end + 1
    on = generate(*asked, "--ignore-eos")
    assert on["ids"] == first[:12] and on["stop_reason"] == "length"


def test_no_tokens_and_one(tmp_path: Path) -> None:
    own, whole = tmp_path / "own.npy", tmp_path / "all.npy"
    none = generate("--ids", "1,2,3", "-n", 0, "--logits", own, "--all-logits", whole)
    assert (none["ids"], none["text"], none["stop_reason"]) == ([], "", "length")
    assert none["stats"]["seconds_per_token"] is None and none["stats"]["context"] == 3
    assert np.load(own).shape == (0, 2304) and np.load(whole).shape == (3, 2304)
    one = generate("--ids", "1,2,3", "-n", 1, "--logits", own)
    assert len(one["ids"]) == 1 and np.load(own).shape == (1, 2304)
    assert one["ids"] == [int(np.load(whole)[-1].argmax())]


def test_answer_is_cut_at_the_context() -> None:
    result = generate("--ids", "1,2,3", "-n", 50, "--context", 5, "--ignore-eos")
    assert len(result["ids"]) == 2 and result["stop_reason"] == "length"


def test_text_is_what_json_says() -> None:
    done = kimi("generate", "--raw", "hello w\u00f6rld", "-n", 12, "--quiet", "--ignore-eos")
    result = generate("--raw", "hello w\u00f6rld", "-n", 12, "--ignore-eos")
    assert done.stdout.decode() == result["text"] + "\n" and done.stderr == b""
    assert result["prompt_ids"] == Tokenizer.load(PSALM).encode("hello w\u00f6rld")


def test_without_a_tokenizer_ids_are_printed(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m", without=("tiktoken.model", "tokenizer_config.json"))
    result = generate("-m", model, "--ids", PROMPT, "-n", 4)
    assert result["text"] is None and result["ids"] == golden("golden")["gen_ids"][:4].tolist()
    done = kimi("generate", "-m", model, "--ids", PROMPT, "-n", 4, "--quiet")
    assert done.stdout.decode() == commas(result["ids"]) + "\n"
    assert "only --ids" in sentence(kimi("generate", "-m", model, "hi", check=3))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.fault("environment: no HOME, no locale, nothing at all", "the same text")
def test_any_locale(locale: str) -> None:
    text = "\u4e16\u754c caf\u00e9 \U0001f600"
    done = kimi(
        "generate", "--raw", text, "-n", 6, "--json", "--quiet",
        env=environment(LC_ALL=locale, PYTHONUTF8="0"),
    )  # fmt: skip
    assert json.loads(done.stdout)["prompt_ids"] == Tokenizer.load(PSALM).encode(text)


def test_prompt_from_stdin_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\n"
    wanted = Tokenizer.load(PSALM).encode(text)
    piped = generate("--raw", "--prompt-file", "-", "-n", 1, input=text.encode())
    assert piped["prompt_ids"] == wanted
    (tmp_path / "p").write_bytes(text.encode())
    assert generate("--raw", "--prompt-file", tmp_path / "p", "-n", 1) | {"stats": 0} == (
        piped | {"stats": 0}
    )


# --- where the files are -------------------------------------------------------------------------


def test_hugging_face_cache(tmp_path: Path) -> None:
    """snapshots/REV/name -> ../../blobs/SHA, the trunk in another place."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in TINY.iterdir() if p.is_file())):
        shutil.copy(path, blobs / f"sha{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/sha{number}")
    trunk = tmp_path / "trunk"
    kimi("repack", "-m", snapshot, "--out", trunk, "--quiet")
    result = generate("-m", snapshot, "--trunk", trunk, "--ids", PROMPT, "-n", 3)
    assert result["ids"] == golden("golden")["gen_ids"][:3].tolist()
    result = generate(
        "--ids", PROMPT, "-n", 3, env=environment(KIMI_MODEL=str(snapshot), KIMI_TRUNK=str(trunk))
    )
    assert result["ids"] == golden("golden")["gen_ids"][:3].tolist()
    assert not (snapshot / "kimi-trunk").exists()


def test_names_with_spaces_and_other_letters(tmp_path: Path) -> None:
    model = tmp_path / "K\u00fcche und 'B\u00fcro' \u4e16\u754c"
    shutil.copytree(TINY, model)
    logits = model / "l\u00f6gits 1.npy"
    for locale in ("C.UTF-8", "C"):
        result = generate(
            "-m", model, "--ids", PROMPT, "-n", 2, "--logits", logits,
            env=environment(LC_ALL=locale),
        )  # fmt: skip
        assert result["ids"] == golden("golden")["gen_ids"][:2].tolist()
    assert np.load(logits).shape == (2, 768)
    (model / "kimi-trunk" / "trunk.json").unlink()
    text = sentence(kimi("generate", "-m", model, "--ids", "1", check=3))
    assert f"run kimi repack -m '{tmp_path}/K\u00fcche und '" in text


def test_model_directory_is_only_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in model.rglob("*")}
    for path in (*before, model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        result = generate("-m", model, "--ids", PROMPT, "-n", 2, "--ram", "70M")
        assert result["ids"] == golden("golden")["gen_ids"][:2].tolist()
        after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in model.rglob("*")}
        assert after == before
    finally:
        for path in (model, *(p for p in model.rglob("*") if p.is_dir())):
            path.chmod(0o755)


# --- interruptions -------------------------------------------------------------------------------

LONG = ("generate", "--ids", "1,2,3", "-n", "100000", "--ignore-eos", "--quiet")


def scratch_of(path: Path, process: int) -> Path:
    """The unfinished file of a process that writes `path`."""
    return path.with_name(f"{path.name}.{process}.part")


def interrupt(number: int, *args: object, ready: Path | None = None) -> tuple[int, bytes]:
    """Exit code and stdout of a run that gets signal `number` while it generates: once something is
    on stdout, or the unfinished file that will become `ready` has grown."""
    process = subprocess.Popen(
        [KIMI, *LONG, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    begun, seen = time.monotonic(), b""
    if ready is None:
        seen = process.stdout.read(1)
    else:
        part = scratch_of(ready, process.pid)
        while not part.exists() or part.stat().st_size < 60_000:
            assert time.monotonic() - begun < 60 and process.poll() is None
            time.sleep(0.01)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert said.strip() == b""
    return process.returncode, seen + out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_keeps_what_was_generated(number: int, code: int, tmp_path: Path) -> None:
    own, whole = tmp_path / "own.npy", tmp_path / "all.npy"
    files = ("--logits", own, "--all-logits", whole)
    returned, out = interrupt(number, "--json", *files, ready=own)
    assert returned == code
    result = json.loads(out)
    assert result["stop_reason"] == "interrupted" and len(result["ids"]) > 3
    rows = np.load(own)
    assert [int(row.argmax()) for row in rows] == result["ids"]
    assert np.load(whole).shape == (3, 2304)
    assert sorted(os.listdir(tmp_path)) == ["all.npy", "own.npy"]
    returned, out = interrupt(number)
    assert returned == code and len(out) > 1 and out.endswith(b"\n")


def test_interruption_without_a_tokenizer(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m", without=("tiktoken.model", "tokenizer_config.json"))
    own = tmp_path / "own.npy"
    returned, out = interrupt(signal.SIGINT, "-m", model, "--logits", own, ready=own)
    assert returned == 130
    assert out.decode().strip() == commas(row.argmax() for row in np.load(own))


def test_reader_that_goes_away(tmp_path: Path) -> None:
    own = tmp_path / "own.npy"
    command = f'"$0" {" ".join(LONG)} --logits "$1" | head -c 1; echo "${{PIPESTATUS[0]}}" >&2'
    done = subprocess.run(
        ["bash", "-c", command, KIMI, own], capture_output=True, timeout=120, env=environment()
    )
    assert len(done.stdout) == 1 and done.stderr == b"0\n"
    assert len(np.load(own)) > 0 and os.listdir(tmp_path) == ["own.npy"]


def test_full_disk_for_the_answer() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [KIMI, "generate", "--ids", "1", "-n", "3", "--quiet"],
            stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment(),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == b"kimi: standard output cannot be written: No space left on device\n"


@pytest.mark.fault(
    "damage: a flipped bit in a trunk block that is streamed", "said, exit code 1", times=2
)
def test_damaged_block_ends_the_run(tmp_path: Path) -> None:
    """Exit code 1, one sentence; with --json what was generated before is still there."""
    model = linked_model(tmp_path / "m")
    trunk = own_trunk(model)
    path = trunk / "layer-003.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    own = tmp_path / "own.npy"
    for ram in ("8G", smallest_ram("-m", model, "--ids", "1,2")):
        asked = ("-m", model, "--ids", "1,2", "--ram", ram, "--logits", own)
        done = kimi("generate", *asked, "--quiet", check=1)
        text = done.stderr.decode()
        assert re.fullmatch(
            rf"kimi: {re.escape(str(path))}: damaged between bytes \d+ and \d+ \(.*\): checksum "
            r"[0-9a-f]{8}, wanted [0-9a-f]{8}; .*kimi repack\n", text,
        ), text  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_interrupted_prompt_still_gives_its_json() -> None:
    process = subprocess.Popen(
        [KIMI, "generate", "--ids", ",".join(["1"] * 4000), "--prefill-chunk", "1", "-n", "2",
         "--json", "--progress", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if json.loads(line)["event"] in ("prefill", "layer"):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 130
    assert (result["ids"], result["stop_reason"]) == ([], "interrupted")
    assert len(result["prompt_ids"]) == 4000
