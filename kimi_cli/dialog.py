"""`kimi chat`: a person and a model take turns, until one of them leaves.

On a terminal a mistake is told and the conversation goes on; a script ends with it. stdout carries
the answers alone, stderr everything else.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kimi_cli import console
from kimi_cli.answer import Settings
from kimi_cli.commands import HELP, LINES, Command, Draft, Entry
from kimi_cli.console import Terminated
from kimi_cli.durable import scratch, write_whole
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.generate import Outcome, statistics
from kimi_cli.keyboard import Keyboard
from kimi_cli.result import summary
from kimi_cli.sampler import GREEDY, Sampling
from kimi_cli.session import Session
from kimi_cli.talk import Talk, Terms, open_talk
from kimi_cli.tokenizer import shown
from kimi_cli.transcript import transcript
from kimi_cli.watch import Silent, watching

PROMPT, MORE = "> ", "... "


@dataclass(frozen=True)
class Wanted:
    """What a conversation shall be. `max_tokens` is of each answer; None: all that fits."""

    terms: Terms
    sampling: Sampling = GREEDY
    max_tokens: int | None = None
    session: Path | None = None
    quiet: bool = False


def chat(settings: Settings, wanted: Wanted) -> None:
    """Talks until the end of the input. Raises KimiError of any kind, KeyboardInterrupt,
    OutputClosed; what was said is in the session by then."""
    with ExitStack() as stack:
        session = None
        if wanted.session is not None:
            session = stack.enter_context(Session(wanted.session))
        watch = stack.enter_context(watching("auto", wanted.quiet, streams=True))
        sampling = wanted.sampling.seeded()
        talk = open_talk(settings, wanted.terms, sampling, watch, wanted.quiet, session)
        stack.enter_context(talk)
        watch.clear()
        if sampling != wanted.sampling:
            watch.note(f"seed {sampling.seed}: give --seed to draw the same again")
        Dialog(talk, Keyboard(), wanted).run()
        if session is not None and session.unsaved:
            raise KimiError(session.unsaved)


class Answer:
    """Prints an answer as it comes, its channels a blank line apart, the thinking faint."""

    def __init__(self, watch: Silent) -> None:
        self._watch = watch
        self._channel, self._faint = "", False
        self._newlines = 2  # at the end of what was printed

    def show(self, channel: str, text: str) -> None:
        """The next piece of `channel`."""
        if channel != self._channel:
            self._watch.clear()
            self._plain()
            self._watch.put("\n" * (2 - self._newlines) if self._channel else "")
            self._channel, self._faint = channel, channel == "reasoning"
            if self._faint:
                console.dim(True)
        self._watch.put(text)
        ending = len(text) - len(text.rstrip("\n"))
        self._newlines = min(2, ending if ending < len(text) else self._newlines + ending)

    def end(self) -> None:
        """The line ends."""
        self._watch.clear()
        self._plain()
        self._watch.put("\n")

    def _plain(self) -> None:
        if self._faint:
            console.dim(False)
            self._faint = False


class Dialog:
    """The conversation as a person has it."""

    def __init__(self, talk: Talk, keyboard: Keyboard, wanted: Wanted) -> None:
        self._talk, self._keyboard, self._wanted = talk, keyboard, wanted
        self._noted = keyboard.interactive and not wanted.quiet
        self._saved: set[Path] = set()

    def run(self) -> None:
        """Takes turns until /quit or the end of the input."""
        self._greet()
        draft, leaving = Draft(), False
        while True:
            try:
                line = self._keyboard.line(MORE if draft.open else PROMPT)
                if line is None and self._keyboard.interactive:
                    return
                entry = draft.finish() if line is None else draft.add(line)
                leaving = False
                if entry is not None and not self._obey(entry):
                    return
                if line is None:
                    return
            except UsageError as error:
                if not self._keyboard.interactive:
                    raise
                console.note(str(error))
            except KeyboardInterrupt as stop:
                if leaving or not self._keyboard.interactive or isinstance(stop, Terminated):
                    raise
                leaving = True
                draft.clear()
                if console.on_terminal():
                    console.put("\n")
                console.note("Ctrl-C again quits; so do Ctrl-D and /quit")

    def _greet(self) -> None:
        if not self._noted:
            return
        talk = self._talk
        if talk.history is not None and talk.history.turns:
            self._note(f"the conversation goes on after {_count(len(talk.history.turns), 'turn')}")
        self._note(
            f"context {talk.plan.context} tokens, {talk.tokens} used; thinking {talk.thinking}; "
            "/help lists the commands"
        )

    def _note(self, text: str) -> None:
        if self._noted:
            console.note(text)

    def _obey(self, entry: Entry) -> bool:
        """Does what was typed; whether to go on. Raises UsageError."""
        if isinstance(entry, str):
            self._say(entry)
        elif entry.name == "quit":
            return False
        elif entry.name == "help":
            width = max(map(len, HELP))
            for usage, text in HELP.items():
                console.note(f"{usage:<{width}}  {text}")
            for text in LINES:
                console.note(text)
        elif entry.name == "stats":
            self._tell_stats()
        elif entry.name == "save":
            self._save(entry)
        else:
            self._renew(entry)
        return True

    def _say(self, text: str) -> None:
        watch = watching("auto", self._wanted.quiet, streams=True)
        answer = Answer(watch)
        with watch:
            try:
                outcome = self._talk.say(text, self._wanted.max_tokens, watch, answer.show)
            except UsageError:
                raise
            except BaseException:
                answer.end()
                raise
            answer.end()
        self._tell_end(outcome)
        if outcome.stop_reason == "interrupted" and not self._keyboard.interactive:
            raise KeyboardInterrupt

    def _tell_end(self, outcome: Outcome) -> None:
        session = self._talk.session
        if session is not None and session.unsaved:
            console.note(session.unsaved)
        if outcome.stop_reason == "interrupted":
            said = "what was said is kept" if outcome.ids else "your message is kept"
            again = "; the next message reads all again" if self._talk.lost else ""
            self._note(f"stopped: {said}{again}")
        elif outcome.stop_reason == "length":
            full = self._talk.tokens >= self._talk.plan.context
            why = "the context is full: /save FILE keeps it, /new begins another" if full else "-n"
            self._note(f"cut off after {_count(len(outcome.ids), 'token')}: {why}")

    def _tell_stats(self) -> None:
        talk = self._talk
        turns = len(talk.history.turns) if talk.history is not None else 0
        console.note(
            f"{_count(turns, 'turn')}, {talk.tokens} of {talk.plan.context} tokens; thinking "
            f"{talk.thinking}; system message {shown(talk.system) if talk.system else 'none'}"
        )
        if talk.last is not None:
            stats = statistics(talk.engine, talk.plan, talk.last)
            console.note("last: " + summary(stats, talk.fed, len(talk.last.ids)))

    def _save(self, command: Command) -> None:
        talk, session = self._talk, self._talk.session
        if not command.argument:
            if session is None:
                raise UsageError("/save wants a file: there is no session (--session FILE)")
            talk.save()
            console.note(session.unsaved or f"kept: {session.path} has every word")
            return
        if talk.history is None or not talk.history.turns:
            raise UsageError("there is nothing to save: nothing has been said")
        path = Path(command.argument)
        if path.exists() and path not in self._saved:
            raise UsageError(f"{path} exists: /save wants the name of a new file")
        data = json.dumps(transcript(talk.history, talk.tokenizer), indent=1).encode()
        try:
            write_whole(path, data + b"\n", scratch(path))
        except OSError as error:
            reason = f"{path} cannot be written: {error.strerror or error}"
            if isinstance(error, FileNotFoundError):
                raise UsageError(reason) from None
            if not self._keyboard.interactive:
                raise KimiError(reason) from None
            console.note(reason)
            return
        self._saved.add(path)
        console.note(f"saved: {path}, for kimi generate --messages")

    def _renew(self, command: Command) -> None:
        talk = self._talk
        terms = Terms(talk.system, talk.thinking)
        if command.name == "system":
            if not command.argument:
                console.note(f"system message: {shown(talk.system) if talk.system else 'none'}")
                return
            terms = replace(terms, system=command.argument)
        elif command.name == "think":
            terms = replace(terms, thinking=command.argument)
        session, begun = talk.session, talk.tokens > 0
        talk.renew(terms)
        if session is not None:
            console.note(
                f"a new conversation, which {session.path} does not hold: it ends with the one "
                "before"
            )
        elif begun:
            console.note("a new conversation: what was read cannot be unread")
        else:
            console.note("noted: nothing had been said")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
