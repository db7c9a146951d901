"""How a token is chosen from logits: greedily, or drawn at random from what the filters leave.

A draw depends on the logits, the seed and the token's position alone: a sequence that is continued
elsewhere, or cut otherwise into chunks, goes on as it would have. The arithmetic is C's (kimi.h).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from kimi_cli import native
from kimi_cli.errors import NumericError, UsageError
from kimi_cli.native import F32, I32

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """What to draw from: logits divided by `temperature`, then top-k, top-p and min-p, in turn.

    `temperature` 0 is greedy, whatever the rest. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing;
    `min_p` is relative to the largest probability. Raises UsageError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise UsageError(
                f"--temperature wants 0 (greedy) to {MAX_TEMPERATURE:g}, not {self.temperature:g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p wants more than 0, at most 1 (all), not {self.top_p:g}")
        if self.top_k < 0:
            raise UsageError(f"--top-k wants 0 (all) or more, not {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"--min-p wants 0 (all) to 1, not {self.min_p:g}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed wants 0 to {MAX_SEED}, not {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, the lowest id on a tie."""
        return self.temperature == 0.0

    def seeded(self) -> Sampling:
        """The same with a seed, from the system's randomness if it has none and needs one."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4), "little"))


GREEDY = Sampling()


class Sampler:
    """Chooses ids among `vocab_size`; 8 bytes of scratch for each, none when greedy.

    Not for two threads at once.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.sampling = sampling.seeded()
        size = 0 if sampling.greedy else vocab_size
        self._weights: F32 = np.full(size, 0, np.float32)  # touched, so that the plan counts it
        self._order: I32 = np.full(size, 0, np.int32)

    def choose(self, logits: F32, index: int) -> int:
        """The id at position `index` of the sequence (that of its first token is 0), from logits
        [vocab_size]. Raises NumericError when one is not finite."""
        how = self.sampling
        if how.seed is None or how.greedy:
            token = native.argmax(logits)
            if token < 0:
                raise NumericError("the logits hold NaN or infinity: no token can be chosen")
            return token
        return native.sample(
            logits,
            how.temperature,
            min(how.top_k, logits.size),
            how.top_p,
            how.min_p,
            how.seed,
            index,
            self._weights,
            self._order,
        )
