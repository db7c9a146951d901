"""Every routed expert read once, in the order of the files: what `kimi verify --deep` adds.

    lock -> what an interrupted reading left -> the experts left, several at once
    -> all known? the table of checksums, or a comparison with the one that is there

Only experts: everything else of a shard that is computed with is in the trunk, whose blocks have
checksums of their own, or is the embedding, whose rows have theirs in the trunk's tables.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kimi_cli import remedy
from kimi_cli.durable import sync_directory
from kimi_cli.errors import KimiError, ReadError
from kimi_cli.expertsums import PARTIAL, Known, load_known, save_expert_sums, save_known
from kimi_cli.findings import Finding
from kimi_cli.native import crc32c, scale_nan
from kimi_cli.sweep import Files, sweep
from kimi_cli.tensors import EXPERT_PARTS, expert_prefix
from kimi_cli.trunk import Trunk

Report = Callable[[int, int], None]

SAVE_SECONDS = 10.0
"""A kill loses at most so much reading."""
LOCK = "verify.lock"


@dataclass(slots=True)
class _Expert:
    """One expert, then what reading it gave; `faults` are (shard, text)."""

    layer: int
    expert: int
    crc: int = 0
    faults: list[tuple[Path, str]] = field(default_factory=list)


@dataclass(slots=True)
class Deep:
    """One reading: of `total` experts, `kept` are known from before and `read` were read, `good`
    of them without a finding. `done` once all are known and the table is on the disk."""

    trunk: Trunk
    reference: NDArray[np.uint32] | None
    findings: list[Finding]
    kept: int = 0
    read: int = 0
    good: int = 0
    total: int = 0
    bytes: int = 0
    seconds: float = 0.0
    done: bool = False

    def run(self, report: Report) -> None:
        """Reads what is left; `report` is called with the bytes read and those to read this time.

        The checksums become the table if there is no `reference`, uint32 [layers, experts]; else
        each is held against it. Experts with a finding stay unknown, to be read again next time.
        Raises KimiError if the trunk's folder cannot be written, or another is at it.
        """
        try:
            with _locked(self.trunk.directory):
                self._run(report)
        except OSError as error:
            raise KimiError(
                f"{error.filename or self.trunk.directory} cannot be written: "
                f"{error.strerror or error}; kimi verify --deep keeps its checksums there"
            ) from None

    def _run(self, report: Report) -> None:
        trunk, known = self.trunk, load_known(self.trunk)
        if self.reference is not None:
            known.done[known.sums != self.reference] = False
        routed = trunk.experts.shard[:, :, 0] >= 0
        save_known(trunk, known)  # that it cannot be written should show before the reading
        self.total, self.kept = int(routed.sum()), int((known.done & routed).sum())
        try:
            self._read(routed & ~known.done, known, report)
        finally:
            save_known(trunk, known)
        if known.done[routed].all():
            if self.reference is None:
                save_expert_sums(trunk, known.sums)
            (trunk.directory / PARTIAL).unlink()
            sync_directory(trunk.directory)
            self.done = True

    def _read(self, left: NDArray[np.bool_], known: Known, report: Report) -> None:
        size = sum(self.trunk.experts.sizes)
        total = int(left.sum()) * size
        began = saved = time.monotonic()
        try:
            with Files() as files:

                def work(expert: _Expert, buffer: memoryview) -> None:
                    _read_expert(self.trunk, files, expert, buffer)

                with closing(sweep(_in_file_order(self.trunk, left), work)) as done:
                    for expert in done:
                        if not self._is_bad(expert):
                            self.good += 1
                            known.sums[expert.layer, expert.expert] = expert.crc
                            known.done[expert.layer, expert.expert] = True
                        self.read += 1
                        self.bytes += size
                        report(self.bytes, total)
                        if time.monotonic() - saved >= SAVE_SECONDS:
                            save_known(self.trunk, known)
                            saved = time.monotonic()
        finally:
            self.seconds = time.monotonic() - began

    def _is_bad(self, job: _Expert) -> bool:
        """Whether anything is wrong with one expert; adds it to the findings."""
        model_dir = self.trunk.shards[0].parent
        for path, text in job.faults:
            self.findings.append(Finding(path.name, text, remedy.download(model_dir, [path.name])))
        if job.faults or self.reference is None:
            return bool(job.faults)
        wanted = int(self.reference[job.layer, job.expert])
        if job.crc == wanted:
            return False
        shards = self.trunk.experts.shard[job.layer, job.expert].tolist()
        names = list(dict.fromkeys(self.trunk.shards[shard].name for shard in shards))
        offset = int(self.trunk.experts.offset[job.layer, job.expert, 0])
        what = (
            f"{expert_prefix(job.layer, job.expert)}* at offset {offset} has checksum "
            f"{job.crc:08x}, wanted {wanted:08x}"
        )
        self.findings.append(Finding(", ".join(names), what, remedy.download(model_dir, names)))
        return True


def _in_file_order(trunk: Trunk, wanted: NDArray[np.bool_]) -> Iterator[_Expert]:
    """The `wanted` experts, bool [layers, experts], as they lie in the shards."""
    layers, experts = wanted.nonzero()
    shard = trunk.experts.shard[layers, experts, 0]
    order = np.lexsort((trunk.experts.offset[layers, experts, 0], shard))
    for layer, expert in zip(layers[order], experts[order], strict=True):
        yield _Expert(int(layer), int(expert))


def _read_expert(trunk: Trunk, files: Files, job: _Expert, buffer: memoryview) -> None:
    """Fills in `job`: its CRC, and the first scale byte of each tensor that means NaN."""
    table, prefix = trunk.experts, expert_prefix(job.layer, job.expert)
    for part, length in enumerate(table.sizes):
        path = trunk.shards[int(table.shard[job.layer, job.expert, part])]
        at = offset = int(table.offset[job.layer, job.expert, part])
        searched = EXPERT_PARTS[part].endswith("weight_scale")
        try:
            for piece in files.pieces(path, offset, length, buffer):
                job.crc = crc32c(piece, job.crc)
                bad = scale_nan(np.frombuffer(piece, np.uint8)) if searched else -1
                if bad >= 0:
                    text = (
                        f"{prefix}{EXPERT_PARTS[part]}: scale byte 255 (NaN) at offset {at + bad}"
                    )
                    job.faults.append((path, text))
                    searched = False
                at += len(piece)
        except ReadError as error:
            text = str(error).removeprefix(f"{path}: ")
            job.faults.append((path, f"{prefix}{EXPERT_PARTS[part]}: {text}"))
            return


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps a second deep verification away, until this one ends or its process does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory / LOCK, flags, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KimiError(
                f"{directory}: another kimi verify --deep is at work there: let it finish"
            ) from None
        yield
    finally:
        os.close(fd)
