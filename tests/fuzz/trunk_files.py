"""Targets over a trunk's files, their checksums made right so that what is behind them is met.

A trunk is written by `kimi repack`, but it may come from anywhere: a checksum tells of damage, not
of intent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kimi_cli import native
from kimi_cli.checkpoint import fingerprint
from kimi_cli.deep import Deep
from kimi_cli.engine import Engine, Source
from kimi_cli.errors import KimiError
from kimi_cli.expertsums import PARTIAL as PARTIAL_SUMS
from kimi_cli.expertsums import SUMS, load_expert_sums, load_known, save_expert_sums
from kimi_cli.header import parse_header
from kimi_cli.layout import ALIGN, lay_out, read_stored, unit_tensors
from kimi_cli.manifest import MANIFEST, Listed, read_manifest, write_manifest
from kimi_cli.native import crc32c
from kimi_cli.plan import Request, make_plan
from kimi_cli.survey import survey
from kimi_cli.tables import FILE_NAME as TABLES
from kimi_cli.tables import Tables, read_tables, row_sums, write_tables
from kimi_cli.trunk import Trunk, open_unit
from kimi_cli.trunkcheck import TrunkCheck

from .model import CONFIG, SHARD, model_at, original
from .target import Reader, Target, either, json_variants

_FACTS = ("format", "version", "encoding", "fingerprint", "embedding", "tables")


def ignore(done: int, total: int) -> None:
    """A report that nobody reads."""


def seal_manifest(data: bytes) -> bytes | None:
    """`data` with the checksum that goes with it; None where it is no manifest."""
    try:
        found = json.loads(data)
        facts = {key: found[key] for key in _FACTS}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**found, "crc32c": crc32c(text)}).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def manifest(folder: Path) -> Reader:
    """The data as trunk.json, as it is and sealed: opened, and verified to the last block."""
    model = model_at(folder / "model")
    trunk = model / "kimi-trunk"
    found = survey(model, CONFIG)

    def read(data: bytes) -> None:
        for text in (data, seal_manifest(data)):
            if text is None:
                continue
            (trunk / MANIFEST).write_bytes(text)
            check = TrunkCheck(trunk, model, CONFIG, [])
            check.run(found, (), ignore)
            try:
                Trunk.open(trunk, model, CONFIG)
            except KimiError:
                assert check.findings
        Trunk.open(trunk, model, CONFIG)

    return read


def manifest_seeds() -> list[bytes]:
    whole = original(f"kimi-trunk/{MANIFEST}")
    found: dict[str, Any] = json.loads(whole)
    files, embedding, shard = found["files"], found["embedding"], found["fingerprint"]["shards"][0]
    huge = 10**18

    def listed(**changes: Any) -> dict[str, Any]:
        return {"files": [{**files[0], **changes}, *files[1:]]}

    changes: list[dict[str, Any]] = [
        {"files": []},
        {"files": files[::-1]},
        listed(size=huge),
        listed(blocks=[]),
        listed(blocks=[*files[0]["blocks"], [huge, huge, 0]]),
        listed(blocks=[files[0]["blocks"][0], [4096, huge, 0]]),
        listed(blocks=[files[0]["blocks"][0], [(1 << 63) - 1, (1 << 63) - 1, 0]]),
        listed(blocks=[[0, huge, 0]]),
        listed(name="layer-000.safetensors\ud800"),
        {"embedding": {**embedding, "shard": 7}},
        {"embedding": {**embedding, "offset": huge}},
        {"embedding": {**embedding, "shape": [huge, 0], "length": 0}},
        {"embedding": {**embedding, "dtype": "F32", "length": 2 * embedding["length"]}},
        {"tables": {"size": huge, "crc32c": 0}},
        {"fingerprint": {"shards": []}},
        {"fingerprint": {"shards": [shard, shard]}},
        {"fingerprint": {"shards": [{**shard, "name": "\ud800"}]}},
        {"fingerprint": {"shards": [{**shard, "name": "config.json"}]}},
        {"fingerprint": {"shards": [{**shard, "name": "kimi-trunk"}]}},
        {"fingerprint": "deep"},
    ]
    texts = [json.dumps({**found, **change}, separators=(",", ":")).encode() for change in changes]
    deep = texts.pop()
    depths = (b"[" * depth + b"]" * depth for depth in (50, *range(960, 1000)))
    return [*json_variants(whole), *texts, *(deep.replace(b'"deep"', value) for value in depths)]


def unit(folder: Path) -> Reader:
    """The data as the header of a trunk file, of the size and with the blocks that it asks for."""
    model = model_at(folder / "model")
    path, tensors = model / "kimi-trunk" / "layer-000.safetensors", unit_tensors(CONFIG)[0][1]
    whole = path.read_bytes()
    body = whole[8 + int.from_bytes(whole[:8], "little") :]

    def read(data: bytes) -> None:
        raw = data + b" " * (-(8 + len(data)) % ALIGN)
        raw = len(raw).to_bytes(8, "little") + raw
        size, blocks = len(raw) + len(body), [[0, len(raw), crc32c(raw)]]
        with suppress(KimiError, ValueError):
            entries = parse_header(raw, size, str(path))
            laid = lay_out(path.name, read_stored(entries, tensors), CONFIG)[0]
            blocks = [[b.offset, b.length, 0] for b in laid.blocks]
            blocks[0][2] = crc32c(raw)
        path.write_bytes(raw + body)
        found = open_unit(path, tensors, Listed(path.name, size, blocks), CONFIG)
        assert found.size == size and sum(block.length for block in found.blocks) == size
        for vector in found.vectors:
            assert vector.offset >= ALIGN and vector.offset + vector.length <= size
        for matrix in found.matrices:
            rows = native.row_bytes(matrix.format, matrix.cols) * matrix.rows
            assert matrix.offset >= ALIGN and matrix.offset + rows <= size
            if matrix.format == native.Format.PACKED:
                assert matrix.table >= ALIGN and matrix.table + 16 <= size
                assert matrix.escapes + 4 * matrix.escape_count <= size

    return read


def unit_seeds() -> list[bytes]:
    raw = original("kimi-trunk/layer-000.safetensors")
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")].rstrip(b" ")
    entries = json.loads(text)
    named = list(entries)
    dropped = [{k: v for k, v in entries.items() if k != name} for name in named[1:8]]
    swapped = {**entries, named[1]: entries[named[2]], named[2]: entries[named[1]]}
    return [*json_variants(text), *(json.dumps(c).encode() for c in (*dropped, swapped))]


def tables(folder: Path) -> Reader:
    """The data laid over the tables' bytes from the end backwards; then a file of its own."""
    model = model_at(folder / "model")
    trunk = model / "kimi-trunk"
    whole, shards = (trunk / TABLES).read_bytes(), [(model / SHARD).stat().st_size]

    def read(data: bytes) -> None:
        patch = data[: len(whole)]
        for raw in (data, whole[: len(whole) - len(patch)] + patch):
            (trunk / TABLES).write_bytes(raw)
            with suppress(KimiError):
                read_tables(trunk, (len(whole), crc32c(raw)), shards, CONFIG)
        found = read_tables(trunk, (len(whole), crc32c(raw)), shards, CONFIG).experts
        routed = found.shard >= 0
        ends = (found.offset + np.array(found.sizes))[routed]
        assert (found.offset[routed] >= 0).all() and (ends <= shards[0]).all()

    return read


def tables_seeds() -> list[bytes]:
    whole = original(f"kimi-trunk/{TABLES}")
    return [whole, b"", whole[-2400:], whole[4096:], b"\xff" * 2300, b"\x7f" * 2300, bytes(2300)]


def sums(folder: Path) -> Reader:
    """The data as both tables of expert checksums, as it is and with a checksum that fits."""
    model = model_at(folder / "model")
    trunk = Source.open(model).trunk

    def read(data: bytes) -> None:
        sealed = data[:-4] + crc32c(data[:-4]).to_bytes(4, "little")
        for raw in (data, sealed):
            for name in (SUMS, PARTIAL_SUMS):
                (trunk.directory / name).write_bytes(raw)
            known = load_known(trunk)
            assert known.sums.shape == known.done.shape
            with suppress(KimiError):
                load_expert_sums(trunk)
        load_expert_sums(trunk)

    return read


def sums_seeds() -> list[bytes]:
    found: list[bytes] = []

    def make(folder: Path) -> None:
        model = model_at(folder / "model")
        trunk = Source.open(model).trunk
        save_expert_sums(trunk, np.zeros((2, 2), np.uint32))
        found.append((trunk.directory / SUMS).read_bytes())

    _in_scratch(make)
    whole = found[0]
    longer = whole.replace(b"KIMISUMS", b"KIMIPART")[:-4] + bytes(4 + 8 + 4)
    return [whole, longer, b"", whole[:8], whole[:-1], whole + b"\0"]


def _in_scratch(make: Callable[[Path], None]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kimi-fuzz-") as scratch:
        make(Path(scratch))


PATCHED = (
    "kimi-trunk/layer-000.safetensors",
    "kimi-trunk/layer-001.safetensors",
    "kimi-trunk/head.safetensors",
    SHARD,
)


def weights(folder: Path) -> Reader:
    """Patches (file, u16 place, u16 value) on any weights, escapes or tables, every checksum made
    to fit; then a prompt and a token are computed, and every expert is read."""
    model = model_at(folder / "model")
    trunk = model / "kimi-trunk"
    whole = {name: original(name) for name in PATCHED}
    start = {name: 8 + int.from_bytes(raw[:8], "little") for name, raw in whole.items()}
    first = read_manifest(trunk / MANIFEST)
    experts = read_tables(trunk, first.tables, [len(whole[SHARD])], CONFIG).experts
    native.set_threads(1)

    def seal() -> None:
        for listed in first.files:
            raw = (trunk / listed.name).read_bytes()
            for block in listed.blocks:
                block[2] = crc32c(raw[block[0] : block[0] + block[1]])
        rows = (model / SHARD).read_bytes()[first.embedding.offset :][: first.embedding.length]
        table = row_sums(np.frombuffer(rows, np.uint8).reshape(CONFIG.vocab_size, -1))
        size = write_tables(trunk, Tables(experts, table), CONFIG)
        made_from = fingerprint([model / SHARD], crc32c)
        write_manifest(trunk / MANIFEST, replace(first, fingerprint=made_from, tables=size))

    def read(data: bytes) -> None:
        for name, raw in whole.items():
            changed, at = bytearray(raw), PATCHED.index(name)
            for n in range(0, len(data) - 4, 5):
                if data[n] % len(PATCHED) == at:
                    room = len(raw) - start[name] - 2
                    place = start[name] + int.from_bytes(data[n + 1 : n + 3], "little") * 2 % room
                    changed[place : place + 2] = data[n + 3 : n + 5]
            (model / name).write_bytes(changed)
        seal()
        if len(data) % 2:  # it takes long
            TrunkCheck(trunk, model, CONFIG, []).run(survey(model, CONFIG), (), ignore)
        source = Source.open(model)
        with suppress(KimiError):
            Deep(source.trunk, None, []).run(ignore)
        for leftover in (SUMS, PARTIAL_SUMS):
            (trunk / leftover).unlink(missing_ok=True)
        request = Request(8, 4, 1, 1, all_logits=True)
        plan = make_plan(CONFIG, source.trunk.units, request, 1 << 30, {}, True)
        with Engine(source, plan) as engine:
            engine.load()
            for logits in engine.prefill([1, 300, 5, 511], True, True):
                assert np.isfinite(logits).all()
            assert np.isfinite(engine.step(7, False)).all()

    return read


def weights_seeds() -> list[bytes]:
    rng = random.Random(1)
    seeds = [b"", bytes(5)]
    for file in range(len(PATCHED)):
        for value in (b"\x80\x7f", b"\xc0\x7f", b"\xff\xff", b"\x00\x00", b"\x7f\x7f"):
            place = rng.randrange(1 << 16).to_bytes(2, "little")
            seeds.append(bytes([file]) + place + value)
    places = (place.to_bytes(2, "little") for place in range(0, 9000, 40))
    return [*seeds, b"".join(bytes([3]) + place + b"\xff\xff" for place in places)]


TARGETS = {
    "manifest": Target(manifest, manifest_seeds),
    "layer": either(Target(unit, unit_seeds), Target(weights, weights_seeds)),
    "tables": either(Target(tables, tables_seeds), Target(sums, sums_seeds)),
}
