"""Tool calls: the chat format's own encoding read back, what is malformed, and junk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli.builtin import TINY
from kimi_cli.calls import call_object, parse_calls
from kimi_cli.channels import AnswerParser
from kimi_cli.chat import Control, Piece, call_pieces, encode_pieces, piece_text
from kimi_cli.conversation import check_turns
from kimi_cli.generate import Outcome
from kimi_cli.prompt import Answer, Given
from kimi_cli.result import result_object
from kimi_cli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(TINY)
OPEN, CLOSE, SEP, END = Control


def tag(mark: Control, text: str) -> tuple[Piece, ...]:
    return (mark, text, SEP)


def call(*inside: Piece, head: str = 'call tool="f" index="1"') -> tuple[Piece, ...]:
    return (*tag(OPEN, head), *inside, *tag(CLOSE, "call"))


def argument(text: str, head: str = 'argument key="a" type="number"') -> tuple[Piece, ...]:
    return (*tag(OPEN, head), *([text] if text else []), *tag(CLOSE, "argument"))


def encoded(*calls: tuple[str, object]) -> list[Piece]:
    """The tools section that the chat format makes of calls."""
    given = [{"function": {"name": name, "arguments": values}} for name, values in calls]
    turn = check_turns([{"role": "assistant", "content": "", "tool_calls": given}])[0]
    return list(call_pieces(turn))


def said(pieces: Sequence[Piece]) -> list[Piece]:
    """`pieces` as the parser of an answer hands them on, from their ids."""
    parser = AnswerParser(TOKENIZER)
    closed = (*tag(CLOSE, "response"), *tag(OPEN, "tools"))
    ids = encode_pieces(TOKENIZER, ["so", *closed, *pieces, *tag(CLOSE, "tools"), END])
    for token in ids:
        parser.push(token)
    return parser.tools


VALUES = {
    "city": "Köln <|close|>argument<|sep|> \"&amp;\" 'x'\n",
    'k"ey &quot;': "",
    "n": -1.5,
    "big": 10**30,
    "yes": True,
    "none": None,
    "deep": {"a": [1, {"b": "<|open|>"}]},
    "list": [],
}


def test_calls_come_back() -> None:
    calls, rest = parse_calls(said(encoded(('get & "it"', VALUES), ("now", {}))))
    assert rest == ""
    assert [c["id"] for c in calls] == ["call_1", "call_2"]
    assert [c["type"] for c in calls] == ["function", "function"]
    assert [c["function"]["name"] for c in calls] == ['get & "it"', "now"]
    assert json.loads(calls[0]["function"]["arguments"]) == VALUES
    assert calls[1]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"a": NaN}', "<|close|>json<|sep|>"])
def test_arguments_that_are_no_object_come_back_as_they_are(text: str) -> None:
    calls, rest = parse_calls(said(encoded(("f", text))))
    assert (calls[0]["function"], rest) == ({"name": "f", "arguments": text}, "")


def test_digits_are_kept_as_written() -> None:
    calls, _ = parse_calls(call(*argument("1.50")))
    assert calls[0]["function"]["arguments"] == '{"a":1.50}'


MALFORMED = {
    "no name": call(head='call index="1"'),
    "an empty name": call(head='call tool=""'),
    "a bad attribute": call(head="call tool=f"),
    "an attribute twice": call(head='call tool="f" tool="g"'),
    "no end": tag(OPEN, 'call tool="f"'),
    "text in it": call("x"),
    "a number that is none": call(*argument("one")),
    "a boolean for a number": call(*argument("true")),
    "infinity": call(*argument("Infinity")),
    "too large": call(*argument("1e999")),
    "no type": call(*argument("1", 'argument key="a"')),
    "no key": call(*argument("1", 'argument type="number"')),
    "another type": call(*argument("1", 'argument key="a" type="date"')),
    "a key twice": call(*argument("1"), *argument("2")),
    "an argument cut off": call(*tag(OPEN, 'argument key="a" type="string"'), "x"),
    "another section": call(*tag(OPEN, "x"), *tag(CLOSE, "x")),
    "both kinds": call(*argument("1"), *tag(OPEN, "json"), "{}", *tag(CLOSE, "json")),
    "a stray end": tag(CLOSE, "call"),
    "words": ("I call f",),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_what_is_malformed_comes_as_it_came(name: str) -> None:
    bad, good = MALFORMED[name], call(*argument("1"))
    whole = [{"name": "f", "arguments": '{"a":1}'}]
    for pieces in ([*bad], [*good, *bad], [*bad, *good], [*good, "\n", *bad, "\n", *good]):
        calls, rest = parse_calls(pieces)
        count = (len(pieces) - len(bad)) // len(good)
        assert [c["function"] for c in calls] == whole * count
        assert rest.strip() == piece_text(bad)


def test_the_object_has_what_there_is() -> None:
    assert call_object([]) == {}
    assert list(call_object(call())) == ["tool_calls"]
    assert call_object(["x"]) == {"tool_text": "x"}


def result(*pieces: Piece, stop: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The JSON of an answer, and the text that is shown of it without --json."""
    asked = Given(text="x")
    shown = Answer(TOKENIZER, asked, TOKENIZER.end_ids, stop)
    ids, text = encode_pieces(TOKENIZER, pieces), ""
    for token in ids:
        text += shown.push(token)
        if shown.stopped:
            break
    text += shown.finish()
    return result_object([], Outcome(ids), shown, asked, {}), text


def test_json_has_calls_apart_from_the_text() -> None:
    tools = encoded(("f", {"a": 1}))
    section = (*tag(CLOSE, "response"), *tag(OPEN, "tools"), *tools, *tag(CLOSE, "tools"), END)
    found, shown = result("so", *section)
    assert found["text"] == "so" and shown == "so" + piece_text(tools)
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert "tool_text" not in found
    found, _ = result("so", *section[:6], *tag(OPEN, 'call tool="f" index="1"'))
    assert found["text"] == "so" and "tool_calls" not in found
    assert found["tool_text"] == piece_text(tag(OPEN, 'call tool="f" index="1"'))
    found, _ = result("one. two", *section, stop=(". t",))
    assert found["text"] == "one" and not {"tool_calls", "tool_text"} & set(found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
tags = st.sampled_from(
    ["call", 'call tool="f"', 'argument key="a" type="number"', "argument", "json", "tools", "x"]
)
junk = st.lists(
    st.sampled_from([OPEN, CLOSE, SEP, END])
    | st.text(max_size=3)
    | st.tuples(st.sampled_from([OPEN, CLOSE]), tags, st.just(SEP)),
    max_size=12,
).map(
    lambda found: [p for part in found for p in (part if isinstance(part, tuple) else (part,)) if p]
)


def valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values)), max_size=3)
)
def test_any_call_comes_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    found, rest = parse_calls(encoded(*calls))
    assert rest == ""
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls


@settings(deadline=None, max_examples=200)
@given(junk)
def test_nothing_of_junk_is_lost_or_made_up(pieces: list[Piece]) -> None:
    calls, rest = parse_calls(pieces)
    text = piece_text(pieces)
    assert len(rest) <= len(text) and all(c["function"]["name"] in text for c in calls)
    if not calls:
        assert rest.split() == text.split() or "".join(rest.split()) == "".join(text.split())
