"""A session's two files while a run uses them: FILE, a whole state, and FILE.ids, every id.

    open, locked -> the history -> a turn begun -> its ids, each synced as it is decided
                 -> the state, now and then, where `due` says so

FILE.ids is what counts: FILE only saves reading it again. What a run finds is the last whole state
and the ids after it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kimi_cli.durable import read_at, sync_directory, write_at
from kimi_cli.errors import KimiError, SessionError, UsageError
from kimi_cli.journal import MAX_BYTES, parse, session_record, token_record, turn_record
from kimi_cli.snapshot import Snapshot, load_state, read_snapshot, state_bytes, write_snapshot
from kimi_cli.state import State
from kimi_cli.turns import Head, History, Step

IDS = ".ids"


def ids_path(path: Path) -> Path:
    """Where the ids of the session at `path` are."""
    return path.with_name(path.name + IDS)


"""What FILE's name is continued by for the file of ids."""
SHARE = 100
"""Computing takes at least so many times as long as saving."""
WEAR = 1_000_000
"""Bytes a second that saving may write, averaged: 86 GB a day if it never ends, so that a disk
made for 600 TB lasts 19 years. The released model's 521 MB are due every 9 minutes."""
DISK = 100_000_000
"""Bytes a second that any disk is expected to write."""
WORTH = 4
"""A state is worth saving at the end if that takes at most this part of the time it took."""
_COPY = 1 << 20


def due(every: int | None, fed: int, elapsed: float, size: int, cost: float) -> bool:
    """Whether to save between two tokens: `fed` tokens and `elapsed` seconds after the last time,
    which cost `cost` seconds (0: not known), when a state has `size` bytes. `every` is the number
    of tokens asked for, None: as often as `SHARE` and `WEAR` allow."""
    if every is not None:
        return fed >= every
    return fed > 0 and elapsed >= max(SHARE * cost, size / WEAR)


def worthwhile(every: int | None, fed: int, elapsed: float, size: int, cost: float) -> bool:
    """The same where a run ends: the next one reads again what is not saved."""
    return fed > 0 and (every is not None or max(cost, size / DISK) <= elapsed / WORTH)


class Session:
    """The session in FILE and FILE.ids, locked; a context manager. For one thread.

    `history` is None for a new session. `position` tokens are in the state that is on disk;
    `unsaved` says why the last attempt to write it failed.
    """

    def __init__(self, path: Path, every: int | None = None) -> None:
        """Opens or begins the session at `path`; the state is to be saved `every` tokens.

        Raises SessionError for files that are damaged, of another version or no session; KimiError
        if another process uses it; UsageError where it cannot be written.
        """
        self.path, self._every = path, every
        self._ids = ids_path(path)
        self.unsaved = ""
        self._fd = _lock(path, self._ids)
        try:
            self._snapshot = read_snapshot(path)
            self.history, self._records, self._size = self._read()
        except BaseException:
            self.close()
            raise
        self.position = self._snapshot.position if self._snapshot else 0
        self._length = len(self.history.ids) if self.history else 0
        self._cost = 0.0
        self._since, self._from = time.monotonic(), self.position

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unlocks it; a file of ids that has none is removed. Does nothing the second time."""
        if self._fd < 0:
            return
        if os.fstat(self._fd).st_size == 0:
            with suppress(OSError):
                self._ids.unlink()
        os.close(self._fd)
        self._fd = -1

    def _read(self) -> tuple[History | None, int, int]:
        """History, records and bytes of the journal, once it has all that the snapshot knows."""
        raw = contents(self._fd, self._ids)
        history, count, end = join(self.path, self._snapshot, raw)
        known = self._snapshot.journal[:end] if self._snapshot else b""
        if raw[: len(known)] != known:  # FILE.ids is lost, or lost its end
            self._put(0, known)
        if end != os.fstat(self._fd).st_size:
            try:
                os.ftruncate(self._fd, end)
            except OSError as error:
                raise self._refused(error) from None
        return history, count, end

    def check_model(self, model: str, vocab_size: int) -> None:
        """Raises SessionError unless the session was made with the model of this digest."""
        if self.history is None:
            return
        made = self.history.head.model
        if made != model:
            raise SessionError(
                f"{self.path} was made with another model: its fingerprint is {made[:16]}, that "
                f"of the one in use {model[:16]}"
            )
        if max(self.history.ids, default=0) >= vocab_size:
            raise SessionError(f"{self.path} holds ids outside the vocabulary of {vocab_size}")

    def begin(self, step: Step, head: Head) -> None:
        """Writes down the turn of `step` if it is new; `head` is a new session's. Raises KimiError
        if that cannot be written."""
        if self.history is None:
            self.history = History(head, [])
            self._append(session_record(head))
            try:
                sync_directory(self._ids.parent)
            except OSError as error:
                raise self._refused(error) from None
        if step.new:
            self._append(turn_record(self._records, step.turn))
            self.history.turns.append(step.turn)
            self._length += len(step.turn.prompt) - step.turn.dropped

    def restore(self, state: State) -> list[int]:
        """Loads the state that is on disk, if there is one, and returns the ids to feed it: those
        after it, at least one. Raises SessionError."""
        assert self.history is not None
        if self._snapshot is not None:
            load_state(self._snapshot, state)
        self._since = time.monotonic()
        return self.history.ids[self.position :]

    def decided(self, token: int, reason: str | None) -> None:
        """Writes down the next id of the answer, and what it ends it by; on the disk when it
        returns. Raises KimiError if that cannot be written."""
        assert self.history is not None
        self._append(token_record(self._records, token, reason))
        turn = self.history.turns[-1]
        turn.ids.append(token)
        turn.reason = reason
        self._length += 1

    def boundary(self, state: State, last: bool = False) -> None:
        """Saves `state`, which stands between two tokens, if that is due; `last`: if it is
        worthwhile. What fails is told in `unsaved`: the ids are safe without it."""
        fed = state.position - self._from
        if not 0 < state.position < self._length:  # a whole state has a token to go on with
            return
        elapsed, size = time.monotonic() - self._since, state_bytes(state)
        if not (worthwhile if last else due)(self._every, fed, elapsed, size, self._cost):
            return
        started = time.monotonic()
        try:
            write_snapshot(self.path, state, self._copy(), self._size)
        except OSError as error:
            self.unsaved = (
                f"{self.path}: the state cannot be saved: {error.strerror or error}; the state "
                f"saved before is kept, and every id is in {self._ids}"
            )
        else:
            self.unsaved, self.position = "", state.position
        self._since, self._from = time.monotonic(), state.position
        self._cost = self._since - started

    def _copy(self) -> Iterator[bytes]:
        for at in range(0, self._size, _COPY):
            yield read_at(self._fd, at, min(_COPY, self._size - at))

    def _append(self, record: bytes) -> None:
        try:
            self._put(self._size, record)
        except KimiError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(record)
        self._records += 1

    def _put(self, offset: int, data: bytes) -> None:
        try:
            write_at(self._fd, offset, data)
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> KimiError:
        return KimiError(
            f"{self._ids} cannot be written: {error.strerror or error}; what it has is kept"
        )


def join(path: Path, snapshot: Snapshot | None, raw: bytes) -> tuple[History | None, int, int]:
    """What `raw`, the contents of FILE.ids, and the snapshot hold together: the history, its
    records and their bytes. Raises SessionError where one is damaged, or is not the other's."""
    ids = ids_path(path)
    try:
        found = parse(raw)
    except ValueError as error:
        fix = f"; delete it to go back to the state in {path}" if snapshot else ""
        raise SessionError(f"{ids} {error}{fix}") from None
    if snapshot is None:
        return found
    known, end = snapshot.journal, found[2]
    if end < len(known) and raw[:end] == known[:end]:
        try:
            found = parse(known)
        except ValueError as error:
            raise SessionError(f"{path}: its journal {error}") from None
    elif raw[: len(known)] != known:
        raise SessionError(f"{ids} is of another session than {path}")
    history = found[0]
    if history is None or not history.turns or not 0 < snapshot.position < len(history.ids):
        raise SessionError(f"{path} is damaged: its state and its ids do not fit each other")
    return found


def _lock(path: Path, ids: Path) -> int:
    """A descriptor of the file of ids, made if need be, that no other process has locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            fd = os.open(ids, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SessionError(f"{ids} is a symbolic link: name the file itself") from None
            raise UsageError(f"{ids} cannot be written: {error.strerror or error}") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SessionError(f"{ids} is not a regular file: a session's list of ids is one")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(fd, ids):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise KimiError(f"{path} is in use by another kimi: let it finish") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner removed it meanwhile


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def contents(fd: int, path: Path) -> bytes:
    """All of a file of ids, MAX_BYTES and a little more at most. Raises SessionError."""
    try:
        pieces: list[bytes] = []
        at = 0
        while at <= MAX_BYTES and (piece := os.pread(fd, _COPY, at)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror or error}") from None


def new_session() -> str:
    """A name for a session that no other has."""
    return secrets.token_hex(16)
