"""Repack: every bit kept, every interruption survived, every obstacle told in a sentence."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoded import raw_tensors, trunk_tensors

from kimi_cli import layout, packing
from kimi_cli.checkpoint import Checkpoint
from kimi_cli.config import load_config
from kimi_cli.errors import CheckpointError, Exit, KimiError, ReadError, TrunkError, UsageError
from kimi_cli.manifest import read_manifest
from kimi_cli.native import Format
from kimi_cli.repack import repack
from kimi_cli.synth import BUILTIN, make_config, write_checkpoint
from kimi_cli.tensors import head_tensors, layer_tensors
from kimi_cli.trunk import Trunk

SHAPES: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 192, "vocab_size": 700, "intermediate_size": 448,
    "num_attention_heads": 6, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 40,
    "v_head_dim": 24, "num_heads": 3, "head_dim": 64, "num_experts": 5,
    "moe_intermediate_size": 64, "routed_expert_hidden_size": 128,
}  # fmt: skip
NOBODY = 65534


def make(directory: Path, seed: int = 1, shards: int = 3, **options: Any) -> Path:
    shapes = {**SHAPES, **options.pop("shapes", {})}
    write_checkpoint(directory, make_config(**shapes), seed, shards=shards, **options)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers; not to be written to."""
    return make(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def whole(small: Path) -> dict[str, bytes]:
    """What repack makes of it, undisturbed."""
    out = small.parent / "whole"
    return contents(repack(small, out))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "repack.lock"}


def opened(model: Path, out: Path) -> Trunk:
    return Trunk.open(out, model, load_config(model))


def not_whole(model: Path, out: Path) -> None:
    with pytest.raises(TrunkError):
        opened(model, out)


# ---- every bit kept ----


def check_same_weights(model: Path, out: Path) -> Trunk:
    trunk = opened(model, out)
    config = load_config(model)
    source = {}
    for path in sorted(model.glob("model*.safetensors")):
        source.update(raw_tensors(path))
    wanted = [t for n in range(config.num_hidden_layers) for t in layer_tensors(config, n)]
    wanted += head_tensors(config)
    found: dict[str, Any] = {}
    for unit in trunk.units:
        found.update(trunk_tensors(out / unit.file))
    assert found.keys() == {tensor.name for tensor in wanted}
    for name, (dtype, shape, data) in found.items():
        assert (dtype, shape) == source[name][:2], name
        assert data == source[name][2], name
    for unit in trunk.units:
        for matrix in unit.matrices:
            dtype, _, data = source[matrix.name]
            check_choice(matrix, dtype, data, trunk.encoding, raw_tensors(out / unit.file))
    return trunk


def check_choice(matrix: Any, dtype: str, data: bytes, encoding: str, raw: Any) -> None:
    """Whether it is packed, and its table, from the rules alone."""
    if dtype == "F32":
        assert matrix.format == Format.F32
        return
    words = np.frombuffer(data, "<u2")
    counts = np.bincount(words >> 8, minlength=256)
    best = sorted(range(256), key=lambda byte: (-counts[byte], byte))[:16]
    escapes = int(words.size - counts[best].sum())
    packs = matrix.cols % 64 == 0 and words.size >= 4096 and escapes * 200 <= words.size
    if encoding == "plain" or not packs:
        assert matrix.format == Format.BF16
        return
    assert (matrix.format, matrix.escape_count) == (Format.PACKED, escapes)
    table = [byte if counts[byte] else best[0] for byte in best]
    assert list(raw[matrix.name + ".table"][2]) == table


@pytest.mark.parametrize("plain", [False, True])
def test_the_built_in_checkpoint(tmp_path: Path, plain: bool) -> None:
    trunk = check_same_weights(BUILTIN, repack(BUILTIN, tmp_path / "out", plain=plain))
    assert trunk.encoding == ("plain" if plain else "packed")
    formats = {m.format for unit in trunk.units for m in unit.matrices}
    assert (Format.PACKED in formats) is not plain
    assert any(m.blocks for unit in trunk.units for m in unit.matrices)


VARIANTS: dict[str, dict[str, Any]] = {
    "official": {},
    "scattered": {"scatter_trunk": True, "scatter_experts": True},
    "older": {"conv_2d": True, "a_log_4d": True},
    "f32": {"f32": ("*.o_proj.weight", "*layernorm.weight", "*lm_head*", "*kv_b_proj*")},
    "all f32": {"f32": ("*",)},
    "bf16": {"bf16": ("*A_log", "*dt_bias", "*conv1d*", "*o_norm*", "*bias")},
    "odd": {"shapes": {"hidden_size": 200, "intermediate_size": 333}},
    "dense": {"shapes": {"first_k_dense_replace": 3}},
    "one layer, one shard": {"shapes": {"num_hidden_layers": 1}, "shards": 1},
    "wide": {"shapes": {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 5000}},
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_survive(tmp_path: Path, variant: str, plain: bool) -> None:
    model = make(tmp_path / "model", **VARIANTS[variant])
    out = repack(model, plain=plain)
    assert out == model / "kimi-trunk"
    trunk = check_same_weights(model, out)
    if variant == "wide":
        assert max(len(m.blocks) for unit in trunk.units for m in unit.matrices) > 1


@pytest.mark.parametrize("plain", [False, True])
def test_weights_survive_in_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setattr(layout, "BLOCK", 1 << 12)
    monkeypatch.setattr(layout, "INLINE", 1 << 12)
    monkeypatch.setattr(packing, "BLOCK", 1 << 12)
    model = make(tmp_path / "model", f32=("*.k_proj.weight",))
    trunk = check_same_weights(model, repack(model, plain=plain))
    assert max(len(m.blocks) for unit in trunk.units for m in unit.matrices) > 5
    assert max(len(unit.head) for unit in trunk.units) > 1


def rewrite(model: Path, name: str, values: np.ndarray) -> None:
    """Puts other values, of the same bytes in all, in the place of a tensor."""
    place = Checkpoint.open(model, load_config(model)).tensors[name]
    assert values.nbytes == place.length
    path = sorted(model.glob("model*.safetensors"))[place.shard]
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(values.tobytes())


@pytest.mark.parametrize("over", [0, 1])
def test_escapes_up_to_half_a_percent(tmp_path: Path, over: int) -> None:
    model = make(tmp_path / "model")
    rng = np.random.default_rng(1)
    name, size = "language_model.lm_head.weight", 700 * 192
    words = ((0x30 + np.arange(size) % 16) << 8 | np.arange(size) % 251).astype("<u2")
    few = rng.permutation(size)[: size // 200 + over]
    words[few] = 0xB000 | rng.integers(0, 1 << 11, len(few))
    words[few[0]] = 0x8000
    rewrite(model, name, words)
    trunk = check_same_weights(model, repack(model))
    (matrix,) = trunk.units[-1].matrices
    assert matrix.format == (Format.BF16 if over else Format.PACKED)
    assert matrix.escape_count == (0 if over else size // 200)


def test_one_value_only(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    rewrite(model, "language_model.lm_head.weight", np.zeros(700 * 192, "<u2"))
    check_same_weights(model, repack(model))


def test_table() -> None:
    counts = np.zeros(256, np.int64)
    counts[[7, 3, 250]] = 5, 5, 9
    table, escapes = packing._table(counts)
    assert (list(table), escapes) == ([250, 3, 7] + [250] * 13, 0)
    counts[100:120] = 1
    table, escapes = packing._table(counts)
    assert (list(table), escapes) == ([250, 3, 7, *range(100, 113)], 7)


# ---- what is refused ----


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("name", "bits", "element", "what"),
    [
        ("layers.0.self_attn.q_proj.weight", 0x7F80, 0, "infinity"),
        ("layers.0.self_attn.q_proj.weight", 0xFF80, 12345, "infinity"),
        ("layers.0.self_attn.q_proj.weight", 0x7FC0, 36863, "NaN"),
        ("layers.1.block_sparse_moe.gate.weight", 0xFFFF, 77, "NaN"),
        ("layers.1.input_layernorm.weight", 0x7F81, 191, "NaN"),
        ("layers.1.self_attn.dt_bias", 0x7F800000, 5, "infinity"),
        ("layers.1.self_attn.A_log", 0xFF800001, 2, "NaN"),
        ("layers.2.self_attn.o_proj.weight", 0x7FFFFFFF, 20000, "NaN"),
        ("embed_tokens.weight", 0x7F80, 699 * 192 + 191, "infinity"),
        ("embed_tokens.weight", 0xFFC1, 5 * 192, "NaN"),
    ],
)
def test_not_finite(
    tmp_path: Path, name: str, bits: int, element: int, what: str, plain: bool
) -> None:
    model = make(tmp_path / "model", f32=("*.layers.2.self_attn.o_proj.weight",))
    name = "language_model.model." + name
    place = Checkpoint.open(model, load_config(model)).tensors[name]
    kind = "<u2" if place.dtype == "BF16" else "<u4"
    path = sorted(model.glob("model*.safetensors"))[place.shard]
    values = np.fromfile(path, np.uint8)[place.offset : place.offset + place.length].view(kind)
    values[element] = bits
    rewrite(model, name, values)
    with pytest.raises(CheckpointError) as caught:
        repack(model, plain=plain)
    offset = place.offset + element * (2 if kind == "<u2" else 4)
    said = f"{path}: {name} has {what} at element {element}, offset {offset}: the file is damaged, "
    assert str(caught.value).startswith(f"{said}run hf download")
    assert caught.value.exit_code == Exit.CHECKPOINT
    not_whole(model, model / "kimi-trunk")
    values[element] = 0x7F7F if kind == "<u2" else 0x7F7FFFFF  # the largest number is finite
    rewrite(model, name, values)
    check_same_weights(model, repack(model, plain=plain))


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    path = model / "model-00002-of-000003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="short"):
        repack(model)
    assert not (model / "kimi-trunk").exists()
    with pytest.raises(CheckpointError, match="is no directory"):
        repack(tmp_path / "none")


def test_a_shard_cut_short_meanwhile(tmp_path: Path) -> None:
    model = make(tmp_path / "model", shards=1)
    path = next(model.glob("model*.safetensors"))

    def report(done: int, total: int) -> None:
        os.truncate(path, 20_000)

    with pytest.raises(ReadError, match=r"ends at byte .*, wanted .* bytes of .* cut short"):
        repack(model, report=report)


def test_short_reads_and_writes_are_repeated(
    small: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:9999]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:9999], at))
    assert contents(repack(small, tmp_path / "out")) == whole


def test_a_read_error(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match=r"model-0000.*: reading .* failed: Input/output error"):
        repack(small, tmp_path / "out")


def test_what_reads_back_otherwise(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def lie(fd: int, data: memoryview, at: int) -> int:
        return pwrite(fd, bytes(data[:-1]) + b"\xa5", at)

    monkeypatch.setattr(os, "pwrite", lie)
    with pytest.raises(ReadError, match=r"000\.safetensors\.tmp reads back otherwise"):
        repack(small, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors.tmp"))


def test_the_models_own_folder(small: Path) -> None:
    for same in (small, small / ".", small / "x" / ".."):
        with pytest.raises(UsageError, match="give the trunk another place with --out"):
            repack(small, same)


def test_out_is_a_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(KimiError, match="cannot be written: Not a directory"):
            repack(small, out)
    assert (tmp_path / "file").read_text() == "mine"


# ---- progress, completeness, encodings ----


def test_report(small: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    out = repack(small, tmp_path / "out", report=lambda *call: calls.append(call))
    places = Checkpoint.open(small, load_config(small)).tensors
    total = sum(place.length for place in places.values())
    assert calls[-1] == (total, total) and {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(done) and len(done) > 50
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    calls.clear()
    assert repack(small, out, report=lambda *call: calls.append(call)) == out
    assert calls == [(total, total)]
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_changing_the_encoding_starts_over(
    small: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = repack(small, tmp_path / "out", plain=True)
    plain = contents(out)
    assert opened(small, out).encoding == "plain"
    (out / "mine.txt").write_text("kept")
    (out / "layer-099.safetensors").write_text("of a larger model")
    assert contents(repack(small, out)) == {**whole, "mine.txt": b"kept"}
    assert contents(repack(small, out, plain=True)) == {**plain, "mine.txt": b"kept"}


def test_another_checkpoint_starts_over(
    small: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = repack(make(tmp_path / "other", seed=2), tmp_path / "out")
    with pytest.raises(TrunkError, match="made from another checkpoint"):
        opened(small, out)
    assert contents(repack(small, out)) == whole


@pytest.mark.parametrize("damage", ["header", "rows", "short", "absent", "tables", "manifest"])
def test_repair_rewrites_only_what_is_broken(
    small: Path, whole: dict[str, bytes], tmp_path: Path, damage: str
) -> None:
    out = repack(small, tmp_path / "out")
    path = out / "layer-001.safetensors"
    with path.open("r+b") as file:
        file.seek(0 if damage == "header" else -1, os.SEEK_END if damage != "header" else 0)
        if damage in ("header", "rows"):
            file.write(b"\xa5")
    if damage == "short":
        os.truncate(path, 5000)
    elif damage == "absent":
        path.unlink()
    elif damage == "tables":
        (out / "tables.safetensors").write_bytes(b"")
    elif damage == "manifest":
        (out / "trunk.json").write_bytes(b"{")
    elif damage == "rows":  # met by whoever reads them; the file is then deleted
        (out / "tables.safetensors").unlink()
    not_whole(small, out)
    before = (out / "layer-002.safetensors").stat().st_mtime_ns
    assert contents(repack(small, out)) == whole
    kept = (out / "layer-002.safetensors").stat().st_mtime_ns == before
    assert kept is (damage != "manifest")


def test_a_repair_does_not_vouch_for_the_embedding(tmp_path: Path) -> None:
    """A row damaged since the first repack is still told from what it was."""
    model = make(tmp_path / "model")
    out = repack(model)
    before = contents(out)
    place = opened(model, out).embedding
    shard = opened(model, out).shards[place.shard]
    middle = place.offset + place.length // 2
    with shard.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    (out / "layer-001.safetensors").unlink()
    assert contents(repack(model)) == before


# ---- interruptions ----


class Stop(BaseException):
    """Comes from nowhere, as Ctrl-C does."""


def stopping(after: int, kind: type[BaseException]) -> Callable[[int, int], None]:
    """A report that raises at call number `after`."""
    calls = iter(range(after))

    def report(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise kind

    return report


def test_stopped_at_any_report(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Each run goes a little further than the last; none leaves anything but whole files."""
    out, rng, listed = tmp_path / "out", random.Random(1), 0
    for run in range(40):
        with suppress(Stop, KeyboardInterrupt):
            repack(
                small,
                out,
                report=stopping(rng.randrange(60), Stop if run % 2 else KeyboardInterrupt),
            )
        if (out / "trunk.json").exists():
            break
        not_whole(small, out)
        assert not list(out.glob("*.tmp"))
        if (out / "trunk.partial.json").exists():
            now = len(read_manifest(out / "trunk.partial.json").files)
            assert now >= listed
            listed = now
    repack(small, out)
    assert contents(out) == whole


CALLS = ("rename", "fsync", "pwrite", "unlink", "open", "mkdir", "preadv", "posix_fadvise")


def failing(
    monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, names: tuple[str, ...]
) -> Callable[[], int]:
    """Lets the system call number `at` among `names` fail; gives back the count of calls."""
    count = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at + 1:
                raise error
            return call(*args, **options)

        return wrapped

    for name in names:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count


@pytest.mark.fault(
    "disk: a repack stopped in any system call", "the rerun gives byte-identical files", times=60
)
def test_stopped_at_any_system_call(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = failing(patch, -1, Stop(), CALLS)
        repack(small, tmp_path / "count")
        total = count()
    assert total > 200
    stopped = 0
    for at in [*range(12), *range(12, total, total // 50)]:
        out = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, at, Stop(), CALLS)
            try:
                repack(small, out)
            except Stop:
                stopped += 1
        if out.is_dir() and not (out / "trunk.json").exists():
            not_whole(small, out)
        assert contents(repack(small, out)) == whole
        shutil.rmtree(out)
    assert stopped > 50


def test_disk_full_at_any_write(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    names = ("pwrite", "fsync", "rename", "mkdir")
    with pytest.MonkeyPatch.context() as patch:
        count = failing(patch, -1, Stop(), names)
        repack(small, tmp_path / "count")
        total = count()
    for at in [*range(8), *range(8, total, total // 20)]:
        out = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, at, OSError(errno.ENOSPC, "No space left on device"), names)
            with pytest.raises(KimiError) as caught:
                repack(small, out)
        assert type(caught.value) is KimiError and caught.value.exit_code == Exit.FAILED
        assert "cannot be written: No space left on device; make room and" in str(caught.value)
        assert not list(out.glob("layer*.tmp"))
        assert contents(repack(small, out)) == whole


CHILD = """
import os, random, signal, sys, threading, time
sys.path.insert(0, os.getcwd())
from pathlib import Path
from kimi_cli.repack import repack

def kill(out, delay):
    while not out.exists():
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)

model, out, delay = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
threading.Thread(target=kill, args=(out, delay), daemon=True).start()
repack(model, out, report=lambda done, total: time.sleep(0.001))
"""


def child(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.fault(
    "disk: kill -9 at any point of a repack",
    "the rerun gives byte-identical files, no other",
    times=12,
)
def test_killed_a_dozen_times(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """kill -9 at random moments; the same folder goes on each time."""
    out, rng, killed = tmp_path / "out", random.Random(7), 0
    for _ in range(60):
        done = child(CHILD, small, out, rng.uniform(0, 0.15))
        assert done.returncode in (0, -9), done.stderr
        if done.returncode == 0:
            assert contents(out) == whole
            shutil.rmtree(out)
            continue
        killed += 1
        if not (out / "trunk.json").exists():
            not_whole(small, out)
        if killed >= 12:
            break
    assert killed >= 12
    repack(small, out)
    assert contents(out) == whole


@pytest.mark.fault(
    "disk: two repacks to one directory at once",
    "one is refused with exit code 1, or finds it done",
)
def test_two_at_once(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out, refused = tmp_path / "out", []

    def report(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(KimiError, match="another kimi repack is writing there") as caught:
                repack(small, out)
            refused.append(caught.value.exit_code)

    repack(small, out, report=report)
    assert refused == [1] and contents(out) == whole


# ---- room, permissions, memory ----


@pytest.mark.fault("disk: no room for a trunk", "said before anything is written, exit code 1")
def test_no_room(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs = os.statvfs(tmp_path)
    values = list(statvfs)
    values[4] = (1 << 20) // statvfs.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    with pytest.raises(KimiError) as caught:
        repack(small, tmp_path / "deep" / "out")
    assert caught.value.exit_code == 1
    assert f"{tmp_path}: the trunk needs up to 1" in str(caught.value)
    assert "MiB, 1.00 MiB are free: make room for" in str(caught.value)
    assert not (tmp_path / "deep").exists()


def test_room_counts_what_is_kept_and_what_goes(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = repack(small, tmp_path / "out")
    (out / "layer-001.safetensors").unlink()
    statvfs = os.statvfs(tmp_path)
    values = list(statvfs)
    values[4] = (18 << 20) // statvfs.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    repack(small, out)
    repack(small, out, plain=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 18 MiB, where this machine lets one be mounted."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here; test_disk_full_at_any_write stands in")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.fault(
    "disk: a small file system that fills during a repack",
    "said, exit code 1, nothing half-published; the rerun completes to the same bytes",
)
def test_a_disk_that_fills(small: Path, whole: dict[str, bytes], small_disk: Path) -> None:
    out = small_disk / "out"
    ballast = small_disk / "ballast"

    def report(done: int, total: int) -> None:
        if done > total // 2 and not ballast.exists():
            with ballast.open("wb") as file, pytest.raises(OSError):
                while True:
                    file.write(b"\0" * (1 << 16))
                    file.flush()

    with pytest.raises(KimiError, match="cannot be written: No space left on device; make room"):
        repack(small, out, report=report)
    not_whole(small, out)
    with pytest.raises(KimiError, match="the trunk needs up to"):
        repack(small, out)
    ballast.unlink()
    assert contents(repack(small, out)) == whole


@pytest.fixture
def read_only(small: Path) -> Iterator[Path]:
    """The checkpoint where whoever runs this may not write."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        shutil.copytree(small, model, ignore=shutil.ignore_patterns("kimi-trunk"))
        os.chmod(name, 0o755)
        os.chmod(model, 0o555)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
            try:
                yield model
            finally:
                os.seteuid(0)
        else:
            yield model
        os.chmod(model, 0o755)


@pytest.mark.fault("disk: a directory or file that may not be written", "said, exit code 1 or 2")
def test_read_only_model(read_only: Path) -> None:
    with pytest.raises(UsageError) as caught:
        repack(read_only)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"{read_only}/kimi-trunk cannot be written (Permission denied): "
        f"choose a place with kimi repack -m {read_only} --out DIR"
    )
    with tempfile.TemporaryDirectory() as other:
        check_same_weights(read_only, repack(read_only, Path(other) / "out"))
    with pytest.raises(KimiError, match="out cannot be written: Permission denied") as failed:
        repack(read_only, read_only / "out")
    assert failed.value.exit_code == 1


def test_read_only_but_complete(small: Path, tmp_path: Path) -> None:
    out = repack(small, tmp_path / "out")
    os.chmod(out, 0o555)
    (out / "repack.lock").unlink()
    assert repack(small, out) == out
    assert not (out / "repack.lock").exists()
    os.chmod(out, 0o755)


MEASURE = """
import os, sys
sys.path.insert(0, os.getcwd())
from pathlib import Path
from kimi_cli.repack import repack
repack(Path(sys.argv[1]), Path(sys.argv[2]), plain=sys.argv[3] == "plain")
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.parametrize("encoding", ["packed", "plain"])
def test_memory_does_not_grow_with_the_layer(tmp_path: Path, encoding: str) -> None:
    shapes = {"num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 12288}
    model = make(tmp_path / "model", shards=1, shapes=shapes, f32=("*up_proj*",))
    out = tmp_path / "out"
    done = child(MEASURE, model, out, encoding)
    assert done.returncode == 0, done.stderr
    size = (out / "layer-000.safetensors").stat().st_size
    assert size > 300e6
    assert int(done.stdout) * 1024 < 250e6
    assert json.loads((out / "trunk.json").read_text())["encoding"] == encoding
