"""Tool calls of an answer: its tools section read back to OpenAI-style calls. Pure.

    call tool=NAME | argument key=KEY type=TYPE | text | ... | end of call     one call
                   | json type=object           | text |     | end of call     its text as it is

What is not exactly that is given back as it came: half a call is never taken for a whole one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_cli.chat import Control, Piece, piece_text

_TAG = re.compile(r'(\w+)((?: \w+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')
_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


@dataclass(frozen=True)
class Item:
    """A tag, opened or closed, or the text between two; `pieces` are what it was read from."""

    mark: Control | None
    name: str
    attributes: dict[str, str] | None
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return piece_text(self.pieces)

    def is_tag(self, mark: Control, *names: str) -> bool:
        """Whether it opens, or closes, one of `names`."""
        return self.mark is mark and self.name in names


def parse_calls(pieces: Sequence[Piece]) -> tuple[list[dict[str, Any]], str]:
    """The whole calls of a tools section, and the text of the rest: white space between two calls
    is nothing. `pieces` are what `AnswerParser.tools` collects."""
    items, rest = list(_items(list(pieces))), ""
    calls: list[dict[str, Any]] = []
    at = 0
    while at < len(items):
        end = at + 1
        if items[at].is_tag(Control.OPEN, "call"):
            end = _call_end(items, at)
            function = _function(items[at:end])
            if function is not None:
                number = len(calls) + 1
                calls.append({"id": f"call_{number}", "type": "function", "function": function})
                at = end
                continue
        text = "".join(item.text for item in items[at:end])
        if items[at].mark is not None or text.strip():
            rest += text
        at = end
    return calls, rest


def call_object(pieces: Sequence[Piece]) -> dict[str, Any]:
    """What the JSON of an answer has about its tools: `tool_calls`, and `tool_text` for what is
    malformed; each only where there is any."""
    calls, rest = parse_calls(pieces)
    return {**({"tool_calls": calls} if calls else {}), **({"tool_text": rest} if rest else {})}


def _items(pieces: list[Piece]) -> Iterator[Item]:
    text: list[Piece] = []
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        if not isinstance(piece, Control):
            text.append(piece)
            at += 1
            continue
        if text:
            yield Item(None, "", None, tuple(text))
            text = []
        end = at + 1
        while end < len(pieces) and isinstance(pieces[end], str):
            end += 1
        if piece in (Control.OPEN, Control.CLOSE) and pieces[end : end + 1] == [Control.SEP]:
            match = _TAG.fullmatch(piece_text(pieces[at + 1 : end]))
            attributes = None if match is None else _attributes(match[2])
            yield Item(piece, match[1] if match else "", attributes, tuple(pieces[at : end + 1]))
            at = end + 1
        else:
            yield Item(piece, "", None, (piece,))
            at += 1
    if text:
        yield Item(None, "", None, tuple(text))


def _attributes(text: str) -> dict[str, str] | None:
    """None where a name is given twice."""
    pairs = _ATTRIBUTE.findall(text)
    found = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
    return found if len(found) == len(pairs) else None


def _call_end(items: Sequence[Item], at: int) -> int:
    """Where the call that begins at `at` ends, or the next one begins."""
    for end in range(at + 1, len(items)):
        if items[end].is_tag(Control.CLOSE, "call"):
            return end + 1
        if items[end].is_tag(Control.OPEN, "call"):
            return end
    return len(items)


def _function(items: Sequence[Item]) -> dict[str, str] | None:
    """The name and the arguments of a whole call; None if it is not one."""
    name = (items[0].attributes or {}).get("tool")
    if not name or len(items) < 2 or not items[-1].is_tag(Control.CLOSE, "call"):
        return None
    sections = _sections(items[1:-1])
    if sections is None:
        return None
    if [tag.name for tag, _ in sections] == ["json"]:
        return {"name": name, "arguments": sections[0][1]}
    values: dict[str, str] = {}
    for tag, text in sections:
        attributes = tag.attributes or {}
        key, value = attributes.get("key"), _value(attributes.get("type"), text)
        if tag.name != "argument" or key is None or key in values or value is None:
            return None
        values[key] = value
    pairs = (f"{json.dumps(key, ensure_ascii=False)}:{value}" for key, value in values.items())
    return {"name": name, "arguments": "{" + ",".join(pairs) + "}"}


def _sections(items: Sequence[Item]) -> list[tuple[Item, str]] | None:
    """Opening tags with their texts; None if there is anything else."""
    sections, at = [], 0
    while at < len(items):
        tag = items[at]
        inside = at + 1 < len(items) and items[at + 1].mark is None
        end = at + 1 + inside
        if not tag.is_tag(Control.OPEN, "argument", "json") or end >= len(items):
            return None
        if not items[end].is_tag(Control.CLOSE, tag.name):
            return None
        sections.append((tag, items[at + 1].text if inside else ""))
        at = end + 1
    return sections


def _value(kind: str | None, text: str) -> str | None:
    """An argument as JSON, digits as they were written; None if it is not of its type."""
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    right = type(value) in _TYPES.get(kind or "", ())
    return text.strip() if right else None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large")
    return value
