"""Every header of a checkpoint against its config: what lies where, and all that is wrong with it.

One shard at a time, so that memory does not grow with the number of experts. A survey never stops
at a fault: it collects them, and tells them in one sentence.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import index
from kimi_cli.config import Config
from kimi_cli.errors import CheckpointError
from kimi_cli.faults import Faults, short_name, shortage
from kimi_cli.header import Entry, ShortFile, Table, read_table
from kimi_cli.jsonfile import shortlist, show
from kimi_cli.shards import list_shards
from kimi_cli.tensors import (
    EXPERT_PARTS,
    IGNORED,
    Tensor,
    embedding,
    expert_prefix,
    expert_shapes,
    head_tensors,
    layer_prefix,
    layer_tensors,
)

_WIDTH_MASK = {"BF16": ("<u2", 0x7FFF), "F32": ("<u4", 0x7FFFFFFF)}  # all bits but the sign
_MAX_PADDING = 1 << 16
_ABSENT, _EXCUSED = -1, -2  # in expert_shard: not found; not found, but in a lost shard


@dataclass(frozen=True, eq=False)
class Survey:
    """What the headers say.

    `tensors` holds the shard and the header entry of every tensor but experts'. `expert_shard` and
    `expert_offset` are [layers, experts, 6], -1 where nothing was found. `fault` is the sentence
    that tells all that is wrong, or nothing.
    """

    shards: tuple[Path, ...]
    tensors: dict[str, tuple[int, Entry]]
    expert_shard: NDArray[np.int32]
    expert_offset: NDArray[np.int64]
    fault: str


class _Names:
    """The names that a config demands: `tensors` for all but experts, `slots` for experts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        layers = range(config.num_hidden_layers)
        tensors = [tensor for layer in layers for tensor in layer_tensors(config, layer)]
        tensors += [*head_tensors(config), embedding(config)]
        self.tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        self.padded = [tensor for tensor in tensors if tensor.padded]
        self.shape = (len(layers), config.num_experts, len(EXPERT_PARTS))
        self.expert_shapes = expert_shapes(config)
        self.expert_kinds = {(part, "U8", shape) for part, shape in enumerate(self.expert_shapes)}
        self._layers = {
            layer_prefix(layer) + "block_sparse_moe": layer
            for layer in layers
            if config.is_moe(layer)
        }
        self._row = config.num_experts * len(EXPERT_PARTS)
        self._places = {
            f"{expert}.{part}": expert * len(EXPERT_PARTS) + place
            for expert in range(config.num_experts)
            for place, part in enumerate(EXPERT_PARTS)
        }

    def slots(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Flat indices into `shape` of experts' tensors; -1 for any other name."""
        cut = [name.partition(".experts.") for name in names]
        heads, tails = map(itemgetter(0), cut), map(itemgetter(2), cut)
        layers = np.fromiter(map(self._layers.get, heads, repeat(-1)), np.int64, len(cut))
        places = np.fromiter(map(self._places.get, tails, repeat(-1)), np.int64, len(cut))
        return np.where((layers < 0) | (places < 0), -1, layers * self._row + places)

    def at_slot(self, slot: int) -> str:
        """The name that `slot` is the slot of."""
        layer, expert, place = (int(axis) for axis in np.unravel_index(slot, self.shape))
        return expert_prefix(layer, expert) + EXPERT_PARTS[place]


def survey(model_dir: Path, config: Config) -> Survey:
    """What the shards in `model_dir` hold, and how that differs from `config`.

    Raises CheckpointError only where there is nothing to survey: no directory, or no shard in it.
    """
    with _uncollected():
        return _survey(model_dir, config)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic collector: half a million names pass by, no two of which refer to
    each other, and it would look them over again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _survey(model_dir: Path, config: Config) -> Survey:
    faults, names = Faults(), _Names(config)
    present, missing, tallies = list_shards(model_dir, faults)
    found = Survey(
        tuple(model_dir / name for name in present),
        {},
        np.full(names.shape, _ABSENT, np.int32),
        np.full(names.shape, -1, np.int64),
        "",
    )
    lost, differing, ignored = set(missing), dict[str, set[str]](), dict[str, int]()
    for shard, path in enumerate(found.shards):
        try:
            table, whole = read_table(path), True
        except ShortFile as error:
            faults.add("short", f"{path.name} {shortage(error)}")
            table, whole = error.table, False
        except CheckpointError as error:
            faults.add("unreadable", str(error).replace(str(path), path.name))
            lost.add(path.name)
            continue
        if tallies is not None and tallies.get(path.name) != index.tally(table.names):
            differing[path.name] = set(table.names)
        slots = names.slots(table.names)
        _fold_experts(table, slots, shard, names, found, faults)
        others = table.select((slots < 0).tolist()).entries()
        _fold_others(others, shard, names, found, ignored, faults)
        if whole:
            _check_padding(others, path, names, faults)
    excused = set[str]()
    if tallies is not None and (lost or differing):
        excused = _compare(model_dir / index.FILE_NAME, names, found, lost, differing, faults)
    for text in _absent(found, names, excused):
        faults.add("absent", text)
    clauses = faults.told()
    if clauses:
        total = len(present) + len(missing)
        clauses.insert(0, f"{model_dir}: {len(present)} of {total} shards present")
    return replace(found, fault="; ".join(clauses))


def _fold_experts(
    table: Table,
    slots: NDArray[np.int64],
    shard: int,
    names: _Names,
    found: Survey,
    faults: Faults,
) -> None:
    """Adds one shard's experts to `found`, which is all that outlives its header."""
    held, at = table.select((slots >= 0).tolist()), slots[slots >= 0]
    parts = (at % len(EXPERT_PARTS)).tolist()
    if not names.expert_kinds.issuperset(zip(parts, held.dtypes, held.shapes, strict=True)):
        for name, part, dtype, shape in zip(
            held.names, parts, held.dtypes, held.shapes, strict=True
        ):
            wanted = names.expert_shapes[part]
            if dtype != "U8":
                faults.add("wrong dtype", f"{short_name(name)} is {dtype}, wanted U8")
            if shape != wanted:
                faults.add("wrong shape", _differs(name, shape, wanted))
    shards = found.expert_shard.reshape(-1)
    for place in at[shards[at] >= 0].tolist():
        faults.add("repeated", _repeated(names.at_slot(place), found.shards, shards[place], shard))
    shards[at] = shard
    found.expert_offset.reshape(-1)[at] = held.offsets


def _fold_others(
    entries: dict[str, Entry],
    shard: int,
    names: _Names,
    found: Survey,
    ignored: dict[str, int],
    faults: Faults,
) -> None:
    """Adds the rest of its tensors."""
    for name, entry in entries.items():
        tensor = names.tensors.get(name)
        if tensor is not None:
            first = found.tensors.setdefault(name, (shard, entry))[0]
            if entry.dtype not in _WIDTH_MASK:
                faults.add(
                    "wrong dtype", f"{short_name(name)} is {entry.dtype}, wanted BF16 or F32"
                )
            if not _fits(entry.shape, tensor):
                faults.add("wrong shape", _differs(name, entry.shape, tensor.shape))
        elif name.startswith(IGNORED):
            first = ignored.setdefault(name, shard)
        else:
            faults.add("unknown", f"{short_name(name)} in {found.shards[shard].name}")
            continue
        if first != shard:
            faults.add("repeated", _repeated(name, found.shards, first, shard))


def _fits(shape: tuple[int, ...], tensor: Tensor) -> bool:
    if not tensor.padded:
        return shape in tensor.shapes
    size = prod(shape)
    return shape in ((size,), (1, 1, size, 1)) and 0 <= size - tensor.size <= _MAX_PADDING


def _check_padding(entries: dict[str, Entry], path: Path, names: _Names, faults: Faults) -> None:
    """Whether what follows a padded tensor's own elements is zero."""
    for tensor in names.padded:
        entry = entries.get(tensor.name)
        if entry is None or entry.dtype not in _WIDTH_MASK or not _fits(entry.shape, tensor):
            continue
        kind, mask = _WIDTH_MASK[entry.dtype]
        try:
            with path.open("rb") as file:
                file.seek(entry.offset + tensor.size * np.dtype(kind).itemsize)
                tail = file.read((prod(entry.shape) - tensor.size) * np.dtype(kind).itemsize)
        except OSError as error:
            faults.add("unreadable", f"{path.name} cannot be read: {error.strerror or error}")
            return
        if (np.frombuffer(tail, kind) & mask).any():
            faults.add(
                "padding not zero",
                f"{short_name(tensor.name)} after its first {tensor.size} elements",
            )


def _compare(
    path: Path,
    names: _Names,
    found: Survey,
    lost: set[str],
    differing: dict[str, set[str]],
    faults: Faults,
) -> set[str]:
    """Tells how the index at `path` departs from the headers of `differing`.

    Gives back the names that it places in `lost` shards, and marks experts' so in `found`: to call
    them absent as well would hide those that are.
    """
    excused, repeated = set[str](), set[str]()
    unnamed = {file: set(held) for file, held in differing.items()}
    shards = found.expert_shard.reshape(-1)
    for name, file, slot in _placed(path, names):
        if file in lost and slot < 0:
            excused.add(name)
        elif file in lost:
            shards[slot] = _EXCUSED if shards[slot] == _ABSENT else shards[slot]
        elif file in differing and name not in differing[file]:
            faults.add("index", f"places {short_name(name)} in {file}, which lacks it")
        elif file in differing and name not in unnamed[file]:
            repeated.add(name)
        elif file in differing:
            unnamed[file].remove(name)
    for name in sorted(repeated):
        faults.add("index", f"names {short_name(name)} twice")
    for file, left in unnamed.items():
        for name in sorted(left):
            faults.add("index", f"lacks {short_name(name)} of {file}")
    return excused


def _placed(path: Path, names: _Names) -> Iterator[tuple[str, str, int]]:
    """Every name in the index at `path`, its file and its slot."""
    for pairs in index.scan_index(path):
        slots = names.slots([name for name, _ in pairs]).tolist()
        for (name, file), slot in zip(pairs, slots, strict=True):
            yield name, file, slot


def _absent(found: Survey, names: _Names, excused: set[str]) -> Iterator[str]:
    """What the config demands and no header holds; whole layers and experts by number."""
    for layer in range(names.shape[0]):
        tensors = layer_tensors(names.config, layer)
        lacking = [t.name for t in tensors if t.name not in found.tensors and t.name not in excused]
        gone = found.expert_shard[layer] == _ABSENT
        if not names.config.is_moe(layer):
            gone[:] = False
        elif gone.all() and len(lacking) < len(tensors):
            yield f"layer {layer} experts 0 to {len(gone) - 1}"
            gone[:] = False
        if len(lacking) == len(tensors) and gone.all() == names.config.is_moe(layer):
            yield f"layer {layer}"
            continue
        yield from map(short_name, lacking)
        for expert in gone.any(axis=1).nonzero()[0].tolist():
            parts = [
                part for part, absent in zip(EXPERT_PARTS, gone[expert], strict=True) if absent
            ]
            whole = len(parts) == len(EXPERT_PARTS)
            yield f"layer {layer} expert {expert}{'' if whole else ' ' + shortlist(parts)}"
    for tensor in (*head_tensors(names.config), embedding(names.config)):
        if tensor.name not in found.tensors and tensor.name not in excused:
            yield short_name(tensor.name)


def _differs(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{short_name(name)} is {show(list(shape))}, wanted {show(list(wanted))}"


def _repeated(name: str, shards: tuple[Path, ...], one: int, other: int) -> str:
    return f"{short_name(name)} in {shards[one].name} and {shards[other].name}"
