"""From the prompt on the command line to the ids that are fed, and from ids back to text."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kimi_cli.channels import AnswerParser
from kimi_cli.chat import Piece
from kimi_cli.config import Config
from kimi_cli.conversation import parse_messages
from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.jsonfile import parse_json
from kimi_cli.stop import StopTexts
from kimi_cli.tokenizer import TextStream, Tokenizer
from kimi_cli.turns import Asked, begin

CHAT_TOKENS, THINKING_TOKENS = 128, 256
"""More than the chat format adds to a prompt and its system message; the note on thinking effort.
Counted at a byte a token, the most that any vocabulary can make of it."""
MAX_BYTES = 1 << 28
"""Of a prompt; a file that does not end, a device, is not read for ever."""
_PIECE = 1 << 20
MESSAGE_FACTOR = 3
"""More than the chat format makes of a byte of `--messages`, whose JSON is the terser one."""


@dataclass(frozen=True)
class Given:
    """The prompt options of `generate`; of text, ids, file, messages and conversation exactly one
    is set. `conversation` is what a file of `messages` holds.

    `thinking` None is off, or what the session was begun with.
    """

    text: str | None = None
    ids: str | None = None
    file: Path | None = None
    messages: Path | None = None
    raw: bool = False
    system: str | None = None
    thinking: str | None = None
    conversation: object | None = None

    def __post_init__(self) -> None:
        sources = {
            "PROMPT": self.text,
            "--ids": self.ids,
            "--prompt-file": self.file,
            "--messages": self.messages,
            "messages": self.conversation,
        }
        named = [name for name, value in sources.items() if value is not None]
        if len(named) != 1:
            wanted = "PROMPT, --prompt-file, --messages or --ids"
            raise UsageError(
                f"give one prompt, not {' and '.join(named)}"
                if named
                else f"no prompt: give one of {wanted}"
            )
        if self.raw and (self.messages is not None or self.conversation is not None):
            raise UsageError("--raw continues a text; it cannot be combined with --messages")
        if self.system is not None and (self.raw or self.ids is not None):
            raise UsageError("--system belongs to the chat format; --raw and --ids do not use it")

    @property
    def chat(self) -> bool:
        """Whether the answer comes in the chat format."""
        return not self.raw and self.ids is None

    @property
    def effort(self) -> str:
        """`thinking` with its default filled in."""
        return self.thinking or "off"


def ask(given: Given, tokenizer: Tokenizer | None, config: Config) -> Asked:
    """What the prompt options ask for. Raises UsageError when that is empty, malformed or out of
    range, and TokenizerError for a text without a tokenizer."""
    if given.ids is not None:
        return Asked(ids=parse_ids(given.ids, config.vocab_size))
    if tokenizer is None:
        raise TokenizerError("the checkpoint has no tiktoken.model: only --ids can be used with it")
    conversation = given.conversation if given.messages is None else _json(given.messages)
    if conversation is not None or given.messages is not None:
        messages, tools = parse_messages(conversation)
        return Asked(None, None, messages, tools, given.system, given.thinking)
    text = _read_text(given.file) if given.file is not None else given.text or ""
    if not text:
        raise UsageError("the prompt is empty: it needs at least one character")
    if given.raw:
        return Asked(ids=check_ids(tokenizer.encode(text), config))
    return Asked(text=text, system=given.system, thinking=given.thinking)


def prompt_ids(given: Given, tokenizer: Tokenizer | None, config: Config) -> list[int]:
    """The whole prompt as fed. Raises as `ask` does."""
    return check_ids(begin(ask(given, tokenizer, config), tokenizer).prompt, config)


def check_ids(ids: list[int], config: Config) -> list[int]:
    """`ids` of a tokenizer. Raises TokenizerError if the model has not that many."""
    if max(ids, default=0) >= config.vocab_size:
        raise TokenizerError(
            f"the tokenizer gives id {max(ids)}, beyond the model's vocabulary of "
            f"{config.vocab_size}: tiktoken.model and config.json are not of one checkpoint"
        )
    return ids


def prompt_bounds(given: Given, config: Config) -> tuple[int, int]:
    """Fewest and most tokens that the prompt can have, without a tokenizer."""
    if given.ids is not None:
        count = len(parse_ids(given.ids, config.vocab_size))
        return count, count
    texts = [given.text or "", given.system or ""]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    for path, factor in ((given.file, 1), (given.messages, MESSAGE_FACTOR)):
        if path is not None and path.is_file():
            size += path.stat().st_size * factor
    note = 0 if given.effort == "off" else THINKING_TOKENS
    return 1, size + CHAT_TOKENS + note


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """`1,2,3` as ids below `vocab_size`. Raises UsageError."""
    ids = []
    for word in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", word, re.ASCII):
            raise UsageError(f"--ids wants numbers with commas between, like 1,2,3, not {word!r}")
        ids.append(int(word))
        if ids[-1] >= vocab_size:
            raise UsageError(f"id {ids[-1]} is outside the vocabulary: 0 to {vocab_size - 1}")
    return ids


def _read_bytes(path: Path) -> bytes:
    try:
        if str(path) == "-":
            raw = _read_most(sys.stdin.buffer)
        else:
            with path.open("rb") as file:
                raw = _read_most(file)
    except (OSError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "standard input is closed"
        raise UsageError(f"{path}: cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES:,} bytes, which no context holds")
    return raw


def _read_most(file: BinaryIO) -> bytes:
    """All of `file`, or more than MAX_BYTES of it. Asked for at once, those would be allocated."""
    pieces: list[bytes] = []
    size = 0
    while size <= MAX_BYTES and (piece := file.read(_PIECE)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _read_text(path: Path) -> str:
    """The file's text exactly as stored: BOM, CRLF and a last newline kept."""
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None


def _json(path: Path) -> object:
    try:
        data: object = parse_json(_read_bytes(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return data


def token_text(tokenizer: Tokenizer | None, token: int) -> str | None:
    """The text of one token; None where it has none of its own, being a part of a character."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return None
    try:
        return tokenizer.decode_bytes((token,)).decode("utf-8")
    except UnicodeDecodeError:
        return None


class Answer:
    """The text of an answer as its ids come: complete characters only, channels kept apart.

    `push` and `finish` return what can be shown now: the response in the chat format, everything
    in a continuation, up to the first of the `stop` texts in it. `text` and `reasoning` hold all of
    it so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        given: Given,
        end_ids: frozenset[int],
        stop: Sequence[str] = (),
    ) -> None:
        self.text = self.reasoning = ""
        self._runs: list[tuple[str, int]] = []  # [channel, characters] of `text` and what is held
        self._stop = StopTexts(stop)
        self._end = end_ids
        self._stream = None if given.chat else TextStream(tokenizer)
        self._parser = AnswerParser(tokenizer, given.effort) if given.chat else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was completed."""
        return self._stop.found

    @property
    def tools(self) -> list[Piece]:
        """The tools section so far, whatever the stop texts cut off."""
        return self._parser.tools if self._parser is not None else []

    def channel(self, kind: str) -> str:
        """The part of `text` that is `kind`: "response" or "tools"."""
        at, parts = 0, []
        for channel, size in self._runs:
            end = at + size
            if channel == kind:
                parts.append(self.text[at:end])
            at = end
        return "".join(parts)

    def push(self, token: int) -> str:
        """What `token` adds to the shown text; end tokens add nothing."""
        if self._parser is not None:
            return self._keep(self._parser.push(token))
        assert self._stream is not None
        return self._keep([("response", "" if token in self._end else self._stream.push(token))])

    def finish(self) -> str:
        """What was held back in the hope of completing a character, or a stop text."""
        if self._parser is not None:
            pieces = self._parser.finish()
        else:
            assert self._stream is not None
            pieces = [("response", self._stream.finish())]
        shown, rest = self._keep(pieces), self._stop.finish()
        self.text += rest
        return shown + rest

    def _keep(self, pieces: list[tuple[str, str]]) -> str:
        said = [(kind, text) for kind, text in pieces if kind != "reasoning"]
        for kind, text in said:
            if not self._runs or self._runs[-1][0] != kind:
                self._runs.append((kind, 0))
            self._runs[-1] = (kind, self._runs[-1][1] + len(text))
        shown = self._stop.push("".join(text for _, text in said))
        self.text += shown
        self.reasoning += "".join(text for kind, text in pieces if kind == "reasoning")
        return shown
