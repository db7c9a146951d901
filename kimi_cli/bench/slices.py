"""A model to measure on where none is given: a few layers of the released width, random weights.

It is written to disk with its trunk, and gone afterwards, however the run ends.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_cli import console, gauge
from kimi_cli.config import Config, parse_config
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.plan import routed_experts, trunk_bytes
from kimi_cli.progress import Progress
from kimi_cli.repack import repack
from kimi_cli.synth import SLICE, make_config, write_checkpoint
from kimi_cli.tensors import embedding, expert_bytes
from kimi_cli.trunk import plan_units
from kimi_cli.units import MIB, format_size

SLICES: dict[str, dict[str, int]] = {
    "full": {**SLICE, "num_hidden_layers": 5},
    "small": {
        "hidden_size": 1024, "num_hidden_layers": 5, "vocab_size": 8192,
        "intermediate_size": 4096, "num_attention_heads": 8, "q_lora_rank": 256,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "num_heads": 8, "head_dim": 64, "num_experts": 16, "num_experts_per_token": 4,
        "moe_intermediate_size": 512, "routed_expert_hidden_size": 512, "attn_res_block_size": 3,
    },
}  # fmt: skip
"""Overrides for `make_config`: one dense layer, four with experts; two of the five attend."""
PREFIX = "kimi-bench-"
SPARE = 256 * MIB
"""Bytes of disk that are left free."""


def slice_config(kind: str) -> tuple[dict[str, Any], Config]:
    """The config.json of a slice, and what it says."""
    data = make_config(**SLICES[kind])
    return data, parse_config(data, "config")


def disk_bytes(config: Config) -> int:
    """Bytes that a slice and its trunk take on disk, escapes included."""
    units = plan_units(config, True)
    weights = sum(m.rows * m.cols for unit in units for m in unit.matrices)
    weights += embedding(config).size
    experts = routed_experts(config) * expert_bytes(config)
    return 2 * weights + experts + trunk_bytes(units) * 51 // 50 + SPARE


@contextmanager
def made_slice(kind: str, work_dir: Path | None) -> Iterator[Path]:
    """The directory of a slice with its trunk, removed at the end.

    Raises UsageError if `work_dir`, by default the system's temporary directory, is in memory or
    cannot be written, KimiError if it has no room.
    """
    data, config = slice_config(kind)
    place = work_dir or Path(tempfile.gettempdir())
    need = disk_bytes(config)
    _require(place, need)
    try:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place)
    except OSError as error:
        raise UsageError(
            f"{place}: {error.strerror}: give a directory that can be written with --work-dir"
        ) from None
    directory = Path(made.name)
    console.note(
        f"no model given (-m DIR or KIMI_MODEL): making a slice of {config.num_hidden_layers} "
        f"layers in {directory}, {format_size(need - SPARE)}, removed afterwards"
    )
    try:
        with Progress("write", "B") as report:
            write_checkpoint(directory, data, 1, report=report)
        with Progress("repack", "B") as report:
            repack(directory, report=report)
        yield directory
    finally:
        with _undisturbed():
            made.cleanup()


def _require(place: Path, need: int) -> None:
    try:
        space = os.statvfs(place)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror}: give a directory with --work-dir") from None
    kind = gauge.filesystem(place)
    if kind in ("tmpfs", "ramfs"):
        raise UsageError(f"{place} is in memory ({kind}): give a directory on disk with --work-dir")
    free = space.f_bavail * space.f_frsize
    if free < need:
        raise KimiError(
            f"{place}: the slice takes {format_size(need)} of disk and {format_size(free)} are "
            "free: make room, or give another place with --work-dir"
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not stop the removal that the first one began."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
