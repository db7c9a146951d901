"""What is wrong with a trunk: every file of it, every block against its checksum. Writes nothing.

trunk.json -> the shards it was made from -> each file's header -> tables.safetensors
-> every block, read several at once -> every row of the embedding, in its shard
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import remedy
from kimi_cli.checkpoint import fingerprint
from kimi_cli.config import Config
from kimi_cli.errors import CheckpointError, ReadError, TrunkError
from kimi_cli.faults import short_name
from kimi_cli.findings import Finding
from kimi_cli.finite import Head, rows_fault
from kimi_cli.layout import unit_tensors
from kimi_cli.manifest import MANIFEST, PARTIAL, Listed, Manifest, read_manifest
from kimi_cli.native import Format, crc32c
from kimi_cli.rowcheck import RowCheck
from kimi_cli.stream import ALIGN, DirectFile, allocate, round_up
from kimi_cli.survey import Survey
from kimi_cli.sweep import Files, sweep
from kimi_cli.tables import FILE_NAME as TABLES
from kimi_cli.tables import read_tables
from kimi_cli.tensors import EMBEDDING, embedding
from kimi_cli.trunk import Trunk, open_unit
from kimi_cli.trunkfile import RowBlock, StoredMatrix, Unit

Report = Callable[[int, int], None]

_PARTS = {"size": "size", "header": "header", "first": "first data", "last": "last data"}


@dataclass(slots=True)
class _Block:
    """A block as the manifest has it, with the rows it holds and, where those are doubtful, the
    head they need; then what reading it gave."""

    path: Path
    unit: Unit | None
    offset: int
    length: int
    crc: int
    rows: tuple[StoredMatrix, RowBlock] | None = None
    head: Head | None = None
    found: int = 0
    failure: str = ""
    fault: str = ""
    seen: int = 0
    kept: bytearray = field(default_factory=bytearray)

    def look_at(self, piece: memoryview) -> None:
        """Looks for what is no number in the next bytes of the block."""
        if self.rows is None or self.fault:
            return
        matrix, rows = self.rows
        if matrix.format != Format.PACKED:
            self.fault = rows_fault(matrix, rows, self.seen, np.frombuffer(piece, np.uint8))
            self.seen += len(piece)
        elif self.head is not None:
            self.kept += piece

    def finish(self) -> None:
        """The same of all its bytes together, where that needs them."""
        if self.head is None or self.rows is None or self.found != self.crc:
            return
        matrix, rows = self.rows
        raw = np.frombuffer(self.kept, np.uint8)
        self.fault = self.head.packed(matrix, rows.row, rows.rows, raw)
        self.kept = bytearray()


def _block(
    path: Path, unit: Unit | None, head: Head | None, offset: int, length: int, crc: int
) -> _Block:
    block = _Block(path, unit, offset, length, crc)
    for matrix in unit.matrices if unit is not None and head is not None else ():
        for rows in matrix.blocks:
            if rows.block.offset == offset:
                doubtful = head is not None and head.doubtful(matrix)
                block.rows, block.head = (matrix, rows), head if doubtful else None
    return block


@dataclass(slots=True)
class TrunkCheck:
    """One check of the trunk in `directory`: what was read, and what is wrong.

    `bytes` are those of `blocks`, `rows` the embedding's that were read. `trunk` is there once it
    opens as `kimi generate` opens it, whatever its blocks hold.
    """

    directory: Path
    model_dir: Path
    config: Config
    findings: list[Finding]
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    rows: int = 0
    trunk: Trunk | None = None
    _numbers: dict[Path, list[str]] = field(default_factory=dict)

    def run(self, found: Survey, faulty: Collection[str], report: Report) -> None:
        """Checks everything against `found`; `report` is called with bytes read and in all.

        `faulty` names the shards that something is known to be wrong with: they are left out.
        """
        manifest = self._manifest()
        if manifest is None:
            return
        foreign = self._is_foreign(manifest, found, faulty)
        blocks = list(self._units(manifest))
        sums = self._tables(manifest, None if foreign or found.fault else found)
        rows = None if foreign or sums is None else self._rows(manifest, sums, faulty)
        try:
            self.trunk = Trunk.open(self.directory, self.model_dir, self.config)
        except CheckpointError as error:
            if not self.findings and not faulty:
                what = str(error).partition(f": {self._repack()}")[0]
                self._add(MANIFEST, what, self._repack())
        self._read(blocks, rows, report)

    def _add(self, name: str, what: str, fix: str) -> None:
        self.findings.append(Finding(str(self.directory / name), what, fix))

    def _repack(self) -> str:
        return remedy.repack(self.model_dir, self.directory)

    def _manifest(self) -> Manifest | None:
        path = self.directory / MANIFEST
        try:
            return read_manifest(path)
        except FileNotFoundError:
            if (self.directory / PARTIAL).exists():
                what = "is absent: the trunk is unfinished"
            elif self.directory.is_dir():
                what = "is absent: this is no trunk"
            else:
                what = "is absent: there is no such directory"
            self._add(MANIFEST, what, self._repack())
        except TrunkError as error:
            self._add(MANIFEST, _text(error, path), self._repack())
        return None

    def _is_foreign(self, manifest: Manifest, found: Survey, faulty: Collection[str]) -> bool:
        """Whether no shard is the one that the trunk was made from; adds each that is not."""
        paths = {path.name: path for path in found.shards}
        made_from = manifest.fingerprint["shards"]
        differing = []
        for wanted in made_from:
            name = str(wanted["name"])
            path = paths.pop(name, None)
            if name in faulty:
                continue
            have = fingerprint([path], crc32c)["shards"][0] if path else wanted
            parts = [what for key, what in _PARTS.items() if have[key] != wanted[key]]
            if path is None:
                differing.append((name, "is not there"))
            elif parts:
                differing.append((name, f"has another {', '.join(parts)}"))
        differing += [(name, "is not one of its shards") for name in paths]
        if len(differing) >= max(len(made_from), 2):
            what = f"was made from another checkpoint than {self.model_dir}"
            self._add(MANIFEST, what, self._repack())
            return True
        for name, what in differing:
            fix = f"{remedy.download(self.model_dir, [name])}, or {self._repack()}"
            what += f" than the trunk in {self.directory} was made from" * what.startswith("has")
            self.findings.append(Finding(name, what, fix))
        return False

    def _units(self, manifest: Manifest) -> Iterator[_Block]:
        """The blocks that can be read of every file; the header's is checked at once."""
        listed = {file.name: file for file in manifest.files}
        for name, tensors in unit_tensors(self.config):
            file, path = listed.pop(name, None), self.directory / name
            if file is None:
                self._add(MANIFEST, f"lists no {name}", self._repack())
                continue
            self.files += 1
            unit = None
            try:
                unit = open_unit(path, tensors, file, self.config)
            except TrunkError as error:
                fix = remedy.remake(self.model_dir, self.directory, name)
                self._add(name, _text(error, path), fix)
            self.blocks += unit is not None
            if unit is not None or _has_size(path, file):
                head = None if unit is None else self._head(path, unit)
                yield from (
                    _block(path, unit, head, offset, length, crc)
                    for offset, length, crc in file.blocks[1:]
                )
        for name in listed:
            self._add(MANIFEST, f"lists {name}, which is no file of this config", self._repack())

    def _head(self, path: Path, unit: Unit) -> Head | None:
        """The head of a file, what is no number in it noted; None if it cannot be read."""
        buffer = allocate(round_up(unit.head_offset % ALIGN + unit.head_length))
        try:
            with closing(DirectFile(path)) as file:
                start = file.read(unit.head_offset, unit.head_length, buffer)
        except ReadError:  # its block will meet it again
            return None
        raw = np.frombuffer(buffer, np.uint8)[start : start + unit.head_length]
        head = Head(unit, raw)
        self._numbers[path] = list(head.faults())
        return head

    def _tables(self, manifest: Manifest, found: Survey | None) -> NDArray[np.uint32] | None:
        """Checks the tables, and holds them against `found` if that is to be trusted.

        Returns the checksums of the embedding's rows, if they are whole.
        """
        sizes = [int(shard["size"]) for shard in manifest.fingerprint["shards"]]
        path = self.directory / TABLES
        fix = remedy.remake(self.model_dir, self.directory, TABLES)
        try:
            tables = read_tables(self.directory, manifest.tables, sizes, self.config)
        except TrunkError as error:
            self._add(TABLES, _text(error, path), fix)
            return None
        if found is None:
            return tables.embedding_sums
        experts = tables.experts
        same = np.array_equal(experts.shard, found.expert_shard)
        if not same or not np.array_equal(experts.offset, found.expert_offset):
            self._add(TABLES, "places experts elsewhere than the shards' headers do", fix)
        place, (shard, entry) = manifest.embedding, found.tensors[EMBEDDING]
        if (place.shard, place.offset, place.dtype) != (shard, entry.offset, entry.dtype):
            what = "places the embedding elsewhere than its shard's header does"
            self._add(MANIFEST, what, self._repack())
            return None
        return tables.embedding_sums

    def _rows(
        self, manifest: Manifest, sums: NDArray[np.uint32], faulty: Collection[str]
    ) -> RowCheck | None:
        """The check of the embedding, unless its shard is wrong already or ends before it."""
        place, shards = manifest.embedding, manifest.fingerprint["shards"]
        if place.shape != embedding(self.config).shape or place.shard >= len(shards):
            return None
        shard, known = shards[place.shard], {*faulty, *(f.file for f in self.findings)}
        if shard["name"] in known or place.offset + place.length > int(shard["size"]):
            return None
        return RowCheck(self.model_dir / str(shard["name"]), place, sums, self.findings)

    def _read(self, blocks: list[_Block], rows: RowCheck | None, report: Report) -> None:
        total = sum(block.length for block in blocks) + (rows.place.length if rows else 0)
        with Files() as files:

            def work(block: _Block, buffer: memoryview) -> None:
                try:
                    for piece in files.pieces(block.path, block.offset, block.length, buffer):
                        block.found = crc32c(piece, block.found)
                        block.look_at(piece)
                    block.finish()
                except ReadError as error:
                    block.failure = _text(error, block.path)

            with closing(sweep(blocks, work)) as done:
                for block in done:
                    self._judge(block)
                    self.blocks += 1
                    self.bytes += block.length
                    report(self.bytes, total)
        damaged = {finding.file for finding in self.findings}
        for path, faults in self._numbers.items():
            if str(path) not in damaged:
                for what in faults:
                    self._no_numbers(path, what)
        if rows:
            done_bytes = self.bytes

            def advance(count: int) -> None:
                nonlocal done_bytes
                done_bytes += count
                report(done_bytes, total)

            rows.run(advance)
            self.rows = rows.rows

    def _judge(self, block: _Block) -> None:
        what = block.failure
        if not what and block.found != block.crc:
            what = (
                f"{_contents(block)}: {block.length:,} bytes at offset {block.offset} have "
                f"checksum {block.found:08x}, wanted {block.crc:08x}"
            )
        if what:
            name = block.path.name
            self._add(name, what, remedy.remake(self.model_dir, self.directory, name))
        elif block.fault:
            self._no_numbers(block.path, block.fault)

    def _no_numbers(self, path: Path, what: str) -> None:
        what += ", with a checksum that holds: kimi repack does not write that"
        self._add(path.name, what, remedy.remake(self.model_dir, self.directory, path.name))


def _has_size(path: Path, listed: Listed) -> bool:
    return path.is_file() and path.stat().st_size == listed.size


def _contents(block: _Block) -> str:
    """What a block holds, as far as that is known."""
    if block.unit is None:
        return "a block"
    for matrix in block.unit.matrices:
        for rows in matrix.blocks:
            if rows.block.offset == block.offset:
                return f"{short_name(matrix.name)} rows {rows.row} to {rows.row + rows.rows - 1}"
    return "small tensors"


def _text(error: Exception, path: Path) -> str:
    """What `error` says of the file at `path`, which is named apart."""
    return str(error).removeprefix(str(path)).lstrip(": ")
