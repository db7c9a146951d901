"""`kimi generate`: one prompt from the command line to text, JSON and the figures at the end."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kimi_cli import console, memory, native
from kimi_cli.builtin import PSALM
from kimi_cli.config import Config
from kimi_cli.course import Course, plan_facts, plan_lines
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import BudgetError, KimiError, TokenizerError, UsageError
from kimi_cli.generate import Job, Outcome, generate, statistics
from kimi_cli.halt import Halt
from kimi_cli.logprobs import Logprobs
from kimi_cli.npy import NpyWriter
from kimi_cli.outputs import check_outputs
from kimi_cli.plan import Plan, Request
from kimi_cli.prompt import Answer, Given, prompt_bounds, prompt_ids
from kimi_cli.replay import TraceWriter
from kimi_cli.result import put_json, result_object, summary
from kimi_cli.resume import Keeper, Part, session_bounds, take_part, with_session
from kimi_cli.sampler import GREEDY, Sampler, Sampling
from kimi_cli.session import Session, ids_path
from kimi_cli.timing import TraceFile, no_span, recorder
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.watch import watching

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
            "no model given (-m DIR or KIMI_MODEL): using the built-in one, a K3 of 3 million "
            "parameters trained on the King James Bible"
        )
    return PSALM


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
    progress: str = "auto"

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
        positions = min(prompt + max(max_tokens, 1), config.max_position_embeddings)
        return request(max(prompt, 1), settings.context or positions)

    # Once before the tokenizer is loaded, so that a hopeless budget is refused at once. How many
    # tokens a text has is not known yet: at least one, at most one a byte.
    fewest, most = prompt_bounds(given, config)
    if session is not None:
        fewest, most = session_bounds(session, fewest, most)
    expected = tokenizer_bytes(directory, config)
    try:
        plan_for(source, least(fewest), machine.budget, expected=expected)
    except BudgetError:
        plan_for(source, least(most), machine.budget, expected=expected)
        raise
    before = memory.rss()
    tokenizer = Tokenizer.load_optional(directory)
    part = None if session is None else take_part(session, source, given, tokenizer)
    ids = prompt_ids(given, tokenizer, config) if part is None else part.before
    context, fit = fit_context(len(ids), max_tokens, settings.context, config)
    loaded = max(memory.rss() - before, 0)
    asked = request(len(ids) if part is None else part.unread, context)
    return Opened(source, tokenizer, ids, fit, asked, machine.budget, loaded, part)


def answer(settings: Settings, given: Given, wanted: Wanted) -> None:
    """Generates and prints. Raises KimiError of any kind, KeyboardInterrupt, OutputClosed."""
    check_outputs(
        {
            "--logits": wanted.logits,
            "--all-logits": wanted.all_logits,
            "--trace": wanted.trace,
            "--trace-time": wanted.trace_time,
        },
        {
            "--prompt-file": given.file,
            "--messages": given.messages,
            "--session": wanted.session,
            "the session's ids": ids_path(wanted.session) if wanted.session else None,
        },
        [settings.model or PSALM, settings.trunk],
    )
    if wanted.session is None:
        _answer(settings, given, wanted, None)
        return
    with Session(wanted.session, wanted.save_every) as session:
        _answer(settings, with_session(given, session), wanted, session)
        if session.unsaved:
            raise KimiError(session.unsaved)


def _answer(settings: Settings, given: Given, wanted: Wanted, session: Session | None) -> None:
    as_json = wanted.as_json
    quiet = wanted.quiet or wanted.progress == "json"
    watch = watching(wanted.progress, wanted.quiet, streams=not as_json)
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
    heard, stopped_by_hand = True, False

    def show(token: int) -> bool:
        text = shown.push(token) if shown else ""
        stopped = shown is not None and shown.stopped
        if keeper is not None:
            keeper.decided(token, job.ending(token, stopped))
        if text and not as_json:
            watch.put(text)
        return stopped

    def emit(token: int) -> bool:
        stopped = show(token)
        watch.token(len(outcome.ids), token)
        return stopped

    def finish(engine: Engine | None) -> None:
        rest = shown.finish() if shown else ""
        watch.clear()
        stats = statistics(engine, plan, outcome, sampler)
        if as_json:
            result = result_object(opened.ids, outcome, shown, given, stats)
            if outcome.ids or stopped_by_hand or outcome.stop_reason != "interrupted":
                put_json(result, outcome, tokenizer)
        else:
            console.put((rest if shown else ",".join(map(str, outcome.ids))) + "\n")
        if heard:
            line = summary(stats, len(feed), len(outcome.ids) - outcome.resumed)
            watch.done(line, {"stop_reason": outcome.stop_reason, "stats": stats})

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
        stack.enter_context(watch)
        course = Course(watch, stack.enter_context(Halt(watch.stopping)))
        unread = opened.request.prompt
        facts = plan_facts(plan, unread, opened.max_tokens)
        watch.plan(plan_lines(opened.source, plan, unread), facts)
        writer = stack.enter_context(TraceWriter(wanted.trace)) if wanted.trace else None
        clock = stack.enter_context(TraceFile(wanted.trace_time)) if wanted.trace_time else None
        engine = stack.enter_context(
            Engine(
                opened.source,
                plan,
                trace=writer.trace if writer else None,
                progress=course.layer,
                span=recorder(clock.add) if clock else no_span,
            )
        )
        if part is not None:
            feed = part.begin(sampler.sampling, stop, engine.state)
            if not wanted.max_tokens and not all_logits:
                del feed[-1]  # fed by the run that asks what follows it
            keeper = stack.enter_context(Keeper(part.session, engine.state))

        def boundary(last: bool) -> None:
            if keeper is not None:
                keeper.boundary(last or course.halt.asked)
            if not last:
                course.halt.check()

        job = Job(
            feed,
            opened.max_tokens,
            sampler,
            frozenset() if wanted.ignore_eos else end_ids,
            wanted.logits,
            wanted.all_logits,
            boundary,
        )
        course.load(engine)
        course.begin(engine, opened.source, len(feed), outcome.resumed, opened.max_tokens)
        try:
            generate(engine, job, outcome, emit)
        except console.OutputClosed:
            heard = False  # nobody is left to tell
            raise
        except KeyboardInterrupt:
            stopped_by_hand = True
            raise
        finally:
            finish(engine)


def tokenizer_bytes(directory: Path, config: Config) -> int:
    """What loading the tokenizer is expected to add to this process."""
    if not (directory / "tiktoken.model").exists():
        return 0
    return TOKENIZER_LIBRARY + config.vocab_size * TOKENIZER_RANK


def fit_context(
    prompt: int, max_tokens: int, context: int | None, config: Config
) -> tuple[int, int]:
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
