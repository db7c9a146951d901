"""Log-probabilities of generated tokens: against the logits, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import generate, kimi, linked_model, sentence

from kimi_cli.builtin import PSALM
from kimi_cli.logprobs import Logprobs, TokenLogprob
from kimi_cli.prompt import token_text
from kimi_cli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(PSALM)


def log_softmax64(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    result: np.ndarray[Any, Any] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return result


def test_what_is_recorded_comes_back() -> None:
    rng = np.random.default_rng(1)
    kept, rows = Logprobs(5, 3), rng.standard_normal((4, 50)).astype(np.float32)
    for number, row in enumerate(rows):
        kept.record(number, row, 7 * number)
    found = list(kept.first(4))
    want = log_softmax64(rows)
    for number, one in enumerate(found):
        best = np.argsort(-rows[number], kind="stable")[:3]
        assert one.id == 7 * number and [i for i, _ in one.top] == best.tolist()
        assert one.logprob == pytest.approx(want[number, one.id], abs=1e-6)
        assert [v for _, v in one.top] == pytest.approx(want[number, best].tolist(), abs=1e-6)
    assert list(kept.first(2)) == found[:2] and list(kept.first(0)) == []


def test_without_alternatives_or_tokens() -> None:
    kept = Logprobs(1, 0)
    kept.record(0, np.zeros(4, np.float32), 2)
    assert list(kept.first(1)) == [TokenLogprob(2, pytest.approx(-np.log(4)), ())]
    assert list(Logprobs(0, 20).first(0)) == []


def test_text_of_a_token() -> None:
    (one,) = TOKENIZER.encode("a")
    assert token_text(TOKENIZER, one) == "a"
    assert token_text(TOKENIZER, TOKENIZER.special("<|open|>")) == "<|open|>"
    assert token_text(None, one) is None
    assert token_text(TOKENIZER, TOKENIZER.vocab_size) is None
    part = next(i for i in range(300) if TOKENIZER.decode_bytes([i]) == b"\xe4")
    assert token_text(TOKENIZER, part) is None


# --- as a command --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--temperature", 1.5, "--seed", 4, "--top-k", 50]])
def test_logprobs_are_those_of_the_logits(tmp_path: Path, options: list[Any]) -> None:
    file = tmp_path / "logits.npy"
    args = ("Hello", "-n", 10, "--ignore-eos", *options)
    result = generate(*args, "--logprobs", 5, "--logits", file)
    logits = np.load(file)
    want, entries = log_softmax64(logits), result["logprobs"]
    assert [entry["id"] for entry in entries] == result["ids"] and len(entries) == 10
    for row, values, entry in zip(logits, want, entries, strict=True):
        assert list(entry) == ["id", "token", "logprob", "top"]
        assert abs(entry["logprob"] - values[entry["id"]]) <= 1e-5
        assert [top["id"] for top in entry["top"]] == np.argsort(-row, kind="stable")[:5].tolist()
        for top in entry["top"]:
            assert abs(top["logprob"] - values[top["id"]]) <= 1e-5
            assert top["token"] == token_text(TOKENIZER, top["id"])
        assert entry["token"] == token_text(TOKENIZER, entry["id"])
    assert generate(*args)["ids"] == result["ids"]
    scalar = generate(*args, "--logprobs", 5, "--isa", "scalar", "--threads", 1, "--ram", "100M")
    assert scalar["logprobs"] == entries


def test_none_and_many_alternatives(tmp_path: Path) -> None:
    assert "logprobs" not in generate("Hello", "-n", 2)
    assert [e["top"] for e in generate("Hello", "-n", 2, "--logprobs", 0)["logprobs"]] == [[], []]
    assert generate("Hello", "-n", 0, "--logprobs", 3)["logprobs"] == []
    (entry,) = generate("Hello", "-n", 1, "--logprobs", 20)["logprobs"]
    assert len(entry["top"]) == 20
    model = linked_model(tmp_path / "m", ["tiktoken.model"], PSALM)
    (entry,) = generate("-m", model, "--ids", "1,2", "-n", 1, "--logprobs", 1)["logprobs"]
    assert entry["token"] is None and entry["top"] == [
        {"id": entry["id"], "token": None, "logprob": entry["logprob"]}
    ]


def test_wrong_requests() -> None:
    assert "give --json too" in sentence(kimi("generate", "x", "--logprobs", 1, check=2))
    for count in (-1, 21, "x"):
        assert "--logprobs" in sentence(
            kimi("generate", "x", "--json", "--logprobs", count, check=2)
        )
