"""`kimi verify` of a checkpoint: whatever is wrong with it is named, with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verifying import SHARD, cut, files, flip, kimi, looked, place

from kimi_cli import remedy, synth
from kimi_cli.errors import CheckpointError, ConfigError, UsageError
from kimi_cli.manifest import MANIFEST
from kimi_cli.tensors import EXPERT_PARTS, expert_prefix
from kimi_cli.verify import verify

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
    assert run.returncode == 5
    assert "5 findings, each with what to do about it" in run.stderr
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


# ---- what it advises ----


def test_commands_are_quoted_for_a_shell() -> None:
    model = Path("/a model")
    assert remedy.repack(model, model / "kimi-trunk") == "run kimi repack -m '/a model'"
    assert remedy.deep(model, Path("/t")).endswith("--deep --trunk /t")
    text = remedy.download(model, ["x"])
    assert text == ("run hf download moonshotai/Kimi-K3 x --local-dir '/a model' --force-download")
