"""Where a trunk's bytes lie, and every way in which a trunk's folder can be wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from math import lcm, prod
from pathlib import Path

import numpy as np
import pytest
from decoded import raw_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli import layout
from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import Config, load_config
from kimi_cli.errors import CheckpointError, TrunkError
from kimi_cli.layout import Stored, lay_out, may_pack, unit_tensors
from kimi_cli.manifest import MANIFEST, PARTIAL, read_manifest, write_manifest
from kimi_cli.native import Format, crc32c, row_bytes
from kimi_cli.repack import repack
from kimi_cli.synth import BUILTIN, make_config, write_checkpoint
from kimi_cli.tables import Tables, write_tables
from kimi_cli.trunk import Trunk, Unit, plan_units

TINY = load_config(BUILTIN)
RELEASED = replace(
    TINY,
    hidden_size=7168,
    num_hidden_layers=93,
    vocab_size=163840,
    intermediate_size=33792,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    mla_layers=frozenset([*range(3, 92, 4), 92]),
    num_experts=896,
    num_experts_per_token=16,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the built-in checkpoint, with its trunk."""
    model = tmp_path_factory.mktemp("made") / "model"
    shutil.copytree(BUILTIN, model, ignore=shutil.ignore_patterns("kimi-trunk"))
    return model, repack(model)


@pytest.fixture
def copied(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same, to be damaged."""
    model = tmp_path / "model"
    shutil.copytree(made[0], model)
    return model, model / "kimi-trunk"


def open_trunk(pair: tuple[Path, Path], config: Config = TINY) -> Trunk:
    return Trunk.open(pair[1], pair[0], config)


def refusal(pair: tuple[Path, Path], config: Config = TINY) -> str:
    with pytest.raises(TrunkError) as caught:
        open_trunk(pair, config)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert f"run kimi repack -m {pair[0]}" in text and "\n" not in text
    return text


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << offset % 8]))


# ---- layout ----


def check_unit(unit: Unit, header: bytes, stored: list[Stored], config: Config) -> None:
    """What layout.py promises, from its description."""
    assert len(header) == unit.header.length and unit.header.offset == 0
    assert unit.size % 4096 == 0 and unit.header.length % 4096 == 0
    end = 0
    for block in unit.blocks:
        assert block.offset == end and block.length > 0
        end += block.length
    assert end == unit.size
    assert unit.head_offset == unit.header.length
    assert sum(b.length for b in unit.head) == unit.head_length and unit.head_length % 4096 == 0
    assert all(b.length <= layout.BLOCK + 4096 for b in unit.head)
    assert [v.name for v in unit.vectors] + [m.name for m in unit.matrices] == [
        s.tensor.name for s in stored
    ]
    inside = range(unit.head_offset, unit.head_offset + unit.head_length)
    for vector in unit.vectors:
        assert vector.offset % 64 == 0 and vector.offset in inside
        assert vector.length == prod(vector.shape) * (2 if vector.format == Format.BF16 else 4)
    assert unit.widened_floats == sum(prod(v.shape) for v in unit.vectors)
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    for matrix in unit.matrices:
        stride = row_bytes(matrix.format, matrix.cols)
        if matrix.format == Format.PACKED:
            assert matrix.table % 64 == 0 and matrix.starts % 64 == 0
            assert matrix.escapes == matrix.starts + 4 * (matrix.rows + 1)
            assert matrix.table in inside
            assert matrix.escapes + 4 * matrix.escape_count - 1 in inside
        else:
            assert (matrix.table, matrix.starts, matrix.escapes) == (-1, -1, -1)
        if matrix.rows * stride <= 64 << 10:
            assert matrix.blocks == () and matrix.inline % 64 == 0 and matrix.inline in inside
            continue
        assert matrix.inline == -1 and matrix.blocks[0].block.offset % 4096 == 0
        unit_rows = lcm(128, head_rows) if ".kv_b_proj." in matrix.name else 128
        row = 0
        for piece in matrix.blocks:
            last = piece is matrix.blocks[-1]
            assert piece.row == row and piece.rows > 0
            assert piece.block.offset == matrix.offset + row * stride
            assert last or piece.rows % unit_rows == 0
            assert piece.rows <= unit_rows or piece.rows * stride <= layout.BLOCK
            assert last or (piece.rows + unit_rows) * stride > layout.BLOCK
            if ".kv_b_proj." in matrix.name:
                assert piece.rows % head_rows == 0
            spare = piece.block.length - piece.rows * stride
            assert 0 <= spare < 4096 if last else spare == 0
            row += piece.rows
        assert row == matrix.rows


@st.composite
def configs(draw: st.DrawFn) -> Config:
    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    layers = number(1, 3)
    return replace(
        TINY,
        hidden_size=draw(st.sampled_from([64, 96, 128, 200, 512, 1000])),
        num_hidden_layers=layers,
        vocab_size=number(100, 3000),
        intermediate_size=number(1, 2000),
        first_k_dense_replace=number(0, layers),
        num_attention_heads=number(1, 24),
        q_lora_rank=number(1, 200),
        kv_lora_rank=draw(st.sampled_from([32, 64, 100, 512])),
        qk_nope_head_dim=number(1, 40),
        qk_rope_head_dim=number(1, 20),
        v_head_dim=number(1, 40),
        kda_num_heads=number(1, 8),
        kda_head_dim=number(1, 64),
        mla_layers=frozenset(draw(st.sets(st.integers(0, layers - 1)))),
        num_experts=number(1, 300),
    )


@given(configs(), st.booleans(), st.sampled_from([64 << 10, 4 << 20]), st.randoms())
@settings(deadline=None, max_examples=60)
def test_blocks_tile_whatever_the_shapes(
    config: Config, packed: bool, block: int, rng: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK", block)
        for file, tensors in unit_tensors(config):
            stored = []
            for tensor in tensors:
                fmt = rng.choice([Format.BF16, Format.F32])
                escapes = 0
                if packed and may_pack(tensor, fmt):
                    fmt, escapes = Format.PACKED, rng.randint(0, tensor.size // 200)
                stored.append(Stored(tensor, fmt, rng.choice(tensor.shapes), escapes))
            unit, header = lay_out(file, stored, config)
            assert unit.file == file
            check_unit(unit, header, stored, config)


@pytest.mark.parametrize("packed", [True, False])
def test_plan_of_the_released_model(packed: bool) -> None:
    units = plan_units(RELEASED, packed)
    assert [unit.file for unit in units[:2]] == ["layer-000.safetensors", "layer-001.safetensors"]
    assert units[-1].file == "head.safetensors" and len(units) == 94
    for unit in units:
        assert all(block.crc == 0 for block in unit.blocks)
        assert all(not m.escape_count for m in unit.matrices)
        assert {m.format for m in unit.matrices} == {Format.PACKED if packed else Format.BF16}
    stored = sum(unit.size for unit in units)
    weights = sum(m.rows * m.cols for unit in units for m in unit.matrices)
    assert stored == pytest.approx(weights * (1.5 if packed else 2), rel=2e-3)
    assert 108.7e9 < sum(unit.size for unit in plan_units(RELEASED, False)[:-1]) < 109e9
    blocks = [b for u in units for m in u.matrices for b in m.blocks]
    assert max(b.block.length for b in blocks) == 128 * 33792 * (3 if packed else 4) // 2
    (kv_b,) = (m for m in units[3].matrices if m.name.endswith("kv_b_proj.weight"))
    assert {b.rows % 256 for b in kv_b.blocks} == {0}
    assert units[1].widened_floats == plan_units(RELEASED, not packed)[1].widened_floats


def test_a_plan_is_the_file(made: tuple[Path, Path]) -> None:
    """But for escapes, which no plan can know."""
    trunk = open_trunk(made)
    for unit, planned in zip(trunk.units, plan_units(TINY, True), strict=True):
        assert unit.widened_floats == planned.widened_floats
        assert [v.shape for v in unit.vectors] == [v.shape for v in planned.vectors]
        assert [m.name for m in unit.matrices] == [m.name for m in planned.matrices]
        assert unit.size == (made[1] / unit.file).stat().st_size


@pytest.mark.parametrize(
    ("shape", "fmt", "packs"),
    [
        ((64, 64), Format.BF16, True),
        ((63, 64), Format.BF16, False),
        ((64, 64), Format.F32, False),
        ((64, 96), Format.BF16, False),
        ((1, 65536), Format.BF16, True),
        ((1, 65600), Format.BF16, False),
    ],
)
def test_what_may_be_packed(shape: tuple[int, int], fmt: Format, packs: bool) -> None:
    assert may_pack(layout.Tensor("x", (shape,), "matrix"), fmt) is packs
    assert not may_pack(layout.Tensor("x", (shape,), "vector"), fmt)


# ---- opening ----


def test_open(made: tuple[Path, Path]) -> None:
    model, out = made
    trunk, checkpoint = open_trunk(made), Checkpoint.open(model, TINY)
    assert (trunk.directory, trunk.encoding) == (out, "packed")
    assert trunk.shards == checkpoint.shards
    assert trunk.embedding == checkpoint.tensors["language_model.model.embed_tokens.weight"]
    for name in ("shard", "offset", "whole"):
        got, wanted = getattr(trunk.experts, name), getattr(checkpoint.experts, name)
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    assert trunk.experts.sizes == checkpoint.experts.sizes
    place = trunk.embedding
    table = trunk.shards[place.shard].read_bytes()[place.offset :][: place.length]
    rows = [table[at : at + 256] for at in range(0, len(table), 256)]
    assert trunk.embedding_sums.dtype == np.uint32
    assert trunk.embedding_sums.tolist() == [crc32c(row) for row in rows] and len(rows) == 768
    for unit in trunk.units:
        data = (out / unit.file).read_bytes()
        for block in unit.blocks:
            assert crc32c(data[block.offset : block.offset + block.length]) == block.crc
        tensors = raw_tensors(out / unit.file)
        for vector in unit.vectors:
            raw = data[vector.offset : vector.offset + vector.length]
            assert tensors[vector.name][1:] == (vector.shape, raw)
        for m in unit.matrices:
            if m.format == Format.PACKED:
                starts = data[m.starts : m.escapes + 4 * m.escape_count]
                assert tensors[m.name + ".escapes"][2] == starts
                assert tensors[m.name + ".table"][2] == data[m.table : m.table + 16]
            name = m.name + (".packed" if m.format == Format.PACKED else "")
            size = m.rows * row_bytes(m.format, m.cols)
            assert tensors[name][2] == data[m.offset : m.offset + size]


def test_no_header_of_the_checkpoint_is_parsed(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimi_cli.header.read_header", None)
    monkeypatch.setattr("kimi_cli.survey.survey", None)
    assert len(open_trunk(made).units) == 14


def test_missing_folder(made: tuple[Path, Path], tmp_path: Path) -> None:
    text = refusal((made[0], tmp_path / "no where"))
    assert "no where does not exist" in text
    assert text.endswith(f"run kimi repack -m {made[0]} --out '{tmp_path}/no where'")
    (tmp_path / "file").write_text("")
    assert "is not a directory, wanted a repacked trunk" in refusal((made[0], tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "holds no trunk.json" in refusal((made[0], tmp_path / "empty"))


def test_interrupted(copied: tuple[Path, Path]) -> None:
    manifest = read_manifest(copied[1] / MANIFEST)
    (copied[1] / MANIFEST).unlink()
    write_manifest(copied[1] / PARTIAL, replace(manifest, files=manifest.files[:3]))
    assert "unfinished, 3 of 14 files: repack was interrupted" in refusal(copied)
    (copied[1] / PARTIAL).write_text("{")
    assert "unfinished, 0 of 14 files" in refusal(copied)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("version", 2, "of version 2, wanted 1"),
        ("version", True, "of version true, wanted 1"),
        ("version", None, "of version null, wanted 1"),
        ("encoding", "zip", 'of encoding "zip", wanted packed or plain'),
        ("encoding", ["packed"], "wanted packed or plain"),
        ("format", "gguf", "not a trunk's manifest"),
        ("embedding", {}, "damaged"),
        ("tables", {"size": 1}, "damaged: tables is not a size and a checksum"),
        ("fingerprint", {"shards": []}, "damaged: its checksum differs"),
        ("files", {}, "damaged: an object of 0 keys where a list belongs"),
        ("files", [], "lists 0 files, wanted layer-000.safetensors to head.safetensors, 14 in all"),
        ("files", [{}], "damaged"),
        ("files", [{"name": "../x", "size": 1, "blocks": []}], "where a file's name belongs"),
        ("files", [{"name": "x", "size": -1, "blocks": []}], "damaged: -1 where a size"),
        ("files", [{"name": "x", "size": 1, "blocks": [[0, 1]]}], "where a block belongs"),
        ("files", [{"name": "x", "size": 1, "blocks": [[0, 1, 1e9]]}], "damaged"),
        ("files", [{"name": "x", "size": 1 << 70, "blocks": []}], "damaged"),
        ("more", 1, "damaged: keys"),
    ],
)
def test_manifest_of_another_kind(
    copied: tuple[Path, Path], key: str, value: object, said: str
) -> None:
    path = copied[1] / MANIFEST
    data = json.loads(path.read_text())
    data[key] = value
    path.write_text(json.dumps(data))
    text = refusal(copied)
    assert str(path) in text and said in text


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"{",
            b"null",
            b"[]",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"a":1,"a":2}',
            b" " * (9 << 20),
        ),
        *(b'{"format":"kimi-trunk","version":' + b"9" * 5000 + b"}", b'{"format":NaN}'),
    ],
)
def test_manifest_that_is_no_json(copied: tuple[Path, Path], raw: bytes) -> None:
    (copied[1] / MANIFEST).write_bytes(raw)
    assert str(copied[1] / MANIFEST) in refusal(copied)


@pytest.mark.parametrize("key", ["fingerprint", "embedding", "tables"])
def test_manifest_that_can_be_read_but_not_written(copied: tuple[Path, Path], key: str) -> None:
    """Some depths are within what the parser takes, and beyond what a checksum can be made of."""
    path = copied[1] / MANIFEST
    whole = json.dumps({**json.loads(path.read_text()), key: "deep"})
    for depth in range(900, 1000):
        path.write_text(whole.replace('"deep"', "[" * depth + "]" * depth))
        assert "damaged" in refusal(copied) or "nested too deeply" in refusal(copied)


def test_manifest_without_shards(copied: tuple[Path, Path]) -> None:
    path = copied[1] / MANIFEST
    write_manifest(path, replace(read_manifest(path), fingerprint={"shards": []}))
    assert "places layer 1 expert 0 outside its shard" in refusal(copied)


def test_tables_of_another_size_than_listed(copied: tuple[Path, Path]) -> None:
    path, manifest = copied[1] / MANIFEST, read_manifest(copied[1] / MANIFEST)
    size, crc = manifest.tables
    write_manifest(path, replace(manifest, tables=(size + 1, crc)))
    assert f"tables.safetensors has {size} bytes, wanted {size + 1}" in refusal(copied)


@pytest.mark.parametrize("name", ["tables.safetensors", "layer-003.safetensors"])
def test_a_pipe_is_not_waited_for(copied: tuple[Path, Path], name: str) -> None:
    (copied[1] / name).unlink()
    os.mkfifo(copied[1] / name)
    assert name in refusal(copied) and "not a regular file" in refusal(copied)


def test_manifest_fuzzed(copied: tuple[Path, Path]) -> None:
    """A flipped bit is refused, or is in a row block's CRC, where the block's reader meets it."""
    path, rng = copied[1] / MANIFEST, random.Random(5)
    whole, trunk = path.read_bytes(), open_trunk(copied)
    refused = 0
    for _ in range(150):
        path.write_bytes(whole)
        flip(path, rng.randrange(len(whole)))
        try:
            found = open_trunk(copied)
        except TrunkError:
            refused += 1
            continue
        blocks = [(b.offset, b.length) for unit in found.units for b in unit.blocks]
        assert blocks == [(b.offset, b.length) for unit in trunk.units for b in unit.blocks]
        assert found.fingerprint == trunk.fingerprint and found.embedding == trunk.embedding
    assert refused > 100


def test_manifest_is_a_pipe(copied: tuple[Path, Path]) -> None:
    (copied[1] / MANIFEST).unlink()
    os.mkfifo(copied[1] / MANIFEST)
    assert "not JSON" in refusal(copied)


def test_missing_short_and_long_files(copied: tuple[Path, Path]) -> None:
    path = copied[1] / "layer-005.safetensors"
    size = path.stat().st_size
    for wrong in (size - 1, size + 1, 0):
        os.truncate(path, wrong)
        assert f"{path} has {wrong} bytes, wanted {size}" in refusal(copied)
    path.unlink()
    assert f"{path} is absent" in refusal(copied)
    path.mkdir()
    assert f"{path} is not a regular file" in refusal(copied)


def test_flipped_bit_in_any_header_and_in_the_tables(copied: tuple[Path, Path]) -> None:
    rng = random.Random(3)
    for unit in open_trunk(copied).units:
        path = copied[1] / unit.file
        for offset in (0, unit.header.length - 1, rng.randrange(unit.header.length)):
            flip(path, offset)
            assert f"{path} is damaged: its header" in refusal(copied)
            flip(path, offset)
    path = copied[1] / "tables.safetensors"
    for offset in (0, 4095, 4096, path.stat().st_size - 1, *(rng.randrange(15000),) * 3):
        flip(path, offset)
        assert f"{path} is damaged: its bytes" in refusal(copied)
        flip(path, offset)
    open_trunk(copied)
    os.truncate(path, 100)
    assert f"{path} has 100 bytes, wanted" in refusal(copied)
    path.unlink()
    assert f"{path} is absent" in refusal(copied)


def relist(out: Path, number: int, raw: bytes) -> None:
    """Gives file `number` another header block, with the checksum that goes with it."""
    manifest = read_manifest(out / MANIFEST)
    listed = manifest.files[number]
    with (out / listed.name).open("r+b") as file:
        file.write(raw)
    listed.blocks[0][2] = crc32c(raw)
    write_manifest(out / MANIFEST, manifest)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"o_proj", b"x_proj", "o_proj.weight is absent"),
        (b"o_proj.weight.esc", b"o_proj.weight.abc", "escapes is absent"),
        (b"padding.0", b"padding_0", "laid out in another way"),
        (b'"U8"', b'"U9"', "dtype"),
        (b'{"__meta', b'["__meta', "does not begin with '{'"),
        (b"layers.2", b"layers.3", "does not fit the config"),
        (b'"shape":[128]', b'"shape":[821]', "256 bytes, wanted 1642 for BF16 [821]"),
        (b'"data_offsets":[0,', b'"data_offsets":[1,', "255 bytes, wanted 256"),
    ],
)
def test_header_of_another_layout(
    copied: tuple[Path, Path], old: bytes, new: bytes, said: str
) -> None:
    unit = open_trunk(copied).units[2]
    with (copied[1] / unit.file).open("rb") as file:
        raw = file.read(unit.header.length)
    assert old in raw
    relist(copied[1], 2, raw.replace(old, new))
    text = refusal(copied)
    assert unit.file in text and said in text


def test_layers_swapped(copied: tuple[Path, Path]) -> None:
    out = copied[1]
    manifest = read_manifest(out / MANIFEST)
    one, other = manifest.files[1], manifest.files[2]
    os.rename(out / one.name, out / "x")
    os.rename(out / other.name, out / one.name)
    os.rename(out / "x", out / other.name)
    files = [*manifest.files]
    files[1], files[2] = replace(other, name=one.name), replace(one, name=other.name)
    write_manifest(out / MANIFEST, replace(manifest, files=tuple(files)))
    assert "does not fit the config" in refusal(copied)


def test_another_config(made: tuple[Path, Path]) -> None:
    assert "lists 14 files, wanted" in refusal(made, replace(TINY, num_hidden_layers=12))
    for other in (
        replace(TINY, mla_layers=frozenset([2, 7, 11, 12])),
        replace(TINY, intermediate_size=161),
        replace(TINY, first_k_dense_replace=2),
        replace(TINY, hidden_size=192),
        replace(TINY, vocab_size=769),
        replace(TINY, num_experts=13),
    ):
        assert "does not fit the config" in refusal(made, other)


def test_another_checkpoint(copied: tuple[Path, Path], tmp_path: Path) -> None:
    """Same names, same sizes: told by the headers and by the ends of the data."""
    model, out = copied
    shard = model / "model-00003-of-000007.safetensors"
    raw = shard.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for offset, what in (
        (9, "header"),
        (start, "first data"),
        (start + 65535, "first data"),
        (len(raw) - 1, "last data"),
        (len(raw) - 65536, "last data"),
    ):
        flip(shard, offset)
        text = refusal(copied)
        assert f"made from another checkpoint than {model}" in text
        assert f"{shard.name} has checksum of its {what}" in text
        flip(shard, offset)
    open_trunk(copied)
    shard.write_bytes(raw + b"\0")
    assert f"{shard.name} has size {len(raw) + 1}, wanted {len(raw)}" in refusal(copied)
    shard.unlink()
    assert f"{shard.name} is not there" in refusal(copied)
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_trunk(copied)
    other = tmp_path / "other"
    write_checkpoint(other, make_config(), 9, shards=3)
    assert "model-00001-of-000007.safetensors is not there" in refusal((other, out))


@pytest.mark.parametrize("wrong", ["shard", "below", "offset", "negative", "dense"])
def test_experts_outside_the_shards(copied: tuple[Path, Path], wrong: str) -> None:
    path = copied[1] / "tables.safetensors"
    raw = bytearray(path.read_bytes())
    count = 13 * 12 * 6
    offset = np.frombuffer(raw, "<i8", count, 4096).reshape(13, 12, 6)
    shard = np.frombuffer(raw, "<i4", count, 4096 + 8 * count).reshape(13, 12, 6)
    said = "places layer 4 expert 3 outside its shard"
    if wrong == "shard":
        shard[4, 3, 5] = 7
    elif wrong == "below":
        shard[4, 3, 0] = -1
    elif wrong == "offset":
        size = (copied[0] / f"model-0000{shard[4, 3, 1] + 1}-of-000007.safetensors").stat().st_size
        offset[4, 3, 1] = size - 96 * 2 + 1
    elif wrong == "negative":
        offset[4, 3, 2] = -(1 << 63)
    else:
        shard[0, 0, 0], said = 0, "has experts in layer 0, wanted none: it is dense"
    path.write_bytes(raw)
    manifest = read_manifest(copied[1] / MANIFEST)
    write_manifest(copied[1] / MANIFEST, replace(manifest, tables=(len(raw), crc32c(raw))))
    assert said in refusal(copied)


@pytest.mark.parametrize("rows", [0, 767, 769])
def test_checksums_of_another_number_of_rows(copied: tuple[Path, Path], rows: int) -> None:
    """Sound in themselves, with the size and checksum that the manifest has."""
    path = copied[1] / "tables.safetensors"
    tables = Tables(open_trunk(copied).experts, np.zeros(rows, np.uint32))
    listed = write_tables(copied[1], tables, replace(TINY, vocab_size=rows))
    manifest = read_manifest(copied[1] / MANIFEST)
    write_manifest(copied[1] / MANIFEST, replace(manifest, tables=listed))
    size = 4096 + 13 * 12 * 6 * 12 + 4 * 768
    assert f"{path} has {size + 4 * (rows - 768)} bytes, wanted {size}" in refusal(copied)


def test_a_trunk_without_tables(copied: tuple[Path, Path]) -> None:
    """As builds made it that kept no checksums of the embedding's rows."""
    path = copied[1] / MANIFEST
    data = json.loads(path.read_text())
    data["experts"] = data.pop("tables")
    path.write_text(json.dumps(data))
    os.rename(copied[1] / "tables.safetensors", copied[1] / "experts.safetensors")
    assert f"{path} is damaged: keys" in refusal(copied)
    repack(copied[0])
    open_trunk(copied)


def test_embedding_outside_its_shard(copied: tuple[Path, Path]) -> None:
    manifest = read_manifest(copied[1] / MANIFEST)
    place = manifest.embedding
    for wrong in (replace(place, shard=7), replace(place, offset=place.offset + (1 << 30))):
        write_manifest(copied[1] / MANIFEST, replace(manifest, embedding=wrong))
        assert "places the embedding outside its shard" in refusal(copied)
    wrong = replace(place, shape=(767, 128), length=767 * 256)
    write_manifest(copied[1] / MANIFEST, replace(manifest, embedding=wrong))
    assert "has an embedding of [767, 128], wanted [768, 128]" in refusal(copied)


def test_unreadable(copied: tuple[Path, Path]) -> None:
    path = copied[1] / "head.safetensors"
    path.unlink()
    path.symlink_to(path)
    assert f"{path} cannot be read: Too many levels" in refusal(copied)


def test_links_and_other_places(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Shards may be links, and the trunk may be anywhere."""
    model = tmp_path / "links"
    model.mkdir()
    for path in made[0].iterdir():
        if path.is_file():
            (model / path.name).symlink_to(path)
    assert Trunk.open(made[1], model, TINY).shards[0].parent == model
