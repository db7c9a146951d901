"""Repack: checkpoints and reads it does not trust, places it does not write to: in a sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from repacking import check_same_weights, contents, make, not_whole, rewrite

from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config
from kimi_cli.errors import CheckpointError, Exit, KimiError, ReadError, UsageError
from kimi_cli.repack import repack

# ---- what is refused ----


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("name", "bits", "element", "what"),
    [
        ("layers.0.self_attn.q_proj.weight", 0x7F80, 0, "infinity"),
        ("layers.0.self_attn.q_proj.weight", 0xFF80, 12345, "infinity"),
        ("layers.0.self_attn.q_proj.weight", 0x7FC0, 36863, "NaN"),
        ("layers.1.block_sparse_moe.gate.weight", 0xFFFF, 77, "NaN"),
        ("layers.1.input_layernorm.weight", 0x7F81, 191, "NaN"),
        ("layers.1.self_attn.dt_bias", 0x7F800000, 5, "infinity"),
        ("layers.1.self_attn.A_log", 0xFF800001, 2, "NaN"),
        ("layers.2.self_attn.o_proj.weight", 0x7FFFFFFF, 20000, "NaN"),
        ("embed_tokens.weight", 0x7F80, 699 * 192 + 191, "infinity"),
        ("embed_tokens.weight", 0xFFC1, 5 * 192, "NaN"),
    ],
)
def test_not_finite(
    tmp_path: Path, name: str, bits: int, element: int, what: str, plain: bool
) -> None:
    model = make(tmp_path / "model", f32=("*.layers.2.self_attn.o_proj.weight",))
    name = "language_model.model." + name
    place = Checkpoint.open(model, load_config(model)).tensors[name]
    kind = "<u2" if place.dtype == "BF16" else "<u4"
    path = sorted(model.glob("model*.safetensors"))[place.shard]
    values = np.fromfile(path, np.uint8)[place.offset : place.offset + place.length].view(kind)
    values[element] = bits
    rewrite(model, name, values)
    with pytest.raises(CheckpointError) as caught:
        repack(model, plain=plain)
    offset = place.offset + element * (2 if kind == "<u2" else 4)
    said = f"{path}: {name} has {what} at element {element}, offset {offset}: the file is damaged, "
    assert str(caught.value).startswith(f"{said}run hf download")
    assert caught.value.exit_code == Exit.CHECKPOINT
    not_whole(model, model / "kimi-trunk")
    values[element] = 0x7F7F if kind == "<u2" else 0x7F7FFFFF  # the largest number is finite
    rewrite(model, name, values)
    check_same_weights(model, repack(model, plain=plain))


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    path = model / "model-00002-of-000003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="short"):
        repack(model)
    assert not (model / "kimi-trunk").exists()
    with pytest.raises(CheckpointError, match="is no directory"):
        repack(tmp_path / "none")


def test_a_shard_cut_short_meanwhile(tmp_path: Path) -> None:
    model = make(tmp_path / "model", shards=1)
    path = next(model.glob("model*.safetensors"))

    def report(done: int, total: int) -> None:
        os.truncate(path, 20_000)

    with pytest.raises(ReadError, match=r"ends at byte .*, wanted .* bytes of .* cut short"):
        repack(model, report=report)


def test_short_reads_and_writes_are_repeated(
    small: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:9999]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:9999], at))
    assert contents(repack(small, tmp_path / "out")) == whole


def test_a_read_error(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match=r"model-0000.*: reading .* failed: Input/output error"):
        repack(small, tmp_path / "out")


def test_what_reads_back_otherwise(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def lie(fd: int, data: memoryview, at: int) -> int:
        return pwrite(fd, bytes(data[:-1]) + b"\xa5", at)

    monkeypatch.setattr(os, "pwrite", lie)
    with pytest.raises(ReadError, match=r"000\.safetensors\.tmp reads back otherwise"):
        repack(small, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors.tmp"))


def test_the_models_own_folder(small: Path) -> None:
    for same in (small, small / ".", small / "x" / ".."):
        with pytest.raises(UsageError, match="give the trunk another place with --out"):
            repack(small, same)


def test_out_is_a_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(KimiError, match="cannot be written: Not a directory"):
            repack(small, out)
    assert (tmp_path / "file").read_text() == "mine"
