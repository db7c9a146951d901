"""What a person types in `kimi chat`: lines to messages and commands. Pure: it does nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_cli.chat import THINKING
from kimi_cli.errors import UsageError
from kimi_cli.tokenizer import shown

QUOTE = '"""'
"""Opens and closes a block of lines."""
HELP = {
    "/help": "this list",
    "/new": "a new conversation, same system message and thinking",
    "/system TEXT": "a new conversation with this system message; without TEXT: show it",
    "/think LEVEL": f"a new conversation with thinking {', '.join(THINKING)}",
    "/save FILE": "write the conversation as JSON, for kimi generate --messages",
    "/save": "make sure of the session, where there is one",
    "/stats": "how full the context is, what the last answer took",
    "/quit": "the end; so is Ctrl-D",
}
LINES = (
    f"a \\ at the end of a line goes on with the next; {QUOTE} opens and closes a block of lines",
    "Ctrl-C stops an answer and keeps what was said; at the prompt, twice, it quits",
)
_BARE = ("help", "new", "stats", "quit")
_NAMES = {usage.split()[0][1:] for usage in HELP}


@dataclass(frozen=True)
class Command:
    """A command by name, without its slash."""

    name: str
    argument: str = ""


Entry = Command | str
"""A command, or the text of a message."""


class Draft:
    """Lines until they are an entry. A pasted text of several lines counts as one line."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._block = False

    @property
    def open(self) -> bool:
        """Whether an entry has begun that more lines belong to."""
        return self._block or bool(self._lines)

    def add(self, line: str) -> Entry | None:
        """The entry that `line` completes, None if it needs more lines or there is nothing in it.
        Raises UsageError for a command that is none; what has been typed is then gone."""
        if not self.open and line.lstrip().startswith(QUOTE):
            self._block = True
            line = line.lstrip().removeprefix(QUOTE)
        if self._block:
            closed = line.rstrip().endswith(QUOTE)
            self._lines.append(line.rstrip().removesuffix(QUOTE) if closed else line)
            return self.finish() if closed else None
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        self._lines.append(line)
        return self.finish()

    def finish(self) -> Entry | None:
        """The entry as it stands: no more lines will come. Raises UsageError as `add`."""
        text, block = "\n".join(self._lines), self._block
        self.clear()
        if block:
            text = text.removeprefix("\n").removesuffix("\n")
        if not text.strip():
            return None
        return text if block or not text.startswith("/") else parse_command(text)

    def clear(self) -> None:
        """Drops what has been typed."""
        self._lines, self._block = [], False


def parse_command(text: str) -> Command:
    """`/name argument`. Raises UsageError."""
    word, *rest = text[1:].split(None, 1)[:2] if text[1:].strip() else [""]
    argument = rest[0].strip() if rest else ""
    if word not in _NAMES:
        raise UsageError(
            f"{shown('/' + word)} is no command: /help lists them; a message that begins with / "
            f"goes between two {QUOTE}"
        )
    if word in _BARE and argument:
        raise UsageError(f"/{word} takes nothing after it, found {shown(argument)}")
    if word == "think" and argument not in THINKING:
        raise UsageError(f"/think wants one of {', '.join(THINKING)}, found {shown(argument)}")
    return Command(word, argument)
