"""config.json: every refusal by name, all of them at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli import schema
from kimi_cli.config import MAX_BYTES, Config, load_config, parse_config
from kimi_cli.errors import ConfigError, Exit
from kimi_cli.findings import read_config
from kimi_cli.native import lib
from kimi_cli.synth import BUILTIN, make_config

OFFICIAL: dict[str, Any] = json.loads((BUILTIN / "config.json").read_text())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def refusal(edit: Callable[[dict[str, Any]], object]) -> str:
    data = deepcopy(OFFICIAL)
    edit(data)
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "DIR/config.json")
    assert caught.value.exit_code == Exit.CHECKPOINT
    message = str(caught.value)
    assert message.startswith("DIR/config.json") and "\n" not in message
    return message


def section(data: dict[str, Any], path: str) -> dict[str, Any]:
    for key in filter(None, path.split(".")):
        data = data[key]
    return data


LINEAR = "text_config.linear_attn_config"
QUANT = "text_config.quantization_config"
WEIGHTS = QUANT + ".config_groups.group_0.weights"
REQUIRED = [
    *(("", key) for key in ("architectures", "model_type", "text_config")),
    *(("", f"{key}_token_id") for key in ("bos", "eos", "pad", "media_placeholder")),
    *(("text_config", key) for key in schema.TEXT_INTEGERS),
    *(("text_config", key) for key in schema.TEXT_NUMBERS),
    *(("text_config", key) for key in schema.TEXT_SWITCHES),
    ("text_config", "linear_attn_config"),
    ("text_config", "quantization_config"),
    *((LINEAR, key) for key in OFFICIAL["text_config"]["linear_attn_config"]),
    *((QUANT, key) for key in ("quant_method", "format", "ignore", "config_groups")),
    *((WEIGHTS, key) for key in ("num_bits", "group_size", "type", "strategy", "symmetric")),
]
WRONG_VALUES = [
    ("text_config", "mla_use_nope", False),
    ("text_config", "mla_use_output_gate", False),
    ("text_config", "latent_moe_use_norm", False),
    ("text_config", "moe_renormalize", False),
    ("text_config", "moe_renormalize", 1),
    ("text_config", "moe_router_activation_func", "softmax"),
    ("text_config", "moe_layer_freq", 2),
    ("text_config", "num_expert_group", 8),
    ("text_config", "topk_group", 4),
    ("text_config", "topk_group", True),
    ("text_config", "topk_method", "greedy"),
    ("text_config", "hidden_act", "silu"),
    ("text_config", "tie_word_embeddings", True),
    ("", "tie_word_embeddings", True),
    ("text_config", "num_nextn_predict_layers", 1),
    ("text_config", "num_key_value_heads", 2),
    ("text_config", "num_experts_per_token", 13),
    ("text_config", "first_k_dense_replace", 14),
    ("text_config", "first_k_dense_replace", -1),
    ("text_config", "moe_intermediate_size", 80),
    ("text_config", "routed_expert_hidden_size", 72),
    ("text_config", "hidden_size", 0),
    ("text_config", "hidden_size", -128),
    ("text_config", "hidden_size", 1 << 40),
    ("text_config", "hidden_size", 10**400),
    ("text_config", "num_hidden_layers", 100_000),
    ("text_config", "rms_norm_eps", float("nan")),
    ("text_config", "rms_norm_eps", 0),
    ("text_config", "routed_scaling_factor", float("inf")),
    ("text_config", "activation_situ_beta", -4.0),
    ("text_config", "activation_situ_linear_beta", 10**400),
    ("text_config", "model_type", "kimi_linear_2"),
    ("text_config", "architectures", ["Other"]),
    (LINEAR, "use_full_rank_gate", False),
    (LINEAR, "gate_lower_bound", None),
    (LINEAR, "gate_lower_bound", 0.0),
    (LINEAR, "short_conv_kernel_size", 0),
    (QUANT, "format", "pack-quantized"),
    (QUANT, "quant_method", "fp8"),
    (QUANT, "kv_cache_scheme", {"num_bits": 8}),
    (QUANT, "config_groups", {}),
    (QUANT + ".config_groups.group_0", "format", "nvfp4-pack-quantized"),
    (QUANT + ".config_groups.group_0", "input_activations", {"num_bits": 8}),
    (WEIGHTS, "num_bits", 8),
    (WEIGHTS, "group_size", 16),
    ("", "eos_token_id", [514]),
    ("", "eos_token_id", -1),
]
OTHER_MODELS = [
    ("deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek V3/R1"),
    ("kimi_k2", "DeepseekV3ForCausalLM", "Kimi K2"),
    ("kimi_k25", "KimiK25ForConditionalGeneration", "Kimi K2.5"),
    ("kimi_linear", "KimiLinearForCausalLM", "Kimi Linear (48B)"),
    ("llama", "LlamaForCausalLM", "a Llama model"),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "a Qwen model"),
    (None, "DeepseekV3ForCausalLM", "DeepSeek V3/R1"),
    ("mamba9", None, 'another model ("mamba9")'),
]


def test_builtin_config_is_read_whole() -> None:
    config = load_config(BUILTIN)
    assert config == Config(
        hidden_size=128,
        num_hidden_layers=13,
        vocab_size=768,
        intermediate_size=160,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        kda_num_heads=4,
        kda_head_dim=32,
        conv_size=4,
        gate_lower_bound=-5.0,
        mla_layers=frozenset({3, 7, 11, 12}),
        num_experts=12,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=96,
        routed_expert_hidden_size=64,
        routed_scaling_factor=1.0,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block_size=3,
        max_position_embeddings=1048576,
        eos_token_id=514,
    )
    assert [config.is_moe(layer) for layer in (0, 1, 12)] == [False, True, True]


def test_block12_config_differs_in_one_place() -> None:
    data = json.loads((BUILTIN.parent / "config_block12.json").read_text())
    assert parse_config(data, "x").attn_res_block_size == 12


def test_integers_do_for_numbers() -> None:
    data = deepcopy(OFFICIAL)
    data["text_config"]["linear_attn_config"]["gate_lower_bound"] = -5
    data["text_config"]["routed_scaling_factor"] = 2
    config = parse_config(data, "x")
    assert isinstance(config.gate_lower_bound, float) and config.gate_lower_bound == -5.0
    assert isinstance(config.routed_scaling_factor, float)


@pytest.mark.parametrize("dense", [0, 13])
def test_any_number_of_layers_may_be_dense(dense: int) -> None:
    data = deepcopy(OFFICIAL)
    data["text_config"]["first_k_dense_replace"] = dense
    assert parse_config(data, "x").first_k_dense_replace == dense


@pytest.mark.parametrize(("where", "key"), REQUIRED)
def test_missing_key_is_named(where: str, key: str) -> None:
    message = refusal(lambda data: section(data, where).pop(key))
    assert message == f"DIR/config.json: missing {where}{'.' if where else ''}{key}"


@pytest.mark.parametrize(("where", "key"), REQUIRED)
@pytest.mark.parametrize("value", [True, False, None, "12", [], {}, 1.5, float("nan")])
def test_mistyped_key_is_named(where: str, key: str, value: object) -> None:
    kept = section(OFFICIAL, where)[key]
    well_typed = type(value) is type(kept) and type(kept) in (bool, float)
    if well_typed or (key == "ignore" and value == []):
        return
    message = refusal(lambda data: section(data, where).update({key: value}))
    assert key in message


@pytest.mark.parametrize(("where", "key", "value"), WRONG_VALUES)
def test_unsupported_value_is_named(where: str, key: str, value: object) -> None:
    message = refusal(lambda data: section(data, where).update({key: value}))
    assert f"{where}.{key}".lstrip(".") in message and len(message) < 220


def test_everything_is_told_at_once() -> None:
    def edit(data: dict[str, Any]) -> None:
        text = data["text_config"]
        del text["hidden_size"], text["linear_attn_config"]["head_dim"]
        text.update(vocab_size="x", topk_group=2)
        text["linear_attn_config"]["kda_layers"] = [1]

    message = refusal(edit)
    for part in (
        "missing text_config.hidden_size, text_config.linear_attn_config.head_dim",
        'vocab_size is "x", wanted an integer',
        "topk_group is 2, only 1 is implemented",
        "2, 3, 5, 6, 7, 9 and 2 more in neither",
    ):
        assert part in message


@pytest.mark.parametrize("name", ["text_config", LINEAR, QUANT])
def test_an_empty_section_lacks_each_of_its_keys(name: str) -> None:
    message = refusal(lambda data: section(data, name).clear())
    for where, key in REQUIRED:
        if where == name:
            assert f"{where}.{key}" in message


@pytest.mark.parametrize(
    ("full", "said"),
    [
        ([4, 8, 12], "layer 13 in neither"),
        ([4, 8, 12, 13, 13], "layer 13 twice or more"),
        ([3, 4, 8, 12, 13], "layer 3 twice or more"),
        ([4, 8, 12, 13, 14], "layer 14 outside 1..13"),
        ([0, 4, 8, 12, 13], "layer 0 outside 1..13"),
    ],
)
def test_layer_lists_cover_every_layer_once(full: list[int], said: str) -> None:
    message = refusal(lambda data: section(data, LINEAR).update(full_attn_layers=full))
    assert "full_attn_layers and kda_layers have " + said in message


@pytest.mark.parametrize(("kind", "architecture", "name"), OTHER_MODELS)
def test_other_models_are_named(kind: str | None, architecture: str | None, name: str) -> None:
    data = {"hidden_size": 1, "model_type": kind, "architectures": [architecture]}
    with pytest.raises(ConfigError) as caught:
        parse_config({key: value for key, value in data.items() if value}, "c")
    assert str(caught.value).startswith(f"c describes {name}")
    assert "kimi runs Kimi K3 only" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "holds [], wanted a JSON object"),
        (b"null", "holds null, wanted a JSON object"),
        (b'{"a": 1, "a": 2}', 'giving the key "a" twice'),
        (b'{"text_config": {"x": 1, "x": 1}}', 'giving the key "x" twice'),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "holding a number of too many digits"),
        (b" " * (MAX_BYTES + 1), "is larger than"),
    ],
)
def test_file_that_is_no_config(tmp_path: Path, raw: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert said in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is absent: .* is not a checkpoint"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="is no directory"):
        load_config(tmp_path / "none")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_config(tmp_path)
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")  # which nobody will ever write to
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_config(tmp_path)


@settings(deadline=None)
@given(JSON)
def test_any_json_is_read_or_refused(data: object) -> None:
    with pytest.raises(ConfigError):
        parse_config(data, "x")


@settings(deadline=None)
@given(st.sampled_from(REQUIRED), JSON)
def test_any_value_of_a_key_is_read_or_refused(place: tuple[str, str], value: object) -> None:
    data = deepcopy(OFFICIAL)
    section(data, place[0])[place[1]] = value
    try:
        parse_config(data, "x")
    except ConfigError as error:
        str(error).encode("ascii")


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(ConfigError):
        load_config(folder)


def test_bounds_are_those_of_the_kernels() -> None:
    assert schema.TEXT_INTEGERS["kv_lora_rank"][1] == lib.KIMI_MAX_RANK
    assert schema.TEXT_INTEGERS["num_experts_per_token"][1] == lib.KIMI_MAX_TOP
    assert schema.LINEAR_INTEGERS["head_dim"][1] == lib.KIMI_MAX_DIM
    assert schema.LINEAR_INTEGERS["short_conv_kernel_size"][1] == lib.KIMI_MAX_TAPS
    assert schema.SNAPSHOTS + 1 == lib.KIMI_MAX_SOURCES


def test_a_trunk_beyond_all_disks_is_refused() -> None:
    """Its plan would list a thousand million blocks."""
    data = deepcopy(OFFICIAL)
    data["text_config"].update(num_attention_heads=1 << 14, num_key_value_heads=1 << 14)
    data["text_config"].update(v_head_dim=1 << 16, hidden_size=1 << 20)
    with pytest.raises(ConfigError, match="makes over 1099511627776 weights outside routed"):
        parse_config(data, "config.json")


def test_too_many_residual_blocks_are_refused() -> None:
    data = make_config(num_hidden_layers=300, attn_res_block_size=1)
    with pytest.raises(ConfigError, match="attn_res_block_size is 1, which makes over 255 blocks"):
        parse_config(data, "config.json")
