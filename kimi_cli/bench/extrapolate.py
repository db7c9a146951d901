"""From what was measured here to the released model, line by line. Pure arithmetic.

Products, KDA steps and attention were measured over the released widths; what else a layer takes is
what a token of the slice took beyond them. Reading is foretold by `predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_cli.bench.disk import Speeds
from kimi_cli.bench.kernels import Kernels
from kimi_cli.bench.ladder import CONTEXT
from kimi_cli.config import Config
from kimi_cli.predict import Rates, Work, predict
from kimi_cli.presets import Preset
from kimi_cli.units import format_duration, format_size


@dataclass(frozen=True)
class Line:
    """One step: what, how it comes about, and seconds."""

    name: str
    arithmetic: str
    seconds: float


@dataclass(frozen=True)
class Computing:
    """The arithmetic of one token with everything in memory."""

    lines: Sequence[Line]

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)


def products(work: Work, kernels: Kernels) -> list[Line]:
    """The products of one token."""
    trunk, expert = kernels.products["packed"], kernels.products["mxfp4"]
    weights = work.trunk + work.head
    routed = work.layers * work.chosen * work.expert
    return [
        _weights("trunk", weights, trunk.first, "packed"),
        _weights("experts", routed, expert.first, "mxfp4"),
    ]


def _weights(name: str, count: int, seconds: float, kernel: str) -> Line:
    text = f"{count / 1e9:.2f} G weights / {1e-9 / seconds:.2f} G/s ({kernel}, one column)"
    return Line(name, text, count * seconds)


def computing(
    config: Config, work: Work, kernels: Kernels, positions: int, rest: float, layers: int
) -> Computing:
    """All of one token's arithmetic. `rest` seconds beyond it were measured on `layers` layers."""
    attention = len(config.mla_layers)
    steps = config.num_hidden_layers - attention
    lines = products(work, kernels)
    lines += [
        Line("KDA", f"{steps} layers x {1e3 * kernels.delta:.3f} ms", steps * kernels.delta),
        Line(
            "attention",
            f"{attention} layers x {positions:,} positions x {1e6 * kernels.attend:.3f} us",
            attention * positions * kernels.attend,
        ),
    ]
    if layers:
        each = rest / layers
        text = (
            f"{config.num_hidden_layers} layers x {1e3 * each:.2f} ms, what a token of the slice "
            f"took beyond these lines, by its {layers} layers"
        )
        lines.append(Line("the rest", text, config.num_hidden_layers * each))
    return Computing(lines)


def beyond(config: Config, work: Work, kernels: Kernels, seconds: float) -> float:
    """What a resident token of `seconds` took beyond products, KDA steps and attention."""
    return max(seconds - computing(config, work, kernels, CONTEXT // 2, 0.0, 0).seconds, 0.0)


@dataclass(frozen=True)
class Foretold:
    """A preset: seconds a token, what limits it, and how that comes about."""

    name: str
    budget: int
    seconds: float
    limit: str
    arithmetic: str


def foretell(
    presets: Sequence[Preset], work: Work, kernels: Kernels, speeds: Speeds, cores: Computing
) -> list[Foretold]:
    """Every preset that fits, from the rates measured."""
    rates = Rates(
        speeds.blocks, speeds.extents, kernels.products["packed"], kernels.products["mxfp4"]
    )
    beside = cores.seconds - sum(line.seconds for line in products(work, kernels))
    found = []
    for preset in presets:
        plan = preset.plan
        if plan is None:
            continue
        predicted = predict(plan, work, rates)
        extra = beside if predicted.token_limit == "compute" else 0.0
        disk = plan.trunk_per_token / speeds.blocks + plan.expert_per_token / speeds.extents
        text = (
            f"{format_size(plan.trunk_per_token)} / {format_size(int(speeds.blocks))}/s + "
            f"{format_size(plan.expert_per_token)} / {format_size(int(speeds.extents))}/s = "
            f"{format_duration(disk)} of disk, {format_duration(cores.seconds)} of cores"
        )
        seconds = max(predicted.token_seconds + extra, cores.seconds)
        found.append(Foretold(preset.name, preset.budget, seconds, predicted.token_limit, text))
    return found


def text(cores: Computing, found: Sequence[Foretold], positions: int) -> str:
    """The arithmetic as a person reads it."""
    lines = [f"the released dimensions at {positions:,} positions, from the rates above"]
    for line in cores.lines:
        lines.append(f"  {line.name:<10}{format_duration(line.seconds):>12}  {line.arithmetic}")
    lines.append(f"  {'in memory':<10}{format_duration(cores.seconds):>12}  a token, all of these")
    for item in found:
        lines.append(
            f"  {item.name:<10}{format_duration(item.seconds):>12}  {item.limit}: {item.arithmetic}"
        )
    return "\n".join(lines) + "\n"
