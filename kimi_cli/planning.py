"""`kimi plan` and `kimi presets`: the memory plan of a run that is not made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_cli import console, memory
from kimi_cli.answer import TOKENIZER_LIBRARY, TOKENIZER_RANK, Settings, limits
from kimi_cli.builtin import ROOT
from kimi_cli.config import Config, load_config, parse_config
from kimi_cli.engine import READERS, SEGMENT_OBJECTS, Source
from kimi_cli.errors import BudgetError, UsageError
from kimi_cli.jsonfile import parse_json
from kimi_cli.manifest import MANIFEST
from kimi_cli.plan import Plan, Request, make_plan, routed_experts, smallest_plan, walk
from kimi_cli.presets import Preset, preset_table
from kimi_cli.trunk import DIRECTORY, Trunk, Unit, plan_units
from kimi_cli.units import MIB, format_size

CONTEXT = 1024
"""Positions to plan for unless told."""
RELEASED = ROOT / "k3.json"
"""The released model's config.json."""

_ITEMS = {
    "interpreter": "Python and libraries, as this process has them",
    "tokenizer": "the vocabulary, once it is loaded",
    "manifest": "tables of where every weight lies",
    "kda_state": "recurrent state of the KDA layers",
    "conv_histories": "last inputs of their convolutions",
    "latent_cache": "attention cache of {context} positions",
    "activations": "buffers for {chunk} tokens at once",
    "layer_vectors": "small tensors of the layer in hand",
    "ring": "trunk that is read ahead",
    "expert_slots": "{slots} of {experts} experts",
    "pinned_trunk": "{share} of the trunk, read once",
    "threads": "stacks of {threads} threads and {readers} readers",
    "rounding": "page tables, partly used pages",
}


@dataclass(frozen=True)
class Target:
    """What is planned for. `trunk` is None where the units are only what a packed trunk would be.

    `contiguous`: every expert is one extent. `released`: no checkpoint, the released dimensions.
    """

    name: str
    config: Config
    units: tuple[Unit, ...]
    contiguous: bool = True
    trunk: Trunk | None = None
    released: bool = False

    @classmethod
    def open(cls, model: Path | None, trunk: Path | None) -> Target:
        """The checkpoint in `model`, or the released one's dimensions where that is None.

        Raises ConfigError, TrunkError, CheckpointError; UsageError for a trunk without a model.
        """
        if model is None:
            if trunk is not None:
                raise UsageError("--trunk needs the checkpoint it was made from: give -m DIR")
            config = parse_config(parse_json(RELEASED.read_bytes()), str(RELEASED))
            name = "Kimi K3 as released, packed trunk"
            return cls(name, config, plan_units(config, True), released=True)
        if trunk is None and not (model / DIRECTORY / MANIFEST).exists():
            config = load_config(model)
            name = f"{model}, not repacked yet, as with a packed trunk"
            return cls(name, config, plan_units(config, True))
        source = Source.open(model, trunk)
        config, found = source.config, source.trunk
        whole = bool(found.experts.whole[config.first_k_dense_replace :].all())
        name = f"{model}, {found.encoding} trunk"
        return cls(name, config, found.units, whole, found)

    def base(self) -> dict[str, int]:
        """Bytes that a run would have before its engine starts, measured on this process."""
        return {
            "interpreter": memory.rss(),
            "tokenizer": TOKENIZER_LIBRARY + self.config.vocab_size * TOKENIZER_RANK,
            "manifest": len(walk(self.units)) * SEGMENT_OBJECTS,
        }

    def request(self, settings: Settings, threads: int) -> Request:
        """The longest prompt that the context of `settings` takes. Raises UsageError."""
        most = self.config.max_position_embeddings
        context = settings.context or min(CONTEXT, most)
        if context > most:
            raise UsageError(f"--context {context} is more than the model's limit of {most}")
        return Request(context, context, threads, READERS, settings.chunk)


def show_plan(settings: Settings, as_json: bool) -> None:
    """Prints what a run under `settings` would hold and read.

    Raises BudgetError, after printing the smallest plan there is, where the budget does not fit.
    """
    target = Target.open(settings.model, settings.trunk)
    machine = limits(settings)
    request, base = target.request(settings, machine.threads), target.base()
    refusal = None
    try:
        plan = make_plan(
            target.config, target.units, request, machine.budget, base, target.contiguous
        )
    except BudgetError as error:
        refusal = error
        plan = smallest_plan(target.config, target.units, request, base, target.contiguous)
        plan = replace(plan, budget=machine.budget)
    if as_json:
        console.put(json.dumps(plan_object(plan)) + "\n")
    else:
        console.put(plan_text(plan, target))
    if refusal:
        raise refusal


def show_presets(settings: Settings, as_json: bool) -> None:
    """Prints what every preset holds and reads."""
    target = Target.open(settings.model, settings.trunk)
    request = target.request(settings, limits(settings).threads)
    presets = preset_table(target.config, target.units, request, target.base(), target.contiguous)
    if as_json:
        console.put(json.dumps([preset_object(preset) for preset in presets]) + "\n")
    else:
        console.put(presets_text(presets, target, request))


def plan_object(plan: Plan) -> dict[str, Any]:
    """The object that `kimi plan --json` prints; bytes and positions."""
    return {
        "budget_bytes": plan.budget,
        "items": plan.items,
        "total_bytes": plan.total,
        "floor_bytes": plan.floor,
        "pinned_bytes": plan.pinned_bytes,
        "per_token": per_token(plan),
        "context": plan.context,
        "fits": plan.total <= plan.budget,
    }


def preset_object(preset: Preset) -> dict[str, Any]:
    """One element of `kimi presets --json`."""
    found: dict[str, Any] = {"name": preset.name, "budget_bytes": preset.budget}
    if preset.plan is None:
        return {**found, "fits": False}
    held = {"pinned_bytes": preset.plan.pinned_bytes, "expert_slots": preset.plan.slots}
    return {**found, "fits": True, **held, "per_token": per_token(preset.plan)}


def per_token(plan: Plan) -> dict[str, int]:
    """Bytes that a token reads in decoding; of experts, what is expected."""
    return {"trunk_bytes": plan.trunk_per_token, "expert_bytes": plan.expert_per_token}


def plan_text(plan: Plan, target: Target) -> str:
    """The plan as a table of MiB."""
    facts = {
        "context": f"{plan.context:,}",
        "chunk": plan.chunk,
        "slots": f"{plan.slots:,}",
        "experts": f"{routed_experts(target.config):,}",
        "share": _share(plan, target.units),
        "threads": plan.threads,
        "readers": plan.readers,
    }
    lines = [f"{target.name}; --ram {format_size(plan.budget)}", "", f"{'MiB':>24}"]
    for name, size in plan.items.items():
        label = name.replace("_", " ")
        lines.append(f"{label:<15}{size / MIB:>9.1f}  {_ITEMS[name].format(**facts)}")
    verdict = "fits" if plan.total <= plan.budget else "DOES NOT FIT"
    limit = f"of {plan.budget / MIB:.1f}: {verdict}"
    reads = per_token(plan)
    return "\n".join(
        [
            *lines,
            "",
            f"{'total':<15}{plan.total / MIB:>9.1f}  {limit}",
            f"{'floor':<15}{plan.floor / MIB:>9.1f}  the least that this context needs",
            "",
            f"read per token: {format_size(reads['trunk_bytes'])} of trunk, lm_head included; "
            f"{format_size(reads['expert_bytes'])} of experts",
            "",
        ]
    )


def _share(plan: Plan, units: Sequence[Unit]) -> str:
    segments = walk(units)
    held = sum(segments[place].length for place in plan.pinned)
    return f"{100 * held / sum(segment.length for segment in segments):.1f} %"


def presets_text(presets: Sequence[Preset], target: Target, request: Request) -> str:
    """The table of presets, a line each."""
    lines = [
        f"{target.name}; context {request.context:,}",
        "",
        f"{'preset':<8}{'trunk held':>12}{'experts held':>14}   read per token: "
        f"{'trunk':>10}{'experts':>12}",
    ]
    for preset in presets:
        plan = preset.plan
        if plan is None:
            lines.append(f"{preset.name:<8}{'does not fit':>12}")
            continue
        lines.append(
            f"{preset.name:<8}{format_size(plan.pinned_bytes):>12}{plan.slots:>14,}"
            f"{format_size(plan.trunk_per_token):>29}{format_size(plan.expert_per_token):>12}"
        )
    return "\n".join(lines) + "\n"
