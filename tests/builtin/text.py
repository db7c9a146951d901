"""The token streams of training: the text and the conversations, written once to a folder.

text.json, tiktoken.model, tokenizer_config.json      the chapters and the vocabulary
train.npy, held.npy                                   uint16 ids of the text
verses.npy                                            int64 places in train.npy where verses begin
chat.npy, talks.npy                                   conversations one after the other, and
                                                      the places where they begin
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_cli.chat import encode_pieces, message_pieces
from kimi_cli.conversation import check_turns
from kimi_cli.tokenizer import Tokenizer
from tests.builtin.bible import Chapter, read_chapters
from tests.builtin.questions import dialogs
from tests.builtin.vocabulary import count_words, train_ranks, write_tokenizer

TALKS = 24_000
"""Conversations composed; about as many tokens as the text has."""
FRAME = ("message", " role", '="', "user", '"', "assistant", "response", "system", "think")
"""Pieces of the chat format, which ought to be one token each."""

Ids = NDArray[np.uint16]


class Streams(NamedTuple):
    """What `prepare` wrote: ids, and where in them a sequence may begin."""

    train: Ids
    verses: NDArray[np.int64]
    held: Ids
    chat: Ids
    talks: NDArray[np.int64]


def prepare(out_dir: Path, seed: int = 0) -> None:
    """Writes the streams into `out_dir`; needs the program `bible`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    chapters = read_chapters()
    (out_dir / "text.json").write_text(json.dumps(chapters), "utf-8")
    composed = list(islice(dialogs(chapters, seed), TALKS))
    words = count_words("".join(c.text for c in chapters if not c.held_out))
    words += count_words("\n".join(question for question, _ in composed[: TALKS // 8]))
    for piece in FRAME:
        words[piece] += TALKS
    write_tokenizer(out_dir, train_ranks(words))
    tokenizer = Tokenizer.load(out_dir)
    train, verses = _stream(tokenizer, [c for c in chapters if not c.held_out])
    held, _ = _stream(tokenizer, [c for c in chapters if c.held_out])
    talks = [_talk(tokenizer, *dialog) for dialog in composed]
    starts = np.cumsum([0, *(len(talk) for talk in talks[:-1])])
    _save(
        out_dir, train=train, held=held, chat=np.array(list(chain.from_iterable(talks)), np.uint16)
    )
    np.save(out_dir / "verses.npy", verses)
    np.save(out_dir / "talks.npy", starts)


def load_streams(directory: Path) -> Streams:
    """What `prepare` wrote into `directory`."""
    return Streams(*(np.load(directory / f"{name}.npy") for name in Streams._fields))


def load_chapters(directory: Path) -> list[Chapter]:
    """The chapters that `prepare` wrote into `directory`."""
    data = json.loads((directory / "text.json").read_text("utf-8"))
    return [Chapter(title, tuple(verses), held_out) for title, verses, held_out in data]


def _stream(tokenizer: Tokenizer, chapters: Sequence[Chapter]) -> tuple[Ids, NDArray[np.int64]]:
    """Ids of the chapters, and the places where a heading or a verse begins."""
    ids: list[int] = []
    starts = []
    for chapter in chapters:
        lines = [chapter.title + "\n", *(verse + "\n" for verse in chapter.verses)]
        lines[-1] += "\n"
        for line in lines:
            starts.append(len(ids))
            ids += tokenizer.encode(line)
    return np.array(ids, np.uint16), np.array(starts)


def _talk(tokenizer: Tokenizer, question: str, answer: str) -> list[int]:
    turns = check_turns(
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )
    return [
        i for _, pieces in message_pieces(turns, "off") for i in encode_pieces(tokenizer, pieces)
    ]


def _save(out_dir: Path, **streams: Ids) -> None:
    for name, ids in streams.items():
        np.save(out_dir / f"{name}.npy", ids)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
