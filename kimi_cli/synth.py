"""Random checkpoints of any dimensions in the official format, for tests and benchmarks.

Two layouts of one model and seed hold the same weights. Files are written block by block: memory
does not grow with the model.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from kimi_cli.config import Config, parse_config
from kimi_cli.draw import VISION, Piece, generator, is_f32, stored_bytes
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.index import FILE_NAME
from kimi_cli.tensors import (
    EXPERT_PARTS,
    Tensor,
    embedding,
    expert_prefix,
    expert_shapes,
    head_tensors,
    layer_tensors,
)

BUILTIN = Path(__file__).parent / "builtin" / "tiny"
"""The built-in checkpoint: 13 layers, 12 experts, hidden size 128."""

SLICE: dict[str, int] = {
    "hidden_size": 7168, "num_hidden_layers": 4, "vocab_size": 8192, "intermediate_size": 33792,
    "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_heads": 96, "head_dim": 128,
    "num_experts": 32, "num_experts_per_token": 16, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "attn_res_block_size": 12,
}  # fmt: skip
"""Overrides for `make_config`: four layers of the released width, with few experts; 7.1 GiB."""

_SPECIALS = 256  # ids after the ranks
_SPECIAL_IDS = {  # places among the special ids
    "bos_token_id": 0, "eos_token_id": 2, "media_placeholder_token_id": 21, "pad_token_id": 255
}  # fmt: skip

Report = Callable[[int, int], None]


def make_config(**overrides: Any) -> dict[str, Any]:
    """A config.json in the official, nested form: the built-in checkpoint's, with `overrides`.

    A key goes wherever the config has it (`head_dim` into linear_attn_config, `eos_token_id` at
    both levels). Unless given: full attention is every fourth layer's and the last one's, the
    special ids are the vocabulary's last 256, and num_key_value_heads, num_experts_per_token and
    the vision tower's text_hidden_size follow. Raises UsageError for a key that no section has.
    """
    data: dict[str, Any] = json.loads((BUILTIN / "config.json").read_text("utf-8"))
    text, vision = data["text_config"], data["vision_config"]
    sections = (data, text, text["linear_attn_config"])
    for key in overrides:
        if not any(key in section for section in sections):
            raise UsageError(f"a K3 config has no key {key!r}")
    chosen = {**text, **overrides}
    layers, vocab = range(1, chosen["num_hidden_layers"] + 1), chosen["vocab_size"]
    full = [layer for layer in layers if layer % 4 == 0 or layer == len(layers)]
    derived = {
        "num_key_value_heads": chosen["num_attention_heads"],
        "num_experts_per_token": min(text["num_experts_per_token"], chosen["num_experts"]),
        "full_attn_layers": full,
        "kda_layers": [layer for layer in layers if layer not in full],
    }
    for key, place in _SPECIAL_IDS.items():
        derived[key] = min(max(vocab - _SPECIALS, 0) + place, vocab - 1)
    for key, value in {**derived, **overrides}.items():
        for section in sections:
            if key in section:
                section[key] = value
    vision["text_hidden_size"] = text["hidden_size"]
    return data


def write_checkpoint(
    out_dir: Path,
    config: dict[str, Any],
    seed: int,
    *,
    shards: int = 4,
    tokenizer: bool = False,
    scatter_experts: bool = False,
    scatter_trunk: bool = False,
    f32: Sequence[str] = (),
    bf16: Sequence[str] = (),
    conv_2d: bool = False,
    a_log_4d: bool = False,
    report: Report | None = None,
) -> None:
    """Writes config.json, `shards` shards and their index into `out_dir`, created if need be.

    `config` is a decoded config.json. `tokenizer` adds a small one (see `write_tokenizer`). The
    others depart from the official layout: the six tensors of every expert, or everything else,
    dealt out over all shards; names matching a pattern of `f32` or `bf16` stored so; conv weights
    as [channels, taps]; A_log as [1, 1, heads, 1]. `report` is called with bytes written and
    bytes in all.

    Raises ConfigError for the config, UsageError if `out_dir` already holds a shard or there are
    more shards than layers + 2, KimiError if a file cannot be written.
    """
    model = parse_config(config, "config")
    style = {"f32": f32, "bf16": bf16, "conv_2d": conv_2d, "a_log_4d": a_log_4d}
    units = [
        *(_layer_pieces(model, layer, seed, style) for layer in range(model.num_hidden_layers)),
        [_piece(tensor, style) for tensor in (*head_tensors(model), embedding(model))],
        [Piece(name, "BF16", shape, prod(shape)) for name, shape in VISION.items()],
    ]
    if not 1 <= shards <= len(units):
        raise UsageError(f"{shards} shards asked for, wanted 1 to {len(units)}")
    bins = [
        [piece for unit in units[len(units) * n // shards : len(units) * (n + 1) // shards]
         for piece in unit]
        for n in range(shards)
    ]  # fmt: skip
    bins = _scatter(bins, seed, scatter_experts, scatter_trunk)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if any(out_dir.glob("model*.safetensors")):
            raise UsageError(f"{out_dir} already holds a checkpoint")
        _write_json(out_dir / "config.json", config)
        if tokenizer:
            write_tokenizer(out_dir, model.vocab_size)
        _write_shards(out_dir, bins, model, seed, report)
    except OSError as error:
        raise KimiError(f"{out_dir} cannot be written: {error.strerror or error}") from None


def write_tokenizer(out_dir: Path, vocab_size: int) -> None:
    """Writes tiktoken.model and tokenizer_config.json for `vocab_size` ids.

    Ranks are the 256 bytes, then padding that ordinary text does not meet; the last 256 ids are
    special, under the released names. Raises UsageError for fewer than 512 ids.
    """
    ranks = vocab_size - _SPECIALS
    if ranks < 256:
        raise UsageError(f"a tokenizer needs at least 512 ids, found vocab_size {vocab_size}")
    tokens = [bytes([byte]) for byte in range(256)]
    width = 2 if ranks - 256 <= 1 << 16 else 3
    tokens += [n.to_bytes(width, "big") for n in range(ranks - 256)]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (out_dir / "tiktoken.model").write_text("".join(lines), "ascii")
    data = json.loads((BUILTIN / "tokenizer_config.json").read_text("utf-8"))
    named = data["added_tokens_decoder"]
    first = min(map(int, named))
    data["added_tokens_decoder"] = {
        str(int(key) - first + ranks): token for key, token in named.items()
    }
    _write_json(out_dir / "tokenizer_config.json", data)


def _layer_pieces(config: Config, layer: int, seed: int, style: dict[str, Any]) -> list[Piece]:
    """Official order: F32 by name, BF16 by name, then experts in no order of theirs."""
    pieces = [_piece(tensor, style) for tensor in layer_tensors(config, layer)]
    pieces.sort(key=lambda piece: (piece.dtype != "F32", piece.name))
    if config.is_moe(layer):
        shapes = expert_shapes(config)
        for expert in generator(seed, f"order {layer}").permutation(config.num_experts).tolist():
            prefix = expert_prefix(layer, expert)
            pieces += [
                Piece(prefix + part, "U8", shape, prod(shape))
                for part, shape in zip(EXPERT_PARTS, shapes, strict=True)
            ]
    return pieces


def _piece(tensor: Tensor, style: dict[str, Any]) -> Piece:
    dtype, shape = "F32" if is_f32(tensor.name) else "BF16", tensor.shape
    for stored in ("F32", "BF16"):
        if any(fnmatchcase(tensor.name, pattern) for pattern in style[stored.lower()]):
            dtype = stored
    if tensor.padded:
        shape = (tensor.size // 32 * 32 + 32,)
        if style["a_log_4d"]:
            shape = tensor.shapes[1]
    elif style["conv_2d"] and len(tensor.shapes) > 1:
        shape = tensor.shapes[1]
    return Piece(tensor.name, dtype, shape, tensor.size)


def _scatter(bins: list[list[Piece]], seed: int, experts: bool, trunk: bool) -> list[list[Piece]]:
    def moves(piece: Piece) -> bool:
        return experts if piece.dtype == "U8" else trunk

    loose = [piece for pieces in bins for piece in pieces if moves(piece)]
    dealt = [loose[n] for n in generator(seed, "scatter").permutation(len(loose))]
    return [
        [piece for piece in pieces if not moves(piece)] + dealt[n :: len(bins)]
        for n, pieces in enumerate(bins)
    ]


def _write_shards(
    out_dir: Path, bins: list[list[Piece]], config: Config, seed: int, report: Report | None
) -> None:
    total, done = sum(piece.length for pieces in bins for piece in pieces), 0
    weight_map: dict[str, str] = {}
    for number, pieces in enumerate(bins, 1):
        file_name = f"model-{number:05d}-of-{len(bins):06d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for piece in pieces:
            offsets = [end, end := end + piece.length]
            header[piece.name] = {
                "dtype": piece.dtype, "shape": piece.shape, "data_offsets": offsets
            }  # fmt: skip
            weight_map[piece.name] = file_name
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (out_dir / file_name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for piece in pieces:
                for block in stored_bytes(piece, config, seed):
                    done += file.write(block)
                    if report is not None:
                        report(done, total)
    _write_json(
        out_dir / FILE_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
