"""Saving a session: where, when, and what a full disk or another process does to it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import generate, kimi, sentence
from sessions import Run, files, history_of, same

from kimi_cli import session, snapshot
from kimi_cli.errors import KimiError, SessionError, UsageError
from kimi_cli.session import Session, due, worthwhile

# --- where it is written -------------------------------------------------------------------------


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
def test_links_are_not_followed(run: Run, tmp_path: Path) -> None:
    path, victim = tmp_path / "s", tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "s.tmp").symlink_to(victim)
    run("hi", "-n", 2, "--session", path, "--save-every", 1)
    assert victim.read_bytes() == b"mine" and files(path) == ["s", "s.ids"]
    for name in ("a", "b.ids"):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(SessionError, match="is a symbolic link: name the file itself"):
            run("hi", "--session", tmp_path / name[0])
    os.mkfifo(tmp_path / "c")
    os.mkfifo(tmp_path / "d.ids")
    for name in "cd":
        with pytest.raises(SessionError, match="is not a regular file"):
            run("hi", "--session", tmp_path / name)
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        run("hi", "--session", tmp_path / "none" / "s")
    assert victim.read_bytes() == b"mine"


def test_the_mask_of_the_user_is_kept(tmp_path: Path) -> None:
    for mask, mode in ((0o077, 0o600), (0o022, 0o644)):
        path = tmp_path / f"{mask}"
        generate("hi", "-n", 2, "--session", path, "--save-every", 1, umask=mask)
        for file in (path, path.with_name(path.name + ".ids")):
            assert file.stat().st_mode & 0o777 == mode


@pytest.mark.fault("disk: two runs with one session", "the second is refused, exit code 1")
def test_one_process_at_a_time(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Session(path):
        with pytest.raises(KimiError, match="s is in use by another kimi: let it finish"):
            run("hi", "--session", path)
        done = kimi("generate", "hi", "--session", path, "--quiet", check=1)
        assert "in use" in sentence(done)
    assert files(path) == []
    run("hi", "-n", 1, "--session", path)


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.fault(
    "disk: full while a session is kept",
    "said, exit code 1; the old state and every id are kept",
    times=2,
)
def test_a_full_disk_keeps_the_old_state_and_every_id(tmp_path: Path) -> None:
    path = tmp_path / "s"
    wanted = generate("hi", "-n", 9)
    kept = ("--session", path, "--save-every", 2, "--quiet")
    kimi("generate", "hi", "-n", 3, *kept)
    old = path.read_bytes()
    done = kimi("generate", "hi", "-n", 8, *kept, preexec_fn=limited(100_000), check=1)
    assert done.stdout.decode().startswith(wanted["text"][:4])
    said = done.stderr.decode()
    assert "s: the state cannot be saved: File too large; the state saved before is kept" in said
    assert path.read_bytes() == old and files(path) == ["s", "s.ids"]
    found = generate("hi", "-n", 9, "--session", path)
    assert found["stats"]["resumed_tokens"] == 8
    same(found, wanted)
    size = (tmp_path / "s.ids").stat().st_size
    done = kimi("generate", "hi", "-n", 30, *kept, preexec_fn=limited(size + 60), check=1)
    assert "s.ids cannot be written: File too large" in done.stderr.decode()
    assert (tmp_path / "s.ids").stat().st_size == size + 56
    assert len(history_of(path).turns[0].ids) == 11


def test_a_failing_disk_in_any_write(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    run("hi", "-n", 2, "--session", path, "--save-every", 1)
    old = path.read_bytes()
    for number in range(40):
        left = number

        def failing(fd: int, offset: int, data: Any, write: Any = snapshot.write_at) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            write(fd, offset, data)

        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "write_at", failing)
            count = 3 + number
            try:
                run("hi", "-n", count, "--ignore-eos", "--session", path, "--save-every", 999)
            except KimiError as error:
                assert "No space left on device" in str(error)
                assert path.read_bytes() == old and files(path) == ["s", "s.ids"]
            else:
                break
    assert number > 5 and path.read_bytes() != old


# --- when to save --------------------------------------------------------------------------------

K3 = 521_000_000


@pytest.mark.parametrize(
    ("every", "fed", "elapsed", "size", "cost", "wanted"),
    [
        (4, 3, 1e9, 1, 0, False), (4, 4, 0, K3, 99, True),
        (None, 0, 1e9, 1, 0, False), (None, 60, 520, K3, 0, False), (None, 60, 522, K3, 0, True),
        (None, 60, 522, K3, 5.2, True), (None, 60, 999, K3, 10, False),
        (None, 60, 1001, K3, 10, True),
        (None, 1, 0.2, 300_000, 0, False), (None, 1, 0.4, 300_000, 0, True),
    ],
)  # fmt: skip
def test_due(
    every: int | None, fed: int, elapsed: float, size: int, cost: float, wanted: bool
) -> None:
    assert due(every, fed, elapsed, size, cost) is wanted


@pytest.mark.parametrize(
    ("every", "fed", "elapsed", "size", "cost", "wanted"),
    [
        (4, 0, 1e9, 1, 0, False), (4, 1, 0, K3, 99, True), (None, 1, 20, K3, 0, False),
        (None, 1, 21, K3, 0, True), (None, 9, 21, K3, 6, False), (None, 0, 99, 1, 0, False),
    ],
)  # fmt: skip
def test_worthwhile(
    every: int | None, fed: int, elapsed: float, size: int, cost: float, wanted: bool
) -> None:
    assert worthwhile(every, fed, elapsed, size, cost) is wanted


def test_saving_seldom_by_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = snapshot.write_snapshot
    monkeypatch.setattr(
        session,
        "write_snapshot",
        lambda path, state, *rest: (written.append(state.position), write(path, state, *rest)),
    )
    run("hi", "-n", 40, "--session", tmp_path / "s")
    assert len(written) < 20
