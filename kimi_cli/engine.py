"""One opened model under one plan: weights, experts, state and reader threads, closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kimi_cli import native
from kimi_cli.config import Config, load_config
from kimi_cli.errors import BudgetError
from kimi_cli.experts import Experts
from kimi_cli.expertsums import load_expert_sums
from kimi_cli.memory import peak_rss, rss
from kimi_cli.model import Model, Progress, Trace
from kimi_cli.native import F32
from kimi_cli.plan import Plan, Request, make_plan, walk
from kimi_cli.state import State
from kimi_cli.stream import Reader
from kimi_cli.timing import TOKEN, Spans, no_span
from kimi_cli.trunk import Trunk
from kimi_cli.units import MIB
from kimi_cli.weights import Weights

READERS = 4
"""Threads that read; they sleep in the kernel while they do."""
SEGMENT_OBJECTS = 768
"""Python bytes that one segment of the walk costs in tables, matrices and operations kept."""


@dataclass(frozen=True)
class Source:
    """A checkpoint with its trunk, opened and checked; no weights are in memory.

    `sums`, uint32 [layers, experts], are the experts' checksums once they are known.
    """

    config: Config
    trunk: Trunk
    sums: NDArray[np.uint32] | None = None

    @classmethod
    def open(cls, model_dir: Path, trunk_dir: Path | None = None) -> Source:
        """Raises ConfigError and TrunkError."""
        config = load_config(model_dir)
        trunk = Trunk.open(trunk_dir or model_dir / "kimi-trunk", model_dir, config)
        return cls(config, trunk, load_expert_sums(trunk))


def plan_for(
    source: Source, request: Request, budget: int, held: int = 0, expected: int = 0
) -> Plan:
    """The plan for this process as it stands. The tokenizer holds `held` bytes of it already, or
    is `expected` to take so many more.

    Raises BudgetError when it cannot fit.
    """
    base = {
        "interpreter": rss() - held,
        "tokenizer": held + expected,
        "manifest": len(walk(source.trunk.units)) * SEGMENT_OBJECTS,
    }
    whole = bool(source.trunk.experts.whole[source.config.first_k_dense_replace :].all())
    plan = make_plan(source.config, source.trunk.units, request, budget, base, whole)
    if peak_rss() > budget:
        need = peak_rss() // MIB + 1
        raise BudgetError(f"the program has needed {need} MiB already: use --ram {need}M or more")
    return plan


class Engine:
    """A model ready to compute; a context manager. Not for two threads at once."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        trace: Trace | None = None,
        progress: Progress | None = None,
        span: Spans = no_span,
    ) -> None:
        self.config, self.plan, self._span = source.config, plan, span
        trunk = source.trunk
        with ExitStack() as stack:
            self._reader = Reader(plan.readers, span)
            stack.callback(self._reader.close)
            self.weights = Weights(trunk, plan, self._reader)
            stack.callback(self.weights.close)
            self.experts = Experts(
                source.config,
                trunk.experts,
                trunk.shards,
                plan.slots,
                plan.slot_bytes,
                self._reader,
                source.sums,
            )
            stack.callback(self.experts.close)
            self.model = Model(
                source.config,
                trunk,
                self.weights,
                self.experts,
                plan.buffers,
                trace,
                progress,
                span,
            )
            stack.callback(self.model.close)
            self.state = State(source.config, plan.context)
            self._files = stack.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.close()
        self._files.close()

    def load(self, report: Callable[[int, int], None] | None = None) -> None:
        """Reads what the plan pins; before the first token. Raises KimiError where the system has
        no threads to compute with: it is asked once everything else is allocated."""
        self.weights.load(report)
        native.set_threads(self.plan.threads)

    def reset(self) -> None:
        """Back to before the first token, for another prompt: what is in memory stays there, and
        the counters of what was read begin anew."""
        self.model.rewind()
        self.experts.rewind()
        self.state.clear()
        self.weights.bytes_read = 0
        self.experts.bytes_read = self.experts.requests = self.experts.hits = 0

    def prefill(
        self,
        ids: Sequence[int],
        all_logits: bool,
        then: bool,
        passed: Callable[[], None] | None = None,
    ) -> Iterator[F32]:
        """Feeds a prompt in chunks; yields logits: [T, vocab] of every chunk, or only the last
        token's [1, vocab]. `then` tells whether a token will be asked for afterwards; `passed` is
        called between two chunks."""
        chunk = self.plan.chunk
        pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        modes = ["all" if all_logits else "none"] * len(pieces)
        if pieces and not all_logits:
            modes[-1] = "last"
        following: list[str | None] = [*modes[1:], "last" if then else None][: len(pieces)]
        for number, (piece, mode, after) in enumerate(zip(pieces, modes, following, strict=True)):
            if number and passed is not None:
                passed()
            with self._span(TOKEN, f"{len(piece)} tokens at {self.state.position}"):
                logits = self.model.forward(self.state, piece, mode, after)
            if logits is not None:
                yield logits

    def step(self, token: int, then: bool) -> F32:
        """Feeds one token; returns logits [1, vocab]. `then` tells whether another will follow."""
        with self._span(TOKEN, f"token {self.state.position}"):
            logits = self.model.forward(self.state, [token], "last", "last" if then else None)
        assert logits is not None
        return logits
