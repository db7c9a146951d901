"""`kimi score`: how probable the model finds a text, token by token."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_cli import console, native
from kimi_cli.answer import Settings, open_prompt
from kimi_cli.engine import Engine
from kimi_cli.errors import UsageError
from kimi_cli.generate import Outcome, statistics
from kimi_cli.native import F64, I32
from kimi_cli.progress import Progress
from kimi_cli.prompt import Given
from kimi_cli.result import summary


@dataclass(frozen=True)
class Score:
    """Natural log-probabilities of all tokens but the first, and what they add up to.

    `total` is their sum, correctly rounded; `perplexity` is exp(-mean), perhaps infinite.
    """

    logprobs: list[float]
    total: float
    perplexity: float

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


def score(
    settings: Settings,
    text: str | None,
    ids: str | None,
    file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Scores and prints. Raises KimiError of any kind, KeyboardInterrupt, OutputClosed."""
    if sum(source is not None for source in (text, ids, file)) != 1:
        raise UsageError("give one text: TEXT, --prompt-file or --ids")
    given = Given(text=text, ids=ids, file=file, raw=True)
    opened = open_prompt(settings, given, 0, True, quiet)
    if len(opened.ids) < 2:
        raise UsageError(
            "the text has one token: the first has no probability, so give two or more"
        )
    values: F64 = np.full(len(opened.ids) - 1, 0, np.float64)
    plan = opened.plan()
    outcome = Outcome()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("tokens", "layer", quiet))
        engine = stack.enter_context(Engine(opened.source, plan, progress=progress))
        with Progress("load", "B", quiet) as report:
            engine.load(report)
        started = time.monotonic()
        result = score_ids(engine, opened.ids, values)
        outcome.prefill_seconds = time.monotonic() - started
        stats = statistics(engine, plan, outcome)
    console.put(_json(opened.ids, result, stats) if as_json else _line(result))
    if not quiet:
        console.note(summary(stats, len(opened.ids) - 1, None))


def score_ids(engine: Engine, ids: list[int], values: F64) -> Score:
    """Scores two or more `ids`; `values` [len(ids) - 1] is filled with the log-probabilities.

    The last id is not fed: nothing follows it. Raises ReadError, CheckpointError, NumericError.
    """
    wanted: I32 = np.array(ids[1:], np.int32)
    no_ids, no_values = np.empty(0, np.int32), np.empty(0, np.float64)
    at = 0
    for logits in engine.prefill(ids[:-1], True, False):
        for row in logits:
            one = slice(at, at + 1)
            native.logprobs(row, wanted[one], values[one], no_ids, no_values)
            at += 1
    logprobs = values.tolist()
    total = math.fsum(logprobs)
    return Score(logprobs, total, native.perplexity(total, len(logprobs)))


def _json(ids: list[int], score: Score, stats: dict[str, Any]) -> str:
    """`logprobs` has a null for the first token; `perplexity` is null when it is infinite."""
    result = {
        "ids": ids,
        "logprobs": [None, *score.logprobs],
        "total": score.total,
        "mean": score.mean,
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
        "stats": stats,
    }
    return json.dumps(result) + "\n"


def _line(score: Score) -> str:
    count = len(score.logprobs)
    return (
        f"{count} tokens scored: log-probability {score.total:.6f}, {score.mean:.6f} a token, "
        f"perplexity {score.perplexity:.6g}\n"
    )
