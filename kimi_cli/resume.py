"""One run of `generate` on a session: its turn chosen, its ids written down, its state saved."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace

from kimi_cli.engine import Source
from kimi_cli.errors import UsageError
from kimi_cli.manifest import digest
from kimi_cli.patience import Patience
from kimi_cli.prompt import Given, ask, check_ids
from kimi_cli.sampler import Sampling
from kimi_cli.session import Session, new_session
from kimi_cli.state import State
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import Head, Step, Turn, begin, decide

CLOSERS = 64
"""More ids than closing an answer takes, at a byte a token."""


def model_digest(source: Source) -> str:
    """What a state depends on: the checkpoint's bytes and its config; SHA-256 in hex."""
    facts = asdict(source.config)
    facts["mla_layers"] = sorted(source.config.mla_layers)
    facts["fingerprint"] = digest(source.trunk.fingerprint).hex()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Part:
    """A run's part in a session: its turn, and the ids `before` that one's answer."""

    session: Session
    head: Head
    step: Step
    before: list[int]

    @property
    def turn(self) -> Turn:
        return self.step.turn

    @property
    def unread(self) -> int:
        """How many ids there are after the state that is on disk."""
        return len(self.before) + len(self.turn.ids) - self.session.position

    def options(
        self, sampling: Sampling, stop: tuple[str, ...], max_tokens: int, all_logits: bool
    ) -> tuple[Sampling, tuple[str, ...]]:
        """How the turn is sampled, and its stop texts: those asked for if it is new, else its own
        stop texts and, unless another is asked for, its seed. Raises UsageError."""
        if all_logits and (self.session.position or self.turn.ids):
            raise UsageError(
                f"{self.session.path} has the prompt read already: --all-logits needs a new session"
            )
        if self.step.new:
            return sampling, stop
        own = tuple(self.turn.stops)
        if stop not in ((), own) and self.step.left(max_tokens):
            raise UsageError(
                f"{self.session.path}: the answer was begun with other --stop texts: give the same "
                "or none"
            )
        seed = self.turn.sampling.get("seed")
        if not sampling.greedy and sampling.seed is None and isinstance(seed, int):
            sampling = replace(sampling, seed=seed)
        return sampling, own

    def begin(self, sampling: Sampling, stop: tuple[str, ...], state: State) -> list[int]:
        """Writes a new turn down and loads the state on disk into `state`; returns the ids to feed
        it. Raises KimiError and SessionError."""
        if self.step.new:
            self.turn.sampling, self.turn.stops = asdict(sampling), list(stop)
        self.session.begin(self.step, self.head)
        return self.session.restore(state)


def with_session(given: Given, session: Session) -> Given:
    """`given`, whose thinking is the session's unless another is asked for."""
    if session.history is None or given.thinking is not None:
        return given
    return replace(given, thinking=session.history.head.thinking)


def session_bounds(session: Session, fewest: int, most: int) -> tuple[int, int]:
    """Fewest and most ids before the answer, of a prompt that alone has `fewest` to `most`."""
    if session.history is None or not session.history.turns:
        return fewest, most
    history = session.history
    return len(history.before(len(history.turns) - 1)), len(history.ids) + CLOSERS + most


def take_part(session: Session, source: Source, given: Given, tokenizer: Tokenizer | None) -> Part:
    """The turn that `given` asks for in the session.

    Raises SessionError for another model's session, UsageError for what cannot follow it, and as
    `ask` does.
    """
    config, model = source.config, model_digest(source)
    session.check_model(model, config.vocab_size)
    asked = ask(given, tokenizer, config)
    history = session.history
    if history is None or not history.turns:
        turn = begin(asked, tokenizer)
        head = Head(new_session(), model, given.chat, given.effort, asked.declaration)
        return Part(session, head, Step(turn, True), check_ids(turn.prompt, config))
    try:
        step = decide(history, asked, tokenizer)
    except UsageError as error:
        raise UsageError(f"{session.path}: {error}; give another --session to begin anew") from None
    if step.new:
        ids = history.ids
        before = [*ids[: len(ids) - step.turn.dropped], *check_ids(step.turn.prompt, config)]
    else:
        before = history.before(len(history.turns) - 1)
    return Part(session, history.head, step, before)


class Keeper:
    """What a computing run does for its session as it goes on; a context manager, main thread."""

    def __init__(self, session: Session, state: State) -> None:
        self._session, self._state, self._patience = session, state, Patience()
        self._last: float | None = None

    def __enter__(self) -> Keeper:
        self._patience.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patience.__exit__(None, None, None)

    def decided(self, token: int, reason: str | None) -> None:
        """Writes the id down. Raises KimiError."""
        self._session.decided(token, reason)
        now = time.monotonic()
        self._patience.seconds = None if self._last is None else now - self._last
        self._last = now

    def boundary(self, last: bool) -> None:
        """Between two passes, or after the last: saves what is due, then raises what interrupted
        the run meanwhile."""
        ends = last or self._patience.held  # one that comes from here on waits for the next
        self._session.boundary(self._state, ends)
        if ends:
            self._patience.check()
