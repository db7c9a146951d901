"""The table of faults names what the tests try, no more and no less."""

from __future__ import annotations

from fault_table import HEAD, TABLE, marked, read


def test_the_table_is_that_of_the_tests() -> None:
    assert TABLE.read_text("utf-8").startswith(HEAD)
    found = read(TABLE)
    assert found.keys() == marked() and list(found) == sorted(found)
    assert min(found.values()) > 0
