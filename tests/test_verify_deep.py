"""`kimi verify --deep`: the experts and the table of their checksums, however it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from verifying import SHARD, files, flip, kimi, looked, opened, place

from kimi_cli import deep
from kimi_cli.checkpoint import EDGE
from kimi_cli.config import load_config
from kimi_cli.errors import KimiError, ReadError
from kimi_cli.expertsums import PARTIAL, SUMS, load_expert_sums
from kimi_cli.native import crc32c
from kimi_cli.stream import DirectFile
from kimi_cli.tensors import EXPERT_PARTS, expert_prefix
from kimi_cli.verify import verify

# ---- experts ----


def independent_sums(model: Path) -> np.ndarray:
    """The table, by way of the reference library."""
    config = load_config(model)
    tensors = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                if ".experts." in name:
                    tensors[name] = file.get_tensor(name).tobytes()
    sums = np.zeros((config.num_hidden_layers, config.num_experts), np.uint32)
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for expert in range(config.num_experts):
            prefix = expert_prefix(layer, expert)
            sums[layer, expert] = crc32c(b"".join(tensors[prefix + p] for p in EXPERT_PARTS))
    return sums


@pytest.mark.parametrize("name", ["model", "scattered"])
def test_deep_writes_the_table(
    name: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(name)
    result = looked(capfd, model, deep=True)
    assert result["ok"] and result["experts_read"] == result["experts"]
    assert np.array_equal(load_expert_sums(opened(model)), independent_sums(model))
    assert not (model / "kimi-trunk" / PARTIAL).exists()
    written = (model / "kimi-trunk" / SUMS).read_bytes()
    result = looked(capfd, model, deep=True)  # a comparison
    assert result["ok"] and result["experts_read"] == result["experts"]
    assert (model / "kimi-trunk" / SUMS).read_bytes() == written
    run = kimi("generate", "-m", model, "--ids", "1,2,3", "-n", "3", "--ignore-eos")
    assert run.returncode == 0


@pytest.mark.parametrize("name", ["model", "scattered"])
@pytest.mark.fault(
    "damage: a flipped bit in an expert, after verify --deep",
    "said where it is met, exit code 1; verify --deep finds it",
)
def test_a_flipped_bit_in_an_expert_is_met(
    name: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(name)
    words = ["generate", "-m", model, "--ids", "1,2,3", "-n", "3", "--ignore-eos"]
    assert kimi("verify", "-m", model, "--deep").returncode == 0
    good = kimi(*words).stdout
    config = load_config(model)
    places = []
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for expert in range(config.num_experts):
            path, offset, length = place(model, expert_prefix(layer, expert) + "w2.weight_packed")
            middle, size = offset + length // 2, path.stat().st_size
            start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            if start + EDGE <= middle < size - EDGE:  # where no fingerprint sees it
                flip(path, middle, 3)
                places.append((path, middle))
    assert len(places) > config.num_experts  # enough for one to be chosen
    assert kimi("verify", "-m", model).returncode == 0  # it reads no expert, and says so
    run = kimi(*words)
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("kimi: ")
    assert "block_sparse_moe.experts." in run.stderr and "offset" in run.stderr
    assert "hf download moonshotai/Kimi-K3 model-0" in run.stderr
    result = looked(capfd, model, deep=True)
    assert len(result["findings"]) == len(places)
    for finding in result["findings"]:
        assert finding["file"].startswith("model-0") and "checksum" in finding["what"]
    assert kimi("verify", "-m", model, "--deep").returncode == 5
    for path, offset in places:
        flip(path, offset, 3)
    result = looked(capfd, model, deep=True)
    assert result["ok"]
    assert kimi(*words).stdout == good


def test_only_what_was_bad_or_has_changed_is_read_again(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, offset, _ = place(model, expert_prefix(3, 1) + "w3.weight_scale")
    old = path.read_bytes()
    flip_to_255(path, offset + 2)
    stamp = path.stat()
    result = looked(capfd, model, deep=True)
    assert len(result["findings"]) == 1 and result["experts_read"] == 144
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    result = looked(capfd, model, deep=True)
    assert len(result["findings"]) == 1 and result["experts_read"] == 1
    path.write_bytes(old)
    there = int((opened(model).experts.shard[:, :, 0] == sorted(
        p.name for p in model.glob("model-*")).index(path.name)).sum())  # fmt: skip
    result = looked(capfd, model, deep=True)
    assert result["ok"] and result["experts_read"] == there < 144
    assert np.array_equal(load_expert_sums(opened(model)), independent_sums(model))


def flip_to_255(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")


@pytest.mark.parametrize("name", ["model", "scattered"])
def test_scale_bytes_of_255_are_named(
    name: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(name)
    wanted = []
    for part, at in (("w1.weight_scale", 0), ("w3.weight_scale", -1)):
        tensor = expert_prefix(4, 5) + part
        path, offset, length = place(model, tensor)
        flip_to_255(path, offset + at % length)
        wanted.append(
            (path.name, f"{tensor}: scale byte 255 (NaN) at offset {offset + at % length}")
        )
    result = looked(capfd, model, deep=True)
    assert [(f["file"], f["what"]) for f in result["findings"]] == wanted
    assert load_expert_sums(opened(model)) is None
    assert kimi("verify", "-m", model, "--deep").returncode == 5


def test_a_damaged_table_is_a_finding(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert looked(capfd, model, deep=True)["ok"]
    path = model / "kimi-trunk" / SUMS
    flip(path, 100)
    for deeply in (False, True):
        result = looked(capfd, model, deep=deeply)
        assert files(result) == [SUMS] and "delete it" in result["findings"][0]["fix"]
    assert kimi("generate", "-m", model, "--ids", "1", "-n", "1").returncode == 3
    path.unlink()
    assert looked(capfd, model, deep=True)["ok"]


def test_deep_does_not_begin_on_a_bad_checkpoint(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / SHARD).unlink()
    result = looked(capfd, model, deep=True)
    assert files(result) == [SHARD] and any("not read" in note for note in result["notes"])


def test_a_failing_read_is_a_finding_and_not_the_end(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, offset, _ = place(model, expert_prefix(1, 0) + EXPERT_PARTS[2])
    trunk = opened(model)
    block = trunk.units[2].blocks[1]
    real = DirectFile.read

    def read(self: DirectFile, at: int, length: int, buffer: memoryview) -> int:
        if (self.path, at) in (
            (path, offset),
            (trunk.directory / trunk.units[2].file, block.offset),
        ):
            raise ReadError(f"{self.path}: reading {length} bytes at {at} failed: bad sector")
        return real(self, at, length, buffer)

    monkeypatch.setattr(DirectFile, "read", read)
    result = looked(capfd, model, deep=True)
    assert files(result) == [trunk.units[2].file, path.name]
    assert all("bad sector" in finding["what"] for finding in result["findings"])
    assert result["experts_read"] == 144


# ---- interrupted, refused ----

INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from kimi_cli import console, deep, sweep
from kimi_cli.stream import DirectFile
from kimi_cli.verify import verify

deep.SAVE_SECONDS = 0
sweep.IN_FLIGHT = 2
count, real = 0, DirectFile.read
def read(self, offset, length, buffer):
    global count
    if self.path.name.startswith("model-"):
        count += 1
        if count == 300:
            os.kill(os.getpid(), int(sys.argv[2]))
            signal.pause() if int(sys.argv[2]) == 9 else None
    return real(self, offset, length, buffer)
DirectFile.read = read
sys.exit(console.run(lambda: verify(Path(sys.argv[1]), deep=True)))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
@pytest.mark.fault("disk: verify --deep interrupted or killed", "it goes on where it was")
def test_an_interrupted_reading_goes_on(
    model: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    script = [sys.executable, "-c", INTERRUPTED, str(model), str(int(number))]
    run = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert run.returncode == code, run.stderr
    trunk = model / "kimi-trunk"
    assert (trunk / PARTIAL).exists() and not (trunk / SUMS).exists()
    if number != signal.SIGKILL:
        assert run.stderr.startswith("interrupted: ") and run.stderr.count("\n") == 1
    result = looked(capfd, model, deep=True)
    assert result["ok"] and 0 < result["experts_read"] < 144 - 20
    assert np.array_equal(load_expert_sums(opened(model)), independent_sums(model))
    assert not (trunk / PARTIAL).exists()


def test_an_interruption_tells_what_was_found(model: Path) -> None:
    """Layer 1's experts lie first: a bad one among them is told at once, not lost."""
    first = place(model, expert_prefix(1, 0) + "w1.weight_scale")
    flip_to_255(first[0], first[1])
    script = [sys.executable, "-c", INTERRUPTED, str(model), str(int(signal.SIGINT))]
    run = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert run.returncode == 130 and "scale byte 255" in run.stdout


def test_a_trunk_that_cannot_be_written(model: Path) -> None:
    """A directory in the file's place refuses even the superuser."""
    (model / "kimi-trunk" / f"{PARTIAL}.tmp").mkdir()
    run = kimi("verify", "-m", model, "--deep")
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert "cannot be written" in run.stderr and "kimi-trunk" in run.stderr
    assert "ok   trunk" in run.stdout and "experts " not in run.stdout.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_trunk(model: Path) -> None:
    trunk = model / "kimi-trunk"
    trunk.chmod(0o555)
    try:
        run = kimi("verify", "-m", model, "--deep")
    finally:
        trunk.chmod(0o755)
    assert run.returncode == 1 and "cannot be written" in run.stderr
    assert not (trunk / PARTIAL).exists()


def test_one_deep_verification_at_a_time(model: Path) -> None:
    with (
        deep._locked(model / "kimi-trunk"),
        pytest.raises(KimiError, match="another kimi verify"),
    ):
        verify(model, deep=True)
