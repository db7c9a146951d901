"""Rings, direct files and reader threads, each held against something dumber."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import all_ended, tasks

from kimi_cli import stream
from kimi_cli.errors import KimiError, ReadError
from kimi_cli.stream import ALIGN, DirectFile, Reader, Ring, allocate, round_up


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


# --- allocate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, ALIGN - 1, ALIGN, ALIGN + 1, 1 << 20, 65 << 20])
def test_memory_is_zeroed_and_on_a_page(size: int) -> None:
    view = allocate(size)
    assert len(view) == size and address(view) % ALIGN == 0
    assert view[0] == view[-1] == 0
    view[-1] = 7
    assert view[-1] == 7


def test_memory_that_is_not_to_be_had_is_a_sentence() -> None:
    with pytest.raises(KimiError, match=r"^the system refused \S+ \S+ of the memory that"):
        allocate(1 << 62)


def test_untouched_memory_costs_nothing() -> None:
    from kimi_cli.memory import rss

    before = rss()
    view = allocate(256 << 20)
    assert rss() - before < 8 << 20
    assert len(view) == 256 << 20


def test_round_up() -> None:
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert round_up(5, 3) == 6


# --- Ring ----------------------------------------------------------------------------------------


@given(
    pages=st.integers(1, 9),
    steps=st.lists(st.integers(0, 5 * ALIGN), max_size=60),
)
def test_ring_never_overlaps_and_never_starves(pages: int, steps: list[int]) -> None:
    """0 gives back, anything else takes; a refusal is justified, and ends once it is empty."""
    buffer = allocate(pages * ALIGN)
    base = address(buffer)
    ring, held = Ring(buffer), list[tuple[int, int]]()
    for step in steps:
        if step == 0:
            if held:
                ring.give_back()
                held.pop(0)
            continue
        length = round_up(step)
        if length > len(buffer):
            with pytest.raises(ValueError, match="never fit"):
                ring.take(step)
            continue
        piece = ring.take(step)
        if piece is None:
            assert held, "an empty ring refused what fits"
            free = len(buffer) - sum(size for _, size in held)
            # only what lies split over both ends may be refused though it is free in sum
            first, last = held[0][0], held[-1][0] + held[-1][1]
            gaps = [first - last] if last <= first else [len(buffer) - last, first]
            assert length > max(gaps) or free < length
            continue
        start = address(piece) - base
        assert len(piece) == length and start % ALIGN == 0
        assert 0 <= start <= len(buffer) - length
        for other, size in held:
            assert start + length <= other or other + size <= start
        held.append((start, length))


def test_ring_wraps_and_frees_the_oldest_first() -> None:
    buffer = allocate(4 * ALIGN)
    ring, base = Ring(buffer), address(buffer)
    places = []
    for _ in range(20):
        piece = ring.take(2 * ALIGN)
        assert piece is not None
        places.append((address(piece) - base) // ALIGN)
        if len(places) > 1:
            assert ring.take(1) is None
            ring.give_back()
    assert places == [0, 2] * 10


def test_ring_that_is_full_is_not_taken_for_empty() -> None:
    ring = Ring(allocate(2 * ALIGN))
    assert ring.take(ALIGN) is not None and ring.take(1) is not None
    assert ring.take(1) is None
    ring.give_back()
    again = ring.take(1)
    assert again is not None and ring.take(1) is None
    ring = Ring(allocate(4 * ALIGN))
    assert ring.take(3 * ALIGN) is not None and ring.take(ALIGN) is not None
    ring.give_back()
    assert ring.take(3 * ALIGN) is not None  # full, the oldest at the end
    for length in range(ALIGN, 5 * ALIGN, ALIGN):
        assert ring.take(length) is None


# --- DirectFile ----------------------------------------------------------------------------------


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def read(file: DirectFile, offset: int, length: int, spare: int = 0) -> bytes:
    lead = offset % ALIGN
    buffer = allocate(round_up(lead + length) + spare)
    start = file.read(offset, length, buffer)
    return bytes(buffer[start : start + length])


SIZES = [1, 511, 512, 4095, 4096, 4097, 12288, 100_001, 8 * ALIGN + 513]


def check_every_kind_of_range(path: Path, size: int) -> None:
    data = content(size)
    path.write_bytes(data)
    file = DirectFile(path)
    ranges = {
        (0, size), (0, 1), (size - 1, 1), (size // 2, size - size // 2), (size // 3, 1),
        (min(4095, size - 1), 1), (min(4096, size) // 2, min(4097, size) // 2),
        (max(size - 4097, 0), min(size, 4097)), (0, 0), (size, 0),
    }  # fmt: skip
    for offset, length in ranges:
        assert read(file, offset, length) == data[offset : offset + length], (offset, length)
        assert read(file, offset, length, spare=3 * ALIGN) == data[offset : offset + length]
    file.close()


@pytest.mark.parametrize("size", SIZES)
def test_any_range_of_any_size(tmp_path: Path, size: int) -> None:
    check_every_kind_of_range(tmp_path / "file", size)


@pytest.mark.parametrize("size", SIZES)
def test_in_memory_file_system(size: int) -> None:
    path = Path(f"/dev/shm/kimi-test-{os.getpid()}-{size}")
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    try:
        check_every_kind_of_range(path, size)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("size", SIZES)
def test_buffered_where_direct_is_refused_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    check_every_kind_of_range(tmp_path / "file", size)


def test_large_file_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CALL_BYTES", 3 * ALIGN)
    for size in (20 * ALIGN, 20 * ALIGN + 77):
        check_every_kind_of_range(tmp_path / f"file{size}", size)


Preadv = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture
def preadv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., int]], None]]:
    """Puts a function (real, fd, buffers, offset) -> count in place of os.preadv."""
    real = os.preadv

    def install(fake: Callable[..., int]) -> None:
        monkeypatch.setattr(os, "preadv", lambda fd, b, offset: fake(real, fd, b, offset))

    yield install


def is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_direct_read_that_fails_at_the_probe(tmp_path: Path, preadv: Any) -> None:
    def fake(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    preadv(fake)
    path = tmp_path / "file"
    path.write_bytes(content(10_000))
    file = DirectFile(path)
    assert not file.direct
    assert read(file, 5000, 5000) == content(10_000)[5000:]
    file.close()


def test_direct_read_that_fails_later_on_every_thread_at_once(tmp_path: Path, preadv: Any) -> None:
    """A file system may take the probe and refuse a longer read: all threads go on buffered."""
    path = tmp_path / "file"
    data = content(64 * ALIGN)
    path.write_bytes(data)
    before = sorted(os.listdir("/proc/self/fd"))
    file = DirectFile(path)
    if not file.direct:
        pytest.skip("no O_DIRECT here")
    together = threading.Barrier(4, timeout=10)

    def fake(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if is_direct(fd):
            together.wait()  # each thread has the direct descriptor before any falls back
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    preadv(fake)
    found: list[bytes | BaseException] = []

    def work(offset: int) -> None:
        try:
            found.append(read(file, offset, 16 * ALIGN))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(n * 16 * ALIGN,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (
        sorted(map(bytes, found))
        == sorted(  # type: ignore[arg-type]
            data[n * 16 * ALIGN :][: 16 * ALIGN] for n in range(4)
        )
    )
    assert not file.direct
    file.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("direct", [True, False])
def test_interrupted_and_short_reads_go_on(tmp_path: Path, preadv: Any, direct: bool) -> None:
    calls = 0

    def fake(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        step = ALIGN if direct else 777
        return real(fd, [buffers[0][:step]], offset)

    path = tmp_path / "file"
    data = content(5 * ALIGN + 300)
    path.write_bytes(data)
    file = DirectFile(path)
    if not direct:
        os.close(file._fd)
        file._direct_fd, file._fd = -1, os.open(path, os.O_RDONLY)
    preadv(fake)
    assert read(file, 0, len(data)) == data
    assert read(file, 4000, 9000) == data[4000:13000]
    file.close()


def test_file_that_ends_too_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content(9000))
    file = DirectFile(path)
    for offset, length in ((0, 9001), (8999, 2), (9000, 1), (20_000, 1), (4096, 5000), (8192, 809)):
        with pytest.raises(ReadError) as caught:
            read(file, offset, length)
        end = max(9000, offset // ALIGN * ALIGN)
        assert str(caught.value) == (
            f"{path}: ends at byte {end}, wanted {length} bytes at {offset}: "
            "the file has been cut short"
        )
    file.close()


def test_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = content(100_000)
    path.write_bytes(data)
    file = DirectFile(path)
    assert read(file, 90_000, 10_000) == data[90_000:]
    os.truncate(path, 50_000)
    assert read(file, 0, 50_000) == data[:50_000]
    with pytest.raises(ReadError, match="cut short"):
        read(file, 40_000, 20_000)
    os.truncate(path, 0)
    with pytest.raises(ReadError, match="cut short"):
        read(file, 0, 1)
    file.close()


def test_device_error_is_not_a_short_file(tmp_path: Path, preadv: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(content(9000))
    file = DirectFile(path)

    def fake(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    preadv(fake)
    with pytest.raises(ReadError) as caught:
        read(file, 4096, 100)
    assert str(caught.value) == (
        f"{path}: reading 100 bytes at 4096 failed: {os.strerror(errno.EIO)}"
    )
    file.close()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"file: cannot be opened: No such file"):
        DirectFile(tmp_path / "file")


def test_buffer_that_is_too_small_is_a_mistake_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content(9000))
    file = DirectFile(path)
    with pytest.raises(ValueError, match="buffer of 4096 bytes for 8192"):
        file.read(4095, 2, allocate(ALIGN))
    file.close()


def test_closing_gives_back_the_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        file = DirectFile(path)
        file.close()
        file.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- Reader --------------------------------------------------------------------------------------


def test_reader_runs_in_order_urgent_first() -> None:
    reader, order = Reader(1), list[str]()
    begin = threading.Event()

    def note(name: str) -> Callable[[], int]:
        def work() -> int:
            order.append(name)
            return len(order)

        return work

    first = reader.submit(lambda: 0 if begin.wait(10) else 1)
    tickets = [reader.submit(note(name)) for name in "abc"]
    urgent = [reader.submit(note(name), urgent=True) for name in "xy"]
    assert not any(ticket.ready for ticket in (first, *tickets, *urgent))
    begin.set()
    assert [ticket.wait() for ticket in (*urgent, *tickets)] == [1, 2, 3, 4, 5]
    assert order == ["x", "y", "a", "b", "c"]
    assert all(ticket.ready for ticket in (first, *tickets, *urgent))
    reader.close()


def test_reader_works_with_several_threads() -> None:
    reader, together = Reader(3), threading.Barrier(3, timeout=10)
    tickets = [reader.submit(lambda: min(together.wait(), 0)) for _ in range(3)]
    assert [ticket.wait() for ticket in tickets] == [0, 0, 0]
    reader.close()


def test_error_reaches_whoever_waits_and_the_reader_goes_on() -> None:
    reader = Reader(1)

    def fail() -> int:
        raise ReadError("it broke")

    bad, good = reader.submit(fail), reader.submit(lambda: 7)
    for _ in range(2):
        with pytest.raises(ReadError, match="it broke"):
            bad.wait()
    assert good.wait() == 7
    reader.close()


def test_close_finishes_what_has_begun_and_drops_the_rest() -> None:
    before = tasks()
    reader = Reader(1)
    begun, finish, ran = threading.Event(), threading.Event(), list[int]()

    def long() -> int:
        begun.set()
        finish.wait(10)
        return 3

    first = reader.submit(long)
    rest = [reader.submit(lambda: ran.append(1) or 0) for _ in range(5)]
    assert begun.wait(10)
    threading.Timer(0.05, finish.set).start()
    reader.close()
    assert first.ready and first.wait() == 3
    assert not ran and not any(ticket.ready for ticket in rest)
    assert all_ended(before)
    reader.close()
