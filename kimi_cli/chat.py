"""The chat format: a conversation to the prompt ids for its answer.

Control tokens are `Control` members and text is str from the first line to the last, so nothing a
person, a tool or a file says can become a control token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


Piece = Control | str
"""Tokenised on its own."""


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
    preamble = list(_preamble(thinking, check_tools(tools)))
    found = message_pieces(check_turns(messages), thinking)
    rest = [piece for _, pieces in found for piece in pieces]
    return encode_pieces(tokenizer, [*preamble, *rest, *answer_opening(thinking)])


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """Ids of `pieces`, each on its own. Raises TokenizerError for an absent control token."""
    control = {member: tokenizer.special(member.value) for member in Control}
    ids: list[int] = []
    for piece in pieces:
        ids += [control[piece]] if isinstance(piece, Control) else tokenizer.encode(piece)
    return ids


def piece_text(pieces: Iterable[Piece]) -> str:
    """What `pieces` say, control tokens by name."""
    return "".join(piece.value if isinstance(piece, Control) else piece for piece in pieces)


def _preamble(thinking: str, declaration: str | None) -> Iterator[Piece]:
    if declaration is not None:
        yield from _system("tool-declare", declaration)
    if thinking != "off":
        yield from _system("thinking-effort", _EFFORT.format(thinking))


def message_pieces(turns: list[Turn], thinking: str) -> list[tuple[Turn, list[Piece]]]:
    """Each message with its pieces, in the order in which they are read: results of tools stand in
    the order of the calls they answer. `turns` are a whole conversation."""
    messages: list[tuple[Turn, list[Piece]]] = []
    results = 0
    for role, run in groupby(turns, key=lambda turn: turn.role):
        for turn in sorted(run, key=lambda turn: turn.answers):
            attributes = [("role", role)]
            if turn.name:
                attributes.append(("name", turn.name))
            if role == "tool":
                results += 1
                attributes += [("tool", turn.tool), ("index", str(results))]
            if role == "assistant":
                results = 0
            body = _answer(turn, thinking) if role == "assistant" else turn.texts
            messages.append((turn, [*_section("message", attributes, body), Control.END]))
    return messages


def answer_opening(thinking: str) -> list[Piece]:
    """What makes the model answer."""
    channel = "response" if thinking == "off" else "think"
    return [*_open("message", [("role", "assistant")]), *_open(channel)]


def _answer(turn: Turn, thinking: str) -> Iterator[Piece]:
    if thinking != "off":
        yield from _section("think", [], [turn.reasoning] if turn.reasoning.strip() else [])
    yield from _section("response", [], turn.texts)
    if turn.calls:
        yield from _section("tools", [], call_pieces(turn))


def call_pieces(turn: Turn) -> Iterator[Piece]:
    """What stands in the tools section of an assistant's message."""
    for index, call in enumerate(turn.calls, 1):
        yield from _open("call", [("tool", call.name), ("index", str(index))])
        for tag, attributes, text in call.sections:
            yield from _section(tag, attributes, [text])
        yield from _close("call")


def _system(kind: str, body: str) -> Iterator[Piece]:
    yield from _section("message", [("role", "system"), ("type", kind)], [body])
    yield Control.END


def _section(tag: str, attributes: list[Attribute], body: Iterable[Piece]) -> Iterator[Piece]:
    yield from _open(tag, attributes)
    yield from body
    yield from _close(tag)


def _open(tag: str, attributes: list[Attribute] | None = None) -> Iterator[Piece]:
    yield Control.OPEN
    yield tag
    for key, value in attributes or []:
        yield from (f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"')
    yield Control.SEP


def _close(tag: str) -> Iterator[Piece]:
    yield from (Control.CLOSE, tag, Control.SEP)
