"""One run under way: what the engine calls as it goes on, who is told, and the Ctrl-C between."""

from __future__ import annotations

import time
from typing import Any

from kimi_cli.engine import Engine, Source
from kimi_cli.expect import MEASURED, Forecast, expect, forecast
from kimi_cli.halt import Halt
from kimi_cli.pace import Pace
from kimi_cli.plan import Plan, routed_experts, walk
from kimi_cli.units import format_size
from kimi_cli.watch import Silent


class Course:
    """Told to `watch`, ended by `halt` at a layer. `layer` fits the engine's `progress`."""

    def __init__(self, watch: Silent, halt: Halt) -> None:
        self.watch, self.halt = watch, halt
        self._pace: Pace | None = None
        self._disk: float | None = None
        self._forecast: Forecast | None = None

    def load(self, engine: Engine) -> None:
        """Reads what the plan pins. Raises ReadError, KeyboardInterrupt."""
        pace, started, size = Pace(0, 1, 0, 0, lambda: 0), time.monotonic(), 0

        def report(done: int, total: int) -> None:
            nonlocal size
            size = total
            self.watch.moment(pace.load(done, total))
            self.halt.check()

        engine.load(report)
        self.watch.clear()
        if size >= MEASURED:
            self._disk = size / (time.monotonic() - started)

    def begin(
        self, engine: Engine, source: Source, prompt: int, resumed: int, max_tokens: int
    ) -> None:
        """The next prompt begins: `prompt` tokens to feed, `resumed` of the answer's there."""
        plan = engine.plan
        read = lambda: engine.weights.bytes_read + engine.experts.bytes_read  # noqa: E731
        pace = self._pace = Pace(prompt, plan.chunk, resumed, max_tokens, read)
        if not self.watch.silent:
            left = max_tokens - resumed
            if self._forecast is None:
                self._forecast = forecast(source, plan, prompt, left, self._disk)
            pace.expected = expect(source, plan, self._forecast, prompt)
            self.watch.expected(pace.expected, left)
        self.halt.check()
        pace.begin()

    def layer(self, done: int, units: int) -> None:
        """`done` of `units` layers of a pass are computed. Raises KeyboardInterrupt."""
        if self._pace is not None:
            self.watch.moment(self._pace.layer(done, units))
        if done < units:  # a token that is ready is worth having
            self.halt.check()


def plan_lines(source: Source, plan: Plan, prompt: int) -> list[str]:
    """What `plan` holds, and what each token then reads, in two lines."""
    trunk = sum(segment.length for segment in walk(source.trunk.units))
    passes = -(-prompt // plan.chunk) if prompt else 0
    many = f"{passes} pass{'es' if passes != 1 else ''}"
    return [
        f"held: {format_size(trunk - plan.trunk_per_token)} of {format_size(trunk)} of trunk, "
        f"{plan.slots:,} of {routed_experts(source.config):,} experts; "
        f"{format_size(plan.total)} of {format_size(plan.budget)} in all",
        f"each token reads {format_size(plan.trunk_per_token)} of trunk and about "
        f"{format_size(plan.expert_per_token)} of experts; the prompt's {prompt} "
        f"tokens take {many}",
    ]


def plan_facts(plan: Plan, prompt: int, max_tokens: int) -> dict[str, Any]:
    """The same for a program."""
    return {
        "budget_bytes": plan.budget,
        "total_bytes": plan.total,
        "pinned_bytes": plan.pinned_bytes,
        "expert_slots": plan.slots,
        "per_token": {
            "trunk_bytes": plan.trunk_per_token,
            "expert_bytes": plan.expert_per_token,
        },
        "context": plan.context,
        "chunk": plan.chunk,
        "prompt_tokens": prompt,
        "max_tokens": max_tokens,
    }
