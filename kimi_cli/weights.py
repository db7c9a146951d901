"""The trunk's weights in the order the model asks for them, whether pinned or streamed.

A `Weights` belongs to one thread. Pinned segments are read once, into their own memory; streamed
ones go through the ring: read ahead, used, released. Every read is held against its checksum.

    for place in walk:  pinned?  -> a Matrix that stays
                        else     -> ring piece -> Matrix for one product -> given back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from kimi_cli import native
from kimi_cli.errors import CheckpointError, ReadError
from kimi_cli.native import F32, U8, Format, Matrix
from kimi_cli.plan import Plan, Segment, walk
from kimi_cli.stream import ALIGN, DirectFile, Reader, Ring, Ticket, allocate, round_up
from kimi_cli.timing import CHECK
from kimi_cli.trunk import Block, StoredMatrix, Trunk, Unit

Report = Callable[[int, int], None]

LOADS_IN_FLIGHT = 8
NOT_OURS = "the trunk was not written by kimi repack; delete it and run kimi repack"
"""What is known of a trunk whose checksums hold and whose contents do not."""


class Layer:
    """One unit of the trunk while it is in hand: vectors widened, matrices by rows.

    Names are the checkpoint's without the unit's prefix and `.weight`: `self_attn.q_proj`.
    """

    def __init__(self, weights: Weights, number: int, unit: Unit, head: U8, floats: F32) -> None:
        self._weights = weights
        self._unit = unit
        self._head = head
        self._first = weights.place_of(number)
        self.vectors: dict[str, F32] = {}
        at = 0
        for vector in unit.vectors:
            size = int(np.prod(vector.shape))
            self.vectors[_short(vector.name)] = floats[at : at + size]
            at += size
        self._matrices: dict[str, tuple[StoredMatrix, int]] = {}
        place = self._first + 1
        for matrix in unit.matrices:
            self._matrices[_short(matrix.name)] = (matrix, place)
            place += len(matrix.blocks)

    def widen(self) -> None:
        """Fills `vectors` from the head's bytes, exactly. Raises CheckpointError for a NaN or
        infinity: some are never seen in the logits, a router's bias among them."""
        for vector in self._unit.vectors:
            raw = self._bytes(vector.offset, vector.length)
            into = self.vectors[_short(vector.name)]
            width = 2 if vector.format == Format.BF16 else 4
            native.widen(vector.format, raw[: into.size * width], into)
            if native.argmax(into) < 0:
                element = int((~np.isfinite(into)).argmax())
                raise CheckpointError(
                    f"{self._path}: {vector.name} has NaN or infinity at element {element}, offset "
                    f"{vector.offset + element * width}: {NOT_OURS}"
                )

    @property
    def _path(self) -> Path:
        return self._weights.directory / self._unit.file

    def refused(self, name: str, error: CheckpointError) -> CheckpointError:
        """`error`, which a product with a piece of matrix `name` raised, with its place."""
        return CheckpointError(f"{self._path}: {self._matrices[name][0].name}: {error}")

    def rows_of(self, name: str) -> int:
        """Rows of matrix `name`."""
        return self._matrices[name][0].rows

    def held(self, name: str) -> Matrix | None:
        """Matrix `name` where it stays as a whole; None where it comes in pieces."""
        matrix, place = self._matrices[name]
        if not matrix.blocks:
            size = native.row_bytes(matrix.format, matrix.cols) * matrix.rows
            return self.piece(matrix, 0, matrix.rows, self._bytes(matrix.inline, size))
        piece, span = self._weights.pinned.get(place, (None, 0))
        return piece if span == len(matrix.blocks) else None

    def rows(self, name: str) -> Iterator[tuple[int, Matrix]]:
        """(first row, rows) pieces of matrix `name`, in order. A piece is gone with the next."""
        whole = self.held(name)
        if whole is not None:
            yield 0, whole
            return
        matrix, place = self._matrices[name]
        at = 0
        while at < len(matrix.blocks):
            held = self._weights.pinned.get(place + at)
            if held is not None:
                yield matrix.blocks[at].row, held[0]
                at += held[1]
                continue
            block = matrix.blocks[at]
            data = self._weights.take(place + at)
            yield block.row, self.piece(matrix, block.row, block.rows, data)
            self._weights.give_back()
            at += 1

    def piece(self, matrix: StoredMatrix, row: int, rows: int, data: U8) -> Matrix:
        """`rows` rows of `matrix` from `row` on, whose bytes are `data`."""
        if matrix.format != Format.PACKED:
            return Matrix(matrix.format, rows, matrix.cols, data)
        table = self._bytes(matrix.table, 16)
        starts = self._bytes(matrix.starts, 4 * (matrix.rows + 1)).view(np.uint32)
        escapes = self._bytes(matrix.escapes, 4 * matrix.escape_count).view(np.uint32)
        return Matrix(
            Format.PACKED, rows, matrix.cols, data, table, starts[row : row + rows + 1], escapes
        )

    def _bytes(self, offset: int, length: int) -> U8:
        """Bytes of the head at a file offset."""
        at = offset - self._unit.head_offset
        return self._head[at : at + length]


def _short(name: str) -> str:
    """`language_model.model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj`."""
    parts = name.removesuffix(".weight").split(".")
    cut = parts.index("layers") + 2 if "layers" in parts else len(parts) - 1
    return ".".join(parts[cut:])


class Weights:
    """The whole trunk under one plan. `close` it: it holds files."""

    def __init__(self, trunk: Trunk, plan: Plan, reader: Reader) -> None:
        self._trunk, self._plan, self._reader = trunk, plan, reader
        self.directory = trunk.directory
        self._walk = walk(trunk.units)
        self._first = [p for p, segment in enumerate(self._walk) if segment.matrix < 0]
        self._files: list[DirectFile] = []
        self._ring = Ring(allocate(plan.ring)) if plan.ring else None
        self._ahead: deque[tuple[int, memoryview, Ticket]] = deque()
        self._pending: deque[int] = deque()
        self._layers: dict[int, Layer] = {}
        self.pinned: dict[int, tuple[Matrix, int]] = {}
        """place -> (rows held there, how many consecutive segments they span)"""
        self.bytes_read = 0
        """Useful bytes of streamed segments, counted when each is read."""
        side = max(round_up(unit.head_length) for unit in trunk.units)
        floats = max(unit.widened_floats for unit in trunk.units)
        self._side = _array(allocate(side)) if plan.ring else None
        self._floats = _array(allocate(floats * 4)).view(np.float32) if plan.ring else None
        try:
            for unit in trunk.units:
                self._files.append(DirectFile(trunk.directory / unit.file))
        except ReadError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files; the reader must be closed before."""
        for file in self._files:
            file.close()
        self._files.clear()

    def place_of(self, unit: int) -> int:
        """Place in the walk of a unit's head."""
        return self._first[unit]

    def load(self, report: Report | None = None) -> None:
        """Reads every pinned segment, several at a time."""
        total = sum(self._walk[place].size for place in self._plan.pinned)
        memory = allocate(total)
        flying: deque[tuple[Segment, Ticket]] = deque()
        starts: dict[int, int] = {}
        at = done = 0

        def finish() -> None:
            nonlocal done
            segment, ticket = flying.popleft()
            ticket.wait()
            done += segment.size
            if report:
                report(done, total)

        for place in sorted(self._plan.pinned):
            segment = self._walk[place]
            starts[place] = at + segment.offset % ALIGN
            flying.append((segment, self._submit(place, memory[at : at + segment.size])))
            at += segment.size
            if len(flying) >= LOADS_IN_FLIGHT:
                finish()
        while flying:
            finish()
        for number, unit in enumerate(self._trunk.units):
            self._hold(number, unit, starts, _array(memory))

    def _hold(self, number: int, unit: Unit, starts: dict[int, int], memory: U8) -> None:
        """Makes the unit's pinned segments into matrices; neighbours in the walk become one."""
        place = self._first[number]
        if place in starts:
            at = starts[place]
            floats = _array(allocate(unit.widened_floats * 4)).view(np.float32)
            layer = Layer(self, number, unit, memory[at : at + unit.head_length], floats)
            layer.widen()
            self._layers[number] = layer
        for matrix in unit.matrices:
            place = self._first[number] + 1 + _blocks_before(unit, matrix)
            whole_heads = matrix.name.endswith(".kv_b_proj.weight")
            at = 0
            while at < len(matrix.blocks):
                span = 0
                while at + span < len(matrix.blocks) and place + at + span in starts:
                    end = starts[place + at + span] + matrix.blocks[at + span].block.length
                    span += 1
                    if whole_heads or starts.get(place + at + span) != end:
                        break
                if span:
                    first, last = matrix.blocks[at], matrix.blocks[at + span - 1]
                    data = memory[starts[place + at] :]
                    rows = last.row + last.rows - first.row
                    piece = self.layer(number).piece(matrix, first.row, rows, data)
                    self.pinned[place + at] = (piece, span)
                at += max(span, 1)

    def layer(self, number: int) -> Layer:
        """The unit `number`; its head not read again where it is streamed (`enter` does that)."""
        found = self._layers.get(number)
        if found is None:
            assert self._side is not None and self._floats is not None
            unit = self._trunk.units[number]
            found = Layer(self, number, unit, self._side, self._floats)
            self._layers[number] = found
        return found

    def schedule(self, head: bool) -> None:
        """One more walk over the layers is coming, with lm_head at its end or without."""
        end = len(self._walk) if head else self._first[-1]
        self._pending.extend(p for p in range(end) if p not in self._plan.pinned)
        self._fill()

    def rewind(self) -> None:
        """Forgets the walks that were scheduled, once the reads ahead of them are done."""
        self._pending.clear()
        while self._ahead:
            ticket = self._ahead.popleft()[2]
            with suppress(ReadError):  # whoever needs those bytes will meet it again
                ticket.wait()
            assert self._ring is not None
            self._ring.give_back()

    def enter(self, number: int) -> Layer:
        """Unit `number` with its small tensors in memory; the unit before is gone."""
        layer = self.layer(number)
        place = self._first[number]
        if place not in self._plan.pinned:
            assert self._side is not None
            data = self.take(place)
            self._side[: len(data)] = data
            self.give_back()
            layer.widen()
        return layer

    def take(self, place: int) -> U8:
        """The streamed segment at `place`, which must be the next in the walk; waits for it."""
        expected, buffer, ticket = self._ahead[0]
        if expected != place:
            raise AssertionError(f"segment {place} asked for, {expected} is next")
        lead = ticket.wait()
        length = self._walk[place].length
        self.bytes_read += length
        return _array(buffer)[lead : lead + length]

    def give_back(self) -> None:
        """Releases the segment taken last and reads further ahead."""
        assert self._ring is not None
        self._ahead.popleft()
        self._ring.give_back()
        self._fill()

    def _fill(self) -> None:
        """Queues reads of pending segments while the ring has room."""
        while self._pending:
            assert self._ring is not None
            buffer = self._ring.take(self._walk[self._pending[0]].size)
            if buffer is None:
                return
            place = self._pending.popleft()
            self._ahead.append((place, buffer, self._submit(place, buffer)))

    def _submit(self, place: int, buffer: memoryview) -> Ticket:
        segment = self._walk[place]
        file = self._files[segment.unit]
        blocks = self._blocks(place)

        def work() -> int:
            lead = file.read(segment.offset, segment.length, buffer, self._name(place))
            at = lead
            for block in blocks:
                with self._reader.span(CHECK, "crc32c"):
                    found = native.crc32c(buffer[at : at + block.length])
                if found != block.crc:
                    raise ReadError(
                        f"{file.path}: damaged between bytes {block.offset} and "
                        f"{block.offset + block.length} ({self._name(place)}): checksum "
                        f"{found:08x}, wanted {block.crc:08x}; delete the file and run kimi repack"
                    )
                at += block.length
            return lead

        return self._reader.submit(work, label=self._name(place))

    def _blocks(self, place: int) -> tuple[Block, ...]:
        segment = self._walk[place]
        unit = self._trunk.units[segment.unit]
        if segment.matrix < 0:
            return unit.head
        matrix = unit.matrices[segment.matrix]
        first = self._first[segment.unit] + 1 + _blocks_before(unit, matrix)
        return (matrix.blocks[place - first].block,)

    def _name(self, place: int) -> str:
        segment = self._walk[place]
        unit = self._trunk.units[segment.unit]
        return "small tensors" if segment.matrix < 0 else unit.matrices[segment.matrix].name


def _array(view: memoryview) -> U8:
    return np.frombuffer(view, dtype=np.uint8)


def _blocks_before(unit: Unit, matrix: StoredMatrix) -> int:
    count = 0
    for other in unit.matrices:
        if other is matrix:
            break
        count += len(other.blocks)
    return count
