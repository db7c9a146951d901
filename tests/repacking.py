"""What tests of repack share: checkpoints, and trunks held against them. A plugin of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoded import raw_tensors, trunk_tensors

from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config
from kimi_cli.errors import TrunkError
from kimi_cli.native import Format
from kimi_cli.repack import repack
from kimi_cli.synth import make_config, write_checkpoint
from kimi_cli.tensors import head_tensors, layer_tensors
from kimi_cli.trunk import Trunk

SHAPES: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 192, "vocab_size": 700, "intermediate_size": 448,
    "num_attention_heads": 6, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 40,
    "v_head_dim": 24, "num_heads": 3, "head_dim": 64, "num_experts": 5,
    "moe_intermediate_size": 64, "routed_expert_hidden_size": 128,
}  # fmt: skip


def make(directory: Path, seed: int = 1, shards: int = 3, **options: Any) -> Path:
    shapes = {**SHAPES, **options.pop("shapes", {})}
    write_checkpoint(directory, make_config(**shapes), seed, shards=shards, **options)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers; not to be written to."""
    return make(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def whole(small: Path) -> dict[str, bytes]:
    """What repack makes of it, undisturbed."""
    out = small.parent / "whole"
    return contents(repack(small, out))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "repack.lock"}


def opened(model: Path, out: Path) -> Trunk:
    return Trunk.open(out, model, load_config(model))


def not_whole(model: Path, out: Path) -> None:
    with pytest.raises(TrunkError):
        opened(model, out)


def check_same_weights(model: Path, out: Path) -> Trunk:
    trunk = opened(model, out)
    config = load_config(model)
    source = {}
    for path in sorted(model.glob("model*.safetensors")):
        source.update(raw_tensors(path))
    wanted = [t for n in range(config.num_hidden_layers) for t in layer_tensors(config, n)]
    wanted += head_tensors(config)
    found: dict[str, Any] = {}
    for unit in trunk.units:
        found.update(trunk_tensors(out / unit.file))
    assert found.keys() == {tensor.name for tensor in wanted}
    for name, (dtype, shape, data) in found.items():
        assert (dtype, shape) == source[name][:2], name
        assert data == source[name][2], name
    for unit in trunk.units:
        for matrix in unit.matrices:
            dtype, _, data = source[matrix.name]
            check_choice(matrix, dtype, data, trunk.encoding, raw_tensors(out / unit.file))
    return trunk


def check_choice(matrix: Any, dtype: str, data: bytes, encoding: str, raw: Any) -> None:
    """Whether it is packed, and its table, from the rules alone."""
    if dtype == "F32":
        assert matrix.format == Format.F32
        return
    words = np.frombuffer(data, "<u2")
    counts = np.bincount(words >> 8, minlength=256)
    best = sorted(range(256), key=lambda byte: (-counts[byte], byte))[:16]
    escapes = int(words.size - counts[best].sum())
    packs = matrix.cols % 64 == 0 and words.size >= 4096 and escapes * 200 <= words.size
    if encoding == "plain" or not packs:
        assert matrix.format == Format.BF16
        return
    assert (matrix.format, matrix.escape_count) == (Format.PACKED, escapes)
    table = [byte if counts[byte] else best[0] for byte in best]
    assert list(raw[matrix.name + ".table"][2]) == table


def rewrite(model: Path, name: str, values: np.ndarray) -> None:
    """Puts other values, of the same bytes in all, in the place of a tensor."""
    place = Checkpoint.open(model, load_config(model)).tensors[name]
    assert values.nbytes == place.length
    path = sorted(model.glob("model*.safetensors"))[place.shard]
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(values.tobytes())


def child(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
