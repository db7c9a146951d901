"""CRC-32C against RFC 3720's vectors and a bit-by-bit reference."""

from __future__ import annotations

import numpy as np
import pytest

from kimi_cli import native

from . import reference
from .hostile import generator

RFC_3720 = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]
LANE = 32768
BLOCK = 3 * LANE
"""Bytes that the interleaved loop takes at a time."""


@pytest.fixture(scope="module")
def prefixes():
    """Random data, and the CRC of every prefix of it by the reference."""
    data = generator("crc").integers(0, 256, 2 * BLOCK + 40, dtype=np.uint8)
    crcs = [0]
    for byte in data:
        crcs.append(reference.crc32c([byte], crcs[-1]))
    return data, crcs


@pytest.mark.parametrize("data, want", RFC_3720)
def test_vectors(data, want):
    assert native.crc32c(data) == want == reference.crc32c(data)


def test_every_length(prefixes):
    data, crcs = prefixes
    for border in (0, LANE, BLOCK, BLOCK + LANE, 2 * BLOCK):
        for n in range(max(border - 20, 0), border + 20):
            assert native.crc32c(data[:n]) == crcs[n], n
    for n in range(301):
        assert native.crc32c(data[:n]) == crcs[n], n


def test_chained_starts(prefixes):
    data, crcs = prefixes
    for cut in (0, 1, 7, 8, 9, LANE - 1, LANE, BLOCK - 1, BLOCK, BLOCK + 1, len(data)):
        assert native.crc32c(data[cut:], crcs[cut]) == crcs[-1], cut
    crc = 0
    for lo in range(0, len(data), 1037):
        crc = native.crc32c(data[lo : lo + 1037], crc)
    assert crc == crcs[-1]


def test_misaligned_starts(prefixes):
    data, crcs = prefixes
    for offset in range(1, 17):
        for n in (0, 1, 9, 255, BLOCK - 1, BLOCK, BLOCK + 9):
            moved = np.concatenate([np.zeros(offset, np.uint8), data[:n]])
            assert native.crc32c(moved[offset:]) == crcs[n], (offset, n)


def test_every_flipped_bit_is_seen(prefixes):
    data, _ = prefixes
    block = data[:512].copy()
    want = native.crc32c(block)
    for bit in range(8 * 512):
        block[bit // 8] ^= 1 << bit % 8
        assert native.crc32c(block) != want, bit
        block[bit // 8] ^= 1 << bit % 8


def test_strided_bytes_are_refused():
    with pytest.raises(ValueError):
        native.crc32c(np.zeros(64, np.uint8)[::2])
    with pytest.raises(OverflowError):
        native.crc32c(b"abc", 1 << 32)
