"""trunk.json: what a trunk was made from, and the size and checksums of its files. Never trusted.

    {"format": "kimi-trunk", "version": 1, "encoding": "packed" or "plain",
     "fingerprint": {"shards": [..]}, "embedding": {..}, "tables": {..},
     "crc32c": of all the above,
     "files": [{"name": .., "size": .., "blocks": [[offset, length, crc32c], ..]}, ..]}

trunk.partial.json is the same with the files finished so far; it becomes trunk.json by a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from kimi_cli.checkpoint import Location
from kimi_cli.durable import write_whole
from kimi_cli.errors import TrunkError
from kimi_cli.header import DTYPE_BYTES
from kimi_cli.jsonfile import parse_json, show
from kimi_cli.layout import FORMAT, VERSION
from kimi_cli.native import crc32c
from kimi_cli.trunkfile import Unit

MANIFEST, PARTIAL = "trunk.json", "trunk.partial.json"
ENCODINGS = ("packed", "plain")
MAX_BYTES = 8 << 20
"""A manifest larger than this is refused unread; the released model's has 0.8 MB."""

_FACTS = ("format", "version", "encoding", "fingerprint", "embedding", "tables")
_SHARD_NUMBERS = ("size", "header", "first", "last")
_MAX_INT = (1 << 63) - 1

Fingerprint = dict[str, list[dict[str, str | int]]]


@dataclass(frozen=True, slots=True)
class Listed:
    """One file as the manifest has it; `blocks` are [offset, length, crc]."""

    name: str
    size: int
    blocks: list[list[int]]

    @classmethod
    def of(cls, unit: Unit) -> Listed:
        """What the manifest says of a finished file."""
        return cls(unit.file, unit.size, [[b.offset, b.length, b.crc] for b in unit.blocks])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest's contents: every type right, nothing yet compared with files or config.

    `tables` is the size and the CRC-32C of tables.safetensors.
    """

    encoding: str
    fingerprint: Fingerprint
    embedding: Location
    tables: tuple[int, int]
    files: tuple[Listed, ...]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes `manifest`, atomically. Raises OSError."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "encoding": manifest.encoding,
        "fingerprint": manifest.fingerprint,
        "embedding": asdict(manifest.embedding),
        "tables": {"size": manifest.tables[0], "crc32c": manifest.tables[1]},
    }
    facts["crc32c"] = crc32c(_compact(facts))
    lines = [f'"{key}": {json.dumps(value)}' for key, value in facts.items()]
    files = ",\n  ".join(
        json.dumps({"name": f.name, "size": f.size, "blocks": f.blocks}, separators=(",", ":"))
        for f in manifest.files
    )
    lines.append(f'"files": [\n  {files}\n ]')
    write_whole(path, ("{" + ",\n ".join(lines) + "}\n").encode())


def _compact(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def digest(fingerprint: Fingerprint) -> bytes:
    """SHA-256 of `fingerprint`, 32 bytes: what tells checkpoints apart where that is enough."""
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`. Raises FileNotFoundError if there is none.

    Raises TrunkError if it cannot be read, is larger than MAX_BYTES, is of another format, version
    or unknown encoding, or is not what `write_manifest` wrote.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TrunkError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise TrunkError(f"{path} is larger than {MAX_BYTES} bytes: it is no trunk's manifest")
    try:
        return _parse(parse_json(raw))
    except ValueError as error:
        raise TrunkError(f"{path} is {error}") from None


def _parse(data: Any) -> Manifest:
    """Raises ValueError, whose text goes on from `PATH is`."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"not a trunk's manifest: wanted an object of format {FORMAT}")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ValueError(f"of version {show(data.get('version'))}, wanted {VERSION}")
    if data.get("encoding") not in ENCODINGS:
        found = show(data.get("encoding"))
        raise ValueError(f"of encoding {found}, wanted {' or '.join(ENCODINGS)}")
    if data.keys() != {*_FACTS, "crc32c", "files"}:
        raise ValueError(f"damaged: keys {show(sorted(data))}")
    tables = data["tables"]
    if not isinstance(tables, dict) or tables.keys() != {"size", "crc32c"}:
        raise ValueError("damaged: tables is not a size and a checksum")
    manifest = Manifest(
        encoding=data["encoding"],
        fingerprint=_fingerprint(data["fingerprint"]),
        embedding=_location(data["embedding"]),
        tables=(_number(tables["size"]), _number(tables["crc32c"])),
        files=tuple(_listed(file) for file in _list(data["files"])),
    )
    # the facts are known by now to be no more deeply nested than can be written again
    if data["crc32c"] != crc32c(_compact({key: data[key] for key in _FACTS})):
        raise ValueError("damaged: its checksum differs from its contents")
    return manifest


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ValueError(f"damaged: {show(value)} where a size or a checksum belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "/" in value or "\0" in value or value in ("", ".", ".."):
        raise ValueError(f"damaged: {show(value)} where a file's name belongs")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"damaged: {show(value)} where a list belongs")
    return value


def _listed(data: Any) -> Listed:
    if not isinstance(data, dict) or data.keys() != {"name", "size", "blocks"}:
        raise ValueError(f"damaged: {show(data)} where a file's name, size and blocks belong")
    blocks = _list(data["blocks"])
    for block in blocks:
        if len(_list(block)) != 3 or any(_number(value) != value for value in block):
            raise ValueError(f"damaged: {show(block)} where a block belongs")
    return Listed(_text(data["name"]), _number(data["size"]), blocks)


def _fingerprint(data: Any) -> Fingerprint:
    if not isinstance(data, dict) or data.keys() != {"shards"}:
        raise ValueError(f"damaged: {show(data)} where a fingerprint belongs")
    for shard in _list(data["shards"]):
        if not isinstance(shard, dict) or shard.keys() != {"name", *_SHARD_NUMBERS}:
            raise ValueError(f"damaged: {show(shard)} where a shard's fingerprint belongs")
        _text(shard["name"])
        for key in _SHARD_NUMBERS:
            _number(shard[key])
    return {"shards": data["shards"]}


def _location(data: Any) -> Location:
    if not isinstance(data, dict) or data.keys() != set(Location.__slots__):
        raise ValueError(f"damaged: {show(data)} where the embedding's place belongs")
    shape = tuple(_number(size) for size in _list(data["shape"]))
    dtype, length = data["dtype"], _number(data["length"])
    if dtype not in ("BF16", "F32") or length != prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"damaged: {show(data)} where the embedding's place belongs")
    return Location(_number(data["shard"]), dtype, shape, _number(data["offset"]), length)
