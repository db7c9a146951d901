"""`kimi session FILE`: what a session holds, every byte of it checked. It changes nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from kimi_cli import console
from kimi_cli.errors import SessionError
from kimi_cli.session import IDS, contents, ids_path, join
from kimi_cli.snapshot import check_state, read_snapshot
from kimi_cli.tokenizer import shown
from kimi_cli.turns import Turn, system_text
from kimi_cli.units import format_size


def show_session(path: Path, as_json: bool) -> None:
    """Prints a table, or one JSON object. Raises SessionError if there is no session, or a bad
    one."""
    facts = describe(path)
    if as_json:
        console.put(json.dumps(facts, ensure_ascii=False) + "\n")
    else:
        console.put("".join(f"{name:<9} {text}\n" for name, text in _lines(facts)))


def describe(path: Path) -> dict[str, Any]:
    """The facts of the session at `path`: sizes in tokens, bytes or characters, `saved` in seconds
    since 1970. Raises SessionError."""
    snapshot = read_snapshot(path)
    if snapshot is not None:
        check_state(snapshot)
    history, _, _ = join(path, snapshot, _ids(ids_path(path)))
    if history is None:
        raise SessionError(f"{path} is no session: neither it nor {path.name}{IDS} exists")
    head, last = history.head, history.turns[-1] if history.turns else None
    return {
        "file": str(path),
        "session": head.session,
        "model": head.model,
        "chat": head.chat,
        "thinking": head.thinking,
        "system": system_text(history),
        "tools": head.tools is not None,
        "tokens": len(history.ids) if last else 0,
        "state_position": snapshot.position if snapshot else 0,
        "state_bytes": snapshot.size if snapshot else 0,
        "saved": snapshot.saved if snapshot else None,
        "finished": last is not None and last.reason is not None,
        "turns": [_turn(turn) for turn in history.turns],
    }


def _ids(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return contents(fd, path)
    finally:
        os.close(fd)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "messages": len(turn.messages),
        "prompt_characters": sum(map(len, turn.messages)),
        "prompt_tokens": len(turn.prompt),
        "answer_tokens": len(turn.ids),
        "sampling": turn.sampling,
        "stop": turn.stops,
        "ended_by": turn.reason,
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    kind = "conversation" if facts["chat"] else "continued text"
    tools = ", with tools" if facts["tools"] else ""
    lines = [
        ("session", facts["file"]),
        ("model", f"fingerprint {facts['model'][:16]}"),
        ("kind", f"{kind}, thinking {facts['thinking']}{tools}" if facts["chat"] else kind),
        ("system", "none" if facts["system"] is None else shown(facts["system"])),
        ("tokens", f"{facts['tokens']} in all"),
        ("state", _state(facts)),
    ]
    for number, turn in enumerate(facts["turns"], 1):
        end = f"ended by {turn['ended_by']}" if turn["ended_by"] else "not finished"
        text = f"prompt {turn['prompt_tokens']} tokens, answer {turn['answer_tokens']}, {end}"
        lines.append((f"turn {number}", text))
    return lines


def _state(facts: dict[str, Any]) -> str:
    if facts["saved"] is None:
        return "none saved: all tokens will be read again"
    again = facts["tokens"] - facts["state_position"]
    size = format_size(facts["state_bytes"])
    saved = _date(facts["saved"])
    return f"at {facts['state_position']}, {again} to be read again; {size}, saved {saved}"


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # of a year that the system cannot write
        return f"at {seconds:.0f} seconds"
