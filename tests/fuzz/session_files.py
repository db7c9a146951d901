"""Targets over a session's two files, with checksums that fit: what is behind them is met."""

from __future__ import annotations

import json
import struct
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from kimi_cli import journal as records
from kimi_cli.contents import _lines as lines_of
from kimi_cli.contents import describe
from kimi_cli.engine import Source
from kimi_cli.errors import KimiError
from kimi_cli.header import parse_header
from kimi_cli.native import crc32c
from kimi_cli.resume import model_digest
from kimi_cli.session import Session
from kimi_cli.snapshot import BLOCK, SUMS, check_state, load_state, read_snapshot, write_snapshot
from kimi_cli.state import State
from kimi_cli.tokenizer import Tokenizer
from kimi_cli.transcript import transcript
from kimi_cli.turns import Asked, Head, History, begin, decide, follow

from .model import CONFIG, model_at
from .target import Reader, Target

CONTEXT = 64
_FRAME = struct.Struct("<4sIIII")
QUESTION = '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
_CALL = {"function": {"name": "f", "arguments": {"a": 1}}, "id": "c"}
_HI = {"role": "user", "content": "hi"}
ASKED = (
    Asked(text="hi"),
    Asked(text="hi", system="be brief", thinking="high"),
    Asked(ids=[1, 2]),
    Asked(messages=[_HI, {"role": "assistant", "tool_calls": [_CALL]}]),
    Asked(messages=[_HI, {"role": "assistant", "content": "yes"}, _HI], tools=[{"name": "f"}]),
)


@lru_cache(maxsize=1)
def _model() -> tuple[tempfile.TemporaryDirectory[str], Source, Tokenizer]:
    scratch = tempfile.TemporaryDirectory(prefix="kimi-fuzz-")
    model = model_at(Path(scratch.name) / "model")
    return scratch, Source.open(model), Tokenizer.load(model)


def seal_journal(data: bytes) -> bytes:
    """`data` with magic, number and CRC of every record that its lengths make, put right."""
    out, at = bytearray(data), 0
    number = 0
    while at + _FRAME.size <= len(out):
        _, _, kind, length, _ = _FRAME.unpack_from(out, at)
        length -= length % 4
        end = at + _FRAME.size + length
        if end > len(out):
            break
        crc = crc32c(struct.pack("<III", number, kind, length))
        crc = crc32c(bytes(out[at + _FRAME.size : end]), crc)
        _FRAME.pack_into(out, at, b"KIMI", number, kind, length, crc)
        at, number = end, number + 1
    return bytes(out)


def journal(folder: Path) -> Reader:
    """The data as FILE.ids, as it is and sealed: opened, described, and gone on with."""
    path, ids = folder / "s", folder / "s.ids"

    def read(data: bytes) -> None:
        for raw in (data, seal_journal(data)):
            ids.write_bytes(raw)
            with suppress(KimiError):
                assert lines_of(describe(path))
            with suppress(KimiError), Session(path) as session:
                if session.history is not None and session.history.turns:
                    go_on(session.history)
        ids.unlink(missing_ok=True)

    return read


def go_on(history: History) -> None:
    """Everything that a run may do next with a session that opens."""
    _, _, tokenizer = _model()
    with suppress(KimiError):
        json.dumps(transcript(history, tokenizer))
    for asked in ASKED:
        with suppress(KimiError):
            step = decide(history, asked, tokenizer)
            assert step.new or step.turn.reason or history.ids
            assert all(0 <= token < 1 << 32 for token in step.turn.prompt)
    with suppress(KimiError):
        follow(history, "and?", tokenizer)


@lru_cache(maxsize=1)
def _journal() -> bytes:
    """A conversation of two turns with a tool, and then some."""
    _, source, tokenizer = _model()
    asked = ASKED[4]
    head = Head("0" * 32, model_digest(source), True, "off", asked.declaration)
    turn = begin(asked, tokenizer)
    turn.sampling, turn.stops = {"temperature": 0.5, "seed": 3}, ["x"]
    history = History(head, [turn])
    raw = records.session_record(head) + records.turn_record(1, turn)
    raw += records.token_record(2, 72, None) + records.token_record(3, 300, "eos")
    turn.ids, turn.reason = [72, 300], "eos"
    raw += records.turn_record(4, follow(history, "and?", tokenizer))
    return raw + records.token_record(5, 73, "stop")


def _session(**changes: object) -> bytes:
    facts = {
        "format": "kimi-session",
        "version": 1,
        "session": "",
        "model": "",
        "chat": True,
        "thinking": "off",
        "tools": None,
    }
    text = json.dumps({**facts, **changes}).encode()
    return _frame(1, text + b" " * (-len(text) % 4))


def _turn(ids: tuple[int, ...] = (1,), **changes: object) -> bytes:
    facts = {"messages": ["x"], "dropped": 0, "sampling": {}, "stops": [], **changes}
    text = json.dumps(facts).encode()
    text += b" " * (-len(text) % 4)
    return _frame(2, len(text).to_bytes(4, "little") + text + np.array(ids, "<u4").tobytes())


def _token(token: int, reason: int = 0) -> bytes:
    return _frame(3, struct.pack("<II", token, reason))


def _frame(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(b"KIMI", 0, kind, len(payload), 0) + payload


def journal_seeds() -> list[bytes]:
    whole = _journal()
    fence = "```"
    cases = [
        _session() + _turn() + _token(5) + _token(6, 1) + _turn(dropped=1),
        _session() + _turn(ids=()),
        _session() + _turn(ids=()) + _turn(dropped=1),
        _session(chat=False) + _turn(messages=[]) + _token(1 << 31),
        _session(thinking="no such") + _turn(),
        _session(thinking="high") + _turn() + _token(256),
        _session(tools="") + _turn(messages=[]),
        _session() + _turn(ids=(), messages=[QUESTION]),
        _session(thinking="x") + _turn(messages=[QUESTION]) + _token(5) + _token(256, 1),
        _session(tools=f"{fence}json\nno JSON\n{fence}") + _turn(messages=[]),
        _session(tools=f"{fence}json\n" + "[" * 999 + f"\n{fence}") + _turn(messages=[]),
        _session() + _turn(messages=['<|open|>message role="user"<|sep|>hi']) + _token(9, 2),
        _session() + _turn(messages=["\ud800"], stops=[""]) + _token(9, 2),
        _session() + _turn(sampling={"seed": float("inf")}) + _token(9, 2),
        _session() + _turn(dropped=True),
        _session(version=2),
        _session() + _session(),
        _turn(),
        _session() + _token(1),
        b"KIMI" * 500,
        whole[:200] + bytes(40) + whole[200:],
    ]
    return [whole, whole[:-3], b"", b"KIMI", *cases]


def seal_snapshot(data: bytes) -> bytes:
    """`data` with every checksum that a snapshot's header asks for, put right."""
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        table = parse_header(data[:start], len(data), "s")[SUMS]
    except (KimiError, KeyError, OverflowError):
        return data
    body = data[start : table.offset]
    sums = [crc32c(data[:start])]
    sums += [crc32c(body[at : at + BLOCK]) for at in range(0, len(body), BLOCK)]
    raw = np.array(sums, "<u4").tobytes()
    raw += crc32c(raw).to_bytes(4, "little")
    return data[: table.offset] + raw + data[table.offset + len(raw) :]


def snapshot(folder: Path) -> Reader:
    """The data as FILE, as it is and sealed: described, opened and loaded; FILE.ids is what FILE
    says, or not there."""
    path, ids = folder / "s", folder / "s.ids"

    def read(data: bytes) -> None:
        for raw in (data, seal_snapshot(data)):
            path.write_bytes(raw)
            ids.unlink(missing_ok=True)
            with suppress(KimiError):
                assert lines_of(describe(path))
            with suppress(KimiError), Session(path) as session:
                history = session.history
                if history is not None and history.turns and session.position <= CONTEXT:
                    assert session.restore(State(CONFIG, CONTEXT))
                    go_on(history)
        found = read_snapshot(path)
        assert found is not None
        check_state(found)
        if 0 <= found.position <= CONTEXT:
            load_state(found, State(CONFIG, CONTEXT))

    return read


def snapshot_seeds() -> list[bytes]:
    whole = _snapshot()
    size = 8 + int.from_bytes(whole[:8], "little")

    def changed(old: bytes, new: bytes) -> bytes:
        head = whole[8:size].replace(old, new, 1).rstrip(b" ")
        head += b" " * (size - 8 - len(head))
        return len(head).to_bytes(8, "little") + head + whole[size:]

    saved = json.loads(whole[8:size])["__metadata__"]["saved"].encode()
    return [
        whole,
        whole[:-1],
        whole + b"\0",
        whole[:size],
        b"",
        *(changed(b'"position":"2"', b'"position":"%s"' % n) for n in (b"-2", b"99", b"0", b"x")),
        *(changed(saved, text) for text in (b"nan", b"inf", b"-1e300", b"1e300", b"1e17", b"")),
        changed(b'"F32"', b'"U32"'),
        changed(b'"version":"1"', b'"version":"2"'),
        changed(b"kimi-session", b"kimi-sessiom"),
    ]


@lru_cache(maxsize=1)
def _snapshot() -> bytes:
    with tempfile.TemporaryDirectory(prefix="kimi-fuzz-") as scratch:
        path, state, raw = Path(scratch) / "s", State(CONFIG, CONTEXT), _journal()
        state.position = 2
        write_snapshot(path, state, [raw], len(raw))
        return path.read_bytes()


TARGETS = {
    "journal": Target(journal, journal_seeds),
    "snapshot": Target(snapshot, snapshot_seeds),
}
