"""One line of `generate --prompts`: a prompt as JSON, and how it is to be answered. Pure.

    {"prompt": "Why?"}                            a user's message, or with "raw" a text to go on
    {"messages": [...], "tools": [...]}           a conversation, OpenAI style
    {"ids": [1, 2, 3]}                            token ids, nothing added

and beside any of them, named as the options of `generate` that they take the place of: `system`,
`thinking`, `raw`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`, `stop` (a text or
a list of them), `ignore_eos`; and `id`, a text or a number that comes back with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kimi_cli.chat import THINKING
from kimi_cli.errors import UsageError
from kimi_cli.jsonfile import parse_json, show
from kimi_cli.prompt import Given
from kimi_cli.sampler import Sampling

SOURCES = ("prompt", "messages", "ids")
_SAMPLING = {"temperature": float, "top_p": float, "min_p": float, "top_k": int, "seed": int}
_OTHERS = ("tools", "id", "system", "thinking", "raw", "max_tokens", "stop", "ignore_eos")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Manner:
    """How prompts are answered that do not say otherwise. Raises UsageError."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    raw: bool = False
    system: str | None = None
    thinking: str | None = None

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("--stop wants a text: an empty one would stop at once")


@dataclass(frozen=True)
class Query:
    """A prompt and how it is to be answered."""

    given: Given
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool


def query_id(line: bytes) -> str | int | float | None:
    """The `id` of a line, if it has one that can be read."""
    try:
        data = parse_json(line)
    except ValueError:
        return None
    found = data.get("id") if isinstance(data, dict) else None
    return found if isinstance(found, str | int | float) and not isinstance(found, bool) else None


def parse_query(line: bytes, manner: Manner) -> Query:
    """The query of one line. Raises UsageError naming what is wrong with it."""
    try:
        data = parse_json(line)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not isinstance(data, dict):
        raise UsageError(f"wanted an object, found {show(data)}")
    for key in data:
        if key not in (*SOURCES, *_SAMPLING, *_OTHERS):
            raise UsageError(f"the key {show(key)} is not known")
    named = [key for key in SOURCES if key in data]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise UsageError(f"one of prompt, messages and ids is wanted, found {found}")
    if "tools" in data and named != ["messages"]:
        raise UsageError("tools belong to messages")
    if data.get("id") is not None and query_id(line) is None:
        raise UsageError(f"id wants a text or a number, found {show(data['id'])}")
    sampling = {key: _take(data, key, kind) for key, kind in _SAMPLING.items() if key in data}
    max_tokens = _take(data, "max_tokens", int, manner.max_tokens)
    if max_tokens < 0:
        raise UsageError(f"max_tokens wants 0 or more, not {max_tokens}")
    return Query(
        _given(data, manner),
        max_tokens,
        replace(manner.sampling, **sampling),
        _stop(data, manner),
        _take(data, "ignore_eos", bool, manner.ignore_eos),
    )


def _given(data: dict[str, Any], manner: Manner) -> Given:
    if "ids" in data:
        ids = data["ids"]
        if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
            raise UsageError(f"ids want a list of whole numbers, found {show(ids)}")
        if not ids:
            raise UsageError("ids want at least one, found an empty list")
        system = _take(data, "system", str, None)
        return Given(ids=",".join(map(str, ids)), system=system)
    thinking = _take(data, "thinking", str, manner.thinking)
    if thinking is not None and thinking not in THINKING:
        raise UsageError(f"thinking wants one of {', '.join(THINKING)}, found {show(thinking)}")
    raw = _take(data, "raw", bool, manner.raw and "messages" not in data)
    system = _take(data, "system", str, None if raw else manner.system)
    if "messages" in data:
        return Given(conversation=data, raw=raw, system=system, thinking=thinking)
    return Given(text=_take(data, "prompt", str), raw=raw, system=system, thinking=thinking)


def _stop(data: dict[str, Any], manner: Manner) -> tuple[str, ...]:
    stop = data.get("stop", list(manner.stop))
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or any(not isinstance(one, str) or not one for one in stop):
        raise UsageError(f"stop wants a text or a list of texts, found {show(stop)}")
    return tuple(stop)


def _take(data: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The value of `key`, which must be of `kind`."""
    if key not in data:
        return default
    value = data[key]
    if kind is float and type(value) is int and value.bit_length() < 64:
        return value
    if type(value) is not kind:
        raise UsageError(f"{key} wants {_WORDS[kind]}, found {show(value)}")
    return value
