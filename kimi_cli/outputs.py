"""Where a run may write: refused before anything is read, so that no file of value is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kimi_cli.errors import UsageError

CHECKPOINT_SUFFIXES = {".json", ".model", ".safetensors"}


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, Path | None],
    kept: Iterable[Path | None],
) -> None:
    """Refuses outputs that could not be written, or that would replace what must stay.

    `outputs` and `inputs` are files by the option that names them; `kept` are the directories of
    the checkpoint and its trunk, whose files are never replaced. Raises UsageError.
    """
    taken = {_real(path): name for name, path in inputs.items() if path is not None}
    roots = [_real(path) for path in kept if path is not None]
    for name, path in outputs.items():
        if path is None:
            continue
        if path.exists() and not path.is_file():  # a rename would put a file in its place
            raise UsageError(f"{name} {path}: not a regular file")
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{name} {path}: its directory is missing or read-only")
        real = _real(path)
        if real in taken:
            raise UsageError(f"{name} and {taken[real]} both name {path}: give two files")
        places = (real, _real(path.parent) / path.name)  # a shard may be a link to elsewhere
        inside = any(root in place.parents for root in roots for place in places)
        if inside and path.exists() and path.suffix in CHECKPOINT_SUFFIXES:
            raise UsageError(f"{name} {path}: the checkpoint's files are never replaced")
        taken[real] = name


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
