"""The checkpoint's bytes, read by position: retried when short, refused when not finite."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import remedy
from kimi_cli.checkpoint import Location
from kimi_cli.errors import CheckpointError, ReadError
from kimi_cli.finite import NUMBERS, not_finite, search, suspicious, told
from kimi_cli.native import U8, Format, pack_histogram

FORMATS = {"BF16": Format.BF16, "F32": Format.F32}
"""Of a tensor's values, by dtype."""


class Source:
    """The shards, opened as they are needed. Threads may share it. `close` it."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._shards = shards
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, name: str, place: Location, start: int, buffer: U8) -> None:
        """Fills `buffer` with the bytes of tensor `name`, at `place`, from its byte `start` on.

        Raises ReadError if a read fails, or if the shard ends before.
        """
        path, view, done = self._shards[place.shard], buffer.data, 0
        what = f"{len(view)} bytes of {name} at {place.offset + start}"
        try:
            fd = self._fd(place.shard)
            while done < len(view):
                offset = place.offset + start + done
                count = os.preadv(fd, [view[done:]], offset)
                if count == 0:
                    raise ReadError(
                        f"{path} ends at byte {offset}, wanted {what}: it has been cut short"
                    )
                done += count
        except OSError as error:
            raise ReadError(f"{path}: reading {what} failed: {error.strerror or error}") from None

    def require_finite(self, name: str, place: Location, raw: U8, first: int) -> None:
        """Raises CheckpointError if `raw`, whose first value is element `first` of the tensor
        `name` at `place`, has a NaN or infinity."""
        self._refuse(name, place, first, not_finite(FORMATS[place.dtype], raw))

    def high_bytes(self, name: str, place: Location, raw: U8, first: int) -> NDArray[np.int64]:
        """How often [256] each high byte occurs in BF16 `raw`. Raises as `require_finite` does."""
        counts = np.zeros(256, np.int64)
        pack_histogram(raw.view(np.uint16), counts)
        if suspicious(counts.nonzero()[0]):
            self._refuse(name, place, first, search(raw.view(np.uint16), 0x7F80))
        return counts

    def _refuse(
        self, name: str, place: Location, first: int, found: tuple[int, str] | None
    ) -> None:
        if found is None:
            return
        path = self._shards[place.shard]
        offset = place.offset + (first + found[0]) * NUMBERS[FORMATS[place.dtype]]
        raise CheckpointError(
            f"{path}: {told(name, found, first, offset)}: the file is damaged, "
            f"{remedy.download(path.parent, [path.name])}"
        )

    def drop(self, places: Iterable[Location]) -> None:
        """Lets the system forget what it cached of these tensors."""
        for place in places:
            with self._lock:
                fd = self._fds.get(place.shard)
            if fd is not None:
                os.posix_fadvise(fd, place.offset, place.length, os.POSIX_FADV_DONTNEED)

    def _fd(self, shard: int) -> int:
        with self._lock:
            if shard not in self._fds:
                self._fds[shard] = os.open(self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[shard]

    def close(self) -> None:
        """Closes the shards; no read may be running."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
