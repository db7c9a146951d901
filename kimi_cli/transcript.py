"""A conversation as OpenAI-style messages, fit for `kimi generate --messages`. Pure."""

from __future__ import annotations

import re
from typing import Any

from kimi_cli.calls import parse_calls
from kimi_cli.channels import AnswerParser
from kimi_cli.conversation import declared_tools
from kimi_cli.errors import UsageError
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.turns import History, Turn, answer_channels, opened

_ROLE = re.compile(r'role="(system|user)"(?: name="([^"]*)")?')


def transcript(history: History, tokenizer: Tokenizer) -> Any:
    """A list of messages, or an object with `messages` and `tools` where tools are declared.

    Raises UsageError where the conversation began with messages that are not a user's or a system
    message: those are in the file that it was begun with.
    """
    messages: list[dict[str, Any]] = []
    for turn in history.turns:
        for text in turn.messages:
            attributes, body = opened(text)
            match = _ROLE.fullmatch(attributes)
            if match is None:
                raise UsageError(
                    "the conversation holds messages of an assistant or a tool that were given to "
                    "it, which cannot be written out again"
                )
            name = (match[2] or "").replace("&quot;", '"').replace("&amp;", "&")
            messages.append({"role": match[1], "content": body, **({"name": name} if name else {})})
        messages.append(_answer(turn, history.head.thinking, tokenizer))
    tools = history.head.tools
    if tools is None:
        return messages
    return {"messages": messages, "tools": declared_tools(tools)}


def _answer(turn: Turn, thinking: str, tokenizer: Tokenizer) -> dict[str, Any]:
    reasoning, response, _ = answer_channels(turn, thinking, tokenizer)
    parser = AnswerParser(tokenizer, thinking)
    for token in turn.ids:
        parser.push(token)
    calls, _ = parse_calls(parser.tools)
    message: dict[str, Any] = {"role": "assistant", "content": response}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
