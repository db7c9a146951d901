"""Weights, pinned or streamed under any plan: the same bytes, every one of them checked."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from decoded import Tensors, trunk_tensors
from running import make_model, plan_of, tighten

from kimi_cli import layout, native
from kimi_cli.engine import Source
from kimi_cli.errors import ReadError
from kimi_cli.native import Format, Matrix
from kimi_cli.plan import Plan, walk
from kimi_cli.stream import ALIGN, Reader
from kimi_cli.weights import Weights

MODELS = {
    "packed": dict(hidden_size=128),
    "plain": dict(hidden_size=128, plain=True),
    # Rows whose blocks do not begin on pages: 128 of them are 25,600 bytes.
    "odd": dict(hidden_size=100, kv_lora_rank=33, q_lora_rank=41, vocab_size=701),
    "float32": dict(hidden_size=100, f32=["*proj.weight", "*lm_head*", "*gate.weight"]),
}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Row blocks of a few KiB, so that a small model has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK", 16 << 10)
        patch.setattr(layout, "INLINE", 3 << 10)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, small_blocks: None) -> dict[str, Source]:
    root = tmp_path_factory.mktemp("weights")
    return {
        name: make_model(root / name, 5, num_hidden_layers=5, num_experts=4, **options)
        for name, options in MODELS.items()
    }


@pytest.fixture(params=list(MODELS))
def source(request: pytest.FixtureRequest, sources: dict[str, Source]) -> Source:
    return sources[request.param]


@contextmanager
def opened(source: Source, plan: Plan, load: bool = True) -> Iterator[Weights]:
    reader = Reader(3)
    weights = Weights(source.trunk, plan, reader)
    try:
        if load:
            weights.load()
        yield weights
    finally:
        reader.close()
        weights.close()


def values(matrix: Matrix) -> bytes:
    """The exact stored values of a piece, as little-endian bf16 or float32."""
    if matrix.format == Format.PACKED:
        out = np.empty((matrix.rows, matrix.cols), np.uint16)
        native.unpack_rows(matrix, out)
        return out.tobytes()
    size = native.row_bytes(matrix.format, matrix.cols) * matrix.rows
    return bytes(matrix._kept[0][:size])


def one_pass(weights: Weights, source: Source, head: bool = True) -> dict[str, bytes]:
    """Every tensor by name, as the model would meet it; the pass is scheduled already."""
    found: dict[str, bytes] = {}
    for number, unit in enumerate(source.trunk.units[: None if head else -1]):
        layer = weights.enter(number)
        for vector in unit.vectors:
            short = vector.name.removesuffix(".weight").split(".layers.")[-1].split(".", 1)[1]
            short = short.removeprefix("model.")
            found[vector.name] = layer.vectors[short].tobytes()
        for matrix in unit.matrices:
            short = matrix.name.removesuffix(".weight").split(".layers.")[-1].split(".", 1)[1]
            pieces, next_row = [], 0
            assert layer.rows_of(short) == matrix.rows
            for row, piece in layer.rows(short):
                assert row == next_row and piece.cols == matrix.cols
                next_row += piece.rows
                pieces.append(values(piece))
            assert next_row == matrix.rows
            found[matrix.name] = b"".join(pieces)
    return found


def stored(source: Source) -> dict[str, bytes]:
    """The same from the files, by numpy and the safetensors library; vectors widened."""
    tensors: Tensors = {}
    for unit in source.trunk.units:
        tensors |= trunk_tensors(source.trunk.directory / unit.file)
    vectors = {vector.name for unit in source.trunk.units for vector in unit.vectors}
    found = {}
    for name, (dtype, _, data) in tensors.items():
        if name in vectors and dtype == "BF16":
            data = (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
        found[name] = data
    return found


def plans(source: Source) -> dict[str, Plan]:
    floor, whole = plan_of(source, ram=0), plan_of(source)
    return {
        "floor": floor,
        "half": plan_of(source, ram=floor.floor + whole.pinned_bytes // 2),
        "whole": whole,
        **{
            f"small ring, {share} pinned": tighten(share)(floor, source)
            for share in (0, 0.1, 0.34, 0.5, 0.9, 1)
        },
    }


def test_models_have_what_these_tests_are_for(sources: dict[str, Source]) -> None:
    odd = [s for s in walk(sources["odd"].trunk.units) if s.offset % ALIGN]
    assert len(odd) > 10
    for source in sources.values():
        assert any(len(m.blocks) > 3 for unit in source.trunk.units for m in unit.matrices)
        assert any(not m.blocks for unit in source.trunk.units for m in unit.matrices)
    formats = {m.format for unit in sources["packed"].trunk.units for m in unit.matrices}
    assert formats == {Format.PACKED, Format.BF16}
    assert any(m.escape_count for unit in sources["packed"].trunk.units for m in unit.matrices)


def test_every_budget_gives_the_files_weights(source: Source) -> None:
    wanted = stored(source)
    for name, plan in plans(source).items():
        with opened(source, plan) as weights:
            for _ in range(2):
                weights.schedule(True)
                assert one_pass(weights, source) == wanted, name


def test_reading_ahead_goes_on_into_the_next_pass(source: Source) -> None:
    wanted = stored(source)
    plan = tighten(0.3)(plan_of(source, ram=0), source)
    head = {name for name in wanted if ".layers." not in name}
    with opened(source, plan) as weights:
        for with_head in (False, False, True, True):  # all known before the first begins
            weights.schedule(with_head)
        for with_head in (False, False, True, True):
            found = one_pass(weights, source, with_head)
            assert found == {n: b for n, b in wanted.items() if with_head or n not in head}


def test_bytes_read_are_the_plans(source: Source) -> None:
    segments = walk(source.trunk.units)
    for name, plan in plans(source).items():
        with opened(source, plan) as weights:
            for count in range(1, 4):
                weights.schedule(True)
                one_pass(weights, source)
                assert weights.bytes_read == count * plan.trunk_per_token, name
            streamed = sum(s.length for p, s in enumerate(segments) if p not in plan.pinned)
            assert plan.trunk_per_token == streamed
            head = sum(
                s.length
                for p, s in enumerate(segments)
                if p not in plan.pinned and s.unit == len(source.trunk.units) - 1
            )
            before = weights.bytes_read
            weights.schedule(False)
            one_pass(weights, source, head=False)
            assert weights.bytes_read - before == streamed - head


def record_load(source: Source, plan: Plan) -> tuple[list[int], list[int]]:
    """What is reported while the pinned weights are read."""
    reports: list[tuple[int, int]] = []
    with opened(source, plan, load=False) as weights:
        weights.load(lambda done, total: reports.append((done, total)))
    return [done for done, _ in reports], [total for _, total in reports]


def test_pinned_memory_is_the_plans(source: Source) -> None:
    segments = walk(source.trunk.units)
    for plan in plans(source).values():
        done, totals = record_load(source, plan)
        held = sum(segments[place].size for place in plan.pinned)
        widened = sum(-(-unit.widened_floats * 4 // ALIGN) * ALIGN for unit in source.trunk.units)
        heads = any(segments[place].matrix < 0 for place in plan.pinned)
        assert plan.pinned_bytes == held + (widened if heads else 0)
        assert totals == [held] * len(plan.pinned)
        assert done == sorted(done) and (not done or done[-1] == held)


def test_kv_b_proj_comes_in_whole_heads(source: Source) -> None:
    config = source.config
    rows = config.qk_nope_head_dim + config.v_head_dim
    for plan in plans(source).values():
        largest = plan.buffers.phases["mla"]["q_latent"][0]
        with opened(source, plan) as weights:
            weights.schedule(True)
            for number in range(len(source.trunk.units)):
                layer = weights.enter(number)
                for matrix in source.trunk.units[number].matrices:
                    short = matrix.name.removesuffix(".weight").split(".layers.")[-1]
                    for row, piece in layer.rows(short.split(".", 1)[1]):
                        if matrix.name.endswith(".kv_b_proj.weight"):
                            assert row % rows == 0 and piece.rows % rows == 0
                            heads = piece.rows // rows
                            width = config.kv_lora_rank + config.qk_rope_head_dim
                            assert plan.chunk * heads * width <= largest


@pytest.mark.parametrize("share", [0, 1])
def test_any_flipped_byte_is_found_by_the_read_that_meets_it(
    source: Source, tmp_path: Path, share: float
) -> None:
    """Once a block, every block but the headers (those are checked when the trunk is opened)."""
    directory = tmp_path / "trunk"
    shutil.copytree(source.trunk.directory, directory)
    copy = Source(source.config, _moved(source, directory))
    plan = tighten(share)(plan_of(source, ram=0), source)
    chance = random.Random(share)
    for unit in copy.trunk.units:
        path = directory / unit.file
        sound = path.read_bytes()
        matrices = [(m.name, b.block) for m in unit.matrices for b in m.blocks]
        for name, block in [*(("small tensors", b) for b in unit.head), *matrices]:
            at = chance.choice((block.offset, block.offset + block.length - 1,
                                block.offset + chance.randrange(block.length)))  # fmt: skip
            _flip(path, at, 1 << chance.randrange(8))
            with opened(copy, plan, load=False) as weights, pytest.raises(ReadError) as caught:
                weights.load()
                weights.schedule(True)
                one_pass(weights, copy)
            text = str(caught.value)
            assert text.startswith(
                f"{path}: damaged between bytes {block.offset} and {block.offset + block.length} "
                f"({name}): checksum "
            )
            assert "\n" not in text and "kimi repack" in text
            path.write_bytes(sound)
    with opened(copy, plan) as weights:
        weights.schedule(True)
        assert one_pass(weights, copy) == stored(source)


def _moved(source: Source, directory: Path):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(source.trunk, directory=directory)


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ bit]))


def test_file_cut_short_after_it_was_opened(source: Source, tmp_path: Path) -> None:
    directory = tmp_path / "trunk"
    shutil.copytree(source.trunk.directory, directory)
    copy = Source(source.config, _moved(source, directory))
    plan = tighten(0)(plan_of(source, ram=0), source)
    with opened(copy, plan) as weights:
        os.truncate(directory / "layer-002.safetensors", 12345)
        weights.schedule(True)
        with pytest.raises(ReadError, match=r"layer-002.safetensors: ends at byte .*cut short"):
            one_pass(weights, copy)


def test_missing_file_leaves_no_descriptor(source: Source, tmp_path: Path) -> None:
    directory = tmp_path / "trunk"
    shutil.copytree(source.trunk.directory, directory)
    (directory / "layer-003.safetensors").unlink()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReadError, match=r"layer-003.safetensors: cannot be opened"):
        Weights(_moved(source, directory), plan_of(source, ram=0), Reader(0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_walk_is_one_way(source: Source) -> None:
    """What is asked for out of order is a mistake of ours, not a silent wrong weight."""
    plan = tighten(0)(plan_of(source, ram=0), source)
    with opened(source, plan) as weights:
        weights.schedule(True)
        weights.enter(0)
        with pytest.raises(AssertionError, match="asked for"):
            weights.enter(1)


def test_blocks_of_the_real_size_off_page_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm_head [50001, 100] is 10 MB in three blocks, the second of which begins within a page."""
    monkeypatch.setattr(layout, "BLOCK", 4 << 20)
    monkeypatch.setattr(layout, "INLINE", 64 << 10)
    source = make_model(tmp_path, 3, num_hidden_layers=1, hidden_size=100, vocab_size=50_001)
    assert [s.offset % ALIGN for s in walk(source.trunk.units)][-3:] != [0, 0, 0]
    wanted = stored(source)
    for plan in (plan_of(source, ram=0), plan_of(source), tighten(0)(plan_of(source), source)):
        with opened(source, plan) as weights:
            weights.schedule(True)
            assert one_pass(weights, source) == wanted
