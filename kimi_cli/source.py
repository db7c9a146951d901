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
from kimi_cli.native import U8, Format, pack_histogram

FORMATS = {"BF16": Format.BF16, "F32": Format.F32}
"""Of a tensor's values, by dtype."""
_SLICE = 1 << 18  # values looked at together


class Source:
    """The shards, opened as they are needed. Threads may share it. `close` it."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._shards = shards
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, place: Location, start: int, buffer: U8) -> None:
        """Fills `buffer` with the bytes of the tensor at `place` from its byte `start` on.

        Raises ReadError if a read fails, or if the shard ends before.
        """
        path, view, done = self._shards[place.shard], buffer.data, 0
        try:
            fd = self._fd(place.shard)
            while done < len(view):
                offset = place.offset + start + done
                count = os.preadv(fd, [view[done:]], offset)
                if count == 0:
                    raise ReadError(
                        f"{path} ends at byte {offset}, wanted {len(view)} bytes at "
                        f"{place.offset + start}: it has been cut short"
                    )
                done += count
        except OSError as error:
            raise ReadError(f"{path} cannot be read: {error.strerror or error}") from None

    def require_finite(self, name: str, place: Location, raw: U8, first: int) -> None:
        """Raises CheckpointError if `raw`, whose first value is element `first` of the tensor
        `name` at `place`, has a NaN or infinity."""
        self._refuse(name, place, first, not_finite(FORMATS[place.dtype], raw))

    def high_bytes(self, name: str, place: Location, raw: U8, first: int) -> NDArray[np.int64]:
        """How often [256] each high byte occurs in BF16 `raw`. Raises as `require_finite` does."""
        counts = np.zeros(256, np.int64)
        pack_histogram(raw.view(np.uint16), counts)
        if _suspicious(counts):
            self._refuse(name, place, first, _search(raw.view(np.uint16), 0x7F80))
        return counts

    def _refuse(
        self, name: str, place: Location, first: int, found: tuple[int, str] | None
    ) -> None:
        if found is None:
            return
        path, element = self._shards[place.shard], first + found[0]
        offset = place.offset + element * (2 if place.dtype == "BF16" else 4)
        raise CheckpointError(
            f"{path}: {name} has {found[1]} at element {element}, offset {offset}: the file is "
            f"damaged, {remedy.download(path.parent, [path.name])}"
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


def not_finite(fmt: Format, raw: U8) -> tuple[int, str] | None:
    """Which value of `raw`, BF16 or F32, is the first to be no number, and what it is."""
    if fmt == Format.F32:
        return _search(raw.view(np.uint32), 0x7F800000)
    counts = np.zeros(256, np.int64)
    pack_histogram(raw.view(np.uint16), counts)
    return _search(raw.view(np.uint16), 0x7F80) if _suspicious(counts) else None


def _suspicious(counts: NDArray[np.int64]) -> bool:
    """Whether any high byte can begin a NaN or an infinity: only 0x7F and 0xFF can."""
    return bool(counts[0x7F] or counts[0xFF])


def _search(bits: NDArray[np.uint16] | NDArray[np.uint32], exponent: int) -> tuple[int, str] | None:
    for at in range(0, bits.size, _SLICE):
        masked = bits[at : at + _SLICE] & bits.dtype.type(exponent)
        if masked.max() == exponent:
            index = int((masked == exponent).argmax()) + at
            mantissa = int(bits[index]) & (exponent & -exponent) - 1
            return index, "NaN" if mantissa else "infinity"
    return None
