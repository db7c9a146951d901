"""One trunk file, written from the checkpoint: counted, laid out, packed, compared, read back.

Rows pass through in blocks of a few MB, several at once, each in its worker's own buffers: memory
does not grow with the layer. What the file's bytes are does not depend on the workers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kimi_cli import native
from kimi_cli.checkpoint import Checkpoint, Location
from kimi_cli.config import Config
from kimi_cli.durable import create, write_at
from kimi_cli.errors import KimiError, ReadError
from kimi_cli.layout import BLOCK, Stored, few_escapes, lay_out, may_pack
from kimi_cli.native import U8, Format
from kimi_cli.source import FORMATS, Source
from kimi_cli.tables import row_sums
from kimi_cli.tensors import Tensor
from kimi_cli.threads import require, starting
from kimi_cli.trunkfile import Block, RowBlock, StoredMatrix, Unit, stamp

WORKERS = 4
"""Most blocks in hand at once; each takes up to three times its bytes."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class _Buffers(threading.local):
    """Memory of one worker, by use, kept from block to block."""

    def __init__(self) -> None:
        self._held: dict[str, U8] = {}

    def get(self, use: str, size: int) -> U8:
        if use not in self._held or len(self._held[use]) < size:
            self._held.pop(use, None)
            self._held[use] = np.empty(size, np.uint8)
        return self._held[use][:size]


@dataclass(frozen=True)
class _Rows:
    """Rows to be stored: into `into`, or, where that is None, into the file with their padding."""

    matrix: StoredMatrix
    place: Location
    piece: RowBlock
    table: U8 | None
    into: U8 | None


@dataclass(frozen=True)
class _Packed:
    """What became of `job`: the CRC of its block, how many escapes its rows have, and which."""

    job: _Rows
    crc: int
    counts: NDArray[np.uint32]
    escapes: NDArray[np.uint32]


class Packer:
    """Writes the units of one trunk. `close` it: it holds threads and files.

    `advance` is called, by the thread that calls `write`, with bytes of the checkpoint dealt with:
    in all, the length of each tensor. Raises KimiError where the system has no threads for it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Config,
        packed: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._tensors, self._config, self._packed = checkpoint.tensors, config, packed
        self._advance = advance
        self._source = Source(checkpoint.shards)
        self._buffers = _Buffers()
        self._workers = max(2, min(WORKERS, len(os.sched_getaffinity(0))))
        self._pool = _pool(self._workers)

    def close(self) -> None:
        """Ends the threads, after the blocks they have in hand."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def write(self, path: Path, file: str, tensors: Sequence[Tensor]) -> Unit:
        """Writes `tensors` to `path`, synced and read back; the unit is that of `file`.

        Raises CheckpointError for NaN or infinity in a tensor, ReadError if a shard cannot be read
        or the file reads back otherwise, OSError if it cannot be written.
        """
        stored, tables, counted = self._choose(tensors)
        unit, header = lay_out(file, stored, self._config)
        fd = create(path)
        try:
            crcs = [native.crc32c(header)]
            head, rows = self._store(fd, unit, tables, counted)
            for block in unit.head:
                at = block.offset - unit.head_offset
                crcs.append(native.crc32c(head[at : at + block.length]))
            write_at(fd, 0, header)
            write_at(fd, unit.head_offset, head)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            unit = stamp(unit, crcs + rows)
            if not self._same(fd, unit):
                raise ReadError(f"{path} reads back otherwise than it was written")
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        self._source.drop(self._tensors[tensor.name] for tensor in tensors)
        return unit

    def row_sums(self, name: str) -> NDArray[np.uint32]:
        """The CRC-32C of each row of matrix `name`, which stays in the checkpoint.

        Raises CheckpointError for NaN or infinity in it, ReadError if its shard cannot be read.
        """
        place = self._tensors[name]
        rows, cols = place.shape
        stride = place.length // rows
        step, sums = max(1, BLOCK // stride), np.empty(rows, np.uint32)

        def fill(row: int) -> int:
            count = min(step, rows - row)
            raw = self._buffers.get("raw", count * stride)
            self._source.read(name, place, row * stride, raw)
            self._source.require_finite(name, place, raw, row * cols)
            sums[row : row + count] = row_sums(raw.reshape(count, stride))
            return len(raw)

        self._each(fill, range(0, rows, step), self._advance)
        self._source.drop([place])
        return sums

    def intact(self, path: Path, unit: Unit) -> bool:
        """Whether every block of the file at `path` has its CRC. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._same(fd, unit)
        finally:
            os.close(fd)

    def _choose(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Stored], dict[str, U8], frozenset[str]]:
        """How each tensor is stored, the tables of those packed, and which have been counted.

        A tensor that is counted is read twice; half of its bytes are dealt with each time.
        """
        stored, tables, counted = [], {}, set()
        for tensor in tensors:
            place = self._tensors[tensor.name]
            piece = Stored(tensor, FORMATS[place.dtype], place.shape)
            if self._packed and may_pack(tensor, piece.format):
                counted.add(tensor.name)
                table, escapes = _table(self._histogram(tensor, place))
                if few_escapes(tensor, escapes):
                    piece = Stored(tensor, Format.PACKED, place.shape, escapes)
                    tables[tensor.name] = table
            stored.append(piece)
        return stored, tables, frozenset(counted)

    def _histogram(self, tensor: Tensor, place: Location) -> NDArray[np.int64]:
        counts = np.zeros(256, np.int64)

        def count(start: int) -> tuple[int, NDArray[np.int64]]:
            raw = self._buffers.get("raw", min(BLOCK, place.length - start))
            self._source.read(tensor.name, place, start, raw)
            return len(raw), self._source.high_bytes(tensor.name, place, raw, start // 2)

        def add(found: tuple[int, NDArray[np.int64]]) -> None:
            np.add(counts, found[1], out=counts)
            self._advance(found[0] // 2)

        self._each(count, range(0, place.length, BLOCK), add)
        return counts

    def _store(
        self, fd: int, unit: Unit, tables: dict[str, U8], counted: frozenset[str]
    ) -> tuple[U8, list[int]]:
        """Writes the row blocks; the head's bytes, and the row blocks' CRCs."""
        head = np.zeros(unit.head_length, np.uint8)

        def at(offset: int, length: int) -> U8:
            return head[offset - unit.head_offset :][:length]

        for vector in unit.vectors:
            raw = at(vector.offset, vector.length)
            place = self._tensors[vector.name]
            self._source.read(vector.name, place, 0, raw)
            self._source.require_finite(vector.name, place, raw, 0)
            self._advance(vector.length)
        crcs: list[int] = []
        ends = {matrix.name: 0 for matrix in unit.matrices}

        def jobs() -> Iterator[_Rows]:
            for matrix in unit.matrices:
                place, table = self._tensors[matrix.name], tables.get(matrix.name)
                if table is not None:
                    at(matrix.table, len(table))[:] = table
                for piece in matrix.blocks:
                    yield _Rows(matrix, place, piece, table, None)
                if not matrix.blocks:
                    size = matrix.rows * native.row_bytes(matrix.format, matrix.cols)
                    whole = RowBlock(0, matrix.rows, Block(matrix.inline, size, 0))
                    yield _Rows(matrix, place, whole, table, at(matrix.inline, size))

        def collect(done: _Packed) -> None:
            matrix, piece = done.job.matrix, done.job.piece
            if done.job.into is None:
                crcs.append(done.crc)
            if matrix.format == Format.PACKED:
                begin = ends[matrix.name]
                end = ends[matrix.name] = begin + len(done.escapes)
                if end > matrix.escape_count:
                    raise changed
                starts = at(matrix.starts + 4 * (piece.row + 1), 4 * piece.rows).view(np.uint32)
                np.cumsum(done.counts, out=starts)
                starts += np.uint32(begin)
                at(matrix.escapes + 4 * begin, 4 * (end - begin)).view(np.uint32)[:] = done.escapes
            read = piece.rows * done.job.place.length // matrix.rows
            self._advance(read - read // 2 if matrix.name in counted else read)

        changed = ReadError(f"{unit.file}: the checkpoint changed while it was read")
        self._each(lambda job: self._store_rows(fd, job), jobs(), collect)
        if any(ends[matrix.name] != matrix.escape_count for matrix in unit.matrices):
            raise changed
        return head, crcs

    def _store_rows(self, fd: int, job: _Rows) -> _Packed:
        matrix, piece, place = job.matrix, job.piece, job.place
        stride = place.length // matrix.rows
        raw = self._buffers.get("raw", piece.rows * stride)
        start = piece.row * stride
        self._source.read(matrix.name, place, start, raw)
        size = piece.rows * native.row_bytes(matrix.format, matrix.cols)
        block = self._buffers.get("block", piece.block.length) if job.into is None else job.into
        counts, escapes = np.zeros(piece.rows, np.uint32), np.zeros(0, np.uint32)
        if job.table is None:
            self._source.require_finite(matrix.name, place, raw, piece.row * matrix.cols)
            block[:size] = raw
        else:
            counts, escapes = self._pack(matrix, raw, job.table, block[:size])
        block[size:] = 0
        if job.into is None:
            write_at(fd, piece.block.offset, block)
        return _Packed(job, native.crc32c(block), counts, escapes)

    def _pack(
        self, matrix: StoredMatrix, raw: U8, table: U8, into: U8
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Packs bf16 rows `raw`; escapes by row and themselves, unpacked again to compare."""
        rows, words = len(raw) // (2 * matrix.cols), raw.view(np.uint16)
        starts = np.zeros(rows + 1, np.uint32)
        room = self._buffers.get("escapes", 4 * words.size).view(np.uint32)
        native.pack_rows(words.reshape(rows, -1), table, into.reshape(rows, -1), starts, room)
        packed = native.Matrix(Format.PACKED, rows, matrix.cols, into, table, starts, room)
        again = self._buffers.get("again", len(raw))
        native.unpack_rows(packed, again.view(np.uint16).reshape(rows, -1))
        if not np.array_equal(again.view(np.uint64), raw.view(np.uint64)):
            raise KimiError(f"internal error: {matrix.name} does not unpack to what was packed")
        return np.diff(starts), room[: starts[-1]].copy()

    def _same(self, fd: int, unit: Unit) -> bool:
        def same(block: Block) -> bool:
            data = self._buffers.get("raw", block.length)
            done = 0
            while done < block.length:
                count = os.preadv(fd, [data[done:].data], block.offset + done)
                if count == 0:
                    return False
                done += count
            return native.crc32c(data) == block.crc

        found: list[bool] = []
        self._each(same, unit.blocks, found.append)
        return all(found)

    def _each(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        then: Callable[[Result], None],
    ) -> None:
        """Runs `work` for each of `jobs`, a few at once, and `then` here, in the order of `jobs`.

        However it ends, no work is left running.
        """
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(self._pool.submit(work, job))
                if len(waiting) > self._workers:
                    then(waiting.popleft().result())
            while waiting:
                then(waiting.popleft().result())
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


def _pool(workers: int) -> ThreadPoolExecutor:
    """A pool whose threads are there, so that no job fails of one later. Raises KimiError."""
    require(workers)  # a pool waits for ever for a thread that has no memory to begin with
    pool, ready = ThreadPoolExecutor(workers, "kimi-pack"), threading.Event()
    try:
        with starting():
            for _ in range(workers):
                pool.submit(ready.wait)  # one that waits is not idle: the next has its own thread
    except KimiError:
        pool.shutdown(wait=False)
        raise
    finally:
        ready.set()
    return pool


def _table(counts: NDArray[np.int64]) -> tuple[U8, int]:
    """The 16 most frequent high bytes, lower first among equals, and how many others occur.

    Entries that nothing needs repeat the first.
    """
    order = np.argsort(-counts, kind="stable")[:16]
    table = np.where(counts[order] > 0, order, order[0]).astype(np.uint8)
    return table, int(counts.sum() - counts[order].sum())
