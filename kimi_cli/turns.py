"""What a session's next run does: print its last turn, continue it, or add one. Pure: no I/O.

    same prompt, finished or long enough  ->  print it, compute nothing
    same prompt, not finished             ->  go on with it
    another prompt                        ->  closers not emitted yet | what is new | the opening

What was read cannot be unread: a request that would change it is refused with a UsageError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kimi_cli.channels import AnswerParser
from kimi_cli.chat import (
    Piece,
    answer_opening,
    call_pieces,
    encode_chat,
    encode_pieces,
    message_pieces,
    piece_text,
)
from kimi_cli.closers import closers
from kimi_cli.conversation import Turn as Message
from kimi_cli.conversation import check_tools, check_turns
from kimi_cli.errors import UsageError
from kimi_cli.stop import StopTexts
from kimi_cli.tokenizer import Tokenizer, shown

_CLOSING = "<|close|>message<|sep|><|end_of_msg|>"

Said = dict[str, object]
"""A message from outside, as `encode_chat` takes it."""


@dataclass(frozen=True)
class Head:
    """What holds for a whole session. `model` is the fingerprint's digest in hex; `tools` is the
    body of the message that declares them. Without `chat` it is a text that goes on."""

    session: str
    model: str
    chat: bool
    thinking: str = "off"
    tools: str | None = None


@dataclass
class Turn:
    """A prompt and its answer as far as it has come.

    `prompt` are the ids fed for it, closers of the turn before included; of that one's ids the last
    `dropped` are not part of the sequence. `messages` are the texts of the chat messages that
    `prompt` brings. `ids` is the answer, `reason` (eos or stop) what ended it; None: nothing has.
    """

    messages: list[str]
    prompt: list[int]
    dropped: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    reason: str | None = None


@dataclass
class History:
    """A session's turns so far; none only where it was cut off before the first."""

    head: Head
    turns: list[Turn]

    def before(self, count: int) -> list[int]:
        """Ids of the sequence up to the answer of turn number `count`, without it."""
        ids: list[int] = []
        for turn in islice(self.turns, count + 1):
            if turn.dropped:
                del ids[-turn.dropped :]
            ids += turn.prompt
            ids += turn.ids
        return ids[: len(ids) - len(self.turns[count].ids)]

    @property
    def ids(self) -> list[int]:
        """The whole sequence."""
        if not self.turns:
            return []
        return self.before(len(self.turns) - 1) + self.turns[-1].ids


@dataclass(frozen=True)
class Asked:
    """What a run asks for. Of `ids` (a continuation), `text` (a user's message) and `messages` (a
    conversation) one is set. `thinking` and `system` None: as they were."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[Said] | None = None
    tools: list[Said] | None = None
    system: str | None = None
    thinking: str | None = None

    @property
    def chat(self) -> bool:
        """Whether the answer comes in the chat format."""
        return self.ids is None

    @property
    def declaration(self) -> str | None:
        """The body of the message that declares the tools."""
        return check_tools(self.tools)


@dataclass(frozen=True)
class Step:
    """The turn to answer or to print, and whether the session has it yet."""

    turn: Turn
    new: bool

    def left(self, max_tokens: int) -> bool:
        """Whether anything is to be computed to have `max_tokens` ids."""
        return self.new or (self.turn.reason is None and len(self.turn.ids) < max_tokens)


def begin(asked: Asked, tokenizer: Tokenizer | None) -> Turn:
    """The first turn of a session. Raises UsageError as `encode_chat` does."""
    if asked.ids is not None:
        return Turn([], asked.ids)
    assert tokenizer is not None
    said, thinking = _conversation(asked), asked.thinking or "off"
    prompt = encode_chat(tokenizer, said, thinking, asked.tools)
    return Turn(_texts(check_turns(said), thinking), prompt)


def decide(history: History, asked: Asked, tokenizer: Tokenizer | None) -> Step:
    """What to do about `asked` after `history`. A chat needs its tokenizer.

    Raises UsageError for another kind of prompt, another --system or --thinking, other tools, and
    messages that do not extend the history, naming the position where they part.
    """
    head, last = history.head, history.turns[-1]
    if head.chat != asked.chat:
        raise UsageError(
            "the session is a conversation, which --raw and --ids cannot continue"
            if head.chat
            else "the session continues a text: it goes on with --raw or --ids"
        )
    if asked.ids is not None:
        same = asked.ids == last.prompt
        return Step(last, False) if same else Step(Turn([], asked.ids), True)
    assert tokenizer is not None
    check_terms(history, asked.thinking, asked.system)
    if asked.messages is not None:
        return _extend(history, asked, tokenizer)
    pieces = _question(asked.text or "", head.thinking)
    if last.messages[-1:] == [piece_text(pieces)]:
        return Step(last, False)
    return Step(_next(history, [pieces], tokenizer), True)


def follow(history: History, text: str, tokenizer: Tokenizer) -> Turn:
    """The next turn of a conversation: a user's message `text`, even if it is the one before."""
    return _next(history, [_question(text, history.head.thinking)], tokenizer)


def check_terms(history: History, thinking: str | None, system: str | None) -> None:
    """Raises UsageError for another --thinking or --system than the session was begun with."""
    begun = history.head.thinking
    if thinking not in (None, begun):
        raise UsageError(
            f"the session was begun with --thinking {begun}, found {thinking}: what was read "
            "cannot be unread"
        )
    _check_system(history, system)


def _question(text: str, thinking: str) -> list[Piece]:
    """The message of a user who says `text`."""
    ((_, pieces),) = message_pieces(check_turns([{"role": "user", "content": text}]), thinking)
    return pieces


def _conversation(asked: Asked) -> list[Said]:
    system = [] if asked.system is None else [_system(asked.system)]
    return [*system, *(asked.messages or [{"role": "user", "content": asked.text}])]


def _system(text: str) -> Said:
    return {"role": "system", "content": text}


def _texts(messages: list[Message], thinking: str) -> list[str]:
    return [piece_text(pieces) for _, pieces in message_pieces(messages, thinking)]


def system_text(history: History) -> str | None:
    """The system message that the session was begun with, if any."""
    first = history.turns[0].messages[:1] if history.turns else []
    role, text = opened(first[0]) if first else ("", "")
    return text if role == 'role="system"' else None


def _check_system(history: History, system: str | None) -> None:
    begun = system_text(history)
    if system is None or system == begun:
        return
    found = "none" if begun is None else shown(begun)
    raise UsageError(
        f"the session was begun with {found} as its --system, found {shown(system)}: "
        "what was read cannot be unread"
    )


def _next(history: History, messages: Sequence[list[Piece]], tokenizer: Tokenizer) -> Turn:
    """A turn of new `messages` after an answer that is closed first."""
    last, thinking = history.turns[-1], history.head.thinking
    ids = last.ids
    # [EOS] ends an answer without being part of a conversation; the last id was never fed
    dropped = int(bool(ids) and ids[-1] in tokenizer.end_ids and ids[-1] != _end(tokenizer))
    missing = closers(tokenizer, ids[: len(ids) - dropped], thinking)
    pieces = [*(piece for message in messages for piece in message), *answer_opening(thinking)]
    texts = [piece_text(message) for message in messages]
    return Turn(texts, encode_pieces(tokenizer, [*missing, *pieces]), dropped)


def _end(tokenizer: Tokenizer) -> int:
    return tokenizer.special("<|end_of_msg|>")


def _extend(history: History, asked: Asked, tokenizer: Tokenizer) -> Step:
    head = history.head
    if asked.declaration != head.tools:
        raise UsageError("the tools are not those the session was begun with")
    given = message_pieces(check_turns(_conversation(asked)), head.thinking)
    known: list[str | Turn] = []
    for turn in history.turns:
        known += [*turn.messages, turn]
    shift = int(asked.system is not None)  # --system stands before messages[0]
    for at, ((message, pieces), entry) in enumerate(zip(given, known, strict=False)):
        where = f"messages[{at - shift}]" if at >= shift else "--system"
        if isinstance(entry, str):
            _compare(where, opened(entry), opened(piece_text(pieces)))
        else:
            _compare_answer(where, entry, message, head.thinking, tokenizer)
    if len(given) == len(known) - 1:
        return Step(history.turns[-1], False)
    if len(given) < len(known):
        raise UsageError(
            f"the messages end after {len(given) - shift}, where the session has "
            f"{len(known) - len(given)} more: they must extend it, since what was read cannot be "
            "unread"
        )
    return Step(_next(history, [pieces for _, pieces in given[len(known) :]], tokenizer), True)


def opened(text: str) -> tuple[str, str]:
    """The attributes of a message in `Turn.messages`, and its text."""
    tag, _, body = text.partition("<|sep|>")
    return tag.removeprefix("<|open|>message "), body.removesuffix(_CLOSING)


def _compare(where: str, known: tuple[str, str], given: tuple[str, str]) -> None:
    if known == given:
        return
    part = int(known[0] == given[0])
    at = _parting(known[part], given[part])
    place = f"at character {at} of its text" if part else "in its role or name"
    start = at if part else 0
    raise UsageError(
        f"{where} parts from the session {place}: the session has "
        f"{shown(known[part][start:])}, found {shown(given[part][start:])}; what was read cannot "
        "be unread"
    )


def _parting(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _compare_answer(
    where: str, turn: Turn, message: Message, thinking: str, tokenizer: Tokenizer
) -> None:
    """An assistant's message against the answer it stands for. Its reasoning may be left out."""
    if message.role != "assistant":
        _compare(where, ('role="assistant"', ""), (f'role="{message.role}"', ""))
    reasoning, response, tools = answer_channels(turn, thinking, tokenizer)
    _compare(where, ("", response), ("", "".join(message.texts)))
    _compare(f"{where}.tool_calls", ("", tools), ("", piece_text(call_pieces(message))))
    if message.reasoning.strip():
        _compare(f"{where}.reasoning_content", ("", reasoning), ("", message.reasoning))


def answer_channels(turn: Turn, thinking: str, tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Reasoning, response and tools section of a chat's answer, as they were shown."""
    parser = AnswerParser(tokenizer, thinking)
    pieces = [piece for token in turn.ids for piece in parser.push(token)] + parser.finish()
    reasoning, response, tools = (
        "".join(text for kind, text in pieces if kind == channel)
        for channel in ("reasoning", "response", "tools")
    )
    if turn.reason == "stop":
        shown_text = StopTexts(turn.stops).push(response + tools)
        response, tools = shown_text[: len(response)], shown_text[len(response) :]
    return reasoning, response, tools
