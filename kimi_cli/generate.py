"""One greedy answer to one prompt: prefill, then a token at a time, with what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_cli import native
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
    belongs to the ids it has. Raises ReadError, CheckpointError, NumericError.
    """
    vocab = engine.config.vocab_size
    files = [NpyWriter(path, vocab) for path in (job.all_logits, job.logits) if path is not None]
    prompt_rows = files[0] if job.all_logits is not None else None
    rows = files[-1] if job.logits is not None else None
    try:
        _run(engine, job, outcome, emit, prompt_rows, rows)
    except KeyboardInterrupt:
        for file in files:
            file.close()
        raise
    finally:
        for file in files:
            file.discard()


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
