"""The smallest checkpoint with its trunk and tokenizer: made once, copied for every target."""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from kimi_cli.config import Config, parse_config
from kimi_cli.repack import repack
from kimi_cli.synth import make_config, write_checkpoint

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "num_heads": 2,
    "head_dim": 32,
}
CONFIG: Config = parse_config(make_config(**SIZES), "config")


@lru_cache(maxsize=1)
def _original() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    scratch = tempfile.TemporaryDirectory(prefix="kimi-fuzz-")
    model = Path(scratch.name) / "model"
    write_checkpoint(model, make_config(**SIZES), 1, shards=1, tokenizer=True)
    repack(model)
    return scratch, model


def model_at(directory: Path) -> Path:
    """A copy of the checkpoint, its trunk beside it, as `directory`; returns that."""
    shutil.copytree(_original()[1], directory)
    return directory


def original(name: str) -> bytes:
    """The bytes of one of its files; the trunk's are `kimi-trunk/...`."""
    return (_original()[1] / name).read_bytes()


SHARD = "model-00001-of-000001.safetensors"
INDEX = "model.safetensors.index.json"
