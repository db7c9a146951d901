"""What is wrong with a checkpoint: collected by kind, told in one sentence."""

from __future__ import annotations

import re
from collections import Counter

from kimi_cli.header import ShortFile
from kimi_cli.jsonfile import shortlist, show
from kimi_cli.tensors import PREFIX

_KEPT = 100

_KINDS = (
    "missing", "short", "unreadable", "index", "not in the index", "mixed", "absent", "repeated",
    "unknown", "wrong dtype", "wrong shape", "padding not zero",
)  # fmt: skip
"""Kinds of fault, in the order in which they are told."""


class Faults:
    """What is wrong, by kind: the first texts of each, with how many there were."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if len(self._texts[kind]) < _KEPT:
            self._texts[kind].append(text)

    def told(self) -> list[str]:
        """One clause a kind; none if nothing is wrong."""
        return [
            f"{kind}: {shortlist(texts, total=self._counts[kind])}"
            for kind, texts in self._texts.items()
            if texts
        ]


def shortage(error: ShortFile) -> str:
    """How much a file lacks, and from where on."""
    place = f"{short_name(error.first)}, at offset {error.size}"
    return f"by {error.missing:,} bytes (it ends in {place})"


def short_name(name: str) -> str:
    """A tensor's name as a message gives it: `layer 3 self_attn.q_proj.weight`."""
    text = name.removeprefix(PREFIX).removeprefix("model.")
    layer = re.match(r"layers\.([0-9]+)\.(?=.)", text)
    if layer:
        text = f"layer {layer[1]} {text[layer.end() :]}"
    return text if text.isascii() and text.isprintable() and len(text) < 100 else show(text)
