"""Every error message in the code is looked for by a test: some of its own words are in one.

A message counts as looked for if WORDS of its words in a row, or all of them, stand in a string of
a test. That a test which has them meets the error and its exit code, is for its reader to see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kimi_cli
from kimi_cli import errors

HERE, CODE = Path(__file__).parent, Path(kimi_cli.__file__).parent
WORDS = 3
CALLERS = {"native.py", "stream.py", "calls.py"}
"""Where a ValueError is a mistake of the code that calls, or is caught where it is raised."""
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.KimiError)
}


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9_.'/-]+", text.replace("\\", ""))


def pieces(node: ast.expr) -> Iterator[str]:
    """The fixed parts of a message; {} is where something is filled in."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
        yield from text.split("{}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.BinOp):
        yield from pieces(node.left)
        yield from pieces(node.right)
    elif isinstance(node, ast.IfExp):
        yield from pieces(node.body)


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where each message is, and its fixed parts; those that only pass another's on left out."""
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in ERRORS or (name == "ValueError" and path.name not in CALLERS):
                parts = [part for part in pieces(node.args[0]) if words(part)]
                if parts and not parts[0].startswith("internal error"):  # which nothing can cause
                    yield f"{path.relative_to(CODE.parent)}:{node.lineno}", parts


def runs(text: str) -> set[tuple[str, ...]]:
    """Every run of WORDS words in `text`."""
    found = words(text)
    return {tuple(found[at : at + WORDS]) for at in range(len(found) - WORDS + 1)}


def test_every_message_is_looked_for() -> None:
    known: set[tuple[str, ...]] = set()
    short: set[str] = set()
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known |= runs(node.value)
                short.add(" ".join(words(node.value)))
    everything = "\n".join(short)
    unmet = []
    for place, parts in messages():
        long = [part for part in parts if len(words(part)) >= WORDS]
        if long:
            met = any(runs(part) & known for part in long)
        else:
            met = any(" ".join(words(part)) in everything for part in parts)
        if not met:
            unmet.append(f"{place}: {' ... '.join(parts)}")
    assert not unmet, "\n".join(["no test looks for:", *unmet])
