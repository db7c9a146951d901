"""How fast this disk reads and these cores multiply, measured the way the engine does both.

It changes nothing but for a temporary file without a name, which ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from kimi_cli import native
from kimi_cli.config import Config
from kimi_cli.engine import READERS
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.layout import BLOCK, block_rows
from kimi_cli.native import U8, Format, Matrix
from kimi_cli.predict import Kernel
from kimi_cli.stream import ALIGN, DirectFile, Reader, Ticket, allocate, round_up
from kimi_cli.tensors import expert_shapes
from kimi_cli.units import MIB, format_size

IN_FLIGHT = 8
"""Reads asked for at a time, as the smallest ring and a token's expert slots do."""
SECONDS = 2.0
"""How long each way of reading is measured."""
PRODUCT_SECONDS = 0.5
SCRATCH, LEAST_SCRATCH = 1024 * MIB, 64 * MIB
"""Bytes of the temporary file, free space and memory permitting."""
WRITE_SECONDS = 5.0
COLUMNS = 16
"""Columns of the product that tells what a further column costs."""
WEIGHTS = 256 * MIB
"""Bytes that products are measured on: more than caches hold."""
_STEP = 16 * MIB
_TABLE = bytes([*range(0x38, 0x40), *range(0xB8, 0xC0)])  # bf16 high bytes of about 1e-5 to 1


@dataclass(frozen=True)
class Speed:
    """Bytes per second of one way to read; `direct`: past the page cache."""

    rate: float
    direct: bool


def read_blocks(files: Sequence[Path], seconds: float | None = None) -> Speed:
    """Blocks of the trunk's size one after another through `files`, each checksummed. ReadError.

    `seconds`: how long it measures, SECONDS if None."""
    size = min(BLOCK, max(path.stat().st_size for path in files))

    def places(opened: Sequence[DirectFile]) -> Iterator[tuple[DirectFile, int]]:
        for file in cycle(opened):
            for offset in range(0, file.size - size + 1, size):
                yield file, offset

    return _read(files, size, places, native.crc32c, seconds or SECONDS)


def read_extents(files: Sequence[Path], extent: int) -> Speed:
    """Extents of `extent` bytes, or of a whole file that is shorter, at random. ReadError."""
    size = min(extent, max(path.stat().st_size for path in files))
    chance = random.Random(0)

    def places(opened: Sequence[DirectFile]) -> Iterator[tuple[DirectFile, int]]:
        while True:
            file = chance.choice(opened)
            yield file, chance.randrange(file.size - size + 1)

    return _read(files, size, places, lambda data: 0, SECONDS)


def _read(
    files: Sequence[Path],
    size: int,
    places: Callable[[Sequence[DirectFile]], Iterator[tuple[DirectFile, int]]],
    check: Callable[[memoryview], int],
    seconds: float,
) -> Speed:
    with contextlib.ExitStack() as stack:
        opened = []
        for path in files:
            file = DirectFile(path)
            stack.callback(file.close)
            if file.size >= size:
                opened.append(file)
        reader = Reader(READERS)
        stack.callback(reader.close)
        buffers = deque(allocate(round_up(size) + 2 * ALIGN) for _ in range(IN_FLIGHT))
        flying: deque[tuple[memoryview, Ticket]] = deque()
        done, started = 0, time.monotonic()
        for file, offset in places(opened):
            if time.monotonic() - started >= seconds:
                break
            if not buffers:
                buffer, ticket = flying.popleft()
                ticket.wait()
                done += size
                buffers.append(buffer)
            buffer = buffers.popleft()
            flying.append((buffer, reader.submit(_job(file, offset, size, buffer, check))))
        for _, ticket in flying:
            ticket.wait()
            done += size
        return Speed(done / (time.monotonic() - started), all(file.direct for file in opened))


def _job(
    file: DirectFile,
    offset: int,
    size: int,
    buffer: memoryview,
    check: Callable[[memoryview], int],
) -> Callable[[], int]:
    def work() -> int:
        lead = file.read(offset, size, buffer)
        check(buffer[lead : lead + size])
        return lead

    return work


@contextlib.contextmanager
def scratch_file(directory: Path, memory: int) -> Iterator[Path]:
    """A file in `directory` to read from, gone afterwards; its path is good in this process only.

    It takes a quarter of the free space at most; where the file system is in memory, of `memory`
    bytes too. Raises UsageError if no file can be written there, KimiError if there is no room.
    """
    try:
        free = _free(directory)
        if filesystem(directory) in ("tmpfs", "ramfs"):
            free = min(free, memory)
        size = min(SCRATCH, free // 4) // _STEP * _STEP
        if size < LEAST_SCRATCH:
            raise KimiError(
                f"{directory} has {format_size(free)} free: too little to measure its speed"
            )
        with tempfile.TemporaryFile(dir=directory, prefix="kimi-doctor-") as file:
            _write(file.fileno(), size)
            yield Path(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be measured: {error.strerror or error}; give a directory on the "
            "model's disk where a temporary file may be written"
        ) from None


def _write(fd: int, size: int) -> None:
    data = np.random.default_rng(0).bytes(_STEP)
    started = time.monotonic()
    for done in range(0, size, _STEP):
        if done >= LEAST_SCRATCH and time.monotonic() - started > WRITE_SECONDS:
            break
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that `path` is on, `unknown` if the system does not tell."""
    where, best, kind = path.resolve(), -1, "unknown"
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return kind
    for line in lines:
        fields = line.split(b" ")
        if len(fields) < 3:
            continue
        point = Path(os.fsdecode(fields[1].replace(b"\\040", b" ")))
        if (point == where or point in where.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), os.fsdecode(fields[2])
    return kind


def trunk_product(config: Config, fmt: Format, memory: int, seconds: float | None = None) -> Kernel:
    """The rate of products of the trunk's width in `fmt`, a row block at a time.

    Two products are measured, each for `seconds`, PRODUCT_SECONDS if None."""
    cols = config.hidden_size
    stride = native.row_bytes(fmt, cols)
    rows = block_rows("", stride, 1)
    data = _random_bytes(min(WEIGHTS, memory // 8), rows * stride)
    if fmt != Format.PACKED:
        data[1::2] = np.frombuffer(_TABLE, np.uint8)[data[1::2] & 15]
    table = np.frombuffer(_TABLE, np.uint8)
    starts, escapes = np.zeros(rows + 1, np.uint32), np.empty(0, np.uint32)
    pieces = [
        Matrix(fmt, rows, cols, data[at : at + rows * stride], table, starts, escapes)
        for at in range(0, len(data), rows * stride)
    ]

    def measure(columns: int) -> float:
        x, y, work = _operands(rows, cols, columns)
        calls = [partial(native.product, p, x, y, work) for p in pieces]
        return _time(calls, rows * cols, seconds)

    return _kernel(measure)


def expert_product(config: Config, memory: int, seconds: float | None = None) -> Kernel:
    """The rate of MXFP4 products of an expert's first matrix, one expert after another; `seconds`
    as in `trunk_product`."""
    (rows, half), (_, groups) = expert_shapes(config)[:2]
    cols, size = 2 * half, rows * (half + groups)
    data = _random_bytes(min(WEIGHTS, memory // 8), size)
    pieces = []
    for at in range(0, len(data), size):
        packed, scales = data[at : at + rows * half], data[at + rows * half : at + size]
        scales[:] = 112 + (scales & 7)
        pieces.append((packed.reshape(rows, half), scales.reshape(rows, groups)))

    def measure(columns: int) -> float:
        x, y, work = _operands(rows, cols, columns)
        calls = [partial(native.product_mxfp4, p, s, x, y, work) for p, s in pieces]
        return _time(calls, rows * cols, seconds)

    return _kernel(measure)


def _random_bytes(size: int, unit: int) -> U8:
    """About `size` random bytes, a multiple of `unit` and one unit at least."""
    data = np.frombuffer(allocate(max(size // unit, 1) * unit), np.uint8)
    tile = np.random.default_rng(0).integers(0, 256, min(len(data), _STEP - 1), np.uint8)
    for at in range(0, len(data), len(tile)):
        part = data[at : at + len(tile)]
        part[:] = tile[: len(part)]
    return data


def _operands(rows: int, cols: int, columns: int) -> tuple[native.F32, native.F32, native.F32]:
    x = np.random.default_rng(1).standard_normal((columns, cols), np.float32)
    y = np.empty((columns, rows), np.float32)
    return x, y, np.empty(native.scratch_floats(cols, columns), np.float32)


def _time(calls: Sequence[Callable[[], None]], weights: int, seconds: float | None = None) -> float:
    """Seconds per weight of `calls`, each over `weights` of them, after one to wake the threads."""
    calls[0]()
    done, started = 0, time.monotonic()
    for call in cycle(calls):
        call()
        done += weights
        spent = time.monotonic() - started
        if spent >= (seconds or PRODUCT_SECONDS):
            return spent / done
    raise AssertionError("there are no calls")


def _kernel(measure: Callable[[int], float]) -> Kernel:
    one, many = measure(1), measure(COLUMNS)
    return Kernel(one, max(many - one, 0.0) / (COLUMNS - 1))
