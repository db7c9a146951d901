"""A checkpoint whose trunk no small budget holds, for tests of the command. A plugin of pytest."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from command import kimi, smallest_ram
from running import make_model


class Streamed(NamedTuple):
    """`words` run `generate` under the smallest budget: most of the trunk and the experts are read
    again for each token; `good` is what it prints."""

    model: Path
    words: tuple[object, ...]
    good: bytes


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Streamed:
    model = tmp_path_factory.mktemp("streamed") / "m"
    make_model(model, hidden_size=512, intermediate_size=49152, num_hidden_layers=4, tokenizer=True)
    asked = ("-m", model, "--ids", "1,2,3", "-n", 8, "--ignore-eos", "--threads", 2)
    words = ("generate", *asked, "--quiet", "--ram", smallest_ram(*asked))
    return Streamed(model, words, kimi(*words).stdout)
