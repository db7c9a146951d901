"""A .npy file written row by row, whose number of rows is known only at the end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kimi_cli.durable import create, scratch
from kimi_cli.errors import KimiError
from kimi_cli.native import F32

HEADER = 128


class NpyWriter:
    """float32 [n, width] rows appended to `path`. The file appears under its name in `close`."""

    def __init__(self, path: Path, width: int) -> None:
        self._path, self._width, self.rows = path, width, 0
        self._published = False
        self._part = scratch(path)
        try:
            self._file = os.fdopen(create(self._part), "wb")
            self._file.write(self._header())
        except OSError as error:
            raise self._failed(error) from None

    def write(self, rows: F32) -> None:
        """Appends rows [k, width]."""
        try:
            for row in rows:  # without a copy of the whole chunk
                self._file.write(row.data)
        except OSError as error:
            raise self._failed(error) from None
        self.rows += len(rows)

    def close(self, rows: int | None = None) -> None:
        """Completes the header, syncs and publishes the file; does nothing the second time.

        `rows` keeps only so many of those written, for a run that was interrupted.
        """
        if self._published:
            return
        self.rows = self.rows if rows is None else min(self.rows, rows)
        try:
            self._file.truncate(HEADER + self.rows * self._width * 4)  # an interrupted write
            self._file.seek(0)
            self._file.write(self._header())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._part, self._path)
        except OSError as error:
            raise self._failed(error) from None
        self._published = True

    def discard(self) -> None:
        """Removes what was written; does nothing after `close`."""
        if self._published:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _header(self) -> bytes:
        """numpy's format 1.0, padded to a fixed length."""
        shape = f"({self.rows}, {self._width})"
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        body = text.ljust(HEADER - 11) + "\n"
        return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + body.encode()

    def _failed(self, error: OSError) -> KimiError:
        return KimiError(f"{self._path}: cannot be written: {error.strerror}")
