"""The header of one safetensors file, read as if it were hostile.

    0        8                8 + n                                         file size
    | n: u64 | JSON, n bytes  | data: tensors without gap or overlap        |

The JSON maps each tensor's name to dtype, shape and its two offsets from 8 + n. Nothing is
allocated for a claim before the claim is held against the file's size. It does not read data.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from itertools import compress
from math import prod
from operator import add, itemgetter, sub
from pathlib import Path
from typing import Any, NamedTuple

from kimi_cli.errors import CheckpointError
from kimi_cli.jsonfile import parse_json, shortlist, show

MAX_HEADER = 100_000_000
"""Longest header accepted, in bytes: the limit of the safetensors library."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element; dtypes below a byte are refused."""

_MAX_RANK = 8
_LONGEST = 120
"""Characters of a tensor's name that are told: more than K3's names have."""
_METADATA = re.compile(r'\{"__metadata__": ?(\{[^{}]*\}), ?')
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)": ?\{"dtype": ?"([A-Z0-9_]+", ?"shape": ?\[[0-9, ]*)\], ?'
    r'"data_offsets": ?\[(0|[1-9][0-9]*), ?(0|[1-9][0-9]*)\]\}'
)
_MAX_OFFSET = 1 << 62
"""So that the header before the data does not make it more than 63 bits."""


class Entry(NamedTuple):
    """One tensor: `offset` is absolute in the file, `length` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class Table(NamedTuple):
    """The tensors of a header in columns, since there may be half a million: the fields of `Entry`,
    in the order of the header."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    lengths: list[int]

    def select(self, wanted: Sequence[bool]) -> Table:
        """Those tensors for which `wanted` is true."""
        return Table(
            list(compress(self.names, wanted)),
            list(compress(self.dtypes, wanted)),
            list(compress(self.shapes, wanted)),
            list(compress(self.offsets, wanted)),
            list(compress(self.lengths, wanted)),
        )

    def entries(self) -> dict[str, Entry]:
        """The same by name."""
        return dict(zip(self.names, map(Entry._make, zip(*self[1:], strict=True)), strict=True))


class ShortFile(CheckpointError):
    """The file ends at byte `size`, before its tensors do: `missing` bytes of it; `table` is the
    whole header, `first` the name of the first tensor that is cut."""

    def __init__(self, path: str, size: int, missing: int, table: Table) -> None:
        super().__init__(f"{path} is short by {missing:,} bytes")
        self.size, self.missing, self.table = size, missing, table
        cut = (
            (offset, name)
            for name, _, _, offset, length in zip(*table, strict=True)
            if offset + length > size
        )
        self.first = min(cut)[1]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of the safetensors file at `path`, by name, in the order of the header.

    Raises CheckpointError if the file cannot be read, and as `parse_table` does.
    """
    return read_table(path).entries()


def read_table(path: Path) -> Table:
    """The same in columns."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            raw = prefix + file.read(header_length(prefix, size, str(path)))
    except FileNotFoundError:
        raise CheckpointError(f"{path} {absence(path)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_table(raw, size, str(path))


def absence(path: Path) -> str:
    """How to say that `path` cannot be found: absent, or a link that leads nowhere."""
    if path.is_symlink():
        return f"is a symbolic link to {path.readlink()}, which does not exist"
    return "does not exist"


def parse_header(raw: bytes, file_size: int, path: str) -> dict[str, Entry]:
    """What `parse_table` gives, by name."""
    return parse_table(raw, file_size, path).entries()


def parse_table(raw: bytes, file_size: int, path: str) -> Table:
    """The tensors that `raw`, a file's first 8 + n bytes or more, declares.

    `file_size` is the whole file's in bytes; `path` only names it in errors. Raises ShortFile if
    only the file's size is wrong, being too small, and CheckpointError for anything else.
    """
    start = 8 + header_length(raw[:8], file_size, path)
    if len(raw) < start:
        raise CheckpointError(f"{path}: header ends after {len(raw)} bytes, wanted {start}")
    if raw[8:9] != b"{":
        raise CheckpointError(f"{path}: header does not begin with '{{': not a safetensors file")
    text = raw[8:start]
    try:
        table = _written_plainly(text, start, path) or _parsed(text, start, path)
    except ValueError as error:
        raise CheckpointError(f"{path}: header is {error}") from None
    end = _data_end(table, start, path)
    if end > file_size:
        raise ShortFile(path, file_size, end - file_size, table)
    if end < file_size:
        raise CheckpointError(f"{path}: {file_size - end:,} bytes after the last tensor")
    return table


def header_length(prefix: bytes, file_size: int, path: str) -> int:
    """n, once it is known to be at most MAX_HEADER and to lie inside the file."""
    if len(prefix) < 8 or file_size < 8:
        size = min(len(prefix), file_size)
        raise CheckpointError(f"{path} has {size} bytes: not a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{path} claims a header of {length:,} bytes, wanted at most {MAX_HEADER:,}: "
            "not a safetensors file"
        )
    if 8 + length > file_size:
        raise CheckpointError(
            f"{path} is short by at least {8 + length - file_size:,} bytes: it ends in its header"
        )
    return length


def _parsed(text: bytes, start: int, path: str) -> Table:
    """Every tensor of a header. Raises CheckpointError, and ValueError for what is not JSON."""
    header: dict[str, Any] = parse_json(text)
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        _check_metadata(metadata, path)
    table = Table([], [], [], [], [])
    for name, info in header.items():
        fault = _what_is_wrong(info)
        if fault:
            raise CheckpointError(f"{path}: {show(name, _LONGEST)} {fault}")
        begin, end = info["data_offsets"]
        table.names.append(name)
        table.dtypes.append(info["dtype"])
        table.shapes.append(tuple(info["shape"]))
        table.offsets.append(start + begin)
        table.lengths.append(end - begin)
    return table


def _check_metadata(metadata: object, path: str) -> None:
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {show(metadata)}, wanted texts by name")


def _written_plainly(raw: bytes, start: int, path: str) -> Table | None:
    """What `_parsed` gives, in half the time, for a header without a fault that is spaced as the
    safetensors library or Python's json does; None for any other.

    The text is cut into its entries and what separates them:

        { "NAME":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]} , "NAME":{ ... } }
    """
    try:
        text = raw.rstrip(b" ").decode()
    except UnicodeDecodeError:
        return None
    metadata = _METADATA.match(text)
    if metadata:
        try:
            _check_metadata(parse_json(metadata[1].encode()), path)
        except ValueError:  # its end may lie elsewhere
            return None
        text = "{" + text[metadata.end() :]
    cut = _ENTRY.split(text)
    names, kinds = cut[1::5], cut[2::5]
    if not names or cut[0] != "{" or cut[-1] != "}" or not {",", ", "}.issuperset(cut[5:-1:5]):
        return None
    if len(set(names)) != len(names) or "__metadata__" in names:
        return None
    try:
        known = {kind: _kind(kind) for kind in set(kinds)}
        begins, ends = list(map(int, cut[3::5])), list(map(int, cut[4::5]))
    except (KeyError, ValueError):
        return None
    lengths = list(map(sub, ends, begins))
    if lengths != [known[kind][2] for kind in kinds] or max(ends) > _MAX_OFFSET:
        return None
    return Table(
        names,
        [known[kind][0] for kind in kinds],
        [known[kind][1] for kind in kinds],
        [start + begin for begin in begins],
        lengths,
    )


def _kind(text: str) -> tuple[str, tuple[int, ...], int]:
    """Dtype, shape and bytes of `U8","shape":[2,3`. Raises KeyError or ValueError."""
    dtype, sizes = text.split('"')[0], json.loads(text[text.index("[") :] + "]")
    if len(sizes) > _MAX_RANK or not _all_sizes(sizes):
        raise ValueError(text)
    return dtype, tuple(sizes), prod(sizes) * DTYPE_BYTES[dtype]


def _what_is_wrong(info: Any) -> str:
    """What keeps one entry of a header from being a tensor; nothing if it is one."""
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        keys = shortlist(map(show, info)) if isinstance(info, dict) else show(info)
        return f"has {keys or 'nothing'}, wanted dtype, shape, data_offsets"
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"has the unknown dtype {show(dtype)}"
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not _all_sizes(shape):
        return f"has shape {show(shape)}, wanted up to {_MAX_RANK} sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not _all_sizes(offsets):
        return f"has data_offsets {show(offsets)}, wanted two byte offsets"
    length, found = prod(shape) * DTYPE_BYTES[dtype], offsets[1] - offsets[0]
    if found == length:
        return ""
    return f"has {found} bytes, wanted {show(length)} for {dtype} {show(shape)}"


def _all_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= _MAX_OFFSET for value in values)


def _data_end(table: Table, start: int, path: str) -> int:
    """Where the last tensor ends, once they are known to follow each other from `start` on."""
    ends: list[int] = list(map(add, table.offsets, table.lengths))
    if [start, *ends] == [*table.offsets, *ends[-1:]]:
        return ends[-1]
    end = start
    rows = zip(table.offsets, table.lengths, table.names, strict=True)
    for offset, length, name in sorted(rows, key=itemgetter(0, 1)):
        if offset != end:
            what = "overlaps the tensor before it" if offset < end else "follows a hole"
            raise CheckpointError(
                f"{path}: {show(name, _LONGEST)} {what}: data offset {offset - start}, "
                f"wanted {end - start}"
            )
        end += length
    return end
