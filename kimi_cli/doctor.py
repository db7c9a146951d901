"""`kimi doctor`: what this machine is, how fast it will be, and which command comes next."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_cli import cgroup, console, gauge, memory, native
from kimi_cli.answer import Settings, limits
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.native import Format
from kimi_cli.plan import SLACK, routed_experts, smallest_plan, trunk_bytes
from kimi_cli.planning import Target
from kimi_cli.predict import PROMPT, Kernel, Prediction, Rates, predict, work_of
from kimi_cli.presets import Preset, preset_table
from kimi_cli.tensors import embedding, expert_bytes
from kimi_cli.units import format_duration, format_size

QUESTION = "Why is the sky blue?"


@dataclass(frozen=True)
class Machine:
    """Processors, instruction sets, and bytes: available, limited to by control groups if at all,
    wanted by the smallest plan."""

    processors: int
    threads: int
    isa: str
    isas: Sequence[str]
    available: int
    limit: int | None
    floor: int

    @property
    def refusal(self) -> str | None:
        """Why nothing can be run here; None if something can."""
        need = self.floor + SLACK
        if need <= self.available:
            return None
        return (
            f"this machine has {format_size(self.available)} of memory available and the smallest "
            f"plan needs {format_size(need)}: free some, or raise the control group's limit"
        )


@dataclass(frozen=True)
class Disk:
    """Where was read, its file system and free bytes; `own`: from the model's own files."""

    directory: Path
    filesystem: str
    free: int
    own: bool
    blocks: gauge.Speed
    extents: gauge.Speed

    @property
    def direct(self) -> bool:
        return self.blocks.direct and self.extents.direct


def doctor(settings: Settings, directory: Path | None, as_json: bool) -> None:
    """Prints the report. Raises KimiError, exit code 1, if the machine cannot run the model.

    Reads at `directory`, by default where the model is. Raises UsageError if that is no directory
    or nothing can be read or written there, and whatever opening the model does.
    """
    memory.one_arena()
    place = directory or settings.model or Path()
    if not place.is_dir():
        raise UsageError(f"{place} is not a directory")
    target = Target.open(settings.model, settings.trunk)
    machine, presets = _examine(settings, target)
    if machine.refusal:
        console.put(_json(machine, machine.refusal) if as_json else _machine_text(machine))
        raise KimiError(machine.refusal)
    console.note("measuring the disk and the processors: about ten seconds")
    disk = measure_disk(place, directory is None, target, machine.available)
    native.set_isa("auto")
    native.set_threads(machine.threads)
    fmt = Counter(m.format for unit in target.units for m in unit.matrices for _ in m.blocks)
    dense = fmt.most_common(1)[0][0] if fmt else Format.BF16
    trunk = gauge.trunk_product(target.config, dense, machine.available)
    expert = gauge.expert_product(target.config, machine.available)
    rates = Rates(disk.blocks.rate, disk.extents.rate, trunk, expert)
    work = work_of(target.config, target.units)
    found = [
        (preset, predict(preset.plan, work, rates)) for preset in presets if preset.plan is not None
    ]
    command = next_command(settings, target, place, [p for p, _ in found], machine.available)
    if as_json:
        console.put(_json(machine, None, disk, rates, found, command))
    else:
        console.put(_machine_text(machine) + _speed_text(disk, rates, dense))
        console.put(_preset_text(found, target, machine) + _space_text(target, disk))
        console.put(f"next: {command}\n")
    for warning in _warnings(machine, disk, target):
        console.note(f"warning: {warning}")


def _examine(settings: Settings, target: Target) -> tuple[Machine, list[Preset]]:
    threads = limits(settings).threads
    request, base = target.request(settings, threads), target.base()
    arguments = (target.config, target.units, request, base, target.contiguous)
    group, isas = cgroup.memory(), native.supported_isas()
    machine = Machine(
        processors=len(os.sched_getaffinity(0)),
        threads=threads,
        isa=isas[-1],
        isas=isas,
        available=memory.available(),
        limit=group.limit if group else None,
        floor=smallest_plan(*arguments).total,
    )
    return machine, preset_table(*arguments)


def measure_disk(place: Path, own: bool, target: Target, available: int) -> Disk:
    """Reads at `place`: the model's files if there are any and `own`, or any checkpoint's there."""
    extent, trunk = expert_bytes(target.config), target.trunk
    blocks = extents = _files(place)
    if own and trunk is not None:
        blocks, extents = _files(trunk.directory), _files(*{p.parent for p in trunk.shards})
    if blocks and extents:
        speeds = gauge.read_blocks(blocks), gauge.read_extents(extents, extent)
    else:
        with gauge.scratch_file(place, available) as path:
            speeds = gauge.read_blocks([path]), gauge.read_extents([path], extent)
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    return Disk(place, gauge.filesystem(place), free, bool(blocks and extents), *speeds)


def _files(*directories: Path) -> list[Path]:
    """The safetensors files of some directories, the larger half of them by size."""
    found = [path for folder in directories for path in folder.glob("*.safetensors")]
    sizes = {path: path.stat().st_size for path in found if path.is_file()}
    largest = max(sizes.values(), default=0)
    return sorted(path for path, size in sizes.items() if size and size >= largest // 2)


def next_command(
    settings: Settings, target: Target, place: Path, presets: Sequence[Preset], available: int
) -> str:
    """What to run next: repack, or generate with the largest preset that fits here."""
    if settings.model is None or target.trunk is None:
        return f"kimi repack -m {shlex.quote(str(settings.model or place))}"
    words = ["kimi", "generate", QUESTION, "-m", str(settings.model)]
    if settings.trunk is not None:
        words += ["--trunk", str(settings.trunk)]
    fitting = [preset.name for preset in presets if preset.budget <= available]
    if fitting:
        words += ["--preset", fitting[-1]]
    if settings.context is not None:
        words += ["--context", str(settings.context)]
    return shlex.join(words)


def _warnings(machine: Machine, disk: Disk, target: Target) -> list[str]:
    found = []
    if machine.isa == "scalar":
        found.append("this processor has neither AVX2 nor NEON: the same answers, much slower")
    if not disk.direct:
        found.append(
            f"{disk.filesystem} at {disk.directory} does not read directly (O_DIRECT): reads go "
            "through the page cache and are dropped behind"
        )
    return found


def _machine_text(machine: Machine) -> str:
    limit = "no control group limit"
    if machine.limit is not None:
        limit = f"control group limit {format_size(machine.limit)}"
    return (
        f"processors  {machine.processors}, {machine.threads} to be used; {machine.isa}\n"
        f"memory      {format_size(machine.available)} available, {limit}; "
        f"the smallest plan needs {format_size(machine.floor)}\n"
    )


def _speed_text(disk: Disk, rates: Rates, dense: Format) -> str:
    how = "past the page cache" if disk.direct else "through the page cache"
    what = "the model's own files" if disk.own else "a temporary file"
    return (
        f"disk        {disk.directory}: {disk.filesystem}, {format_size(disk.free)} free; "
        f"{what}, {how}\n"
        f"            trunk blocks {format_size(int(rates.blocks))}/s, "
        f"expert extents {format_size(int(rates.extents))}/s\n"
        f"products    {dense.name.lower()} {_billions(rates.trunk)}\n"
        f"            mxfp4 {_billions(rates.expert)}\n\n"
    )


def _billions(kernel: Kernel) -> str:
    further = f"{1e-9 / kernel.further:.1f}" if kernel.further else "any number"
    return f"{1e-9 / kernel.first:.1f} G weights/s for one token, {further} for each further one"


def _preset_text(
    found: Sequence[tuple[Preset, Prediction]], target: Target, machine: Machine
) -> str:
    lines = [
        f"{target.name}:",
        f"{'preset':<8}{'a token':>14}  {'limit':<8}{f'{PROMPT:,} prompt tokens':>20}  limit",
    ]
    for preset, prediction in found:
        line = (
            f"{preset.name:<8}{format_duration(prediction.token_seconds):>14}  "
            f"{prediction.token_limit:<8}{format_duration(prediction.prefill_seconds):>20}  "
            f"{prediction.prefill_limit:<8}"
        )
        short = preset.budget > machine.available
        lines.append((line + "more than this machine has" if short else line).rstrip())
    return "\n".join(lines) + "\n"


def _space_text(target: Target, disk: Disk) -> str:
    """What must still be put on this disk, if anything."""
    if target.trunk is not None:
        return "\n"
    trunk = trunk_bytes(target.units)
    need, what = trunk, "its trunk"
    if target.released:
        weights = sum(m.rows * m.cols for unit in target.units for m in unit.matrices)
        weights += embedding(target.config).size
        need += routed_experts(target.config) * expert_bytes(target.config) + 2 * weights
        what = "the checkpoint and its trunk"
    free = format_size(disk.free)
    return f"\n{what} will take {format_size(need)} of disk; {free} are free there\n"


def _json(
    machine: Machine,
    reason: str | None,
    disk: Disk | None = None,
    rates: Rates | None = None,
    found: Sequence[tuple[Preset, Prediction]] = (),
    command: str | None = None,
) -> str:
    result: dict[str, Any] = {
        "runs": reason is None,
        "reason": reason,
        "processors": machine.processors,
        "threads": machine.threads,
        "isa": machine.isa,
        "isas": list(machine.isas),
        "memory": {
            "available_bytes": machine.available,
            "limit_bytes": machine.limit,
            "floor_bytes": machine.floor,
        },
        "disk": None,
        "products": None,
        "presets": [],
        "next": command,
    }
    if disk is not None and rates is not None:
        result["disk"] = {
            "directory": str(disk.directory),
            "filesystem": disk.filesystem,
            "free_bytes": disk.free,
            "direct": disk.direct,
            "own_files": disk.own,
            "blocks_bytes_per_second": rates.blocks,
            "extents_bytes_per_second": rates.extents,
        }
        result["products"] = {
            name: {"first_seconds": kernel.first, "further_seconds": kernel.further}
            for name, kernel in (("trunk", rates.trunk), ("expert", rates.expert))
        }
    result["presets"] = [
        {
            "name": preset.name,
            "budget_bytes": preset.budget,
            "fits": preset.budget <= machine.available,
            "token_seconds": prediction.token_seconds,
            "prefill_seconds": prediction.prefill_seconds,
            "token_limit": prediction.token_limit,
            "prefill_limit": prediction.prefill_limit,
        }
        for preset, prediction in found
    ]
    return json.dumps(result) + "\n"
