"""Whether weights are numbers: a checksum holds for whatever was written. Reads no file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kimi_cli.errors import CheckpointError
from kimi_cli.native import U8, Format, Matrix, pack_histogram, row_bytes, unpack_rows
from kimi_cli.trunkfile import RowBlock, StoredMatrix, Unit

NUMBERS = {Format.BF16: 2, Format.F32: 4}
"""Bytes of a value in the formats that are values as they stand."""
_SLICE = 1 << 18  # values looked at together


def not_finite(fmt: Format, raw: U8) -> tuple[int, str] | None:
    """Which value of `raw`, BF16 or F32, is the first that is no number, and what it is."""
    if fmt == Format.F32:
        return search(raw.view(np.uint32), 0x7F800000)
    counts = np.zeros(256, np.int64)
    pack_histogram(raw.view(np.uint16), counts)
    return search(raw.view(np.uint16), 0x7F80) if suspicious(counts.nonzero()[0]) else None


def suspicious(high_bytes: NDArray[np.generic]) -> bool:
    """Whether any of these high bytes of BF16 can begin a NaN or an infinity."""
    return bool(np.isin(high_bytes, (0x7F, 0xFF)).any())


def search(bits: NDArray[np.uint16] | NDArray[np.uint32], exponent: int) -> tuple[int, str] | None:
    """The same of bit patterns, all of whose `exponent` bits are set in what is no number."""
    for at in range(0, bits.size, _SLICE):
        masked = bits[at : at + _SLICE] & bits.dtype.type(exponent)
        if masked.max() == exponent:
            index = int((masked == exponent).argmax()) + at
            mantissa = int(bits[index]) & (exponent & -exponent) - 1
            return index, "NaN" if mantissa else "infinity"
    return None


def told(name: str, found: tuple[int, str], first: int, offset: int | None = None) -> str:
    """`found` in words; element `first` of the tensor `name` is at `offset`, where that is one."""
    where = "" if offset is None else f", offset {offset}"
    return f"{name} has {found[1]} at element {first + found[0]}{where}"


class Head:
    """The head of a trunk's file: what its own tensors are, and what its packed rows need."""

    def __init__(self, unit: Unit, raw: U8) -> None:
        """`raw` are the head's bytes."""
        self._unit, self._raw = unit, raw

    def _at(self, offset: int, length: int) -> U8:
        return self._raw[offset - self._unit.head_offset :][:length]

    def doubtful(self, matrix: StoredMatrix) -> bool:
        """Whether rows of a packed `matrix` can hold what is no number."""
        return matrix.format == Format.PACKED and suspicious(self._at(matrix.table, 16))

    def faults(self) -> Iterator[str]:
        """What is no number in the head, a clause a tensor."""
        for vector in self._unit.vectors:
            found = not_finite(vector.format, self._at(vector.offset, vector.length))
            if found:
                at = vector.offset + found[0] * NUMBERS[vector.format]
                yield told(vector.name, found, 0, at)
        for matrix in self._unit.matrices:
            if matrix.format == Format.PACKED:
                escapes = self._at(matrix.escapes, 4 * matrix.escape_count).view(np.uint32)
                found = search(escapes.astype(np.uint16), 0x7F80) if escapes.size else None
                if found:
                    yield told(f"{matrix.name}.escapes", found, 0, matrix.escapes + 4 * found[0])
            if not matrix.blocks:
                size = matrix.rows * row_bytes(matrix.format, matrix.cols)
                yield from self._inline(matrix, self._at(matrix.inline, size))

    def _inline(self, matrix: StoredMatrix, raw: U8) -> Iterator[str]:
        if matrix.format == Format.PACKED:
            fault = self.packed(matrix, 0, matrix.rows, raw) if self.doubtful(matrix) else ""
            if fault:
                yield fault
            return
        found = not_finite(matrix.format, raw)
        if found:
            at = matrix.inline + found[0] * NUMBERS[matrix.format]
            yield told(matrix.name, found, 0, at)

    def packed(self, matrix: StoredMatrix, row: int, rows: int, raw: U8) -> str:
        """What is no number in packed rows from `row` on, or why they are no rows; or nothing."""
        starts = self._at(matrix.starts, 4 * (matrix.rows + 1)).view(np.uint32)
        escapes = self._at(matrix.escapes, 4 * matrix.escape_count).view(np.uint32)
        table = self._at(matrix.table, 16)
        piece = Matrix(
            Format.PACKED, rows, matrix.cols, raw, table, starts[row : row + rows + 1], escapes
        )
        out = np.empty((rows, matrix.cols), np.uint16)
        try:
            unpack_rows(piece, out)
        except CheckpointError as error:
            return f"{matrix.name}: {error}"
        found = search(out.reshape(-1), 0x7F80)
        return told(matrix.name, found, row * matrix.cols) if found else ""


def rows_fault(matrix: StoredMatrix, block: RowBlock, done: int, raw: U8) -> str:
    """What is no number in `raw`, `done` bytes into the rows of `block`, not packed; or nothing."""
    width = NUMBERS[matrix.format]
    found = not_finite(matrix.format, raw[: len(raw) // width * width])
    first = block.row * matrix.cols + done // width
    at = block.block.offset + done + found[0] * width if found else 0
    return told(matrix.name, found, first, at) if found else ""
