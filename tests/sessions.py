"""What tests of sessions share: runs in this process, what they fed, files. A plugin of pytest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import generate

from kimi_cli import journal
from kimi_cli.builtin import PSALM
from kimi_cli.cli import cli
from kimi_cli.config import load_config
from kimi_cli.errors import SessionError
from kimi_cli.model import Model
from kimi_cli.snapshot import check_state, load_state, read_snapshot
from kimi_cli.state import State
from kimi_cli.turns import History

CONFIG = load_config(PSALM)

Run = Callable[..., dict[str, Any]]


class Fed(list[tuple[int, int]]):
    """(position, tokens) of every pass over the model."""

    @property
    def prefill(self) -> int:
        return self[0][1] if self else 0


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Fed:
    seen, forward = Fed(), Model.forward

    def counted(self: Model, state: State, ids: list[int], *args: Any) -> Any:
        seen.append((state.position, len(ids)))
        return forward(self, state, ids, *args)

    monkeypatch.setattr(Model, "forward", counted)
    return seen


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], fed: Fed) -> Run:
    """`kimi generate --json` in this process; `fed` then tells what it fed."""

    def call(*args: object) -> dict[str, Any]:
        fed.clear()
        capsysbinary.readouterr()
        words = ["generate", *map(str, args), "--json", "--quiet", "--threads", "1"]
        cli.main(words, standalone_mode=False)
        result: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
        return result

    return call


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    keys = ("prompt_ids", "ids", "text", "reasoning", "stop_reason")
    assert {k: found.get(k) for k in keys} == {k: wanted.get(k) for k in keys}


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p.name.startswith(path.name))


def history_of(path: Path) -> History:
    found, _, _ = journal.parse(path.with_name(path.name + ".ids").read_bytes())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "s"
    generate("hi", "-n", 6, "--session", path, "--save-every", 4)
    return path


def checked(path: Path) -> None:
    """Reads all of FILE, as a run and as `kimi session` do."""
    found = read_snapshot(path)
    assert found is not None
    try:
        check_state(found)
    except SessionError:
        with pytest.raises(SessionError):
            load_state(found, State(CONFIG, found.position))
        raise
    load_state(found, State(CONFIG, found.position))
