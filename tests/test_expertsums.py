"""The table of expert checksums: written whole, read back strictly, forgotten where stale."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kimi_cli import synth
from kimi_cli.config import load_config
from kimi_cli.engine import Source
from kimi_cli.errors import Exit, TrunkError
from kimi_cli.expertsums import (
    PARTIAL,
    SUMS,
    expert_crc,
    load_expert_sums,
    load_known,
    save_expert_sums,
    save_known,
)
from kimi_cli.native import crc32c
from kimi_cli.repack import repack
from kimi_cli.trunk import Trunk


def opened(model: Path) -> Trunk:
    return Trunk.open(model / "kimi-trunk", model, load_config(model))


@pytest.fixture
def trunk(tmp_path: Path) -> Trunk:
    return opened(Path(shutil.copytree(synth.BUILTIN, tmp_path / "tiny")))


def numbers(trunk: Trunk) -> np.ndarray:
    shape = trunk.experts.shard.shape[:2]
    return np.random.default_rng(5).integers(0, 1 << 32, shape, np.uint32)


def refusal(trunk: Trunk) -> str:
    with pytest.raises(TrunkError) as caught:
        load_expert_sums(trunk)
    text = str(caught.value)
    assert caught.value.exit_code == Exit.CHECKPOINT and "\n" not in text
    assert text.startswith(str(trunk.directory / SUMS)) and "kimi verify" in text
    return text


def test_an_expert_is_summed_as_if_its_tensors_were_one() -> None:
    parts = [bytes([n]) * (n + 3) for n in range(6)]
    assert expert_crc(parts) == crc32c(b"".join(parts))
    assert expert_crc([]) == 0


def test_a_pipe_is_not_waited_for(trunk: Trunk) -> None:
    os.mkfifo(trunk.directory / SUMS)
    os.mkfifo(trunk.directory / PARTIAL)
    assert "cannot be read (it is not a regular file)" in refusal(trunk)
    assert not load_known(trunk).done.any()


def test_no_table_is_none(trunk: Trunk) -> None:
    assert load_expert_sums(trunk) is None


def test_the_table_comes_back_as_it_was(trunk: Trunk) -> None:
    sums = numbers(trunk)
    save_expert_sums(trunk, sums)
    found = load_expert_sums(trunk)
    assert found is not None and found.dtype == np.uint32
    assert np.array_equal(found, sums)
    assert sorted(p.name for p in trunk.directory.glob("*.tmp")) == []
    size = (trunk.directory / SUMS).stat().st_size
    assert size == 52 + sums.nbytes + 4


def test_every_flipped_bit_and_every_cut_is_refused(trunk: Trunk) -> None:
    save_expert_sums(trunk, numbers(trunk))
    path = trunk.directory / SUMS
    raw = path.read_bytes()
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        refusal(trunk)
    for length in (0, 7, 51, 52, len(raw) - 1):
        path.write_bytes(raw[:length])
        refusal(trunk)
    path.write_bytes(raw + b"\0")
    refusal(trunk)
    path.unlink()
    path.mkdir()
    assert "cannot be read" in refusal(trunk)


def test_the_table_of_another_version_or_checkpoint_is_refused(
    trunk: Trunk, tmp_path: Path
) -> None:
    save_expert_sums(trunk, numbers(trunk))
    raw = (trunk.directory / SUMS).read_bytes()
    bad = bytearray(raw)
    bad[8] = 2
    (trunk.directory / SUMS).write_bytes(bad)
    assert "version 2, wanted 1" in refusal(trunk)
    other = tmp_path / "other"
    config = synth.make_config(num_hidden_layers=13)
    synth.write_checkpoint(other, config, seed=8)
    repack(other)
    (other / "kimi-trunk" / SUMS).write_bytes(raw)
    assert "another checkpoint" in refusal(opened(other))
    small = tmp_path / "small"
    synth.write_checkpoint(small, synth.make_config(num_hidden_layers=4), seed=8)
    repack(small)
    (small / "kimi-trunk" / SUMS).write_bytes(raw)
    assert "13 x 12" in refusal(opened(small))


def test_a_source_brings_the_table(trunk: Trunk) -> None:
    model = trunk.directory.parent
    assert Source.open(model).sums is None
    save_expert_sums(trunk, numbers(trunk))
    assert np.array_equal(Source.open(model).sums, numbers(trunk))
    (trunk.directory / SUMS).write_bytes(b"junk")
    with pytest.raises(TrunkError, match="not a table"):
        Source.open(model)


def test_what_is_known_is_kept_until_its_shard_changes(trunk: Trunk) -> None:
    nothing = load_known(trunk)
    assert not nothing.done.any() and not nothing.sums.any()
    routed = trunk.experts.shard[:, :, 0] >= 0
    nothing.sums[routed] = numbers(trunk)[routed]
    nothing.done[routed] = True
    nothing.done[5, 7] = False
    save_known(trunk, nothing)
    known = load_known(trunk)
    assert np.array_equal(known.sums, nothing.sums)
    assert np.array_equal(known.done, nothing.done)
    assert load_expert_sums(trunk) is None
    os.utime(trunk.shards[1], ns=(1, 1))
    there = (trunk.experts.shard == 1).any(axis=2)
    assert there.any() and not there[routed].all()
    assert np.array_equal(load_known(trunk).done, nothing.done & ~there)


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_what_cannot_be_trusted_is_not_known(trunk: Trunk, damage: str) -> None:
    known = load_known(trunk)
    known.done[1:] = True
    save_known(trunk, known)
    assert load_known(trunk).done.any()
    path = trunk.directory / PARTIAL
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[60] ^= 4
    elif damage == "cut":
        del raw[-9:]
    else:
        trunk.fingerprint["shards"][0]["last"] = 1
    path.write_bytes(raw)
    assert not load_known(trunk).done.any()
