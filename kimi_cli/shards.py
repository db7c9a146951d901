"""Which shards a model directory has, against its index and against their own numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kimi_cli import index
from kimi_cli.errors import CheckpointError
from kimi_cli.faults import Faults
from kimi_cli.jsonfile import show

_MOST = 10_000
"""More shards than any checkpoint has: their names are not all listed as missing."""
_SHARD = re.compile(r"model(?:-([0-9]{1,6})-of-([0-9]{1,6}))?\.safetensors")


def list_shards(
    model_dir: Path, faults: Faults
) -> tuple[list[str], list[str], dict[str, index.Tally] | None]:
    """Names of the shards to read and of those missing, then the index's tallies if there is one.

    Raises CheckpointError if `model_dir` cannot be listed, or neither holds nor names a shard.
    """
    try:
        files = set(os.listdir(model_dir))
    except OSError as error:
        raise CheckpointError(f"{model_dir} cannot be read: {error.strerror or error}") from None
    present = {name for name in files if _SHARD.fullmatch(name)}
    tallies = None
    if index.FILE_NAME in files:
        try:
            tallies = index.tally_index(model_dir / index.FILE_NAME)
        except CheckpointError as error:
            faults.add("index", str(error).replace(f"{model_dir}/", ""))
    elif len(present) > 1:
        faults.add("index", f"{index.FILE_NAME} is absent, wanted for {len(present)} shards")
    if tallies is None:
        named = present
    else:
        named = {name for name in tallies if _SHARD.fullmatch(name)}
        for name in sorted(tallies.keys() - named):
            faults.add("index", f"names {show(name)}, which is no shard's name")
        for name in sorted(present - named):
            faults.add("not in the index", name)
    if not named:
        raise CheckpointError(
            f"{model_dir} holds no shard: wanted model-00001-of-NNNNNN.safetensors and so on"
        )
    missing = (named | _numbered(named, faults)) - present
    for name in sorted(missing):
        faults.add("missing", name)
    return sorted(present & named), sorted(missing), tallies


def _numbered(named: set[str], faults: Faults) -> set[str]:
    """All the names of the set that `named` belongs to, by its number after `-of-`."""
    matches = [match for match in map(_SHARD.fullmatch, sorted(named)) if match]
    totals = sorted({match[2] or "" for match in matches})
    if len(totals) > 1:
        for total in totals:
            faults.add("mixed", f"shards of {int(total)}" if total else "model.safetensors")
        return named
    if not totals[0]:
        return named
    if int(totals[0]) > _MOST:
        faults.add("mixed", f"{len(named)} shards of {int(totals[0]):,}, wanted {_MOST:,} at most")
        return named
    width = len(matches[0][1])
    numbers = range(1, int(totals[0]) + 1)
    return {f"model-{number:0{width}d}-of-{totals[0]}.safetensors" for number in numbers}
