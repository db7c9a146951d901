"""What a Kimi K3 config.json must hold, as tables, with the checks that use them. No I/O.

Every check yields problems and stops at none, so that all of them are told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from kimi_cli.jsonfile import shortlist, show

Object = dict[str, Any]
Problem = tuple[str, str]
"""A dotted key, then what is wrong with its value; nothing where the key is missing."""

TEXT_INTEGERS = {  # key: (smallest, largest) value accepted
    "hidden_size": (1, 1 << 20),
    "num_hidden_layers": (1, 1 << 10),
    "vocab_size": (1, 1 << 24),
    "intermediate_size": (1, 1 << 22),
    "first_k_dense_replace": (0, 1 << 10),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "q_lora_rank": (1, 1 << 20),
    "kv_lora_rank": (1, 1 << 13),
    "qk_nope_head_dim": (1, 1 << 16),
    "qk_rope_head_dim": (1, 1 << 16),
    "v_head_dim": (1, 1 << 16),
    "num_experts": (1, 1 << 12),
    "num_experts_per_token": (1, 1 << 8),
    "num_shared_experts": (1, 1 << 10),
    "moe_intermediate_size": (1, 1 << 20),
    "routed_expert_hidden_size": (1, 1 << 20),
    "attn_res_block_size": (1, 1 << 20),
    "max_position_embeddings": (1, 1 << 32),
}
MOST_WEIGHTS = 1 << 40
"""Outside routed experts, every layer counted as if it had all that any layer can have: seven times
the released model's. Beyond, the tables of where weights lie would take more than the weights."""
SNAPSHOTS = 255
"""Residual blocks that one mix can weigh besides the running sum."""
TEXT_NUMBERS = {
    "rms_norm_eps": (1e-30, 1.0),
    "routed_scaling_factor": (1e-6, 1e6),
    "activation_situ_beta": (1e-6, 1e6),
    "activation_situ_linear_beta": (1e-6, 1e6),
}
TEXT_SWITCHES: Mapping[str, object] = {  # key: the one value implemented
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "hidden_act": "situ",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
LINEAR_INTEGERS = {
    "num_heads": (1, 1 << 14),
    "head_dim": (1, 1 << 10),
    "short_conv_kernel_size": (1, 64),
}
LINEAR_NUMBERS = {"gate_lower_bound": (-1e6, -1e-6)}
LINEAR_SWITCHES: Mapping[str, object] = {"use_full_rank_gate": True}
_LAYER_LISTS = ("full_attn_layers", "kda_layers")
_TOP_SWITCHES: Mapping[str, object] = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
}
_TOP_INTEGERS = {
    key: (0, (1 << 31) - 1)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")
}
_QUANT_SWITCHES: Mapping[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
}
_QUANT_WEIGHTS: Mapping[str, object] = {
    "num_bits": 4,
    "group_size": 32,
    "type": "float",
    "strategy": "group",
    "symmetric": True,
}

_OTHER_MODELS = {  # model_type or architecture, lower case, beginning with ...
    "kimi_k25": "Kimi K2.5",
    "kimik25": "Kimi K2.5",
    "kimi_k2": "Kimi K2",
    "kimi_linear": "Kimi Linear (48B)",
    "kimilinear": "Kimi Linear (48B)",
    "kimi_vl": "Kimi-VL",
    "kimivl": "Kimi-VL",
    "deepseek_v3": "DeepSeek V3/R1",
    "deepseekv3": "DeepSeek V3/R1",
    "deepseek": "a DeepSeek model",
    "llama": "a Llama model",
    "qwen": "a Qwen model",
    "mistral": "a Mistral model",
    "mixtral": "a Mixtral model",
    "gemma": "a Gemma model",
    "phi": "a Phi model",
    "gpt_oss": "gpt-oss",
    "gptoss": "gpt-oss",
    "glm": "a GLM model",
    "minimax": "a MiniMax model",
}


def other_model(data: Object) -> str | None:
    """What `data` describes where it names a model that is not K3; None for K3 or no name."""
    kind, architectures = data.get("model_type"), data.get("architectures")
    names = [kind] if isinstance(kind, str) else []
    if isinstance(architectures, list):
        names += [name for name in architectures if isinstance(name, str)]
    if not names or any(name.lower().startswith(("kimi_k3", "kimik3")) for name in names):
        return None
    for name in names:
        for start, model in _OTHER_MODELS.items():
            if name.lower().startswith(start):
                return f"{model}, not Kimi K3 ({show(name)})"
    return f"another model ({show(names[0])})"


def problems(data: Object) -> Iterator[Problem]:
    """Everything that keeps `data`, a decoded config.json, from being a model this program runs."""
    text = section(data, "text_config")
    linear = section(text, "linear_attn_config")
    yield from _switches(data, _TOP_SWITCHES, "")
    yield from _numbers(data, _TOP_INTEGERS, int, "")
    if "tie_word_embeddings" in data:
        yield from _switches(data, {"tie_word_embeddings": False}, "")
    if not isinstance(data.get("text_config"), dict):
        yield _not_object(data, "text_config", "")
        return
    yield from _numbers(text, TEXT_INTEGERS, int, "text_config.")
    yield from _numbers(text, TEXT_NUMBERS, float, "text_config.")
    yield from _switches(text, TEXT_SWITCHES, "text_config.")
    yield from _relations(text)
    if isinstance(text.get("linear_attn_config"), dict):
        prefix = "text_config.linear_attn_config."
        yield from _numbers(linear, LINEAR_INTEGERS, int, prefix)
        yield from _numbers(linear, LINEAR_NUMBERS, float, prefix)
        yield from _switches(linear, LINEAR_SWITCHES, prefix)
        yield from _layers(linear, text.get("num_hidden_layers"), prefix)
        yield from _weights(text, linear)
    else:
        yield _not_object(text, "linear_attn_config", "text_config.")
    yield from _quantization(text, "text_config.")
    if "quantization_config" in data:
        yield from _quantization(data, "")


def section(data: Object, key: str) -> Object:
    """The object under `key`; an empty one where there is none."""
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _not_object(data: Object, key: str, prefix: str) -> Problem:
    reason = f"is {show(data[key])}, wanted an object with its keys" if key in data else ""
    return prefix + key, reason


def _numbers(
    data: Object, table: Mapping[str, tuple[float, float]], kind: type, prefix: str
) -> Iterator[Problem]:
    noun = "an integer" if kind is int else "a number"
    for key, (low, high) in table.items():
        value = data.get(key)
        if key not in data:
            yield prefix + key, ""
        elif type(value) not in (int, kind) or not isinstance(value, int | float):
            yield prefix + key, f"is {show(value)}, wanted {noun}"
        elif not low <= value <= high:  # NaN and the infinities fail this too
            yield prefix + key, f"is {show(value)}, wanted {low} to {high}"


def _switches(data: Object, table: Mapping[str, object], prefix: str) -> Iterator[Problem]:
    for key, wanted in table.items():
        value = data.get(key)
        if key not in data:
            yield prefix + key, ""
        elif type(value) is not type(wanted) or value != wanted:
            yield prefix + key, f"is {show(value)}, only {show(wanted)} is implemented"


def _relations(text: Object) -> Iterator[Problem]:
    def number(key: str) -> int | None:
        value = text.get(key)
        return value if type(value) is int else None

    def above(key: str, limit: str) -> Iterator[Problem]:
        value, most = number(key), number(limit)
        if value is not None and most is not None and value > most:
            yield f"text_config.{key}", f"is {value}, more than {limit} {most}"

    yield from above("num_experts_per_token", "num_experts")
    yield from above("first_k_dense_replace", "num_hidden_layers")
    layers, block = number("num_hidden_layers"), number("attn_res_block_size")
    if layers is not None and block and -(-layers // block) > SNAPSHOTS:
        yield "text_config.attn_res_block_size", f"is {block}, which makes over {SNAPSHOTS} blocks"
    heads, shared = number("num_attention_heads"), number("num_key_value_heads")
    if heads is not None and shared is not None and heads != shared:
        yield "text_config.num_key_value_heads", f"is {shared}, wanted num_attention_heads {heads}"
    for key in ("moe_intermediate_size", "routed_expert_hidden_size"):
        value = number(key)
        if value is not None and value % 32:
            yield f"text_config.{key}", f"is {value}, wanted a multiple of 32 (MXFP4 groups)"


def _weights(text: Object, linear: Object) -> Iterator[Problem]:
    """Whether the matrices are of a size that any machine has; nothing where one is not known."""
    sizes = {**text, **linear}
    if any(type(sizes.get(key)) is not int for key in (*TEXT_INTEGERS, *LINEAR_INTEGERS)):
        return
    n = sizes.__getitem__
    heads, kda = n("num_attention_heads"), n("num_heads") * n("head_dim")
    key = n("qk_nope_head_dim") + n("qk_rope_head_dim")
    shared = n("num_shared_experts") * n("moe_intermediate_size")
    of_hidden = (
        n("q_lora_rank") + n("kv_lora_rank") + key + 2 * heads * n("v_head_dim")
        + 5 * kda + n("head_dim") + n("num_heads")
        + n("num_experts") + 2 * n("routed_expert_hidden_size") + 3 * shared
        + 3 * n("intermediate_size")
    )  # fmt: skip
    layer = n("hidden_size") * of_hidden + kda * n("head_dim")
    layer += heads * (key * n("q_lora_rank") + (key + n("v_head_dim")) * n("kv_lora_rank"))
    found = n("num_hidden_layers") * layer + 2 * n("vocab_size") * n("hidden_size")
    if found > MOST_WEIGHTS:
        yield "text_config", f"makes over {MOST_WEIGHTS} weights outside routed experts"


def _layers(linear: Object, count: object, prefix: str) -> Iterator[Problem]:
    """Whether the two one-based lists cover 1..count exactly once."""
    lists = []
    for key in _LAYER_LISTS:
        value = linear.get(key)
        if key not in linear:
            yield prefix + key, ""
        elif not isinstance(value, list) or any(type(layer) is not int for layer in value):
            yield prefix + key, f"is {show(value)}, wanted a list of layer numbers"
        else:
            lists.append(value)
    if len(lists) < len(_LAYER_LISTS) or type(count) is not int:
        return
    if not 1 <= count <= TEXT_INTEGERS["num_hidden_layers"][1]:
        return
    found = Counter(chain.from_iterable(lists))
    wanted = range(1, count + 1)
    wrong = {
        "twice or more": sorted(layer for layer, times in found.items() if times > 1),
        "in neither": [layer for layer in wanted if layer not in found],
        f"outside 1..{count}": sorted(layer for layer in found if layer not in wanted),
    }
    said = [f"{shortlist(map(show, layers))} {what}" for what, layers in wrong.items() if layers]
    if said:
        yield f"{prefix}{' and '.join(_LAYER_LISTS)}", f"have layer {', '.join(said)}"


def _quantization(data: Object, prefix: str) -> Iterator[Problem]:
    quant = section(data, "quantization_config")
    if not isinstance(data.get("quantization_config"), dict):
        yield _not_object(data, "quantization_config", prefix)
        return
    prefix += "quantization_config."
    yield from _switches(quant, _QUANT_SWITCHES, prefix)
    ignore = quant.get("ignore")
    if "ignore" not in quant:
        yield prefix + "ignore", ""
    elif not isinstance(ignore, list) or any(not isinstance(name, str) for name in ignore):
        yield prefix + "ignore", f"is {show(ignore)}, wanted a list of names"
    if quant.get("kv_cache_scheme") is not None:
        yield prefix + "kv_cache_scheme", "is set, only null is implemented"
    groups = section(quant, "config_groups")
    if not groups:
        yield _not_object(quant, "config_groups", prefix)
    for name, group in groups.items():
        here = f"{prefix}config_groups.{show(name)[1:-1]}."
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            yield here + "weights", ""
            continue
        if "format" in group:
            yield from _switches(group, {"format": _QUANT_SWITCHES["format"]}, here)
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                yield here + key, "is set, only null is implemented"
        yield from _switches(group["weights"], _QUANT_WEIGHTS, here + "weights.")
