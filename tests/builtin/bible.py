"""The text: the King James Bible of 1611, public domain, as Debian's `bible-kjv` prints it.

It yields books of chapters of verses and knows nothing of tokens.
"""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

_NAMES = (
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings "
    "2_Kings 1_Chronicles 2_Chronicles Ezra Nehemiah Esther Job Psalm Proverbs Ecclesiastes "
    "Song_of_Solomon Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah "
    "Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans "
    "1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians "
    "2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John "
    "2_John 3_John Jude Revelation"
)  # the 66 books in their order, a blank written as an underscore
HELD_OUT_EVERY, HELD_OUT_FIRST = 25, 12
"""Chapter n, counted through all books, is held out if n % HELD_OUT_EVERY == HELD_OUT_FIRST."""

_LINE = re.compile(r"([1-3]?[A-Z][A-Za-z]*?)(\d+):(\d+) (.+)")


class Chapter(NamedTuple):
    """One chapter; `held_out` keeps it out of everything that is trained on."""

    title: str
    verses: tuple[str, ...]
    held_out: bool

    @property
    def text(self) -> str:
        """A heading, a verse a line, and an empty line."""
        return "\n".join((self.title, *self.verses, "", ""))


def read_chapters() -> list[Chapter]:
    """All 1,189 chapters in their order. Raises RuntimeError if `bible` prints anything else."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse_chapters(printed)


def parse_chapters(printed: str) -> list[Chapter]:
    """The chapters of lines such as `Ge1:1 In the beginning ...`."""
    names = [name.replace("_", " ") for name in _NAMES.split()]
    books: list[str] = []
    found: dict[tuple[str, int], list[str]] = {}
    for line in printed.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise RuntimeError(f"not a verse: {line!r}")
        book, chapter, _, verse = match.groups()
        if book not in books:
            books.append(book)
        found.setdefault((book, int(chapter)), []).append(" ".join(verse.split()))
    if len(books) != len(names) or len(found) != 1189:
        raise RuntimeError(f"{len(books)} books and {len(found)} chapters, wanted 66 and 1189")
    title = dict(zip(books, names, strict=True))
    return [
        Chapter(f"{title[book]} {chapter}", tuple(verses), n % HELD_OUT_EVERY == HELD_OUT_FIRST)
        for n, ((book, chapter), verses) in enumerate(found.items())
    ]
