"""The expert cache against a list kept in order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kimi_cli.cache import ExpertCache


def test_least_recently_used_goes_first() -> None:
    cache = ExpertCache(2)
    a, b, c = (1, 0), (1, 1), (2, 0)
    first, second = cache.place(a, ()), cache.place(b, ())
    assert {first, second} == {0, 1}
    assert cache.lookup(a) == first
    assert cache.place(c, ()) == second
    assert cache.lookup(b) is None
    assert (cache.lookup(a), cache.lookup(c)) == (first, second)


def test_busy_slots_are_not_taken() -> None:
    cache = ExpertCache(2)
    first, second = cache.place((1, 0), ()), cache.place((1, 1), ())
    assert first is not None and second is not None
    assert cache.place((1, 2), {first, second}) is None
    assert cache.lookup((1, 2)) is None
    assert cache.place((1, 2), {first}) == second
    assert cache.lookup((1, 0)) == first


def test_what_never_arrived_is_forgotten() -> None:
    cache = ExpertCache(1)
    assert cache.place((1, 0), ()) == 0
    cache.drop((1, 0))
    assert cache.lookup((1, 0)) is None
    assert cache.place((1, 1), ()) == 0


def test_no_slots_hold_nothing() -> None:
    cache = ExpertCache(0)
    assert cache.lookup((0, 0)) is None
    assert cache.place((0, 0), ()) is None


KEYS = st.tuples(st.integers(0, 2), st.integers(0, 3))


@given(
    capacity=st.integers(0, 5),
    steps=st.lists(st.tuples(st.sampled_from(["use", "drop"]), KEYS, st.sets(st.integers(0, 4)))),
)
def test_against_a_list(capacity: int, steps: list[tuple[str, tuple[int, int], set[int]]]) -> None:
    cache, slots = ExpertCache(capacity), dict[tuple[int, int], int]()
    order: list[tuple[int, int]] = []  # least recently used first
    for step, key, busy in steps:
        found = cache.lookup(key)
        assert found == slots.get(key)
        if found is not None:
            order.remove(key)
            order.append(key)
            if step == "drop":
                cache.drop(key)
                order.remove(key)
                del slots[key]
            continue
        slot = cache.place(key, busy)
        if len(slots) < capacity:
            assert slot is not None and slot not in slots.values()
        else:
            victim = next((k for k in order if slots[k] not in busy), None)
            assert slot == (None if victim is None else slots[victim])
            if victim is not None:
                order.remove(victim)
                del slots[victim]
        if slot is not None:
            assert 0 <= slot < capacity
            slots[key] = slot
            order.append(key)
