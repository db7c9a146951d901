"""Repack where room on the disk, permissions or memory are short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from repacking import check_same_weights, child, contents, make, not_whole

from kimi_cli.errors import KimiError, UsageError
from kimi_cli.repack import repack

NOBODY = 65534

# ---- room, permissions, memory ----


@pytest.mark.fault("disk: no room for a trunk", "said before anything is written, exit code 1")
def test_no_room(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs = os.statvfs(tmp_path)
    values = list(statvfs)
    values[4] = (1 << 20) // statvfs.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    with pytest.raises(KimiError) as caught:
        repack(small, tmp_path / "deep" / "out")
    assert caught.value.exit_code == 1
    assert f"{tmp_path}: the trunk needs up to 1" in str(caught.value)
    assert "MiB, 1.00 MiB are free: make room for" in str(caught.value)
    assert not (tmp_path / "deep").exists()


def test_room_counts_what_is_kept_and_what_goes(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = repack(small, tmp_path / "out")
    (out / "layer-001.safetensors").unlink()
    statvfs = os.statvfs(tmp_path)
    values = list(statvfs)
    values[4] = (18 << 20) // statvfs.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    repack(small, out)
    repack(small, out, plain=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 18 MiB, where this machine lets one be mounted."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here; test_disk_full_at_any_write stands in")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.fault(
    "disk: a small file system that fills during a repack",
    "said, exit code 1, nothing half-published; the rerun completes to the same bytes",
)
def test_a_disk_that_fills(small: Path, whole: dict[str, bytes], small_disk: Path) -> None:
    out = small_disk / "out"
    ballast = small_disk / "ballast"

    def report(done: int, total: int) -> None:
        if done > total // 2 and not ballast.exists():
            with ballast.open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(b"\0" * (1 << 16))
                    file.flush()

    with pytest.raises(KimiError, match="cannot be written: No space left on device; make room"):
        repack(small, out, report=report)
    not_whole(small, out)
    with pytest.raises(KimiError, match="the trunk needs up to"):
        repack(small, out)
    ballast.unlink()
    assert contents(repack(small, out)) == whole


@pytest.fixture
def read_only(small: Path) -> Iterator[Path]:
    """The checkpoint where whoever runs this may not write."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        shutil.copytree(small, model, ignore=shutil.ignore_patterns("kimi-trunk"))
        os.chmod(name, 0o755)
        os.chmod(model, 0o555)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
            try:
                yield model
            finally:
                os.seteuid(0)
        else:
            yield model
        os.chmod(model, 0o755)


@pytest.mark.fault("disk: a directory or file that may not be written", "said, exit code 1 or 2")
def test_read_only_model(read_only: Path) -> None:
    with pytest.raises(UsageError) as caught:
        repack(read_only)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{read_only}/kimi-trunk cannot be written (Permission denied): "
        f"choose a place with kimi repack -m {read_only} --out DIR"
    )
    with tempfile.TemporaryDirectory() as other:
        check_same_weights(read_only, repack(read_only, Path(other) / "out"))
    with pytest.raises(KimiError, match="out cannot be written: Permission denied") as failed:
        repack(read_only, read_only / "out")
    assert failed.value.exit_code == 1


def test_read_only_but_complete(small: Path, tmp_path: Path) -> None:
    out = repack(small, tmp_path / "out")
    os.chmod(out, 0o555)
    (out / "repack.lock").unlink()
    assert repack(small, out) == out
    assert not (out / "repack.lock").exists()
    os.chmod(out, 0o755)


MEASURE = """
import os, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
from kimi_cli.repack import repack
repack(Path(sys.argv[1]), Path(sys.argv[2]), plain=sys.argv[3] == "plain")
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.parametrize("encoding", ["packed", "plain"])
def test_memory_does_not_grow_with_the_layer(tmp_path: Path, encoding: str) -> None:
    shapes = {"num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 12288}
    model = make(tmp_path / "model", shards=1, shapes=shapes, f32=("*up_proj*",))
    out = tmp_path / "out"
    done = child(MEASURE, model, out, encoding)
    assert done.returncode == 0, done.stderr
    size = (out / "layer-000.safetensors").stat().st_size
    assert size > 300e6
    assert int(done.stdout) * 1024 < 250e6
    assert json.loads((out / "trunk.json").read_text())["encoding"] == encoding
