"""A conversation with a model that stays open: each turn feeds only what is new.

    all ids so far   | read: in the state | last id of the answer | closers | message | opening |
                                          | `----------- fed by the next turn --------------'

An answer ends between two passes, also where somebody stops it, so the state stays of use. Only a
second Ctrl-C ends in the middle of one: the next turn then reads everything again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType

from kimi_cli import memory, native
from kimi_cli.answer import Settings, limits, model_dir, tokenizer_bytes
from kimi_cli.channels import AnswerParser
from kimi_cli.console import Terminated
from kimi_cli.course import Course
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.generate import Job, Outcome, generate
from kimi_cli.halt import Halt
from kimi_cli.plan import Plan, Request
from kimi_cli.prompt import check_ids
from kimi_cli.resume import model_digest
from kimi_cli.sampler import Sampler, Sampling
from kimi_cli.session import Session, new_session
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import Asked, Head, History, Step, Turn, begin, check_terms, follow, system_text
from kimi_cli.watch import Silent

CONTEXT = 8192
"""Positions of a conversation unless told."""

Show = Callable[[str, str], None]
"""Takes a channel, "reasoning", "response" or "tools", and the next piece of its text."""


@dataclass(frozen=True)
class Terms:
    """What a conversation is begun with; None: no system message, or as the session has it."""

    system: str | None = None
    thinking: str | None = None


class Stop(Halt):
    """Ctrl-C that waits for the end of a pass, not of a layer, once `passes`."""

    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__(say)
        self.passes = False

    def __enter__(self) -> Stop:
        self.asked = False
        super().__enter__()
        return self

    def check(self) -> None:
        if not self.passes:
            super().check()


class Talk:
    """A model and the conversation with it; a context manager, for the main thread.

    `history` is None until something is said; `session` is where it is kept, if anywhere.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        plan: Plan,
        sampler: Sampler,
        terms: Terms,
        watch: Silent,
        session: Session | None = None,
    ) -> None:
        self.plan, self.terms, self.session = plan, terms, session
        self.history: History | None = session.history if session is not None else None
        self.last: Outcome | None = None
        """What the last answer took."""
        self._source, self._tokenizer, self._sampler = source, tokenizer, sampler
        self._stop = Stop(self._stopping)
        self._course = Course(watch, self._stop)
        self._engine: Engine | None = None
        self._files = ExitStack()
        self._lost = True
        self.fed = 0
        """Tokens that the last turn fed before its answer."""

    def __enter__(self) -> Talk:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.close()

    @property
    def lost(self) -> bool:
        """Whether the state is of no use, so that the next turn reads everything again."""
        return self._lost

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def engine(self) -> Engine:
        """The model as it is open now."""
        assert self._engine is not None
        return self._engine

    @property
    def thinking(self) -> str:
        """The effort of this conversation."""
        return self.history.head.thinking if self.history else self.terms.thinking or "off"

    @property
    def system(self) -> str | None:
        """Its system message."""
        if self.history is None or not self.history.turns:
            return self.terms.system
        return system_text(self.history)

    @property
    def tokens(self) -> int:
        """Ids of the conversation so far."""
        return len(self.history.ids) if self.history else 0

    def renew(self, terms: Terms) -> None:
        """Begins a new conversation; a session keeps the one before, and is let go of."""
        self.terms, self.history, self.session = terms, None, None
        if not self._lost:
            self.engine.reset()

    def save(self) -> None:
        """Writes the state to the session, if there is one and anything new in it."""
        if self.session is not None and not self._lost:
            self.session.boundary(self.engine.state, last=True)

    def say(self, text: str, max_tokens: int | None, watch: Silent, show: Show) -> Outcome:
        """Answers a user's message, with up to `max_tokens` tokens (None: all that the context
        holds). An answer that was stopped is one that ended `interrupted`.

        Raises UsageError, with nothing said, where the context has no room; KimiError of any kind;
        Terminated and OutputClosed, the conversation holding what had been said.
        """
        self._course.watch = watch
        turn, before = self._next(text)
        room = self.plan.context - before
        if room < 1:
            raise UsageError(
                f"the conversation would have {before} tokens before an answer, and the context "
                f"holds {self.plan.context}: /save FILE keeps it, /new begins another, and kimi "
                "chat --context N makes room for more"
            )
        outcome = self.last = Outcome()
        if self._lost:
            self._open()
        self._take(turn)
        limit = room if max_tokens is None else min(room, max_tokens)
        self._stop.passes = self._lost = True  # until the pass in hand is whole
        with self._stop:
            try:
                self._answer(turn, limit, outcome, show)
                self._lost = False
            except Terminated:
                raise
            except KeyboardInterrupt:
                pass
        return outcome

    def _next(self, text: str) -> tuple[Turn, int]:
        """The turn that `text` begins, and how many ids there are before its answer."""
        if self.history is None or not self.history.turns:
            asked = Asked(text=text, system=self.system, thinking=self.thinking)
            turn = begin(asked, self._tokenizer)
            held = 0
        else:
            turn = follow(self.history, text, self._tokenizer)
            held = self.tokens - turn.dropped
        check_ids(turn.prompt, self._source.config)
        return turn, held + len(turn.prompt)

    def _take(self, turn: Turn) -> None:
        """Makes `turn` the last of the history."""
        turn.sampling = asdict(self._sampler.sampling)
        if self.history is None:
            self.history = History(self._head(), [])
        if self.session is not None:
            self.session.begin(Step(turn, True), self.history.head)
            self.history = self.session.history
        else:
            self.history.turns.append(turn)

    def _head(self) -> Head:
        return Head(new_session(), model_digest(self._source), True, self.thinking)

    def _answer(self, turn: Turn, limit: int, outcome: Outcome, show: Show) -> None:
        engine, session, watch = self.engine, self.session, self._course.watch
        assert self.history is not None
        feed = self.history.ids[engine.state.position :]
        self.fed = len(feed)
        parser = AnswerParser(self._tokenizer, self.thinking)
        end_ids = self._tokenizer.end_ids | {self._source.config.eos_token_id}

        def emit(token: int) -> bool:
            reason = job.ending(token, False)
            if session is not None:
                session.decided(token, reason)
            else:
                turn.ids.append(token)
                turn.reason = reason
            for kind, text in parser.push(token):
                show(kind, text)
            watch.token(len(outcome.ids), token)
            return False

        def boundary(last: bool) -> None:
            if session is not None:
                session.boundary(engine.state, last or self._stop.asked)
            if self._stop.asked and not last:
                self._lost = False
                raise KeyboardInterrupt

        job = Job(feed, limit, self._sampler, end_ids, boundary=boundary)
        engine.model.rewind()
        self._course.begin(engine, self._source, len(feed), 0, limit)
        try:
            generate(engine, job, outcome, emit)
        finally:
            watch.clear()
            for kind, text in parser.finish():
                show(kind, text)

    def _open(self) -> None:
        """Opens the model, in place of one that was left in the middle of a pass."""
        self._lost = True
        self._files.close()
        self._engine = None
        gc.collect()  # its memory is planned for once
        engine = Engine(self._source, self.plan, progress=self._course.layer)
        self._engine = self._files.enter_context(engine)
        self._stop.passes = False
        with self._stop:
            self._course.load(engine)
        if self.session is not None and self.history is not None and self.history.turns:
            self.session.restore(engine.state)
        self._lost = False

    def _stopping(self) -> None:
        self._course.watch.stopping("pass" if self._stop.passes else "layer")


def open_talk(
    settings: Settings,
    terms: Terms,
    sampling: Sampling,
    watch: Silent,
    quiet: bool,
    session: Session | None = None,
) -> Talk:
    """Opens the checkpoint, its tokenizer and the conversation; nothing large is read before the
    `Talk` is entered. Raises KimiError of any kind."""
    memory.one_arena()
    native.set_isa(settings.isa)
    machine = limits(settings)
    directory = model_dir(settings, quiet)
    source = Source.open(directory, settings.trunk)
    config = source.config
    context = min(settings.context or CONTEXT, config.max_position_embeddings)
    request = Request(context, context, machine.threads, READERS, settings.chunk, False)
    expected = tokenizer_bytes(directory, config)
    plan_for(source, request, machine.budget, expected=expected)
    before = memory.rss()
    tokenizer = Tokenizer.load_optional(directory)
    if tokenizer is None:
        raise TokenizerError("the checkpoint has no tiktoken.model: kimi chat needs it")
    loaded = max(memory.rss() - before, 0)
    if session is not None:
        session.check_model(model_digest(source), config.vocab_size)
        _check_session(session, terms, context)
    sampler = Sampler(sampling, config.vocab_size)
    plan = plan_for(source, request, machine.budget, loaded)
    return Talk(source, tokenizer, plan, sampler, terms, watch, session)


def _check_session(session: Session, terms: Terms, context: int) -> None:
    history = session.history
    if history is None:
        return
    if not history.head.chat:
        raise UsageError(
            f"{session.path} continues a text, which is no conversation: give another --session"
        )
    try:
        check_terms(history, terms.thinking, terms.system if history.turns else None)
    except UsageError as error:
        raise UsageError(f"{session.path}: {error}; give another --session to begin anew") from None
    held = len(history.ids)
    if held >= context:
        raise UsageError(
            f"{session.path} holds {held} tokens, which a context of {context} has no room for: "
            f"give --context {held + context}"
        )
