"""model.safetensors.index.json, read as a stream: which shard holds which tensor.

The released index has 59 MB and 497,220 names. It is never held: pairs pass by in runs of some
thousand, and a tally per shard is all that is kept to compare it with the headers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from kimi_cli.errors import CheckpointError
from kimi_cli.jsonfile import controls, parse_json, show
from kimi_cli.regular import open_regular

FILE_NAME = "model.safetensors.index.json"

Columns = tuple[list[str], list[str]]
"""Tensor names, and the file of each."""
Tally = tuple[int, int]
"""How many names a shard has, and the sum of their hashes: equal for equal sets of names."""

_CHUNK = 1 << 20
_BLANKS = b" \t\r\n"
_MARK = {"": "what was cut out"}
_OPENING = re.compile(rb'"weight_map"\s*:\s*\{')


def tally(names: Iterable[str]) -> Tally:
    """The Tally of `names`; comparable within one process only, since hashes are salted."""
    hashes = list(map(hash, names))
    return len(hashes), sum(hashes)


def tally_index(path: Path) -> dict[str, Tally]:
    """The Tally of each file that the index at `path` names. Raises as `scan_index` does."""
    tallies: dict[str, Tally] = {}
    for names, files in _columns(path):
        end = 0
        for file, group in groupby(files):
            begin, end = end, end + len(list(group))
            (count, total), (more, hashes) = tallies.get(file, (0, 0)), tally(names[begin:end])
            tallies[file] = count + more, total + hashes
    return tallies


def scan_index(path: Path) -> Iterator[list[tuple[str, str]]]:
    """The (tensor name, file name) pairs of the index at `path`, in runs, in the file's order.

    Raises CheckpointError if the file cannot be read or is not a JSON object whose `weight_map`
    maps text to text. A name given twice is passed on twice.
    """
    for names, files in _columns(path):
        yield list(zip(names, files, strict=True))


def _columns(path: Path) -> Iterator[Columns]:
    """The same pairs in two columns."""
    try:
        with open_regular(path) as file:
            yield from _scan(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is {error}") from None


def _scan(file: BinaryIO) -> Iterator[Columns]:
    """Cuts the map out of the file; what is left, with a mark in its place, must parse as JSON."""
    head = file.read(_CHUNK)
    opening = _OPENING.search(head)
    if opening is None:
        raise ValueError(f"without a weight_map in its first {len(head):,} bytes")
    rest, head = head[opening.end() :], head[: opening.end()]
    comma = b""
    while b"}" not in rest:  # no name holds a brace
        more = file.read(_CHUNK)
        if not more:
            raise ValueError("cut short inside its weight_map")
        run, cut, tail = rest.rpartition(b'",')
        if cut:
            yield _pairs(run + b'"')
            rest, comma = tail, cut
        elif len(rest) > _CHUNK:
            raise ValueError("holding a name of more than a million bytes")
        rest += more
    run, _, tail = rest.partition(b"}")
    if comma and not run.strip():
        raise ValueError("not JSON in its weight_map: it ends in a comma")
    yield _pairs(run)
    tail += file.read(_CHUNK)
    outside = parse_json(head + json.dumps(_MARK).encode()[1:] + tail)
    if not isinstance(outside, dict) or outside.get("weight_map") != _MARK:
        raise ValueError(f"{show(outside)}, wanted an object with a weight_map")


def _pairs(run: bytes) -> Columns:
    return _written_plainly(run) or _parsed(run)


def _parsed(run: bytes) -> Columns:
    try:
        pairs = json.loads(b"{" + run + b"}", object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise ValueError("not JSON in its weight_map") from None
    names, files = [name for name, _ in pairs], [file for _, file in pairs]
    if not set(map(type, files)) <= {str}:
        raise ValueError("mapping a tensor to something other than a file name")
    return names, files


def _written_plainly(run: bytes) -> Columns | None:
    """What `_parsed` gives, in half the time, for a run that none of its strings has an escape in:
    cut at its quotes. None for any other."""
    if b"\\" in run:
        return None
    try:
        cut = run.decode().split('"')
    except UnicodeDecodeError:
        return None
    count, between = len(cut) // 4, '"'.join(cut[::2]).encode()
    if len(cut) != 4 * count + 1:
        return None
    if between.translate(None, _BLANKS) != b",".join([b'":"'] * count):
        return None
    if controls(run) != controls(between):
        return None
    return cut[1::4], cut[3::4]
