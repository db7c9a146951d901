"""tables.safetensors: what a trunk has to know of the weights that stay in the checkpoint.

    offset          I64 [layers, experts, 6]   where each routed expert lies, as in `ExpertTable`:
    shard           I32 [layers, experts, 6]   a start need not parse the headers of all shards
    embedding_rows  U32 [vocab]                CRC-32C of each row of the embedding

It holds no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_cli.checkpoint import ExpertTable
from kimi_cli.config import Config
from kimi_cli.durable import write_whole
from kimi_cli.errors import TrunkError
from kimi_cli.layout import header_block
from kimi_cli.native import U8, crc32c
from kimi_cli.regular import open_regular
from kimi_cli.tensors import EXPERT_PARTS

FILE_NAME = "tables.safetensors"


@dataclass(frozen=True, eq=False)
class Tables:
    """The file's contents; `embedding_sums` is uint32 [vocab]."""

    experts: ExpertTable
    embedding_sums: NDArray[np.uint32]


def row_sums(rows: U8) -> NDArray[np.uint32]:
    """The CRC-32C of each of `rows` [rows, bytes]."""
    return np.fromiter(map(crc32c, rows), np.uint32, len(rows))


def _shape(config: Config) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_experts, len(EXPERT_PARTS)


def _header(config: Config) -> bytes:
    shape, rows = _shape(config), config.vocab_size
    count = shape[0] * shape[1] * shape[2]
    return header_block(
        [
            ("offset", "I64", shape, 8 * count),
            ("shard", "I32", shape, 4 * count),
            ("embedding_rows", "U32", (rows,), 4 * rows),
        ]
    )


def file_bytes(config: Config) -> int:
    """The size of the file."""
    shape = _shape(config)
    return len(_header(config)) + 12 * shape[0] * shape[1] * shape[2] + 4 * config.vocab_size


def write_tables(directory: Path, tables: Tables, config: Config) -> tuple[int, int]:
    """Writes the file into `directory`, atomically; its size and CRC-32C. Raises OSError."""
    raw = b"".join(
        (
            _header(config),
            np.ascontiguousarray(tables.experts.offset, "<i8").tobytes(),
            np.ascontiguousarray(tables.experts.shard, "<i4").tobytes(),
            np.ascontiguousarray(tables.embedding_sums, "<u4").tobytes(),
        )
    )
    write_whole(directory / FILE_NAME, raw)
    return len(raw), crc32c(raw)


def read_tables(
    directory: Path, wanted: tuple[int, int], shard_sizes: Sequence[int], config: Config
) -> Tables:
    """The tables in `directory`, of the size and CRC-32C that the manifest has in `wanted`.

    `shard_sizes` are bytes. Raises TrunkError if the file is absent or differs, or if an expert
    does not lie inside a shard.
    """
    path = directory / FILE_NAME
    header, shape = _header(config), _shape(config)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            expected = file_bytes(config)
            if size != expected or size != wanted[0]:
                other = wanted[0] if size == expected else expected
                raise TrunkError(f"{path} has {size} bytes, wanted {other}")
            head = file.read(len(header))
            offset, shard = np.empty(shape, np.int64), np.empty(shape, np.int32)
            sums = np.empty(config.vocab_size, np.uint32)
            arrays = (offset, shard, sums)
            short = any(_fill(file, array) != array.nbytes for array in arrays)
    except FileNotFoundError:
        raise TrunkError(f"{path} is absent") from None
    except OSError as error:
        raise TrunkError(f"{path} cannot be read: {error.strerror or error}") from None
    crc = crc32c(head)
    for array in arrays:
        crc = crc32c(array, crc)
    if short or head != header or crc != wanted[1]:
        raise TrunkError(f"{path} is damaged: its bytes differ from their checksum")
    table = ExpertTable.of(shard, offset, config)
    _check(table, np.array(shard_sizes, np.int64), config, path)
    return Tables(table, sums)


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
        if not len(shard_sizes):
            raise TrunkError(f"{path} places layer {layer} expert 0 outside its shard")
        room = shard_sizes[np.where(inside, shard, 0)] - lengths
        inside &= offset <= room
        if not inside.all():
            expert = int((~inside).any(axis=1).argmax())
            raise TrunkError(f"{path} places layer {layer} expert {expert} outside its shard")
