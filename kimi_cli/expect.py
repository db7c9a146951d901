"""How long a run should take, before it has begun: guessed, from a short look at the disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_cli.engine import Source
from kimi_cli.pace import Expected
from kimi_cli.plan import Plan
from kimi_cli.predict import Kernel, Rates, predict, predict_prefill, work_of

WORTH = 10.0
"""Seconds that a run must be guessed to take, to be worth measuring this machine for."""
DISK_SECONDS = 0.3
MEASURED = 64 << 20
"""Bytes that must have been read for their rate to count as the disk's."""
PASS_SECONDS = 0.005
"""What a pass takes beside products and reads, about."""
_GUESS = Rates(1e9, 1e9, Kernel(2e-10, 2e-11), Kernel(1e-10, 2e-11))


@dataclass(frozen=True)
class Forecast:
    """Rates of this machine under one plan. `guess`: none of them was measured."""

    rates: Rates
    guess: bool


def forecast(
    source: Source, plan: Plan, prompt: int, tokens: int, disk: float | None = None
) -> Forecast:
    """What to expect of a run of `prompt` tokens and then up to `tokens`; measured if it is long.

    `disk` is bytes per second, if they are known. The engine has not computed yet: measuring takes
    memory, less than its buffers, which are still untouched. Raises ReadError.
    """
    rates = _GUESS if disk is None else replace(_GUESS, blocks=disk, extents=disk)
    guess = Forecast(rates, True)
    if expect(source, plan, guess, prompt).total(tokens) < WORTH:
        return guess
    return Forecast(_measure(source, plan, disk), False)


def expect(source: Source, plan: Plan, forecast: Forecast, prompt: int) -> Expected:
    """Seconds that `prompt` tokens, and each token after them, should take under `plan`."""
    work, rates = work_of(source.config, source.trunk.units), forecast.rates
    passes = -(-prompt // plan.chunk) if prompt else 0
    reading = predict_prefill(plan, work, rates, prompt)[0] if prompt else 0.0
    token = predict(plan, work, rates)
    return Expected(
        reading + passes * PASS_SECONDS,
        token.token_seconds + PASS_SECONDS,
        token.token_limit,
        forecast.guess,
    )


def _measure(source: Source, plan: Plan, disk: float | None) -> Rates:
    from kimi_cli import gauge

    if disk is None and plan.trunk_per_token + plan.expert_per_token:
        files = [source.trunk.directory / unit.file for unit in source.trunk.units]
        disk = gauge.read_blocks(files, DISK_SECONDS).rate
    disk = disk or _GUESS.blocks  # where nothing is read, it does not matter
    return replace(_GUESS, blocks=disk, extents=disk)
