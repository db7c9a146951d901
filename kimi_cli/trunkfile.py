"""The facts of one trunk file: its blocks, vectors and matrices. Reads nothing.

A unit is one file: a layer, or the head (final mix, final norm, lm_head). Its blocks tile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from kimi_cli.native import Format


@dataclass(frozen=True, slots=True)
class Block:
    """A checksummed run of a file's bytes; `crc` is their CRC-32C, 0 in a layout only planned."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows `row` to `row + rows` of one matrix; the matrix's last block may end in padding."""

    row: int
    rows: int
    block: Block


@dataclass(frozen=True, slots=True)
class Vector:
    """A small tensor in the head: BF16 or F32, `shape` as the checkpoint has it (A_log may be
    longer than its heads); `offset` in the file and `length` in bytes."""

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [rows, cols]. Offsets are the file's, -1 for what it has not.

    Packed only, all in the head: `table` (U8 [16]), `starts` (u32 [rows + 1], little-endian) and
    `escapes` (u32 [escape_count], each column << 16 | bf16). `inline` is where its rows lie when
    they are in the head; `blocks` is then empty.
    """

    name: str
    format: Format
    rows: int
    cols: int
    table: int
    starts: int
    escapes: int
    escape_count: int
    inline: int
    blocks: tuple[RowBlock, ...]

    @property
    def offset(self) -> int:
        """Where its rows begin."""
        return self.blocks[0].block.offset if self.blocks else self.inline


@dataclass(frozen=True, slots=True)
class Unit:
    """One file: the JSON header, the head's blocks, and matrices in their order of use."""

    file: str
    size: int
    header: Block
    head: tuple[Block, ...]
    vectors: tuple[Vector, ...]
    matrices: tuple[StoredMatrix, ...]

    @property
    def head_offset(self) -> int:
        return self.head[0].offset

    @property
    def head_length(self) -> int:
        """Bytes of the head, which its blocks cover without a gap."""
        return sum(block.length for block in self.head)

    @property
    def widened_floats(self) -> int:
        """Float32 values of all vectors together."""
        return sum(prod(vector.shape) for vector in self.vectors)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the order of the file, which they tile."""
        rows = (piece.block for matrix in self.matrices for piece in matrix.blocks)
        return (self.header, *self.head, *rows)


def stamp(unit: Unit, crcs: Sequence[int]) -> Unit:
    """`unit` with the CRCs of its `blocks`, in their order."""
    left = iter(crcs)

    def stamped(block: Block) -> Block:
        return Block(block.offset, block.length, next(left))

    if len(crcs) != len(unit.blocks):
        raise ValueError(f"{len(crcs)} checksums for {len(unit.blocks)} blocks")
    header, head = stamped(unit.header), tuple(stamped(block) for block in unit.head)
    matrices = tuple(
        replace(
            matrix,
            blocks=tuple(RowBlock(b.row, b.rows, stamped(b.block)) for b in matrix.blocks),
        )
        for matrix in unit.matrices
    )
    return replace(unit, header=header, head=head, matrices=matrices)
