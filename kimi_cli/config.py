"""config.json, read strictly: refused by name for whatever is missing, mistyped or unsupported.

It never substitutes a default: a half-understood config is a different model.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from kimi_cli import schema
from kimi_cli.errors import ConfigError
from kimi_cli.jsonfile import parse_json, show

MAX_BYTES = 4 << 20
"""A config.json larger than this is refused unread; the released one has 6 KB."""


@dataclass(frozen=True)
class Config:
    """The text model's dimensions and constants, named as in config.json where it has a name.

    `mla_layers` holds zero-based layer numbers (the file's lists are one-based).
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    first_k_dense_replace: int
    rms_norm_eps: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    conv_size: int
    gate_lower_bound: float
    mla_layers: frozenset[int]
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int
    max_position_embeddings: int
    eos_token_id: int

    def is_mla(self, layer: int) -> bool:
        """Whether zero-based `layer` attends by gated latent attention; otherwise by KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether zero-based `layer` has a mixture of experts; otherwise a dense MLP."""
        return layer >= self.first_k_dense_replace


def load_config(model_dir: Path) -> Config:
    """The config of the checkpoint in `model_dir`.

    Raises ConfigError if config.json is absent, unreadable, larger than MAX_BYTES, not one JSON
    object in UTF-8 with unique keys, or refused by `parse_config`.
    """
    path = model_dir / "config.json"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        what = "is not a checkpoint" if model_dir.is_dir() else "is no directory"
        raise ConfigError(f"{path} is absent: {model_dir} {what}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes: it is no model config")
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise ConfigError(f"{path} is {error}") from None
    return parse_config(data, str(path))


def parse_config(data: object, path: str) -> Config:
    """The Config that `data`, a decoded config.json, describes; `path` only names it in errors.

    Raises ConfigError with everything that is wrong with it, in one sentence.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {show(data)}, wanted a JSON object")
    if other := schema.other_model(data):
        raise ConfigError(f"{path} describes {other}: kimi runs Kimi K3 only")
    problems = list(schema.problems(data))
    missing = [key for key, reason in problems if not reason]
    wrong = [f"{key} {reason}" for key, reason in problems if reason]
    if missing:
        wrong.insert(0, "missing " + ", ".join(missing))
    if wrong:
        raise ConfigError(f"{path}: {'; '.join(wrong)}")
    text = data["text_config"]
    linear = text["linear_attn_config"]
    return Config(
        **{key: text[key] for key in schema.TEXT_INTEGERS if key != "num_key_value_heads"},
        rms_norm_eps=float(text["rms_norm_eps"]),
        routed_scaling_factor=float(text["routed_scaling_factor"]),
        situ_beta=float(text["activation_situ_beta"]),
        situ_linear_beta=float(text["activation_situ_linear_beta"]),
        kda_num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_size=linear["short_conv_kernel_size"],
        gate_lower_bound=float(linear["gate_lower_bound"]),
        mla_layers=frozenset(layer - 1 for layer in linear["full_attn_layers"]),
        eos_token_id=data["eos_token_id"],
    )
