"""What a session's next run does: printed, continued, added or refused. Tables of cases."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_cli.builtin import PSALM
from kimi_cli.chat import Control, call_pieces, encode_chat, encode_pieces, piece_text
from kimi_cli.closers import closers
from kimi_cli.conversation import check_turns
from kimi_cli.errors import UsageError
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import Asked, Head, History, Said, Step, Turn, begin, decide

TOKENIZER = Tokenizer.load(PSALM)
OPEN, CLOSE, SEP, END = Control
EOS = TOKENIZER.special("[EOS]")


def user(text: str) -> Said:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Said:
    return {"role": "assistant", "content": text, **more}


def ids_of(*pieces: Any) -> list[int]:
    return encode_pieces(TOKENIZER, pieces)


def tag(mark: Control, text: str) -> tuple[Any, ...]:
    return (mark, text, SEP)


WHOLE = (*tag(CLOSE, "response"), *tag(CLOSE, "message"), END)


def session(thinking: str = "off", **first: Any) -> History:
    """A session with one turn that is not answered yet."""
    wanted = Asked(thinking=thinking, **(first or {"text": "hi"}))
    head = Head("s", "m", wanted.chat, thinking, wanted.declaration)
    return History(head, [begin(wanted, TOKENIZER)])


def answered(*pieces: Any, reason: str | None = "eos", thinking: str = "off", **first: Any) -> Any:
    history = session(thinking, **first)
    history.turns[-1].ids = ids_of(*(pieces or ("hello", *WHOLE)))
    history.turns[-1].reason = reason
    return history


def next_step(history: History, **wanted: Any) -> Step:
    return decide(history, Asked(**wanted), TOKENIZER)


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode_bytes(ids).decode()


def whole(history: History, step: Step) -> str:
    """All of the conversation as it will have been read."""
    history.turns.append(step.turn)
    return text_of(history.ids)


# --- the first turn ------------------------------------------------------------------------------


def test_a_session_begins_with_the_prompt_it_would_have_without_one() -> None:
    for thinking in ("off", "max"):
        turn = begin(Asked(text="hi", thinking=thinking, system="be"), TOKENIZER)
        said = [{"role": "system", "content": "be"}, user("hi")]
        assert turn.prompt == encode_chat(TOKENIZER, said, thinking)
        assert len(turn.messages) == 2 and "hi" in turn.messages[1]
    assert begin(Asked(ids=[1, 2]), None) == Turn([], [1, 2])


# --- the same prompt -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "count", "max_tokens", "left"),
    [
        (None, 0, 9, True), (None, 3, 9, True), (None, 9, 9, False), (None, 9, 10, True),
        (None, 9, 4, False), ("eos", 3, 9, False), ("stop", 3, 9, False), (None, 0, 0, False),
    ],
)  # fmt: skip
def test_same_prompt(reason: str | None, count: int, max_tokens: int, left: bool) -> None:
    for first in ({"text": "hi"}, {"ids": [1, 2, 3]}, {"messages": [user("hi")]}):
        history = session(**first)
        history.turns[0].ids, history.turns[0].reason = [7] * count, reason
        step = next_step(history, **first)
        assert step == Step(history.turns[0], False)
        assert step.left(max_tokens) == left


def test_the_same_question_may_be_put_either_way() -> None:
    history = answered(text="hi", system="be")
    said = [{"role": "system", "content": "be"}, user("hi")]
    assert not next_step(history, messages=said).new
    assert not next_step(history, text="hi").new
    history = answered(messages=said)
    assert not next_step(history, text="hi", system="be").new
    assert not next_step(history, text="hi").new
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert not next_step(history, messages=[said[0], {"role": "user", "content": parts}]).new


# --- another prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", ["off", "low", "max"])
def test_a_new_turn_reads_as_the_whole_conversation(thinking: str) -> None:
    first = () if thinking == "off" else ("why", *tag(CLOSE, "think"), *tag(OPEN, "response"))
    reasoning = {} if thinking == "off" else {"reasoning_content": "why"}
    said = [user("hi"), assistant("hello", **reasoning), user("again")]
    wanted = text_of(encode_chat(TOKENIZER, said, thinking))
    answer = (*first, "hello", *WHOLE)
    for cut in range(len(ids_of(*first, "hello")), len(ids_of(*answer)) + 1):
        for asked in ({"text": "again"}, {"messages": said}):
            history = answered(*answer, thinking=thinking)
            turn = history.turns[0]
            turn.ids, turn.reason = turn.ids[:cut], None
            step = next_step(history, **asked)
            assert step.new and step.left(0)
            assert whole(history, step) == wanted, cut
            assert step.turn.dropped == 0 and len(step.turn.messages) == 1
    history = answered(*answer, thinking=thinking)
    history.turns[0].ids[-1] = EOS  # another end than the format's
    step = next_step(history, text="again")
    assert step.turn.dropped == 1
    assert whole(history, step) == wanted


def test_an_old_question_is_a_new_turn() -> None:
    history = answered()
    history.turns.append(next_step(history, text="more").turn)
    history.turns[-1].ids = ids_of("hello", *WHOLE)
    assert not next_step(history, text="more").new
    step = next_step(history, text="hi")
    assert step.new and text_of(step.turn.prompt).count("hi") == 1


def test_raw_prompts_follow_each_other() -> None:
    history = session(ids=[1, 2])
    history.turns[0].ids = [7, EOS]
    step = next_step(history, ids=[3])
    assert step == Step(Turn([], [3]), True)
    history.turns.append(step.turn)
    assert history.ids == [1, 2, 7, EOS, 3] and history.before(0) == [1, 2]
    assert not next_step(history, ids=[3]).new
    assert next_step(history, ids=[1, 2]).new


CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "add", "arguments": '{"x": 1, "to": "two"}'},
}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_tools() -> None:
    calls = list(call_pieces(check_turns([assistant("", tool_calls=[CALL])])[0]))
    emitted = ("so", *tag(CLOSE, "response"), *tag(OPEN, "tools"), *calls, *tag(CLOSE, "tools"),
               *tag(CLOSE, "message"), END)  # fmt: skip
    result = {"role": "tool", "tool_call_id": "a", "content": "3"}
    said = [user("hi"), assistant("so", tool_calls=[CALL]), result]
    wanted = text_of(encode_chat(TOKENIZER, said, "off", TOOLS))
    first = {"messages": [user("hi")], "tools": TOOLS}
    history = answered(*emitted, **first)
    assert not next_step(history, **first).new
    assert whole(history, next_step(history, messages=said, tools=TOOLS)) == wanted
    for cut in range(len(ids_of(*emitted[:-5])), len(ids_of(*emitted))):
        history = answered(*emitted, reason=None, **first)
        del history.turns[0].ids[cut:]
        assert whole(history, next_step(history, messages=said, tools=TOOLS)) == wanted
    history = answered(*emitted, **first)
    with pytest.raises(UsageError, match=r"^the tools are not those"):
        next_step(history, messages=said)
    changed = [user("hi"), assistant("so"), user("x")]
    with pytest.raises(UsageError, match=r"^messages\[1\].tool_calls parts .* at character 0 "):
        next_step(history, messages=changed, tools=TOOLS)


def test_an_answer_cut_by_a_stop_text_is_known_as_it_was_shown() -> None:
    history = answered("one. two", reason="stop")
    history.turns[0].stops = [". t", "zzz"]
    said = [user("hi"), assistant("one"), user("x")]
    step = next_step(history, messages=said)
    assert step.new
    assert "one. two<|close|>response<|sep|>" in whole(history, step)
    with pytest.raises(UsageError, match=r"messages\[1\] parts from the session at character 3"):
        next_step(answered("one. two", reason="stop"), messages=said)


def test_reasoning_may_be_left_out_but_not_changed() -> None:
    answer = ("why", *tag(CLOSE, "think"), *tag(OPEN, "response"), "so", *WHOLE)
    history = answered(*answer, thinking="low")
    for extra in ({}, {"reasoning_content": ""}, {"reasoning_content": "why"}):
        assert next_step(history, messages=[user("hi"), assistant("so", **extra), user("x")]).new
    said = [user("hi"), assistant("so", reasoning_content="what"), user("x")]
    with pytest.raises(UsageError, match=r"reasoning_content parts .* at character 2 "):
        next_step(history, messages=said)


# --- refusals ------------------------------------------------------------------------------------

ASKED = [user("hi")]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "raw": ({"ids": [1]}, "the session is a conversation, which --raw and --ids cannot continue"),
    "thinking": ({"text": "x", "thinking": "low"}, "begun with --thinking off, found low"),
    "system": ({"text": "x", "system": "b"}, "begun with 'be' as its --system, found 'b'"),
    "other system": ({"messages": ASKED, "system": "bee"}, "begun with 'be' as .* found 'bee'"),
    "messages without the system": (
        {"messages": ASKED},
        r"""messages\[0\] parts .* in its role or name: .* 'role="system"', found 'role="user"';""",
    ),
    "other question": (
        {"messages": [user("he")], "system": "be"},
        r"messages\[0\] parts from the session at character 1 of its text: the session has 'i', "
        "found 'e'; what was read",
    ),
    "other answer": (
        {"messages": [*ASKED, assistant("help"), user("x")], "system": "be"},
        r"messages\[1\] parts from the session at character 3 of its text: the session has 'lo', "
        "found 'p'; what was read cannot be unread",
    ),
    "longer answer": (
        {"messages": [*ASKED, assistant("hello you"), user("x")], "system": "be"},
        r"at character 5 of its text: the session has '', found ' you'",
    ),
    "question where the answer is": (
        {"messages": [*ASKED, user("x")], "system": "be"},
        r"""messages\[1\] parts .* in its role""",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusals(name: str) -> None:
    wanted, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        next_step(answered(text="hi", system="be"), **wanted)
    assert "\n" not in str(caught.value)


def test_more_refusals() -> None:
    with pytest.raises(UsageError, match="begun with none as its --system, found 's'"):
        next_step(answered(), text="x", system="s")
    with pytest.raises(UsageError, match=r"goes on with --raw or --ids$"):
        next_step(session(ids=[1]), text="x")
    history = answered()
    history.turns.append(next_step(history, text="two").turn)
    history.turns[-1].ids = ids_of("k", *WHOLE)
    with pytest.raises(UsageError, match=r"the messages end after 2, where the session has 2 more"):
        next_step(history, messages=[user("hi"), assistant("hello")])
    assert next_step(
        history, messages=[user("hi"), assistant("hello"), user("two"), assistant("k")]
    ).new


def test_what_is_left_out_stays_as_it_was() -> None:
    history = answered(*("why", *tag(CLOSE, "think")), thinking="high", text="hi", system="be")
    assert next_step(history, text="x").new
    assert not next_step(history, text="hi", thinking="high", system="be").new


# --- closers -------------------------------------------------------------------------------------

END_TEXT = "<|close|>message<|sep|><|end_of_msg|>"
REST = "<|close|>response<|sep|>" + END_TEXT
EMPTY = "<|open|>response<|sep|>" + REST
CUT: list[tuple[str, tuple[Any, ...], str]] = [
    ("off", (), REST),
    ("off", ("text",), REST),
    ("off", ("text", CLOSE), "response<|sep|>" + END_TEXT),
    ("off", ("text", CLOSE, "resp"), "onse<|sep|>" + END_TEXT),
    ("off", ("text", CLOSE, "response"), "<|sep|>" + END_TEXT),
    ("off", tag(CLOSE, "response"), END_TEXT),
    ("off", (*tag(CLOSE, "response"), CLOSE), "message<|sep|><|end_of_msg|>"),
    ("off", (*tag(CLOSE, "response"), *tag(CLOSE, "message")), "<|end_of_msg|>"),
    ("off", WHOLE, ""),
    ("off", (*WHOLE, "more"), "<|end_of_msg|>"),
    ("off", (*tag(OPEN, "tools"), *tag(OPEN, "call x")), "<|close|>call<|sep|><|close|>tools<|sep|>"
     + END_TEXT),
    ("off", (*tag(CLOSE, "response"), OPEN, "to"), "<|sep|><|close|>to<|sep|>" + END_TEXT),
    ("off", (CLOSE, "zz"), "<|sep|>" + REST),
    ("off", (SEP, *tag(CLOSE, "zz")), REST),
    ("low", ("hm",), "<|close|>think<|sep|>" + EMPTY),
    ("low", ("hm", CLOSE), "think<|sep|>" + EMPTY),
    ("low", tag(CLOSE, "think"), EMPTY),
    ("low", (*tag(CLOSE, "think"), OPEN), "response<|sep|>" + REST),
    ("low", (*tag(CLOSE, "think"), OPEN, "res"), "ponse<|sep|>" + REST),
    ("low", (*tag(CLOSE, "think"), *tag(OPEN, "response"), "x"), REST),
    ("low", ("hm", *tag(OPEN, "response"), "x"), REST),
]  # fmt: skip


@pytest.mark.parametrize(("thinking", "emitted", "rest"), CUT)
def test_closers(thinking: str, emitted: tuple[Any, ...], rest: str) -> None:
    missing = closers(TOKENIZER, ids_of(*emitted), thinking)
    assert piece_text(missing) == rest
    assert closers(TOKENIZER, ids_of(*emitted, *missing), thinking) == []
