"""A checkpoint made to do harm, in the hands of the commands: one sentence, or no notice taken."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import kimi, sentence
from running import make_model

from kimi_cli.errors import Exit
from kimi_cli.header import read_header
from kimi_cli.tensors import expert_prefix

NAME = "model-00002-of-000002.safetensors"
SCALE = f"{expert_prefix(2, 0)}w2.weight_scale"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose trunk is of the same weights."""
    model = tmp_path_factory.mktemp("hostile") / "model"
    make_model(model, 3, num_hidden_layers=3, num_experts=2, num_experts_per_token=2)
    return model


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    text = change(raw[8:size])
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[size:])


def claim_much(model: Path) -> None:
    path = model / NAME
    path.write_bytes((10**18).to_bytes(8, "little") + path.read_bytes()[8:])


def share_bytes(model: Path) -> None:
    def change(text: bytes) -> bytes:
        entries = json.loads(text)
        same = [name for name in entries if name.endswith("w1.weight_packed")][:2]
        entries[same[1]]["data_offsets"] = entries[same[0]]["data_offsets"]
        return json.dumps(entries).encode()

    edit_header(model / NAME, change)


def lose_expert(model: Path) -> None:
    old = expert_prefix(2, 1).encode()
    edit_header(model / NAME, lambda text: text.replace(old, b"vision_tower." + b"." * len(old)))
    index = model / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes().replace(old, b"vision_tower." + b"." * len(old)))


def dangle(model: Path) -> None:
    (model / NAME).unlink()
    (model / NAME).symlink_to("../blobs/gone")


def pipe(model: Path) -> None:
    (model / NAME).unlink()
    os.mkfifo(model / NAME)


def spoil(model: Path) -> None:
    path = model / NAME
    entry = read_header(path)["language_model.model.norm.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xc0\x7f")


CASES = {
    "a header of 10^18 bytes": (claim_much, f"{NAME} claims a header of 1,000,000,000,000,000,000"),
    "two tensors share bytes": (share_bytes, f"{NAME}: .* overlaps the tensor before it"),
    "no expert": (lose_expert, "absent: layer 2 expert 1"),
    "a link to nothing": (dangle, rf"{NAME} is a symbolic link to \.\./blobs/gone, which does not"),
    "a pipe": (pipe, f"{NAME} is not a regular file"),
    "NaN": (
        spoil,
        rf"{NAME}: language_model\.model\.norm\.weight has NaN at element 0, offset \d+",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_repack_refuses(model: Path, tmp_path: Path, case: str) -> None:
    harm, said = CASES[case]
    harm(model)
    done = kimi("repack", "-m", model, "--out", tmp_path / "trunk", check=Exit.CHECKPOINT)
    text = sentence(done)
    assert re.search(said, text), text
    assert not (tmp_path / "trunk" / "trunk.json").exists()


@pytest.mark.parametrize("case", [case for case in CASES if case != "NaN"])
def test_what_generate_refuses(model: Path, case: str) -> None:
    """Its trunk, which has the norm too, was made when all was well."""
    CASES[case][0](model)
    done = kimi("generate", "-m", model, "--ids", "1,2", "-n", 2, "--quiet", check=Exit.CHECKPOINT)
    assert NAME in sentence(done)


def test_a_scale_of_255_gives_no_text(model: Path) -> None:
    """It is met by the first token, which needs every expert of the two."""
    path = model / NAME
    entry = read_header(path)[SCALE]
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff" * entry.length)
    done = kimi("generate", "-m", model, "--ids", "1,2", "-n", 2, "--quiet", check=Exit.CHECKPOINT)
    said = done.stderr.decode()
    assert f"{NAME}: {SCALE}: scale byte 255 (NaN) at offset {entry.offset}" in said
    assert not done.stdout.strip()


def test_code_beside_the_weights_is_never_run(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["auto_map"] and config["text_config"]["auto_map"]
    spell = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    names = ("configuration_kimi_k3", "modeling_kimi_k3", "modeling_kimi_linear", "conftest")
    for name in (*names, "tokenization_kimi", "numpy", "tiktoken", "sitecustomize", "__init__"):
        (model / f"{name}.py").write_text(spell)
    (model / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    (model / "chat_template.jinja").write_text("{{ cycler.__init__.__globals__ }}")
    done = kimi("generate", "-m", model, "--ids", "1,2", "-n", 2, "--quiet", cwd=model)
    assert done.stderr == b""
    kimi("verify", "-m", model, cwd=model)
    kimi("repack", "-m", model, "--out", tmp_path / "trunk", cwd=model)
    assert not (tmp_path / "ran").exists()
