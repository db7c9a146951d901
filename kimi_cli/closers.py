"""What an answer that was cut off still lacks to be a whole message. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kimi_cli.chat import Control, Piece
from kimi_cli.tokenizer import Tokenizer

_CHANNELS = ("think", "response", "tools")


def closers(tokenizer: Tokenizer, ids: Sequence[int], thinking: str = "off") -> list[Piece]:
    """The pieces that complete the message that the answer `ids` began; none if it is whole.

    `ids` start where the prompt of `encode_chat` with the same `thinking` ends. A tag that was cut
    is completed first; an answer that ends while thinking gets an empty response.
    """
    reader = _Reader("response" if thinking == "off" else "think")
    control = {tokenizer.special(member.value): member for member in Control}
    for token in ids:
        if token in control:
            reader.take(control[token])
        elif reader.mark is not None and not tokenizer.is_special(token):
            reader.tag += tokenizer.decode_bytes((token,))
        reader.ended = control.get(token) is Control.END
    return [] if reader.ended else reader.rest()


class _Reader:
    """The sections that are open after what has been taken, outermost first."""

    def __init__(self, channel: str) -> None:
        self.open = ["message", channel]
        self.responded = channel == "response"
        self.mark: Control | None = None  # OPEN or CLOSE while a tag is being read
        self.tag = b""
        self.ended = False

    def take(self, token: Control) -> None:
        if token is Control.SEP:
            if self.mark is not None:
                self._pass(self.mark, self.tag.decode("utf-8", "replace").partition(" ")[0])
            self.mark = None
        elif token is Control.END:
            self.mark, self.open = None, []
        else:
            self.mark, self.tag = token, b""

    def _pass(self, mark: Control, tag: str) -> None:
        if mark is Control.OPEN:
            if tag == "message":
                self.open = []
            elif tag in _CHANNELS:
                del self.open[1:]  # a section without its closer ends where the next begins
                self.responded |= tag == "response"
            self.open.append(tag)
        elif tag in self.open:
            at = len(self.open) - 1 - self.open[::-1].index(tag)
            del self.open[at:]

    def rest(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self.mark is not None:
            pieces += self._rest_of_tag(self.mark)
        for tag in reversed(self.open):
            if tag == "message" and not self.responded:
                pieces += [Control.OPEN, "response", Control.SEP]
                pieces += [Control.CLOSE, "response", Control.SEP]
            pieces += [Control.CLOSE, tag, Control.SEP]
        return [*pieces, Control.END]

    def _rest_of_tag(self, mark: Control) -> list[Piece]:
        """The end of the tag that was cut: what it most likely was going to be."""
        begun = self.tag.decode("utf-8", "replace")
        likely = self.open[-1] if mark is Control.CLOSE and self.open else "response"
        whole = likely if likely.startswith(begun) else begun
        self._pass(mark, whole.partition(" ")[0])
        return [*([whole[len(begun) :]] if whole != begun else []), Control.SEP]
