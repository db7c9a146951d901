"""FILE.ids: everything a session has read and said, one checksummed record after another.

    0      4        8      12       16           20
    | KIMI | number | kind | length | CRC-32C of | payload, length bytes, | the next record ...
    |      |        |      |        | the others | a multiple of 4        |

Numbers are u32, little-endian. Records are numbered from 0 on. Kinds and their payloads:

    1 session   JSON: format, version, session, model, chat, thinking, tools; the first record only
    2 turn      n | JSON, n bytes: messages, dropped, sampling, stops | the ids of the prompt
    3 token     id | what it ends the turn by: 0 nothing, 1 eos, 2 stop

Each is appended by one write and synced before the next. So a power cut can spoil the last one
only: an end that cannot be read, without a whole record after it, is forgotten. Anything else that
cannot be read is damage.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from kimi_cli.chat import THINKING
from kimi_cli.conversation import declared_tools
from kimi_cli.jsonfile import parse_json, show
from kimi_cli.native import crc32c
from kimi_cli.turns import Head, History, Turn

FORMAT, VERSION = "kimi-session", 1
MAX_BYTES = 1 << 28
"""A longer file is no journal: a million tokens take 28 MB."""
SESSION, TURN, TOKEN = 1, 2, 3
REASONS = (None, "eos", "stop")

_SEARCH = 8
"""Behind an end that cannot be read, a whole record is looked for in so many times the file's
bytes at most: no id and no text looks like a record, but a file can be made of what does."""

_MAGIC = b"KIMI"
_FRAME = struct.Struct("<4sIIII")
_CHECKED = struct.Struct("<III")
_TOKEN = struct.Struct("<II")


def session_record(head: Head) -> bytes:
    """The first record."""
    facts = {"format": FORMAT, "version": VERSION, **asdict(head)}
    return _record(0, SESSION, _json(facts))


def turn_record(number: int, turn: Turn) -> bytes:
    """Record `number`: `turn` without its answer."""
    facts = _json({key: getattr(turn, key) for key in ("messages", "dropped", "sampling", "stops")})
    prompt = np.array(turn.prompt, "<u4").tobytes()
    return _record(number, TURN, len(facts).to_bytes(4, "little") + facts + prompt)


def token_record(number: int, token: int, reason: str | None) -> bytes:
    """Record `number`: the next id of the last turn's answer, and whether it ends it."""
    return _record(number, TOKEN, _TOKEN.pack(token, REASONS.index(reason)))


def _json(value: dict[str, Any]) -> bytes:
    """Compact and in ASCII, lone surrogates included; spaces to a multiple of 4."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 4)


def _record(number: int, kind: int, payload: bytes) -> bytes:
    crc = _crc(number, kind, payload)
    return _FRAME.pack(_MAGIC, number, kind, len(payload), crc) + payload


def _crc(number: int, kind: int, payload: bytes) -> int:
    return crc32c(payload, crc32c(_CHECKED.pack(number, kind, len(payload))))


def parse(raw: bytes) -> tuple[History | None, int, int]:
    """The history that a journal holds (None: not even a session's record), its whole records and
    their bytes; what follows these is the unfinished end.

    Raises ValueError, whose text goes on from the file's name, for a file that is no journal, of
    another version, or damaged.
    """
    if len(raw) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes: it is no session's list of ids")
    if raw[:4] != _MAGIC[: len(raw)]:
        raise ValueError("is not a session's list of ids")
    history: History | None = None
    count = end = 0
    for number, (at, kind, payload) in enumerate(_records(raw)):
        count, end = number + 1, at + _FRAME.size + len(payload)
        try:
            history = _take(history, kind, payload)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            if isinstance(error, _Refused):
                raise
            raise ValueError(f"is damaged: its record {number} makes no sense") from None
    return history, count, end


class _Refused(ValueError):
    """A sentence of its own."""


def _records(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Offset, kind and payload of each record. Raises ValueError if one is whole after one that is
    not."""
    at = number = 0
    while (found := _whole(raw, at)) is not None and found[0] == number:
        yield at, found[1], found[2]
        at += _FRAME.size + len(found[2])
        number += 1
    later, left = raw.find(_MAGIC, at), _SEARCH * len(raw)
    while later >= 0:
        left -= _claim(raw, later)
        if left < 0 or _whole(raw, later) is not None:
            raise _Refused(f"is damaged at byte {at}")
        later = raw.find(_MAGIC, later + 1)


def _claim(raw: bytes, at: int) -> int:
    """How many bytes are read to tell whether there is a whole record at `at`."""
    if at + _FRAME.size > len(raw):
        return 0
    length: int = _FRAME.unpack_from(raw, at)[3]
    return length if at + _FRAME.size + length <= len(raw) else 0


def _whole(raw: bytes, at: int) -> tuple[int, int, bytes] | None:
    """Number, kind and payload of the record at `at`, if there is a whole one."""
    if at + _FRAME.size > len(raw):
        return None
    magic, number, kind, length, crc = _FRAME.unpack_from(raw, at)
    start = at + _FRAME.size
    if magic != _MAGIC or start + length > len(raw) or length % 4:
        return None
    payload = raw[start : start + length]
    return (number, kind, payload) if _crc(number, kind, payload) == crc else None


def _take(history: History | None, kind: int, payload: bytes) -> History:
    """The history with one more record in it."""
    if history is None:
        if kind != SESSION:
            raise ValueError
        return History(_head(parse_json(payload)), [])
    if kind == TURN:
        history.turns.append(_turn(payload))
    elif kind == TOKEN and history.turns and history.turns[-1].reason is None:
        token, reason = _TOKEN.unpack(payload)
        history.turns[-1].ids.append(token)
        history.turns[-1].reason = dict(enumerate(REASONS))[reason]
    else:
        raise ValueError
    return history


def _head(facts: Any) -> Head:
    if facts["format"] != FORMAT or facts["version"] != VERSION:
        raise _Refused(f"is of version {show(facts['version'])}, wanted {VERSION}")
    tools = facts["tools"]
    if tools is not None:
        declared_tools(_of(str, tools))
    if facts["thinking"] not in THINKING:
        raise ValueError
    return Head(
        session=_of(str, facts["session"]),
        model=_of(str, facts["model"]),
        chat=_of(bool, facts["chat"]),
        thinking=_of(str, facts["thinking"]),
        tools=tools,
    )


def _turn(payload: bytes) -> Turn:
    length = int.from_bytes(payload[:4], "little")
    if 4 + length > len(payload):
        raise ValueError
    facts = parse_json(payload[4 : 4 + length])
    prompt = np.frombuffer(payload, "<u4", offset=4 + length).tolist()
    if facts["dropped"] not in (0, 1) or not prompt:
        raise ValueError
    return Turn(
        messages=[_of(str, text) for text in _of(list, facts["messages"])],
        prompt=prompt,
        dropped=_of(int, facts["dropped"]),
        sampling=_of(dict, facts["sampling"]),
        stops=[_of(str, text) for text in _of(list, facts["stops"])],
    )


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError
    return value
