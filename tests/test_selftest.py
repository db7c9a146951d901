"""`kimi selftest` passes, and fails when it should: one that cannot fail is worthless."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_cli import native, selftest
from kimi_cli.builtin import ROOT
from kimi_cli.errors import Exit, VerifyError


class Table(list[tuple[str, str]]):
    """(PASS or FAIL, name) of every line that a self-test printed."""

    @property
    def failed(self) -> list[str]:
        return [name for verdict, name in self if verdict == "FAIL"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Table]:
    """Runs a self-test on the best instruction set; the table is what it printed."""

    def run() -> Table:
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        try:
            with monkeypatch.context() as patch, pytest.raises(VerifyError) as caught:
                patch.setattr(sys, "stdout", out)
                selftest.selftest(native.supported_isas()[-1])
        finally:
            native.set_isa("auto")
            native.set_threads(1)
        lines = out.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
        found = Table((line[:4], line[6:50].strip()) for line in lines)
        assert caught.value.exit_code == Exit.VERIFY
        assert str(caught.value).startswith(f"{len(found.failed)} checks failed")
        return found

    return run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden files that the self-test takes for its own."""
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, tmp_path / path.name)
    monkeypatch.setattr(selftest, "ROOT", tmp_path)
    monkeypatch.setattr(selftest, "run_golden", remembered)
    return tmp_path


REAL = selftest.run_golden
RUNS: dict[Any, selftest.Run] = {}


def remembered(source: Any, prompt: list[int], ids: list[int], chunk: int, threads: int) -> Any:
    """The engine is not what those tests change: its runs are made once."""
    fed = (*prompt, *ids[:-1], len(prompt))
    key = (source.trunk.encoding, source.config, fed, chunk, threads, native.isa())
    if key not in RUNS:
        RUNS[key] = REAL(source, prompt, ids, chunk, threads)
    return RUNS[key]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with np.load(path) as arrays:
        data = dict(arrays)
    change(data)
    np.savez(path, **data)


@pytest.fixture
def golden_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the golden files, in a third of the time."""
    monkeypatch.setattr(selftest, "VARIANTS", {"golden": ("tiny", None)})


def test_it_passes(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    selftest.selftest()
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[-1] == "all passed"
    assert len(lines) > 20 and all(line.startswith("PASS  ") for line in lines[:-1])
    for isa in native.supported_isas():
        assert any(f"kernel bf16, {isa}" in line for line in lines)
    native.set_isa("auto")
    native.set_threads(1)


@pytest.mark.parametrize("key", ["logits", "gen_logits"])
def test_a_wrong_logit_fails(root: Path, table: Any, key: str) -> None:
    def change(data: dict[str, Any]) -> None:
        data[key][2, 5] += 1e-3

    rewrite(root / "golden.npz", change)
    kind = "prompt" if key == "logits" else "continuation"
    assert table().failed == [f"golden: {kind} logits"]


def test_a_logit_that_is_no_number_fails(root: Path, table: Any) -> None:
    rewrite(root / "golden_block12.npz", lambda data: data["logits"].fill(np.nan))
    assert table().failed == ["golden_block12: prompt logits"]


def test_a_wrong_id_fails(root: Path, table: Any) -> None:
    def change(data: dict[str, Any]) -> None:
        data["gen_ids"][-1] ^= 1

    rewrite(root / "golden.npz", change)
    assert table().failed == ["golden: continuation ids"]


def test_a_wrong_expert_fails(root: Path, table: Any) -> None:
    def change(data: dict[str, Any]) -> None:
        data["routed_ids"][5, 3, 0] += 1

    rewrite(root / "golden.npz", change)
    assert table().failed == ["golden: routing"]


def test_golden_files_that_cannot_be_read_fail(root: Path, table: Any) -> None:
    path = root / "golden.npz"
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[len(sound) // 2] ^= 1
    for broken in (b"", b"PK", sound[:1000], bytes(flipped)):
        path.write_bytes(broken)
        assert table().failed == ["built-in model"]
    path.unlink()
    assert table().failed == ["built-in model"]
    path.write_bytes(sound)
    rewrite(path, lambda data: data.pop("gen_ids"))
    assert table().failed == ["built-in model"]
    path.write_bytes(sound)

    def shorten(data: dict[str, Any]) -> None:
        data["logits"] = data["logits"][:, :-1]

    rewrite(path, shorten)
    assert table().failed == ["golden: prompt logits"]


def test_another_config_fails(root: Path, table: Any) -> None:
    shutil.copy(ROOT / "tiny" / "config.json", root / "config_block12.json")
    failed = table().failed
    assert "golden_block12: prompt logits" in failed


@pytest.mark.usefixtures("golden_only")
def test_a_wrong_formula_fails(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eps of the latent norms: the smallest of the known mistakes."""
    monkeypatch.setattr("kimi_cli.model.LATENT_EPS", 1e-5)
    assert "golden: prompt logits" in table().failed


@pytest.mark.usefixtures("golden_only")
def test_a_wrong_kernel_fails(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.sigmoid

    def off_by_one(x: Any, y: Any) -> None:
        real(x, y)
        y.view(np.uint32).ravel()[0] ^= 1

    monkeypatch.setattr(native, "sigmoid", off_by_one)
    assert f"kernel elementary, {native.supported_isas()[-1]}" in table().failed


@pytest.mark.usefixtures("golden_only")
def test_a_result_that_depends_on_the_chunk_fails(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = native.l2norm

    def slightly(x: Any, eps: float, scale: float) -> None:
        real(x, eps, scale)
        if len(x) == 7:
            x.view(np.uint32).ravel()[0] ^= 1

    monkeypatch.setattr(native, "l2norm", slightly)
    assert "golden: prompt in chunks of 7 equals whole" in table().failed


def test_damaged_builtin_trunk_fails(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "tiny"
    shutil.copytree(ROOT / "tiny", copy)
    path = copy / "kimi-trunk" / "layer-004.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(selftest, "TINY", copy)
    assert table().failed == ["built-in model"]
