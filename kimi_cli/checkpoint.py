"""The checkpoint's files: which shard holds each tensor, and where. Reads headers, never weights.

    model.safetensors.index.json         tensor name -> shard, compared with the headers
    model-00001-of-000096.safetensors    header | layer tensors | six tensors of an expert | ...

Experts are many (494,592 tensors in the released model): each shard's are folded into two arrays as
soon as its header is parsed. Everything that is wrong with a directory is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import survey
from kimi_cli.config import Config
from kimi_cli.errors import CheckpointError
from kimi_cli.header import header_length
from kimi_cli.regular import open_regular
from kimi_cli.tensors import expert_shapes

EDGE = 64 << 10
"""Bytes at either end of a shard's data that its fingerprint covers."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where one tensor lies: `shard` indexes Checkpoint.shards, `offset` and `length` are bytes
    of that file, `shape` is as stored (A_log may be longer than its heads)."""

    shard: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Where every routed expert's six tensors lie, in the order of EXPERT_PARTS.

    `shard` int32 and `offset` int64 are [layers, experts, 6], -1 in dense layers; `sizes` are the
    bytes of the six tensors; `whole` bool [layers, experts] tells whether one read gets them all.
    """

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    sizes: tuple[int, ...]
    whole: NDArray[np.bool_]

    @classmethod
    def of(cls, shard: NDArray[np.int32], offset: NDArray[np.int64], config: Config) -> ExpertTable:
        """The table of these positions; `whole` follows from them."""
        sizes = tuple(prod(shape) for shape in expert_shapes(config))
        steps = np.array(sizes[:-1], dtype=np.int64)
        adjacent = (np.diff(offset, axis=2) == steps).all(axis=2)
        together = (shard == shard[:, :, :1]).all(axis=2) & (shard[:, :, 0] >= 0)
        return cls(shard, offset, sizes, adjacent & together)

    def extent(self, layer: int, expert: int) -> tuple[int, int] | None:
        """Shard and byte offset of `expert` in zero-based `layer`, sum(sizes) bytes long.

        None where its tensors are not back to back in one shard, or the layer is dense.
        """
        if not self.whole[layer, expert]:
            return None
        return int(self.shard[layer, expert, 0]), int(self.offset[layer, expert, 0])


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One checkpoint's files, checked against its config.

    `shards` are paths in name order. `tensors` holds every tensor that `tensors.py` lists but the
    experts', by full name; vision tensors are left out.
    """

    shards: tuple[Path, ...]
    tensors: dict[str, Location]
    experts: ExpertTable

    @classmethod
    def open(cls, model_dir: Path, config: Config) -> Checkpoint:
        """The checkpoint in `model_dir`, every header read and held against `config`.

        Raises CheckpointError, once, with everything that is wrong: shards absent, short,
        unreadable or unindexed, tensors absent, unknown, repeated, or of the wrong dtype or shape.
        """
        found = survey.survey(model_dir, config)
        if found.fault:
            raise CheckpointError(found.fault)
        return cls(
            found.shards,
            {
                name: Location(shard, entry.dtype, entry.shape, entry.offset, entry.length)
                for name, (shard, entry) in found.tensors.items()
            },
            ExpertTable.of(found.expert_shard, found.expert_offset, config),
        )


def fingerprint(
    shards: Sequence[Path], crc32c: Callable[[bytes], int]
) -> dict[str, list[dict[str, str | int]]]:
    """What tells one checkpoint from another that has the same names and sizes.

    For each shard, under "shards": `name`, `size` in bytes, and the CRC-32C of its header (length
    included), of the first and of the last EDGE bytes of its data. Raises CheckpointError if a
    shard cannot be read or ends in its header.
    """
    return {"shards": [_shard_fingerprint(path, crc32c) for path in shards]}


def _shard_fingerprint(path: Path, crc32c: Callable[[bytes], int]) -> dict[str, str | int]:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = header_length(file.read(8), size, str(path))
            file.seek(0)
            header = file.read(8 + length)
            first = file.read(EDGE)
            file.seek(max(8 + length, size - EDGE))
            last = file.read(EDGE)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    return {
        "name": path.name,
        "size": size,
        "header": crc32c(header),
        "first": crc32c(first),
        "last": crc32c(last),
    }
