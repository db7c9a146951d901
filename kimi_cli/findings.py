"""What a verification has to say of one file, and what of a checkpoint's files it finds wrong.

Headers only, every file to its end of them: whatever is wrong with one never hides another. The
shards are gone through one by one, so that each is named; what only shows in all of them together
comes from the survey.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kimi_cli import index, remedy, schema
from kimi_cli.config import MAX_BYTES, Config, load_config
from kimi_cli.errors import CheckpointError, ConfigError, TokenizerError
from kimi_cli.faults import Faults, short_name, shortage
from kimi_cli.header import Entry, ShortFile, read_header
from kimi_cli.jsonfile import parse_json, show
from kimi_cli.regular import open_regular
from kimi_cli.shards import list_shards
from kimi_cli.survey import Survey, survey
from kimi_cli.tensors import (
    EXPERT_PARTS,
    IGNORED,
    embedding,
    expert_shapes,
    head_tensors,
    layer_prefix,
    layer_tensors,
)
from kimi_cli.tokenizer import Tokenizer

CONFIG = "config.json"
MAX_PADDING = 1 << 16
"""Elements that A_log may have beyond its heads."""
_TOKENIZER = ("tiktoken.model", "tokenizer_config.json")
_OF_ALL = ("index", "not in the index", "mixed", "absent", "repeated", "padding not zero")
_OF_ONE = ("missing", "short", "unreadable", "unknown", "wrong dtype", "wrong shape")
_KIND = re.compile(rf"(?:^|; )(?=(?:{'|'.join(_OF_ALL + _OF_ONE)}): )")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: with which file, and what to do about it."""

    file: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}: {self.fix}"


def read_config(model_dir: Path) -> Config | Finding:
    """The config in `model_dir`, or what is wrong with it.

    Raises ConfigError where there is no K3 checkpoint to speak of: no directory, another model's
    config, or a directory with neither a usable config nor a shard.
    """
    try:
        return load_config(model_dir)
    except ConfigError as error:
        if _is_foreign(model_dir / CONFIG) or not _has_shards(model_dir):
            raise
        what = str(error).replace(f"{model_dir / CONFIG}", "").lstrip(": ")
        return Finding(CONFIG, what, remedy.download(model_dir, [CONFIG]))


def _is_foreign(path: Path) -> bool:
    """Whether `path` is another model's config."""
    try:
        with open_regular(path) as file:
            data = parse_json(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and schema.other_model(data) is not None


def _has_shards(model_dir: Path) -> bool:
    try:
        list_shards(model_dir, Faults())
    except CheckpointError:
        return False
    return True


def tokenizer_findings(model_dir: Path) -> list[Finding]:
    """What is wrong with the tokenizer's files, if there are any."""
    try:
        Tokenizer.load_optional(model_dir)
    except TokenizerError as error:
        what = str(error).replace(f"{model_dir}/", "")
        name = next((name for name in _TOKENIZER if what.startswith(name)), _TOKENIZER[0])
        what = what.removeprefix(name).lstrip(": ")
        return [Finding(name, what, remedy.download(model_dir, _TOKENIZER))]
    return []


class _Wanted:
    """What the config demands of a tensor, by name."""

    def __init__(self, config: Config) -> None:
        layers = range(config.num_hidden_layers)
        tensors = [tensor for layer in layers for tensor in layer_tensors(config, layer)]
        self._tensors = {t.name: t for t in (*tensors, *head_tensors(config), embedding(config))}
        self._layers = {
            layer_prefix(layer) + "block_sparse_moe" for layer in layers if config.is_moe(layer)
        }
        self._experts = set(map(str, range(config.num_experts)))
        self._parts = dict(zip(EXPERT_PARTS, expert_shapes(config), strict=True))

    def fault(self, name: str, entry: Entry) -> tuple[str, str] | None:
        """Kind and text of what is wrong with `entry`, as Faults takes them."""
        head, _, tail = name.partition(".experts.")
        number, _, part = tail.partition(".")
        tensor = self._tensors.get(name)
        if tensor is not None:
            kinds, shape, fits = "BF16 or F32", tensor.shape, entry.shape in tensor.shapes
            size = prod(entry.shape)
            if tensor.padded:
                fits = entry.shape in ((size,), (1, 1, size, 1))
                fits = fits and 0 <= size - tensor.size <= MAX_PADDING
        elif head in self._layers and number in self._experts and part in self._parts:
            kinds, shape, fits = "U8", self._parts[part], entry.shape == self._parts[part]
        elif name.startswith(IGNORED):
            return None
        else:
            return "unknown", short_name(name)
        if entry.dtype not in kinds.split(" or "):
            return "wrong dtype", f"{short_name(name)} is {entry.dtype}, wanted {kinds}"
        if not fits:
            found, wanted = show(list(entry.shape)), show(list(shape))
            return "wrong shape", f"{short_name(name)} is {found}, wanted {wanted}"
        return None


def checkpoint_findings(
    model_dir: Path, config: Config | None
) -> tuple[Survey | None, list[Finding]]:
    """What the headers hold, and all that is wrong with the shards in `model_dir` and their index.

    Without a config, only what shows without one. Raises CheckpointError where there is no shard,
    not even one that an index names.
    """
    overall = Faults()
    present, missing, _ = list_shards(model_dir, overall)
    findings = [
        Finding(name, "missing", remedy.download(model_dir, [name], again=False))
        for name in missing
    ]
    wanted = None if config is None else _Wanted(config)
    for name in present:
        fix = remedy.download(model_dir, [name])
        findings += (Finding(name, what, fix) for what in _shard_faults(model_dir / name, wanted))
    if config is None:
        findings += _told("; ".join(overall.told()), model_dir, None)
        return None, findings
    found = survey(model_dir, config)
    findings += _told(found.fault, model_dir, found)
    if found.fault and not findings:
        findings.append(Finding(str(model_dir), found.fault, remedy.download(model_dir)))
    return found, findings


def _shard_faults(path: Path, wanted: _Wanted | None) -> Iterator[str]:
    try:
        entries = read_header(path)
    except ShortFile as error:
        yield f"short {shortage(error)}"
        entries = error.table.entries()
    except CheckpointError as error:
        yield str(error).removeprefix(str(path)).lstrip(": ")
        return
    faults = Faults()
    for name, entry in entries.items() if wanted else ():
        fault = wanted.fault(name, entry) if wanted else None
        if fault:
            faults.add(*fault)
    yield from faults.told()


def _told(sentence: str, model_dir: Path, found: Survey | None) -> Iterator[Finding]:
    """A survey's `sentence` clause by clause, but for what is told of each shard."""
    for clause in _KIND.split(sentence):
        kind, _, text = clause.partition(": ")
        if kind not in _OF_ALL:
            continue
        if kind == "index":
            yield Finding(index.FILE_NAME, text, remedy.download(model_dir, [index.FILE_NAME]))
        elif kind == "padding not zero" and found is not None:
            names = sorted(
                {
                    found.shards[shard].name
                    for name, (shard, _) in found.tensors.items()
                    if short_name(name) + " after " in text
                }
            )
            yield Finding(", ".join(names), clause, remedy.download(model_dir, names))
        elif kind in ("not in the index", "mixed"):
            fix = f"move the shards of another download away, or {remedy.download(model_dir)}"
            yield Finding(str(model_dir), clause, fix)
        else:
            yield Finding(str(model_dir), clause, remedy.download(model_dir))
