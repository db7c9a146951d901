"""The values of a random checkpoint's tensors, drawn so that activations stay healthy at any width.

A tensor's values depend on the seed, its name and its official shape alone, so that two layouts of
one model hold the same weights. They come in blocks: memory does not grow with the tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log2, prod, sqrt

import numpy as np
from numpy.typing import NDArray

from kimi_cli.config import Config
from kimi_cli.header import DTYPE_BYTES

VISION: dict[str, tuple[int, ...]] = {
    "mm_projector.proj.0.weight": (64, 32),
    "mm_projector.proj.2.weight": (32, 64),
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (64, 32),
    "vision_tower.patch_embed.proj.weight": (32, 3, 14, 14),
}
"""Stand-ins for the vision tower, which is present in a checkpoint and not read."""

_BLOCK = 1 << 20  # elements drawn at a time
_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
_GAIN = {  # standard deviation times the root of the columns, by the name's end; else 1
    "lm_head": 4.0, "mlp.down_proj": 0.2, "shared_experts.down_proj": 0.12,
    "routed_expert_down_proj": 1.0, "routed_expert_up_proj": 0.25,
    "gate_proj": 1.5, "up_proj": 2.5, "moe.gate": 1.5, "w1": 1.6, "w2": 0.02, "w3": 3.3,
    "q_proj": 1.1, "k_proj": 1.1, "v_proj": 1.3, "g_proj": 1.5, "f_b_proj": 0.8, ".b_proj": 1.5,
    "self_attn.o_proj": 0.7, "q_a_proj": 0.1, "q_b_proj": 1.3, "kv_b_proj": 1.3,
}  # fmt: skip
_E2M1_RMS = (68.5 / 8) ** 0.5  # of the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6


@dataclass(frozen=True)
class Piece:
    """One tensor to be written; `count` elements are drawn, and zeros follow."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int

    @property
    def length(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_bytes(piece: Piece, config: Config, seed: int) -> Iterator[bytes]:
    """The piece's bytes as they lie in the file, in blocks of at most 4 MiB or so."""
    random = generator(seed, piece.name)
    for start in range(0, piece.count, _BLOCK):
        n = min(_BLOCK, piece.count - start)
        if piece.name.endswith("weight_packed"):
            yield random.bytes(n)
        elif piece.name.endswith("weight_scale"):
            yield _scales(piece, n, random).tobytes()
        else:
            values = _draw(piece, config, start, n, random)
            bits = values.view(np.uint32)
            if not is_f32(piece.name) or piece.dtype == "BF16":
                bits += 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
                bits &= 0xFFFF0000
            halves = piece.dtype == "BF16"
            yield ((bits >> 16).astype("<u2") if halves else bits.astype("<u4")).tobytes()
    yield bytes(piece.length - piece.count * DTYPE_BYTES[piece.dtype])


def _draw(
    piece: Piece, config: Config, start: int, n: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Elements start..start+n of a tensor that is not an expert's, as float32."""
    name = piece.name.removesuffix(".weight")
    if name.endswith("dt_bias"):
        return random.uniform(-3.5, 1.5, n).astype(np.float32)
    values: NDArray[np.float32] = random.standard_normal(n, dtype=np.float32)
    if name.endswith("norm"):
        values *= np.float32(0.2)
        values += 1
        return values.clip(0.4, 1.6)
    if name.endswith("conv1d"):  # rises towards the current token
        taps = np.linspace(0.25, 0.9, config.conv_size)
        values += 2
        values *= 0.5 * taps[(start + np.arange(n)) % config.conv_size]
        return values
    if name.endswith("kv_a_proj_with_mqa"):  # a small latent, which its norm's eps can be told by
        row = (start + np.arange(n)) // piece.shape[1]
        values *= np.where(row < config.kv_lora_rank, 0.1, 1.2).astype(np.float32)
    values *= np.float32(_deviation(name, piece.shape))
    return values


def _scales(piece: Piece, n: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Scale bytes of two neighbouring powers of two that give the wanted mean square."""
    columns = piece.shape[-1] * 32
    wanted = log2(_gain(piece.name.removesuffix(".weight_scale")) / (sqrt(columns) * _E2M1_RMS))
    low = floor(wanted)
    share = (4 ** (wanted - low) - 1) / 3
    return (127 + low + (random.random(n) < share)).astype(np.uint8)


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("A_log"):
        return 0.4
    if name.endswith("e_score_correction_bias"):
        return 0.06
    if name.endswith("embed_tokens") or name + ".weight" in VISION:
        return 1.0
    return _gain(name) / sqrt(shape[-1])


def _gain(name: str) -> float:
    return next((gain for end, gain in _GAIN.items() if name.endswith(end)), 1.0)


def is_f32(name: str) -> bool:
    """Whether the official layout stores the tensor in F32."""
    return name.endswith(_F32)


def generator(seed: int, name: str) -> np.random.Generator:
    """The random numbers that belong to `name` under `seed`, which is not negative."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
