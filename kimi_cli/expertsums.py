"""expert-checksums.bin: the CRC-32C of every routed expert, that later reads are held to.

    0         8         12       16        20                 52                       size - 4
    | magic   | version | layers | experts | SHA-256 of the   | u32 [layers, experts]  | CRC-32C
    |         |         |        |         | fingerprint      |                        | of it all

It lies in the trunk's folder, little-endian, once every expert has been read; until then
expert-checksums.partial.bin has what is known, with, before its CRC, u8 [layers, experts] (1 where
a checksum is known) and i64 [shards], the modification time of each shard in nanoseconds: what was
known of a shard that has changed since is forgotten. An expert's CRC goes over its six tensors, one
after the other, in the order of EXPERT_PARTS; a dense layer's row is 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_cli import remedy
from kimi_cli.durable import write_whole
from kimi_cli.errors import TrunkError
from kimi_cli.manifest import digest
from kimi_cli.native import crc32c
from kimi_cli.regular import open_regular
from kimi_cli.trunk import Trunk

SUMS, PARTIAL = "expert-checksums.bin", "expert-checksums.partial.bin"

_MAGIC, _PARTIAL_MAGIC, _VERSION = b"KIMISUMS", b"KIMIPART", 1
_HEAD = struct.Struct("<8sIII32s")


@dataclass(frozen=True, eq=False)
class Known:
    """What an unfinished reading knows: `sums` uint32 and `done` bool, both [layers, experts]."""

    sums: NDArray[np.uint32]
    done: NDArray[np.bool_]


def expert_crc(tensors: Iterable[Any]) -> int:
    """The CRC-32C of an expert's six `tensors`, bytes-like, in the order of EXPERT_PARTS."""
    crc = 0
    for tensor in tensors:
        crc = crc32c(tensor, crc)
    return crc


def load_expert_sums(trunk: Trunk) -> NDArray[np.uint32] | None:
    """The checksums uint32 [layers, experts] kept with `trunk`; None if there is no whole table.

    Raises TrunkError if the table cannot be read, is damaged, or is another checkpoint's.
    """
    path, shape = trunk.directory / SUMS, _shape(trunk)
    try:
        body = _read(path, _MAGIC, trunk, 4 * shape[0] * shape[1])
    except FileNotFoundError:
        return None
    except ValueError as error:
        fix = remedy.deep(trunk.shards[0].parent, trunk.directory)
        raise TrunkError(f"{path} {error}: delete it, then {fix}") from None
    return np.frombuffer(body, "<u4").astype(np.uint32).reshape(shape)


def save_expert_sums(trunk: Trunk, sums: NDArray[np.uint32]) -> None:
    """Writes the whole table, atomically. Raises OSError."""
    _write(trunk.directory / SUMS, _MAGIC, trunk, sums.astype("<u4").tobytes())


def load_known(trunk: Trunk) -> Known:
    """What an interrupted reading left; nothing known if it left nothing that can be used."""
    shape, shards = _shape(trunk), len(trunk.shards)
    count = shape[0] * shape[1]
    try:
        body = _read(trunk.directory / PARTIAL, _PARTIAL_MAGIC, trunk, 5 * count + 8 * shards)
    except (FileNotFoundError, ValueError):
        return Known(np.zeros(shape, np.uint32), np.zeros(shape, np.bool_))
    sums = np.frombuffer(body, "<u4", count).astype(np.uint32).reshape(shape)
    done = (np.frombuffer(body, np.uint8, count, 4 * count) == 1).reshape(shape)
    times = np.frombuffer(body, "<i8", shards, 5 * count)
    changed = np.append(times != _modified(trunk), True)  # -1, a dense layer's shard, is the last
    return Known(sums, done & ~changed[trunk.experts.shard].any(axis=2))


def save_known(trunk: Trunk, known: Known) -> None:
    """Writes what is known so far, atomically. Raises OSError."""
    body = known.sums.astype("<u4").tobytes() + known.done.astype(np.uint8).tobytes()
    times = _modified(trunk).astype("<i8").tobytes()
    _write(trunk.directory / PARTIAL, _PARTIAL_MAGIC, trunk, body + times)


def _shape(trunk: Trunk) -> tuple[int, int]:
    layers, experts, _ = trunk.experts.shard.shape
    return layers, experts


def _modified(trunk: Trunk) -> NDArray[np.int64]:
    """When each shard was last modified, in nanoseconds; -1 of one that is not there."""
    times = (path.stat().st_mtime_ns if path.exists() else -1 for path in trunk.shards)
    return np.fromiter(times, np.int64, len(trunk.shards))


def _write(path: Path, magic: bytes, trunk: Trunk, body: bytes) -> None:
    head = _HEAD.pack(magic, _VERSION, *_shape(trunk), digest(trunk.fingerprint))
    raw = head + body
    write_whole(path, raw + crc32c(raw).to_bytes(4, "little"))


def _read(path: Path, magic: bytes, trunk: Trunk, length: int) -> bytes:
    """The `length` bytes between head and CRC. Raises FileNotFoundError, and ValueError whose text
    goes on from the file's name."""
    size = _HEAD.size + length + 4
    try:
        with open_regular(path) as file:
            raw = file.read(size + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror or error})") from None
    if len(raw) < _HEAD.size or raw[: len(magic)] != magic:
        raise ValueError("is not a table of expert checksums")
    _, version, layers, experts, made_from = _HEAD.unpack_from(raw)
    if version != _VERSION:
        raise ValueError(f"is of version {version}, wanted {_VERSION}")
    if len(raw) >= size and crc32c(raw[: size - 4]).to_bytes(4, "little") == raw[size - 4 :]:
        if made_from != digest(trunk.fingerprint):
            raise ValueError("was made from another checkpoint")
        return raw[_HEAD.size : -4]
    if (layers, experts) != _shape(trunk):
        wanted = " x ".join(map(str, _shape(trunk)))
        raise ValueError(f"is of {layers} x {experts} experts, wanted {wanted}")
    raise ValueError("is damaged: its checksum differs from its contents")
