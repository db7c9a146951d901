"""The channels of an answer: emitted ids parsed back to reasoning, response and tools."""

from __future__ import annotations

from kimi_cli.chat import Control, Piece
from kimi_cli.tokenizer import TextStream, Tokenizer

_CHANNEL = {"think": "reasoning", "response": "response", "tools": "tools"}  # by tag


class AnswerParser:
    """The text of an answer, by channel, from ids that arrive one at a time. For one thread.

    Pieces are ("reasoning" | "response" | "tools", text). Tags and control tokens are hidden, but
    for those inside the tools section, which comes as the model wrote it. A section whose closer
    is missing ends where the next begins; text after the thinking is response even without its
    opener; other text outside a section is dropped. `tools` is the tools section so far, in which
    no text can be taken for a control token.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: str = "off") -> None:
        """Start where the prompt of `encode_chat` with the same `thinking` ends."""
        self.tools: list[Piece] = []
        self._tokenizer = tokenizer
        self._control = {tokenizer.special(member.value): member for member in Control}
        self._stream = TextStream(tokenizer)
        self._channel: str | None = "response" if thinking == "off" else "reasoning"
        self._mark: Control | None = None  # OPEN or CLOSE while a tag is being read
        self._tag = b""

    def push(self, token_id: int) -> list[tuple[str, str]]:
        """The pieces that `token_id` completes; UsageError for one outside the vocabulary."""
        if not self._tokenizer.is_special(token_id):
            if self._mark is None:
                return self._said(self._stream.push(token_id))
            self._tag += self._tokenizer.decode_bytes((token_id,))
            return []
        pieces = self.finish()
        control = self._control.get(token_id)
        if control in (Control.OPEN, Control.CLOSE):
            self._mark, self._tag = control, b""
        elif control is Control.SEP and self._mark is not None:
            pieces += self._pass_tag(self._mark, self._tag.decode("utf-8", "replace"))
            self._mark = None
        elif token_id in self._tokenizer.end_ids:
            self._mark, self._channel = None, None
        return pieces

    def finish(self) -> list[tuple[str, str]]:
        """The piece that waited for the rest of a character, ended by U+FFFD."""
        return self._said(self._stream.finish())

    def _said(self, text: str) -> list[tuple[str, str]]:
        if not text or not self._channel:
            return []
        if self._channel == "tools":
            self.tools.append(text)
        return [(self._channel, text)]

    def _pass_tag(self, mark: Control, text: str) -> list[tuple[str, str]]:
        """Enter or leave a section; what a tag adds to the text, which is seldom anything."""
        tag = text.partition(" ")[0]
        if tag == "message":
            self._channel = None
        elif tag in _CHANNEL:
            if mark is Control.OPEN:
                self._channel = _CHANNEL[tag]
            elif self._channel == _CHANNEL[tag]:
                self._channel = "response" if tag == "think" else None
        elif self._channel == "tools":
            self.tools += [mark, text, Control.SEP]
            return [("tools", f"{mark.value}{text}{Control.SEP.value}")]
        return []
