"""A trunk file decoded from the format's description alone, with numpy and safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import deserialize

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Dtype, shape and bytes of each tensor by name."""

_PLACE = np.arange(32)
COLUMN = 16 * (_PLACE >> 3 & 1) + 8 * (_PLACE >> 4) + (_PLACE & 7)
"""Column, within its half of 32, that the byte at each position holds."""


def raw_tensors(path: Path) -> Tensors:
    """The tensors of any safetensors file, as the safetensors library reads them."""
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in deserialize(path.read_bytes())
    }


def trunk_tensors(path: Path) -> Tensors:
    """The checkpoint's tensors that one trunk file holds, unpacked; padding left out."""
    raw = raw_tensors(path)
    found = {}
    for name, (dtype, shape, data) in raw.items():
        if name.endswith(".packed"):
            base = name.removesuffix(".packed")
            table = np.frombuffer(raw[base + ".table"][2], np.uint8)
            words = _unpack(np.frombuffer(data, np.uint8).reshape(shape), table)
            _patch(words, np.frombuffer(raw[base + ".escapes"][2], "<u4"))
            found[base] = ("BF16", words.shape, words.tobytes())
        elif not name.endswith((".table", ".escapes")) and not name.startswith("padding."):
            found[name] = (dtype, shape, data)
    return found


def _unpack(packed: np.ndarray, table: np.ndarray) -> np.ndarray:
    rows, stride = packed.shape
    blocks = packed.reshape(rows, stride // 96, 96)
    words = np.zeros((rows, stride // 96, 64), np.uint16)
    nibbles = blocks[:, :, 64:]
    for half, nibble in enumerate((nibbles & 15, nibbles >> 4)):
        low = blocks[:, :, 32 * half : 32 * half + 32].astype(np.uint16)
        words[:, :, 32 * half + COLUMN] = table[nibble].astype(np.uint16) << 8 | low
    return words.reshape(rows, -1)


def _patch(words: np.ndarray, listed: np.ndarray) -> None:
    rows = len(words)
    starts, escapes = listed[: rows + 1], listed[rows + 1 :]
    assert starts[0] == 0 and starts[-1] == len(escapes)
    for row in range(rows):
        for entry in escapes[starts[row] : starts[row + 1]].tolist():
            words[row, entry >> 16] = entry & 0xFFFF
