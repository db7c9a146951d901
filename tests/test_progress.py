"""What is told of a run under way: on a terminal, in a log, to a program; and Ctrl-C between."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from command import generate, kimi
from running import make_model, plan_of, tighten
from terminal import COLUMNS, Screen, Session

from kimi_cli import console
from kimi_cli import screen as drawing
from kimi_cli.expect import expect, forecast
from kimi_cli.halt import Halt
from kimi_cli.pace import LOAD, PREFILL, TOKEN, Expected, Moment, Pace
from kimi_cli.watch import Lines, Silent, Terminal, moment_text, watching

PROMPT = ("generate", "--ids", "1,2,3", "--ignore-eos")
SUMMARY = re.compile(r"\d+ tokens read in .* s; (\d+) generated at .* each; peak .*")


def flat(session: Session) -> str:
    return "".join(session.screen.lines)


# --- a terminal ----------------------------------------------------------------------------------


def test_progress_is_redrawn_in_place_and_ends_in_one_line() -> None:
    read, write = os.pipe()
    with Session(0.05, *PROMPT, "-n", 4, "--json", out=write) as session:
        os.close(write)
        session.until(lambda: "prompt: " in session.raw)
        session.until(lambda: "token 2 of 4, layer" in session.raw)
        shown = session.screen.lines
        assert sum("layer" in line for line in shown) <= 1
        assert session.finish() == 0
        assert session.before == session.after
    with os.fdopen(read, "rb") as product:
        assert len(json.load(product)["ids"]) == 4
    assert session.raw.count("layer ") > 10, "drawn many times"
    end = session.screen.lines
    assert not any("layer" in line for line in end)
    assert SUMMARY.search("".join(end))
    assert session.raw.rstrip().splitlines()[-1].endswith("in memory)")


def test_text_and_progress_share_a_terminal() -> None:
    """The text is what it is without progress, whatever is drawn below it meanwhile."""
    words = ("generate", "Hello", "--raw", "--ignore-eos", "-n", 8)
    text = kimi(*words, "--quiet").stdout.decode()
    with Session(0.05, *words) as session:
        session.until(lambda: "token 4 of 8" in session.raw)
        assert session.finish() == 0
    plain = Screen()
    for line in session.raw.split("\r\n")[:3]:
        plain.write(line + "\r\n")
    plain.write(console.visible(text).replace("\n", "\r\n"))
    last = session.screen.lines
    assert last[: len(plain.lines)] == plain.lines
    assert SUMMARY.fullmatch("".join(last[len(plain.lines) :]))
    assert not session.screen.hidden


def test_short_waits_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def drawn(shared: bool, seconds: float) -> bool:
        nonlocal now
        read, write = os.pipe()
        terminal = Terminal(write, shared)
        for _ in range(20):
            now += seconds
            terminal.moment(Moment(TOKEN, 3, 9, 5, 14, 0, seconds, 3.0, 60.0))
        os.close(write)
        with os.fdopen(read, "rb") as seen:
            return bool(seen.read())

    assert not drawn(True, 0.4) and drawn(True, 0.6)
    assert drawn(False, 0.4), "nothing is in its way"
    assert not drawn(False, 0.01), "too soon"


def test_quiet_on_a_terminal() -> None:
    with Session(0.05, *PROMPT, "-n", 2, "--quiet") as session:
        assert session.finish() == 0
    assert re.fullmatch(r"\d+,\d+\r\n|[^\x1b\n]*\r\n", session.raw), session.raw


def test_interrupted_terminal_is_sane() -> None:
    with Session(0.2, *PROMPT, "-n", 9) as session:
        session.until(lambda: "token 3 of 9, layer" in session.raw)
        session.type("\x03")
        session.until(
            lambda: "stopping after this layer; Ctrl-C again stops at once" in session.raw
        )
        assert session.finish() == 130
        assert session.before == session.after, "echo and all other modes are as before"
    end = session.screen.lines
    assert not session.screen.hidden
    assert not any("layer" in line for line in end)
    found = SUMMARY.search("".join(end))
    assert found and found[1] == "2"


def test_second_interruption_does_not_wait() -> None:
    with Session(30.0, *PROMPT, "-n", 9) as session:
        session.until(lambda: "3 tokens take 1 pass" in session.raw)
        session.type("\x03")
        session.until(lambda: "stopping after this layer" in session.raw)
        session.type("\x03")
        assert session.finish() == 130, "long before the layer ends"


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_termination_does_not_wait(mode: str) -> None:
    with Session(30.0, *PROMPT, "-n", 9, "--progress", mode) as session:
        session.until(lambda: "3 tokens take 1 pass" in session.raw)
        session.process.send_signal(signal.SIGTERM)
        assert session.finish() == 143


def test_none_tells_only_what_does_not_move() -> None:
    with Session(0.05, *PROMPT, "-n", 2, "--progress", "none") as session:
        assert session.finish() == 0
    assert "layer" not in session.raw and SUMMARY.search(flat(session))


@pytest.mark.parametrize("length", [1, 99, 100, 101, 250])
@pytest.mark.parametrize("rows_before", [0, 20])
def test_a_line_below_text_of_any_length(length: int, rows_before: int) -> None:
    """Also at the right edge and at the bottom of the screen."""
    read, write = os.pipe()
    line, shown, plain = drawing.Screen(write), Screen(drawing.WIDTH), Screen(drawing.WIDTH)

    def pump() -> None:
        os.write(write, b"\0")
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(read, 1 << 16)
        shown.write(data[:-1].decode())

    def text(piece: str) -> None:
        line.clear()
        pump()
        shown.write(piece)
        plain.write(piece)
        line.passed(piece)

    text("\n" * rows_before)
    for n in range(length):
        line.draw(f"waiting {n}" + "." * 200)
        pump()
        assert len([row for row in shown.lines if row.startswith("waiting")]) == 1
        text(chr(ord("a") + n % 26))
    line.draw("last")
    line.clear()
    pump()
    assert shown.lines == plain.lines
    os.close(read)
    os.close(write)


# --- not a terminal ------------------------------------------------------------------------------


def test_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch,
                                 capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = Lines()
    for second in range(100):
        now = float(second)
        lines.moment(Moment(TOKEN, 3, 9, 5, 14, 1 << 30, 2.0, 3.0, 60.0))
    said = capfd.readouterr().err.splitlines()
    assert said == ["token 3 of 9, layer 5 of 14, 3.00 s left, 1 min 00 s for all, 1.00 GiB at "
                    "512 MiB/s"] * 3  # fmt: skip


def test_plan_comes_before_the_first_token() -> None:
    done = kimi(*PROMPT, "-n", 2)
    lines = done.stderr.decode().splitlines()
    assert re.fullmatch(r"held: .* of .* of trunk, 192 of 192 experts; .* of .* in all", lines[1])
    assert re.fullmatch(
        r"each token reads 0 B of trunk and about 0 B of experts; the prompt's 3 tokens take 1 "
        r"pass", lines[2],
    )  # fmt: skip
    assert SUMMARY.fullmatch(lines[3]) and len(lines) == 4, "too quick for a forecast"


def test_a_long_run_is_foretold() -> None:
    with Session(0.05, *PROMPT, "-n", 100000) as session:
        session.until(lambda: "layer" in session.raw)
        session.type("\x03")
        assert session.finish() == 130
    assert re.search(
        r"expected: .* s for the prompt, .* s a token, .* for all 100000 \(an estimate; limited by "
        r"the processor\)", session.raw,
    )  # fmt: skip


# --- a program -----------------------------------------------------------------------------------


def events(*words: object, **options: Any) -> list[dict[str, Any]]:
    done = kimi(*PROMPT, *words, "--progress", "json", **options)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_events() -> None:
    found = events("-n", 3, "--prefill-chunk", 2)
    names = [event["event"] for event in found]
    assert names[0] == "plan" and names[-1] == "done"
    assert names.count("token") == 3 and names.count("prefill") >= 2
    plan, done = found[0], found[-1]
    assert plan["prompt_tokens"] == 3 and plan["max_tokens"] == 3 and plan["chunk"] == 2
    ids = generate("--ids", "1,2,3", "--ignore-eos", "-n", 3)["ids"]
    tokens = [event for event in found if event["event"] == "token"]
    assert [event["id"] for event in tokens] == ids
    assert [event["number"] for event in tokens] == [1, 2, 3]
    assert tokens[-1]["total_seconds_left"] == 0
    prefill = [event for event in found if event["event"] == "prefill"]
    assert (prefill[-1]["done"], prefill[-1]["total"]) == (3, 3)
    load = [event for event in found if event["event"] == "load"]
    assert load[-1]["done"] == load[-1]["total"] > 0
    assert done["stop_reason"] == "length"
    read = done["stats"]["trunk_bytes_read"] + done["stats"]["expert_bytes_read"]
    assert prefill[-1]["bytes"] + sum(event["bytes"] for event in tokens[1:]) == read


def test_quiet_has_no_events() -> None:
    assert events("-n", 2, "--quiet") == []


def test_a_failure_ends_events_with_a_sentence(tmp_path: Path) -> None:
    done = kimi(*PROMPT, "-m", tmp_path, "--progress", "json", check=3)
    assert done.stderr.startswith(b"kimi: ")


# --- the arithmetic ------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.bytes = 0

    def pace(self, prompt: int, chunk: int, max_tokens: int, resumed: int = 0) -> Pace:
        return Pace(prompt, chunk, resumed, max_tokens, lambda: self.bytes, lambda: self.now)

    def tick(self, seconds: float, count: int = 0) -> None:
        self.now += seconds
        self.bytes += count


def test_pace_of_a_prompt_and_its_answer() -> None:
    clock = Clock()
    pace = clock.pace(8, 4, 3)
    pace.expected = Expected(100.0, 7.0, "disk", False)
    for layer in range(1, 11):
        clock.tick(1.0, 100)
        moment = pace.layer(layer, 10)
        assert (moment.phase, moment.total, moment.bytes) == (PREFILL, 8, 100 * layer)
        left = 100.0 - layer if layer < 3 else 20.0 - layer
        assert moment.left == pytest.approx(left)
        assert moment.run_left == pytest.approx(left + 14.0)
    assert moment.done == 4
    for layer in range(1, 12):
        clock.tick(1.0)
        moment = pace.layer(layer, 11)
    assert (moment.done, moment.left, moment.rate) == (8, 0.0, pytest.approx(1000 / 21))
    for token in (2, 3):
        for layer in range(1, 12):
            clock.tick(2.0, 11)
            moment = pace.layer(layer, 11)
            assert (moment.phase, moment.done, moment.total) == (TOKEN, token, 3)
            assert moment.rate == pytest.approx(5.5)
            if layer >= 3 or token == 3:
                assert moment.left == pytest.approx(22.0 - 2 * layer)
    assert moment.run_left == 0.0 and pace.token_seconds() == 22.0


def test_pace_without_a_forecast() -> None:
    clock = Clock()
    pace = clock.pace(1, 256, 5, resumed=2)
    clock.tick(1.0)
    assert pace.layer(1, 4).left is None
    for layer in (2, 3, 4):
        clock.tick(1.0)
        moment = pace.layer(layer, 4)
    assert (moment.left, moment.run_left) == (0.0, None)
    clock.tick(1.0)
    moment = pace.layer(1, 4)
    assert (moment.done, moment.left, moment.run_left) == (4, 3.0, 7.0)
    assert pace.load(0, 8).left is None
    assert pace.load(2, 8).phase == LOAD


def test_forecast_is_measured_where_a_run_is_long(tmp_path: Path) -> None:
    source = make_model(tmp_path)
    plan = tighten()(plan_of(source), source)
    short, long = (forecast(source, plan, 10, tokens) for tokens in (10, 10**6))
    assert short.guess and not long.guess
    assert min(long.rates.blocks, long.rates.trunk.first, long.rates.expert.first) > 0
    known = forecast(source, plan, 10, 10, disk=1e8)
    assert known.guess and known.rates.blocks == 1e8
    slow = expect(source, plan, known, 10)
    assert slow.token_seconds > expect(source, plan, short, 10).token_seconds
    assert slow.limit == "disk" and slow.total(0) == slow.total(1) == slow.prompt_seconds
    assert expect(source, plan, short, 0).prompt_seconds == 0.0


def test_moments_in_words() -> None:
    load = Moment(LOAD, 1 << 20, 1 << 21, 0, 0, 1 << 20, 2.0, 2.0, None)
    assert moment_text(load) == "load: 1.00 MiB of 2.00 MiB, 2.00 s left, 1.00 MiB at 512 KiB/s"
    prefill = Moment(PREFILL, 4, 8, 2, 14, 0, 2.0, None, None)
    assert moment_text(prefill) == "prompt: 4 of 8 tokens, layer 2 of 14"
    assert len(moment_text(prefill)) < COLUMNS


def test_silent_twin() -> None:
    silent = watching("auto", True, True)
    assert type(silent) is Silent and silent.silent
    assert not watching("json", False, True).silent


def test_halt() -> None:
    said: list[int] = []
    with Halt(lambda: said.append(1)) as halt:
        halt.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert halt.asked and said == [1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            halt.check()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Halt(lambda: said.append(2)) as halt:
            os.kill(os.getpid(), signal.SIGINT)
        assert not halt.asked and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
