"""Which experts stay in memory: a pure policy over slots. Reads nothing, holds no weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

Key = tuple[int, int]
"""(layer, expert)"""


class ExpertCache:
    """Slots 0..capacity-1, each empty or holding one expert; the least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity))
        self._slots: OrderedDict[Key, int] = OrderedDict()

    def lookup(self, key: Key) -> int | None:
        """The slot that holds `key`, now its most recent use; None if it is not held."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
        return slot

    def place(self, key: Key, busy: Container[int]) -> int | None:
        """A slot for `key`, which is not held: a free one, else the best victim not in `busy`."""
        if self._free:
            slot = self._free.pop()
        else:
            victim = next((k for k, s in self._slots.items() if s not in busy), None)
            if victim is None:
                return None
            slot = self._slots.pop(victim)
        self._slots[key] = slot
        return slot

    def drop(self, key: Key) -> None:
        """Forgets `key`, whose bytes never arrived."""
        self._free.append(self._slots.pop(key))
