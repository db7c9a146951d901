"""Repack: every bit kept, in either encoding; what is whole is kept, what is broken made anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repacking import check_same_weights, contents, make, not_whole, opened, rewrite

from kimi_cli import layout, packing
from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config
from kimi_cli.errors import TrunkError
from kimi_cli.native import Format
from kimi_cli.repack import repack
from kimi_cli.synth import BUILTIN

# ---- every bit kept ----


@pytest.mark.parametrize("plain", [False, True])
def test_the_built_in_checkpoint(tmp_path: Path, plain: bool) -> None:
    trunk = check_same_weights(BUILTIN, repack(BUILTIN, tmp_path / "out", plain=plain))
    assert trunk.encoding == ("plain" if plain else "packed")
    formats = {m.format for unit in trunk.units for m in unit.matrices}
    assert (Format.PACKED in formats) is not plain
    assert any(m.blocks for unit in trunk.units for m in unit.matrices)


VARIANTS: dict[str, dict[str, Any]] = {
    "official": {},
    "scattered": {"scatter_trunk": True, "scatter_experts": True},
    "older": {"conv_2d": True, "a_log_4d": True},
    "f32": {"f32": ("*.o_proj.weight", "*layernorm.weight", "*lm_head*", "*kv_b_proj*")},
    "all f32": {"f32": ("*",)},
    "bf16": {"bf16": ("*A_log", "*dt_bias", "*conv1d*", "*o_norm*", "*bias")},
    "odd": {"shapes": {"hidden_size": 200, "intermediate_size": 333}},
    "dense": {"shapes": {"first_k_dense_replace": 3}},
    "one layer, one shard": {"shapes": {"num_hidden_layers": 1}, "shards": 1},
    "wide": {"shapes": {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 5000}},
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_survive(tmp_path: Path, variant: str, plain: bool) -> None:
    model = make(tmp_path / "model", **VARIANTS[variant])
    out = repack(model, plain=plain)
    assert out == model / "kimi-trunk"
    trunk = check_same_weights(model, out)
    if variant == "wide":
        assert max(len(m.blocks) for unit in trunk.units for m in unit.matrices) > 1


@pytest.mark.parametrize("plain", [False, True])
def test_weights_survive_in_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setattr(layout, "BLOCK", 1 << 12)
    monkeypatch.setattr(layout, "INLINE", 1 << 12)
    monkeypatch.setattr(packing, "BLOCK", 1 << 12)
    model = make(tmp_path / "model", f32=("*.k_proj.weight",))
    trunk = check_same_weights(model, repack(model, plain=plain))
    assert max(len(m.blocks) for unit in trunk.units for m in unit.matrices) > 5
    assert max(len(unit.head) for unit in trunk.units) > 1


@pytest.mark.parametrize("over", [0, 1])
def test_escapes_up_to_half_a_percent(tmp_path: Path, over: int) -> None:
    model = make(tmp_path / "model")
    rng = np.random.default_rng(1)
    name, size = "language_model.lm_head.weight", 700 * 192
    words = ((0x30 + np.arange(size) % 16) << 8 | np.arange(size) % 251).astype("<u2")
    few = rng.permutation(size)[: size // 200 + over]
    words[few] = 0xB000 | rng.integers(0, 1 << 11, len(few))
    words[few[0]] = 0x8000
    rewrite(model, name, words)
    trunk = check_same_weights(model, repack(model))
    (matrix,) = trunk.units[-1].matrices
    assert matrix.format == (Format.BF16 if over else Format.PACKED)
    assert matrix.escape_count == (0 if over else size // 200)


def test_one_value_only(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    rewrite(model, "language_model.lm_head.weight", np.zeros(700 * 192, "<u2"))
    check_same_weights(model, repack(model))


def test_table() -> None:
    counts = np.zeros(256, np.int64)
    counts[[7, 3, 250]] = 5, 5, 9
    table, escapes = packing._table(counts)
    assert (list(table), escapes) == ([250, 3, 7] + [250] * 13, 0)
    counts[100:120] = 1
    table, escapes = packing._table(counts)
    assert (list(table), escapes) == ([250, 3, 7, *range(100, 113)], 7)


# ---- progress, completeness, encodings ----


def test_report(small: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    out = repack(small, tmp_path / "out", report=lambda *call: calls.append(call))
    places = Checkpoint.open(small, load_config(small)).tensors
    total = sum(place.length for place in places.values())
    assert calls[-1] == (total, total) and {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(done) and len(done) > 50
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    calls.clear()
    assert repack(small, out, report=lambda *call: calls.append(call)) == out
    assert calls == [(total, total)]
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_changing_the_encoding_starts_over(
    small: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = repack(small, tmp_path / "out", plain=True)
    plain = contents(out)
    assert opened(small, out).encoding == "plain"
    (out / "mine.txt").write_text("kept")
    (out / "layer-099.safetensors").write_text("of a larger model")
    assert contents(repack(small, out)) == {**whole, "mine.txt": b"kept"}
    assert contents(repack(small, out, plain=True)) == {**plain, "mine.txt": b"kept"}


def test_another_checkpoint_starts_over(
    small: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = repack(make(tmp_path / "other", seed=2), tmp_path / "out")
    with pytest.raises(TrunkError, match="made from another checkpoint"):
        opened(small, out)
    assert contents(repack(small, out)) == whole


@pytest.mark.parametrize("damage", ["header", "rows", "short", "absent", "tables", "manifest"])
def test_repair_rewrites_only_what_is_broken(
    small: Path, whole: dict[str, bytes], tmp_path: Path, damage: str
) -> None:
    out = repack(small, tmp_path / "out")
    path = out / "layer-001.safetensors"
    with path.open("r+b") as file:
        file.seek(0 if damage == "header" else -1, os.SEEK_END if damage != "header" else 0)
        if damage in ("header", "rows"):
            file.write(b"\xa5")
    if damage == "short":
        os.truncate(path, 5000)
    elif damage == "absent":
        path.unlink()
    elif damage == "tables":
        (out / "tables.safetensors").write_bytes(b"")
    elif damage == "manifest":
        (out / "trunk.json").write_bytes(b"{")
    elif damage == "rows":  # met by whoever reads them; the file is then deleted
        (out / "tables.safetensors").unlink()
    not_whole(small, out)
    before = (out / "layer-002.safetensors").stat().st_mtime_ns
    assert contents(repack(small, out)) == whole
    kept = (out / "layer-002.safetensors").stat().st_mtime_ns == before
    assert kept is (damage != "manifest")


def test_a_repair_does_not_vouch_for_the_embedding(tmp_path: Path) -> None:
    """A row damaged since the first repack is still told from what it was."""
    model = make(tmp_path / "model")
    out = repack(model)
    before = contents(out)
    place = opened(model, out).embedding
    shard = opened(model, out).shards[place.shard]
    middle = place.offset + place.length // 2
    with shard.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    (out / "layer-001.safetensors").unlink()
    assert contents(repack(model)) == before
