"""The header of one safetensors file, read as if it were hostile.

    0        8                8 + n                                         file size
    | n: u64 | JSON, n bytes  | data: tensors without gap or overlap        |

The JSON maps each tensor's name to dtype, shape and its two offsets from 8 + n. Nothing is
allocated for a claim before the claim is held against the file's size. It does not read data.
"""

from __future__ import annotations

import stat
from functools import partial
from itertools import chain
from math import prod
from operator import mul, sub
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
_MAX_OFFSET = 1 << 62
"""So that the header before the data does not make it more than 63 bits."""


class Entry(NamedTuple):
    """One tensor: `offset` is absolute in the file, `length` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


_new_entry = partial(tuple.__new__, Entry)  # Entry._make without a Python call for each


class ShortFile(CheckpointError):
    """The file ends at byte `size`, before its tensors do: `missing` bytes of it; `entries` is the
    whole header, `first` the name of the first tensor that is cut."""

    def __init__(self, path: str, size: int, missing: int, entries: dict[str, Entry]) -> None:
        super().__init__(f"{path} is short by {missing:,} bytes")
        self.size, self.missing, self.entries = size, missing, entries
        cut = (name for name, entry in entries.items() if entry.offset + entry.length > size)
        self.first = min(cut, key=lambda name: entries[name].offset)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of the safetensors file at `path`, by name, in the order of the header.

    Raises CheckpointError if the file cannot be read, and as `parse_header` does.
    """
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
    return parse_header(raw, size, str(path))


def absence(path: Path) -> str:
    """How to say that `path` cannot be found: absent, or a link that leads nowhere."""
    if path.is_symlink():
        return f"is a symbolic link to {path.readlink()}, which does not exist"
    return "does not exist"


def parse_header(raw: bytes, file_size: int, path: str) -> dict[str, Entry]:
    """The tensors that `raw`, a file's first 8 + n bytes or more, declares, in the header's order.

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
        header: dict[str, Any] = parse_json(text, unique=b"\\" in text)
        strings = _check_metadata(header.pop("__metadata__", None), path)
        entries = _entries(header, start)
        if entries is None:
            raise CheckpointError(f"{path}: {_first_fault(header)}")
        strings += 5 * len(entries)
        if b"\\" not in text and text.count(b'"') != 2 * strings:
            parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: header is {error}") from None
    end = _data_end(entries, start, path)
    if end > file_size:
        raise ShortFile(path, file_size, end - file_size, entries)
    if end < file_size:
        raise CheckpointError(f"{path}: {file_size - end:,} bytes after the last tensor")
    return entries


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


def _check_metadata(metadata: object, path: str) -> int:
    """The number of strings in the header that belong to `metadata`, its own key included."""
    if metadata is None:
        return 0
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {show(metadata)}, wanted texts by name")
    return 1 + 2 * len(metadata)


def _entries(header: dict[str, Any], start: int) -> dict[str, Entry] | None:
    """Every entry of a header, checked in bulk, since there may be half a million; None if
    `_what_is_wrong` has something to say of one."""
    infos = header.values()
    try:
        dtypes = [info["dtype"] for info in infos]
        shapes = [info["shape"] for info in infos]
        spans = [info["data_offsets"] for info in infos]
        begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
        widths = [DTYPE_BYTES[dtype] for dtype in dtypes]
        numbers = [*begins, *ends, *chain.from_iterable(shapes)]
    except (KeyError, TypeError, ValueError):
        return None
    if not set(map(type, shapes)) <= {list} or not set(map(len, infos)) <= {3}:
        return None
    if not set(map(type, numbers)) <= {int}:  # JSON has bool and float beside it
        return None
    if min(numbers, default=0) < 0 or max(numbers, default=0) > _MAX_OFFSET:
        return None
    if max(map(len, shapes), default=0) > _MAX_RANK:
        return None
    lengths = list(map(mul, map(prod, shapes), widths))
    if lengths != list(map(sub, ends, begins)):
        return None
    offsets = [start + begin for begin in begins]
    entries = map(_new_entry, zip(dtypes, map(tuple, shapes), offsets, lengths, strict=True))
    return dict(zip(header, entries, strict=True))


def _first_fault(header: dict[str, Any]) -> str:
    faults = ((name, _what_is_wrong(info)) for name, info in header.items())
    return next(f"{show(name, _LONGEST)} {fault}" for name, fault in faults if fault)


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


def _data_end(entries: dict[str, Entry], start: int, path: str) -> int:
    """Where the last tensor ends, once they are known to follow each other from `start` on."""
    end = start
    for entry in entries.values():
        if entry.offset != end:
            break
        end += entry.length
    else:
        return end
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].length)):
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "follows a hole"
            raise CheckpointError(
                f"{path}: {show(name, _LONGEST)} {what}: data offset {entry.offset - start}, "
                f"wanted {end - start}"
            )
        end += entry.length
    return end
