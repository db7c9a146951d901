"""What tests of `kimi verify` share: models to damage, and what it says. A plugin of pytest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_cli import synth
from kimi_cli.config import load_config
from kimi_cli.errors import Exit, VerifyError
from kimi_cli.expertsums import PARTIAL, SUMS
from kimi_cli.header import read_header
from kimi_cli.repack import repack
from kimi_cli.trunk import Trunk
from kimi_cli.verify import verify

KIMI = Path(sys.executable).parent / "kimi"
SHARD = "model-00002-of-000007.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in checkpoint and its trunk, to damage."""
    copy = Path(shutil.copytree(synth.BUILTIN, tmp_path / "the modèle"))
    for name in (SUMS, PARTIAL):
        (copy / "kimi-trunk" / name).unlink(missing_ok=True)
    return copy


@pytest.fixture(scope="module")
def scattered_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scattered") / "model"
    config = synth.make_config(num_hidden_layers=5, num_experts=9)
    synth.write_checkpoint(path, config, seed=3, scatter_experts=True)
    repack(path)
    return path


@pytest.fixture
def scattered(scattered_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scattered_model, tmp_path / "scattered"))


def kimi(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("KIMI_MODEL", "KIMI_TRUNK")}
    command = [str(KIMI), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def looked(
    capfd: pytest.CaptureFixture[str], model: Path, trunk: Path | None = None, **options: Any
) -> dict[str, Any]:
    """What `--json` prints, held against how the call ended."""
    capfd.readouterr()
    try:
        verify(model, trunk, as_json=True, **options)
        failed = False
    except VerifyError as error:
        assert error.exit_code == Exit.VERIFY and "\n" not in str(error)
        failed = True
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert result["ok"] is not failed
    assert failed == bool(result["findings"])
    for finding in result["findings"]:
        assert finding.keys() == {"file", "what", "fix"} and all(finding.values())
        assert str(model) in finding["fix"]
    return result


def files(result: dict[str, Any]) -> list[str]:
    return [Path(finding["file"]).name for finding in result["findings"]]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def place(model: Path, name: str) -> tuple[Path, int, int]:
    """Shard, offset and length of a tensor, as the reference library's format has it."""
    for path in sorted(model.glob("*.safetensors")):
        entry = read_header(path).get(name)
        if entry is not None:
            return path, entry.offset, entry.length
    raise AssertionError(name)


def opened(model: Path) -> Trunk:
    return Trunk.open(model / "kimi-trunk", model, load_config(model))
