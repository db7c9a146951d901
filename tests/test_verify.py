"""`kimi verify`: whatever is wrong with a checkpoint or its trunk is named, with what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import forged, make_model
from safetensors import safe_open

from kimi_cli import deep, remedy, rowcheck, synth
from kimi_cli.checkpoint import EDGE
from kimi_cli.config import load_config
from kimi_cli.errors import (
    CheckpointError,
    ConfigError,
    Exit,
    KimiError,
    ReadError,
    UsageError,
    VerifyError,
)
from kimi_cli.expertsums import PARTIAL, SUMS, load_expert_sums
from kimi_cli.header import read_header
from kimi_cli.manifest import MANIFEST, read_manifest
from kimi_cli.native import crc32c
from kimi_cli.repack import repack
from kimi_cli.stream import DirectFile
from kimi_cli.tensors import EMBEDDING, EXPERT_PARTS, expert_prefix
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


# ---- nothing wrong ----


def test_a_good_checkpoint(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = looked(capfd, model)
    assert result["ok"] and result["shards"] == 7 and result["experts"] == 144
    size = sum(path.stat().st_size for path in (model / "kimi-trunk").glob("[lh]*.safetensors"))
    assert result["trunk_files"] == 14 and 0 < size - result["trunk_bytes"] < size // 8
    assert any("--deep" in note for note in result["notes"])
    assert "experts_read" not in result


def test_the_command(model: Path) -> None:
    run = kimi("verify", "-m", model)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "-", "nothing"]
    assert lines[-1].startswith("nothing is wrong: 7 shards")
    run = kimi("verify", "-m", model, "--json")
    assert (run.returncode, run.stderr) == (0, "") and json.loads(run.stdout)["ok"]
    assert "Example: kimi verify" in kimi("verify", "--help").stdout


def test_without_a_model_it_is_the_built_in_one() -> None:
    run = kimi("verify")
    assert run.returncode == 0 and "built-in" in run.stderr
    run = kimi("verify", "--deep")
    assert run.returncode == 2 and "-m DIR" in run.stderr
    with pytest.raises(UsageError):
        verify(None, deep=True)


def test_it_changes_nothing(model: Path) -> None:
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in model.rglob("*")}
    verify(model)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in model.rglob("*")} == before


def test_a_trunk_not_made_is_a_note_unless_it_was_named(
    model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.rmtree(model / "kimi-trunk")
    result = looked(capfd, model)
    assert result["ok"] and any("kimi repack -m" in note for note in result["notes"])
    result = looked(capfd, model, model / "kimi-trunk")
    assert "kimi repack" in result["findings"][0]["fix"]
    (tmp_path / "empty").mkdir()
    result = looked(capfd, model, tmp_path / "empty")
    assert "no trunk" in result["findings"][0]["what"]
    assert f"--out {tmp_path / 'empty'}" in result["findings"][0]["fix"]
    result = looked(capfd, model, deep=True)
    assert "not repacked yet" in result["findings"][0]["what"]


def test_a_checkpoint_without_a_tokenizer_is_whole(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "tiktoken.model").unlink()
    result = looked(capfd, model)
    assert result["ok"] and any("tiktoken.model" in note for note in result["notes"])


# ---- no checkpoint ----


def test_where_there_is_no_k3(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        verify(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        verify(tmp_path / "empty")
    data = json.loads((model / "config.json").read_text())
    data.update(model_type="llama", architectures=["LlamaForCausalLM"])
    (model / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="Llama"):
        verify(model)
    assert kimi("verify", "-m", model).returncode == 3
    assert kimi("verify", "-m", tmp_path / "nowhere").returncode == 3
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(synth.BUILTIN / name, tmp_path / "empty" / name)
    (tmp_path / "empty" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no shard"):
        verify(tmp_path / "empty")


@pytest.mark.parametrize("damage", ["absent", "cut", "wrong"])
def test_a_bad_config_is_a_finding_beside_the_others(
    model: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    path = model / "config.json"
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        cut(path, 100)
    else:
        path.write_text(path.read_text().replace('"num_experts": 12', '"num_experts": "12"'))
    (model / SHARD).unlink()
    result = looked(capfd, model)
    assert files(result) == ["config.json", SHARD]
    assert "hf download moonshotai/Kimi-K3 config.json" in result["findings"][0]["fix"]


# ---- shards ----


def test_every_missing_short_and_unreadable_shard_is_named(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"model-{n:05d}-of-000007.safetensors" for n in range(1, 8)]
    for name in (names[0], names[3]):
        (model / name).unlink()
    cut(model / names[1], 1000)
    cut(model / names[5], 1)
    (model / names[6]).write_bytes(b"junk")
    result = looked(capfd, model)
    assert files(result) == [names[0], names[3], names[1], names[5], names[6]]
    for finding in result["findings"]:
        assert f"hf download moonshotai/Kimi-K3 {finding['file']} " in finding["fix"]
        assert str(model) in finding["fix"]
    words = [finding["what"] for finding in result["findings"]]
    assert words[:2] == ["missing", "missing"]
    assert words[2].startswith("short by 1,000 bytes (it ends in layer ")
    end = (model / names[5]).stat().st_size
    assert words[3].startswith("short by 1 bytes (") and words[3].endswith(f"at offset {end})")
    run = kimi("verify", "-m", model)
    assert run.returncode == 5 and "5 findings" in run.stderr
    assert sum(line.startswith("BAD  model-") for line in run.stdout.splitlines()) == 5


def test_all_shards_missing_but_named_by_the_index(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert len(set(files(looked(capfd, model)))) >= 7


def edit_header(path: Path, edit: Any) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_dtypes_and_shapes_name_their_shard(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(model / "kimi-trunk")
    expert = expert_prefix(2, 3) + EXPERT_PARTS[0]
    norm = "language_model.model.layers.6.input_layernorm.weight"

    def retype(header: dict[str, Any]) -> None:
        header[expert]["dtype"] = "I8"
        header[expert]["shape"].reverse()

    shard, other = place(model, expert)[0], place(model, norm)[0]
    assert shard != other
    edit_header(shard, retype)
    edit_header(other, lambda header: header[norm].update(shape=[2, 64]))
    edit_header(other, lambda header: header.update(odd=header.pop(norm)))
    result = looked(capfd, model)
    told = {(f["file"], f["what"].partition(":")[0]) for f in result["findings"]}
    assert (shard.name, "wrong dtype") in told and (other.name, "unknown") in told
    assert (str(model), "absent") in told


def test_a_flipped_bit_in_a_shard_header_is_found(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = model / SHARD
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    rng = np.random.default_rng(1)
    for offset in [0, 3, 8, 9, length - 1, *rng.integers(8, length, 25).tolist()]:
        bit = int(rng.integers(8))
        flip(path, offset, bit)
        result = looked(capfd, model)
        assert SHARD in str(result["findings"]), (offset, bit)
        flip(path, offset, bit)
    assert looked(capfd, model)["ok"]


def test_another_shard_than_the_trunk_was_made_from(
    model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shard = place(model, "language_model.lm_head.weight")[0]
    flip(shard, shard.stat().st_size - 5)
    result = looked(capfd, model)
    assert files(result) == [shard.name] and "last data" in result["findings"][0]["what"]
    assert "kimi repack" in result["findings"][0]["fix"]
    other = tmp_path / "other"
    synth.write_checkpoint(
        other, json.loads((model / "config.json").read_text()), seed=77, shards=7
    )
    result = looked(capfd, other, model / "kimi-trunk")
    assert files(result) == [MANIFEST]
    assert "another checkpoint" in result["findings"][0]["what"]


def test_the_index_and_the_tokenizer(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    (model / "tiktoken.model").write_text("junk")
    result = looked(capfd, model)
    assert files(result) == ["model.safetensors.index.json", "tiktoken.model"]
    for finding in result["findings"]:
        assert f"hf download moonshotai/Kimi-K3 {finding['file']}" in finding["fix"]


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


def test_commands_are_quoted_for_a_shell() -> None:
    model = Path("/a model")
    assert remedy.repack(model, model / "kimi-trunk") == "run kimi repack -m '/a model'"
    assert remedy.deep(model, Path("/t")).endswith("--deep --trunk /t")
    text = remedy.download(model, ["x"])
    assert text == ("run hf download moonshotai/Kimi-K3 x --local-dir '/a model' --force-download")


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
