"""Repack stopped, failing or killed at any moment: a rerun gives the same bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from repacking import child, contents, not_whole

from kimi_cli.errors import Exit, KimiError
from kimi_cli.manifest import read_manifest
from kimi_cli.repack import repack

# ---- interruptions ----


class Stop(BaseException):
    """Comes from nowhere, as Ctrl-C does."""


def stopping(after: int, kind: type[BaseException]) -> Callable[[int, int], None]:
    """A report that raises at call number `after`."""
    calls = iter(range(after))

    def report(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise kind

    return report


def test_stopped_at_any_report(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Each run goes a little further than the last; none leaves anything but whole files."""
    out, rng, listed = tmp_path / "out", random.Random(1), 0
    for run in range(40):
        with suppress(Stop, KeyboardInterrupt):
            repack(
                small,
                out,
                report=stopping(rng.randrange(60), Stop if run % 2 else KeyboardInterrupt),
            )
        if (out / "trunk.json").exists():
            break
        not_whole(small, out)
        assert not list(out.glob("*.tmp"))
        if (out / "trunk.partial.json").exists():
            now = len(read_manifest(out / "trunk.partial.json").files)
            assert now >= listed
            listed = now
    repack(small, out)
    assert contents(out) == whole


CALLS = ("rename", "fsync", "pwrite", "unlink", "open", "mkdir", "preadv", "posix_fadvise")


def failing(
    monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, names: tuple[str, ...]
) -> Callable[[], int]:
    """Lets the system call number `at` among `names` fail; gives back the count of calls."""
    count = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at + 1:
                raise error
            return call(*args, **options)

        return wrapped

    for name in names:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count


@pytest.mark.fault(
    "disk: a repack stopped in any system call", "the rerun gives byte-identical files", times=60
)
def test_stopped_at_any_system_call(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = failing(patch, -1, Stop(), CALLS)
        repack(small, tmp_path / "count")
        total = count()
    assert total > 200
    stopped = 0
    for at in [*range(12), *range(12, total, total // 50)]:
        out = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, at, Stop(), CALLS)
            try:
                repack(small, out)
            except Stop:
                stopped += 1
        if out.is_dir() and not (out / "trunk.json").exists():
            not_whole(small, out)
        assert contents(repack(small, out)) == whole
        shutil.rmtree(out)
    assert stopped > 50


def test_disk_full_at_any_write(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    names = ("pwrite", "fsync", "rename", "mkdir")
    with pytest.MonkeyPatch.context() as patch:
        count = failing(patch, -1, Stop(), names)
        repack(small, tmp_path / "count")
        total = count()
    for at in [*range(8), *range(8, total, total // 20)]:
        out = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, at, OSError(errno.ENOSPC, "No space left on device"), names)
            with pytest.raises(KimiError) as caught:
                repack(small, out)
        assert type(caught.value) is KimiError and caught.value.exit_code == Exit.FAILED
        assert "cannot be written: No space left on device; make room and" in str(caught.value)
        assert not list(out.glob("layer*.tmp"))
        assert contents(repack(small, out)) == whole


CHILD = """
import os, random, signal, sys, threading, time
sys.path.insert(0, os.getcwd())
from pathlib import Path
from kimi_cli.repack import repack

def kill(out, delay):
    while not out.exists():
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)

model, out, delay = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
threading.Thread(target=kill, args=(out, delay), daemon=True).start()
repack(model, out, report=lambda done, total: time.sleep(0.001))
"""


@pytest.mark.fault(
    "disk: kill -9 at any point of a repack",
    "the rerun gives byte-identical files, no other",
    times=12,
)
def test_killed_a_dozen_times(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """kill -9 at random moments; the same folder goes on each time."""
    out, rng, killed = tmp_path / "out", random.Random(7), 0
    for _ in range(60):
        done = child(CHILD, small, out, rng.uniform(0, 0.15))
        assert done.returncode in (0, -9), done.stderr
        if done.returncode == 0:
            assert contents(out) == whole
            shutil.rmtree(out)
            continue
        killed += 1
        if not (out / "trunk.json").exists():
            not_whole(small, out)
        if killed >= 12:
            break
    assert killed >= 12
    repack(small, out)
    assert contents(out) == whole


@pytest.mark.fault(
    "disk: two repacks to one directory at once",
    "one is refused with exit code 1, or finds it done",
)
def test_two_at_once(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def report(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(KimiError, match="another kimi repack is writing there") as caught:
                repack(small, out)
            refused.append(caught.value.exit_code)

    repack(small, out, report=report)
    assert refused == [1] and contents(out) == whole
