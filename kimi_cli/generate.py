"""One answer to one prompt: prefill, then a token at a time, with what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_cli import native
from kimi_cli.console import OutputClosed
from kimi_cli.engine import Engine
from kimi_cli.logprobs import Logprobs
from kimi_cli.memory import peak_rss
from kimi_cli.native import F32
from kimi_cli.npy import NpyWriter
from kimi_cli.plan import Plan
from kimi_cli.sampler import Sampler

Emit = Callable[[int], bool]
"""Takes an id as it is decided; whether it completed a stop text."""


def no_boundary(last: bool) -> None:
    """Nothing is to be done between two passes."""


@dataclass(frozen=True)
class Job:
    """Generate until there are `max_tokens` tokens, ending with any of `end_ids`.

    `prompt_ids` are fed first. `sampler` chooses each token; it has room for the whole vocabulary.
    `boundary` is called between two passes over the model, and, with True, after the last.
    """

    prompt_ids: list[int]
    max_tokens: int
    sampler: Sampler
    end_ids: frozenset[int] = frozenset()
    logits: Path | None = None
    all_logits: Path | None = None
    boundary: Callable[[bool], None] = no_boundary

    def ending(self, token: int, stopped: bool) -> str | None:
        """What `token` ends the answer by, if it `stopped` the text or is an end token."""
        return "stop" if stopped else "eos" if token in self.end_ids else None


@dataclass
class Outcome:
    """What was generated so far. `stop_reason` is length, eos, stop or interrupted.

    The first `resumed` of `ids` were taken from a session. `logprobs`, if they are wanted, has room
    for every token of the job.
    """

    ids: list[int] = field(default_factory=list)
    resumed: int = 0
    logprobs: Logprobs | None = None
    stop_reason: str = "interrupted"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(engine: Engine, job: Job, outcome: Outcome, emit: Emit) -> None:
    """Runs `job`, calling `emit` with each id as it is decided and keeping `outcome` current. Ids
    that `outcome` has already are the beginning of the answer; `prompt_ids` then end with them.

    `outcome` is passed in so that an interruption loses nothing; the logits files then hold what
    belongs to the ids it has. Raises ReadError, CheckpointError, NumericError; and OutputClosed, if
    `emit` does.
    """
    with ExitStack() as stack:
        prompt_rows = _writer(job.all_logits, engine, stack)
        rows = _writer(job.logits, engine, stack)
        try:
            _run(engine, job, outcome, emit, prompt_rows, rows)
        except (KeyboardInterrupt, OutputClosed):
            if prompt_rows is not None:
                prompt_rows.close()
            if rows is not None:
                rows.close(len(outcome.ids) - outcome.resumed)
            raise


def _writer(path: Path | None, engine: Engine, stack: ExitStack) -> NpyWriter | None:
    """A file of logits; what is not published when `stack` ends is removed."""
    if path is None:
        return None
    writer = NpyWriter(path, engine.config.vocab_size)
    stack.callback(writer.discard)
    return writer


def _run(
    engine: Engine,
    job: Job,
    outcome: Outcome,
    emit: Emit,
    prompt_rows: NpyWriter | None,
    rows: NpyWriter | None,
) -> None:
    started = time.monotonic()
    logits: F32 | None = None
    first = outcome.resumed
    more = job.max_tokens > first + 1
    passes = engine.prefill(
        job.prompt_ids, prompt_rows is not None, more, lambda: job.boundary(False)
    )
    for logits in passes:
        if prompt_rows is not None:
            prompt_rows.write(logits)
    if prompt_rows is not None:
        prompt_rows.close()
    outcome.prefill_seconds = time.monotonic() - started
    started = time.monotonic()
    reason = "length"
    for number in range(first, job.max_tokens):
        if number > first:
            job.boundary(False)
            logits = engine.step(outcome.ids[-1], number + 1 < job.max_tokens)
        assert logits is not None
        if rows is not None:
            rows.write(logits[-1:])
        token = job.sampler.choose(logits[-1], engine.state.position)
        if outcome.logprobs is not None:
            outcome.logprobs.record(number, logits[-1], token)
        outcome.ids.append(token)
        outcome.decode_seconds = time.monotonic() - started
        ending = job.ending(token, emit(token))
        if ending is not None:
            reason = ending
            break
    outcome.stop_reason = reason
    if rows is not None:
        rows.close()
    job.boundary(True)


def statistics(
    engine: Engine | None, plan: Plan, outcome: Outcome, sampler: Sampler | None = None
) -> dict[str, Any]:
    """The `stats` object of `generate --json`; bytes and seconds. With a `seed`, unless greedy.

    `engine` is None where nothing was computed.
    """
    generated = len(outcome.ids) - outcome.resumed
    drawn = {} if sampler is None or sampler.sampling.greedy else {"seed": sampler.sampling.seed}
    return {
        "peak_rss_bytes": peak_rss(),
        "ram_budget_bytes": plan.budget,
        "context": plan.context,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": outcome.decode_seconds,
        "seconds_per_token": outcome.decode_seconds / (generated - 1) if generated > 1 else None,
        "trunk_bytes_read": engine.weights.bytes_read if engine else 0,
        "expert_bytes_read": engine.experts.bytes_read if engine else 0,
        "expert_requests": engine.experts.requests if engine else 0,
        "expert_hits": engine.experts.hits if engine else 0,
        "resumed_tokens": outcome.resumed,
        "threads": plan.threads,
        "isa": native.isa(),
        **drawn,
    }
