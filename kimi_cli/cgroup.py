"""What the control groups allow this process: memory and processor time, versions 1 and 2.

    /proc/self/mountinfo    which hierarchy is mounted where, and which of its groups is the root
    /proc/self/cgroup       our group in each hierarchy
    MOUNT/GROUP, MOUNT/..   the limits, of which the tightest counts, ancestors included

Inside a container the group may lie above or beside what is mounted; then the mount's own root is
taken for it. Whatever these files hold, it raises nothing: what is not understood is no limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
UNLIMITED = 1 << 60
"""Version 1 writes its 'no limit' as a number near 2^63."""
_READ = 1 << 20
_NUMBER = re.compile(rb"[0-9]{1,19}")
_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Allowance:
    """Bytes: the tightest memory limit, and the least that any limit still leaves us."""

    limit: int
    left: int


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    root: str
    point: Path


def memory(proc: Path = SELF) -> Allowance | None:
    """What the memory controller allows; None: no limit.

    Page cache counts as used there but is given back under pressure, so clean file pages are
    added again.
    """
    found = []
    for version, group in _groups("memory", proc):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [_number(_read(group / name)) for name in names]
        stat = _stat(_read(group / "memory.stat"))
        limits.append(stat.get(b"hierarchical_memory_limit"))
        tightest = min((x for x in limits if x is not None and x < UNLIMITED), default=None)
        if tightest is None:
            continue
        usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
        used = (_number(_read(group / usage)) or 0) - _reclaimable(version, stat)
        found.append(Allowance(tightest, max(tightest - max(used, 0), 0)))
    if not found:
        return None
    return Allowance(min(a.limit for a in found), min(a.left for a in found))


def processors(proc: Path = SELF) -> int | None:
    """Processors' worth of time that the quotas allow, rounded up, at least 1; None: no quota."""
    found = []
    for version, group in _groups("cpu", proc):
        if version == 2:
            numbers = _read(group / "cpu.max").split()
        else:
            numbers = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(_number, numbers) if len(numbers) == 2 else (None, None)
        if quota and period:
            found.append(-(-quota // period))
    return min(found, default=None)


def _reclaimable(version: int, stat: dict[bytes, int]) -> int:
    """Bytes of clean file pages below a group; version 1 tells a group's own apart from those."""
    if version == 2:
        cached, dirty = (b"active_file", b"inactive_file"), (b"file_dirty", b"file_writeback")
    elif b"total_inactive_file" in stat:
        cached = (b"total_active_file", b"total_inactive_file")
        dirty = (b"total_dirty", b"total_writeback")
    else:
        cached, dirty = (b"active_file", b"inactive_file"), (b"dirty", b"writeback")
    clean = sum(stat.get(key, 0) for key in cached) - sum(stat.get(key, 0) for key in dirty)
    return max(clean, 0)


def _groups(controller: str, proc: Path) -> Iterator[tuple[int, Path]]:
    """(version, directory) of our group under `controller` and of every ancestor in sight."""
    mounts = _mounts(_read(proc / "mountinfo"))
    for line in _read(proc / "cgroup").split(b"\n"):
        fields = line.split(b":", 2)
        if len(fields) != 3:
            continue
        version = 1 if fields[1] else 2
        if version == 1 and controller not in os.fsdecode(fields[1]).split(","):
            continue
        ours = [m for m in mounts if m.version == version]
        if version == 1:
            ours = [m for m in ours if controller in m.controllers]
        place = os.fsdecode(fields[2])
        inside = [(m.point, within) for m in ours if (within := _within(place, m.root)) is not None]
        for point, within in inside or [(m.point, "") for m in ours]:
            group = point / within
            yield version, group
            while group != point:
                group = group.parent
                yield version, group


def _within(group: str, root: str) -> str | None:
    """`group` relative to the mounted `root`; None if it does not lie in it."""
    if ".." in group.split("/") or ".." in root.split("/"):
        return None
    root = root.rstrip("/")
    if group == root or group.startswith(root + "/"):
        return group[len(root) :].strip("/")
    return None


def _mounts(text: bytes) -> list[_Mount]:
    """The control group mounts in a mountinfo file; of two at one place the later is seen."""
    found: dict[Path, _Mount] = {}
    for line in text.split(b"\n"):
        fields = line.split(b" ")
        dash = fields.index(b"-", 6) if b"-" in fields[6:] else len(fields)
        if len(fields) < dash + 4 or fields[dash + 1] not in (b"cgroup", b"cgroup2"):
            continue
        version = 2 if fields[dash + 1] == b"cgroup2" else 1
        root, point = (_ESCAPE.sub(_byte, field) for field in fields[3:5])
        names = frozenset(os.fsdecode(fields[dash + 3]).split(","))
        place = Path(os.fsdecode(point))
        found[place] = _Mount(version, names, os.fsdecode(root), place)
    return list(found.values())


def _byte(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8) & 255])


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_READ)
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return b""


def _number(text: bytes) -> int | None:
    """The count in a control file; None for `max`, -1 and whatever else is no count."""
    text = text.strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def _stat(text: bytes) -> dict[bytes, int]:
    found = {}
    for line in text.split(b"\n"):
        name, _, value = line.partition(b" ")
        number = _number(value)
        if number is not None:
            found[name] = number
    return found
