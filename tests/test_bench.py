"""`kimi bench`: its arithmetic by tables, and whole runs that are held to loose sanity only."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import KIMI, environment, kimi, sentence
from running import all_ended, tasks

from kimi_cli import gauge, native
from kimi_cli.answer import Settings
from kimi_cli.bench import contest, extrapolate, plot, slices
from kimi_cli.bench.command import PARTS, Wanted
from kimi_cli.bench.command import bench as run_bench
from kimi_cli.bench.disk import Disk, Files, measure_disk, model_files
from kimi_cli.bench.kernels import Kernels, Operands, kernel_of
from kimi_cli.bench.ladder import Limits, Rung
from kimi_cli.bench.table import BYTES, FLOPS, SECONDS, SHARE, WEIGHTS, Row, quantity, rows_text
from kimi_cli.builtin import TINY
from kimi_cli.errors import Exit, KimiError, UsageError
from kimi_cli.native import Format
from kimi_cli.plan import Request
from kimi_cli.planning import Target
from kimi_cli.predict import Kernel, work_of
from kimi_cli.presets import preset_table
from kimi_cli.stream import Reader
from kimi_cli.threads import working
from kimi_cli.timing import Split
from kimi_cli.units import GIB, MIB

K3 = Target.open(None, None)


# --- taking turns --------------------------------------------------------------------------------


def test_best_takes_turns_and_keeps_the_best() -> None:
    calls: list[str] = []

    def contender(name: str) -> contest.Contender:
        def run(seconds: float) -> float:
            assert seconds == 0.5
            calls.append(name)
            return 10.0 - abs(len(calls) - 5)

        return run

    found = contest.best({"a": contender("a"), "b": contender("b")}, 0.5)
    assert calls == ["a", "b"] * contest.ROUNDS
    assert found == {"a": 10.0, "b": 9.0}


def test_turns_go_round_and_count_what_they_did() -> None:
    calls: list[int] = []
    contender = contest.turns([lambda n=n: calls.append(n) for n in range(3)], 7.0)  # type: ignore
    assert contender(0.0) > 0
    assert calls == [0, 1]
    assert contender(0.0) > 0
    assert calls == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "text, cpus",
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,8\n", {0, 8}), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_cpu_list(text: str, cpus: set[int]) -> None:
    assert contest.cpu_list(text) == cpus


@pytest.mark.parametrize(
    "allowed, order",
    [
        ({0, 1, 2, 3}, [0, 1, 2, 3]),  # 0 and 4 share a core, and so on
        ({0, 1, 4, 5}, [0, 1, 4, 5]),
        ({0, 4, 1}, [0, 1, 4]),
        ({4, 5}, [4, 5]),
    ],
)
def test_threads_go_to_cores_of_their_own_first(allowed: set[int], order: list[int]) -> None:
    assert contest.apart(allowed, lambda cpu: {cpu % 4, cpu % 4 + 4}) == order


def test_pinning_is_undone() -> None:
    before = os.sched_getaffinity(0)
    native.set_threads(2)  # asks for a thread, whose place in Python's registry a reader gets
    native.roof_fma(100_000)
    reader = Reader(4)
    with contest.pinned():
        assert os.sched_getaffinity(0) <= before  # all of it, where earlier tests left more threads
        assert len(working()) == 4
        assert all(os.sched_getaffinity(task) == before for task in working())
    reader.close()
    assert os.sched_getaffinity(0) == before
    for task in os.listdir("/proc/self/task"):
        assert os.sched_getaffinity(int(task)) == before
    native.set_threads(1)


def test_cache_bytes(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [(1, "32K", str(cpu)), (2, "1024K", str(cpu)), (3, "16M", "0-1" if cpu < 2 else "2-3")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert contest.cache_bytes(tmp_path) == 32 * MIB
    assert contest.cache_bytes(tmp_path / "none") == 0


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit, achieved, limit, ratio",
    [
        (BYTES, 5.0, 10.0, 0.5),
        (FLOPS, 5.0, 10.0, 0.5),
        (WEIGHTS, 11.0, 10.0, 1.1),
        (SECONDS, 4.0, 2.0, 0.5),
        (SECONDS, 4.0, 5.0, 1.25),
        (SHARE, 0.9, 1.0, 0.9),
        (SECONDS, 0.0, 1.0, 0.0),
        (BYTES, 1.0, 0.0, 0.0),
    ],
)
def test_ratio(unit: str, achieved: float, limit: float, ratio: float) -> None:
    assert Row("p", "n", unit, achieved, limit, "x").ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (21.5 * GIB, BYTES, "21.50 GiB/s"),
        (180e9, FLOPS, "180 G/s"),
        (9.96e9, WEIGHTS, "10.0 G/s"),
        (0.0123, SECONDS, "12.30 ms"),
        (4.2, SECONDS, "4.20 s"),
        (7200, SECONDS, "2 h 00 min"),
        (0.974, SHARE, "97 %"),
    ],
)
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_rows_text() -> None:
    text = rows_text("disk", [Row("disk", "blocks", BYTES, GIB, 2 * GIB, "reads")])
    assert text == f"disk\n  {'blocks':<40}   1.00 GiB/s   2.00 GiB/s   0.50  reads\n"


# --- kernels -------------------------------------------------------------------------------------


def test_operands_are_healthy_and_cover_the_buffer() -> None:
    config = Target.open(TINY, None).config
    operands = Operands(config, 4 * MIB)
    for fmt in (Format.BF16, Format.PACKED):
        found = operands.matrices(fmt)
        stored = sum(m.rows * native.row_bytes(fmt, m.cols) for m in found)
        assert 0.9 * len(operands.buffer) < stored <= len(operands.buffer)
        x = np.ones((1, config.hidden_size), np.float32)
        y = np.empty((1, found[0].rows), np.float32)
        work = np.empty(native.scratch_floats(config.hidden_size, 1), np.float32)
        for matrix in found:
            native.product(matrix, x, y, work)
            assert np.isfinite(y).all()
    for packed, scales in operands.experts:
        assert packed.shape[1] == 16 * scales.shape[1] and native.scale_nan(scales.ravel()) < 0
    for name in ("read", "delta", "attend"):
        assert getattr(operands, name)()(0.0) > 0
    assert operands.mxfp4(1)(0.0) > 0 and operands.mxfp4(32)(0.0) > 0
    for state in operands.floats(4):
        assert np.isfinite(state).all()


def test_a_buffer_smaller_than_an_expert_still_holds_one() -> None:
    operands = Operands(K3.config, 1 * MIB)
    assert len(operands.experts) >= 1 and operands.matrices(Format.PACKED)
    assert operands.positions >= 1 and len(operands.floats(96, 128, 128)) >= 1


def test_further_columns() -> None:
    kernel = kernel_of(2.0, 2.0 + 31 * 0.5)
    assert kernel.first == 2.0 and kernel.further == pytest.approx(0.5)
    assert kernel_of(2.0, 1.0).further == 0.0


# --- disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [4097], [100, 3_000_000], [4096, 40_000_000]])
def test_files_of_any_size_are_read(tmp_path: Path, sizes: list[int]) -> None:
    paths = []
    for size in sizes:
        paths.append(tmp_path / f"{size}.safetensors")
        paths[-1].write_bytes(bytes(size))
    disk = Disk(model_files(tmp_path, paths, 17_547_264))
    found = measure_disk(disk, 0.01)
    disk.close()
    assert min(found.blocks, found.extents, found.most_blocks, found.most_extents) > 0
    assert [row.part for row in found.rows] == ["disk", "disk"]


def test_a_failed_read_is_told_and_leaves_no_thread(tmp_path: Path) -> None:
    path, before = tmp_path / "a", tasks()
    path.write_bytes(bytes(MIB))
    disk = Disk(Files([path], [path], MIB))
    os.truncate(path, 5000)
    for read in (disk.blocks, disk.most_blocks, disk.extents, disk.most_extents):
        with pytest.raises(KimiError, match="cut short"):
            read(0.05)
    disk.close()
    assert all_ended(before)


# --- the slice -----------------------------------------------------------------------------------


def test_slices_have_both_kinds_of_attention_and_mlp() -> None:
    for kind in slices.SLICES:
        _, config = slices.slice_config(kind)
        kinds = {(config.is_mla(n), config.is_moe(n)) for n in range(config.num_hidden_layers)}
        assert {mla for mla, _ in kinds} == {moe for _, moe in kinds} == {False, True}
    full = slices.slice_config("full")[1]
    assert full.hidden_size == K3.config.hidden_size
    assert 12 * GIB < slices.disk_bytes(full) < 16 * GIB


def test_slice_is_made_and_removed(tmp_path: Path) -> None:
    with slices.made_slice("small", tmp_path) as directory:
        size = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        assert size <= slices.disk_bytes(slices.slice_config("small")[1])
        assert (directory / "kimi-trunk" / "trunk.json").exists()
    assert os.listdir(tmp_path) == []


def test_slice_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), slices.made_slice("small", tmp_path):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_slice_where_none_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UsageError, match="--work-dir"),
        slices.made_slice("small", tmp_path / "none"),
    ):
        pass
    monkeypatch.setattr(slices, "disk_bytes", lambda config: 1 << 60)
    with pytest.raises(KimiError, match="make room"), slices.made_slice("small", tmp_path):
        pass
    monkeypatch.setattr(gauge, "filesystem", lambda path: "tmpfs")
    with pytest.raises(UsageError, match="in memory"), slices.made_slice("small", tmp_path):
        pass
    assert os.listdir(tmp_path) == []


# --- extrapolation -------------------------------------------------------------------------------

KERNELS = Kernels(
    rows=[],
    products={
        "bf16": Kernel(1e-10, 1e-11), "packed": Kernel(1e-10, 1e-11), "mxfp4": Kernel(5e-11, 1e-11)
    },
    read=20e9,
    delta=1e-3,
    attend=1e-6,
)  # fmt: skip


def test_computing_of_the_released_model_adds_up() -> None:
    work = work_of(K3.config, K3.units)
    cores = extrapolate.computing(K3.config, work, KERNELS, 1000, rest=0.05, layers=5)
    seconds = {line.name: line.seconds for line in cores.lines}
    assert seconds["trunk"] == pytest.approx((work.trunk + work.head) * 1e-10)
    assert seconds["experts"] == pytest.approx(92 * 16 * 33_030_144 * 5e-11)
    assert seconds["KDA"] == pytest.approx(69e-3)
    assert seconds["attention"] == pytest.approx(24 * 1000 * 1e-6)
    assert seconds["the rest"] == pytest.approx(93 * 0.01)
    assert cores.seconds == pytest.approx(sum(seconds.values()))
    again = extrapolate.beyond(K3.config, work, KERNELS, cores.seconds)
    assert again == pytest.approx(0.93 + 24 * (1000 - 128) * 1e-6)
    assert extrapolate.beyond(K3.config, work, KERNELS, 0.1) == 0.0


def test_foretold_presets_are_never_faster_than_cores_or_disk() -> None:
    from kimi_cli.bench.disk import Speeds

    work = work_of(K3.config, K3.units)
    cores = extrapolate.computing(K3.config, work, KERNELS, 1024, rest=0.0, layers=0)
    speeds = Speeds(2e9, 1e9, 3e9, 2e9, True)
    presets = preset_table(K3.config, K3.units, Request(1024, 1024, 8, 4), {"interpreter": MIB})
    found = extrapolate.foretell(presets, work, KERNELS, speeds, cores)
    assert [item.name for item in found] == [p.name for p in presets if p.plan is not None]
    plans = {preset.name: preset.plan for preset in presets}
    for item in found:
        plan = plans[item.name]
        assert plan is not None
        disk = plan.trunk_per_token / 2e9 + plan.expert_per_token / 1e9
        assert item.seconds >= max(disk, cores.seconds) * 0.999
    assert found[0].limit == "disk" and found[-1].limit == "compute"
    assert found[-1].seconds == pytest.approx(cores.seconds)
    text = extrapolate.text(cores, found, 1024)
    for word in ("trunk", "experts", "KDA", "attention", "in memory", *PARTS_OF_TEXT):
        assert word in text


PARTS_OF_TEXT = ("1g", "1.5t", "of disk", "of cores")


# --- the command ---------------------------------------------------------------------------------


def finite(value: Any) -> None:
    """No NaN and no infinity anywhere, and nothing negative."""
    if isinstance(value, dict):
        for one in value.values():
            finite(one)
    elif isinstance(value, list):
        for one in value:
            finite(one)
    elif isinstance(value, float):
        assert math.isfinite(value) and value >= 0


def test_whole_run_on_a_small_slice(tmp_path: Path) -> None:
    out, trace, work = tmp_path / "b.json", tmp_path / "t.json", tmp_path / "work"
    work.mkdir()
    done = kimi(
        "bench", "--slice", "small", "--work-dir", work, "--json", out, "--trace-time", trace
    )
    assert os.listdir(work) == []
    text = done.stdout.decode()
    for word in (*PARTS, "packed against bf16", "all in memory", "the released dimensions"):
        assert word in text
    found = json.loads(out.read_text())
    finite(found)
    assert set(found) == {
        "isa", "threads", "parts", "ladder", "released", "buffer_bytes", "cache_bytes"
    }  # fmt: skip
    assert list(found["parts"]) == list(PARTS)
    for rows in found["parts"].values():
        assert rows
        for row in rows:
            assert set(row) == {"name", "unit", "achieved", "limit", "ratio", "against"}
            assert row["achieved"] > 0 and row["limit"] > 0
    check_ladder(found["ladder"])
    released = found["released"]
    assert released["resident_seconds"] == pytest.approx(
        sum(line["seconds"] for line in released["lines"])
    )
    assert {item["limit"] for item in released["presets"]} <= {"disk", "compute"}
    kinds = {e.get("cat") for e in json.loads(trace.read_text())["traceEvents"]}
    assert kinds >= {"token", "layer", "kernel", "read", "check"}


def check_ladder(ladder: list[dict[str, Any]]) -> None:
    budgets = [rung["budget_bytes"] for rung in ladder]
    assert budgets == sorted(set(budgets)) and len(budgets) >= 2
    assert ladder[-1]["resident"] and not ladder[0]["resident"]
    assert ladder[-1]["trunk_bytes"] == 0 and ladder[0]["trunk_bytes"] > 0
    reads = [rung["trunk_bytes"] for rung in ladder]
    assert reads == sorted(reads, reverse=True)
    for rung in ladder:
        whole = rung["computing_seconds"] + rung["waiting_seconds"]
        assert rung["seconds"] == pytest.approx(whole)
        assert rung["disk_seconds"] <= rung["seconds"] * 1.001
        assert rung["compute_limit_seconds"] > 0 and rung["predicted_seconds"] > 0


def test_parts_can_be_chosen_and_a_model_given(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    done = kimi("bench", "disk", "stream", "-m", TINY, "--slice", "small", "--json", out)
    assert b"no model given" not in done.stderr
    found = json.loads(out.read_text())
    assert list(found["parts"]) == ["disk", "stream"] and "released" not in found


def test_disk_without_a_model_reads_a_temporary_file(tmp_path: Path) -> None:
    done = kimi("bench", "disk", "--slice", "small", "--work-dir", tmp_path)
    assert b"trunk blocks in order" in done.stdout
    assert os.listdir(tmp_path) == []


def test_kernels_on_every_instruction_set() -> None:
    for isa in native.supported_isas():
        done = kimi("bench", "kernels", "--slice", "small", "--isa", isa, "--threads", 1)
        assert done.stdout.decode().startswith(f"{isa}, 1 threads\n")
        assert b"multiply-adds" in done.stdout and b"memory reads" in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["kernels", "--plot", "p.png"], "add decode"),
        (["kernels", "--trace-time", "t.json"], "add stream"),
        (["--json", "x", "--plot", "x"], "a file of its own"),
        (["kernels", "--json", "none/x"], "cannot be written"),
        (["kernels", "--json", "."], "is a directory"),
        (["melody"], "melody"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in sentence(kimi("bench", *words, cwd=tmp_path, check=2))
    assert os.listdir(tmp_path) == []


def test_a_budget_that_nothing_fits(tmp_path: Path) -> None:
    done = kimi(
        "bench", "stream", "-m", TINY, "--slice", "small", "--ram", "60M", check=Exit.BUDGET
    )
    assert b"raise --ram" in done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["writing", "measuring"])
def test_interruption_removes_the_slice(
    tmp_path: Path, number: signal.Signals, code: int, moment: str
) -> None:
    process = subprocess.Popen(
        [KIMI, "bench", "decode", "--slice", "small", "--work-dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    if moment == "measuring":
        process.stdout.readline()  # the heading comes once the slice is there
    else:
        deadline = time.monotonic() + 60
        while not any(tmp_path.rglob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert os.listdir(tmp_path) != []
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code and b"Traceback" not in said
    assert os.listdir(tmp_path) == []


# --- the picture ---------------------------------------------------------------------------------


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kimi-k3-cpu\[plot\]'"):
        run_bench(Settings(model=TINY), Wanted(plot=Path("p.png")))


def test_plot_is_not_imported_unless_asked_for() -> None:
    code = "import sys, kimi_cli.bench.command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_plot(tmp_path: Path) -> None:
    from kimi_cli.plan import make_plan

    made = make_plan(K3.config, K3.units, Request(1024, 1, 1, 4), 8 * GIB, {})
    rungs = [
        Rung(
            replace(made, budget=size * GIB),
            size == 16,
            Split(9.0 / size, 6.0 / size, 4.0 / size, 5.0 / size),
            1 << 30,
            1 << 28,
            1.0 / size,
            8.0 / size,
            Limits(),
        )
        for size in (1, 4, 16)
    ]
    path = tmp_path / "p.png"
    plot.draw(rungs, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    with pytest.raises(KimiError, match="cannot be written"):
        plot.draw(rungs, tmp_path / "none" / "p.png")
