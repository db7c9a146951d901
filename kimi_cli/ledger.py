"""The results of many prompts in a file, one JSON line each, which survives whatever happens.

    {"line": 1, "crc": "9ae0daaf", ...}\n      the first line of the prompts, by number and CRC-32C
    {"line": 2, "crc": "5ce1ba20", "error": ...}\n
    {"line": 3, "cr                            torn by a power cut: dropped when it is opened again

A result is on the disk before the next prompt begins. One with an `error`, or that was interrupted,
is made again, and then takes the place of the old one.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kimi_cli.durable import create, read_at, rename, scratch, sync_directory, write_at
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.jsonfile import parse_json

_COPY = 1 << 20
_LONG, _LONGEST = 1 << 16, 1 << 28
"""Bytes of a line: a file of another kind is refused by the first, not read to a distant end."""
_BEGIN = b'{"line": '


class Result(NamedTuple):
    """What the file has for a line: where, and whether that is all there will be."""

    crc: str
    final: bool
    offset: int
    length: int


class Ledger:
    """The file at `path`, locked; a context manager. `results` are the latest for each line."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it. Raises UsageError for a file of another kind, KimiError if another
        process uses it."""
        self.path = path
        self.results: dict[int, Result] = {}
        self._order: list[int] = []
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file: results are added to one")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._size = self._read()
            if self._size < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, self._size)
            sync_directory(path.parent)
        except OSError as error:
            self.close()
            raise KimiError(f"{path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlocks it. Does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def add(self, line: int, crc: str, final: bool, facts: dict[str, Any]) -> None:
        """Appends a result, on the disk when it returns. Raises KimiError, and then it has what it
        had before."""
        text = json.dumps({"line": line, "crc": crc, **facts}, ensure_ascii=False) + "\n"
        data = text.encode("utf-8", "replace")
        try:
            write_at(self._fd, self._size, data)
            os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise KimiError(
                f"{self.path} cannot be written: {error.strerror or error}; what it has is kept, "
                "and the same command goes on from there"
            ) from None
        self._note(line, Result(crc, final, self._size, len(data)))
        self._size += len(data)

    def sort(self) -> None:
        """Leaves one result a line, in the order of the prompts. Raises KimiError."""
        if self._order == sorted(self.results):
            return
        temporary = scratch(self.path)
        try:
            with os.fdopen(create(temporary), "wb") as file:
                for line in sorted(self.results):
                    result = self.results[line]
                    for at in range(0, result.length, _COPY):
                        size = min(_COPY, result.length - at)
                        file.write(read_at(self._fd, result.offset + at, size))
                file.flush()
                os.fsync(file.fileno())
            rename(temporary, self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise KimiError(
                f"{self.path} has every result, but cannot be put in order: "
                f"{error.strerror or error}"
            ) from None

    def _note(self, line: int, result: Result) -> None:
        self.results[line] = result
        self._order.append(line)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KimiError(f"{self.path} is in use by another process") from None

    def _read(self) -> int:
        """Takes in what is there; the bytes of it that are whole."""
        at = 0
        torn = b""
        with open(self._fd, "rb", closefd=False) as file:
            while raw := file.readline(_LONG):
                if raw[:1] in (b"{", b"\0") and not raw.endswith(b"\n"):
                    raw += file.readline(_LONGEST)
                found = None if torn else _result(raw, at)
                if found is None:
                    if torn or not (_BEGIN.startswith(raw[: len(_BEGIN)]) or not raw.strip(b"\0")):
                        raise UsageError(
                            f"{self.path}: what is at byte {at} is no result of kimi generate "
                            "--prompts: give another --out"
                        )
                    torn = raw
                    continue
                self._note(*found)
                at += len(raw)
        return at


def _result(raw: bytes, offset: int) -> tuple[int, Result] | None:
    """The line's number and result, None if it is none or not whole."""
    if not raw.endswith(b"\n"):
        return None
    try:
        data = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    line, crc = data.get("line"), data.get("crc")
    if type(line) is not int or not isinstance(crc, str):
        return None
    final = "error" not in data and data.get("stop_reason") != "interrupted"
    return line, Result(crc, final, offset, len(raw))
