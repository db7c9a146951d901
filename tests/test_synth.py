"""Synthetic checkpoints: official format, healthy values, the same weights in every layout."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config, parse_config
from kimi_cli.errors import ConfigError, KimiError, UsageError
from kimi_cli.header import Entry, read_header
from kimi_cli.synth import BUILTIN, SLICE, make_config, write_checkpoint, write_tokenizer
from kimi_cli.tensors import EXPERT_PARTS, expert_prefix

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def tensors(model: Path) -> Iterator[tuple[str, Entry, NDArray[Any]]]:
    """Every tensor of `model`, floats widened, U8 as it is."""
    for path in sorted(model.glob("*.safetensors")):
        raw = path.read_bytes()
        for name, entry in read_header(path).items():
            data = raw[entry.offset : entry.offset + entry.length]
            values: NDArray[Any] = np.frombuffer(data, np.uint8)
            if entry.dtype == "F32":
                values = np.frombuffer(data, "<f4")
            elif entry.dtype == "BF16":
                values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            yield name, entry, values.reshape(entry.shape)


def weights(model: Path) -> dict[str, NDArray[Any]]:
    return {name: values for name, _, values in tensors(model)}


def test_default_config_is_the_builtin_one() -> None:
    assert make_config() == json.loads((BUILTIN / "config.json").read_text())


def test_overrides_go_where_the_key_is() -> None:
    data = make_config(
        num_hidden_layers=5, vocab_size=1000, num_attention_heads=2, head_dim=16, num_experts=3
    )
    text = data["text_config"]
    assert text["linear_attn_config"]["head_dim"] == 16
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert (text["num_key_value_heads"], text["num_experts_per_token"]) == (2, 3)
    assert data["eos_token_id"] == text["eos_token_id"] == 746
    assert (data["bos_token_id"], data["pad_token_id"]) == (744, 999)
    parse_config(data, "x")
    assert make_config(eos_token_id=7)["eos_token_id"] == 7
    with pytest.raises(UsageError, match="has no key 'hidden'"):
        make_config(hidden=3)


def test_slice_has_the_released_width() -> None:
    config = parse_config(make_config(**SLICE), "x")
    assert (config.hidden_size, config.num_experts, config.vocab_size) == (7168, 32, 8192)
    assert config.mla_layers == {3} and config.first_k_dense_replace == 1


def test_official_layout(tmp_path: Path) -> None:
    data = make_config()
    calls: list[tuple[int, int]] = []
    write_checkpoint(
        tmp_path / "new" / "dir", data, 5, shards=7, report=lambda *call: calls.append(call)
    )
    model = tmp_path / "new" / "dir"
    config = load_config(model)
    found = Checkpoint.open(model, config)
    assert found.experts.whole[1:].all()
    assert len(found.shards) == 7 and calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == calls[-1][1]
    builtin = {name: (e.dtype, e.shape) for name, e, _ in tensors(BUILTIN)}
    assert {name: (e.dtype, e.shape) for name, e, _ in tensors(model)} == builtin
    for layer in range(config.num_hidden_layers):
        prefix = f"language_model.model.layers.{layer}."
        spots = [place for name, place in found.tensors.items() if name.startswith(prefix)]
        spots.sort(key=lambda place: place.offset)
        assert len({place.shard for place in spots}) == 1
        for one, next_one in pairwise(spots):
            assert one.offset + one.length == next_one.offset
    order = np.argsort(found.experts.offset[1, :, 0])
    assert (order != np.arange(config.num_experts)).any()


def test_seed_decides(tmp_path: Path) -> None:
    data = make_config(num_hidden_layers=2)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / folder, data, seed)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    one, other = weights(tmp_path / "a"), weights(tmp_path / "c")
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(one[name], other[name])
    assert len({row.tobytes() for row in one[name]}) == 128


def test_layouts_hold_the_same_weights(tmp_path: Path) -> None:
    data = make_config(num_hidden_layers=4)
    write_checkpoint(tmp_path / "plain", data, 3)
    write_checkpoint(
        tmp_path / "odd",
        data,
        3,
        shards=5,
        scatter_experts=True,
        scatter_trunk=True,
        f32=("*.o_proj.weight", "*lm_head.weight"),
        bf16=("*.dt_bias",),
        conv_2d=True,
        a_log_4d=True,
    )
    plain, odd = weights(tmp_path / "plain"), weights(tmp_path / "odd")
    assert plain.keys() == odd.keys()
    for name, values in plain.items():
        if name.endswith("A_log"):
            assert values.shape == (32,) and odd[name].shape == (1, 1, 4, 1)
            assert not values[4:].any()
            values = values[:4]
        tolerance = 2**-8 if name.endswith("dt_bias") else 0
        np.testing.assert_allclose(odd[name].ravel(), values.ravel(), rtol=tolerance, atol=0)
    assert odd["language_model.model.layers.0.self_attn.q_conv1d.weight"].shape == (128, 4)
    config = load_config(tmp_path / "odd")
    assert Checkpoint.open(tmp_path / "odd", config).experts.whole.mean() < 0.2


def statistic(model: Path) -> dict[str, float]:
    """Root mean square per kind of tensor, layers and experts taken together; MXFP4 decoded."""
    squares: dict[str, list[float]] = {}
    values = weights(model)
    for name, data in values.items():
        if name.endswith("weight_scale") or name.startswith(("vision", "mm_")):
            continue
        if name.endswith("weight_packed"):
            scales = values[name.replace("packed", "scale")].astype(np.int64) - 127
            nibbles = np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)
            data = E2M1[nibbles & 7] * np.repeat(2.0**scales, 32, axis=1)
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        squares.setdefault(kind, []).append(float(np.mean(np.square(data, dtype=np.float64))))
    return {kind: float(np.mean(found)) ** 0.5 for kind, found in squares.items()}


def test_values_are_sized_like_the_builtin_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(), 11)
    mine, builtin = statistic(tmp_path), statistic(BUILTIN)
    assert mine.keys() == builtin.keys()
    for kind, size in builtin.items():
        low, high = (0.5, 2) if kind.endswith(("A_log", "bias")) else (0.8, 1.25)
        assert low < mine[kind] / size < high, kind


def test_scale_of_weights_follows_the_width(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(num_hidden_layers=2, routed_expert_hidden_size=256), 1)
    mine, builtin = statistic(tmp_path), statistic(BUILTIN)
    kind = "language_model.model.layers.block_sparse_moe.experts.w1.weight_packed"
    assert mine[kind] * 2 == pytest.approx(builtin[kind], rel=0.1)


def test_scale_bytes_are_ordinary(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(num_hidden_layers=2), 1)
    found = weights(tmp_path)
    packed, scale = (found[expert_prefix(1, 0) + part] for part in EXPERT_PARTS[:2])
    assert scale.min() > 100 and scale.max() < 130
    assert len(np.unique(packed)) == 256


def test_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(vocab_size=1024), 1, tokenizer=True)
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    assert len(ranks) == 768 and sorted(ranks.values()) == list(range(768))
    assert all(ranks[bytes([byte])] == byte for byte in range(256))
    data = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {int(key): token["content"] for key, token in data["added_tokens_decoder"].items()}
    assert named[768] == "[BOS]" and named[1023] == "[PAD]"
    config = load_config(tmp_path)
    assert named[config.eos_token_id] == "<|end_of_msg|>"


def test_large_vocabulary_has_distinct_ranks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 163840)
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    assert len({line.split()[0] for line in lines}) == 163584


def test_refusals(tmp_path: Path) -> None:
    data = make_config(num_hidden_layers=2, vocab_size=300)
    with pytest.raises(UsageError, match="5 shards asked for, wanted 1 to 4"):
        write_checkpoint(tmp_path, data, 1, shards=5)
    with pytest.raises(UsageError, match="at least 512 ids, found vocab_size 300"):
        write_checkpoint(tmp_path, data, 1, tokenizer=True)
    with pytest.raises(ConfigError, match="multiple of 32"):
        write_checkpoint(tmp_path, make_config(moe_intermediate_size=40), 1)
    write_checkpoint(tmp_path / "x", data, 1)
    with pytest.raises(UsageError, match="already holds a checkpoint"):
        write_checkpoint(tmp_path / "x", data, 1)
    with pytest.raises(KimiError, match="cannot be written"):
        write_checkpoint(tmp_path / "x" / "config.json" / "y", data, 1)
