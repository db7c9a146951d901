"""Stop texts, found in a text that arrives in pieces, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Passes a text on until one of `texts` is complete in it; that one is never passed on.

    What could be the beginning of a stop text is held back until it is decided. The text ends at
    the first character that completes a stop text; of several completed there the longest is cut
    off. `found` tells that it has ended.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts` are not empty."""
        self.found = False
        self._held = ""
        self._matches = [_Match(text) for text in texts]

    def push(self, piece: str) -> str:
        """What of the text can be passed on now that `piece` has come."""
        if self.found:
            return ""
        text = self._held + piece
        for at, character in enumerate(piece, len(self._held) + 1):
            complete = [match.length for match in self._matches if match.advance(character)]
            if complete:
                self.found, self._held = True, ""
                return text[: at - max(complete)]
        keep = max((match.matched for match in self._matches), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: the text ends here without another character."""
        rest, self._held = self._held, ""
        return rest


class _Match:
    """How much of `text` the characters so far end with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self._text, self.length, self.matched = text, len(text), 0
        self._shorter = [0, 0]  # by matched length: the next shorter length that can also match
        for at in range(1, len(text)):
            length = self._shorter[at]
            while length and text[length] != text[at]:
                length = self._shorter[length]
            self._shorter.append(length + (text[length] == text[at]))

    def advance(self, character: str) -> bool:
        """Takes one character; whether it completes the text. Not to be called after that."""
        while self.matched and self._text[self.matched] != character:
            self.matched = self._shorter[self.matched]
        self.matched += self._text[self.matched] == character
        return self.matched == self.length
