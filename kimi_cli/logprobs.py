"""The log-probabilities of generated tokens and of the best alternatives, kept as they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kimi_cli import native
from kimi_cli.native import F32, F64, I32


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token and of the best `top`, (id, log-probability), in order.

    They are the model's own: temperature and filters do not change them.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Logprobs:
    """Room for `tokens` tokens with `top` alternatives each, made before the first of them.

    Not for two threads at once.
    """

    def __init__(self, tokens: int, top: int) -> None:
        # Touched, so that the plan counts it.
        self._ids: I32 = np.full((tokens, 1), -1, np.int32)
        self._values: F64 = np.full((tokens, 1), 0, np.float64)
        self._top_ids: I32 = np.full((tokens, top), 0, np.int32)
        self._top_values: F64 = np.full((tokens, top), 0, np.float64)

    def record(self, number: int, logits: F32, token: int) -> None:
        """Generated token `number`, from 0, was `token`, chosen from logits [vocab].

        Raises NumericError when a logit is not finite.
        """
        self._ids[number] = token
        native.logprobs(
            logits,
            self._ids[number],
            self._values[number],
            self._top_ids[number],
            self._top_values[number],
        )

    def first(self, count: int) -> Iterator[TokenLogprob]:
        """The first `count` generated tokens."""
        for number in range(count):
            ids, values = self._top_ids[number].tolist(), self._top_values[number].tolist()
            token, value = int(self._ids[number, 0]), float(self._values[number, 0])
            yield TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
