"""What a run leaves behind: the JSON object of an answer, and the line of figures on stderr."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from kimi_cli import console
from kimi_cli.calls import call_object
from kimi_cli.generate import Outcome
from kimi_cli.prompt import Answer, Given, token_text
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.units import format_duration, format_size


def result_object(
    ids: list[int], outcome: Outcome, shown: Answer | None, given: Given, stats: dict[str, Any]
) -> dict[str, Any]:
    """The object that `--json` prints; `stats` are of `generate.statistics`."""
    result: dict[str, Any] = {
        "prompt_ids": ids,
        "ids": outcome.ids,
        "text": shown.channel("response") if shown else None,
    }
    if given.chat and given.effort != "off":
        result["reasoning"] = shown.reasoning if shown else None
    if shown is not None and shown.tools:
        result.update(call_object(shown.tools))
    return {**result, "stop_reason": outcome.stop_reason, "stats": stats}


def put_json(result: dict[str, Any], outcome: Outcome, tokenizer: Tokenizer | None) -> None:
    """Prints `result` on stdout, and log-probabilities token by token, which together are large."""
    text = json.dumps(result, ensure_ascii=False)
    if outcome.logprobs is None:
        console.put(text + "\n")
        return
    console.put(text[:-1] + ', "logprobs": [')
    computed = islice(outcome.logprobs.first(len(outcome.ids)), outcome.resumed, None)
    for number, one in enumerate(computed):
        entry = _logprob(tokenizer, one.id, one.logprob)
        entry["top"] = [_logprob(tokenizer, *best) for best in one.top]
        console.put((", " if number else "") + json.dumps(entry, ensure_ascii=False))
    console.put("]}\n")


def _logprob(tokenizer: Tokenizer | None, token: int, value: float) -> dict[str, Any]:
    return {"id": token, "token": token_text(tokenizer, token), "logprob": value}


def summary(stats: dict[str, Any], prompt: int, generated: int | None) -> str:
    """The last line on stderr: what was done, what it cost, and whether the promise was kept.

    `generated` is None where nothing was to be generated.
    """
    rate = stats["seconds_per_token"]
    pace = f" at {format_duration(rate)} each" if rate else ""
    peak, budget = stats["peak_rss_bytes"], stats["ram_budget_bytes"]
    words = [
        f"{prompt} tokens read in {format_duration(stats['prefill_seconds'])}",
        *([] if generated is None else [f"{generated} generated{pace}"]),
        f"peak {format_size(peak)} of {format_size(budget)}",
        f"read {format_size(stats['trunk_bytes_read'])} of trunk, "
        f"{format_size(stats['expert_bytes_read'])} of experts "
        f"({stats['expert_hits']} of {stats['expert_requests']} in memory)",
    ]
    line = "; ".join(words)
    return line + (" - THE BUDGET WAS EXCEEDED" if peak > budget else "")
