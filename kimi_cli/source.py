"""The checkpoint's bytes, read by position: retried when short, refused when not finite."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli.checkpoint import Location
from kimi_cli.errors import CheckpointError, ReadError
from kimi_cli.native import U8, Format, pack_histogram

_SLICE = 1 << 18  # values looked at together


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

    def high_bytes(self, name: str, place: Location, start: int, raw: U8) -> NDArray[np.int64]:
        """How often [256] each high byte occurs in bf16 `raw`, read from byte `start` on.

        Raises CheckpointError if a value is NaN or infinite: only 0x7F and 0xFF can begin one.
        """
        counts = np.zeros(256, np.int64)
        pack_histogram(raw.view(np.uint16), counts)
        if counts[0x7F] or counts[0xFF]:
            self._search(name, place, start, raw.view(np.uint16), 0x7F80)
        return counts

    def require_finite(self, name: str, place: Location, fmt: Format, start: int, raw: U8) -> None:
        """Raises CheckpointError if `raw`, read from byte `start` on, has a NaN or infinity.

        `fmt` is BF16 or F32.
        """
        if fmt == Format.BF16:
            self.high_bytes(name, place, start, raw)
        else:
            self._search(name, place, start, raw.view(np.uint32), 0x7F800000)

    def _search(
        self,
        name: str,
        place: Location,
        start: int,
        bits: NDArray[np.uint16] | NDArray[np.uint32],
        exponent: int,
    ) -> None:
        for at in range(0, bits.size, _SLICE):
            masked = bits[at : at + _SLICE] & bits.dtype.type(exponent)
            if masked.max() == exponent:
                index = int((masked == exponent).argmax()) + at
                mantissa = int(bits[index]) & (exponent & -exponent) - 1
                what = "NaN" if mantissa else "infinity"
                first, size = start // bits.itemsize, bits.itemsize
                raise CheckpointError(
                    f"{self._shards[place.shard]}: {name} has {what} at element {first + index}, "
                    f"offset {place.offset + start + index * size}: the shard is damaged, "
                    "download it again"
                )

    def close(self) -> None:
        """Closes the shards; no read may be running."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
