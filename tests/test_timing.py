"""Spans nest, sums of them are right, and the trace is one that Chrome's readers take."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_cli.errors import KimiError
from kimi_cli.timing import (
    CHECK,
    KERNEL,
    LAYER,
    READ,
    TOKEN,
    WAIT,
    Span,
    TraceFile,
    covered,
    no_span,
    recorder,
    split,
)

SECOND = 1_000_000_000


def spans_of(*given: tuple[str, str, float, float]) -> list[Span]:
    """(kind, thread, begin, end in seconds) as spans."""
    return [Span(k, "x", t, int(b * SECOND), int(e * SECOND)) for k, t, b, e in given]


@pytest.mark.parametrize(
    "intervals, begin, end, want",
    [
        ([], 0, 10, 0),
        ([(2, 4)], 0, 10, 2),
        ([(2, 4), (3, 6)], 0, 10, 4),
        ([(3, 6), (2, 4), (2, 3)], 0, 10, 4),
        ([(2, 9), (3, 4)], 0, 10, 7),
        ([(-5, 2), (8, 20)], 0, 10, 4),
        ([(-5, 20)], 0, 10, 10),
        ([(11, 12), (-3, -1)], 0, 10, 0),
        ([(5, 5)], 0, 10, 0),
    ],
)
def test_covered(intervals: list[tuple[int, int]], begin: int, end: int, want: int) -> None:
    assert covered(intervals, begin, end) == want


@pytest.mark.parametrize(
    "given, disk, waiting",
    [
        ([], 0, 0),
        ([(READ, "a", 1, 3)], 2, 0),
        ([(READ, "a", 1, 3), (READ, "b", 2, 4)], 3, 0),
        # the checksum inside a read is no reading, unless another thread reads meanwhile
        ([(CHECK, "a", 2, 3), (READ, "a", 1, 3)], 1, 0),
        ([(CHECK, "a", 2, 3), (READ, "a", 1, 3), (READ, "b", 2.5, 4)], 2.5, 0),
        ([(CHECK, "a", 2, 3), (READ, "a", 1, 4)], 2, 0),
        # a check of another thread's takes nothing away
        ([(CHECK, "b", 2, 3), (READ, "a", 1, 4)], 3, 0),
        ([(WAIT, "main", 4, 6), (KERNEL, "main", 6, 7), (TOKEN, "main", 0, 10)], 0, 2),
        # what began before or ends after counts as far as it lies inside
        ([(READ, "a", -3, 1), (WAIT, "main", 9, 12)], 1, 1),
    ],
)
def test_split(given: list[tuple[str, str, float, float]], disk: float, waiting: float) -> None:
    found = split(spans_of(*given), 0, 10 * SECOND)
    assert found.total == 10
    assert found.disk == pytest.approx(disk) and found.waiting == pytest.approx(waiting)
    assert found.computing == pytest.approx(10 - waiting)


def test_nobody_listening_costs_no_object() -> None:
    assert no_span(KERNEL, "a") is no_span(READ, "b")
    with no_span(KERNEL, "a"), no_span(KERNEL, "b"):
        pass


def test_recorder_tells_thread_kind_and_times_even_of_a_failure() -> None:
    found: list[Span] = []
    spans = recorder(found.append)
    with pytest.raises(RuntimeError), spans(LAYER, "outer"), spans(KERNEL, "inner"):
        raise RuntimeError
    inner, outer = found
    assert (inner.name, inner.kind, inner.thread) == ("inner", KERNEL, "MainThread")
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def load(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    events: list[dict[str, Any]] = data["traceEvents"]
    for event in events:
        assert event["ph"] in "XM" and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str)
    return events


def test_trace_file_of_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path) as trace:
        spans = recorder(trace.add)

        def work() -> None:
            for n in range(200):
                with spans(READ, f'a "quoted" \\ name \u00e9 {n}'):
                    pass

        threads = [threading.Thread(target=work, name=f"t{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not path.exists()
    events = load(path)
    assert sum(event["ph"] == "X" for event in events) == 800
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {"t0", "t1", "t2", "t3"}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_trace_file_is_whole_after_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(KeyboardInterrupt), TraceFile(path) as trace:
        with recorder(trace.add)(KERNEL, "k"):
            pass
        raise KeyboardInterrupt
    assert [e["name"] for e in load(path) if e["ph"] == "X"] == ["k"]
    trace.add(Span(READ, "late", "t", 0, 1))  # a reader that ends last
    assert len(load(path)) == 3


def test_trace_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(KimiError, match="cannot be written: No such file"):
        TraceFile(tmp_path / "none" / "trace.json")
    with (
        pytest.raises(KimiError, match="cannot be written: Is a directory"),
        TraceFile(tmp_path / "dir") as trace,
    ):
        (tmp_path / "dir").mkdir()
        trace.add(Span(READ, "a", "t", 0, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["dir"]


def test_generate_traces_reads_and_kernels_of_every_token(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = ["--raw", "--ids", "1,2,3", "-n", "3", "--ignore-eos", "--quiet"]
    plain = kimi("generate", *words).stdout
    traced = kimi("generate", *words, "--trace-time", path).stdout
    assert traced == plain
    events = [event for event in load(path) if event["ph"] == "X"]
    kinds = {event["cat"] for event in events}
    assert kinds >= {TOKEN, LAYER, KERNEL, READ, CHECK}
    tokens = [event for event in events if event["cat"] == TOKEN]
    assert [event["name"] for event in tokens] == ["3 tokens at 0", "token 3", "token 4"]
    for token in tokens:
        inside = [e for e in events if e["cat"] == KERNEL and within(e, token)]
        names = {name for event in inside for name in event["name"].split()}
        assert names >= {"lm_head", "self_attn.q_proj", "self_attn.q_b_proj", "delta", "attend"}
        assert "expert" in names
        layers = [e for e in events if e["name"] == "layer 3" and within(e, token)]
        assert len(layers) == 1
    assert any(e["cat"] == READ and e["name"].startswith("expert ") for e in events)
    assert any(e["cat"] == READ and e["name"].endswith("lm_head.weight") for e in events)
    nested(events)


def within(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    begin, end = outer["ts"], outer["ts"] + outer["dur"]
    same: bool = event["tid"] == outer["tid"]
    return same and begin - 1e-3 <= event["ts"] and event["ts"] + event["dur"] <= end + 1e-3


def nested(events: list[dict[str, Any]]) -> None:
    """Spans of one thread lie within one another or apart."""
    for thread in {event["tid"] for event in events}:
        mine = [event for event in events if event["tid"] == thread]
        mine.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_ones: list[dict[str, Any]] = []
        for event in mine:
            while open_ones and event["ts"] >= open_ones[-1]["ts"] + open_ones[-1]["dur"] - 1e-3:
                open_ones.pop()
            if open_ones:
                assert within(event, open_ones[-1]), (event, open_ones[-1])
            open_ones.append(event)


def test_trace_beside_another_output_wants_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x"
    words = ["--raw", "--ids", "1", "-n", "1"]
    kimi("generate", *words, "--logits", path, "--trace-time", path, check=2)
    kimi("generate", *words, "--trace-time", tmp_path / "none" / "x", check=2)
