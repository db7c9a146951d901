"""Routed experts on demand: read from the checkpoint's shards into slots, kept while there is room.

For each chunk and layer: `request` says which experts are wanted and starts reading; `arrivals`
yields them as their bytes arrive. With fewer slots than experts the rest is read as slots come
free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import native, remedy
from kimi_cli.cache import Policy, Ranked
from kimi_cli.checkpoint import ExpertTable
from kimi_cli.config import Config
from kimi_cli.errors import CheckpointError, KimiError, ReadError
from kimi_cli.expertsums import expert_crc
from kimi_cli.native import U8, Expert
from kimi_cli.stream import ALIGN, DirectFile, Reader, Ticket, allocate, round_up
from kimi_cli.tensors import EXPERT_PARTS, expert_bytes, expert_prefix, expert_shapes
from kimi_cli.timing import CHECK

TOGETHER = 16
"""Experts handed over at a time at most."""


class Experts:
    """Expert slots under one plan; belongs to one thread. `close` it: it holds files.

    With `sums`, uint32 [layers, experts], every expert read is held against its CRC-32C.
    """

    def __init__(
        self,
        config: Config,
        table: ExpertTable,
        shards: Sequence[Path],
        slots: int,
        slot_bytes: int,
        reader: Reader,
        sums: NDArray[np.uint32] | None = None,
    ) -> None:
        self._table, self._reader, self._sums = table, reader, sums
        self._shapes = expert_shapes(config)
        self._extent = expert_bytes(config)
        memory = allocate(slots * slot_bytes)
        self._slots = [memory[i * slot_bytes : (i + 1) * slot_bytes] for i in range(slots)]
        self._tickets: dict[int, Ticket] = {}
        self._contents: list[Expert | None] = [None] * slots
        self._cache: Policy = Ranked(slots)
        self._paths = list(shards)
        self._files: dict[int, DirectFile] = {}
        self._layer = 0
        self._held: list[tuple[int, int]] = []
        self._wanted: list[int] = []
        self._flying: list[tuple[int, int]] = []
        self.bytes_read = 0
        """Useful bytes: misses times the bytes of an expert."""
        self.requests = 0
        self.hits = 0

    def close(self) -> None:
        """Closes the files; the reader must be closed before."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def request(self, layer: int, experts: Sequence[int], ranks: Sequence[int]) -> None:
        """Distinct `experts` of `layer` are wanted next; `ranks` are the router's, 0 the best."""
        self.rewind()
        self._layer = layer
        self._cache.visit(layer, experts, ranks)
        self.requests += len(experts)
        self._held, self._wanted, self._flying = [], [], []
        for expert in experts:
            slot = self._cache.lookup((layer, expert))
            if slot is not None and self._contents[slot] is None:  # its read failed or was left
                self._cache.drop((layer, expert))
                slot = None
            if slot is None:
                self._wanted.append(expert)
            else:
                self._held.append((expert, slot))
        self.hits += len(self._held)
        self._fill()

    def rewind(self) -> None:
        """Ends what an abandoned pass has left in flight; what failed has no contents."""
        for slot, ticket in list(self._tickets.items()):
            with suppress(KimiError, OSError, MemoryError):
                ticket.wait()
            del self._tickets[slot]
        self._held, self._wanted, self._flying = [], [], []

    def arrivals(self) -> Iterator[list[tuple[int, Expert]]]:
        """Every requested expert once, in any order; some at a time, gone with the next."""
        while self._held:
            some = self._held[: self._together()]
            yield [(expert, self._content(slot)) for expert, slot in some]
            del self._held[: len(some)]
            self._fill()
        while self._flying:
            ready = [entry for entry in self._flying if self._tickets[entry[1]].ready]
            some = ready[: self._together()] or self._flying[:1]
            for _, slot in some:
                self._tickets[slot].wait()  # where this fails, `rewind` frees the slot
            for _, slot in some:
                del self._tickets[slot]
            yield [(expert, self._content(slot)) for expert, slot in some]
            self._flying = [entry for entry in self._flying if entry not in some]
            self._fill()

    def _together(self) -> int:
        """How many experts to hand over at once: one where others wait for its slot."""
        return 1 if self._wanted else TOGETHER

    def _fill(self) -> None:
        """Starts reading what is wanted while there are slots that nobody waits for."""
        while self._wanted:
            busy = {slot for _, slot in self._held} | {slot for _, slot in self._flying}
            expert = self._wanted[0]
            slot = self._cache.place((self._layer, expert), busy)
            if slot is None:
                return
            self._wanted.pop(0)
            try:
                self._tickets[slot] = self._submit(expert, slot)
            except ReadError:
                self._cache.drop((self._layer, expert))
                raise
            self._flying.append((expert, slot))
            self.bytes_read += self._extent

    def _submit(self, expert: int, slot: int) -> Ticket:
        layer, buffer = self._layer, self._slots[slot]
        self._contents[slot] = None
        extent = self._table.extent(layer, expert)
        shards = self._table.shard[layer, expert]
        offsets = self._table.offset[layer, expert]
        sizes = [rows * cols for rows, cols in self._shapes]
        reads = []  # (file, offset, length, what it is, place in the buffer)
        name = expert_prefix(layer, expert)
        if extent is not None:
            reads.append((self._file(extent[0]), extent[1], self._extent, f"{name}*", 0))
        else:
            at = 0
            places = zip(shards, offsets, sizes, EXPERT_PARTS, strict=True)
            for shard, offset, size, part in places:
                reads.append((self._file(int(shard)), int(offset), size, name + part, at))
                at += round_up(size + ALIGN)

        def work() -> int:
            starts: list[int] = []
            for file, offset, length, what, at in reads:
                lead = at + file.read(offset, length, buffer[at:], what)
                pieces = sizes if extent is not None else [length]
                for size in pieces:
                    starts.append(lead)
                    lead += size
            tensors = self._tensors(slot, starts)
            with self._reader.span(CHECK, "expert"):
                self._check(layer, expert, tensors)
            self._contents[slot] = Expert(tensors)
            return 0

        return self._reader.submit(work, urgent=True, label=f"expert {layer}.{expert}")

    def _check(self, layer: int, expert: int, tensors: Sequence[U8]) -> None:
        """Refuses bytes that differ from their checksum, and a scale byte that means NaN."""
        if self._sums is not None:
            self._check_sum(layer, expert, expert_crc(tensors), self._sums)
        for part, tensor in enumerate(tensors):
            if not EXPERT_PARTS[part].endswith("weight_scale"):
                continue
            bad = native.scale_nan(tensor.reshape(-1))
            if bad >= 0:
                file = self._file(int(self._table.shard[layer, expert, part]))
                offset = int(self._table.offset[layer, expert, part]) + bad
                raise CheckpointError(
                    f"{file.path}: {expert_prefix(layer, expert)}{EXPERT_PARTS[part]}: scale byte "
                    f"255 (NaN) at offset {offset}: the shard is damaged, download it again"
                )

    def _check_sum(self, layer: int, expert: int, found: int, sums: NDArray[np.uint32]) -> None:
        wanted = int(sums[layer, expert])
        if found == wanted:
            return
        paths = [self._paths[shard] for shard in self._table.shard[layer, expert].tolist()]
        names = dict.fromkeys(path.name for path in paths)
        offset = int(self._table.offset[layer, expert, 0])
        raise ReadError(
            f"{paths[0]}: {expert_prefix(layer, expert)}* at offset {offset} has checksum "
            f"{found:08x}, wanted {wanted:08x}: the file is damaged, "
            f"{remedy.download(paths[0].parent, names)}"
        )

    def _content(self, slot: int) -> Expert:
        found = self._contents[slot]
        assert found is not None  # its bytes have arrived
        return found

    def _tensors(self, slot: int, starts: Sequence[int]) -> list[U8]:
        """EXPERT_PARTS where they begin in the slot: packed [out, in/2], scale [out, in/32]."""
        whole = np.frombuffer(self._slots[slot], dtype=np.uint8)
        return [
            whole[start : start + rows * cols].reshape(rows, cols)
            for start, (rows, cols) in zip(starts, self._shapes, strict=True)
        ]

    def _file(self, shard: int) -> DirectFile:
        """The shard, opened when first needed, on the thread that submits."""
        file = self._files.get(shard)
        if file is None:
            try:
                file = self._files[shard] = DirectFile(self._paths[shard])
            except ReadError as error:
                raise ReadError(f"{error}; an expert of layer {self._layer} is needed") from None
        return file
