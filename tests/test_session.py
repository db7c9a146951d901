"""Sessions: what was stopped goes on to the same bytes, and a new turn reads nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import generate, kimi, linked_model, replace_file, sentence
from sessions import CONFIG, Fed, Run, files, history_of, same

from kimi_cli.builtin import PSALM
from kimi_cli.errors import UsageError
from kimi_cli.native import supported_isas
from kimi_cli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(PSALM)

# --- the same bytes ------------------------------------------------------------------------------


def test_a_session_changes_nothing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s"
    same(run("hi", "-n", 5, "--session", path, "--save-every", 2), run("hi", "-n", 5))
    assert files(path) == ["s", "s.ids"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", "1", "--seed", "7", "--top-p", "0.9"],
        ["--thinking", "low", "--system", "be"],
        ["--raw"],
    ],
)
def test_an_answer_goes_on_to_the_same_bytes(
    run: Run, fed: Fed, tmp_path: Path, options: list[str]
) -> None:
    path, logits = tmp_path / "s", tmp_path / "l.npy"
    wanted = run("hello", "-n", 12, "--logits", logits, *options)
    rows = np.load(logits)
    kept = ("--session", path, "--save-every", 3)
    for count in (0, 1, 5, 6, 12):
        before = len(history_of(path).turns[0].ids) if count else 0
        found = run("hello", "-n", count, "--logits", logits, *options, *kept)
        assert found["ids"] == wanted["ids"][:count]
        assert found["stats"]["resumed_tokens"] == before
        assert np.array_equal(np.load(logits), rows[before:count])
        assert sum(n for _, n in fed) <= (len(wanted["prompt_ids"]) - 1 if not count else 7)
    same(found, wanted)
    same(run("hello", "-n", 12, *options, *kept), wanted)
    assert fed == []


def test_any_budget_threads_instruction_set_and_chunk(tmp_path: Path) -> None:
    path, logits = tmp_path / "s", tmp_path / "l.npy"
    wanted = generate("hello there", "-n", 12, "--logits", logits)
    rows = np.load(logits)
    ways = [["--ram", "80M", "--threads", 1], ["--threads", 2, "--prefill-chunk", 3],
            *(["--isa", isa, "--context", 300] for isa in supported_isas())]  # fmt: skip
    before = 0
    for count, way in zip((3, 6, 8, 10, 12), [*ways, *ways], strict=False):
        found = generate("hello there", "-n", count, *way, "--session", path, "--logits", logits)
        assert np.array_equal(np.load(logits), rows[before:count])
        before = count
    while before < 12:
        before, found = 12, generate("hello there", "-n", 12, "--session", path)
    same(found, wanted)


def test_a_seed_that_nobody_gave_is_kept(run: Run, tmp_path: Path) -> None:
    hot = ("--temperature", 2)
    first = run("hi", "-n", 4, *hot, "--session", tmp_path / "s")
    seed = first["stats"]["seed"]
    whole = run("hi", "-n", 12, *hot, "--session", tmp_path / "s")
    assert whole["stats"]["seed"] == seed
    same(whole, run("hi", "-n", 12, *hot, "--seed", seed))


def test_what_is_finished_is_printed_again(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    text = run("hi", "-n", 12)["text"]
    stop = text[3:5]
    wanted = run("hi", "-n", 30, "--stop", stop)
    assert wanted["stop_reason"] == "stop"
    same(run("hi", "-n", 30, "--stop", stop, "--session", path), wanted)
    logits = tmp_path / "l.npy"
    for more in (["-n", 90], ["-n", 3], ["--stop", "q"], ["--logits", logits]):
        same(run("hi", *more, "--session", path), wanted)
        assert fed == []
    assert np.load(logits).shape == (0, CONFIG.vocab_size)
    done = kimi("generate", "hi", "--quiet", "--session", path)
    assert done.stdout.decode() == wanted["text"] + "\n"
    run("yo", "-n", 2, "--session", path, "--stop", "zzz")
    with pytest.raises(UsageError, match="other --stop texts"):
        run("yo", "-n", 3, "--session", path, "--stop", "yyy")


def test_an_end_token_finishes(run: Run, fed: Fed, tmp_path: Path) -> None:
    ids = run("--ids", "3,4,5", "-n", 6, "--ignore-eos")["ids"]
    model = linked_model(tmp_path / "model", source=PSALM)
    config = json.loads((PSALM / "config.json").read_text())
    config["eos_token_id"] = ids[3]
    replace_file(model / "config.json", json.dumps(config).encode())
    path = tmp_path / "s"
    asked = ("-m", model, "--ids", "3,4,5", "--session", path)
    found = run(*asked)
    assert (found["ids"], found["stop_reason"]) == (ids[: ids.index(ids[3]) + 1], "eos")
    same(run(*asked, "-n", 50, "--ignore-eos"), found)
    assert fed == []


# --- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--thinking", "high"]])
def test_a_new_turn_reads_nothing_twice(
    run: Run, fed: Fed, tmp_path: Path, options: list[str]
) -> None:
    path = tmp_path / "s"
    kept = ("--session", path, "--save-every", 1)
    first = run("hi", "-n", 5, *options, *kept)
    old = len(first["prompt_ids"]) + 5
    second = run("and then?", "-n", 5, *kept)
    assert fed[0][0] == old - 1  # all but the last id, which nobody had fed
    assert fed.prefill == len(second["prompt_ids"]) - old + 1
    assert second["prompt_ids"][:old] == [*first["prompt_ids"], *first["ids"]]
    text = TOKENIZER.decode_bytes(second["prompt_ids"][old:]).decode()
    assert text.endswith("<|sep|>") and "and then?" in text and ">hi<" not in text
    commas = ",".join(map(str, second["prompt_ids"]))
    assert run("--ids", commas, "-n", 5)["ids"] == second["ids"]
    assert second["stats"]["resumed_tokens"] == 0
    same(run("and then?", "-n", 5, *kept), second)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "and then?"}]  # fmt: skip
    conversation = tmp_path / "m.json"
    conversation.write_text(json.dumps(said))
    same(run("--messages", conversation, "-n", 5, *kept), second)
    said += [{"role": "assistant", "content": second["text"]}, {"role": "user", "content": "so"}]
    conversation.write_text(json.dumps(said))
    run("--messages", conversation, "-n", 2, *kept)
    assert fed[0][0] == len(second["prompt_ids"]) + 4
    assert len(history_of(path).turns) == 3
    said[2]["content"] = "and now?"
    conversation.write_text(json.dumps(said))
    with pytest.raises(UsageError, match=r"messages\[2\] parts from the session at character 4"):
        run("--messages", conversation, "-n", 2, *kept)


def test_a_raw_text_is_appended_to(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = run("one", "--raw", "-n", 3, "--session", path, "--save-every", 9)
    second = run("two", "--raw", "-n", 3, "--session", path)
    assert second["prompt_ids"] == [
        *first["prompt_ids"], *first["ids"], *TOKENIZER.encode("two")
    ]  # fmt: skip
    assert fed.prefill == len(TOKENIZER.encode("two")) + 1
    third = run("--ids", "9,8", "-n", 3, "--session", path)
    commas = ",".join(map(str, third["prompt_ids"]))
    assert run("--ids", commas, "-n", 3)["ids"] == third["ids"]


def test_a_prompt_can_be_read_ahead(run: Run, fed: Fed, tmp_path: Path) -> None:
    path = tmp_path / "s"
    wanted = run("hi", "-n", 4)
    assert run("hi", "-n", 0, "--session", path, "--save-every", 1)["ids"] == []
    same(run("hi", "-n", 4, "--session", path), wanted)
    assert fed.prefill == 1
    run("--ids", "5", "-n", 0, "--session", tmp_path / "t", "--save-every", 1)
    assert fed == []
    assert (
        run("--ids", "5", "-n", 3, "--session", tmp_path / "t")["ids"]
        == (run("--ids", "5", "-n", 3)["ids"])
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["hi", "--thinking", "low"], "was begun with --thinking off, found low"),
        (["hi", "--system", "be"], "begun with none as its --system, found 'be'"),
        (["hi", "--raw"], "a conversation, which --raw and --ids cannot continue"),
        (["--ids", "1"], "a conversation, which --raw and --ids cannot continue"),
        (["hi", "-n", "9", "--all-logits", "x.npy"], "--all-logits needs a new session"),
        (["hi", "-n", "9", "--context", "20"], "more than --context of 20"),
        (["yo", "-n", "9", "--context", "50"], "more than --context of 50"),
    ],
)
def test_what_a_session_cannot_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run("hi", "-n", 3, "--session", "s")
    before = {name: Path(name).read_bytes() for name in ("s", "s.ids")}
    with pytest.raises(UsageError) as caught:
        run(*options, "--session", "s")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert {name: Path(name).read_bytes() for name in before} == before
    assert files(Path("s")) == ["s", "s.ids"]


def test_too_small_a_budget_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = sentence(kimi("generate", "hi", "--quiet", "--session", path, "--ram", "20M", check=4))
    assert "use --ram" in said and files(path) == []
    generate("hi", "-n", 3, "--session", path)
    raw = (tmp_path / "s.ids").read_bytes()
    kimi("generate", "yo", "--quiet", "--session", path, "--ram", "20M", check=4)
    assert (tmp_path / "s.ids").read_bytes() == raw


def test_save_every_needs_a_session() -> None:
    assert "--session" in sentence(kimi("generate", "hi", "--save-every", 2, "--quiet", check=2))
