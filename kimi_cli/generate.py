"""One greedy answer to one prompt: prefill, then a token at a time, with what it cost."""

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
from kimi_cli.memory import peak_rss
from kimi_cli.native import F32
from kimi_cli.npy import NpyWriter


@dataclass(frozen=True)
class Job:
    """Generate at most `max_tokens` tokens after `prompt_ids`, ending with any of `end_ids`."""

    prompt_ids: list[int]
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    logits: Path | None = None
    all_logits: Path | None = None


@dataclass
class Outcome:
    """What was generated so far. `stop_reason` is length, eos or interrupted."""

    ids: list[int] = field(default_factory=list)
    stop_reason: str = "interrupted"
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


def generate(engine: Engine, job: Job, outcome: Outcome, emit: Callable[[int], None]) -> None:
    """Runs `job`, calling `emit` with each id as it is decided and keeping `outcome` current.

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
                rows.close(len(outcome.ids))
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
    emit: Callable[[int], None],
    prompt_rows: NpyWriter | None,
    rows: NpyWriter | None,
) -> None:
    started = time.monotonic()
    logits: F32 | None = None
    for logits in engine.prefill(job.prompt_ids, prompt_rows is not None, job.max_tokens > 1):
        if prompt_rows is not None:
            prompt_rows.write(logits)
    if prompt_rows is not None:
        prompt_rows.close()
    outcome.prefill_seconds = time.monotonic() - started
    started = time.monotonic()
    assert logits is not None
    reason = "length"
    for number in range(job.max_tokens):
        if number:
            logits = engine.step(outcome.ids[-1], number + 1 < job.max_tokens)
        if rows is not None:
            rows.write(logits[-1:])
        token = native.argmax(logits[-1])
        outcome.ids.append(token)
        outcome.decode_seconds = time.monotonic() - started
        emit(token)
        if token in job.end_ids:
            reason = "eos"
            break
    outcome.stop_reason = reason
    if rows is not None:
        rows.close()


def statistics(engine: Engine, outcome: Outcome) -> dict[str, Any]:
    """The `stats` object of `generate --json`; bytes and seconds."""
    generated = len(outcome.ids)
    return {
        "peak_rss_bytes": peak_rss(),
        "ram_budget_bytes": engine.plan.budget,
        "context": engine.plan.context,
        "prefill_seconds": outcome.prefill_seconds,
        "decode_seconds": outcome.decode_seconds,
        "seconds_per_token": outcome.decode_seconds / (generated - 1) if generated > 1 else None,
        "trunk_bytes_read": engine.weights.bytes_read,
        "expert_bytes_read": engine.experts.bytes_read,
        "expert_requests": engine.experts.requests,
        "expert_hits": engine.experts.hits,
        "resumed_tokens": 0,
        "threads": engine.plan.threads,
        "isa": native.isa(),
    }
