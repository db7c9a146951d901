"""experts.safetensors: where each routed expert lies in the checkpoint, kept beside the trunk.

Two tensors, `offset` I64 and `shard` I32, both [layers, experts, 6] as in `ExpertTable`: a start
after the first need not parse the headers of all shards. It holds no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_cli.checkpoint import ExpertTable
from kimi_cli.config import Config
from kimi_cli.durable import write_whole
from kimi_cli.errors import TrunkError
from kimi_cli.layout import header_block
from kimi_cli.native import crc32c
from kimi_cli.tensors import EXPERT_PARTS

FILE_NAME = "experts.safetensors"


def _shape(config: Config) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_experts, len(EXPERT_PARTS)


def _header(config: Config) -> bytes:
    shape = _shape(config)
    count = shape[0] * shape[1] * shape[2]
    return header_block([("offset", "I64", shape, 8 * count), ("shard", "I32", shape, 4 * count)])


def write_extents(directory: Path, table: ExpertTable, config: Config) -> tuple[int, int]:
    """Writes the table into `directory`, atomically; its size and CRC-32C. Raises OSError."""
    raw = b"".join(
        (
            _header(config),
            np.ascontiguousarray(table.offset, "<i8").tobytes(),
            np.ascontiguousarray(table.shard, "<i4").tobytes(),
        )
    )
    write_whole(directory / FILE_NAME, raw)
    return len(raw), crc32c(raw)


def read_extents(
    directory: Path, wanted: tuple[int, int], shard_sizes: Sequence[int], config: Config
) -> ExpertTable:
    """The table in `directory`, of the size and CRC-32C that the manifest has in `wanted`.

    `shard_sizes` are bytes. Raises TrunkError if the file is absent or differs, or if an expert
    does not lie inside a shard.
    """
    path = directory / FILE_NAME
    header, shape = _header(config), _shape(config)
    offset, shard = np.empty(0, np.int64), np.empty(0, np.int32)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            expected = len(header) + shape[0] * shape[1] * shape[2] * 12
            if size != wanted[0] or size != expected:
                raise TrunkError(f"{path} has {size} bytes, wanted {expected}")
            head = file.read(len(header))
            offset, shard = np.empty(shape, np.int64), np.empty(shape, np.int32)
            short = any(_fill(file, array) != array.nbytes for array in (offset, shard))
    except FileNotFoundError:
        raise TrunkError(f"{path} is absent") from None
    except OSError as error:
        raise TrunkError(f"{path} cannot be read: {error.strerror or error}") from None
    if short or head != header or crc32c(shard, crc32c(offset, crc32c(head))) != wanted[1]:
        raise TrunkError(f"{path} is damaged: its bytes differ from their checksum")
    table = ExpertTable.of(shard, offset, config)
    _check(table, np.array(shard_sizes, np.int64), config, path)
    return table


def _fill(file: Any, array: NDArray[Any]) -> int:
    count: int = file.readinto(array.reshape(-1).view(np.uint8).data)
    return count


def _check(table: ExpertTable, shard_sizes: NDArray[np.int64], config: Config, path: Path) -> None:
    lengths = np.array(table.sizes, np.int64)
    for layer in range(config.num_hidden_layers):
        shard, offset = table.shard[layer], table.offset[layer]
        if not config.is_moe(layer):
            if (shard != -1).any() or (offset != -1).any():
                raise TrunkError(f"{path} has experts in layer {layer}, wanted none: it is dense")
            continue
        inside = (shard >= 0) & (shard < len(shard_sizes)) & (offset >= 0)
        room = shard_sizes[np.where(inside, shard, 0)] - lengths
        inside &= offset <= room
        if not inside.all():
            expert = int((~inside).any(axis=1).argmax())
            raise TrunkError(f"{path} places layer {layer} expert {expert} outside its shard")
