"""A trunk's folder, opened: every file's header checked, its rows left where they are.

    DIR/kimi-trunk/
        trunk.json              manifest, written last
        layer-000.safetensors   one unit (see layout.py) a layer
        head.safetensors        the last unit: final mix, final norm, lm_head
        tables.safetensors      of the weights that stay in the checkpoint (see tables.py)

It writes nothing, and does not parse the checkpoint's headers: their fingerprint is enough.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli.checkpoint import ExpertTable, Location, fingerprint
from kimi_cli.config import Config
from kimi_cli.errors import CheckpointError, TrunkError
from kimi_cli.header import parse_header
from kimi_cli.layout import ALIGN, lay_out, plan_units, read_stored, unit_tensors
from kimi_cli.manifest import MANIFEST, PARTIAL, Fingerprint, Listed, Manifest, read_manifest
from kimi_cli.native import crc32c
from kimi_cli.tables import read_tables
from kimi_cli.tensors import Tensor, embedding
from kimi_cli.trunkfile import Block, RowBlock, StoredMatrix, Unit, Vector, stamp

__all__ = [
    "Block", "RowBlock", "StoredMatrix", "Trunk", "Unit", "Vector", "open_unit", "plan_units",
]  # fmt: skip

DIRECTORY = "kimi-trunk"
"""The trunk's folder in the model directory, unless another place is asked for."""
_MAX_HEADER = 1 << 20


class _Foreign(TrunkError):
    """A shard is not the one that the trunk was made from."""


@dataclass(frozen=True, eq=False)
class Trunk:
    """A whole trunk, made from the checkpoint it is used with.

    `units` are the layers in order, then the head. `shards` are the checkpoint's, in name order;
    `experts` and `embedding` index them. `embedding_sums`, [vocab], are its rows' CRC-32C: whoever
    reads a row compares it.
    """

    directory: Path
    encoding: str
    units: tuple[Unit, ...]
    shards: tuple[Path, ...]
    experts: ExpertTable
    embedding: Location
    embedding_sums: NDArray[np.uint32]
    fingerprint: Fingerprint

    @classmethod
    def open(cls, directory: Path, model_dir: Path, config: Config) -> Trunk:
        """The trunk in `directory` of the checkpoint in `model_dir`.

        Raises TrunkError if it is absent, unfinished, damaged in a header or table, of another
        version, made from another checkpoint or for another config; CheckpointError if a shard
        cannot be read. Row blocks are not read: whoever reads one compares its CRC.
        """
        try:
            return cls._open(directory, model_dir, config)
        except _Foreign as error:  # repacking a damaged shard would vouch for it
            verify = f"kimi verify -m {shlex.quote(str(model_dir))}"
            raise TrunkError(
                f"{error}: see whether {verify} finds it damaged; if it was changed on purpose, "
                f"{_fix(directory, model_dir)}"
            ) from None
        except TrunkError as error:
            raise TrunkError(f"{error}: {_fix(directory, model_dir)}") from None

    @classmethod
    def _open(cls, directory: Path, model_dir: Path, config: Config) -> Trunk:
        manifest = _load(directory, len(unit_tensors(config)))
        shards = _shards(manifest.fingerprint, directory, model_dir)
        units = _units(manifest, directory, config)
        sizes = [int(shard["size"]) for shard in manifest.fingerprint["shards"]]
        tables = read_tables(directory, manifest.tables, sizes, config)
        place, wanted = manifest.embedding, embedding(config).shape
        if place.shape != wanted:
            raise TrunkError(
                f"{directory / MANIFEST} has an embedding of {list(place.shape)}, "
                f"wanted {list(wanted)}"
            )
        if place.shard >= len(shards) or place.offset + place.length > sizes[place.shard]:
            raise TrunkError(f"{directory / MANIFEST} places the embedding outside its shard")
        return cls(
            directory,
            manifest.encoding,
            units,
            shards,
            tables.experts,
            place,
            tables.embedding_sums,
            manifest.fingerprint,
        )


def _fix(directory: Path, model_dir: Path) -> str:
    command = f"run kimi repack -m {shlex.quote(str(model_dir))}"
    if directory == model_dir / DIRECTORY:
        return command
    return f"{command} --out {shlex.quote(str(directory))}"


def _load(directory: Path, files: int) -> Manifest:
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.exists(directory) else "does not exist"
        raise TrunkError(f"{directory} {what}, wanted a repacked trunk")
    try:
        return read_manifest(directory / MANIFEST)
    except FileNotFoundError:
        pass
    try:
        done = len(read_manifest(directory / PARTIAL).files)
    except FileNotFoundError:
        raise TrunkError(f"{directory} holds no {MANIFEST}: it is not a trunk") from None
    except TrunkError:
        done = 0
    raise TrunkError(f"{directory} is unfinished, {done} of {files} files: repack was interrupted")


def _shards(made_from: Fingerprint, directory: Path, model_dir: Path) -> tuple[Path, ...]:
    """The checkpoint's shards, once they are known to be those the trunk was made from."""
    shards = tuple(model_dir / str(shard["name"]) for shard in made_from["shards"])
    foreign = f"{directory} was made from another checkpoint than {model_dir}"
    for shard in shards:
        if not os.path.exists(shard):
            raise _Foreign(f"{foreign}: {shard.name} is not there")
    found = fingerprint(shards, crc32c)
    for wanted, have in zip(made_from["shards"], found["shards"], strict=True):
        for key, value in wanted.items():
            if have[key] != value:
                what = "size" if key == "size" else f"checksum of its {_PARTS[key]}"
                raise _Foreign(f"{foreign}: {have['name']} has {what} {have[key]}, wanted {value}")
    return shards


_PARTS = {"header": "header", "first": "first data", "last": "last data"}


def _units(manifest: Manifest, directory: Path, config: Config) -> tuple[Unit, ...]:
    wanted = unit_tensors(config)
    names = [file for file, _ in wanted]
    if [listed.name for listed in manifest.files] != names:
        raise TrunkError(
            f"{directory / MANIFEST} lists {len(manifest.files)} files, "
            f"wanted {names[0]} to {names[-1]}, {len(names)} in all"
        )
    return tuple(
        open_unit(directory / file, tensors, listed, config)
        for (file, tensors), listed in zip(wanted, manifest.files, strict=True)
    )


def open_unit(path: Path, tensors: Sequence[Tensor], listed: Listed, config: Config) -> Unit:
    """The unit in the file at `path`, its header compared with `listed` and with `tensors`.

    Raises TrunkError if the file is absent, unreadable or of another size, if its header is
    damaged, or if it holds other tensors or lays them out in another way.
    """
    first = listed.blocks[0] if listed.blocks else [0, 0, 0]
    if first[0] != 0 or not ALIGN <= first[1] <= _MAX_HEADER:
        raise TrunkError(f"{path}: its first block is {first}, wanted a header")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TrunkError(f"{path} is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != listed.size:
                raise TrunkError(f"{path} has {size} bytes, wanted {listed.size}")
            raw = file.read(first[1])
    except FileNotFoundError:
        raise TrunkError(f"{path} is absent") from None
    except OSError as error:
        raise TrunkError(f"{path} cannot be read: {error.strerror or error}") from None
    if crc32c(raw) != first[2]:
        raise TrunkError(f"{path} is damaged: its header differs from its checksum")
    try:
        stored = read_stored(parse_header(raw, size, str(path)), tensors)
    except CheckpointError as error:
        raise TrunkError(str(error)) from None
    except ValueError as error:
        raise TrunkError(f"{path} does not fit the config: {error}") from None
    unit, header = lay_out(path.name, stored, config)
    blocks = [[b.offset, b.length] for b in unit.blocks]
    if header != raw or unit.size != size or blocks != [block[:2] for block in listed.blocks]:
        raise TrunkError(f"{path} is laid out in another way than this version of kimi does")
    return stamp(unit, [block[2] for block in listed.blocks])
