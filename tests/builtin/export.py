"""A trained model as a checkpoint in the official format, with its packed trunk.

    python -m tests.builtin.export DIR OUT      after tests.builtin.evaluate, for the model card

Layout as the released one's: each layer's tensors, float32 first, then its experts with their six
tensors back to back; embedding and head in the last shard; no vision tower.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kimi_cli.repack import LOCK, repack
from tests.builtin.card import fill
from tests.builtin.quantise import is_expert, is_float32, mxfp4_codes
from tests.builtin.train import BATCH, Run

SHARDS = 4
A_LOG_LENGTH = 32
"""A_log is stored longer than its heads, as in the released checkpoint; the rest is zeros."""

_PREFIX = "language_model."
_BIAS = 127

Piece = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype, shape and bytes of one tensor."""


def export(run: Run, out_dir: Path) -> None:
    """Writes the checkpoint of `run` and its trunk into `out_dir`, which must not exist."""
    out_dir.mkdir(parents=True)
    text = json.dumps(run.config, indent=1) + "\n"
    (out_dir / "config.json").write_text(text, "utf-8")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(run.directory / name, out_dir / name)
    write_shards(out_dir, run.text, {n: p.detach() for n, p in run.parameters.items()})
    report = json.loads((run.directory / "report.json").read_text("utf-8"))
    card = fill(run.config, run.parameters, report, BATCH)
    (out_dir / "README.md").write_text(card, "utf-8")
    (repack(out_dir) / LOCK).unlink()


def write_shards(out_dir: Path, text: dict[str, Any], parameters: dict[str, Tensor]) -> None:
    """The shards and their index."""
    layers = text["num_hidden_layers"]
    units = [list(_layer(text, parameters, layer)) for layer in range(layers)]
    rest = [_plain(n, p) for n, p in parameters.items() if ".layers." not in n]
    units.append(sorted(rest, key=lambda piece: piece[0].endswith("embed_tokens.weight")))
    weight_map, total = {}, 0
    for n in range(SHARDS):
        file = f"model-{n + 1:05d}-of-{SHARDS:06d}.safetensors"
        chosen = units[len(units) * n // SHARDS : len(units) * (n + 1) // SHARDS]
        pieces = [piece for unit in chosen for piece in unit]
        (out_dir / file).write_bytes(_shard(pieces))
        weight_map.update({name: file for name, *_ in pieces})
        total += sum(len(raw) for *_, raw in pieces)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out_dir / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", "utf-8")


def _shard(pieces: list[Piece]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, raw in pieces:
        offsets = [end, end := end + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(raw for *_, raw in pieces)


def _layer(text: dict[str, Any], parameters: dict[str, Tensor], layer: int) -> Iterator[Piece]:
    own = {n: p for n, p in parameters.items() if n.startswith(f"model.layers.{layer}.")}
    plain = [_plain(name, p) for name, p in own.items() if not is_expert(name)]
    yield from sorted(plain, key=lambda piece: (piece[1] != "F32", piece[0]))
    stacks = {name: mxfp4_codes(p) for name, p in own.items() if is_expert(name)}
    if not stacks:
        return
    order = np.random.default_rng(layer).permutation(text["num_experts"])
    for expert in order.tolist():
        for name, (codes, exponents) in sorted(stacks.items()):
            stem, _, which = name.rpartition(".")
            stem = f"{_PREFIX}{stem}.{expert}.{which}"
            nibbles = codes[expert].numpy()
            packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
            scale = (exponents[expert] + _BIAS).to(torch.uint8).numpy()
            yield f"{stem}.weight_packed", "U8", packed.shape, packed.tobytes()
            yield f"{stem}.weight_scale", "U8", scale.shape, scale.tobytes()


def _plain(name: str, parameter: Tensor) -> Piece:
    if name.endswith("A_log"):
        parameter = torch.cat((parameter, parameter.new_zeros(A_LOG_LENGTH - len(parameter))))
    shape = tuple(parameter.shape)
    if is_float32(name):
        return _PREFIX + name, "F32", shape, parameter.numpy().astype("<f4").tobytes()
    words = parameter.bfloat16().view(torch.int16).numpy().astype("<i2")
    return _PREFIX + name, "BF16", shape, words.tobytes()


if __name__ == "__main__":
    export(Run(Path(sys.argv[1]), 0), Path(sys.argv[2]))
