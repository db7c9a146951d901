"""Conversations from outside, an OpenAI-style list of messages, checked once and made into turns.

Whatever JSON holds, the outcome is turns or one UsageError that names the place. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kimi_cli.errors import UsageError
from kimi_cli.tokenizer import shown

ROLES = ("system", "user", "assistant", "tool")
Attribute = tuple[str, str]
"""key, value"""

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_KIND = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


@dataclass(frozen=True)
class Call:
    """One call of the assistant; a section is a tag, its attributes and its text."""

    call_id: str | None
    name: str
    sections: list[tuple[str, list[Attribute], str]]


@dataclass(frozen=True)
class Turn:
    """One checked message. `answers` is, for a result, its call's place among the calls."""

    role: str
    name: str
    texts: list[str]
    reasoning: str
    calls: list[Call]
    answers: int
    tool: str


def parse_messages(
    data: object,
) -> tuple[list[dict[str, object]], list[dict[str, object]] | None]:
    """Messages and tools (None: none) of a parsed JSON file, fit for `encode_chat`.

    `data` is the list of messages, or an object with `messages` and perhaps `tools`; other keys
    are not looked at. Raises UsageError naming the first thing that is wrong.
    """
    messages, tools = data, None
    if isinstance(data, dict):
        if "messages" not in data:
            raise UsageError("messages are missing: wanted a list, or an object with messages")
        messages, tools = data["messages"], data.get("tools")
    check_turns(messages)
    check_tools(tools)
    return messages, tools or None  # type: ignore[return-value]  # checked by the two above


def check_turns(messages: object) -> list[Turn]:
    """The messages as turns. Raises UsageError naming the first thing that is wrong."""
    if not isinstance(messages, list):
        raise UsageError(f"messages want a list of objects, found {_kind(messages)}")
    if not messages:
        raise UsageError("messages want at least one message, found an empty list")
    turns: list[Turn] = []
    calls: list[Call] = []
    answered: set[int] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise UsageError(f"{where} wants an object, found {_kind(message)}")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            found = shown(role) if isinstance(role, str) else _kind(role)
            raise UsageError(f"{where} wants a role of {', '.join(ROLES)}, found {found}")
        answers = 0
        if role == "assistant":
            calls, answered = _calls(message, where), set()
        elif "content" not in message:
            raise UsageError(f"{where} has no content: wanted a string, a list of parts or null")
        elif role == "tool":
            call_id = _text(message, "tool_call_id", where)
            answers = next((n for n, call in enumerate(calls) if call.call_id == call_id), -1)
            if answers < 0 or answers in answered:
                raise UsageError(
                    f"{where} wants the tool_call_id of an unanswered call in the last assistant "
                    f"message, found {shown(call_id)}"
                )
            answered.add(answers)
        thought = _text(message, "reasoning_content", where), _text(message, "reasoning", where)
        turns.append(
            Turn(
                role=role,
                name=_text(message, "name", where),
                texts=_texts(message.get("content"), f"{where}.content"),
                reasoning=thought[0] or thought[1],
                calls=calls if role == "assistant" else [],
                answers=answers,
                tool=calls[answers].name if role == "tool" else "",
            )
        )
    return turns


def _text(holder: dict[str, object], key: str, where: str) -> str:
    """The string at `key`; empty when it is null or absent."""
    value = holder.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where}.{key} wants a string, found {_kind(value)}")
    return value or ""


def _texts(content: object, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UsageError(f"{where} wants a string, a list of parts or null, found {_kind(content)}")
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise UsageError(f"{where}[{index}] wants an object, found {_kind(part)}")
        kind = _text(part, "type", f"{where}[{index}]")
        if kind != "text":
            raise UsageError(
                f"{where}[{index}] wants type 'text', the only kind this program reads, "
                f"found {shown(kind)}"
            )
        if "text" not in part:
            raise UsageError(f"{where}[{index}] is a text part without text: wanted a string")
        texts.append(_text(part, "text", f"{where}[{index}]"))
    return texts


def _calls(message: dict[str, object], where: str) -> list[Call]:
    listed = message.get("tool_calls")
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise UsageError(f"{where}.tool_calls wants a list, found {_kind(listed)}")
    calls: list[Call] = []
    for index, item in enumerate(listed):
        here = f"{where}.tool_calls[{index}]"
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(function, dict):
            raise UsageError(f"{here} wants an object with a function object, found no such thing")
        kind = _text(item, "type", here) or "function"
        if kind != "function":
            raise UsageError(f"{here}.type wants 'function', found {shown(kind)}")
        name = _text(function, "name", f"{here}.function")
        if not name:
            raise UsageError(f"{here}.function.name wants a tool's name, found none")
        call_id = _text(item, "id", here) or None
        if call_id and any(call_id == earlier.call_id for earlier in calls):
            raise UsageError(f"{here}.id wants an id of its own, found {shown(call_id)} again")
        sections = _arguments(function.get("arguments"), f"{here}.function.arguments")
        calls.append(Call(call_id, name, sections))
    return calls


def _arguments(given: object, where: str) -> list[tuple[str, list[Attribute], str]]:
    """One section an argument, or a single raw one for a string that is no JSON object.

    NaN and infinities, which Python would read, are not JSON.
    """
    if not isinstance(given, str | dict):
        raise UsageError(f"{where} wants a string of JSON or an object, found {_kind(given)}")
    try:
        values = json.loads(given) if isinstance(given, str) else given
        if isinstance(values, dict):
            return [
                (
                    "argument",
                    [("key", str(key)), ("type", _kind(value))],
                    value if isinstance(value, str) else _dump(value),
                )
                for key, value in values.items()
            ]
    except (TypeError, ValueError, RecursionError) as error:
        if not isinstance(given, str):
            raise UsageError(f"{where} cannot be written as JSON: {error}") from error
    return [("json", [("type", "object")], str(given))]


def check_tools(tools: object) -> str | None:
    """The body of the message that declares `tools`; None when there are none."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise UsageError(f"tools want a list of objects, found {_kind(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UsageError(f"tools[{index}] wants an object, found {_kind(tool)}")
    try:
        return _TOOLS.format(_dump(tools, sort_keys=True))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"tools cannot be written as JSON: {error}") from error


def declared_tools(body: str) -> list[dict[str, object]]:
    """The tools that `check_tools` made `body` of. Raises ValueError if it did not."""
    opening, _, closing = _TOOLS.partition("{}")
    inner = body.removeprefix(opening).removesuffix(closing)
    try:
        tools: list[dict[str, object]] = json.loads(inner)
        if check_tools(tools) == body:
            return tools
    except (ValueError, RecursionError, UsageError):
        pass
    raise ValueError("not a declaration of tools")


def _dump(value: object, sort_keys: bool = False) -> str:
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys
    )


def _kind(value: object) -> str:
    """The JSON name of the type of `value`."""
    return _KIND.get(type(value), type(value).__name__)
