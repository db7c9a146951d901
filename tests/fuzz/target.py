"""What a fuzz target is: a function of bytes, and inputs to begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Reader = Callable[[bytes], None]
"""Reads `data` as one kind of file. Returns, or raises KimiError; anything else is a finding."""


@dataclass(frozen=True)
class Target:
    """`make` prepares a target in an empty folder of its own; `seeds` are inputs to begin with.

    An input must not take more than `seconds`, nor more memory than `megabytes`.
    """

    make: Callable[[Path], Reader]
    seeds: Callable[[], Iterable[bytes]]
    seconds: float = 2.0
    megabytes: int = 64


def either(*targets: Target) -> Target:
    """One target of several alike: the first byte of the data says whose the rest is."""

    def make(folder: Path) -> Reader:
        readers = []
        for number, target in enumerate(targets):
            own = folder / str(number)
            own.mkdir()
            readers.append(target.make(own))

        def read(data: bytes) -> None:
            if data:
                readers[data[0] % len(readers)](data[1:])

        return read

    def seeds() -> Iterable[bytes]:
        for number, target in enumerate(targets):
            yield from (b"%d%s" % (number, seed) for seed in target.seeds())

    return Target(make, seeds)


def json_variants(whole: bytes) -> list[bytes]:
    """`whole`, a JSON text, and texts of its kind that no writer makes."""
    return [
        whole,
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xef\xbb\xbf" + whole,
        whole[: len(whole) // 2],
        whole + b" x",
        whole.replace(b'"', b'"\\u0061', 1),
        whole.replace(b":", b":" + b"[" * 2000, 1),
        whole.replace(b":", b":" + b"[" * 980 + b"]" * 980 + b',"":', 1),
        whole.replace(b"1", b"9" * 5000, 1),
        whole.replace(b"1", b"1e999", 1),
        whole.replace(b"1", b"-1", 1),
        whole.replace(b"1", b"1000000000000000000", 1),
        whole.replace(b"1", b"9223372036854775807", 1),
        whole.replace(b"1", b"true", 1),
        whole.replace(b"1", b"NaN", 1),
    ]
