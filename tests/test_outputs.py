"""Outputs that would replace something of value are refused before anything is read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_cli.builtin import TINY
from kimi_cli.errors import UsageError
from kimi_cli.outputs import check_outputs

KIMI = Path(sys.executable).parent / "kimi"


def test_what_is_allowed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    old = tmp_path / "old.npy"
    old.write_bytes(b"old")
    outputs = {"--logits": old, "--trace": model / "new.jsonl", "--all-logits": None}
    check_outputs(outputs, {"--messages": tmp_path / "m.json"}, [model, None])


@pytest.mark.parametrize("link", [False, True])
def test_checkpoint_files_are_never_replaced(tmp_path: Path, link: bool) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    (tmp_path / "blob").write_text("{}")
    (model / "config.json").symlink_to(tmp_path / "blob")
    (model / "logits.npy").write_text("of an earlier run")
    other.symlink_to(model)
    directory = other if link else model
    with pytest.raises(UsageError, match="the checkpoint's files are never replaced"):
        check_outputs({"--logits": directory / "config.json"}, {}, [model])
    check_outputs({"--logits": directory / "logits.npy"}, {}, [model])


def test_prompts_and_other_outputs_are_never_replaced(tmp_path: Path) -> None:
    prompt, out = tmp_path / "p.txt", tmp_path / "out"
    prompt.write_text("hello")
    with pytest.raises(UsageError, match="--logits and --prompt-file both name"):
        check_outputs({"--logits": prompt}, {"--prompt-file": prompt}, [])
    with pytest.raises(UsageError, match="--trace and --logits both name"):
        check_outputs({"--logits": out, "--trace": tmp_path / "." / "out"}, {}, [])


def test_through_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    shard = next(model.glob("*.safetensors"))
    for option in ("--logits", "--all-logits", "--trace", "--trace-time"):
        run = [KIMI, "generate", "-m", model, "--ids", "1", "-n", "1", option, shard]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 2
        assert option in done.stderr and "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


def test_a_file_of_the_same_name_as_the_unfinished_one_is_left_alone(tmp_path: Path) -> None:
    bystander = tmp_path / "x.npy.part"
    bystander.write_text("mine")
    run = [KIMI, "generate", "--ids", "1", "-n", "1", "--quiet", "--logits", tmp_path / "x.npy"]
    subprocess.run(run, check=True, capture_output=True)
    assert bystander.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.npy.part"]
