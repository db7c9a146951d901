"""`kimi generate`: one prompt from the command line to text, JSON and the figures at the end."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kimi_cli import console, memory, native
from kimi_cli.builtin import TINY
from kimi_cli.config import Config
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import BudgetError, KimiError, TokenizerError, UsageError
from kimi_cli.generate import Job, Outcome, generate, no_boundary, statistics
from kimi_cli.logprobs import Logprobs
from kimi_cli.npy import NpyWriter
from kimi_cli.plan import Plan, Request
from kimi_cli.progress import Progress
from kimi_cli.prompt import Answer, Given, prompt_bounds, prompt_ids, token_text
from kimi_cli.replay import TraceWriter
from kimi_cli.resume import Keeper, Part, session_bounds, take_part, with_session
from kimi_cli.sampler import GREEDY, Sampler, Sampling
from kimi_cli.session import Session
from kimi_cli.timing import TraceFile, no_span, recorder
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


@dataclass(frozen=True)
class Wanted:
    """What `generate` shall do with a prompt, print and write. Raises UsageError.

    `logprobs` is the number of alternatives for each token of the JSON, None for no logprobs.
    """

    max_tokens: int = 128
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits: Path | None = None
    all_logits: Path | None = None
    trace: Path | None = None
    trace_time: Path | None = None
    session: Path | None = None
    save_every: int | None = None
    as_json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("--stop wants a text: an empty one would stop at once")
        if self.logprobs is not None and not self.as_json:
            raise UsageError("--logprobs adds to the JSON: give --json too")
        if self.save_every is not None and self.session is None:
            raise UsageError("--save-every says how often a session is saved: give --session too")


@dataclass(frozen=True)
class Opened:
    """A checkpoint and the prompt for it: `ids` are all that comes before the answer, `part` is the
    part in a session. `loaded` bytes are the tokenizer's."""

    source: Source
    tokenizer: Tokenizer | None
    ids: list[int]
    max_tokens: int
    request: Request
    budget: int
    loaded: int
    part: Part | None = None

    def plan(self) -> Plan:
        """The plan for the process as it stands: what is allocated before is counted in it.

        Raises BudgetError.
        """
        return plan_for(self.source, self.request, self.budget, self.loaded)


def open_prompt(
    settings: Settings,
    given: Given,
    max_tokens: int,
    all_logits: bool,
    quiet: bool,
    session: Session | None = None,
) -> Opened:
    """Opens the checkpoint and its tokenizer and reads the prompt, for up to `max_tokens` tokens
    after it. Raises KimiError of any kind."""
    memory.one_arena()
    native.set_isa(settings.isa)
    machine = limits(settings)
    directory = model_dir(settings, quiet)
    source = Source.open(directory, settings.trunk)
    config = source.config

    def request(prompt: int, context: int) -> Request:
        return Request(context, prompt, machine.threads, READERS, settings.chunk, all_logits)

    def least(prompt: int) -> Request:
        return request(max(prompt, 1), settings.context or prompt + max(max_tokens, 1))

    # Once before the tokenizer is loaded, so that a hopeless budget is refused at once. How many
    # tokens a text has is not known yet: at least one, at most one a byte.
    fewest, most = prompt_bounds(given, config)
    if session is not None:
        fewest, most = session_bounds(session, fewest, most)
    expected = _tokenizer_bytes(directory, config)
    try:
        plan_for(source, least(fewest), machine.budget, expected=expected)
    except BudgetError:
        plan_for(source, least(most), machine.budget, expected=expected)
        raise
    before = memory.rss()
    tokenizer = Tokenizer.load_optional(directory)
    part = None if session is None else take_part(session, source, given, tokenizer)
    ids = prompt_ids(given, tokenizer, config) if part is None else part.before
    context, fit = _context(len(ids), max_tokens, settings.context, config)
    loaded = max(memory.rss() - before, 0)
    asked = request(len(ids) if part is None else part.unread, context)
    return Opened(source, tokenizer, ids, fit, asked, machine.budget, loaded, part)


def answer(settings: Settings, given: Given, wanted: Wanted) -> None:
    """Generates and prints. Raises KimiError of any kind, KeyboardInterrupt, OutputClosed."""
    _check_outputs(wanted.logits, wanted.all_logits, wanted.trace, wanted.trace_time)
    if wanted.session is None:
        _answer(settings, given, wanted, None)
        return
    with Session(wanted.session, wanted.save_every) as session:
        _answer(settings, with_session(given, session), wanted, session)
        if session.unsaved:
            raise KimiError(session.unsaved)


def _answer(settings: Settings, given: Given, wanted: Wanted, session: Session | None) -> None:
    quiet, as_json = wanted.quiet, wanted.as_json
    all_logits = wanted.all_logits is not None
    opened = open_prompt(settings, given, wanted.max_tokens, all_logits, quiet, session)
    tokenizer, config, part = opened.tokenizer, opened.source.config, opened.part
    if wanted.stop and tokenizer is None:
        raise TokenizerError("the checkpoint has no tiktoken.model: --stop cannot be used with it")
    sampling, stop = wanted.sampling, wanted.stop
    if part is not None:
        sampling, stop = part.options(sampling, stop, opened.max_tokens, all_logits)
    sampler = Sampler(sampling, config.vocab_size)
    logprobs = None if wanted.logprobs is None else Logprobs(opened.max_tokens, wanted.logprobs)
    plan = opened.plan()
    if sampler.sampling != wanted.sampling and not quiet:
        console.note(f"seed {sampler.sampling.seed}: give --seed to draw the same again")
    end_ids = frozenset({config.eos_token_id}) | (tokenizer.end_ids if tokenizer else frozenset())
    shown = Answer(tokenizer, given, end_ids, stop) if tokenizer else None
    outcome = Outcome(logprobs=logprobs)
    feed = opened.ids if part is None else []
    keeper: Keeper | None = None

    def show(token: int) -> bool:
        text = shown.push(token) if shown else ""
        stopped = shown is not None and shown.stopped
        if keeper is not None:
            keeper.decided(token, job.ending(token, stopped))
        if text and not as_json:
            console.put(text)
        return stopped

    def finish(engine: Engine | None) -> None:
        rest = shown.finish() if shown else ""
        stats = statistics(engine, plan, outcome, sampler)
        if as_json:
            result = _result(opened.ids, outcome, shown, given, stats)
            if outcome.ids or outcome.stop_reason != "interrupted":
                _put_json(result, outcome, tokenizer)
        else:
            console.put((rest if shown else ",".join(map(str, outcome.ids))) + "\n")
        if not quiet:
            console.note(summary(stats, len(feed), len(outcome.ids) - outcome.resumed))

    if part is not None:
        for token in part.turn.ids:
            show(token)
        outcome.ids, outcome.resumed = list(part.turn.ids), len(part.turn.ids)
        if not part.step.left(opened.max_tokens):
            outcome.stop_reason = part.turn.reason or "length"
            if wanted.logits is not None:
                NpyWriter(wanted.logits, config.vocab_size).close()
            finish(None)
            return
    with ExitStack() as stack:
        progress = stack.enter_context(Progress("tokens", "layer", quiet or not as_json))
        writer = stack.enter_context(TraceWriter(wanted.trace)) if wanted.trace else None
        clock = stack.enter_context(TraceFile(wanted.trace_time)) if wanted.trace_time else None
        engine = stack.enter_context(
            Engine(
                opened.source,
                plan,
                trace=writer.trace if writer else None,
                progress=progress,
                span=recorder(clock.add) if clock else no_span,
            )
        )
        if part is not None:
            feed = part.begin(sampler.sampling, stop, engine.state)
            if not wanted.max_tokens and not all_logits:
                del feed[-1]  # fed by the run that asks what follows it
            keeper = stack.enter_context(Keeper(part.session, engine.state))
        job = Job(
            feed,
            opened.max_tokens,
            sampler,
            frozenset() if wanted.ignore_eos else end_ids,
            wanted.logits,
            wanted.all_logits,
            keeper.boundary if keeper else no_boundary,
        )
        with Progress("load", "B", quiet) as report:
            engine.load(report)
        try:
            generate(engine, job, outcome, show)
        except console.OutputClosed:
            quiet = True  # nobody is left to tell
            raise
        finally:
            finish(engine)


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
    if given.chat and given.effort != "off":
        result["reasoning"] = shown.reasoning if shown else None
    return {**result, "stop_reason": outcome.stop_reason, "stats": stats}


def _put_json(result: dict[str, Any], outcome: Outcome, tokenizer: Tokenizer | None) -> None:
    """Prints `result`, and log-probabilities token by token: as one text they would be large."""
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
