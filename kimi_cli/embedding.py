"""The embedding table: single rows from the checkpoint's shard, each held against its checksum.

The table stays where it lies, and no row is kept.
"""

from __future__ import annotations

import numpy as np

from kimi_cli import remedy
from kimi_cli.errors import ReadError
from kimi_cli.native import F32, Format, crc32c, widen
from kimi_cli.stream import ALIGN, DirectFile, allocate, round_up
from kimi_cli.trunk import Trunk


class Embedding:
    """The rows of one trunk's checkpoint. Not for two threads at once. `close` it."""

    def __init__(self, trunk: Trunk) -> None:
        place = trunk.embedding
        self._place, self._sums = place, trunk.embedding_sums
        self._format = Format.BF16 if place.dtype == "BF16" else Format.F32
        self._size = place.length // place.shape[0]
        self._file = DirectFile(trunk.shards[place.shard])
        self._row = allocate(round_up(self._size) + 2 * ALIGN)

    def read(self, token: int, into: F32) -> None:
        """Row `token`, widened into `into` [hidden].

        Raises ReadError if it cannot be read or differs from its checksum.
        """
        offset = self._place.offset + token * self._size
        name = f"the embedding of token {token}"
        start = self._file.read(offset, self._size, self._row, name)
        raw = self._row[start : start + self._size]
        found, wanted = crc32c(raw), int(self._sums[token])
        if found != wanted:
            path = self._file.path
            raise ReadError(
                f"{path}: {name}, {self._size} bytes at offset {offset}, "
                f"has checksum {found:08x}, wanted {wanted:08x}: the file is damaged, "
                f"{remedy.download(path.parent, [path.name])}"
            )
        widen(self._format, np.frombuffer(raw, np.uint8), into)

    def close(self) -> None:
        """Closes the shard."""
        self._file.close()
