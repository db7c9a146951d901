"""`kimi score`: against the logits of the prompt, and the same however the work is done."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import generate, kimi, linked_model, sentence
from running import make_model, plan_of

from kimi_cli import native
from kimi_cli.engine import Engine, Source
from kimi_cli.errors import NumericError
from kimi_cli.score import Score, score_ids

TEXT = "The quick brown fox jumps over the lazy dog; \u4e16\u754c \u00e9!"


def score(*args: object, **options: Any) -> dict[str, Any]:
    done = kimi("score", *args, "--json", "--quiet", **options)
    assert done.stderr == b""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def scored() -> dict[str, Any]:
    return score(TEXT)


def test_against_the_logits_of_the_prompt(scored: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "all.npy"
    prompt = generate(TEXT, "--raw", "-n", 0, "--all-logits", file)["prompt_ids"]
    logits = np.load(file).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    want = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    values = [want[t, prompt[t + 1]] for t in range(len(prompt) - 1)]
    assert list(scored) == ["ids", "logprobs", "total", "mean", "perplexity", "stats"]
    assert scored["ids"] == prompt
    assert scored["logprobs"][0] is None and len(scored["logprobs"]) == len(prompt)
    assert np.abs(np.array(scored["logprobs"][1:]) - values).max() <= 1e-5
    assert scored["total"] == math.fsum(scored["logprobs"][1:])
    assert scored["mean"] == scored["total"] / (len(prompt) - 1)
    assert scored["perplexity"] == pytest.approx(math.exp(-scored["mean"]), rel=1e-14)
    assert scored["stats"]["context"] == len(prompt)
    assert scored["stats"]["peak_rss_bytes"] <= scored["stats"]["ram_budget_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        ["--threads", 1], ["--prefill-chunk", 1], ["--prefill-chunk", 7, "--threads", 2],
        ["--ram", "100M"], ["--context", 900], ["--isa", "scalar", "--prefill-chunk", 5],
        *(["--isa", isa] for isa in native.supported_isas()),
    ],
    ids=str,
)  # fmt: skip
def test_same_bits_however_it_is_done(scored: dict[str, Any], options: list[Any]) -> None:
    assert score(TEXT, *options) | {"stats": 0} == scored | {"stats": 0}


def test_text_from_everywhere(scored: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(TEXT.encode())
    found = [
        score("--prompt-file", path),
        score("--prompt-file", "-", input=TEXT.encode()),
        score("--ids", ",".join(map(str, scored["ids"]))),
    ]
    assert all(one | {"stats": 0} == scored | {"stats": 0} for one in found)


def test_a_line_for_people(scored: dict[str, Any]) -> None:
    done = kimi("score", TEXT)
    count = len(scored["ids"]) - 1
    assert done.stdout.decode() == (
        f"{count} tokens scored: log-probability {scored['total']:.6f}, "
        f"{scored['mean']:.6f} a token, perplexity {scored['perplexity']:.6g}\n"
    )
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"{count} tokens read in ") and "generated" not in last
    assert kimi("score", TEXT, "--quiet").stderr == b""


def test_generated_tokens_score_as_they_were_chosen() -> None:
    result = generate("Hello", "--raw", "-n", 8, "--logprobs", 0, "--temperature", 1, "--seed", 1)
    ids = [*result["prompt_ids"], *result["ids"]]
    found = score("--ids", ",".join(map(str, ids)))["logprobs"]
    assert found[len(result["prompt_ids"]) :] == [e["logprob"] for e in result["logprobs"]]


def test_refusals(tmp_path: Path) -> None:
    one = "give one text: TEXT, --prompt-file or --ids"
    assert sentence(kimi("score", check=2)) == one
    assert sentence(kimi("score", "a", "--ids", "1", check=2)) == one
    assert "two or more" in sentence(kimi("score", "a", check=2))
    assert "two or more" in sentence(kimi("score", "--ids", "5", check=2))
    assert "empty" in sentence(kimi("score", "", check=2))
    assert "outside the vocabulary" in sentence(kimi("score", "--ids", "1,99999", check=2))
    assert "--context of 3" in sentence(kimi("score", "--ids", "1,2,3,4", "--context", 3, check=2))
    assert "use --ram" in sentence(kimi("score", "--ids", "1,2", "--ram", "20M", check=4))
    model = linked_model(tmp_path / "m", without=["tiktoken.model"])
    assert "only --ids" in sentence(kimi("score", "-m", model, "ab", check=3))
    assert score("-m", model, "--ids", "1,2,3")["ids"] == [1, 2, 3]


# --- in the engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_model(tmp_path_factory.mktemp("score"), 6, num_hidden_layers=3)


def test_chunk_by_chunk(source: Source) -> None:
    ids = np.random.default_rng(3).integers(0, source.config.vocab_size, 41).tolist()
    found = []
    for chunk in (1, 3, 8, 40, 41):
        values = np.zeros(40)
        plan = plan_of(source, context=41, prompt=41, chunk=chunk)
        with Engine(source, plan) as engine:
            engine.load()
            found.append(score_ids(engine, ids, values))
        assert values.tolist() == found[-1].logprobs
    assert all(one == found[0] for one in found)
    assert max(found[0].logprobs) < 0 and found[0].perplexity > 1


def test_infinite_perplexity() -> None:
    score = Score([-1e4, -1e4], -2e4, native.perplexity(-2e4, 2))
    assert (score.mean, score.perplexity) == (-1e4, math.inf)


def test_numeric_error(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(source, plan_of(source, context=4, prompt=4)) as engine:
        row = np.full((1, source.config.vocab_size), np.nan, np.float32)
        monkeypatch.setattr(engine, "prefill", lambda *_: iter([row]))
        with pytest.raises(NumericError):
            score_ids(engine, [1, 2], np.zeros(1))
