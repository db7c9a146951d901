"""`kimi generate --prompts`: many prompts, one after another, with the model open all the while.

survey  every line that is not done: how long is its prompt?   -> one plan, for the longest
answer  each of them in turn -> a line of results, synced      -> the next
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_cli import console, memory, native
from kimi_cli.answer import Settings, fit_context, limits, model_dir, tokenizer_bytes
from kimi_cli.course import Course, plan_facts, plan_lines
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import KimiError, TokenizerError, UsageError
from kimi_cli.generate import Job, Outcome, generate, statistics
from kimi_cli.halt import Halt
from kimi_cli.ledger import Ledger
from kimi_cli.plan import Plan, Request
from kimi_cli.prompt import MAX_BYTES, Answer, prompt_ids
from kimi_cli.query import Manner, Query, parse_query, query_id
from kimi_cli.result import result_object, summary
from kimi_cli.sampler import GREEDY, Sampler, Sampling
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.watch import watching


@dataclass(frozen=True)
class Line:
    """A line of the prompts, its number counted from 1, and the CRC-32C of its bytes."""

    number: int
    text: bytes
    crc: str


@dataclass(frozen=True)
class Opened:
    """A checkpoint, and how prompts are answered that do not say otherwise."""

    source: Source
    tokenizer: Tokenizer | None
    manner: Manner
    context: int | None

    def query(self, line: Line) -> tuple[Query, list[int], int, int]:
        """The query, the ids that are fed, positions to plan for, and tokens that then fit.

        Raises UsageError and TokenizerError, which are the line's own fault."""
        query, config = parse_query(line.text, self.manner), self.source.config
        if query.stop and self.tokenizer is None:
            raise TokenizerError("the checkpoint has no tiktoken.model: stop cannot be used")
        ids = prompt_ids(query.given, self.tokenizer, config)
        return query, ids, *fit_context(len(ids), query.max_tokens, self.context, config)


@dataclass
class Survey:
    """What the lines that are to be answered ask for: the most prompt tokens and positions, and
    whether any token is drawn at random."""

    prompt: int = 0
    context: int = 0
    tokens: int = 0
    drawn: bool = False


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of `path` that are not empty. Raises UsageError."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                raw = file.readline(MAX_BYTES + 1)
                if not raw:
                    return
                if len(raw) > MAX_BYTES:
                    raise UsageError(
                        f"{path}: line {number} is longer than {MAX_BYTES:,} bytes, which no "
                        "context holds"
                    )
                text = raw.strip()
                if text:
                    yield Line(number, text, f"{native.crc32c(text):08x}")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def batch(
    settings: Settings, prompts: Path, out: Path, manner: Manner, progress: str, quiet: bool
) -> None:
    """Answers every line of `prompts` that `out` has no answer to, and adds the answers to it.

    Raises UsageError if the results are of other prompts; KimiError of any kind; KimiError at the
    end if a line could not be answered.
    """
    if prompts.exists() and not prompts.is_file():
        raise UsageError(f"{prompts} is not a regular file: it is read twice")
    if os.path.realpath(prompts) == os.path.realpath(out):
        raise UsageError(f"--prompts and --out both name {out}: give two files")
    next(lines_of(prompts), None)  # that it can be read, before anything is made
    with Ledger(out) as ledger:
        _check(ledger, prompts)
        failed, count = _batch(settings, prompts, ledger, manner, progress, quiet)
        ledger.sort()
    if failed:
        raise KimiError(f"{failed} of {count} prompts could not be answered: see error in {out}")


def _check(ledger: Ledger, prompts: Path) -> None:
    """Refuses results of other prompts: they have taken long to make."""
    known = dict.fromkeys(line for line, result in ledger.results.items() if result.final)
    for line in lines_of(prompts):
        if line.number in known and ledger.results[line.number].crc != line.crc:
            raise UsageError(
                f"{ledger.path} has an answer to line {line.number} of {prompts} as it was before "
                "it was changed: give another --out"
            )
        known.pop(line.number, None)
    for number in known:
        raise UsageError(
            f"{ledger.path} has an answer to line {number}, which {prompts} has not: give another "
            "--out"
        )


def _pending(ledger: Ledger, prompts: Path) -> Iterator[Line]:
    for line in lines_of(prompts):
        found = ledger.results.get(line.number)
        if found is None or not found.final:
            yield line


def _batch(
    settings: Settings, prompts: Path, ledger: Ledger, manner: Manner, progress: str, quiet: bool
) -> tuple[int, int]:
    """Answers what is pending; how many lines failed, of how many that there are."""
    count = sum(1 for _ in lines_of(prompts))
    memory.one_arena()
    native.set_isa(settings.isa)
    machine = limits(settings)
    directory = model_dir(settings, quiet or progress == "json")
    source = Source.open(directory, settings.trunk)
    expected = tokenizer_bytes(directory, source.config)
    least = Request(settings.context or 2, 1, machine.threads, READERS, settings.chunk)
    plan_for(source, least, machine.budget, expected=expected)
    before = memory.rss()
    tokenizer = Tokenizer.load_optional(directory)
    opened = Opened(source, tokenizer, manner, settings.context)
    survey = _survey(opened, ledger, prompts)
    loaded = max(memory.rss() - before, 0)
    sampling = Sampling(temperature=1.0) if survey.drawn else GREEDY
    sampler = Sampler(sampling, source.config.vocab_size)
    with ExitStack() as stack:
        watch = stack.enter_context(watching(progress, quiet, streams=False))
        run: _Run | None = None
        if survey.prompt:
            asked = Request(survey.context, survey.prompt, machine.threads, READERS, settings.chunk)
            plan = plan_for(source, asked, machine.budget, loaded)
            facts = plan_facts(plan, survey.prompt, survey.tokens)
            watch.plan(plan_lines(source, plan, survey.prompt), facts)
            course = Course(watch, stack.enter_context(Halt(watch.stopping)))
            engine = stack.enter_context(Engine(source, plan, progress=course.layer))
            course.load(engine)
            run = _Run(opened, plan, engine, course, sampler, ledger)
        failed = 0
        for line in _pending(ledger, prompts):
            watch.line = line.number
            try:
                query = opened.query(line)
            except (UsageError, TokenizerError) as error:
                failed += 1
                watch.clear()
                console.note(f"kimi: {prompts}, line {line.number}: {error}")
                ledger.add(line.number, line.crc, False, {**_id(line), "error": str(error)})
                continue
            assert run is not None
            run.answer(line, *query)
        watch.line = 0
        watch.note(f"{count - failed} of {count} prompts answered: {ledger.path}")
    return failed, count


def _survey(opened: Opened, ledger: Ledger, prompts: Path) -> Survey:
    """What is to be planned for; lines that are bad are met again later."""
    found = Survey()
    for line in _pending(ledger, prompts):
        try:
            query, ids, context, tokens = opened.query(line)
        except (UsageError, TokenizerError):
            continue
        found.prompt, found.context = max(found.prompt, len(ids)), max(found.context, context)
        found.tokens = max(found.tokens, tokens)
        found.drawn = found.drawn or not query.sampling.greedy
    return found


class _Run:
    """What one prompt after another is answered with."""

    def __init__(
        self,
        opened: Opened,
        plan: Plan,
        engine: Engine,
        course: Course,
        sampler: Sampler,
        ledger: Ledger,
    ) -> None:
        self._opened, self._plan, self._engine = opened, plan, engine
        self._course, self._sampler, self._ledger = course, sampler, ledger

    def answer(self, line: Line, query: Query, ids: list[int], _: int, tokens: int) -> None:
        """Answers a line. Raises KimiError, and KeyboardInterrupt once what there is is kept."""
        course, engine, tokenizer = self._course, self._engine, self._opened.tokenizer
        self._sampler.sampling = query.sampling.seeded()
        end_ids = frozenset({engine.config.eos_token_id})
        end_ids |= tokenizer.end_ids if tokenizer else frozenset()
        shown = Answer(tokenizer, query.given, end_ids, query.stop) if tokenizer else None
        outcome = Outcome()

        def emit(token: int) -> bool:
            if shown is not None:
                shown.push(token)
            course.watch.token(len(outcome.ids), token)
            return shown is not None and shown.stopped

        def boundary(last: bool) -> None:
            if not last:
                course.halt.check()

        job = Job(
            ids,
            tokens,
            self._sampler,
            frozenset() if query.ignore_eos else end_ids,
            boundary=boundary,
        )
        engine.reset()
        course.begin(engine, self._opened.source, len(ids), 0, tokens)
        try:
            generate(engine, job, outcome, emit)
        finally:
            if outcome.ids or outcome.stop_reason != "interrupted":
                if shown is not None:
                    shown.finish()
                stats = statistics(engine, self._plan, outcome, self._sampler)
                result = result_object(ids, outcome, shown, query.given, stats)
                self._keep(line, result, outcome, len(ids))

    def _keep(self, line: Line, result: dict[str, Any], outcome: Outcome, prompt: int) -> None:
        final = outcome.stop_reason != "interrupted"
        self._ledger.add(line.number, line.crc, final, {**_id(line), **result})
        words = summary(result["stats"], prompt, len(outcome.ids))
        facts = {"stop_reason": outcome.stop_reason, "stats": result["stats"]}
        self._course.watch.done(words, facts)


def _id(line: Line) -> dict[str, str | int | float]:
    found = query_id(line.text)
    return {} if found is None else {"id": found}
