"""What tests of the engine share: checkpoints with their trunks, plans of any size, whole runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_cli import native
from kimi_cli.engine import Engine, Source
from kimi_cli.header import parse_header
from kimi_cli.manifest import MANIFEST, read_manifest, write_manifest
from kimi_cli.native import crc32c
from kimi_cli.plan import Plan, Request, make_plan, walk
from kimi_cli.repack import repack
from kimi_cli.synth import make_config, write_checkpoint

F32 = NDArray[np.float32]
Edit = Callable[[Plan, Source], Plan]
"""Changes a plan before the engine is made with it."""


class Run(NamedTuple):
    """Logits [T, vocab] of every token fed and {(layer, position): (experts, weights)}."""

    logits: F32
    routed: dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]

    def same(self, other: Run) -> bool:
        """Equal to the last bit."""
        return self.routed == other.routed and np.array_equal(
            self.logits.view(np.uint32), other.logits.view(np.uint32)
        )


def tasks() -> set[str]:
    """This process's threads, as the system numbers them."""
    return set(os.listdir("/proc/self/task"))


def all_ended(before: set[str]) -> bool:
    """Whether no threads are left but those from `before`; the system is a moment behind."""
    end = time.monotonic() + 10
    while tasks() - before and time.monotonic() < end:
        time.sleep(0.01)
    return not tasks() - before


def make_model(
    directory: Path, seed: int = 1, *, plain: bool = False, shards: int = 2, **options: Any
) -> Source:
    """Writes a checkpoint and its trunk; `options` are write_checkpoint's, or config overrides."""
    names = ("scatter_experts", "scatter_trunk", "f32", "bf16", "conv_2d", "a_log_4d", "tokenizer")
    style = {name: options.pop(name) for name in names if name in options}
    write_checkpoint(directory, make_config(**options), seed, shards=shards, **style)
    repack(directory, plain=plain)
    return Source.open(directory)


def forged(source: Source, tmp_path: Path, name: str, bits: bytes, element: int = 0) -> Source:
    """A copy with `bits` in place of one element of a tensor in a trunk file, its checksum right:
    nothing that `kimi repack` writes, and nothing that damage makes."""
    model = shutil.copytree(source.trunk.directory.parent, tmp_path / "model")
    trunk = model / "kimi-trunk"
    manifest = read_manifest(trunk / MANIFEST)
    for listed in manifest.files:
        raw = bytearray((trunk / listed.name).read_bytes())
        entry = parse_header(bytes(raw), len(raw), listed.name).get(name)
        if entry is None:
            continue
        at = entry.offset + element * len(bits)
        raw[at : at + len(bits)] = bits
        (trunk / listed.name).write_bytes(raw)
        for block in listed.blocks:
            block[2] = crc32c(raw[block[0] : block[0] + block[1]])
    write_manifest(trunk / MANIFEST, manifest)
    return Source.open(model)


def plan_of(
    source: Source,
    *,
    context: int = 128,
    prompt: int = 70,
    chunk: int | None = None,
    threads: int = 1,
    ram: int | None = None,
    all_logits: bool = True,
) -> Plan:
    """The plan for `ram` bytes of engine alone: the floor if 0, everything held if None."""
    request = Request(context, prompt, threads, 2, chunk, all_logits)
    whole = bool(source.trunk.experts.whole[source.config.first_k_dense_replace :].all())

    def plan(budget: int) -> Plan:
        return make_plan(source.config, source.trunk.units, request, budget, {}, whole)

    largest = plan(1 << 40)
    return largest if ram is None else plan(max(ram, largest.floor))


def tighten(pinned: float = 0.0, slots: int | None = None) -> Edit:
    """A plan with the smallest ring that works, and every n-th row block pinned, so that about
    this share is. (The floor's ring holds a small model whole.)"""

    def edit(plan: Plan, source: Source) -> Plan:
        segments = walk(source.trunk.units)
        rows = [place for place, segment in enumerate(segments) if segment.matrix >= 0]
        chosen = frozenset(
            place for n, place in enumerate(rows) if int((n + 1) * pinned) > int(n * pinned)
        )
        return replace(
            plan,
            ring=2 * max(segment.size for segment in segments),
            pinned=chosen,
            pinned_bytes=sum(segments[place].size for place in chosen),
            trunk_per_token=sum(
                s.length for place, s in enumerate(segments) if place not in chosen
            ),
            slots=plan.slots if slots is None else slots,
        )

    return edit


def run(
    source: Source,
    prompt: Sequence[int],
    feed: Sequence[int] = (),
    *,
    isa: str = "auto",
    edit: Edit | None = None,
    all_logits: bool = True,
    **request: Any,
) -> Run:
    """Prefills `prompt`, then feeds the tokens of `feed` one by one; without `all_logits` the
    logits begin with those of the prompt's last token."""
    native.set_isa(isa)
    request.setdefault("prompt", len(prompt))
    request.setdefault("context", len(prompt) + len(feed))
    plan = plan_of(source, all_logits=all_logits, **request)
    if edit is not None:
        plan = edit(plan, source)
    routed = {}

    def trace(layer: int, position: int, ids: NDArray[np.int32], weights: F32) -> None:
        for t, row in enumerate(ids.tolist()):
            routed[layer, position + t] = (tuple(row), tuple(weights[t].tolist()))

    try:
        with Engine(source, plan, trace=trace) as engine:
            engine.load()
            rows = [x.copy() for x in engine.prefill(prompt, all_logits, bool(feed))]
            for n, token in enumerate(feed):
                rows.append(engine.step(token, n + 1 < len(feed)).copy())
    finally:
        native.set_isa("auto")
        native.set_threads(1)
    return Run(np.concatenate(rows), routed)
