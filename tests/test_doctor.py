"""`kimi doctor`: what it measures, what it says, and when it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_cli import cgroup, doctor, gauge, memory, native
from kimi_cli.answer import Settings
from kimi_cli.builtin import TINY
from kimi_cli.cgroup import Allowance
from kimi_cli.errors import Exit, KimiError, UsageError
from kimi_cli.native import Format
from kimi_cli.planning import Target
from kimi_cli.presets import PRESETS, Preset
from kimi_cli.stream import DirectFile
from kimi_cli.units import GIB, MIB

KIMI = Path(sys.executable).parent / "kimi"
SMALL = Target.open(TINY, None)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that only show that they work, in a process as small as the program's own:
    tests before may have left this one with memory."""
    monkeypatch.setattr(gauge, "SECONDS", 0.05)
    monkeypatch.setattr(gauge, "PRODUCT_SECONDS", 0.02)
    monkeypatch.setattr(gauge, "SCRATCH", 64 * MIB)
    monkeypatch.setattr(gauge, "WEIGHTS", 8 * MIB)
    monkeypatch.setattr(memory, "rss", lambda: 48 * MIB)


def kimi(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    return subprocess.run([KIMI, *arguments], capture_output=True, text=True, timeout=120, env=env)


def report(
    capfdbinary: pytest.CaptureFixture[bytes], settings: Settings, directory: Path | None
) -> dict[str, Any]:
    doctor.doctor(settings, directory, as_json=True)
    found: dict[str, Any] = json.loads(capfdbinary.readouterr().out)
    return found


def test_command_measures_a_checkpoint() -> None:
    done = kimi("doctor", "-m", str(TINY))
    assert done.returncode == 0, done.stderr
    assert "measuring" in done.stderr
    for word in ("processors", "memory", "trunk blocks", "expert extents", "packed", "mxfp4"):
        assert word in done.stdout
    for name in PRESETS:
        assert f"\n{name} " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"next: kimi generate 'Why is the sky blue?' -m {TINY}")


def test_command_refuses_no_directory(tmp_path: Path) -> None:
    done = kimi("doctor", str(tmp_path / "none"))
    assert done.returncode == Exit.USAGE and done.stdout == ""


@pytest.mark.usefixtures("brief")
def test_without_a_model_it_speaks_of_the_released_one(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    found = report(capfdbinary, Settings(), tmp_path)
    assert found["runs"] is True and found["reason"] is None
    assert found["memory"]["floor_bytes"] > 700 * MIB
    assert found["disk"]["own_files"] is False and found["disk"]["directory"] == str(tmp_path)
    assert found["disk"]["blocks_bytes_per_second"] > 0
    assert found["disk"]["extents_bytes_per_second"] > 0
    assert [preset["name"] for preset in found["presets"]] == list(PRESETS)
    for preset in found["presets"]:
        assert preset["token_seconds"] > 0 and preset["prefill_seconds"] > 0
        assert {preset["token_limit"], preset["prefill_limit"]} <= {"disk", "compute"}
        assert preset["fits"] is (preset["budget_bytes"] <= found["memory"]["available_bytes"])
    assert found["next"] == f"kimi repack -m {tmp_path}"
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("brief")
def test_text_says_what_the_disk_must_still_take(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    doctor.doctor(Settings(), tmp_path, False)
    text = capfdbinary.readouterr().out.decode()
    assert "the checkpoint and its trunk will take 1.49 TiB of disk" in text
    assert "a temporary file" in text


@pytest.mark.usefixtures("brief")
def test_own_files_are_read_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    opened: list[Path] = []
    init = DirectFile.__init__

    def watch(self: DirectFile, path: Path) -> None:
        opened.append(path)
        init(self, path)

    monkeypatch.setattr(DirectFile, "__init__", watch)
    found = report(capfdbinary, Settings(model=TINY), None)
    assert found["disk"]["own_files"] is True
    names = {path.name for path in opened}
    assert any(name.startswith("layer-") for name in names)
    assert any(name.startswith("model-") for name in names)


@pytest.mark.usefixtures("brief")
def test_too_little_memory_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: Allowance(256 * MIB, 200 * MIB))
    monkeypatch.setattr(gauge, "scratch_file", None)
    with pytest.raises(KimiError) as caught:
        doctor.doctor(Settings(), tmp_path, True)
    assert caught.value.exit_code == Exit.FAILED
    assert "smallest plan needs" in str(caught.value)
    found = json.loads(capfdbinary.readouterr().out)
    assert found["runs"] is False and found["reason"] == str(caught.value)
    assert found["memory"]["limit_bytes"] == 256 * MIB
    with pytest.raises(KimiError):
        doctor.doctor(Settings(), tmp_path, False)
    assert b"control group limit 256 MiB" in capfdbinary.readouterr().out


@pytest.mark.usefixtures("brief")
def test_a_processor_without_vectors_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(native, "supported_isas", lambda: ["scalar"])
    doctor.doctor(Settings(model=TINY), None, False)
    assert b"warning: this processor has neither AVX2 nor NEON" in capfdbinary.readouterr().err
    monkeypatch.undo()
    native.set_isa("auto")


@pytest.mark.usefixtures("brief")
def test_a_file_system_without_direct_reads_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(DirectFile, "_try_direct", lambda self: None)
    monkeypatch.setattr(gauge, "filesystem", lambda path: "slowfs")
    doctor.doctor(Settings(), tmp_path, False)
    shown = capfdbinary.readouterr()
    assert b"through the page cache" in shown.out
    assert f"warning: slowfs at {tmp_path} does not read directly".encode() in shown.err


@pytest.mark.usefixtures("brief")
def test_scratch_file_is_gone_even_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), gauge.scratch_file(tmp_path, GIB) as path:
        assert path.stat().st_size == 64 * MIB
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_scratch_file_respects_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gauge, "_free", lambda directory: 512 * MIB)
    with gauge.scratch_file(tmp_path, 8 * GIB) as path:
        assert path.stat().st_size == 128 * MIB
    monkeypatch.setattr(gauge, "_free", lambda directory: 200 * MIB)
    with pytest.raises(KimiError, match="too little"), gauge.scratch_file(tmp_path, 8 * GIB):
        pass


def test_scratch_file_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="cannot be measured"),
        gauge.scratch_file(tmp_path / "none", GIB),
    ):
        pass


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("sizes", [[1], [5000], [100, 3_000_000], [4096, 40_000_000]])
def test_files_of_any_size_are_read(tmp_path: Path, sizes: list[int]) -> None:
    files = []
    for size in sizes:
        files.append(tmp_path / f"{size}.safetensors")
        files[-1].write_bytes(bytes(size))
    assert gauge.read_blocks(files).rate > 0
    assert gauge.read_extents(files, 17_547_264).rate > 0


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("fmt", list(Format))
def test_products_have_a_rate(fmt: Format) -> None:
    kernel = gauge.trunk_product(SMALL.config, fmt, GIB)
    assert kernel.first > 0 and kernel.further >= 0
    assert gauge.expert_product(SMALL.config, GIB).first > 0


@pytest.mark.parametrize(
    "path, kind",
    [("/", "ext4"), ("/data/x", "xfs"), ("/data set/x", "nfs"), ("/dataset", "ext4"), ("/t", "b")],
)
def test_filesystem(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\nh:/x /data\\040set nfs rw 0 0\n"
        "x /t a rw 0 0\nx /t b rw 0 0\nbroken\n"
    )
    assert gauge.filesystem(Path(path), mounts) == kind
    assert gauge.filesystem(Path(path), tmp_path / "none") == "unknown"


def test_next_command() -> None:
    released, place = Target.open(None, None), Path("/disk")
    presets = [Preset(name, size, None) for name, size in PRESETS.items()]

    def command(target: Target, **settings: Any) -> str:
        return doctor.next_command(Settings(**settings), target, place, presets, 20 * GIB)

    assert command(released) == "kimi repack -m /disk"
    assert command(released, model=Path("a b")) == "kimi repack -m 'a b'"
    assert command(SMALL, model=TINY, trunk=Path("/t"), context=9).endswith(
        f"-m {TINY} --trunk /t --preset 16g --context 9"
    )
    assert memory.available() > 0
