"""What the built-in checkpoint's text goes through before training; no torch, no `bible`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kimi_cli.tokenizer import Tokenizer
from tests.builtin.bible import Chapter, parse_chapters
from tests.builtin.ngram import KneserNey
from tests.builtin.questions import TOPICS, dialogs
from tests.builtin.vocabulary import count_words, encode_plain, train_ranks, write_tokenizer

TEXT = "In the beginning God created the heaven and the earth.\nAnd the 1611 men's ark.\n\n"


def test_the_vocabulary_is_what_the_tokenizer_reads(tmp_path: Path) -> None:
    tokens = train_ranks(count_words(TEXT * 3), 300)
    assert len(set(tokens)) == 300
    write_tokenizer(tmp_path, tokens)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 300 + 256
    assert tokenizer.special("<|open|>") == 303
    for line in (TEXT, TEXT.upper(), " \n\n  they've 12345 , ;\n", "zyx!?"):
        assert tokenizer.encode(line) == encode_plain(line, tokens)


def test_text_that_is_not_ascii_is_refused() -> None:
    with pytest.raises(ValueError, match="ASCII"):
        count_words("caf\xe9")


def test_whatever_is_not_a_verse_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not a verse"):
        parse_chapters("Ge1:1 In the beginning.\n1 In the beginning.")
    with pytest.raises(RuntimeError, match="wanted 66"):
        parse_chapters("Ge1:1 In the beginning.")


def test_an_n_gram_model_is_a_distribution() -> None:
    ids = np.random.default_rng(1).zipf(1.5, 4000).clip(max=50).tolist()
    for order in (1, 2, 3):
        model = KneserNey(ids, order, 60)
        for context in ((1, 2), (50, 1), (59, 59)):
            total = sum(model.probability(context, token) for token in range(60))
            assert total == pytest.approx(1)
        assert 0 < model.loss(ids, 256) < np.log(60)


def test_no_answer_comes_from_a_chapter_that_is_held_out() -> None:
    chapters = [
        Chapter(
            f"Genesis {n}",
            (
                *(f"And the {topic} of chapter {n} was very good." for topic in TOPICS.split()),
                "Obed the son of Boaz came.",
            ),
            n % 3 == 0,
        )
        for n in range(1, 40)
    ]
    held = {verse for c in chapters if c.held_out for verse in c.verses[:-1]}
    found = list(islice(dialogs(chapters, 1), 500))
    assert found == list(islice(dialogs(chapters, 1), 500))
    assert not held & {answer for _, answer in found}
    assert ("Who was the father of Obed?", "Boaz was the father of Obed.") in found
