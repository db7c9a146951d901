"""JSON read strictly, from bytes, and its values shown in one short piece of ASCII.

Strict means UTF-8 without a byte order mark, no key twice in one object, and no failure but
ValueError, whatever the bytes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

_CONTROLS = bytes(range(32))


def parse_json(raw: bytes) -> Any:
    """The value that `raw` holds. Raises ValueError, whose text says what is wrong with it."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at character {error.pos}: {error.msg}") from None
    except _RepeatedKey as error:
        raise ValueError(str(error)) from None
    except ValueError:  # of int()
        raise ValueError("holding a number of too many digits") from None


def controls(raw: bytes) -> int:
    """How many control characters are in `raw`: none may be in a string."""
    return len(raw) - len(raw.translate(None, _CONTROLS))


class _RepeatedKey(ValueError):
    """Raised out of the decoder's hook."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _RepeatedKey(f"giving the key {show(key)} twice")
    return found


def show(value: object, limit: int = 40) -> str:
    """`value` as JSON in ASCII, `limit` characters or so; large containers by size only."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list) and len(value) > 4:
        return f"a list of {len(value)}"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shortlist(items: Iterable[object], limit: int = 6, total: int | None = None) -> str:
    """`items` with commas between, those after the first `limit` only counted.

    `total` is their number where `items` is only the beginning of them.
    """
    words = [str(item) for item in items]
    more = (len(words) if total is None else total) - limit
    return ", ".join(words[:limit]) + (f" and {more:,} more" if more > 0 else "")
