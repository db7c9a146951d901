"""The cache policies against lists kept by hand, and their invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_cli.cache import Lru, Policy, Ranked


def use(cache: Policy, layer: int, *experts: int) -> int:
    """One layer's visit, best rank first; returns how many were held before it."""
    cache.visit(layer, experts, range(len(experts)))
    found = [cache.lookup((layer, expert)) for expert in experts]
    for expert, slot in zip(experts, found, strict=True):
        if slot is None:
            cache.place((layer, expert), ())
    return sum(slot is not None for slot in found)


@pytest.mark.parametrize("make", [Lru, Ranked])
def test_busy_slots_are_not_taken(make: type[Lru] | type[Ranked]) -> None:
    cache = make(2)
    first, second = cache.place((1, 0), ()), cache.place((1, 1), ())
    assert {first, second} == {0, 1}
    assert cache.place((1, 2), {first, second}) is None
    assert cache.lookup((1, 2)) is None
    assert cache.place((1, 2), {first}) == second
    assert cache.lookup((1, 0)) == first


@pytest.mark.parametrize("make", [Lru, Ranked])
def test_what_never_arrived_is_forgotten(make: type[Lru] | type[Ranked]) -> None:
    cache = make(1)
    assert cache.place((1, 0), ()) == 0
    cache.drop((1, 0))
    assert cache.lookup((1, 0)) is None
    assert cache.place((1, 1), ()) == 0


def test_least_recently_used_goes_first() -> None:
    cache = Lru(2)
    use(cache, 1, 0)
    use(cache, 1, 1)
    use(cache, 1, 0)
    use(cache, 1, 2)
    assert cache.lookup((1, 0)) is not None
    assert cache.lookup((1, 1)) is None


def test_ranked_keeps_the_best_rank_of_every_layer() -> None:
    cache = Ranked(4)  # one slot is always the one in use
    for _ in range(3):
        hits = [use(cache, layer, 0, 1, 2, 3) for layer in range(3)]
    assert hits == [1, 1, 1]
    lru = Lru(4)
    assert [use(lru, layer, 0, 1, 2, 3) for _ in range(3) for layer in range(3)] == [0] * 9


def test_ranked_keeps_some_of_a_class_it_cannot_keep_whole() -> None:
    cache = Ranked(2)
    for _ in range(3):
        hits = sum(use(cache, layer, 0) for layer in range(4))
    assert hits == 1


def test_what_is_not_used_again_fades() -> None:
    cache = Ranked(2)
    use(cache, 0, 5)
    for token in range(4):
        use(cache, 0, token)
    assert cache.lookup((0, 5)) is None


@given(
    st.sampled_from([Lru, Ranked]),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 2), st.permutations(range(5))), max_size=30),
)
def test_slots_are_never_shared(
    make: type[Lru] | type[Ranked], capacity: int, visits: list[tuple[int, list[int]]]
) -> None:
    cache = make(capacity)
    for layer, experts in visits:
        use(cache, layer, *experts[:3])
        slots = [cache.lookup((at, expert)) for at in range(3) for expert in range(5)]
        held = [slot for slot in slots if slot is not None]
        assert len(held) == len(set(held)) <= capacity
        assert all(0 <= slot < capacity for slot in held)
