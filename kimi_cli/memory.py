"""What this process holds and what it may hold: read from /proc and the control groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

from kimi_cli import cgroup
from kimi_cli.units import MIB

MARGIN = 64 * MIB
_FIELD = re.compile(rb"^MemAvailable:[ \t]*([0-9]{1,15}) kB$", re.MULTILINE)


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
    """Processors this process may keep busy: its affinity, and its groups' quota rounded up."""
    most = len(os.sched_getaffinity(0))
    quota = cgroup.processors()
    return most if quota is None else max(min(most, quota), 1)


def machine_available(path: Path = Path("/proc/meminfo")) -> int:
    """Bytes the kernel thinks can be had without swapping (MemAvailable), else its free pages."""
    try:
        found = _FIELD.search(path.read_bytes())
    except OSError:
        found = None
    if found is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) * 1024


def available() -> int:
    """What `--ram auto` takes: available memory under every limit, plus what we hold already, less
    a margin for page tables and the kernel's share."""
    left = machine_available()
    most = left + rss()
    group = cgroup.memory()
    if group is not None:
        left = min(left, group.left)
        most = min(left + rss(), group.limit)
    return max(most - MARGIN - left // 32, 0)
