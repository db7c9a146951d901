"""Experts on demand: right bytes for any number of slots, counted, and never half read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoded import raw_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from running import make_model, plan_of, run

from kimi_cli.engine import Source
from kimi_cli.errors import CheckpointError, ReadError
from kimi_cli.experts import Experts
from kimi_cli.plan import slot_size
from kimi_cli.stream import ALIGN, Reader
from kimi_cli.tensors import EXPERT_PARTS, expert_bytes, expert_prefix

COUNT = 6
DIMENSIONS = dict(
    num_hidden_layers=4,
    num_experts=COUNT,
    num_experts_per_token=2,
    moe_intermediate_size=96,
    routed_expert_hidden_size=160,
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    root = tmp_path_factory.mktemp("experts")
    return {
        "whole": make_model(root / "whole", 7, **DIMENSIONS),
        "scattered": make_model(
            root / "scattered", 7, shards=3, scatter_experts=True, **DIMENSIONS
        ),
    }


@pytest.fixture(params=["whole", "scattered"])
def source(request: pytest.FixtureRequest, sources: dict[str, Source]) -> Source:
    return sources[request.param]


def is_whole(source: Source) -> bool:
    return bool(source.trunk.experts.whole[1:].all())


@contextmanager
def opened(source: Source, slots: int, readers: int = 2) -> Iterator[Experts]:
    reader = Reader(readers)
    size = slot_size(source.config, is_whole(source))
    trunk = source.trunk
    experts = Experts(source.config, trunk.experts, trunk.shards, slots, size, reader, source.sums)
    try:
        yield experts
    finally:
        reader.close()
        experts.close()


def stored(source: Source) -> dict[tuple[int, int], list[bytes]]:
    """The six tensors of every expert, as the safetensors library reads them."""
    tensors: dict[str, Any] = {}
    for shard in source.trunk.shards:
        tensors |= raw_tensors(shard)
    return {
        (layer, expert): [tensors[expert_prefix(layer, expert) + p][2] for p in EXPERT_PARTS]
        for layer in range(1, source.config.num_hidden_layers)
        for expert in range(COUNT)
    }


def fetch(experts: Experts, layer: int, wanted: list[int]) -> dict[int, list[bytes]]:
    experts.request(layer, wanted, range(len(wanted)))
    found: dict[int, list[bytes]] = {}
    for expert, w in chain.from_iterable(experts.arrivals()):
        assert expert not in found
        found[expert] = [tensor.tobytes() for tensor in w.weights]
    return found


def test_layouts_are_what_they_are_called(sources: dict[str, Source]) -> None:
    assert is_whole(sources["whole"])
    assert not sources["scattered"].trunk.experts.whole[1:].any()
    assert stored(sources["whole"]) == stored(sources["scattered"])


@pytest.mark.parametrize("slots", [1, 2, 3, COUNT, 3 * COUNT])
def test_every_expert_arrives_once_with_its_bytes(source: Source, slots: int) -> None:
    wanted = stored(source)
    with opened(source, slots) as experts:
        for _ in range(2):
            for layer in (1, 2, 3):
                chosen = [(layer + 2 * n) % COUNT for n in range(3)] if slots < 3 else [5, 0, 3, 1]
                chosen = list(dict.fromkeys(chosen))
                found = fetch(experts, layer, chosen)
                assert sorted(found) == sorted(chosen)
                for expert in chosen:
                    assert found[expert] == wanted[layer, expert]
            assert fetch(experts, 1, list(range(COUNT))) == {
                expert: wanted[1, expert] for expert in range(COUNT)
            }
            assert fetch(experts, 2, []) == {}


def test_shapes_are_the_formats(source: Source) -> None:
    with opened(source, 1) as experts:
        experts.request(1, [0], [0])
        for _, w in chain.from_iterable(experts.arrivals()):
            assert [tensor.shape for tensor in w.weights] == [
                (96, 80), (96, 5), (160, 48), (160, 3), (96, 80), (96, 5)
            ]  # fmt: skip
            assert all(tensor.dtype == np.uint8 for tensor in w.weights)


def test_hits_misses_and_bytes(source: Source) -> None:
    size = expert_bytes(source.config)
    with opened(source, 6) as experts:
        fetch(experts, 1, [0, 1, 2, 3])
        assert (experts.requests, experts.hits, experts.bytes_read) == (4, 0, 4 * size)
        fetch(experts, 1, [3, 0])
        assert (experts.requests, experts.hits, experts.bytes_read) == (6, 2, 4 * size)
        fetch(experts, 2, [0])  # another expert than layer 1's of the same number
        assert (experts.requests, experts.hits, experts.bytes_read) == (7, 2, 5 * size)
        fetch(experts, 1, [4, 0, 2, 3])  # the six slots are full now
        assert (experts.requests, experts.hits, experts.bytes_read) == (11, 5, 6 * size)
        fetch(experts, 3, [0, 1, 2, 3, 4, 5])
        assert (experts.requests, experts.hits, experts.bytes_read) == (17, 5, 12 * size)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 7),
    readers=st.integers(1, 3),
    requests=st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(0, COUNT - 1), unique=True)),
        max_size=12,
    ),
)
def test_any_requests(
    sources: dict[str, Source], slots: int, readers: int, requests: list[tuple[int, list[int]]]
) -> None:
    """A hit is what was in memory before its layer began; the rest is read, once each."""
    for source in sources.values():
        wanted = stored(source)
        with opened(source, slots, readers) as experts:
            asked = 0
            for layer, chosen in requests:
                asked += len(chosen)
                hits = experts.hits
                found = fetch(experts, layer, chosen)
                assert found == {expert: wanted[layer, expert] for expert in chosen}
                assert 0 <= experts.hits - hits <= min(slots, len(chosen))
            assert experts.requests == asked
            misses = asked - experts.hits
            assert experts.bytes_read == misses * expert_bytes(source.config)


def test_slots_are_large_enough_wherever_an_expert_lies(source: Source) -> None:
    """Six unaligned tensors, or one extent, with the pages around them, fit the planned slot."""
    size = slot_size(source.config, is_whole(source))
    sizes = source.trunk.experts.sizes
    if is_whole(source):
        assert size >= ALIGN - 1 + sum(sizes)
    else:
        assert size >= sum(-(-(ALIGN - 1 + one) // ALIGN) * ALIGN for one in sizes)


def copied(source: Source, directory: Path) -> Source:
    """The same source over its own copy of the shards, which may be damaged."""
    model = directory / "model"
    shutil.copytree(source.trunk.shards[0].parent, model)
    shards = tuple(model / shard.name for shard in source.trunk.shards)
    return Source(source.config, replace(source.trunk, shards=shards))


@pytest.mark.parametrize("part", [1, 3, 5])
def test_scale_that_means_nan_is_a_damaged_shard(source: Source, tmp_path: Path, part: int) -> None:
    copy, table = copied(source, tmp_path), source.trunk.experts
    path = copy.trunk.shards[table.shard[2, 4, part]]
    offset = int(table.offset[2, 4, part]) + table.sizes[part] // 2
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    with opened(copy, 3) as experts:
        assert len(fetch(experts, 2, [3, 5])) == 2
        with pytest.raises(CheckpointError) as caught:
            fetch(experts, 2, [0, 4, 1])
        text = str(caught.value)
        assert text.startswith(
            f"{path}: {expert_prefix(2, 4)}{EXPERT_PARTS[part]}: scale byte 255 (NaN) at offset "
            f"{offset}: "
        )
        assert "\n" not in text


def test_255_among_the_packed_weights_is_legal(source: Source, tmp_path: Path) -> None:
    copy, table = copied(source, tmp_path), source.trunk.experts
    with copy.trunk.shards[table.shard[1, 2, 0]].open("r+b") as file:
        file.seek(int(table.offset[1, 2, 0]))
        file.write(b"\xff\xff")
    with opened(copy, 2) as experts:
        assert fetch(experts, 1, [2])[2][0][:2] == b"\xff\xff"


def test_failed_read_aborts_and_is_not_taken_for_zeros(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert of a layer cannot be read: the whole forward pass ends, with the reason."""
    table = source.trunk.experts
    offset, real = int(table.offset[2, 3, 2]), os.preadv

    def fail(fd: int, buffers: Any, at: int) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")
        shard = str(source.trunk.shards[table.shard[2, 3, 2]])
        if name == shard and at <= offset < at + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, at)

    with opened(source, 2) as experts:
        fetch(experts, 1, [0])
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(
            ReadError, match=r"reading \d+ bytes of .*experts\.3\.\S* at \d+ failed"
        ):
            fetch(experts, 2, [3])
        monkeypatch.undo()
        assert fetch(experts, 2, [3])[3] == stored(source)[2, 3]  # not held as if it had come


def test_read_that_fails_ends_the_run(source: Source, tmp_path: Path) -> None:
    copy, table = copied(source, tmp_path), source.trunk.experts
    used = run(copy, [1, 2, 3])
    layer, expert = 3, next(ids[0] for (at, _), (ids, _) in used.routed.items() if at == 3)
    shard = copy.trunk.shards[table.shard[layer, expert, 5]]
    os.truncate(shard, int(table.offset[layer, expert, 5]) + 10)
    with pytest.raises(ReadError, match="the file has been cut short"):
        run(copy, [1, 2, 3])


def test_shard_that_is_gone_says_what_it_was_needed_for(source: Source, tmp_path: Path) -> None:
    copy, table = copied(source, tmp_path), source.trunk.experts
    shard = copy.trunk.shards[table.shard[3, 1, 0]]
    shard.unlink()
    with opened(copy, 2) as experts, pytest.raises(ReadError) as caught:
        fetch(experts, 3, [1])
    assert str(caught.value).startswith(f"{shard}: cannot be opened: No such file or directory")
    assert "expert of layer 3" in str(caught.value)


def test_files_are_closed(source: Source) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with opened(source, 2) as experts:
        fetch(experts, 1, [0, 1, 2, 3])
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


def test_decode_counts_what_the_routing_asks_for(source: Source) -> None:
    """Bytes are misses times the extent, requests the distinct experts of every chunk."""
    from kimi_cli.engine import Engine

    plan = replace(plan_of(source, ram=0), slots=1)
    asked: list[tuple[int, int]] = []

    def trace(layer: int, position: int, ids: Any, weights: Any) -> None:
        asked.extend((layer, expert) for expert in set(ids.ravel().tolist()))

    with Engine(source, plan, trace=trace) as engine:
        engine.load()
        for _ in engine.prefill([1, 2, 3, 4, 5], False, True):
            pass
        for _ in range(3):
            engine.step(9, True)
        experts = engine.experts
        assert experts.requests == len(asked)
        misses = experts.requests - experts.hits
        assert experts.bytes_read == misses * expert_bytes(source.config)


def test_what_an_abandoned_pass_left_behind_is_never_taken_for_whole(source: Source) -> None:
    layer = source.config.first_k_dense_replace
    wanted = stored(source)
    with opened(source, slots=3) as experts:
        for _ in range(20):
            experts.request(layer, [0, 1, 2], [0, 1, 2])
            next(iter(experts.arrivals()))  # and no more
            got = fetch(experts, layer, [2, 1, 3])
            assert got == {expert: wanted[layer, expert] for expert in (2, 1, 3)}
