"""Every row of the embedding, read from its shard and held against its checksum. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import remedy
from kimi_cli.checkpoint import Location
from kimi_cli.errors import ReadError
from kimi_cli.findings import Finding
from kimi_cli.sweep import PIECE, Files, sweep
from kimi_cli.tables import row_sums
from kimi_cli.tensors import EMBEDDING

TOLD = 3
"""So many bad rows are told one by one."""


@dataclass(slots=True)
class _Rows:
    """Rows `row` to `row + rows`, then the checksums they have, or why they could not be read."""

    row: int
    rows: int
    found: NDArray[np.uint32]
    failure: str = ""


@dataclass(slots=True)
class RowCheck:
    """One check of the embedding at `place` in the shard at `path`, against `sums` [vocab].

    `rows` is how many have been read.
    """

    path: Path
    place: Location
    sums: NDArray[np.uint32]
    findings: list[Finding]
    rows: int = 0

    def run(self, advance: Callable[[int], None]) -> None:
        """Reads them all, several stretches at once; `advance` is called with bytes read."""
        found, size = self.sums.copy(), self.place.length // len(self.sums)
        with Files() as files:

            def work(job: _Rows, buffer: memoryview) -> None:
                offset, length = self.place.offset + job.row * size, job.rows * size
                try:
                    for piece in files.pieces(self.path, offset, length, buffer):
                        job.found[:] = row_sums(np.frombuffer(piece, np.uint8).reshape(-1, size))
                except ReadError as error:
                    job.failure = str(error).removeprefix(str(self.path)).lstrip(": ")

            with closing(sweep(self._stretches(found, size), work)) as done:
                for job in done:
                    if job.failure:
                        self._add(job.failure)
                    self.rows += job.rows
                    advance(job.rows * size)
        bad = (found != self.sums).nonzero()[0].tolist()
        if bad:
            self._add(self._differing(bad, found, size))

    def _stretches(self, found: NDArray[np.uint32], size: int) -> Iterator[_Rows]:
        """As many whole rows as are looked at together."""
        step = PIECE // size
        for row in range(0, len(found), step):
            rows = found[row : row + step]
            yield _Rows(row, len(rows), rows)

    def _differing(self, bad: list[int], found: NDArray[np.uint32], size: int) -> str:
        told = [
            f"row {row} at offset {self.place.offset + row * size} has checksum "
            f"{int(found[row]):08x}, wanted {int(self.sums[row]):08x}"
            for row in bad[:TOLD]
        ]
        if len(bad) > TOLD:
            told.append(f"and {len(bad) - TOLD:,} rows more")
        return f"{EMBEDDING}: " + "; ".join(told)

    def _add(self, what: str) -> None:
        fix = remedy.download(self.path.parent, [self.path.name])
        self.findings.append(Finding(self.path.name, what, fix))
