"""Tokens of one model under one budget after another: seconds, bytes, and what they waited for.

Between the tokens the limits are measured: memory reads, the MXFP4 product, and the disk.
"""

from __future__ import annotations

import gc
import time
from dataclasses import astuple, dataclass

import numpy as np

from kimi_cli.bench.contest import Effort
from kimi_cli.bench.disk import Disk
from kimi_cli.bench.kernels import SHORTER, Operands, fma
from kimi_cli.engine import READERS, SEGMENT_OBJECTS, Engine, Source
from kimi_cli.errors import BudgetError
from kimi_cli.plan import SLACK as PLAN_SLACK
from kimi_cli.plan import Plan, Request, kda_bytes, make_plan, routed_experts, walk
from kimi_cli.predict import Work, work_of
from kimi_cli.progress import Progress
from kimi_cli.tensors import expert_bytes
from kimi_cli.timing import Sink, Span, Split, recorder, split
from kimi_cli.units import format_size

CONTEXT = 256
PROMPT = 32
"""Tokens of the timed prefill; as many make sure that a resident model has met its experts."""
STEPS = 4
"""Budgets between the smallest and the largest."""


@dataclass(frozen=True)
class Limits:
    """Rates just before and after a token, in the mean: bytes a second of memory reads, of experts
    multiplied and of the disk (0 where nothing is streamed)."""

    read: float = 0.0
    expert: float = 0.0
    blocks: float = 0.0
    extents: float = 0.0

    def mean(self, other: Limits) -> Limits:
        return Limits(*((a + b) / 2 for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Rung:
    """A token under one budget: of several, the one in the middle by how near it came to its limit.
    A shared machine is faster in one second than in the next, so that each token is held against
    the limits around it. Bytes are those read for it; limits are seconds."""

    plan: Plan
    resident: bool
    seconds: Split
    trunk_bytes: int
    expert_bytes: int
    compute_limit: float
    disk_limit: float
    limits: Limits

    @property
    def limit(self) -> float:
        return max(self.compute_limit, self.disk_limit)


@dataclass(frozen=True)
class Prefill:
    """A prefill of `tokens` tokens, its operations, and multiply-adds a second around it."""

    plan: Plan
    tokens: int
    seconds: float
    flops: float
    peak: float


class Ladder:
    """One model, measured under any budget. `base` is what the process held before it began."""

    def __init__(
        self,
        source: Source,
        operands: Operands,
        disk: Disk,
        effort: Effort,
        threads: int,
        base: int,
        ram: int,
    ) -> None:
        """`ram`: bytes that the largest budget may have. Raises BudgetError if none fits."""
        self.source, self._operands, self._disk = source, operands, disk
        self._effort = effort
        self._request = Request(CONTEXT, PROMPT, threads, READERS)
        self._base = {
            "interpreter": base,
            "tokenizer": 0,
            "manifest": len(walk(source.trunk.units)) * SEGMENT_OBJECTS,
        }
        self.work: Work = work_of(source.config, source.trunk.units)
        self._rungs: dict[int, Rung] = {}
        whole = self._plan(1 << 60)
        self.smallest = whole.floor + PLAN_SLACK
        """The least budget, in bytes."""
        self.largest = min(whole.total + PLAN_SLACK, ram)
        """The budget that holds everything, or what there is."""
        if self.smallest > ram:
            raise BudgetError(
                f"the smallest plan needs {format_size(self.smallest)} beside what measuring "
                f"takes, and {format_size(max(ram, 0))} are left: free some memory, or raise --ram"
            )

    def _plan(self, budget: int) -> Plan:
        config, trunk = self.source.config, self.source.trunk
        whole = bool(trunk.experts.whole[config.first_k_dense_replace :].all())
        return make_plan(config, trunk.units, self._request, budget, self._base, whole)

    @property
    def budgets(self) -> list[int]:
        """From the smallest to the largest in equal steps."""
        low, high = self.smallest, self.largest
        return sorted({low + (high - low) * n // STEPS for n in range(STEPS + 1)})

    def is_resident(self, plan: Plan) -> bool:
        """Whether nothing is read once it is warm."""
        return not plan.trunk_per_token and plan.slots == routed_experts(self.source.config)

    def rung(self, budget: int, sink: Sink | None = None) -> Rung:
        """The Rung of `budget`; measured once. `sink` gets every span."""
        if budget not in self._rungs:
            self._rungs[budget] = self._measure(self._plan(budget), sink)
            gc.collect()  # layers and weights refer to one another
        return self._rungs[budget]

    def _measure(self, plan: Plan, sink: Sink | None) -> Rung:
        resident = self.is_resident(plan)
        rungs, around, spans = list[Rung](), Limits(), list[Span]()
        started = time.monotonic()

        def keep(span: Span) -> None:
            spans.append(span)
            if sink is not None:
                sink(span)

        with Engine(self.source, plan, span=recorder(keep)) as engine:
            with Progress("load", "B") as report:
                engine.load(report)
            ids = self._ids(PROMPT)
            for _ in engine.prefill(ids if resident else ids[:1], False, True):
                pass
            for count, token in enumerate(self._ids(1 + SHORTER * self._effort.tokens)):
                spans.clear()
                before = engine.weights.bytes_read, engine.experts.bytes_read
                begin = time.monotonic_ns()
                engine.step(token, True)
                seconds = split(spans, begin, time.monotonic_ns())
                trunk = engine.weights.bytes_read - before[0]
                experts = engine.experts.bytes_read - before[1]
                late = time.monotonic() - started > self._effort.patience
                earlier, around = around, self._probe(bool(trunk or experts), seconds.total)
                if count == 0 and not late:
                    continue  # it met cold caches
                limits = around if count == 0 else around.mean(earlier)
                disk = trunk / limits.blocks + experts / limits.extents if trunk or experts else 0.0
                compute = self._compute_limit(limits, engine.state.position)
                rungs.append(Rung(plan, resident, seconds, trunk, experts, compute, disk, limits))
                if late or (count >= self._effort.tokens and seconds.total > 1.0):
                    break
        rungs.sort(key=lambda rung: rung.limit / rung.seconds.total)
        return rungs[len(rungs) // 2]

    def _ids(self, count: int) -> list[int]:
        chosen = np.random.default_rng(count).integers(0, self.source.config.vocab_size, count)
        ids: list[int] = chosen.tolist()
        return ids

    def _probe(self, disk: bool, token: float) -> Limits:
        """Every limit, each for about as long as a token that took `token` seconds met it."""
        short = max(self._effort.seconds, token) / 2
        long = max(self._effort.disk_seconds, token / 2)
        part = self._operands.experts[0][0]
        weight = self._operands.expert_bytes / (2 * part.size)
        return Limits(
            self._operands.read()(short),
            self._operands.mxfp4(1)(short) * weight,
            self._disk.most_blocks(long) if disk else 0.0,
            self._disk.most_extents(long) if disk else 0.0,
        )

    def _compute_limit(self, limits: Limits, position: int) -> float:
        """Seconds to read once, from memory, all that a token multiplies or moves on."""
        config, work = self.source.config, self.work
        trunk = sum(segment.length for segment in walk(self.source.trunk.units))
        width = config.kv_lora_rank + config.qk_rope_head_dim
        state = 2 * kda_bytes(config)[0] + len(config.mla_layers) * position * width * 4
        experts = work.layers * work.chosen * expert_bytes(config)
        return (trunk + state) / limits.read + experts / limits.expert

    def prefill(self) -> Prefill:
        """Of several prefills under the largest budget, the one in the middle, as for tokens."""
        plan, work = self._plan(self.largest), self.work
        ids, multiply, found = self._ids(PROMPT), fma(), list[Prefill]()
        flops = 2.0 * PROMPT * (work.trunk + work.layers * work.chosen * work.expert)
        flops += 2.0 * work.head
        started = time.monotonic()
        with Engine(self.source, plan) as engine:
            engine.load()
            around = multiply(self._effort.seconds)
            for _ in range(1 + min(self._effort.tokens, CONTEXT // PROMPT - 1)):
                begin = time.perf_counter()
                for _ in engine.prefill(ids, False, True):
                    pass
                seconds = time.perf_counter() - begin
                earlier, around = around, multiply(self._effort.seconds)
                found.append(Prefill(plan, PROMPT, seconds, flops, (earlier + around) / 2))
                if time.monotonic() - started > self._effort.patience:
                    break
        gc.collect()
        found.sort(key=lambda prefill: prefill.seconds * prefill.peak)
        return found[len(found) // 2]
