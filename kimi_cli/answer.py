"""`kimi generate`: one prompt from the command line to text, JSON and the figures at the end."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_cli import console, memory, native
from kimi_cli.builtin import TINY
from kimi_cli.config import Config
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import BudgetError, UsageError
from kimi_cli.generate import Job, Outcome, generate, statistics
from kimi_cli.plan import Request
from kimi_cli.progress import Progress
from kimi_cli.prompt import Answer, Given, prompt_bounds, prompt_ids
from kimi_cli.replay import TraceWriter
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.units import format_duration, format_size

TOKENIZER_LIBRARY = 10 << 20
TOKENIZER_RANK = 384
"""Bytes of memory that one rank of the tokenizer costs, measured at 163,584 ranks."""


@dataclass(frozen=True)
class Settings:
    """What the engine may use. `ram` 0 is auto; `model` None is the built-in checkpoint."""

    model: Path | None = None
    trunk: Path | None = None
    ram: int = 0
    threads: int | None = None
    chunk: int | None = None
    isa: str = "auto"
    context: int | None = None


@dataclass(frozen=True)
class Limits:
    """Settings with every default filled in from the machine."""

    budget: int
    threads: int


def limits(settings: Settings) -> Limits:
    """The budget in bytes and the threads, never more than the processors we may use."""
    most = min(memory.cpus(), native.MAX_THREADS)
    return Limits(settings.ram or memory.available(), min(settings.threads or most, most))


def model_dir(settings: Settings, quiet: bool) -> Path:
    """The checkpoint to use; says so when it is the built-in one."""
    if settings.model is not None:
        return settings.model
    if not quiet:
        console.note(
            "no model given (-m DIR or KIMI_MODEL): using the built-in one, whose weights are "
            "random and whose output is noise"
        )
    return TINY


def answer(
    settings: Settings,
    given: Given,
    max_tokens: int,
    ignore_eos: bool,
    logits: Path | None,
    all_logits: Path | None,
    trace: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Generates and prints. Raises KimiError of any kind, KeyboardInterrupt, OutputClosed."""
    _check_outputs(logits, all_logits, trace)
    memory.one_arena()
    native.set_isa(settings.isa)
    machine = limits(settings)
    directory = model_dir(settings, quiet)
    source = Source.open(directory, settings.trunk)
    config = source.config

    def request(prompt: int, context: int) -> Request:
        return Request(
            context, prompt, machine.threads, READERS, settings.chunk, all_logits is not None
        )

    def least(prompt: int) -> Request:
        return request(max(prompt, 1), settings.context or prompt + max(max_tokens, 1))

    # Once before the tokenizer is loaded, so that a hopeless budget is refused at once. How many
    # tokens a text has is not known yet: at least one, at most one a byte.
    fewest, most = prompt_bounds(given, config)
    expected = _tokenizer_bytes(directory, config)
    try:
        plan_for(source, least(fewest), machine.budget, expected=expected)
    except BudgetError:
        plan_for(source, least(most), machine.budget, expected=expected)
        raise
    before = memory.rss()
    tokenizer = Tokenizer.load_optional(directory)
    ids = prompt_ids(given, tokenizer, config)
    context, max_tokens = _context(len(ids), max_tokens, settings.context, config)
    loaded = max(memory.rss() - before, 0)
    plan = plan_for(source, request(len(ids), context), machine.budget, loaded)
    end_ids = frozenset({config.eos_token_id}) | (tokenizer.end_ids if tokenizer else frozenset())
    job = Job(ids, max_tokens, frozenset() if ignore_eos else end_ids, logits, all_logits)
    shown = Answer(tokenizer, given, end_ids) if tokenizer else None
    outcome = Outcome()

    def emit(token: int) -> None:
        text = shown.push(token) if shown else ""
        if text and not as_json:
            console.put(text)

    with ExitStack() as stack:
        progress = stack.enter_context(Progress("tokens", "layer", quiet or not as_json))
        writer = stack.enter_context(TraceWriter(trace)) if trace else None
        engine = stack.enter_context(
            Engine(source, plan, trace=writer.trace if writer else None, progress=progress)
        )
        with Progress("load", "B", quiet) as report:
            engine.load(report)
        try:
            generate(engine, job, outcome, emit)
        except console.OutputClosed:
            quiet = True  # nobody is left to tell
            raise
        finally:
            rest = shown.finish() if shown else ""
            stats = statistics(engine, outcome)
            if as_json:
                result = _result(ids, outcome, shown, given, stats)
                if outcome.ids or outcome.stop_reason != "interrupted":
                    console.put(json.dumps(result, ensure_ascii=False) + "\n")
            else:
                console.put((rest if shown else ",".join(map(str, outcome.ids))) + "\n")
            if not quiet:
                console.note(summary(stats, len(ids), len(outcome.ids)))


def _check_outputs(*paths: Path | None) -> None:
    """Refuses what could not be written, before anything is read."""
    given = [path for path in paths if path is not None]
    for path in given:
        if path.exists() and not path.is_file():  # a rename would put a file in its place
            raise UsageError(f"{path} is not a regular file: logits are written to one")
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: its directory is missing or read-only")
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise UsageError(f"--logits and --all-logits both name {given[0]}: give two files")


def _tokenizer_bytes(directory: Path, config: Config) -> int:
    """What loading the tokenizer is expected to add to this process."""
    if not (directory / "tiktoken.model").exists():
        return 0
    return TOKENIZER_LIBRARY + config.vocab_size * TOKENIZER_RANK


def _context(prompt: int, max_tokens: int, context: int | None, config: Config) -> tuple[int, int]:
    """Positions to plan for and tokens that then fit. Raises UsageError."""
    most = min(context or config.max_position_embeddings, config.max_position_embeddings)
    name = "--context" if context and context <= most else "the model's limit"
    if prompt > most:
        raise UsageError(f"the prompt has {prompt} tokens, more than {name} of {most}")
    if prompt == most and max_tokens:
        raise UsageError(
            f"the prompt's {prompt} tokens leave no room to answer in {name} of {most}"
        )
    max_tokens = min(max_tokens, most - prompt)
    return (most if context else prompt + max_tokens), max_tokens


def _result(
    ids: list[int], outcome: Outcome, shown: Answer | None, given: Given, stats: dict[str, Any]
) -> dict[str, Any]:
    """The object that `--json` prints."""
    result: dict[str, Any] = {
        "prompt_ids": ids,
        "ids": outcome.ids,
        "text": shown.text if shown else None,
    }
    if given.chat and given.thinking != "off":
        result["reasoning"] = shown.reasoning if shown else None
    return {**result, "stop_reason": outcome.stop_reason, "stats": stats}


def summary(stats: dict[str, Any], prompt: int, generated: int) -> str:
    """The last line on stderr: what was done, what it cost, and whether the promise was kept."""
    rate = stats["seconds_per_token"]
    peak, budget = stats["peak_rss_bytes"], stats["ram_budget_bytes"]
    words = [
        f"{prompt} tokens read in {format_duration(stats['prefill_seconds'])}",
        f"{generated} generated" + (f" at {format_duration(rate)} each" if rate else ""),
        f"peak {format_size(peak)} of {format_size(budget)}",
        f"read {format_size(stats['trunk_bytes_read'])} of trunk, "
        f"{format_size(stats['expert_bytes_read'])} of experts "
        f"({stats['expert_hits']} of {stats['expert_requests']} in memory)",
    ]
    line = "; ".join(words)
    return line + (" - THE BUDGET WAS EXCEEDED" if peak > budget else "")
