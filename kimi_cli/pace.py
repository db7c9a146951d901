"""How far a run is and how long it will take, from what it has done so far. No I/O.

    prompt  | pass: layer, layer, ..., | pass: ..., head |   all of it is one stretch of time
    answer  | token 2: layer, ..., head | token 3: ... |     each token is one

The first token of the answer comes with the end of the prompt; every other takes a pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LOAD, PREFILL, TOKEN = "load", "prefill", "token"
RECENT = 8
"""Tokens whose mean time foretells the next."""
FEW = 3
"""Layers after which what was measured is worth more than what was expected."""


@dataclass(frozen=True)
class Expected:
    """Seconds that the prompt and each token should take, and what limits a token, "disk" or
    "compute". `guess`: nothing of it was measured."""

    prompt_seconds: float
    token_seconds: float
    limit: str
    guess: bool

    def total(self, tokens: int) -> float:
        """Seconds until `tokens` tokens are generated; the first comes with the prompt."""
        return self.prompt_seconds + max(tokens - 1, 0) * self.token_seconds


@dataclass(frozen=True)
class Moment:
    """How far a phase is: `done` of `total` bytes (load) or prompt tokens (prefill), or the token
    in hand of all; and `layer` of `layers` in this pass. `bytes` were read in `seconds` since the
    phase or the token began. `left`, `run_left`: seconds until it ends, and until the last token
    that may come; None: not known."""

    phase: str
    done: int
    total: int
    layer: int
    layers: int
    bytes: int
    seconds: float
    left: float | None
    run_left: float | None

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class Pace:
    """The clock of one prompt: `prompt` tokens to feed in passes of `chunk`, then up to
    `max_tokens` tokens, `resumed` of which are there already. `read` counts bytes read so far."""

    def __init__(
        self,
        prompt: int,
        chunk: int,
        resumed: int,
        max_tokens: int,
        read: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompt, self._chunk = prompt, max(chunk, 1)
        self._passes = -(-prompt // self._chunk)
        self._resumed, self._max_tokens = resumed, max_tokens
        self._read, self._clock = read, clock
        self._pass = self._layers = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.expected: Expected | None = None
        self.begin()

    def begin(self) -> None:
        """A phase or a token begins now."""
        self._begun, self._base = self._clock(), self._read()

    def load(self, done: int, total: int) -> Moment:
        """`done` of `total` bytes of the pinned trunk are in memory."""
        seconds = self._clock() - self._begun
        left = seconds * (total - done) / done if done else None
        return Moment(LOAD, done, total, 0, 0, done, seconds, left, None)

    def layer(self, done: int, units: int) -> Moment:
        """`done` of the `units` layers of a pass are computed; with the last the pass ends."""
        now = self._clock()
        seconds, read = now - self._begun, self._read() - self._base
        self._layers += 1
        if self._pass < self._passes:
            moment = self._prefill(done, units, seconds, read)
        else:
            moment = self._token(done, units, seconds, read)
        if done == units:
            if self._pass >= self._passes:
                self._recent.append(seconds)
            self._pass += 1
            if self._pass >= self._passes:
                self.begin()
        return moment

    def token_seconds(self) -> float | None:
        """Seconds that a token takes: of those of late, or what was expected."""
        if self._recent:
            return sum(self._recent) / len(self._recent)
        return self.expected.token_seconds if self.expected else None

    def _prefill(self, done: int, units: int, seconds: float, read: int) -> Moment:
        fed = self._pass * self._chunk
        piece = min(self._chunk, self._prompt - fed)
        # the disk takes as long for a short pass as for a long one, the cores do not
        passes = (self._pass + done / units) / self._passes
        tokens = (fed + piece * done / units) / self._prompt
        share = (passes + tokens) / 2
        left: float | None = seconds * (1 - share) / share
        if self._layers < FEW and done < units:
            left = max(self.expected.prompt_seconds - seconds, 0.0) if self.expected else None
        ready = fed + piece if done == units else fed
        run = self._after(left, self._max_tokens - self._resumed - 1)
        return Moment(PREFILL, ready, self._prompt, done, units, read, seconds, left, run)

    def _token(self, done: int, units: int, seconds: float, read: int) -> Moment:
        number = self._resumed + 2 + self._pass - self._passes
        whole = self.token_seconds()
        if whole is None or (not self._recent and done >= FEW):
            whole = seconds * units / done
        left = whole * (1 - done / units)
        run: float | None = left + whole * (self._max_tokens - number)
        return Moment(TOKEN, number, self._max_tokens, done, units, read, seconds, left, run)

    def _after(self, left: float | None, tokens: int) -> float | None:
        """Seconds until the last of `tokens` further tokens, if it begins in `left` seconds."""
        each = self.token_seconds()
        if left is None or (each is None and tokens > 0):
            return None
        return left + max(tokens, 0) * (each or 0.0)
