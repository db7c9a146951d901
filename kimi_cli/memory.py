"""What this process holds and what it may hold: read from /proc and the control groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from kimi_cli.units import MIB

UNLIMITED = 1 << 60
"""cgroup v1 writes its 'no limit' as a number near 2^63."""
MARGIN = 64 * MIB


def _status(field: str, path: Path = Path("/proc/self/status")) -> int:
    """Bytes of a `kB` line of /proc/PID/status."""
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no {field}")


def peak_rss() -> int:
    """Peak resident bytes of this process. (VmHWM: a getrusage peak starts at the parent's.)"""
    return _status("VmHWM")


def rss() -> int:
    """Resident bytes of this process now."""
    return _status("VmRSS")


def one_arena() -> None:
    """Keeps glibc to one heap: every further arena is memory nobody asked for."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(ctypes.c_int(-8), ctypes.c_int(1))


def cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))


def _number(path: Path) -> int | None:
    """The byte count in a control file, or None when it is missing, malformed or unlimited."""
    try:
        text = path.read_text().strip()
        value = int(text)
    except (OSError, ValueError):
        return None
    return value if 0 <= value < UNLIMITED else None


def _groups(root: Path, proc: Path) -> list[tuple[Path, Path, str, str]]:
    """(mount point, group directory, limit file, usage file) of every memory controller."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, group = fields
        if controllers == "":
            mount, names = root, ("memory.max", "memory.current")
            if (root / "unified").is_dir():
                mount = root / "unified"
        elif "memory" in controllers.split(","):
            mount, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        found.append((mount, mount / group.lstrip("/"), *names))
    return found


def group_available(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes the control groups still leave us, the tightest ancestor deciding; None: no limit.

    Page cache counts as used there but is given back under pressure, so inactive file pages are
    added again where the kernel tells them.
    """
    tightest = None
    for mount, group, limit_name, usage_name in _groups(root, proc):
        while True:
            limit = _number(group / limit_name)
            if limit is not None:
                used = max((_number(group / usage_name) or 0) - _inactive(group), 0)
                left = max(limit - used, 0)
                tightest = left if tightest is None else min(tightest, left)
            if group == mount or mount not in group.parents:
                break
            group = group.parent
    return tightest


def _inactive(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def machine_available(path: Path = Path("/proc/meminfo")) -> int:
    """Bytes the kernel thinks can be had without swapping (MemAvailable)."""
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no MemAvailable")


def available() -> int:
    """What `--ram auto` takes: available memory under every limit, plus what we hold already, less
    a margin for page tables and the kernel's share."""
    limits = [machine_available()]
    group = group_available()
    if group is not None:
        limits.append(group)
    left = min(limits)
    return max(left + rss() - MARGIN - left // 32, 0)
