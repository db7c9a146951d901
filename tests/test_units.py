"""Sizes and durations, read and written."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_cli.errors import UsageError
from kimi_cli.units import GIB, KIB, MIB, format_duration, format_size, parse_size

SIZES = {
    "8G": 8 * GIB, "8GiB": 8 * GIB, "8gib": 8 * GIB, "8GB": 8 * GIB, "8g": 8 * GIB,
    "8Gi": 8 * GIB, "1.5G": 3 * GIB // 2, "160M": 160 * MIB, "160 MiB": 160 * MIB, "64k": 64 * KIB,
    "2T": 2048 * GIB, "1073741824": GIB, "100B": 100, "100 b": 100, " 1 G ": GIB, "0.5k": 512,
    "1": 1,
}  # fmt: skip
BAD = [
    "", " ", "0", "0G", "-1", "-8G", "+8G", "8X", "8GG", "G8", "8,5G", "1e3", "0x10", "nan", "inf",
    "auto", "8 G G", "1.G", ".5G", "1.2.3", "8G\x00", "\u0668G", "8\u00a0GX", "0.0000001k",
    "1" * 20, "1" * 5000 + "G",
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert str(caught.value).startswith(f"size {text!r} is not understood: write 8G")


@given(st.integers(1, 10**18))
def test_plain_bytes_are_exact(count: int) -> None:
    assert parse_size(str(count)) in (count, int(float(count)))
    assert parse_size(str(count % (1 << 53) or 1)) == (count % (1 << 53) or 1)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"),
        (99 * MIB, "99.00 MiB"), (100 * MIB, "100 MiB"), (8 * GIB, "8.00 GiB"),
        (3 * GIB // 2, "1.50 GiB"), (1023 * MIB, "1023 MiB"), (1_560_936_091_448, "1.42 TiB"),
        (5000 * 1024 * GIB, "5000 TiB"), (-3 * MIB, "-3.00 MiB"),
    ],
)  # fmt: skip
def test_sizes_as_people_read_them(count: int, text: str) -> None:
    assert format_size(count) == text


@given(st.integers(0, 1 << 50))
@example(1_098_974_756_864)
def test_what_is_written_can_be_read(count: int) -> None:
    text = format_size(count)
    number, unit = text.split()
    assert abs(float(number)) < 1024 or unit == "TiB"
    if count:
        assert parse_size(text) == pytest.approx(count, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"), (0.423, "0.42 s"), (9.994, "9.99 s"), (10, "10 s"), (59.4, "59 s"),
        (59.6, "1 min 00 s"), (60, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "1 h 00 min"),
        (3600, "1 h 00 min"), (8070, "2 h 14 min"), (86_399, "23 h 59 min"), (86_400, "1 d 0 h"),
        (273_600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_number_just_below_a_unit_is_not_written_as_its_full_count() -> None:
    assert format_duration(9.999) == "10 s"
