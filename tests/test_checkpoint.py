"""Checkpoints: where every tensor lies, and everything that is wrong with a directory at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kimi_cli import index
from kimi_cli.checkpoint import EDGE, Checkpoint, fingerprint
from kimi_cli.config import Config, load_config, parse_config
from kimi_cli.errors import CheckpointError, Exit
from kimi_cli.faults import short_name
from kimi_cli.header import read_header
from kimi_cli.native import crc32c
from kimi_cli.synth import BUILTIN, make_config, write_checkpoint
from kimi_cli.tensors import (
    EXPERT_PARTS,
    IGNORED,
    embedding,
    expert_prefix,
    expert_shapes,
    head_tensors,
    layer_tensors,
)

SMALL: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 5, "vocab_size": 64}
Header = dict[str, Any]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "modèle 3"
    write_checkpoint(path, make_config(**SMALL), seed=1, shards=4)
    return path


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage: layers 0; 1, 2; 3; head and vision in its four shards."""
    return Path(shutil.copytree(pristine, tmp_path / "the modèle"))


def shard(model: Path, number: int, count: int = 4) -> Path:
    return model / f"model-{number:05d}-of-{count:06d}.safetensors"


def edit_header(path: Path, edit: Callable[[Header], object]) -> None:
    """Rewrites the header alone; the data stays as it is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: Header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_index(model: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = model / index.FILE_NAME
    data = json.loads(path.read_text())
    edit(data["weight_map"])
    path.write_text(json.dumps(data))


def rename(model: Path, number: int, old: str, new: str) -> None:
    """Renames a tensor in its header and in the index."""
    edit_header(shard(model, number), lambda header: header.update({new: header.pop(old)}))
    edit_index(model, lambda names: names.update({new: names.pop(old)}))


def refusal(model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(model, load_config(model))
    assert caught.value.exit_code == Exit.CHECKPOINT
    message = str(caught.value)
    assert message.startswith(str(model)) and "\n" not in message and len(message) < 2000
    return message.removeprefix(f"{model}: ")


def check_locations(model: Path) -> Checkpoint:
    """Holds every location against the reference library's view of the same files."""
    config = load_config(model)
    found = Checkpoint.open(model, config)
    views = [safe_open(path, "np") for path in found.shards]
    raws = [path.read_bytes() for path in found.shards]
    layers = range(config.num_hidden_layers)
    wanted = [tensor.name for layer in layers for tensor in layer_tensors(config, layer)]
    wanted += [tensor.name for tensor in (*head_tensors(config), embedding(config))]
    assert set(found.tensors) == set(wanted)
    for name, place in found.tensors.items():
        view = views[place.shard].get_slice(name)  # type: ignore[no-untyped-call]
        assert tuple(view.get_shape()) == place.shape and view.get_dtype() == place.dtype
        assert place.length == prod(place.shape) * {"BF16": 2, "F32": 4}[place.dtype]
    shapes = expert_shapes(config)
    for layer in layers:
        for expert in range(config.num_experts):
            if not config.is_moe(layer):
                assert (found.experts.shard[layer, expert] == -1).all()
                assert found.experts.extent(layer, expert) is None
                continue
            for part, name in enumerate(EXPERT_PARTS):
                number = int(found.experts.shard[layer, expert, part])
                offset = int(found.experts.offset[layer, expert, part])
                full = expert_prefix(layer, expert) + name
                data = views[number].get_tensor(full)  # type: ignore[no-untyped-call]
                assert data.shape == shapes[part]
                assert raws[number][offset : offset + data.nbytes] == data.tobytes()
    return found


def test_builtin_checkpoint() -> None:
    found = check_locations(BUILTIN)
    assert [path.name for path in found.shards] == sorted(p.name for p in BUILTIN.glob("*.safe*s"))
    assert found.experts.whole[1:].all() and not found.experts.whole[0].any()
    assert found.experts.sizes == (3072, 192, 3072, 192, 3072, 192)
    assert not any(name.startswith(IGNORED) for name in found.tensors)


def test_extent_is_where_the_first_of_six_lies(model: Path) -> None:
    found = check_locations(model)
    number, offset = found.experts.extent(2, 4) or (-1, -1)
    entry = read_header(found.shards[number])[expert_prefix(2, 4) + EXPERT_PARTS[0]]
    assert offset == entry.offset


@pytest.mark.parametrize("shards", [1, 3, 6])
def test_irregular_layouts(tmp_path: Path, shards: int) -> None:
    write_checkpoint(
        tmp_path,
        make_config(**SMALL),
        seed=2,
        shards=shards,
        scatter_experts=True,
        scatter_trunk=True,
        f32=["*.o_proj.weight", "*norm.weight"],
        bf16=["*.A_log", "*.dt_bias"],
        conv_2d=True,
        a_log_4d=True,
    )
    found = check_locations(tmp_path)
    assert found.experts.whole.mean() < 0.5
    name = "language_model.model.layers.0.self_attn."
    assert found.tensors[name + "A_log"].shape == (1, 1, 4, 1)
    assert found.tensors[name + "k_conv1d.weight"].shape == (128, 4)
    assert found.tensors[name + "o_proj.weight"].dtype == "F32"


def test_adjacent_but_in_another_order_is_not_one_extent(model: Path) -> None:
    """w1 and w3 are of one size: swapped, all offsets but their order stay."""
    prefix = expert_prefix(1, 0)

    def swap(header: Header) -> None:
        one, three = (header[f"{prefix}{w}.weight_packed"] for w in ("w1", "w3"))
        one["data_offsets"], three["data_offsets"] = three["data_offsets"], one["data_offsets"]

    edit_header(shard(model, 2), swap)
    found = check_locations(model)
    assert found.experts.extent(1, 0) is None and found.experts.extent(1, 1) is not None


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(**SMALL), seed=1, shards=1)
    (tmp_path / index.FILE_NAME).unlink()
    check_locations(tmp_path)
    shard(tmp_path, 1, 1).rename(tmp_path / "model.safetensors")
    assert check_locations(tmp_path).shards == (tmp_path / "model.safetensors",)


def test_links_to_several_places(model: Path, tmp_path: Path) -> None:
    for number, blobs in ((1, tmp_path / "blobs one"), (3, tmp_path / "blobs zwei")):
        blobs.mkdir()
        shard(model, number).rename(blobs / "0a1b")
        shard(model, number).symlink_to(os.path.relpath(blobs / "0a1b", model))
    check_locations(model)


def test_read_only_directory(model: Path) -> None:
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path == model else 0o444)
    try:
        check_locations(model)
    finally:
        model.chmod(0o755)


def test_missing_shards(model: Path) -> None:
    shard(model, 2).unlink()
    shard(model, 4).unlink()
    assert refusal(model) == (
        "2 of 4 shards present; missing: model-00002-of-000004.safetensors, "
        "model-00004-of-000004.safetensors"
    )


def test_missing_shard_that_the_index_does_not_know(model: Path) -> None:
    last = shard(model, 4)
    edit_index(model, lambda names: [names.pop(n) for n in list(names) if names[n] == last.name])
    last.unlink()
    message = refusal(model)
    assert message.startswith("3 of 4 shards present; missing: model-00004")
    assert "absent: output_attn_res_norm.weight" in message


def test_short_shards(model: Path) -> None:
    headers = {number: read_header(shard(model, number)) for number in (1, 3)}

    def place(number: int) -> str:
        """The tensor and the offset at which the shard now ends."""
        size = shard(model, number).stat().st_size
        for name, entry in headers[number].items():
            if entry.offset <= size < entry.offset + entry.length:
                return f"it ends in {short_name(name)}, at offset {size}"
        raise AssertionError(number)

    for number, cut in ((1, 1), (3, 12345)):
        os.truncate(shard(model, number), shard(model, number).stat().st_size - cut)
    assert refusal(model) == (
        "4 of 4 shards present; short: model-00001-of-000004.safetensors by 1 bytes "
        f"({place(1)}), model-00003-of-000004.safetensors by 12,345 bytes ({place(3)})"
    )


def test_shard_cut_in_its_header(model: Path) -> None:
    os.truncate(shard(model, 2), 100)
    message = refusal(model)
    assert "unreadable: model-00002-of-000004.safetensors is short by at least" in message
    assert "absent" not in message
    os.truncate(shard(model, 2), 0)
    assert "model-00002-of-000004.safetensors has 0 bytes" in refusal(model)


def test_dangling_link(model: Path) -> None:
    shard(model, 3).unlink()
    shard(model, 3).symlink_to("../blobs/gone")
    message = refusal(model)
    assert "model-00003-of-000004.safetensors is a symbolic link to ../blobs/gone" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_shard(model: Path) -> None:
    shard(model, 3).chmod(0)
    assert "model-00003-of-000004.safetensors cannot be read: Permission" in refusal(model)


def test_directory_in_place_of_a_shard(model: Path) -> None:
    shard(model, 3).unlink()
    shard(model, 3).mkdir()
    assert "model-00003-of-000004.safetensors is not a regular file" in refusal(model)


@pytest.mark.parametrize("name", ["model-00003-of-000004.safetensors", index.FILE_NAME])
def test_a_pipe_is_not_waited_for(model: Path, name: str) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    assert name in refusal(model) and "not a regular file" in refusal(model)
    with pytest.raises(CheckpointError, match="not a regular file"):
        fingerprint([model / name], crc32c)


def test_offsets_that_no_number_of_ours_holds(tmp_path: Path) -> None:
    """The data offset is a number of 63 bits, and the header before it makes it one more."""
    (tmp_path / "config.json").write_bytes((BUILTIN / "config.json").read_bytes())
    far = (1 << 63) - 1
    entries = {
        "vision_tower.x": {"dtype": "U8", "shape": [far], "data_offsets": [0, far]},
        f"{expert_prefix(2, 0)}w1.weight_packed": {
            "dtype": "U8", "shape": [0], "data_offsets": [far, far]
        },
    }  # fmt: skip
    raw = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert '"vision_tower.x" has shape [9223372036854775807], wanted' in refusal(tmp_path)


def test_a_set_of_a_million_shards_is_not_listed(tmp_path: Path) -> None:
    shutil.copy(BUILTIN / "config.json", tmp_path)
    (tmp_path / "model-00001-of-999999.safetensors").write_bytes(b"")
    message = refusal(tmp_path)
    assert "mixed: 1 shards of 999,999, wanted 10,000 at most" in message
    assert "missing" not in message


def test_nothing_there(tmp_path: Path) -> None:
    config = load_config(BUILTIN)
    with pytest.raises(CheckpointError, match="holds no shard"):
        Checkpoint.open(tmp_path, config)
    with pytest.raises(CheckpointError, match="none cannot be read: No such file"):
        Checkpoint.open(tmp_path / "none", config)


def test_unindexed_shard(model: Path) -> None:
    shutil.copy(shard(model, 1), model / "model.safetensors")
    assert "not in the index: model.safetensors" in refusal(model)


def test_shards_of_two_sets(model: Path) -> None:
    (model / index.FILE_NAME).unlink()
    shutil.copy(shard(model, 1), shard(model, 1, 7))
    message = refusal(model)
    assert "model.safetensors.index.json is absent, wanted for 5 shards" in message
    assert "mixed: shards of 4, shards of 7" in message


def test_absent_index(model: Path) -> None:
    (model / index.FILE_NAME).unlink()
    assert "index: model.safetensors.index.json is absent, wanted for 4 shards" in refusal(model)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "without a weight_map"),
        (b"[]", "without a weight_map"),
        (b'{"weight_map": {"a": "b"', "cut short inside its weight_map"),
        (b'{"weight_map": {"a": "b"}', "not JSON at"),
        (b'{"weight_map": {"a": "b",}}', "not JSON in its weight_map"),
        (b'{"weight_map": {"a" "b"}}', "not JSON in its weight_map"),
        (b'{"weight_map": {"a": 1}}', "other than a file name"),
        (b'{"weight_map": {"a": {"b": "c"}}}', "not JSON in its weight_map"),
        (b'{"x": {"weight_map": {"a": "b"}}}', "wanted an object with a weight_map"),
        (b'{"weight_map": {"a": "\xff"}}', "not JSON in its weight_map"),
        (b'{"x": {"weight_map": {"a": "b"}}, "weight_map": {}}', "with a weight_map"),
    ],
)
def test_index_that_is_none(model: Path, raw: bytes, said: str) -> None:
    (model / index.FILE_NAME).write_bytes(raw)
    message = refusal(model)
    assert "index: model.safetensors.index.json is" in message and said in message


def test_index_names_what_is_not_there(model: Path) -> None:
    name = "language_model.model.norm.weight"
    edit_index(model, lambda names: names.update({"extra": "../elsewhere.bin", name: shard_1}))
    message = refusal(model)
    assert 'names "../elsewhere.bin", which is no shard\'s name' in message
    assert f"places norm.weight in {shard_1}, which lacks it" in message
    assert "lacks norm.weight of model-00004-of-000004.safetensors" in message


shard_1 = "model-00001-of-000004.safetensors"


def test_index_names_a_tensor_twice(model: Path) -> None:
    path = model / index.FILE_NAME
    line = f'"language_model.model.layers.0.self_attn.A_log": "{shard_1}",'
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, line + line))
    assert "index: names layer 0 self_attn.A_log twice" in refusal(model)


def test_absent_tensors(model: Path) -> None:
    layer = "language_model.model.layers."
    rename(model, 1, layer + "0.self_attn.q_proj.weight", "vision_tower.a")
    rename(model, 2, expert_prefix(1, 3) + "w2.weight_scale", "vision_tower.b")
    for part in EXPERT_PARTS:
        rename(model, 2, expert_prefix(2, 4) + part, "vision_tower." + part)
    rename(model, 4, "language_model.lm_head.weight", "vision_tower.c")
    assert refusal(model) == (
        "4 of 4 shards present; absent: layer 0 self_attn.q_proj.weight, "
        "layer 1 expert 3 w2.weight_scale, layer 2 expert 4, lm_head.weight"
    )


def test_absent_layers(model: Path) -> None:
    data = make_config(**{**SMALL, "num_hidden_layers": 5, "full_attn_layers": [4]})
    data["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 5]
    (model / "config.json").write_text(json.dumps(data))
    assert refusal(model) == "4 of 4 shards present; absent: layer 4"


def test_absent_experts_of_a_layer(model: Path) -> None:
    shard_3 = shard(model, 3)
    names = [name for name in read_header(shard_3) if ".experts." in name]
    for number, name in enumerate(names):
        rename(model, 3, name, f"vision_tower.{number}")
    assert refusal(model).endswith("absent: layer 3 experts 0 to 4")


def test_long_lists_are_cut(model: Path) -> None:
    for name in list(read_header(shard(model, 1))):
        rename(model, 1, name, "language_model." + name.replace(".weight", ".weight_packed"))
    message = refusal(model)
    assert "absent: layer 0;" in message and "and 17 more" in message


def test_unknown_tensors(model: Path) -> None:
    old = "language_model.model.layers.0.self_attn.q_proj.weight"
    rename(model, 1, old, old + "_packed")
    rename(model, 2, expert_prefix(1, 0) + EXPERT_PARTS[0], expert_prefix(1, 5) + EXPERT_PARTS[0])
    message = refusal(model)
    assert "unknown: layer 0 self_attn.q_proj.weight_packed in model-00001" in message
    assert "layer 1 block_sparse_moe.experts.5.w1.weight_packed in model-00002" in message
    assert "absent: layer 0 self_attn.q_proj.weight, layer 1 expert 0 w1.weight_packed" in message


@pytest.mark.parametrize("number", ["00", "+0", "0_0", "٠"])  # noqa: RUF001
def test_expert_number_is_written_one_way(model: Path, number: str) -> None:
    old = expert_prefix(1, 0) + EXPERT_PARTS[0]
    rename(model, 2, old, old.replace("experts.0", f"experts.{number}"))
    message = refusal(model)
    assert "unknown: " in message and "absent: layer 1 expert 0 w1.weight_packed" in message


def test_tensor_in_two_shards(model: Path) -> None:
    """Shards 1 and 2 have a tensor renamed to one that a later shard holds too."""
    attention = "self_attn.o_norm.weight"
    for number, layer, name in (
        (2, 1, expert_prefix(3, 1) + EXPERT_PARTS[1]),
        (1, 0, "vision_tower.patch_embed.proj.weight"),
        (2, 2, "language_model.model.norm.weight"),
    ):
        old = f"language_model.model.layers.{layer}.{attention}"

        def edit(header: Header, old: str = old, name: str = name) -> None:
            header[name] = header.pop(old)

        edit_header(shard(model, number), edit)
    message = refusal(model)
    expert = "layer 3 block_sparse_moe.experts.1.w1.weight_scale in model-00002-of-000004.safe"
    assert expert in message
    assert "repeated: layer 3" in message
    assert (
        "vision_tower.patch_embed.proj.weight in model-00001-of-000004.safetensors and" in message
    )
    assert "norm.weight in model-00002-of-000004.safetensors and model-00004" in message
    assert "lacks layer 0 self_attn.o_norm.weight" not in message
    assert "absent: layer 0 self_attn.o_norm.weight" in message


def test_wrong_dtypes_and_shapes(model: Path) -> None:
    layer = "language_model.model.layers."

    def first(header: Header) -> None:
        header[layer + "0.self_attn.q_proj.weight"]["dtype"] = "F16"
        header[layer + "0.self_attn.k_proj.weight"]["shape"] = [64, 256]
        header[layer + "0.self_attn.A_log"]["shape"] = [2, 16]
        header[layer + "0.self_attn.k_conv1d.weight"]["shape"] = [1, 128, 4]

    def second(header: Header) -> None:
        header[expert_prefix(1, 0) + EXPERT_PARTS[0]]["dtype"] = "I8"
        header[expert_prefix(1, 1) + EXPERT_PARTS[0]]["shape"] = [32, 96]

    edit_header(shard(model, 1), first)
    edit_header(shard(model, 2), second)
    message = refusal(model)
    for part in (
        "layer 0 self_attn.q_proj.weight is F16, wanted BF16 or F32",
        "layer 1 block_sparse_moe.experts.0.w1.weight_packed is I8, wanted U8",
        "layer 0 self_attn.k_proj.weight is [64, 256], wanted [128, 128]",
        "layer 0 self_attn.A_log is [2, 16], wanted [4]",
        "layer 0 self_attn.k_conv1d.weight is [1, 128, 4], wanted [128, 1, 4]",
        "experts.1.w1.weight_packed is [32, 96], wanted [96, 32]",
    ):
        assert part in message


def test_dimension_of_another_model(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(make_config(**SMALL, hidden_size=160)))
    message = refusal(model)
    assert "wrong shape: " in message and " more" in message and len(message) < 800


@pytest.mark.parametrize("value", [1.0, float("nan"), -1e-30])
def test_a_log_has_zeros_after_its_heads(model: Path, value: float) -> None:
    entry = read_header(shard(model, 1))["language_model.model.layers.0.self_attn.A_log"]
    assert entry.shape == (32,)

    def put(place: int, number: float) -> None:
        with shard(model, 1).open("r+b") as file:
            file.seek(entry.offset + 4 * place)
            file.write(np.float32(number).tobytes())

    put(3, value)
    put(31, -0.0)
    check_locations(model)
    put(4, value)
    assert refusal(model).endswith(
        "padding not zero: layer 0 self_attn.A_log after its first 4 elements"
    )


def test_everything_is_told_at_once(model: Path) -> None:
    os.truncate(shard(model, 1), shard(model, 1).stat().st_size - 7)
    shard(model, 2).unlink()
    rename(model, 3, "language_model.model.layers.3.self_attn.g_proj.weight", "odd")
    shutil.copy(shard(model, 4), model / "model.safetensors")
    message = refusal(model)
    for part in (
        "3 of 4 shards present",
        "missing: model-00002",
        "short: model-00001-of-000004.safetensors by 7 bytes",
        "not in the index: model.safetensors",
        "absent: layer 3 self_attn.g_proj.weight;",
        "unknown: odd in model-00003",
    ):
        assert part in message


def test_fingerprint_sees_names_sizes_headers_and_both_ends(model: Path) -> None:
    path = model / "model-big.safetensors"

    def write(data: bytes | bytearray, name: str = "a") -> dict[str, Any]:
        span = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
        text = json.dumps({name: span}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return fingerprint([path], zlib.crc32)["shards"][0]

    data = bytearray(3 * EDGE)
    before = write(data)
    assert before["name"] == path.name and before["size"] == path.stat().st_size
    assert before["first"] == before["last"] == zlib.crc32(bytes(EDGE))
    raw = path.read_bytes()
    assert before["header"] == zlib.crc32(raw[: len(raw) - len(data)])
    data[EDGE - 1] = 1
    assert {key for key, value in write(data).items() if value != before[key]} == {"first"}
    data[EDGE - 1], data[-EDGE] = 0, 1
    assert {key for key, value in write(data).items() if value != before[key]} == {"last"}
    data[-EDGE], data[EDGE] = 0, 1
    assert write(data) == before
    assert write(bytes(data), "b")["header"] != before["header"]
    small = write(b"xyz")
    assert small["first"] == small["last"] == zlib.crc32(b"xyz")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        fingerprint([path], zlib.crc32)


SPARSE = {
    "hidden_size": 7168, "num_hidden_layers": 9, "vocab_size": 163840, "intermediate_size": 33792,
    "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_heads": 96, "head_dim": 128,
    "num_experts": 896, "num_experts_per_token": 16, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "attn_res_block_size": 12,
}  # fmt: skip


def write_sparse(out: Path, data: dict[str, Any]) -> Config:
    """Files of the released size, headers real, data holes: one shard a layer."""
    config = parse_config(data, "x")
    shapes = expert_shapes(config)
    units: list[list[tuple[str, str, tuple[int, ...]]]] = []
    for layer in range(config.num_hidden_layers):
        units.append([(t.name, "BF16", t.shape) for t in layer_tensors(config, layer)])
        for expert in reversed(range(config.num_experts if config.is_moe(layer) else 0)):
            names = [expert_prefix(layer, expert) + part for part in EXPERT_PARTS]
            units[-1] += [(name, "U8", s) for name, s in zip(names, shapes, strict=True)]
    ends = (*head_tensors(config), embedding(config))
    units.append([(tensor.name, "BF16", tensor.shape) for tensor in ends])
    places = {}
    for number, unit in enumerate(units, 1):
        path, header, end = shard(out, number, len(units)), {}, 0
        for name, dtype, shape in unit:
            span = [end, end := end + prod(shape) * (2 if dtype == "BF16" else 1)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
            places[name] = path.name
        text = json.dumps(header, separators=(",", ":")).encode()  # as the library does
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + end)
    (out / index.FILE_NAME).write_text(json.dumps({"weight_map": places}, indent=1))
    (out / "config.json").write_text(json.dumps(data))
    return config


def test_released_dimensions_take_little_memory(tmp_path: Path) -> None:
    """A tenth of the released model: 43,000 expert tensors of true size, in files of holes."""
    write_sparse(tmp_path, make_config(**SPARSE))
    code = (
        "import sys; from pathlib import Path; from kimi_cli.checkpoint import Checkpoint\n"
        "from kimi_cli.config import load_config\n"
        "path = Path(sys.argv[1]); found = Checkpoint.open(path, load_config(path))\n"
        "assert found.experts.whole.sum() == 8 * 896 and sum(found.experts.sizes) == 17547264\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100_000  # KiB
