"""What to do about a file that is missing or damaged, as commands to copy. Runs none of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from kimi_cli.trunk import DIRECTORY

REPOSITORY = "moonshotai/Kimi-K3"
"""Where the released checkpoint is."""


def download(model_dir: Path, names: Iterable[str] = (), *, again: bool = True) -> str:
    """The command that fetches the files called `names`, or all, into `model_dir`; `again` even
    if they seem to be there."""
    words = ["hf", "download", REPOSITORY, *names, "--local-dir", str(model_dir)]
    return _run([*words, "--force-download"] if again else words)


def repack(model_dir: Path, trunk_dir: Path) -> str:
    """The command that makes what the trunk in `trunk_dir` lacks."""
    words = ["kimi", "repack", "-m", str(model_dir)]
    if trunk_dir != model_dir / DIRECTORY:
        words += ["--out", str(trunk_dir)]
    return _run(words)


def remake(model_dir: Path, trunk_dir: Path, name: str) -> str:
    """How to make the one trunk file called `name` anew."""
    path = shlex.quote(str(trunk_dir / name))
    return f"delete {path}, then {repack(model_dir, trunk_dir)}"


def deep(model_dir: Path, trunk_dir: Path) -> str:
    """The command that reads every expert and writes the table of their checksums."""
    words = ["kimi", "verify", "-m", str(model_dir), "--deep"]
    if trunk_dir != model_dir / DIRECTORY:
        words += ["--trunk", str(trunk_dir)]
    return _run(words)


def _run(words: list[str]) -> str:
    return "run " + shlex.join(words)
