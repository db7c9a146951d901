"""FILE: the whole state of a sequence at one position, as safetensors, every byte checksummed.

    | header | journal  | layer 0: kda, conv, or latent | layer 1 ... | checksums          |
    |        | U8 [n]   | F32                           |             | U32 [blocks + 2]   |

`journal` is what FILE.ids held then, so that FILE alone is a session too. `latent` has the
positions used and no more: a later run may have room for others. `checksums` are CRC-32C: of the
header, of each BLOCK of the data before them, and of the checksums themselves.

It is written and read in one pass, straight from and into the state's own arrays.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kimi_cli.durable import TEMPORARY, create, read_at, rename, write_at
from kimi_cli.errors import CheckpointError, SessionError
from kimi_cli.header import Entry, header_length, parse_header
from kimi_cli.journal import FORMAT, MAX_BYTES, VERSION
from kimi_cli.jsonfile import show
from kimi_cli.native import F32, crc32c
from kimi_cli.state import State

BLOCK = 4 << 20
"""Bytes that share a checksum."""
SYNC = 64 << 20
"""Bytes written before they are sent to the disk and dropped from the page cache."""
JOURNAL, SUMS = "journal", "checksums"
_MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """What FILE says of itself: header, journal and checksums are read and hold; `raw` is the
    header. `position` tokens have been fed, `saved` is in seconds since 1970."""

    path: Path
    size: int
    position: int
    saved: float
    journal: bytes = field(repr=False)
    raw: bytes = field(repr=False)
    entries: dict[str, Entry] = field(repr=False)


def arrays(state: State, position: int) -> Iterator[tuple[str, F32]]:
    """Every array of `state` by name, as far as `position` tokens fill it."""
    for layer in sorted([*state.kda, *state.latent]):
        if layer in state.latent:
            yield f"latent.{layer:03d}", state.latent[layer][:position]
        else:
            yield f"kda.{layer:03d}", state.kda[layer]
            yield f"conv.{layer:03d}", state.history[layer]


def state_bytes(state: State) -> int:
    """About what a snapshot of `state` takes on disk."""
    return sum(array.nbytes for _, array in arrays(state, state.position))


def write_snapshot(path: Path, state: State, journal: Iterable[bytes], length: int) -> None:
    """Replaces the snapshot at `path`, or leaves it as it was; `journal` are `length` bytes, a
    multiple of 4. A symbolic link at `path` is replaced, not followed. Raises OSError."""
    held = list(arrays(state, state.position))
    header = _header(held, state.position, length)
    temporary = path.with_name(path.name + TEMPORARY)
    fd = create(temporary)
    try:
        try:
            _write(fd, header, journal, [array for _, array in held])
            os.fsync(fd)
            _drop(fd)
        finally:
            os.close(fd)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _write(fd: int, header: bytes, journal: Iterable[bytes], held: list[F32]) -> None:
    sums, start = [crc32c(header)], len(header)
    write_at(fd, 0, header)
    at = crc = synced = 0
    for piece in _cut(chain(map(memoryview, journal), map(_bytes, held))):
        write_at(fd, start + at, piece)
        at, crc = at + len(piece), crc32c(piece, crc)
        if at % BLOCK == 0:
            sums.append(crc)
            crc = 0
        if at - synced >= SYNC:
            os.fdatasync(fd)
            _drop(fd)
            synced = at
    if at % BLOCK:
        sums.append(crc)
    table = np.array(sums, "<u4").tobytes()
    write_at(fd, start + at, table + crc32c(table).to_bytes(4, "little"))


def _drop(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).data).cast("B") if array.size else memoryview(b"")


def _cut(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """`pieces` cut where blocks of the data end; empty ones left out."""
    at = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            count = min(len(piece) - start, BLOCK - at % BLOCK)
            yield piece[start : start + count]
            start, at = start + count, at + count


def _header(held: list[tuple[str, F32]], position: int, journal: int) -> bytes:
    """The file's first bytes, padded with spaces to a whole page."""
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "position": str(position),
        "saved": f"{time.time():.3f}",
    }
    listed: dict[str, Any] = {"__metadata__": facts}
    end = 0

    def place(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal end
        span = [end, end + size]
        listed[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        end += size

    place(JOURNAL, "U8", [journal], journal)
    for name, array in held:
        place(name, "F32", list(array.shape), array.nbytes)
    count = _sum_count(end)
    place(SUMS, "U32", [count], 4 * count)
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text


def _sum_count(data: int) -> int:
    """Of the header, of the blocks of `data` bytes, of the checksums."""
    return -(-data // BLOCK) + 2


def read_snapshot(path: Path) -> Snapshot | None:
    """The snapshot at `path`, its state not yet read; None if there is no such file.

    Raises SessionError for one that cannot be read, is no session, of another version, truncated,
    or damaged in header, journal or checksums.
    """
    try:
        with _opened(path) as fd:
            return _read_snapshot(path, fd)
    except FileNotFoundError:
        return None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the regular file at `path`. Raises FileNotFoundError and SessionError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SessionError(f"{path} is not a regular file: a session is one")
            yield fd
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink():
            raise SessionError(f"{path} is a symbolic link: name the file itself") from None
        raise SessionError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_snapshot(path: Path, fd: int) -> Snapshot:
    size = os.fstat(fd).st_size
    entries, raw = _read_header(path, fd, size)
    facts = json.loads(raw[8:]).get("__metadata__") or {}
    if facts.get("format") != FORMAT:
        raise SessionError(f"{path} is not a session of kimi")
    if facts.get("version") != str(VERSION):
        version = show(facts.get("version")).strip('"')
        raise SessionError(f"{path} is of version {version}, wanted {VERSION}")
    names, offsets = list(entries), [entry.offset for entry in entries.values()]
    if len(names) < 3 or (names[0], names[-1]) != (JOURNAL, SUMS) or offsets != sorted(offsets):
        raise damaged(path, "its tensors are not a session's")
    table, length = entries[SUMS], entries[JOURNAL].length
    data = table.offset - len(raw)
    if table.dtype != "U32" or table.shape != (_sum_count(data),):
        raise damaged(path, "its checksums are not as many as its blocks")
    sums = _sums(path, fd, table)
    if sums[0] != crc32c(raw):
        raise damaged(path, "its header differs from its checksum")
    if length > MAX_BYTES:
        raise damaged(path, "its journal is too long")
    head = memoryview(bytearray(min(-(-length // BLOCK) * BLOCK, data)))
    _read(path, fd, len(raw), [head], sums[1:])
    try:
        position, saved = int(facts["position"]), float(facts["saved"])
    except (KeyError, ValueError):
        raise damaged(path, "it does not say where it is") from None
    if not math.isfinite(saved):
        raise damaged(path, "it does not say when it was saved")
    return Snapshot(path, size, position, saved, bytes(head[:length]), raw, entries)


def _read_header(path: Path, fd: int, size: int) -> tuple[dict[str, Entry], bytes]:
    try:
        prefix = read_at(fd, 0, 8)
        length = header_length(prefix, size, str(path))
        if length > _MAX_HEADER:
            raise SessionError(f"{path} is not a session of kimi")
        raw = prefix + read_at(fd, 8, length)
        return parse_header(raw, size, str(path)), raw
    except SessionError:
        raise
    except CheckpointError as error:
        text = str(error)
        if "not a safetensors file" in text:
            raise SessionError(f"{path} is not a session of kimi") from None
        raise damaged(path, text.removeprefix(str(path)).lstrip(": ")) from None


def _sums(path: Path, fd: int, table: Entry) -> list[int]:
    raw = memoryview(bytearray(table.length))
    _read_into(path, fd, table.offset, raw)
    if crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise damaged(path, "its checksums differ from their own")
    found: list[int] = np.frombuffer(raw, "<u4").tolist()
    return found[:-1]


def load_state(snapshot: Snapshot, state: State) -> None:
    """Fills `state` and moves it to the snapshot's position. Raises SessionError if the file has
    changed, is damaged, or is another model's; the state is then of no use."""
    if snapshot.position > state.context:
        raise ValueError(f"{snapshot.position} positions in a context of {state.context}")
    path = snapshot.path
    held = list(arrays(state, snapshot.position))
    wanted = [(JOURNAL, "U8", (len(snapshot.journal),))]
    wanted += [(name, "F32", array.shape) for name, array in held]
    found = [(name, entry.dtype, entry.shape) for name, entry in snapshot.entries.items()]
    if found[:-1] != wanted:
        raise SessionError(f"{path} does not hold the state of this model")
    _read_all(snapshot, [_bytes(array) for _, array in held])
    state.position = snapshot.position


def check_state(snapshot: Snapshot) -> None:
    """Reads all of the file against its checksums. Raises SessionError."""
    scratch = memoryview(bytearray(BLOCK))
    left = snapshot.entries[SUMS].offset - len(snapshot.raw) - len(snapshot.journal)
    pieces = [scratch[: min(BLOCK, left - at)] for at in range(0, left, BLOCK)]
    _read_all(snapshot, pieces)


def _read_all(snapshot: Snapshot, pieces: list[memoryview]) -> None:
    path, start = snapshot.path, len(snapshot.raw)
    try:
        with _opened(path) as fd:
            raw = memoryview(bytearray(start))
            if os.fstat(fd).st_size == snapshot.size:
                _read_into(path, fd, 0, raw)
            if raw != snapshot.raw:
                raise SessionError(f"{path} has changed since it was opened")
            sums = _sums(path, fd, snapshot.entries[SUMS])[1:]
            journal = memoryview(bytearray(len(snapshot.journal)))
            _read(path, fd, start, [journal, *pieces], sums)
            _drop(fd)
    except FileNotFoundError:
        raise SessionError(f"{path} has gone since it was opened") from None


def _read(path: Path, fd: int, start: int, pieces: list[memoryview], sums: list[int]) -> None:
    """Fills `pieces` from byte `start` of the file on, whole blocks or all there is, and holds each
    block against its checksum."""
    at = crc = 0
    end = sum(map(len, pieces))
    for piece in _cut(pieces):
        _read_into(path, fd, start + at, piece)
        at, crc = at + len(piece), crc32c(piece, crc)
        if at % BLOCK == 0 or at == end:
            if crc != sums[(at - 1) // BLOCK]:
                first = start + (at - 1) // BLOCK * BLOCK
                raise damaged(path, f"bytes {first} to {start + at} differ from their checksum")
            crc = 0


def _read_into(path: Path, fd: int, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done:]], offset + done)
        except OSError as error:
            reason = error.strerror or error
            raise SessionError(
                f"{path}: reading {len(into)} bytes at {offset} failed: {reason}"
            ) from None
        if count == 0:
            raise SessionError(f"{path} has become shorter while it was read")
        done += count


def damaged(path: Path, how: str) -> SessionError:
    """What is said of a snapshot that does not hold; FILE.ids has the session too."""
    return SessionError(
        f"{path} is damaged: {how}; delete it to have the session read again from {path.name}.ids"
    )
