"""Targets over what a person gives `kimi` to read, and over what it wrote for them before."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from kimi_cli.batch import Opened, lines_of
from kimi_cli.calls import call_object
from kimi_cli.channels import AnswerParser
from kimi_cli.closers import closers
from kimi_cli.engine import Source
from kimi_cli.errors import KimiError
from kimi_cli.ledger import Ledger
from kimi_cli.prompt import Given, ask, prompt_bounds, prompt_ids
from kimi_cli.query import Manner, query_id
from kimi_cli.replay import read_trace, table
from kimi_cli.sampler import GREEDY
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import begin

from .model import CONFIG, model_at
from .target import Reader, Target, either, json_variants

_USER = {"role": "user", "content": "hi"}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}
CONVERSATION = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        _USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


@lru_cache(maxsize=1)
def _opened() -> tuple[tempfile.TemporaryDirectory[str], Opened]:
    scratch = tempfile.TemporaryDirectory(prefix="kimi-fuzz-")
    model = model_at(Path(scratch.name) / "model")
    manner = Manner(16, GREEDY)
    return scratch, Opened(Source.open(model), Tokenizer.load(model), manner, None)


def _tokenizer() -> Tokenizer:
    found = _opened()[1].tokenizer
    assert found is not None
    return found


def messages(folder: Path) -> Reader:
    """The data as a file of --messages, to the ids of the prompt."""
    path = folder / "m.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for thinking in ("max", None):
            given = Given(messages=path, thinking=thinking, system="s" if thinking else None)
            with suppress(KimiError):
                prompt_ids(given, _tokenizer(), CONFIG)
        ids = prompt_ids(given, _tokenizer(), CONFIG)
        fewest, most = prompt_bounds(given, CONFIG)
        assert fewest <= len(ids) <= most, (len(ids), most)
        begin(ask(given, _tokenizer(), CONFIG), _tokenizer())

    return read


def messages_seeds() -> list[bytes]:
    whole = json.dumps(CONVERSATION).encode()
    deep = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":%s}}}]}'
    depths = (b"[" * depth + b"]" * depth for depth in (30, *range(950, 1000, 4)))
    cases: list[object] = [
        [_USER],
        {"messages": [_USER], "tools": []},
        {"messages": [_USER], "tools": [{"a": float("nan")}]},
        {"messages": [_USER, {"role": "tool", "tool_call_id": "c1", "content": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "name": '"&<|sep|>', "content": "\ud800\udc80 <|open|>"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f"}}]}]},
        {"messages": [{"role": ["user"], "content": 1}]},
    ]
    return [
        *json_variants(whole),
        *(json.dumps(case).encode() for case in cases),
        *(b"[%s]" % (deep % value) for value in depths),
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"a":%s}]}'
        % (b"[" * 940 + b"]" * 940),
    ]


def prompts(folder: Path) -> Reader:
    """The data as a file of --prompts: each line to its query and ids."""
    path = folder / "p.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for line in lines_of(path):
            query_id(line.text)
            with suppress(KimiError):
                _, ids, context, tokens = _opened()[1].query(line)
                assert len(ids) <= context and tokens >= 0

    return read


def prompts_seeds() -> list[bytes]:
    whole = {"prompt": "Why?", "max_tokens": 3, "temperature": 0.5, "top_p": 1, "seed": 7}
    cases: list[object] = [
        {**whole, "id": 10**400, "stop": ["x", "yy"], "thinking": "max", "system": "s"},
        {"ids": [1, 2, 3], "ignore_eos": True},
        {"ids": [1 << 70]},
        {"ids": []},
        {**CONVERSATION, "raw": False},
        {"prompt": "x", "raw": True, "max_tokens": 10**30},
        {"prompt": "\ud800", "top_k": 1 << 70},
        {"prompt": "x", "seed": 1 << 65, "temperature": 1},
        {"prompt": "x", "temperature": 1e308, "min_p": -1.0},
        {"prompt": "x", "stop": [""]},
        {"prompt": ""},
    ]
    lines = [json.dumps(case).encode() for case in cases]
    return [*json_variants(json.dumps(whole).encode()), *lines, b"\n\r\n".join(lines), b"\0\n\n"]


def ledger(folder: Path) -> Reader:
    """The data as a file of results: opened, added to, sorted, and opened again."""
    path = folder / "o.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with Ledger(path) as found:
            kept = dict(found.results)
            found.add(3, "00000000", True, {"ids": [1], "text": "\ud800"})
            found.sort()
        with Ledger(path) as found:
            assert found.results.keys() == {*kept, 3}
            for line, result in kept.items():
                again = found.results[line]
                assert line == 3 or (again.crc, again.final) == (result.crc, result.final)
        assert not path.read_bytes().startswith(b"\n")

    return read


def ledger_seeds() -> list[bytes]:
    lines = [
        b'{"line": 1, "crc": "9ae0daaf", "ids": [1]}\n',
        b'{"line": 2, "crc": "5ce1ba20", "error": "x"}\n',
        b'{"line": 2, "crc": "5ce1ba20", "stop_reason": "interrupted"}\n',
    ]
    whole = b"".join(lines)
    return [
        *json_variants(lines[0]),
        whole,
        whole[:-5],
        whole + bytes(100),
        whole + b'{"li',
        whole + b"\n" + lines[0],
        b'{"line": -1, "crc": ""}\n',
        b'{"line": 100000000000000000000000, "crc": "x"}\n',
        lines[2] + lines[1] + lines[0],
    ]


def trace(folder: Path) -> Reader:
    """The data as a routing trace: read, and replayed with few slots."""
    path = folder / "t.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        steps = read_trace(path)
        if sum(len(step.experts) for step in steps) <= 2000:
            for row in table(steps, (1, 4)):
                assert all(0 <= rate <= 1 for name, rate in row.items() if name != "slots")

    return read


def trace_seeds() -> list[bytes]:
    line = b'{"position": 12, "layer": 3, "experts": [17, 4, 211]}\n'
    return [
        *json_variants(line),
        line * 3 + line.replace(b"12", b"11"),
        line.replace(b"17", b"4"),
        line.replace(b"17", b'"17"'),
        line.replace(b"[17, 4, 211]", b"{}"),
        line.replace(b"[17, 4, 211]", b'"ab"'),
        line.replace(b"[17, 4, 211]", b"[]"),
        line.replace(b"[17, 4, 211]", b"[[1]]"),
        line.replace(b"17", b"1" * 400),
        line + b"\n",
    ]


def text(folder: Path) -> Reader:
    """The data as a file of --prompt-file, and as ids of an answer, two bytes each."""
    path = folder / "p.txt"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        tokenizer = _tokenizer()
        for given in (Given(file=path), Given(file=path, raw=True)):
            with suppress(KimiError):
                ids = prompt_ids(given, tokenizer, CONFIG)
                fewest, most = prompt_bounds(given, CONFIG)
                assert fewest <= len(ids) <= most
                if given.raw:
                    assert tokenizer.decode_bytes(ids) == data
        ids = [int.from_bytes(data[at : at + 2], "big") % 512 for at in range(0, len(data) - 1, 2)]
        for thinking in ("off", "high"):
            parser = AnswerParser(tokenizer, thinking)
            pieces = [piece for token in ids for piece in parser.push(token)] + parser.finish()
            json.dumps([pieces, call_object(parser.tools)])
            whole = closers(tokenizer, ids, thinking)
            assert not whole or whole[-1]

    return read


def text_seeds() -> list[bytes]:
    tokenizer = _tokenizer()

    def ids(*parts: str) -> bytes:
        found: list[int] = []
        for part in parts:
            found += [tokenizer.special(part)] if part.startswith("<|") else tokenizer.encode(part)
        return b"".join(token.to_bytes(2, "big") for token in found)

    opening, closing, sep, end = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
    call = (opening, 'call tool="f" index="1"', sep)
    argument = (opening, 'argument key="a" type="number"', sep, "1e3", closing, "argument", sep)
    return [
        b"hi",
        b"\xef\xbb\xbfhi\r\n\0",
        b"\xff",
        "\u4f60\u597d \U0001f600 e\u0301".encode(),
        b"a" * 3000,
        ids("hi", closing, "response", sep, end),
        ids(opening, "tools", sep, *call, *argument, closing, "call", sep, closing, "tools", sep),
        ids(opening, "tools", sep, *call, opening, "json", sep, "{}", closing, "json", sep),
        ids(opening, "think", sep, "hm", closing, "thi"),
        ids(opening, opening, sep, sep, closing, end, end),
    ]


TARGETS = {
    "messages": either(Target(messages, messages_seeds), Target(text, text_seeds)),
    "prompts": Target(prompts, prompts_seeds),
    "lines": either(Target(ledger, ledger_seeds), Target(trace, trace_seeds)),
}
