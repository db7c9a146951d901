"""The chat format: a conversation to the prompt ids for its answer.

Control tokens are `Control` members and text is str from the first line to the last, so nothing a
person, a tool or a file says can become a control token.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import groupby

from kimi_cli.conversation import Attribute, Turn, check_tools, check_turns
from kimi_cli.errors import UsageError
from kimi_cli.tokenizer import Tokenizer, shown

THINKING = ("off", "low", "medium", "high", "max")

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)


class Control(Enum):
    """The four control tokens of the format, by the names the checkpoint gives them."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END = "<|end_of_msg|>"


_Piece = Control | str  # tokenised on its own


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, object]],
    thinking: str = "off",
    tools: list[dict[str, object]] | None = None,
) -> list[int]:
    """Ids of the prompt for an answer to `messages`, an OpenAI-style list; no BOS.

    It ends inside the assistant's response, or inside its thinking unless `thinking` is "off".
    Results of tools are put in the order of the calls they answer. Raises UsageError for anything
    that is not a conversation in text, TokenizerError when the checkpoint lacks a control token.
    """
    if thinking not in THINKING:
        raise UsageError(f"thinking wants one of {', '.join(THINKING)}, found {shown(thinking)}")
    control = {member: tokenizer.special(member.value) for member in Control}
    ids: list[int] = []
    for piece in _prompt(check_turns(messages), thinking, check_tools(tools)):
        if isinstance(piece, Control):
            ids.append(control[piece])
        else:
            ids += tokenizer.encode(piece)
    return ids


def _prompt(turns: list[Turn], thinking: str, declaration: str | None) -> Iterator[_Piece]:
    if declaration is not None:
        yield from _system("tool-declare", declaration)
    if thinking != "off":
        yield from _system("thinking-effort", _EFFORT.format(thinking))
    results = 0
    for role, run in groupby(turns, key=lambda turn: turn.role):
        for turn in sorted(run, key=lambda turn: turn.answers):
            attributes = [("role", role)]
            if turn.name:
                attributes.append(("name", turn.name))
            if role == "tool":
                results += 1
                attributes += [("tool", turn.tool), ("index", str(results))]
            yield from _open("message", attributes)
            if role == "assistant":
                results = 0
                yield from _answer(turn, thinking)
            else:
                yield from turn.texts
            yield from _close("message")
            yield Control.END
    yield from _open("message", [("role", "assistant")])
    yield from _open("response" if thinking == "off" else "think")


def _answer(turn: Turn, thinking: str) -> Iterator[_Piece]:
    if thinking != "off":
        yield from _section("think", [], [turn.reasoning] if turn.reasoning.strip() else [])
    yield from _section("response", [], turn.texts)
    if turn.calls:
        yield from _open("tools")
        for index, call in enumerate(turn.calls, 1):
            yield from _open("call", [("tool", call.name), ("index", str(index))])
            for tag, attributes, text in call.sections:
                yield from _section(tag, attributes, [text])
            yield from _close("call")
        yield from _close("tools")


def _system(kind: str, body: str) -> Iterator[_Piece]:
    yield from _section("message", [("role", "system"), ("type", kind)], [body])
    yield Control.END


def _section(tag: str, attributes: list[Attribute], texts: list[str]) -> Iterator[_Piece]:
    yield from _open(tag, attributes)
    yield from texts
    yield from _close(tag)


def _open(tag: str, attributes: list[Attribute] | None = None) -> Iterator[_Piece]:
    yield Control.OPEN
    yield tag
    for key, value in attributes or []:
        yield from (f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"')
    yield Control.SEP


def _close(tag: str) -> Iterator[_Piece]:
    yield from (Control.CLOSE, tag, Control.SEP)
