"""Targets over a checkpoint's own files: shard headers, index, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config
from kimi_cli.errors import CheckpointError, KimiError
from kimi_cli.findings import checkpoint_findings, tokenizer_findings
from kimi_cli.header import (
    Entry,
    ShortFile,
    _parsed,
    _written_plainly,
    parse_header,
    read_header,
)
from kimi_cli.index import scan_index, tally_index
from kimi_cli.plan import Request, smallest_plan
from kimi_cli.planning import Target as Planned
from kimi_cli.planning import plan_object, plan_text
from kimi_cli.tokenizer import TextStream, Tokenizer

from .model import CONFIG, INDEX, SHARD, model_at, original
from .target import Reader, Target, json_variants

MOST_FILE = 1 << 40
"""A sparse file is made no larger."""
TEXT = "Hello, wörld! 你好 \n\n 123 <|open|>"


def write_sparse(path: Path, text: bytes) -> int:
    """Writes a safetensors file with the header `text`, as long as its tensors say where that can
    be; returns its size."""
    raw = len(text).to_bytes(8, "little") + text
    size = len(raw)
    try:
        parse_header(raw, size, str(path))
    except ShortFile as error:
        if error.missing <= MOST_FILE:
            size += error.missing
    except CheckpointError:
        pass
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(size)
    return size


def check_inside(entries: Iterable[Entry], size: int) -> None:
    """That tensors lie within a file of `size` bytes, and none over another."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.length)):
        assert end <= entry.offset and entry.length >= 0
        end = entry.offset + entry.length
    assert end <= size


def header(folder: Path) -> Reader:
    """The data as a whole file, then as the header of a file as long as its tensors say; and what
    is read without a JSON parser is what one reads."""
    path = folder / "a.safetensors"

    def read(data: bytes) -> None:
        with suppress(KimiError, ValueError):
            table = _written_plainly(data, 8, "a")
            assert table is None or table == _parsed(data, 8, "a")
        path.write_bytes(data)
        with suppress(KimiError):
            check_inside(read_header(path).values(), len(data))
        size = write_sparse(path, data)
        check_inside(read_header(path).values(), size)

    return read


def _header_text(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")].rstrip(b" ")


def header_seeds() -> list[bytes]:
    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":'
    text += b'[0,12]},"b":{"dtype":"U8","shape":[4],"data_offsets":[12,16]}}'
    far = (1 << 63) - 1
    return [
        *json_variants(text),
        len(text).to_bytes(8, "little") + text + bytes(16),
        (10**18).to_bytes(8, "little") + text,
        text.replace(b"[12,16]", b"[11,15]"),
        text.replace(b"[12,16]", b"[0,4]"),
        text.replace(b"[12,16]", b"[13,17]"),
        text.replace(b"[12,16]", b"[16,12]"),
        text.replace(b'"b"', b'"a"'),
        text.replace(b'"b"', b'"\\u0061"'),
        text.replace(b'"b"', b'"\\ud800"'),
        text.replace(b"[4]", b"[4,1,1,1,1,1,1,1,1]"),
        text.replace(b"[4]", b"[0,1000000000000000000]"),
        f'{{"a":{{"dtype":"U8","shape":[{far}],"data_offsets":[0,{far}]}},'
        f'"b":{{"dtype":"U8","shape":[0],"data_offsets":[{far},{far}]}}}}'.encode(),
    ]


def index(folder: Path) -> Reader:
    """The data as an index: what is accepted is what a plain JSON parser reads."""
    path = folder / INDEX

    def read(data: bytes) -> None:
        path.write_bytes(data)
        pairs = [pair for run in scan_index(path) for pair in run]
        tallies = tally_index(path)
        assert sum(count for count, _ in tallies.values()) == len(pairs)
        assert dict(pairs) == json.loads(data)["weight_map"]

    return read


def index_seeds() -> list[bytes]:
    small = {"a": "model-00001-of-000002.safetensors", "b": "model-00002-of-000002.safetensors"}
    whole = json.dumps({"metadata": {"total_size": 1}, "weight_map": small}).encode()
    return [
        *json_variants(whole),
        original(INDEX)[:3000] + b'"x": "y"}}',
        b'{"weight_map": {"a": "f", "a": "g"}}',
        b'{"weight_map": {"a": "f",}}',
        b'{"weight_map": {"a": {"b": "c"}}}',
        b'{"weight_map": {"a}": "f"}}',
        b'{"x": {"weight_map": {"a": "f"}}, "weight_map": {}}',
        b'{"weight_map": {"\\u0061": "f", "\\ud800": "\\udc00"}}',
        b'{"weight_map" \n :\t{}}',
        b'{"weight_map": [] }',
    ]


def config(folder: Path) -> Reader:
    """The data as config.json, and what `kimi plan` makes of it where it is accepted."""

    def read(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        load_config(folder)
        planned = Planned.open(folder, None)
        request = Request(16, 16, 1, 1)
        plan = smallest_plan(planned.config, planned.units, request, {}, True)
        assert plan_text(plan, planned) and json.dumps(plan_object(plan))

    return read


def config_seeds() -> list[bytes]:
    plain = json.dumps(json.loads(original("config.json")), separators=(",", ":")).encode()
    seeds = json_variants(plain)
    for key, value in (
        ("hidden_size", 1 << 20),
        ("num_hidden_layers", 1 << 10),
        ("num_attention_heads", 1 << 14),
        ("v_head_dim", 1 << 16),
        ("moe_intermediate_size", 1 << 20),
        ("num_experts", 0),
        ("vocab_size", 1.5),
        ("rms_norm_eps", 1),
        ("linear_attn_config", None),
        ("quantization_config", {}),
        ("model_type", "kimi_k2"),
    ):
        changed: dict[str, Any] = json.loads(plain)
        changed["text_config"][key] = value
        seeds.append(json.dumps(changed, separators=(",", ":")).encode())
    largest: dict[str, Any] = json.loads(plain)
    text = largest["text_config"]
    text.update(num_hidden_layers=1024, num_attention_heads=1 << 14, num_key_value_heads=1 << 14)
    text.update(hidden_size=1 << 20, v_head_dim=1 << 16, vocab_size=1 << 24)
    text.update(attn_res_block_size=1 << 10, intermediate_size=1 << 22)
    text["linear_attn_config"].update(
        num_heads=1 << 14,
        head_dim=1 << 10,
        full_attn_layers=list(range(1, 513)),
        kda_layers=list(range(513, 1025)),
    )
    return [*seeds, json.dumps(largest, separators=(",", ":")).encode()]


def tokenizer(folder: Path) -> Reader:
    """The data as tiktoken.model, a zero byte and tokenizer_config.json."""

    def read(data: bytes) -> None:
        ranks, _, named = data.partition(b"\0")
        (folder / "tiktoken.model").write_bytes(ranks)
        (folder / "tokenizer_config.json").write_bytes(named)
        tokenizer_findings(folder)
        loaded = Tokenizer.load(folder)
        ids = loaded.encode(TEXT)
        assert loaded.decode_bytes(ids) == TEXT.encode()
        assert not any(map(loaded.is_special, ids))
        stream = TextStream(loaded)
        assert "".join(map(stream.push, ids)) + stream.finish() == TEXT

    return read


def tokenizer_seeds() -> list[bytes]:
    ranks = original("tiktoken.model")
    named = b'{"added_tokens_decoder":{"256":{"content":"[BOS]"},"258":{"content":"[EOS]"}}}'
    both = ranks + b"\0" + named
    extra = ranks + b"YWI= 256\nIGE= 257\n"
    return [
        both,
        extra + b"\0" + named.replace(b"256", b"258"),
        *(ranks + b"\0" + text for text in json_variants(named)),
        ranks.replace(b" 255\n", b" 254\n") + b"\0" + named,
        ranks.replace(b" 255\n", b" 9999999999\n") + b"\0" + named,
        ranks.replace(b" 255\n", b" 1048575\n") + b"\0" + named,
        ranks.replace(b"AA== 0\n", b"") + b"\0" + named,
        ranks.replace(b"AA== 0\n", b"!! 0\n") + b"\0" + named,
        ranks + b"=\0" + named,
        ranks + b"A" * 20000 + b" 256\n\0" + named,
        both.replace(b"[EOS]", b"[BOS]"),
        both.replace(b"[EOS]", b""),
        both.replace(b"[EOS]", b"x" * 3000),
        both.replace(b"[EOS]", b"\\ud800"),
        both.replace(b"[EOS]", b"(?P<a>x)*+{9}\\\\Q"),
    ]


def checkpoint(folder: Path) -> Reader:
    """The data as the header of the only shard of a whole checkpoint."""
    model = model_at(folder / "model")
    (model / INDEX).unlink()
    (model / SHARD).unlink()
    path = model / "model.safetensors"

    def read(data: bytes) -> None:
        size = write_sparse(path, data)
        checkpoint_findings(model, CONFIG)
        checkpoint_findings(model, None)
        found = Checkpoint.open(model, CONFIG)
        for place in found.tensors.values():
            assert 0 < place.offset <= place.offset + place.length <= size
        table = found.experts
        inside = table.offset + table.sizes <= size
        assert (inside | (table.shard < 0)).all()

    return read


def checkpoint_seeds() -> list[bytes]:
    text = _header_text(original(SHARD))
    entries = json.loads(text)
    names = [name for name in entries if ".experts." in name]
    moved = {**entries, names[0]: {**entries[names[0]], "shape": [32, 17]}}
    gone = {name: entry for name, entry in entries.items() if name != names[0]}
    far = (1 << 63) - 1
    huge = {
        "vision_tower.x": {"dtype": "U8", "shape": [far], "data_offsets": [0, far]},
        names[0]: {"dtype": "U8", "shape": [0], "data_offsets": [far, far]},
    }
    wide = {
        name: {**entry, "shape": [far // 2, 2]} if name == names[0] else entry
        for name, entry in entries.items()
    }
    cases = (moved, gone, huge, wide)
    return [*json_variants(text), *(json.dumps(c, separators=(",", ":")).encode() for c in cases)]


TARGETS = {
    "header": Target(header, header_seeds),
    "index": Target(index, index_seeds),
    "config": Target(config, config_seeds),
    "tokenizer": Target(tokenizer, tokenizer_seeds),
    "checkpoint": Target(checkpoint, checkpoint_seeds),
}
