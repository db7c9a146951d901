"""Bigram and trigram models with interpolated Kneser-Ney smoothing: the baselines.

Chen and Goodman (1999): one absolute discount per order, n1 / (n1 + 2 n2) of its counts; lower
orders count the different contexts of a token, not its occurrences; the lowest mixes with the
uniform distribution.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log

Context = tuple[int, ...]


class KneserNey:
    """A model of `order` tokens (2 is a bigram) over `vocab` ids, counted on `ids`."""

    def __init__(self, ids: Sequence[int], order: int, vocab: int) -> None:
        self._order, self._vocab = order, vocab
        grams = set(zip(*(ids[n:] for n in range(order)), strict=False))
        counts: list[Counter[Context]] = [Counter()] * order
        counts[order - 1] = Counter(zip(*(ids[n:] for n in range(order)), strict=False))
        for size in range(order - 1, 0, -1):
            counts[size - 1] = Counter(gram[1:] for gram in grams)
            grams = set(counts[size - 1])
        self._counts = counts
        self._discounts = [_discount(table) for table in counts]
        self._totals: list[defaultdict[Context, int]] = []
        self._kinds: list[defaultdict[Context, int]] = []
        for table in counts:
            totals: defaultdict[Context, int] = defaultdict(int)
            kinds: defaultdict[Context, int] = defaultdict(int)
            for gram, count in table.items():
                totals[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self._totals.append(totals)
            self._kinds.append(kinds)

    def probability(self, context: Context, token: int) -> float:
        """Of `token` after the last order - 1 ids of `context`."""
        p = 1 / self._vocab
        for size in range(1, self._order + 1):
            before = context[len(context) - size + 1 :]
            if len(before) < size - 1:
                break
            total = self._totals[size - 1].get(before, 0)
            if not total:
                continue
            discount = self._discounts[size - 1]
            count = self._counts[size - 1].get((*before, token), 0)
            left = discount * self._kinds[size - 1][before] / total
            p = max(count - discount, 0) / total + left * p
        return p

    def loss(self, ids: Sequence[int], length: int) -> float:
        """Mean nats per token, in sequences of `length` that begin with one id of context."""
        total = count = 0.0
        for start in range(0, len(ids) - length, length):
            part = list(ids[start : start + length + 1])
            for n in range(1, len(part)):
                context = tuple(part[max(0, n - self._order + 1) : n])
                total -= log(self.probability(context, part[n]))
                count += 1
        return total / count


def _discount(table: Counter[Context]) -> float:
    """n1 / (n1 + 2 n2)."""
    seen = Counter(table.values())
    return seen[1] / (seen[1] + 2 * seen[2]) if seen[1] else 0.5
