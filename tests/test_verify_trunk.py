"""`kimi verify` of a trunk: every block, the manifest, the tables; and rows of the embedding."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from running import forged, make_model
from verifying import cut, files, flip, kimi, looked, opened, place

from kimi_cli import rowcheck
from kimi_cli.checkpoint import EDGE
from kimi_cli.config import load_config
from kimi_cli.errors import ReadError
from kimi_cli.manifest import MANIFEST, read_manifest
from kimi_cli.repack import repack
from kimi_cli.stream import DirectFile
from kimi_cli.tensors import EMBEDDING

# ---- the trunk ----


@pytest.mark.fault(
    "damage: a flipped bit in a trunk block", "verify names file, tensor and offset, exit code 5"
)
def test_a_flipped_bit_in_any_block_is_found(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trunk = opened(model)
    kinds = set()
    for unit in (trunk.units[0], trunk.units[3], trunk.units[-1]):
        path = trunk.directory / unit.file
        for number, block in enumerate(unit.blocks):
            kinds.add("header" if number == 0 else "head" if block in unit.head else "rows")
            for offset in (block.offset, block.offset + block.length - 1):
                flip(path, offset, 5)
                result = looked(capfd, model)
                assert files(result) == [unit.file]
                fix = result["findings"][0]["fix"]
                assert "delete" in fix and unit.file in fix and "kimi repack" in fix
                if number:
                    assert f"offset {block.offset} " in result["findings"][0]["what"]
                flip(path, offset, 5)
    assert kinds == {"header", "head", "rows"}
    assert looked(capfd, model)["ok"]


def test_all_bad_blocks_are_told_with_what_they_hold(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trunk = opened(model)
    flip(trunk.directory / "layer-000.safetensors", 10)
    flip(trunk.directory / "layer-000.safetensors", trunk.units[0].head_offset)
    head = trunk.units[-1]
    flip(trunk.directory / head.file, head.blocks[-1].offset)
    cut(trunk.directory / "layer-004.safetensors", 7)
    (trunk.directory / "layer-005.safetensors").unlink()
    flip(trunk.directory / "tables.safetensors", 9000)
    result = looked(capfd, model)
    assert files(result) == [
        "layer-000.safetensors", "layer-004.safetensors", "layer-005.safetensors",
        "tables.safetensors", "layer-000.safetensors", "head.safetensors",
    ]  # fmt: skip
    assert "lm_head.weight rows 0 to" in result["findings"][-1]["what"]
    run = kimi("verify", "-m", model)
    assert run.returncode == 5 and "6 findings" in run.stdout


def test_what_it_advises_mends_the_trunk(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = model / "kimi-trunk" / "head.safetensors"
    whole = path.read_bytes()
    flip(path, len(whole) - 9)
    assert not looked(capfd, model)["ok"]
    path.unlink()
    repack(model)
    assert path.read_bytes() == whole and looked(capfd, model)["ok"]


def test_a_flipped_bit_in_the_manifest_is_found(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = model / "kimi-trunk" / MANIFEST
    size = path.stat().st_size
    for offset in np.random.default_rng(2).integers(0, size, 40).tolist():
        flip(path, offset, offset % 7)
        result = looked(capfd, model)
        assert not result["ok"], offset
        flip(path, offset, offset % 7)
    assert looked(capfd, model)["ok"]


def test_an_unfinished_trunk(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trunk = model / "kimi-trunk"
    os.rename(trunk / MANIFEST, trunk / "trunk.partial.json")
    result = looked(capfd, model)
    assert files(result) == [MANIFEST] and "unfinished" in result["findings"][0]["what"]


def test_tables_that_do_not_fit_the_headers(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same tables, sound in themselves, with two experts swapped."""
    from dataclasses import replace

    from kimi_cli.manifest import write_manifest
    from kimi_cli.tables import Tables, write_tables

    trunk, config = opened(model), load_config(model)
    trunk.experts.offset[4, [1, 2]] = trunk.experts.offset[4, [2, 1]]
    tables = Tables(trunk.experts, trunk.embedding_sums)
    listed = write_tables(trunk.directory, tables, config)
    manifest = read_manifest(trunk.directory / MANIFEST)
    write_manifest(trunk.directory / MANIFEST, replace(manifest, tables=listed))
    result = looked(capfd, model)
    assert files(result) == ["tables.safetensors"]


@pytest.mark.parametrize("plain", [False, True])
def test_weights_that_are_no_numbers_are_named(
    plain: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a trunk whose checksums hold, which nothing but malice writes."""
    options = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 768}
    source = make_model(tmp_path / "first", 3, plain=plain, **options)
    layer = "language_model.model.layers.0."
    matrix = f"{layer}mlp.gate_proj.weight"
    nan = b"\xc0\x7f"
    cases = {
        "vector": (f"{layer}self_attn.A_log", b"\0\0\xc0\x7f", 1),
        "inline": (f"{layer}self_attn.b_proj.weight", nan, 129),
    }
    if plain:
        cases["rows"] = (matrix, b"\x80\xff", 20000)
    else:
        cases["table"] = (f"{matrix}.table", b"\xff", 15)  # a frequent high byte
    for case, (name, bits, element) in cases.items():
        found = forged(source, tmp_path / case, name, bits, element)
        report = looked(capfd, found.trunk.directory.parent)
        (finding,) = report["findings"]
        assert finding["file"].endswith("/kimi-trunk/layer-000.safetensors")
        what = rf"{name.removesuffix('.table')} has (NaN|infinity) at element (\d+)"
        said = re.match(what + r"(, offset \d+)?, with a checksum that holds", finding["what"])
        assert said, finding["what"]
        if case != "table":
            assert int(said[2]) == element and said[1] == ("infinity" if case == "rows" else "NaN")
            assert said[3]


# ---- the embedding ----


def rows_out_of_the_fingerprint(model: Path) -> tuple[Path, int, list[int]]:
    """Shard and offset of the embedding, and the rows that no fingerprint covers."""
    path, offset, length = place(model, EMBEDDING)
    size, start = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    rows = [
        row
        for row in range(length // 256)
        if start + EDGE <= offset + 256 * row <= size - EDGE - 256
    ]
    return path, offset, rows


@pytest.mark.fault(
    "damage: a flipped bit in the embedding", "said where it is met, exit code 1; verify finds it"
)
def test_a_flipped_bit_in_the_embedding_is_met(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, offset, rows = rows_out_of_the_fingerprint(model)
    row = rows[len(rows) // 2]
    words = ["generate", "-m", model, "-n", "1", "--ignore-eos", "--ids"]
    good = kimi(*words, f"{row - 1},{row}").stdout
    flip(path, offset + 256 * row + 255, 6)
    run = kimi(*words, f"{row - 1},{row}")
    assert run.returncode == 1 and not run.stdout.strip()
    assert run.stderr.splitlines()[-1].startswith(
        f"kimi: {path}: the embedding of token {row}, 256 bytes at offset {offset + 256 * row}, "
        "has checksum "
    )
    assert f"hf download moonshotai/Kimi-K3 {path.name} --local-dir" in run.stderr
    result = looked(capfd, model)
    assert files(result) == [path.name] and result["embedding_rows"] == 768
    what, fix = result["findings"][0]["what"], result["findings"][0]["fix"]
    assert what.startswith(f"{EMBEDDING}: row {row} at offset {offset + 256 * row} has checksum ")
    assert f"wanted {int(opened(model).embedding_sums[row]):08x}" in what and path.name in fix
    run = kimi("verify", "-m", model)
    assert run.returncode == 5 and f"BAD  {path.name}: {EMBEDDING}: row {row} " in run.stdout
    flip(path, offset + 256 * row + 255, 6)
    assert looked(capfd, model)["ok"] and kimi(*words, f"{row - 1},{row}").stdout == good


def test_the_first_bad_rows_are_told_and_the_rest_counted(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the stretches, and beside a layer that is damaged."""
    path, offset, rows = rows_out_of_the_fingerprint(model)
    bad = [rows[0], rows[1], rows[60], rows[61], rows[-1]]
    for row in bad:
        flip(path, offset + 256 * row)
    flip(model / "kimi-trunk" / "layer-000.safetensors", 10)
    texts = set()
    for piece in (256, 300, 1000, 8 << 20):
        monkeypatch.setattr(rowcheck, "PIECE", piece)
        result = looked(capfd, model)
        assert files(result) == ["layer-000.safetensors", path.name]
        texts.add(result["findings"][1]["what"])
    (text,) = texts
    assert [f"row {row} at offset {offset + 256 * row} " in text for row in bad] == (
        [True] * 3 + [False] * 2
    )
    assert text.endswith("; and 2 rows more")


def test_an_embedding_that_cannot_be_read(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, offset, _ = place(model, EMBEDDING)
    real = DirectFile.read

    def read(self: DirectFile, at: int, length: int, buffer: memoryview) -> int:
        if (self.path, at) == (path, offset):
            raise ReadError(f"{self.path}: reading {length} bytes at {at} failed: bad sector")
        return real(self, at, length, buffer)

    monkeypatch.setattr(DirectFile, "read", read)
    result = looked(capfd, model)
    assert files(result) == [path.name] and "bad sector" in result["findings"][0]["what"]
