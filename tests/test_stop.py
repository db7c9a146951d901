"""Stop texts: in any text, however it is cut; and as `kimi generate --stop`."""

from __future__ import annotations

from itertools import pairwise

import pytest
from command import generate, kimi, linked_model, sentence
from hypothesis import given
from hypothesis import strategies as st

from kimi_cli.builtin import PSALM
from kimi_cli.config import load_config
from kimi_cli.prompt import Answer, Given
from kimi_cli.stop import StopTexts
from kimi_cli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(PSALM)
END = frozenset({load_config(PSALM).eos_token_id}) | TOKENIZER.end_ids


def naive(text: str, texts: list[str]) -> tuple[str, bool]:
    """What is shown of the whole text, and whether it was stopped."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in texts if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def streamed(pieces: list[str], texts: list[str]) -> tuple[str, bool]:
    """The same, piece by piece; nothing that is shown may be part of a later stop text."""
    scanner, shown = StopTexts(texts), ""
    for piece in pieces:
        shown += scanner.push(piece)
    return shown + scanner.finish(), scanner.found


def cut(text: str, places: list[int]) -> list[str]:
    """`text` in pieces."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


LETTERS = st.text("ab", max_size=24)


@given(
    LETTERS, st.lists(st.text("ab", min_size=1, max_size=6), max_size=3), st.lists(st.integers(0))
)
def test_any_text_in_any_pieces(text: str, texts: list[str], places: list[int]) -> None:
    assert streamed(cut(text, places), texts) == naive(text, texts)
    assert streamed(list(text), texts) == naive(text, texts)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_text(text: str, texts: list[str]) -> None:
    scanner, passed = StopTexts(texts), ""
    for at, character in enumerate(text, 1):
        passed += scanner.push(character)
        if scanner.found:
            break
        held = text[len(passed) : at]
        starts = {stop[:size] for stop in texts for size in range(1, len(stop))}
        assert not held or held in starts
        assert not any(text[:at].endswith(start) for start in starts if len(start) > len(held))


@pytest.mark.parametrize(
    ("texts", "pieces", "shown"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""]),
        (["END"], ["one E", "NE", "ND!"], ["one ", "EN", ""]),
        (["END"], ["EN"], [""]),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        (["aab"], ["aaaa", "b"], ["aa", ""]),
        (["abab", "ba"], ["ab", "a"], ["", "a"]),  # "ba" is complete first
        (["c", "abc"], ["xab", "c"], ["x", ""]),  # both at once: the longer
        (["abc", "c"], ["xab", "c"], ["x", ""]),
        (["\u4e16\u754c"], ["\u4e16", "\u4e16", "\u754c"], ["", "\u4e16", ""]),
        ([], ["abc"], ["abc"]),
    ],
)
def test_pieces(texts: list[str], pieces: list[str], shown: list[str]) -> None:
    scanner = StopTexts(texts)
    assert [scanner.push(piece) for piece in pieces] == shown


def test_the_rest_comes_at_the_end() -> None:
    scanner = StopTexts(["END"])
    assert (scanner.push("x EN"), scanner.finish(), scanner.found) == ("x ", "EN", False)
    assert (scanner.push("END"), scanner.push("more"), scanner.finish()) == ("", "", "")
    assert scanner.found


def test_a_long_stop_text_costs_a_step_a_character() -> None:
    scanner = StopTexts(["a" * 50_000 + "b"])
    for _ in range(100):
        assert scanner.push("a" * 500) == ""
    assert len(scanner.push("c")) == 50_001


# --- in an answer --------------------------------------------------------------------------------


def bytewise(text: str) -> list[int]:
    """Ids of `text`, one a byte."""
    single = {TOKENIZER.decode_bytes([i]): i for i in range(TOKENIZER.vocab_size - 256)}
    return [single[bytes([byte])] for byte in text.encode()]


def said(ids: list[int], stop: list[str], **options: object) -> tuple[int, Answer]:
    """How many ids were taken, and the answer."""
    shown = Answer(TOKENIZER, Given(**{"text": "x", **options}), END, stop)  # type: ignore[arg-type]
    taken, text = 0, ""
    for token in ids:
        text += shown.push(token)
        taken += 1
        if shown.stopped:
            break
    text += shown.finish()
    assert text == shown.text
    return taken, shown


@pytest.mark.parametrize("options", [{}, {"raw": True}])
def test_stop_text_made_of_bytes(options: dict[str, object]) -> None:
    ids = bytewise("h\u00e9llo \u4e16\u754c\u20ac!")
    taken, shown = said(ids, ["\u754c\u20ac"], **options)
    assert shown.text == "h\u00e9llo \u4e16" and taken == len(
        "h\u00e9llo \u4e16\u754c\u20ac".encode()
    )
    _, shown = said(ids[:-2], ["\u20ac"], **options)
    assert shown.text == "h\u00e9llo \u4e16\u754c\ufffd" and not shown.stopped
    _, shown = said(ids, ["!!"], **options)
    assert shown.text == "h\u00e9llo \u4e16\u754c\u20ac!" and not shown.stopped


def test_thinking_is_not_searched() -> None:
    def tag(mark: str, text: str) -> list[int]:
        return [
            TOKENIZER.special(f"<|{mark}|>"),
            *TOKENIZER.encode(text),
            TOKENIZER.special("<|sep|>"),
        ]

    ids = [*bytewise("a STOP b"), *tag("close", "think"), *tag("open", "response")]
    taken, shown = said([*ids, *bytewise("c STOP d")], ["STOP"], thinking="low")
    assert (shown.reasoning, shown.text) == ("a STOP b", "c ")
    assert taken == len(ids) + len("c STOP")


# --- as a command --------------------------------------------------------------------------------

RAW = ("Hello there", "--raw", "--temperature", 3, "--seed", 3, "--min-p", 0.0, "-n", 60)


def test_generation_ends_with_the_stop_text() -> None:
    whole = generate(*RAW, "--ignore-eos")
    text = whole["text"]
    assert len(text) > 60 and whole["stop_reason"] == "length"
    for begin, length in ((20, 1), (25, 4), (11, 9), (0, 3)):
        stop = text[begin : begin + length]
        result = generate(*RAW, "--ignore-eos", "--stop", stop, "--stop", "nowhere" * 9)
        end = text.index(stop)
        assert (result["text"], result["stop_reason"]) == (text[:end], "stop")
        ids = result["ids"]
        assert whole["ids"][: len(ids)] == ids and len(ids) < len(whole["ids"])
        streams = [Answer(TOKENIZER, Given(text="x", raw=True), END) for _ in range(2)]
        for token in ids:
            streams[0].push(token)
        for token in ids[:-1]:
            streams[1].push(token)
        assert stop in streams[0].text and stop not in streams[1].text
        plain = kimi("generate", *RAW, "--ignore-eos", "--stop", stop, "--quiet")
        assert plain.stdout.decode() == text[:end] + "\n"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    for ended in ([], ["--ignore-eos"]):
        before = generate(*RAW, *ended)
        stop = before["text"][-3:] + "\U0001f600"
        result = generate(*RAW, *ended, "--stop", stop)
        assert result | {"stats": 0} == before | {"stats": 0}
    whole = before["text"]
    assert kimi("generate", *RAW, *ended, "--stop", stop, "--quiet").stdout.decode() == whole + "\n"


def test_stop_texts_that_cannot_be(tmp_path: object) -> None:
    assert "--stop wants a text" in sentence(kimi("generate", "x", "--stop", "", check=2))
    model = linked_model(tmp_path / "m", ["tiktoken.model"], PSALM)  # type: ignore[operator]
    done = kimi("generate", "-m", model, "--ids", "1", "--stop", "x", check=3)
    assert "no tiktoken.model: --stop cannot" in sentence(done)
