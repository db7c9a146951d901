"""`kimi bench`: which parts run, in what order, and what is printed of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_cli import console, gauge, memory, native
from kimi_cli.answer import Settings, limits
from kimi_cli.bench import extrapolate
from kimi_cli.bench.contest import EFFORTS, cache_bytes
from kimi_cli.bench.disk import Disk, Files, Speeds, measure_disk, model_files
from kimi_cli.bench.kernels import Kernels, Operands, measure_kernels, operand_bytes
from kimi_cli.bench.ladder import Ladder, Prefill, Rung
from kimi_cli.bench.plot import draw, require_matplotlib
from kimi_cli.bench.slices import made_slice
from kimi_cli.bench.table import FLOPS, HEADING, SECONDS, SHARE, Row, row_object, rows_text
from kimi_cli.durable import write_whole
from kimi_cli.engine import READERS, Source
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.plan import Request
from kimi_cli.planning import CONTEXT, Target
from kimi_cli.predict import Rates, predict, work_of
from kimi_cli.presets import preset_table
from kimi_cli.tensors import expert_bytes
from kimi_cli.timing import TraceFile
from kimi_cli.units import format_size

PARTS = ("kernels", "disk", "stream", "decode", "prefill")
_OF_A_MODEL = {"stream", "decode", "prefill"}


@dataclass(frozen=True)
class Wanted:
    """What to measure and where to put it. No `parts`: all. `work_dir` is where a slice is made."""

    parts: Sequence[str] = ()
    slice: str = "full"
    json: Path | None = None
    plot: Path | None = None
    trace_time: Path | None = None
    work_dir: Path | None = None


def bench(settings: Settings, wanted: Wanted) -> None:
    """Measures and prints. Raises KimiError of any kind, KeyboardInterrupt, OutputClosed."""
    parts = [part for part in PARTS if part in wanted.parts or not wanted.parts]
    _check(wanted, parts)
    memory.one_arena()
    native.set_isa(settings.isa)
    session = Session(settings, wanted)
    result: dict[str, Any] = {"isa": native.isa(), "threads": session.threads, "parts": {}}
    with session.opened(bool(_OF_A_MODEL & set(parts)), "disk" in parts):
        console.put(f"{native.isa()}, {session.threads} threads\n{HEADING}")
        for part in parts:
            rows = getattr(session, part)()
            result["parts"][part] = [row_object(row) for row in rows]
            console.put(rows_text(part, rows))
        if "decode" in parts:
            result.update(session.ladder_object())
            told, result["released"] = session.released()
            console.put(told)
            if wanted.plot is not None:
                draw(session.rungs, wanted.plot)
    result["buffer_bytes"], result["cache_bytes"] = session.buffer, cache_bytes()
    if wanted.json is not None:
        try:
            write_whole(wanted.json, json.dumps(result, indent=1).encode() + b"\n")
        except OSError as error:
            raise KimiError(f"{wanted.json}: cannot be written: {error.strerror}") from None


def _check(wanted: Wanted, parts: Sequence[str]) -> None:
    """Refuses what could not be written, before anything is measured."""
    given = [path for path in (wanted.json, wanted.plot, wanted.trace_time) if path is not None]
    for path in given:
        if not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
            raise UsageError(f"{path} cannot be written: no file can be made there")
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise UsageError(f"two options name {given[0]}: give each a file of its own")
    if wanted.plot is not None and "decode" not in parts:
        raise UsageError("--plot draws what decode measures: add decode to the parts")
    if wanted.trace_time is not None and "stream" not in parts:
        raise UsageError("--trace-time shows what stream measures: add stream to the parts")
    if wanted.plot is not None:
        require_matplotlib()


class Session:
    """What the parts share, measured when it is first asked for."""

    def __init__(self, settings: Settings, wanted: Wanted) -> None:
        machine = limits(settings)
        self._settings, self._wanted = settings, wanted
        self._effort = EFFORTS[wanted.slice]
        self._base = memory.rss()
        self._ram = machine.budget
        self.threads = machine.threads
        native.set_threads(machine.threads)
        self.buffer = operand_bytes(self._effort, machine.budget)
        self._target = Target.open(None, None)
        self._source: Source | None = None
        self._disk: Disk | None = None

    @contextmanager
    def opened(self, model: bool, disk: bool) -> Iterator[None]:
        """The model, given or made, if one is needed; files to read if any are."""
        with ExitStack() as stack:
            directory = self._settings.model
            if directory is None and model:
                directory = stack.enter_context(
                    made_slice(self._wanted.slice, self._wanted.work_dir)
                )
            if directory is not None and (model or disk):
                self._source = Source.open(directory, self._settings.trunk)
                trunk = self._source.trunk
                extent = expert_bytes(self._source.config)
                files = model_files(trunk.directory, trunk.shards, extent)
            elif disk:
                place = self._wanted.work_dir or Path()
                path = stack.enter_context(gauge.scratch_file(place, memory.available()))
                files = Files([path], [path], expert_bytes(self._target.config))
            if model or disk:
                self._disk = Disk(files)
                stack.callback(self._disk.close)
            yield

    @cached_property
    def _operands(self) -> Operands:
        return Operands(self._target.config, self.buffer)

    @cached_property
    def _kernels(self) -> Kernels:
        native.set_threads(self.threads)
        return measure_kernels(self._operands, self._effort.seconds)

    @cached_property
    def _speeds(self) -> Speeds:
        assert self._disk is not None
        return measure_disk(self._disk, self._effort.disk_seconds)

    @cached_property
    def _ladder(self) -> Ladder:
        assert self._source is not None and self._disk is not None
        operands = self._operands
        ram = self._ram - memory.rss() + self._base
        return Ladder(
            self._source, operands, self._disk, self._effort, self.threads, self._base, ram
        )

    def kernels(self) -> Sequence[Row]:
        """The kernels over the released widths."""
        return self._kernels.rows

    def disk(self) -> Sequence[Row]:
        """Reading files as the engine does."""
        return self._speeds.rows

    def stream(self) -> Sequence[Row]:
        """One token at the smallest budget: how near to the disk, or to the cores."""
        ladder, path = self._ladder, self._wanted.trace_time
        with ExitStack() as stack:
            sink = stack.enter_context(TraceFile(path)).add if path else None
            rung = ladder.rung(ladder.smallest, sink)
        computing, how = rung.seconds.computing, "its computing"
        largest = ladder.rung(ladder.largest)
        if largest.resident:
            computing, how = largest.seconds.total, "the same in memory"
        limit = max(rung.disk_limit, computing)
        against = "its bytes at disk speed" if limit == rung.disk_limit else how
        name = f"a token within {format_size(rung.plan.budget)}"
        total = rung.seconds.total
        return [
            Row("stream", name, SECONDS, total, limit, against),
            Row("stream", "  disk busy", SHARE, rung.seconds.disk / total, 1.0, "the token"),
            Row("stream", "  computing", SHARE, rung.seconds.computing / total, 1.0, "the token"),
        ]

    @property
    def rungs(self) -> list[Rung]:
        """One for every budget of the ladder."""
        return [self._ladder.rung(budget) for budget in self._ladder.budgets]

    def decode(self) -> Sequence[Row]:
        """A token under every budget of the ladder."""
        rows = []
        for rung in self.rungs:
            read = rung.trunk_bytes + rung.expert_bytes
            what = "all in memory" if rung.resident else f"{format_size(read)} read"
            name = f"{format_size(rung.plan.budget)}, {what}"
            disk = rung.disk_limit > rung.compute_limit
            against = "its bytes at disk speed" if disk else "its bytes read from memory"
            rows.append(Row("decode", name, SECONDS, rung.seconds.total, rung.limit, against))
        return rows

    def prefill(self) -> Sequence[Row]:
        """A prompt at once, under the largest budget."""
        found: Prefill = self._ladder.prefill()
        name = f"{found.tokens} tokens within {format_size(found.plan.budget)}"
        rate = found.flops / found.seconds
        return [
            Row("prefill", name, SECONDS, found.seconds, found.flops / found.peak, "multiply-adds"),
            Row("prefill", "  operations", FLOPS, rate, found.peak, "multiply-adds"),
        ]

    def ladder_object(self) -> dict[str, Any]:
        """The ladder in `bench --json`."""
        products, speeds, work = self._kernels.products, self._speeds, self._ladder.work
        rates = Rates(speeds.blocks, speeds.extents, products["packed"], products["mxfp4"])
        ladder = []
        for rung in self.rungs:
            predicted = predict(rung.plan, work, rates).token_seconds
            ladder.append({**rung_object(rung), "predicted_seconds": predicted})
        return {"ladder": ladder}

    def released(self) -> tuple[str, dict[str, Any]]:
        """The released dimensions from the rates measured here: as text and for JSON."""
        assert self._source is not None
        target, kernels = self._target, self._kernels
        config, work = target.config, work_of(target.config, target.units)
        own, last, rest, layers = self._source.config, self.rungs[-1], 0.0, 0
        if last.resident and own.hidden_size == config.hidden_size:
            layers = own.num_hidden_layers
            rest = extrapolate.beyond(own, self._ladder.work, kernels, last.seconds.total)
        cores = extrapolate.computing(config, work, kernels, CONTEXT, rest, layers)
        request = Request(CONTEXT, CONTEXT, self.threads, READERS)
        base = {**target.base(), "interpreter": self._base}
        presets = preset_table(config, target.units, request, base)
        found = extrapolate.foretell(presets, work, kernels, self._speeds, cores)
        return extrapolate.text(cores, found, CONTEXT), {
            "positions": CONTEXT,
            "lines": [vars(line) for line in cores.lines],
            "resident_seconds": cores.seconds,
            "presets": [vars(item) for item in found],
        }


def rung_object(rung: Rung) -> dict[str, Any]:
    """One budget of the ladder: bytes and seconds."""
    return {
        "budget_bytes": rung.plan.budget,
        "pinned_bytes": rung.plan.pinned_bytes,
        "expert_slots": rung.plan.slots,
        "resident": rung.resident,
        "seconds": rung.seconds.total,
        "disk_seconds": rung.seconds.disk,
        "computing_seconds": rung.seconds.computing,
        "waiting_seconds": rung.seconds.waiting,
        "trunk_bytes": rung.trunk_bytes,
        "expert_bytes": rung.expert_bytes,
        "compute_limit_seconds": rung.compute_limit,
        "disk_limit_seconds": rung.disk_limit,
        "limits": vars(rung.limits),
    }
