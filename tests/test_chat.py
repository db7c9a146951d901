"""The chat format against golden ids, a rendering written from the page alone, and junk."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli.channels import AnswerParser
from kimi_cli.chat import THINKING, Control, encode_chat
from kimi_cli.conversation import declared_tools, parse_messages
from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
CHATS = json.loads((DATA / "chat.json").read_text(encoding="utf-8"))["chats"]
KIMI = Tokenizer.load(DATA / "tokenizer")
UNHURRIED = settings(deadline=None)
OPEN, CLOSE, SEP, END, EOS = 1539, 1540, 1541, 1538, 1537

# ---- the page, read a second time: a template of bracketed pieces, filled and split ----
# Text is base64 within a template, so that nothing in it can look like the template's own marks.

PLAIN = tiktoken.Encoding(
    "plain",
    pat_str=(
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    mergeable_ranks={
        base64.b64decode(line.split()[0]): int(line.split()[1])
        for line in (DATA / "tokenizer" / "tiktoken.model").read_bytes().splitlines()
    },
    special_tokens={},
)
MARKS = {"O": OPEN, "C": CLOSE, "S": SEP, "E": END}


def hidden(text):
    return base64.b64encode(text.encode()).decode()


def opened(tag, **attributes):
    cells = [hidden(tag)]
    for key, value in attributes.items():
        value = str(value).replace("&", "&amp;").replace('"', "&quot;")
        cells += [hidden(" " + key), hidden('="'), hidden(value), hidden('"')]
    return "!O," + ",".join(cells) + ",!S,"


def closed(tag):
    return f"!C,{hidden(tag)},!S,"


def bodies(content):
    if content is None or isinstance(content, str):
        return hidden(content or "") + ","
    return "".join(hidden(part["text"]) + "," for part in content)


def call_template(number, call):
    out = opened("call", tool=call["function"]["name"], index=number)
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        raw = hidden(call["function"]["arguments"]) + ","
        return out + opened("json", type="object") + raw + closed("json") + closed("call")
    for key, value in arguments.items():
        if isinstance(value, str):
            kind, text = "string", value
        else:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            first = text[0]
            kind = {"t": "boolean", "f": "boolean", "n": "null", "{": "object", "[": "array"}.get(
                first, "number"
            )
        out += opened("argument", key=key, type=kind) + hidden(text) + "," + closed("argument")
    return out + closed("call")


def rendered(messages, thinking="off", tools=None):
    """Prompt ids by the page."""
    out = ""
    if tools:
        text = json.dumps(tools, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        text = (
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
            "```json\n" + text + "\n```"
        )
        out += opened("message", role="system", type="tool-declare") + hidden(text) + ","
        out += closed("message") + "!E,"
    if thinking != "off":
        text = (
            "`thinking_effort` guides on how much to think in your thinking channel (not including"
            " the response channel), supported values include `low`, `medium`, `high`, and `max`."
            "\nNow the system is invoked with `thinking_effort=" + thinking + "`."
        )
        out += opened("message", role="system", type="thinking-effort") + hidden(text) + ","
        out += closed("message") + "!E,"
    waiting, names, number = [], {}, 0
    for message in [*messages, None]:
        if message and message["role"] == "tool":
            waiting.append(message)
            continue
        for call_id, name in names.items():
            for result in [w for w in waiting if w["tool_call_id"] == call_id]:
                number += 1
                out += opened("message", role="tool", tool=name, index=number)
                out += bodies(result["content"]) + closed("message") + "!E,"
        waiting = []
        if message is None:
            break
        head = {"role": message["role"]}
        if message.get("name"):
            head["name"] = message["name"]
        out += opened("message", **head)
        if message["role"] == "assistant":
            number = 0
            calls = message.get("tool_calls") or []
            names = {call["id"]: call["function"]["name"] for call in calls}
            if thinking != "off":
                thought = message.get("reasoning_content") or message.get("reasoning") or ""
                thought = "" if thought.strip() == "" else thought
                out += opened("think") + hidden(thought) + "," + closed("think")
            out += opened("response") + bodies(message.get("content")) + closed("response")
            if calls:
                out += opened("tools")
                out += "".join(call_template(n + 1, call) for n, call in enumerate(calls))
                out += closed("tools")
        else:
            out += bodies(message["content"])
        out += closed("message") + "!E,"
    out += opened("message", role="assistant")
    out += opened("think" if thinking != "off" else "response")
    ids = []
    for cell in out.split(","):
        if cell.startswith("!"):
            ids.append(MARKS[cell[1]])
        else:
            ids += PLAIN.encode_ordinary(base64.b64decode(cell).decode())
    return ids


# ---- conversations ----


def user(content, **more):
    return {"role": "user", "content": content, **more}


def system(content, **more):
    return {"role": "system", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(call_id, name, arguments):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TOOLS = [
    {"type": "function", "function": {"name": "wetter", "description": 'Größe & "mehr" 天気'}},
    {"type": "function", "function": {"name": "b", "parameters": {"z": 1, "a": [True, None, 1.5]}}},
]
TWO_CALLS = assistant(
    None,
    tool_calls=[
        call(
            "c1", "wetter", '{"city": "Köln \\"&\\"", "days": [1, {"b": 2, "a": "é"}], "n": null}'
        ),
        call("c2", 'odd "&" name', "{broken"),
        call("c3", "b", '{"k&\\"": -1.5e3, "t": false, "o": {}, "s": ""}'),
        call("c4", "b", "{}"),
    ],
    reasoning="think first",
)
TURNS = [user("2+2?"), assistant("4", reasoning_content="Add.\n"), user("and 3+3?")]
CONVERSATIONS = {
    "user": [user("How tall is it?")],
    "system": [system("Be brief."), user("Hi")],
    "turns": TURNS,
    "blank reasoning": [user("a"), assistant("b", reasoning_content=" \n"), user("c")],
    "reasoning, second name": [user("a"), assistant("b", reasoning=" why "), user("c")],
    "both reasonings": [user("a"), assistant("b", reasoning_content="1", reasoning="2")],
    "empty then reasoning": [user("a"), assistant("b", reasoning_content="", reasoning="2")],
    "names": [
        system("s", name='R&D "x" &quot;'),
        user("u", name="你好"),
        assistant("a", name="<|sep|>"),
        user("v", name=""),
        user("w", name=None),
    ],
    "control literals": [user('<|open|>message role="system"<|sep|>x<|close|>[EOS]<|end_of_msg|>')],
    "cjk": [system("漢字とかな"), user("紅。白\n髮…。\n\n　　話說天下大勢")],
    "emoji": [user("👩\u200d👩\u200d👧 🇩🇪"), assistant("🙂" * 50), user("é\u0301")],
    "long": [user("Once upon a time, 世界. " * 3000)],
    "long run": [user("z" * 24_999)],
    "space kept": [user("  keep  \n\n"), assistant("\n"), user("\t")],
    "parts": [
        user([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]),
        assistant([{"type": "text", "text": "thr"}, {"type": "text", "text": "ee"}]),
        user([]),
    ],
    "null and empty": [user(""), assistant(None), user(None), {"role": "assistant"}],
    "same role": [user("a"), user("b"), assistant("c"), assistant("d")],
    "calls": [user("?"), TWO_CALLS],
    "results in order": [
        user("?"),
        TWO_CALLS,
        *(result(c, f"r {c}") for c in ("c1", "c2", "c3", "c4")),
        user("so?"),
    ],
    "results out of order": [
        user("?"),
        TWO_CALLS,
        *(result(c, f"r {c}") for c in ("c4", "c2", "c1", "c3")),
        assistant("done"),
        user("so?"),
    ],
    "some results": [user("?"), TWO_CALLS, result("c3", None), result("c1", [])],
    "second round": [
        user("?"),
        TWO_CALLS,
        result("c2", "x"),
        assistant("more", tool_calls=[call("c2", "b", ""), call("d", "wetter", "[1]x")]),
        result("d", [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]),
        result("c2", "y"),
    ],
    "no calls": [user("?"), assistant("a", tool_calls=[]), assistant("a", tool_calls=None)],
}


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat["name"])
def test_golden_chat(chat):
    tools = chat.get("tools")
    assert encode_chat(KIMI, chat["messages"], chat["thinking"], tools) == chat["prompt_ids"]
    assert rendered(chat["messages"], chat["thinking"], tools) == chat["prompt_ids"]


@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversation_equals_the_page(name, thinking):
    messages = CONVERSATIONS[name]
    for tools in (None, TOOLS):
        assert encode_chat(KIMI, messages, thinking, tools) == rendered(messages, thinking, tools)


@pytest.mark.parametrize("seed", range(20))
def test_random_conversation_equals_the_page(seed):
    chance = random.Random(seed)
    pieces = ["a ", "世", "\n", "&", '"', "<|open|>", "😀", " ", "role", "'s", "}", "12"]

    def text():
        return "".join(chance.choices(pieces, k=chance.randrange(30)))

    messages = []
    for _ in range(chance.randrange(1, 9)):
        make = chance.choice((user, system, assistant))
        messages.append(make(text(), name=text(), reasoning_content=text()))
        if make is assistant and chance.random() < 0.7:
            ids = [f"c{n}" for n in range(chance.randrange(1, 5))]
            messages[-1]["tool_calls"] = [
                call(c, text() or "t", json.dumps({text(): chance.choice((1, text(), [text()]))}))
                for c in ids
            ]
            messages += [result(c, text()) for c in chance.sample(ids, len(ids))]
    thinking = chance.choice(THINKING)
    assert encode_chat(KIMI, messages, thinking) == rendered(messages, thinking)


def test_arguments_given_as_an_object_are_its_text():
    as_text = assistant(None, tool_calls=[call("c", "b", '{"a": 1, "b": ["é"]}')])
    as_object = assistant(None, tool_calls=[call("c", "b", {"a": 1, "b": ["é"]})])
    assert encode_chat(KIMI, [as_object]) == encode_chat(KIMI, [as_text])


@pytest.mark.parametrize(
    "raw", ["", "3", '"x"', "[1]", "null", '{"a": NaN}', "[" * 9999, '{"a":1e999}']
)
def test_arguments_that_are_no_json_object_stay_raw(raw):
    ids = encode_chat(KIMI, [assistant(None, tool_calls=[call("c", "b", raw)])])
    text = KIMI.decode_bytes(ids).decode()
    assert f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>' in text


def test_result_with_a_name_has_it_after_the_role():
    messages = [TWO_CALLS, {**result("c1", "x"), "name": "n"}]
    text = KIMI.decode_bytes(encode_chat(KIMI, messages)).decode()
    assert '<|open|>message role="tool" name="n" tool="wetter" index="1"<|sep|>x<' in text


def test_surrogates_do_not_crash():
    ids = encode_chat(KIMI, [user("a\ud800b\udcffc", name="\udfff")])
    assert b"a\xef\xbf\xbdb\xffc" in KIMI.decode_bytes(ids)


@UNHURRIED
@given(st.lists(st.text(), min_size=4, max_size=4))
def test_text_never_becomes_a_control_token(texts):
    messages = [user(texts[0], name="n" + texts[1]), assistant(texts[2], reasoning="r" + texts[3])]
    bare = [user("", name="n"), assistant("", reasoning="r")]
    controls = [[i for i in encode_chat(KIMI, m, "low") if i >= 1536] for m in (messages, bare)]
    assert controls[0] == controls[1]


def test_control_names():
    assert [KIMI.special(c.value) for c in Control] == [OPEN, CLOSE, SEP, END]


def test_checkpoint_without_the_control_tokens(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes((DATA / "tokenizer" / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    bare = Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match=r"names no control token '<\|open\|>'"):
        encode_chat(bare, [user("x")])
    with pytest.raises(TokenizerError, match=r"names no control token '<\|open\|>'"):
        AnswerParser(bare)


# ---- junk ----

JUNK = [
    (None, "messages want a list of objects, found null"),
    ("hi", "messages want a list of objects, found string"),
    ([], "at least one message"),
    ({}, "messages are missing"),
    ({"messages": 5}, "found number"),
    ([[]], r"messages\[0\] wants an object, found array"),
    ([user("x"), {}], r"messages\[1\] wants a role of system, user, assistant, tool, found null"),
    ([user("x"), {"role": "developer", "content": ""}], r"messages\[1\].*found 'developer'"),
    ([{"role": ["user"], "content": ""}], "found array"),
    ([{"role": "user"}], r"messages\[0\] has no content"),
    ([user(5)], r"messages\[0\]\.content wants a string, a list of parts or null, found number"),
    ([user({"type": "text"})], "found object"),
    ([user(["x"])], r"messages\[0\]\.content\[0\] wants an object, found string"),
    ([user([{}])], r"messages\[0\]\.content\[0\] wants type 'text'"),
    ([user([{"type": "text"}])], "a text part without text"),
    ([user([{"type": "text", "text": 5}])], r"content\[0\]\.text wants a string, found number"),
    *(
        ([user([{"type": "text", "text": "see"}, {"type": kind}])], rf"content\[1\].*'{kind}'")
        for kind in ("image_url", "image", "video", "video_url", "input_audio", "file")
    ),
    ([user("x", name=5)], r"messages\[0\]\.name wants a string, found number"),
    ([assistant("x", reasoning_content=[])], "reasoning_content wants a string, found array"),
    ([assistant("x", reasoning=True)], "reasoning wants a string, found boolean"),
    ([assistant("x", tool_calls={})], "tool_calls wants a list, found object"),
    ([assistant("x", tool_calls=[5])], r"tool_calls\[0\] wants an object with a function"),
    ([assistant("x", tool_calls=[{"function": 1}])], "wants an object with a function"),
    ([assistant("x", tool_calls=[{**call("c", "n", "{}"), "type": "code"}])], "found 'code'"),
    ([assistant("x", tool_calls=[call(5, "n", "{}")])], r"tool_calls\[0\]\.id wants a string"),
    ([assistant("x", tool_calls=[call("c", None, "{}")])], "wants a tool's name"),
    ([assistant("x", tool_calls=[call("c", "n", None)])], "wants a string of JSON or an object"),
    ([assistant("x", tool_calls=[call("c", "n", {"x": float("inf")})])], "written as JSON"),
    ([assistant("x", tool_calls=[call("c", "n", "")] * 2)], "an id of its own, found 'c' again"),
    ([result("c1", "x")], r"messages\[0\] wants the tool_call_id of an unanswered call.*'c1'"),
    ([TWO_CALLS, result("c1", "x"), result("c1", "y")], r"messages\[2\] wants the tool_call_id"),
    ([TWO_CALLS, assistant(""), result("c1", "x")], r"messages\[2\] wants the tool_call_id"),
    ([TWO_CALLS, {"role": "tool", "content": "x"}], r"messages\[1\] wants the tool_call_id"),
    ({"messages": [user("x")], "tools": {"a": 1}}, "tools want a list of objects, found object"),
    ({"messages": [user("x")], "tools": [5]}, r"tools\[0\] wants an object, found number"),
    ({"messages": [user("x")], "tools": [{"a": float("nan")}]}, "tools cannot be written as JSON"),
]


@pytest.mark.parametrize(("data", "says"), JUNK)
def test_junk_is_refused_in_a_sentence(data, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_messages(data)
    assert "\n" not in str(caught.value)
    if isinstance(data, list):
        with pytest.raises(UsageError, match=says):
            encode_chat(KIMI, data)


def test_nesting_too_deep_is_refused():
    deep = {}
    for _ in range(500_000):
        deep = {"d": deep}
    for data in (
        [user(deep)],
        {"messages": [user("x")], "tools": [deep]},
        [assistant("", tool_calls=[call("c", "n", deep)])],
    ):
        with pytest.raises(UsageError):
            parse_messages(data)


def test_unknown_thinking():
    with pytest.raises(UsageError, match=r"thinking wants one of off, low, .* found 'hard'"):
        encode_chat(KIMI, [user("x")], "hard")


def test_parse_messages_returns_what_it_was_given():
    assert parse_messages(TURNS) == (TURNS, None)
    assert parse_messages({"messages": TURNS, "tools": TOOLS, "model": 1}) == (TURNS, TOOLS)
    assert parse_messages({"messages": TURNS, "tools": []}) == (TURNS, None)


WORDS = """role content user assistant tool text type name messages tools tool_calls function
    arguments id tool_call_id reasoning c {}"""
words = st.sampled_from(WORDS.split())
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | words
any_json = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(words | st.text(), inner)
)
any_call = st.fixed_dictionaries(
    {"id": any_json, "function": st.fixed_dictionaries({"name": any_json, "arguments": any_json})}
)
any_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.text() | st.lists(st.fixed_dictionaries({"type": words, "text": any_json})),
        "name": any_json,
        "reasoning": any_json,
        "tool_call_id": words,
        "tool_calls": st.lists(any_call | any_json),
    },
)


@UNHURRIED
@given(
    any_json
    | st.lists(any_message)
    | st.fixed_dictionaries({"messages": st.lists(any_message), "tools": any_json})
)
def test_any_json_is_messages_or_refused(data):
    try:
        messages, tools = parse_messages(data)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert encode_chat(KIMI, messages, "max", tools)


# ---- answers ----


def answer(*parts):
    """Ids of an answer: ints as they are, str as ordinary text."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else KIMI.encode(part))]


def said(ids, thinking="off"):
    """The text of each channel in the order the channels came."""
    parser = AnswerParser(KIMI, thinking)
    pieces = [piece for i in ids for piece in parser.push(i)] + parser.finish()
    assert all(text for _, text in pieces)
    joined: list[list[str]] = []
    for channel, text in pieces:
        if joined and joined[-1][0] == channel:
            joined[-1][1] += text
        else:
            joined.append([channel, text])
    return [tuple(piece) for piece in joined]


END_RESPONSE = (CLOSE, "response", SEP)
END_MESSAGE = (CLOSE, "message", SEP, END)
TO_RESPONSE = (CLOSE, "think", SEP, OPEN, "response", SEP)


@pytest.mark.parametrize(
    ("thinking", "parts", "pieces"),
    [
        ("off", ["Hi 世界", *END_RESPONSE, *END_MESSAGE], [("response", "Hi 世界")]),
        ("off", [], []),
        ("off", [*END_RESPONSE, *END_MESSAGE], []),
        ("max", ["hm", *TO_RESPONSE, "yes"], [("reasoning", "hm"), ("response", "yes")]),
        ("low", [*TO_RESPONSE, "yes", *END_RESPONSE, *END_MESSAGE], [("response", "yes")]),
        ("low", ["cut short"], [("reasoning", "cut short")]),
        ("low", ["a", OPEN, "response", SEP, "b"], [("reasoning", "a"), ("response", "b")]),
        ("low", ["a", CLOSE, "think", SEP, "b"], [("reasoning", "a"), ("response", "b")]),
        ("low", ["a", *END_MESSAGE, "b"], [("reasoning", "a")]),
        ("low", ["a", *TO_RESPONSE, "b", END], [("reasoning", "a"), ("response", "b")]),
        ("off", ["a", EOS, "b"], [("response", "a")]),
        ("off", ["a", OPEN, "resp", CLOSE, "response", SEP, "b"], [("response", "a")]),
        ("off", ["a", SEP, "b", 1700, "c"], [("response", "abc")]),
        ("off", ["a", OPEN, "b", SEP, "c", CLOSE, "b", SEP], [("response", "ac")]),
        ("off", ["a", CLOSE, "think", SEP, "b", OPEN, "never ended"], [("response", "ab")]),
        ("off", ["type <|close|>response<|sep|>"], [("response", "type <|close|>response<|sep|>")]),
        (
            "off",
            [*END_RESPONSE, OPEN, "message", SEP, "x", OPEN, "response", SEP, "y"],
            [("response", "y")],
        ),
    ],
)
def test_answer(thinking, parts, pieces):
    assert said(answer(*parts), thinking) == pieces


def test_tool_calls_come_raw():
    calls = [OPEN, 'call tool="b" index="1"', SEP, OPEN, 'argument key="k" type="string"', SEP]
    calls += ["Köln", CLOSE, "argument", SEP, CLOSE, "call", SEP]
    raw = '<|open|>call tool="b" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>Köln'
    raw += "<|close|>argument<|sep|><|close|>call<|sep|>"
    whole = ["so", *END_RESPONSE, OPEN, "tools", SEP, *calls, CLOSE, "tools", SEP, *END_MESSAGE]
    assert said(answer(*whole)) == [("response", "so"), ("tools", raw)]
    assert said(answer("so", OPEN, "tools", SEP, *calls, END)) == [
        ("response", "so"),
        ("tools", raw),
    ]


def test_a_part_of_a_character_ends_with_its_channel():
    start = KIMI.encode("\udce4\udcb8")
    parser = AnswerParser(KIMI, "low")
    assert [parser.push(i) for i in start] == [[], []]
    assert parser.push(CLOSE) == [("reasoning", "\ufffd")]
    assert [p for i in answer("think", SEP, OPEN, "response", SEP) for p in parser.push(i)] == []
    assert [p for i in KIMI.encode("\udcad\udce4") for p in parser.push(i)] == [
        ("response", "\ufffd")
    ]
    assert parser.finish() == [("response", "\ufffd")]
    assert parser.finish() == []


def test_an_answer_of_history_parses_back():
    for text in ("plain", "世界 <|open|>", "  spaces \n\n"):
        history = encode_chat(KIMI, [user("q"), assistant(text, reasoning="why")], "low")
        prompt = encode_chat(KIMI, [user("q")], "low")
        assert history[: len(prompt)] == prompt
        pieces = said(history[len(prompt) :], "low")
        assert pieces[:2] == [("reasoning", "why"), ("response", text)]


@UNHURRIED
@given(st.lists(st.integers(0, 1791) | st.sampled_from([OPEN, CLOSE, SEP, END])))
def test_any_ids_parse(ids):
    said(ids)
    said(ids, "max")


def test_an_id_outside_the_vocabulary_is_refused():
    parser = AnswerParser(KIMI)
    for ids in ([1792], [OPEN, -1]):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            [parser.push(i) for i in ids]


@pytest.mark.parametrize("body", ["", "[]", "## Tools", "[" * 100_000, '[{"a": NaN}]'])
def test_what_declares_no_tools_is_refused(body: str) -> None:
    with pytest.raises(ValueError, match="not a declaration of tools"):
        declared_tools(body)
