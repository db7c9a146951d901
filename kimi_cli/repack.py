"""The trunk's folder, written file by file: an interrupted repack goes on where it was.

    lock -> which files are whole already? -> room for the rest? -> tables.safetensors
    -> each unit as NAME.tmp, synced, read back, renamed, and listed in trunk.partial.json
    -> trunk.partial.json renamed to trunk.json

It never writes to the checkpoint's own files. What it makes does not depend on interruptions.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kimi_cli.checkpoint import Checkpoint, fingerprint
from kimi_cli.config import Config, load_config
from kimi_cli.durable import TEMPORARY, rename, sync_directory
from kimi_cli.errors import KimiError, TrunkError, UsageError
from kimi_cli.layout import ESCAPES_IN, Stored, lay_out, may_pack, unit_tensors
from kimi_cli.manifest import (
    MANIFEST,
    PARTIAL,
    Fingerprint,
    Listed,
    Manifest,
    read_manifest,
    write_manifest,
)
from kimi_cli.native import Format, crc32c
from kimi_cli.packing import Packer
from kimi_cli.source import FORMATS
from kimi_cli.tables import FILE_NAME as TABLES
from kimi_cli.tables import Tables, file_bytes, read_tables, write_tables
from kimi_cli.tensors import EMBEDDING, Tensor
from kimi_cli.trunk import DIRECTORY, Trunk, open_unit
from kimi_cli.units import MIB, format_size

Report = Callable[[int, int], None]

LOCK = "repack.lock"
SLACK = 16 * MIB
"""Bytes asked for beyond the files: manifest, directory entries, the file system's own."""

_OURS = re.compile(
    rf"((layer-\d{{3,}}|head)\.safetensors({re.escape(TEMPORARY)})?"
    rf"|({re.escape(TABLES)}|{re.escape(MANIFEST)}|{re.escape(PARTIAL)}){re.escape(TEMPORARY)})"
)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def repack(
    model_dir: Path,
    out_dir: Path | None = None,
    *,
    plain: bool = False,
    report: Report | None = None,
) -> Path:
    """Makes the trunk of the checkpoint in `model_dir`, packed or `plain`; returns its folder.

    `out_dir` is by default kimi-trunk in `model_dir`. `report` is called, by this thread, with the
    bytes of the checkpoint dealt with and their total; where the trunk is there already,
    nothing is written and the first call is the only one, with both equal. Files that an earlier
    repack of the same checkpoint and encoding finished are checked and kept.

    Raises UsageError if the model directory cannot be written to and no `out_dir` was given, or if
    they are the same; CheckpointError for whatever is wrong with the checkpoint, NaN and infinity
    included; ReadError; KimiError if another repack is at work, if there is not enough room, or if
    a file cannot be written.
    """
    config = load_config(model_dir)
    out = model_dir / DIRECTORY if out_dir is None else out_dir
    if os.path.realpath(out) == os.path.realpath(model_dir):
        raise UsageError(f"{out} holds the checkpoint: give the trunk another place with --out")
    job = _Repack(model_dir, out, config, plain, report or (lambda done, total: None))
    if not job.complete():
        try:
            _make_directory(out, job.most_bytes())
            with _locked(out):
                job.run()
        except OSError as error:
            raise _sentence(error, model_dir, out, default=out_dir is None) from None
    return out


class _Repack:
    """One repack: what it makes, of what."""

    def __init__(
        self, model_dir: Path, out: Path, config: Config, plain: bool, report: Report
    ) -> None:
        self._model_dir, self._out, self._config, self._report = model_dir, out, config, report
        self._encoding = "plain" if plain else "packed"
        self._checkpoint = Checkpoint.open(model_dir, config)
        self._fingerprint: Fingerprint = fingerprint(self._checkpoint.shards, crc32c)
        self._units = unit_tensors(config)
        self._embedding = self._checkpoint.tensors[EMBEDDING]
        self._total = sum(self._source_bytes(tensors) for _, tensors in self._units)
        self._total += self._embedding.length
        self._done = 0

    def complete(self) -> bool:
        """Whether the trunk is there already; reported if so."""
        try:
            trunk = Trunk.open(self._out, self._model_dir, self._config)
        except TrunkError:
            return False
        if trunk.encoding != self._encoding or trunk.fingerprint != self._fingerprint:
            return False
        self._report(self._total, self._total)
        return True

    def most_bytes(self, kept: frozenset[str] = frozenset()) -> int:
        """The most bytes that the files may need, those `kept` left out."""
        sizes = (
            lay_out(file, [self._largest(tensor) for tensor in tensors], self._config)[0].size
            for file, tensors in self._units
            if file not in kept
        )
        return sum(sizes) + file_bytes(self._config) + SLACK

    def run(self) -> None:
        """Writes what is missing. The lock is held."""
        if self.complete():  # another repack has finished meanwhile
            return
        packer = Packer(self._checkpoint, self._config, self._encoding == "packed", self._advance)
        try:
            earlier = self._earlier()
            kept = self._whole_files(packer, earlier.files if earlier else ())
            names = frozenset(listed.name for listed in kept)
            old = [
                entry.path
                for entry in os.scandir(self._out)
                if _OURS.fullmatch(entry.name) and entry.name not in names
            ]
            _require_room(self._out, self.most_bytes(names), sum(map(_file_bytes, old)))
            with suppress(FileNotFoundError):
                rename(self._out / MANIFEST, self._out / PARTIAL)
            for path in old:
                os.unlink(path)
            sync_directory(self._out)
            tables = self._tables(packer, earlier)
            self._write_partial(kept, tables)
            self._write_units(packer, {listed.name: listed for listed in kept}, tables)
        finally:
            packer.close()
        rename(self._out / PARTIAL, self._out / MANIFEST)

    def _tables(self, packer: Packer, earlier: Manifest | None) -> tuple[int, int]:
        """Size and CRC-32C of tables.safetensors, which is written unless it is there.

        One that is there stays: sums taken again would vouch for a row damaged since.
        """
        if earlier is not None:
            sizes = [int(shard["size"]) for shard in self._fingerprint["shards"]]
            with suppress(TrunkError):
                read_tables(self._out, earlier.tables, sizes, self._config)
                self._advance(self._embedding.length)
                return earlier.tables
        tables = Tables(self._checkpoint.experts, packer.row_sums(EMBEDDING))
        return write_tables(self._out, tables, self._config)

    def _write_units(
        self, packer: Packer, done: dict[str, Listed], tables: tuple[int, int]
    ) -> None:
        for file, tensors in self._units:
            if file in done:
                continue
            path = self._out / file
            temporary = path.with_name(file + TEMPORARY)
            try:
                done[file] = Listed.of(packer.write(temporary, file, tensors))
                rename(temporary, path)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            self._write_partial([done[name] for name, _ in self._units if name in done], tables)

    def _write_partial(self, files: list[Listed], tables: tuple[int, int]) -> None:
        manifest = Manifest(
            self._encoding,
            self._fingerprint,
            self._embedding,
            tables,
            tuple(files),
        )
        write_manifest(self._out / PARTIAL, manifest)

    def _whole_files(self, packer: Packer, earlier: Sequence[Listed]) -> list[Listed]:
        """The `earlier` files that are whole, every block checked."""
        tensors, found = dict(self._units), []
        for listed in earlier:
            if listed.name not in tensors:
                continue
            path = self._out / listed.name
            try:
                unit = open_unit(path, tensors[listed.name], listed, self._config)
                if not packer.intact(path, unit):
                    continue
            except (TrunkError, OSError):
                continue
            found.append(listed)
            self._advance(self._source_bytes(tensors[listed.name]))
        return found

    def _earlier(self) -> Manifest | None:
        """What an earlier repack of the same left."""
        for name in (MANIFEST, PARTIAL):
            try:
                earlier = read_manifest(self._out / name)
            except (FileNotFoundError, TrunkError):
                continue
            if (earlier.encoding, earlier.fingerprint) == (self._encoding, self._fingerprint):
                return earlier
        return None

    def _source_bytes(self, tensors: tuple[Tensor, ...]) -> int:
        return sum(self._checkpoint.tensors[tensor.name].length for tensor in tensors)

    def _largest(self, tensor: Tensor) -> Stored:
        """`tensor` stored with as many escapes as packing allows."""
        place = self._checkpoint.tensors[tensor.name]
        fmt = FORMATS[place.dtype]
        if self._encoding == "packed" and may_pack(tensor, fmt):
            return Stored(tensor, Format.PACKED, place.shape, tensor.size // ESCAPES_IN)
        return Stored(tensor, fmt, place.shape)

    def _advance(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)


def _make_directory(out: Path, needed: int) -> None:
    if os.path.lexists(out):
        return
    parent = next(path for path in out.absolute().parents if os.path.exists(path))
    _require_room(parent, needed, 0)
    out.mkdir(parents=True, exist_ok=True)


def _require_room(where: Path, needed: int, given_back: int) -> None:
    """`given_back` bytes are in files that will go. Raises KimiError with what is missing."""
    stats = os.statvfs(where)
    free = stats.f_bavail * stats.f_frsize + given_back
    if free < needed:
        raise KimiError(
            f"{where}: the trunk needs up to {format_size(needed)}, {format_size(free)} are free: "
            f"make room for {format_size(needed - free)} more, or give another place with --out"
        )


def _file_bytes(path: str) -> int:
    return os.lstat(path).st_blocks * 512


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps a second repack out of the same folder, until it ends or its process does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(out / LOCK, flags, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KimiError(f"{out}: another kimi repack is writing there: let it finish") from None
        yield
    finally:
        os.close(fd)


def _sentence(error: OSError, model_dir: Path, out: Path, *, default: bool) -> KimiError:
    where = error.filename or out
    reason = error.strerror or str(error)
    if default and error.errno in _UNWRITABLE:
        command = f"kimi repack -m {shlex.quote(str(model_dir))} --out DIR"
        return UsageError(f"{where} cannot be written ({reason}): choose a place with {command}")
    text = f"{where} cannot be written: {reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; make room and run it again, it goes on with the file it was at"
    return KimiError(text)
