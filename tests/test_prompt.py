"""Prompt options to ids, and ids back to text."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_cli import prompt
from kimi_cli.builtin import TINY
from kimi_cli.chat import encode_chat
from kimi_cli.config import load_config
from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.prompt import Answer, Given, parse_ids, prompt_bounds, prompt_ids
from kimi_cli.tokenizer import Tokenizer

CONFIG = load_config(TINY)
TOKENIZER = Tokenizer.load(TINY)
END = frozenset({CONFIG.eos_token_id}) | TOKENIZER.end_ids


def ids_of(**options: Any) -> list[int]:
    return prompt_ids(Given(**options), TOKENIZER, CONFIG)


# --- one prompt, no more and no less -------------------------------------------------------------


def test_exactly_one_prompt() -> None:
    with pytest.raises(UsageError, match=r"^no prompt: give one of PROMPT"):
        Given()
    with pytest.raises(UsageError, match=r"^give one prompt, not PROMPT and --ids$"):
        Given(text="x", ids="1")
    with pytest.raises(UsageError, match="not --prompt-file and --messages"):
        Given(file=Path("a"), messages=Path("b"))
    with pytest.raises(UsageError, match="PROMPT and --ids and --prompt-file and --messages"):
        Given(text="", ids="1", file=Path("a"), messages=Path("b"))


@pytest.mark.parametrize(
    "options",
    [
        dict(raw=True, messages=Path("m")), dict(raw=True, text="x", system="s"),
        dict(ids="1", system="s"), dict(ids="1", system=""),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--raw"):
        Given(**options)


def test_chat_is_what_is_not_raw_and_not_ids() -> None:
    assert Given(text="x").chat and Given(messages=Path("m")).chat
    assert not Given(text="x", raw=True).chat and not Given(ids="1").chat


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"), [("1", [1]), ("1,2,3", [1, 2, 3]), (" 1 , 2 ", [1, 2]), ("007,0", [7, 0])]
)
def test_ids(text: str, ids: list[int]) -> None:
    assert parse_ids(text, 768) == ids


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", ",1", "1,,2", "a", "-1", "+1", "1.0", "1e2", "0x1", "1 2", "1;2", "\u0661",
     "1" * 10, "1" * 5000, "1_0", "[1]"],
)  # fmt: skip
def test_what_is_not_a_list_of_ids(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--ids wants numbers with commas between"):
        parse_ids(text, 1 << 40)


def test_ids_outside_the_vocabulary() -> None:
    assert parse_ids("767", 768) == [767]
    with pytest.raises(UsageError, match=r"^id 768 is outside the vocabulary: 0 to 767$"):
        parse_ids("1,768", 768)


def test_ids_need_no_tokenizer_and_nothing_is_added() -> None:
    given = Given(ids="5,6", thinking="max")
    assert prompt_ids(given, None, CONFIG) == [5, 6]


# --- text ----------------------------------------------------------------------------------------


def test_text_is_a_users_message() -> None:
    wanted = encode_chat(TOKENIZER, [{"role": "user", "content": "hi"}], "off")
    assert ids_of(text="hi") == wanted
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert ids_of(text="hi", system="s") == encode_chat(TOKENIZER, system, "off")
    assert ids_of(text="hi", thinking="low") == encode_chat(TOKENIZER, system[1:], "low")


def test_raw_text_is_continued_as_it_stands() -> None:
    assert ids_of(text="hi", raw=True) == TOKENIZER.encode("hi")
    text = "<|open|>message<|sep|>"
    assert not any(TOKENIZER.is_special(i) for i in ids_of(text=text, raw=True))


@pytest.mark.parametrize("raw", [True, False])
def test_only_no_characters_is_empty(raw: bool, tmp_path: Path) -> None:
    path = tmp_path / "p"
    for content in ("\n", " ", "\ufeff", "\0"):
        path.write_bytes(content.encode())
        assert ids_of(file=path, raw=raw) == ids_of(text=content, raw=raw)
    path.write_bytes(b"")
    for empty in (dict(file=path), dict(text="")):
        with pytest.raises(UsageError, match="the prompt is empty"):
            ids_of(raw=raw, **empty)


def test_files_are_read_as_stored(tmp_path: Path) -> None:
    path, text = tmp_path / "p", "\ufeffa\r\nb\rc\n\nd\n"
    path.write_bytes(text.encode())
    assert TOKENIZER.decode_bytes(ids_of(file=path, raw=True)) == text.encode()


def test_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "\ufeffh\u00e9\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "ascii"))
    assert TOKENIZER.decode_bytes(ids_of(file=Path("-"), raw=True)) == text.encode()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match=r"^-: cannot be read: standard input is closed$"):
        ids_of(file=Path("-"), raw=True)


def test_files_that_cannot_be_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with pytest.raises(UsageError, match=r"p: cannot be read: No such file"):
        ids_of(file=path)
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory"):
        ids_of(file=tmp_path)
    path.write_bytes(b"ab\xffc")
    with pytest.raises(UsageError, match=r"p: not UTF-8 at byte 2$"):
        ids_of(file=path)


def test_a_prompt_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MAX_BYTES", 5000)
    for option in ({"file": Path("/dev/zero")}, {"messages": Path("/dev/zero")}):
        with pytest.raises(UsageError, match=r"^/dev/zero: larger than 5,000 bytes, which no con"):
            ids_of(**option)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 5001), "ascii"))
    with pytest.raises(UsageError, match="-: larger than"):
        ids_of(file=Path("-"))


def test_messages(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    chat = [{"role": "user", "content": "hi"}]
    for data in (chat, {"messages": chat}):
        path.write_text(json.dumps(data))
        assert ids_of(messages=path) == ids_of(text="hi")
        assert ids_of(messages=path, system="s") == ids_of(text="hi", system="s")
    for broken in ("", "{", "nul", "[1", '{"messages": 3}', '[{"role": "king", "content": ""}]'):
        path.write_text(broken)
        with pytest.raises(UsageError) as caught:
            ids_of(messages=path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        ids_of(messages=tmp_path / "none")


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="only --ids can be used"):
        prompt_ids(Given(text="x"), None, CONFIG)


def test_tokenizer_of_another_model() -> None:
    from dataclasses import replace

    small = replace(CONFIG, vocab_size=10)
    with pytest.raises(TokenizerError, match="are not of one checkpoint"):
        prompt_ids(Given(text="zzz", raw=True), TOKENIZER, small)


@pytest.mark.parametrize("text", ["a", "hello w\u00f6rld", "\u4e16\u754c" * 40, "x" * 3000])
@pytest.mark.parametrize("options", [{}, dict(raw=True), dict(thinking="max"), dict(system="be")])
def test_bounds_hold_the_prompt(text: str, options: dict[str, Any]) -> None:
    given = Given(text=text, **options)
    fewest, most = prompt_bounds(given, CONFIG)
    assert fewest <= len(prompt_ids(given, TOKENIZER, CONFIG)) <= most


def test_bounds_hold_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}] * 40
    path.write_text(json.dumps([*turns, {"role": "user", "content": "b"}], separators=(",", ":")))
    given = Given(messages=path, thinking="high")
    fewest, most = prompt_bounds(given, CONFIG)
    assert fewest <= len(prompt_ids(given, TOKENIZER, CONFIG)) <= most


# --- answers -------------------------------------------------------------------------------------


def answer(ids: list[int], **options: Any) -> tuple[Answer, list[str]]:
    shown = Answer(TOKENIZER, Given(**{"text": "x", **options}), END)
    pieces = [shown.push(token) for token in ids]
    return shown, [*pieces, shown.finish()]


def special(name: str) -> int:
    return TOKENIZER.special(name)


def test_continuation_shows_everything_but_the_end() -> None:
    ids = TOKENIZER.encode("h\u00e9 \u4e16\u754c")
    shown, pieces = answer([*ids, special("<|open|>"), special("<|end_of_msg|>")], raw=True)
    assert shown.text == "".join(pieces) == "h\u00e9 \u4e16\u754c<|open|>"
    assert shown.reasoning == ""


def test_characters_are_shown_whole() -> None:
    ids = [TOKENIZER.encode("x")[0]]
    raw = "\u20ac".encode()
    single = {TOKENIZER.decode_bytes([i]): i for i in range(TOKENIZER.vocab_size - 256)}
    ids += [single[bytes([byte])] for byte in raw]
    _, pieces = answer(ids, raw=True)
    assert pieces == ["x", "", "", "\u20ac", ""]
    shown, pieces = answer(ids[:-1], raw=True)
    assert pieces == ["x", "", "", "\ufffd"] and shown.text == "x\ufffd"


def test_chat_hides_tags_and_keeps_reasoning_apart() -> None:
    def tag(mark: str, text: str) -> list[int]:
        return [special(f"<|{mark}|>"), *TOKENIZER.encode(text), special("<|sep|>")]

    ids = [
        *TOKENIZER.encode("hmm"), *tag("close", "think"), *tag("open", "response"),
        *TOKENIZER.encode("yes"), *tag("close", "response"), *tag("close", "message"),
        special("<|end_of_msg|>"),
    ]  # fmt: skip
    shown, pieces = answer(ids, thinking="low")
    assert (shown.reasoning, shown.text) == ("hmm", "yes")
    assert "".join(pieces) == "yes"
    shown, _ = answer(TOKENIZER.encode("just this"))
    assert (shown.reasoning, shown.text) == ("", "just this")
