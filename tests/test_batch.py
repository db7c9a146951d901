"""Many prompts in one run: each answered as if alone, whatever interrupts, and never twice."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import KIMI, environment, generate, kimi, sentence, smallest_ram
from running import make_model, plan_of, tighten

from kimi_cli import batch, ledger
from kimi_cli.engine import Engine
from kimi_cli.errors import UsageError
from kimi_cli.query import Manner, parse_query, query_id
from kimi_cli.sampler import Sampling

MESSAGES = [{"role": "user", "content": "Yo"}]
MIXED: list[dict[str, Any]] = [
    {"prompt": "Hello", "id": "first"},
    {"messages": MESSAGES, "thinking": "low", "max_tokens": 9},
    {"ids": [1, 2, 3, 4, 5], "temperature": 1, "seed": 7, "id": 3},
    {"prompt": "Once upon a time", "raw": True, "ignore_eos": True},
]
STATS = {"peak_rss_bytes", "prefill_seconds", "decode_seconds", "seconds_per_token"}


def write(path: Path, *queries: object) -> Path:
    lines = [q if isinstance(q, str) else json.dumps(q) for q in queries]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(prompts: Path, out: Path, *more: object) -> Sequence[object]:
    return ("generate", "--prompts", prompts, "--out", out, "-n", 6, *more)


def alone(query: dict[str, Any], directory: Path, *more: object) -> dict[str, Any]:
    """The same prompt in a run of its own."""
    options: list[object] = ["-n", query.get("max_tokens", 6)]
    for key in ("temperature", "seed", "thinking"):
        if key in query:
            options += [f"--{key}", query[key]]
    options += [f"--{key.replace('_', '-')}" for key in ("raw", "ignore_eos") if query.get(key)]
    if "messages" in query:
        file = directory / "messages.json"
        file.write_text(json.dumps(query))
        options += ["--messages", file]
    elif "ids" in query:
        options += ["--ids", ",".join(map(str, query["ids"]))]
    else:
        options.append(query["prompt"])
    return generate(*options, *more)


def same(result: dict[str, Any], single: dict[str, Any]) -> None:
    own = {key: value for key, value in result.items() if key not in ("line", "crc", "id")}
    assert own.keys() == single.keys()
    assert own.pop("stats").keys() == single.pop("stats").keys()
    assert own == single


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", *MIXED)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ram", ["auto", "smallest"])
def test_each_is_answered_as_if_alone(ram: str, prompts: Path, out: Path, tmp_path: Path) -> None:
    if ram == "smallest":
        longest = generate("--messages", write(tmp_path / "m", MESSAGES), "--thinking", "low",
                           "-n", 0)["prompt_ids"]  # fmt: skip
        ids = ",".join(map(str, longest))
        ram = smallest_ram("--ids", ids, "-n", 9)
        ram = f"{int(ram[:-1]) + 2}M"
    done = kimi(*words(prompts, out, "--quiet", "--ram", ram))
    assert (done.stdout, done.stderr) == (b"", b"")
    found = results(out)
    assert [(r["line"], r.get("id")) for r in found] == [(1, "first"), (2, None), (3, 3), (4, None)]
    for query, result in zip(MIXED, found, strict=True):
        stats = result["stats"]
        assert stats["peak_rss_bytes"] <= stats["ram_budget_bytes"]
        same(result, alone(query, tmp_path))


def test_prompts_of_one_pass_and_of_several(tmp_path: Path, out: Path) -> None:
    make_model(tmp_path / "m", tokenizer=True, num_hidden_layers=6)
    queries: list[dict[str, Any]] = [
        {"ids": [5, 6, 7], "max_tokens": n % 4 + 1, "ignore_eos": n % 2 == 0} for n in range(6)
    ]
    queries += [{"ids": list(range(1, 20)), "max_tokens": 40} for _ in range(2)]
    prompts = write(tmp_path / "p", *queries)
    shared = ("-m", tmp_path / "m", "--prefill-chunk", 4)
    kimi(*words(prompts, out, *shared, "--quiet", "--ram", "200M"))
    for query, result in zip(queries, results(out), strict=True):
        same(result, alone(query, tmp_path, *shared))


def test_what_is_told(prompts: Path, out: Path) -> None:
    said = kimi(*words(prompts, out)).stderr.decode().splitlines()
    assert said[1].startswith("held: ") and said[2].startswith("each token reads ")
    assert [line.split(":")[0] for line in said[3:7]] == [f"line {n}" for n in (1, 2, 3, 4)]
    assert said[7] == f"4 of 4 prompts answered: {out}" and len(said) == 8
    said = kimi(*words(prompts, out)).stderr.decode().splitlines()
    assert said[1:] == [f"4 of 4 prompts answered: {out}"]


def test_events_tell_the_line(prompts: Path, out: Path) -> None:
    done = kimi(*words(prompts, out, "--progress", "json"))
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["line"] for e in events if e["event"] == "done"] == [1, 2, 3, 4]
    tokens = [e["id"] for e in events if e["event"] == "token" and e["line"] == 2]
    assert tokens == results(out)[1]["ids"]


def test_counters_are_of_each_prompt(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", {"ids": [1, 2, 3]}, {"ids": [1, 2, 3]})
    kimi(*words(prompts, out, "--quiet"))
    first, second = (result["stats"] for result in results(out))
    assert first["expert_bytes_read"] > 0 and second["expert_bytes_read"] == 0
    assert second["expert_requests"] == first["expert_requests"]


# --- again ---------------------------------------------------------------------------------------


def test_a_second_run_computes_only_what_is_missing(prompts: Path, out: Path) -> None:
    kimi(*words(prompts, out, "--quiet"))
    whole = out.read_bytes()
    before = out.stat().st_mtime_ns
    kimi(*words(prompts, out, "--quiet"))
    assert out.read_bytes() == whole and out.stat().st_mtime_ns == before
    lines = whole.splitlines(keepends=True)
    for cut in (len(whole) - 1, len(whole) - len(lines[-1]) + 3, len(lines[0]) + 1, 1):
        out.write_bytes(whole[:cut])  # a power cut
        kimi(*words(prompts, out, "--quiet"))
        assert kept(out) == kept_of(whole)
        assert out.read_bytes()[:cut].count(b"\n") == whole[:cut].count(b"\n")
    out.write_bytes(b"".join(lines[:2]) + b"\0" * 40)
    kimi(*words(prompts, out, "--quiet"))
    assert kept(out) == kept_of(whole)


def kept_of(data: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in data.splitlines()]
    return [{k: v for k, v in one.items() if k != "stats"} for one in found]


def kept(path: Path) -> list[dict[str, Any]]:
    return kept_of(path.read_bytes())


def test_more_lines_are_added(prompts: Path, out: Path) -> None:
    kimi(*words(prompts, out, "--quiet"))
    first = out.read_bytes()
    write(prompts, *MIXED, {"ids": [9]})
    kimi(*words(prompts, out, "--quiet"))
    assert out.read_bytes().startswith(first) and results(out)[4]["prompt_ids"] == [9]


def test_bad_lines_do_not_stop_the_others(out: Path, tmp_path: Path) -> None:
    bad = ["{", '{"id": "x", "prompt": 3}', "", '{"ids": [2304]}']
    prompts = write(tmp_path / "p", {"ids": [1]}, *bad, {"ids": [2]})
    done = kimi(*words(prompts, out, "--quiet"), check=1)
    said = done.stderr.decode().splitlines()
    assert [line.split(":")[1].split()[-1] for line in said[:3]] == ["2", "3", "5"]
    assert said[3] == f"kimi: 3 of 5 prompts could not be answered: see error in {out}"
    found = results(out)
    assert [(r["line"], "error" in r) for r in found] == [
        (1, False), (2, True), (3, True), (5, True), (6, False)
    ]  # fmt: skip
    assert found[2]["id"] == "x" and found[2]["error"] == "prompt wants a text, found 3"
    good = out.read_bytes().splitlines()[0]
    write(prompts, {"ids": [1]}, {"ids": [3]}, *bad[1:3], {"ids": [4]}, {"ids": [2]})
    done = kimi(*words(prompts, out, "--quiet"), check=1)
    assert b"1 of 5 prompts" in done.stderr
    found = results(out)
    assert [(r["line"], "error" in r) for r in found] == [
        (1, False), (2, False), (3, True), (5, False), (6, False)
    ], "in order, one for each line"  # fmt: skip
    assert out.read_bytes().splitlines()[0] == good


def test_only_bad_lines(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", "{", {"ids": []})
    done = kimi(*words(prompts, out, "--quiet", "--context", 4), check=1)
    assert b"2 of 2 prompts could not be answered" in done.stderr


def test_a_prompt_beyond_the_context_is_its_own_fault(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", {"ids": [1, 2, 3, 4, 5]}, {"ids": [1]})
    kimi(*words(prompts, out, "--quiet", "--context", 4), check=1)
    first, second = results(out)
    assert first["error"] == "the prompt has 5 tokens, more than --context of 4"
    assert len(second["ids"]) == 3 and second["stats"]["context"] == 4


# --- refusals ------------------------------------------------------------------------------------


def test_results_of_other_prompts_are_not_touched(prompts: Path, out: Path) -> None:
    kimi(*words(prompts, out, "--quiet"))
    whole = out.read_bytes()
    write(prompts, *MIXED[:2], {"ids": [9]})
    said = sentence(kimi(*words(prompts, out, "--quiet"), check=2))
    assert f"{out} has an answer to line 3 of {prompts} as it was before" in said
    write(prompts, *MIXED[:2])
    said = sentence(kimi(*words(prompts, out, "--quiet"), check=2))
    assert f"{out} has an answer to line 3, which {prompts} has not" in said
    for other in (b"a letter", b"a letter\n", b'{"a": 1}\n', whole + b"x", b"x\n" + whole):
        out.write_bytes(other)
        said = sentence(kimi(*words(prompts, out, "--quiet"), check=2))
        assert "no result of kimi generate --prompts: give another --out" in said
        assert out.read_bytes() == other


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("Hello",), "PROMPT is for one prompt"),
        (("--ids", "1"), "--ids is for one prompt"),
        (("--session", "s"), "--session is for one prompt"),
        (("--logits", "x.npy"), "--logits is for one prompt"),
        (("--stop", ""), "--stop wants a text"),
        (("--temperature", "-1"), "--temperature wants 0"),
    ],
)
def test_options_for_one_prompt(more: tuple[str, ...], said: str, prompts: Path, out: Path) -> None:
    assert said in sentence(kimi(*words(prompts, out, "--quiet", *more), check=2))
    assert not out.exists()


def test_files_that_cannot_be(prompts: Path, out: Path, tmp_path: Path) -> None:
    run = ("generate", "--quiet")
    assert "give both" in sentence(kimi(*run, "--prompts", prompts, check=2))
    assert "give both" in sentence(kimi(*run, "--out", out, check=2))
    assert "give two files" in sentence(kimi(*words(prompts, prompts), "--quiet", check=2))
    missing = sentence(kimi(*words(tmp_path / "none", out), "--quiet", check=2))
    assert missing == f"{tmp_path}/none: cannot be read: No such file or directory"
    assert not out.exists()
    said = sentence(kimi(*words(prompts, tmp_path / "no" / "out"), "--quiet", check=2))
    assert said == f"{tmp_path}/no/out cannot be written: No such file or directory"
    assert "not a regular file" in sentence(
        kimi(*words(prompts, Path("/dev/null")), "--quiet", check=2)
    )


def test_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prompts nor results are read beyond what could be a line of them."""
    monkeypatch.setattr(batch, "MAX_BYTES", 5000)
    (tmp_path / "p").write_bytes(b'{"ids": [1]}\n' + b" " * 5001)
    with pytest.raises(UsageError, match=r"/p: line 2 is longer than 5,000 bytes, which no conte"):
        list(batch.lines_of(tmp_path / "p"))
    monkeypatch.setattr(ledger, "_LONGEST", 100_000)
    for byte in (b"x", b"{", b"\0"):
        (tmp_path / "o").write_bytes(byte * 300_000)
        with pytest.raises(UsageError, match="is no result of kimi generate"):
            ledger.Ledger(tmp_path / "o")
    long = b'{"line": 1, "crc": "", "x": "%s"}\n' % (b"y" * 70_000)
    for torn in (b"", long[:-1], bytes(70_000)):
        (tmp_path / "o").write_bytes(long + torn)
        with ledger.Ledger(tmp_path / "o") as found:
            assert found.results[1].length == len(long) == (tmp_path / "o").stat().st_size
    even = b'{"line": 2, "crc": "", "x": "%s"}\n'
    even %= b"y" * (ledger._LONG - len(even) + 2)
    (tmp_path / "o").write_bytes(even + long)
    with ledger.Ledger(tmp_path / "o") as found:
        assert found.results[2].length == ledger._LONG and found.results[1].length == len(long)


def test_a_budget_too_small_for_the_longest(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", {"ids": [1]}, {"ids": [1], "max_tokens": 100000})
    said = sentence(kimi(*words(prompts, out, "--quiet", "--ram", "64M"), check=4))
    assert "a context of 100001 tokens needs at least" in said
    assert out.read_bytes() == b""


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_keeps_what_there_is(
    number: int, code: int, out: Path, tmp_path: Path
) -> None:
    long = {"ids": [4], "max_tokens": 100000, "ignore_eos": True, "id": "long"}
    prompts = write(tmp_path / "p", {"ids": [1, 2]}, long, {"ids": [3]})
    process = subprocess.Popen(
        [str(KIMI), *map(str, words(prompts, out, "--progress", "json"))],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    with process, process.stderr as stream:  # type: ignore[union-attr]
        for raw in stream:
            event = json.loads(raw)
            if event["event"] == "token" and event["line"] == 2 and event["number"] == 3:
                process.send_signal(number)
                break
        rest = stream.read()
    assert process.wait(60) == code and b"Traceback" not in rest
    found = results(out)
    assert [r["line"] for r in found] == [1, 2] and len(found[1]["ids"]) >= 3
    assert found[1]["stop_reason"] == "interrupted" and found[1]["id"] == "long"
    again = {**long, "max_tokens": 4}
    write(prompts, {"ids": [1, 2]}, again, {"ids": [3]})
    kimi(*words(prompts, out, "--quiet"))
    ended = results(out)
    assert [(r["line"], r["stop_reason"]) for r in ended if r["line"] == 2] == [(2, "length")]
    assert [r["line"] for r in ended] == [1, 2, 3] and ended[0] == found[0]


@pytest.mark.fault("disk: kill -9 of a batch (JSONL)", "it goes on to the same lines")
def test_killed_at_any_moment(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", *({"ids": [n]} for n in range(1, 60)))
    for _ in range(3):
        size = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen(
            [str(KIMI), *map(str, words(prompts, out, "--quiet"))], env=environment()
        )
        while process.poll() is None and (not out.exists() or out.stat().st_size <= size):
            time.sleep(0.01)
        process.kill()
        process.wait()
    kimi(*words(prompts, out, "--quiet"))
    assert [r["line"] for r in results(out)] == list(range(1, 60))


def test_full_disk_is_a_sentence_and_the_rest_comes_later(out: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p", *({"ids": [n]} for n in range(1, 9)))
    command = shlex.join([str(KIMI), *map(str, words(prompts, out, "--quiet"))])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 2; exec {command}"],
        capture_output=True, timeout=60, env=environment(),
    )  # fmt: skip
    said = done.stderr.decode()
    assert done.returncode == 1 and said.count("\n") == 1, said
    assert re.search(r"out\.jsonl cannot be written: File too large; what it has is kept", said)
    kept = results(out)
    assert 0 < len(kept) < 8
    kimi(*words(prompts, out, "--quiet"))
    assert results(out)[: len(kept)] == kept and len(results(out)) == 8


@pytest.mark.fault("disk: two batches to one file", "the second is refused, exit code 1")
def test_two_at_once(prompts: Path, out: Path) -> None:
    import fcntl

    with out.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = sentence(kimi(*words(prompts, out, "--quiet"), check=1))
    assert said == f"{out} is in use by another process"


# --- a line --------------------------------------------------------------------------------------

MANNER = Manner(7, Sampling(temperature=0.5, top_k=3), ("a",), True, False, "be brief", "low")


def test_a_line_takes_the_place_of_options() -> None:
    plain = parse_query(b'{"prompt": "x"}', MANNER)
    assert (plain.max_tokens, plain.stop, plain.ignore_eos) == (7, ("a",), True)
    assert plain.sampling == MANNER.sampling
    assert (plain.given.text, plain.given.system, plain.given.thinking) == ("x", "be brief", "low")
    own = parse_query(
        b'{"prompt": "x", "max_tokens": 2, "temperature": 1, "top_k": 0, "top_p": 0.5, "seed": 1,'
        b'"min_p": 0.1, "stop": ["b", "c"], "ignore_eos": false, "thinking": "off", "system": "s"}',
        MANNER,
    )
    assert own.sampling == Sampling(1, 0.5, 0, 0.1, 1)
    assert (own.max_tokens, own.stop, own.ignore_eos) == (2, ("b", "c"), False)
    assert (own.given.system, own.given.thinking) == ("s", "off")
    raw = parse_query(b'{"prompt": "x", "raw": true}', MANNER)
    assert raw.given.raw and raw.given.system is None
    assert parse_query(b'{"ids": [1, 2]}', MANNER).given.ids == "1,2"
    assert parse_query(b'{"prompt": "x", "stop": "z"}', MANNER).stop == ("z",)
    talk = parse_query(b'{"messages": [], "tools": []}', MANNER).given
    assert talk.chat and talk.conversation == {"messages": [], "tools": []}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "not JSON at character 0"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"[]", "wanted an object, found []"),
        (b"{}", "one of prompt, messages and ids is wanted, found none"),
        (b'{"prompt": "x", "ids": [1]}', "is wanted, found prompt and ids"),
        (b'{"prompt": "x", "prompt": "y"}', 'giving the key "prompt" twice'),
        (b'{"prompt": "x", "max_token": 1}', 'the key "max_token" is not known'),
        (b'{"prompt": null}', "prompt wants a text, found null"),
        (b'{"prompt": "x", "tools": []}', "tools belong to messages"),
        (b'{"prompt": "x", "id": []}', "id wants a text or a number, found []"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens wants a whole number, found true"),
        (b'{"prompt": "x", "max_tokens": -1}', "max_tokens wants 0 or more, not -1"),
        (b'{"prompt": "x", "temperature": "1"}', "temperature wants a number"),
        (b'{"prompt": "x", "top_p": 2}', "--top-p wants more than 0"),
        (
            b'{"prompt": "x", "top_p": 1%s}' % (b"0" * 400),
            "top_p wants a number, found a number of",
        ),
        (b'{"prompt": "x", "stop": [""]}', "stop wants a text or a list of texts"),
        (b'{"prompt": "x", "thinking": "much"}', "thinking wants one of off, low"),
        (b'{"prompt": "x", "raw": 1}', "raw wants true or false, found 1"),
        (b'{"ids": "1,2"}', 'ids want a list of whole numbers, found "1,2"'),
        (b'{"ids": [true]}', "ids want a list of whole numbers"),
        (b'{"ids": []}', "ids want at least one"),
        (b'{"ids": [1], "system": "s"}', "--system belongs to the chat format"),
        (b'{"messages": [], "raw": true}', "cannot be combined with --messages"),
        (b'{"prompt": "x", "seed": 1e400}', "seed wants a whole number, found inf"),
    ],
)
def test_bad_line(line: bytes, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_query(line, Manner(1, Sampling()))
    assert said in str(error.value)


def test_id() -> None:
    assert query_id(b'{"id": "a"}') == "a" and query_id(b'{"id": 2.5}') == 2.5
    for line in (b"{", b"[]", b"{}", b'{"id": true}', b'{"id": null}', b'{"id": {}}'):
        assert query_id(line) is None


# --- the engine, again ---------------------------------------------------------------------------


def test_engine_is_reset_with_reads_under_way(tmp_path: Path) -> None:
    """A streamed trunk has been read ahead for a token that is not asked for, and what comes next
    is another walk: one without lm_head."""
    source = make_model(tmp_path)
    plan = tighten(0.3)(plan_of(source, chunk=2, all_logits=False), source)
    with Engine(source, plan) as engine:
        engine.load()
        read, logits = [], []
        for _ in range(3):
            engine.reset()
            (row,) = engine.prefill([1, 2, 3, 4, 5], False, True)
            logits.append(row.copy())
            logits.append(engine.step(7, True).copy())
            read.append(engine.weights.bytes_read)
    assert read[0] == read[1] == read[2] > 0
    assert all(np.array_equal(row, logits[n % 2]) for n, row in enumerate(logits))
