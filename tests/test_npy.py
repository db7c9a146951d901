"""A .npy file that grows: what numpy reads back, and what failures leave."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kimi_cli.errors import KimiError
from kimi_cli.npy import NpyWriter


def rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)


@pytest.mark.parametrize("width", [1, 7, 163_840])
@pytest.mark.parametrize("pieces", [[], [1], [1, 1, 1], [3, 0, 2]])
def test_numpy_reads_it_back(tmp_path: Path, width: int, pieces: list[int]) -> None:
    path, data = tmp_path / "x.npy", rows(sum(pieces), width)
    writer, at = NpyWriter(path, width), 0
    for count in pieces:
        writer.write(data[at : at + count])
        at += count
    assert writer.rows == len(data)
    assert not path.exists()
    writer.close()
    found = np.load(path)
    assert found.dtype == np.float32 and found.shape == (len(data), width)
    assert found.tobytes() == data.tobytes()
    assert os.listdir(tmp_path) == ["x.npy"]
    assert path.stat().st_size == 128 + data.nbytes  # nothing after the last row


def test_rows_may_be_strided(tmp_path: Path) -> None:
    data = rows(4, 10)
    writer = NpyWriter(tmp_path / "x.npy", 5)
    writer.write(data[::2, :5])
    writer.close()
    assert np.array_equal(np.load(tmp_path / "x.npy"), data[::2, :5])


def test_header_has_room_for_any_count(tmp_path: Path) -> None:
    writer = NpyWriter(tmp_path / "x.npy", 1 << 24)
    writer.rows = 10**15
    assert len(writer._header()) == 128
    writer.rows = 0
    writer.discard()


def test_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"old")
    writer = NpyWriter(path, 3)
    writer.write(rows(2, 3))
    assert path.read_bytes() == b"old"
    writer.close()
    assert np.load(path).shape == (2, 3)


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"old")
    writer = NpyWriter(path, 3)
    writer.write(rows(2, 3))
    writer.discard()
    writer.discard()
    assert os.listdir(tmp_path) == ["x.npy"] and path.read_bytes() == b"old"


def test_close_twice_and_discard_after_it(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    writer = NpyWriter(path, 3)
    writer.write(rows(2, 3))
    writer.close()
    writer.close()
    writer.discard()
    assert np.load(path).shape == (2, 3)


@pytest.mark.parametrize(("kept", "found"), [(0, 0), (2, 2), (3, 3), (9, 3)])
def test_close_keeps_only_so_many_rows(tmp_path: Path, kept: int, found: int) -> None:
    path, data = tmp_path / "x.npy", rows(3, 5)
    writer = NpyWriter(path, 5)
    writer.write(data)
    writer.close(kept)
    assert np.array_equal(np.load(path), data[:found])
    assert path.stat().st_size == 128 + found * 20


def test_half_a_row_is_cut_off(tmp_path: Path) -> None:
    """An interruption may fall between the bytes of a row and its count."""
    path, data = tmp_path / "x.npy", rows(3, 5)
    writer = NpyWriter(path, 5)
    writer.write(data[:2])
    writer._file.write(data[2].tobytes()[:7])
    writer.close()
    assert np.array_equal(np.load(path), data[:2]) and path.stat().st_size == 128 + 40


def test_missing_directory_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "no" / "x.npy"
    with pytest.raises(KimiError) as caught:
        NpyWriter(path, 3)
    assert str(caught.value) == f"{path}: cannot be written: No such file or directory"


def test_name_that_is_a_directory_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.mkdir()
    writer = NpyWriter(path, 3)
    writer.write(rows(2, 3))
    with pytest.raises(KimiError, match=r"x\.npy: cannot be written: Is a directory"):
        writer.close()
    writer.discard()
    assert os.listdir(tmp_path) == ["x.npy"]


def test_full_disk_is_a_sentence(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    writer = NpyWriter(tmp_path / "x.npy", 1000)
    os.dup2(os.open(full, os.O_WRONLY | os.O_CLOEXEC), writer._file.fileno())
    with pytest.raises(KimiError, match=r"x\.npy: cannot be written: No space left on device"):
        for _ in range(20):
            writer.write(rows(100, 1000))
    writer.discard()
    assert os.listdir(tmp_path) == []
