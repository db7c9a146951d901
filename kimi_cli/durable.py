"""Files written so that a half-written one is never mistaken for a whole one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"
"""What the name of a file ends in until it is whole."""


def write_at(fd: int, offset: int, data: Any) -> None:
    """Writes all of `data` at `offset`, however many calls that takes. Raises OSError."""
    with memoryview(data).cast("B") as left:
        done = 0
        while done < len(left):
            done += os.pwrite(fd, left[done:], offset + done)


def read_at(fd: int, offset: int, count: int) -> bytes:
    """The `count` bytes at `offset`, however many calls that takes; fewer where the file ends.
    Raises OSError."""
    pieces = []
    while count and (piece := os.pread(fd, count, offset)):
        pieces.append(piece)
        offset, count = offset + len(piece), count - len(piece)
    return b"".join(pieces)


def create(path: Path) -> int:
    """A descriptor of a new file at `path`, in the place of what was there: never of an old file,
    nor of a link's target. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def scratch(path: Path) -> Path:
    """A name beside `path` for what will become it, of this process alone."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def write_whole(path: Path, data: Any, temporary: Path | None = None) -> None:
    """Replaces the file at `path` by `data`, or leaves it as it was. Raises OSError, after which an
    old file may be replaced all the same, but not for sure after a power cut."""
    temporary = temporary or path.with_name(path.name + TEMPORARY)
    new = not os.path.lexists(path)
    try:
        fd = create(temporary)
        try:
            write_at(fd, 0, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        try:
            sync_directory(path.parent)
        except OSError:
            if new:
                path.unlink()
            raise
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def rename(old: Path, new: Path) -> None:
    """Renames within one directory, to stay so after a power cut. Raises OSError."""
    os.rename(old, new)
    sync_directory(new.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in `path` outlast a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
