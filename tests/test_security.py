"""What the README's Security section says, claim by claim."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import environment, kimi, linked_model, own_trunk, replace_file

import kimi_cli
from kimi_cli import console
from kimi_cli.builtin import TINY
from kimi_cli.cli import cli
from kimi_cli.durable import scratch, write_whole

CODE = Path(kimi_cli.__file__).parent
IDS = ("generate", "--ids", "1,2", "-n", 2, "--quiet")

# ---- nothing from a checkpoint is executed, nothing is fetched ----

MODULES = {
    "pickle", "marshal", "shelve", "dill", "joblib", "torch", "transformers", "jinja2", "yaml",
    "runpy", "code", "subprocess", "multiprocessing", "pty",
    "socket", "ssl", "http", "urllib", "requests", "ftplib", "huggingface_hub",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FUNCTIONS = {"system", "popen", "execv", "execve", "execvp", "spawnv", "posix_spawn", "fork"}


def parsed() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(CODE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield path, node


def test_the_source_can_execute_and_fetch_nothing() -> None:
    for path, node in parsed():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & MODULES, (path, names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS, (path, node.lineno)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            assert node.attr not in FUNCTIONS, (path, node.lineno)
        if isinstance(node, ast.keyword):
            assert node.arg not in ("allow_pickle", "shell", "trust_remote_code"), path


@pytest.mark.fault("security: auto_map and code in a checkpoint", "not executed")
def test_code_of_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    model, proof = linked_model(tmp_path / "m"), tmp_path / "executed"
    code = f"open({str(proof)!r}, 'w')\n"
    for name in ("modeling_kimi.py", "configuration_kimi.py", "tokenization_kimi.py", "numpy.py"):
        (model / name).write_text(code)
    config = json.loads((TINY / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_kimi.KimiForCausalLM"}
    replace_file(model / "config.json", json.dumps(config).encode())
    tokens = json.loads((TINY / "tokenizer_config.json").read_text())
    tokens["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    tokens["chat_template"] = "{{ ''.__class__.__mro__ }}{% include 'modeling_kimi.py' %}"
    replace_file(model / "tokenizer_config.json", json.dumps(tokens).encode())
    words = ("generate", "hi", "-n", 2, "--quiet")
    done = kimi(*words, "-m", model, cwd=model)
    assert done.stdout == kimi(*words, "-m", TINY).stdout and not proof.exists()


# ---- files ----


@pytest.mark.fault("security: files beside the given outputs", "none is written")
def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    home, temporary, here, out = (tmp_path / name for name in ("home", "tmp", "here", "out"))
    for directory in (home, temporary, here, out):
        directory.mkdir()
    model = Path(shutil.copytree(TINY, tmp_path / "m"))
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    env = environment(HOME=str(home), TMPDIR=str(temporary), XDG_CACHE_HOME=str(home / "cache"))
    options = (
        "--session",
        out / "s",
        "--save-every",
        1,
        "--logits",
        out / "l",
        "--trace",
        out / "t",
    )
    kimi("generate", "hi", "-n", 2, "-m", model, *options, env=env, cwd=here)
    kimi("verify", "-m", model, env=env, cwd=here)
    assert not [*home.iterdir(), *temporary.iterdir(), *here.iterdir()]
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before
    assert sorted(path.name for path in out.iterdir()) == ["l", "s", "s.ids", "t"]


OUTPUTS = {
    "--logits": "l.npy", "--all-logits": "a.npy", "--trace": "t.jsonl", "--trace-time": "t.json",
    "--session": "s",
}  # fmt: skip


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o027, 0o640)])
def test_the_mask_of_the_user_is_kept(tmp_path: Path, mask: int, mode: int) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = [word for option, name in OUTPUTS.items() for word in (option, out / name)]
    kimi(*IDS, *options, "--save-every", 1, umask=mask)
    (tmp_path / "p").write_text('{"ids": [1], "max_tokens": 1}\n')
    kimi("generate", "--prompts", tmp_path / "p", "--out", out / "o", "--quiet", umask=mask)
    kimi("repack", "-m", TINY, "--out", out / "t", "--quiet", umask=mask)
    for path in out.rglob("*"):
        assert path.stat().st_mode & 0o777 == (mode | mode >> 2 & 0o111 if path.is_dir() else mode)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file that others' links lead to; it must stay as it is."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine" and not path.is_symlink()
    assert not (tmp_path / "made").exists()


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
@pytest.mark.parametrize("option", OUTPUTS)
def test_planted_links_of_outputs(tmp_path: Path, victim: Path, option: str) -> None:
    path = tmp_path / "out"
    links = [path.with_name("out.tmp")] if option == "--session" else [path, scratch(path)]
    for link in links:
        link.symlink_to(victim)
    words = [str(word) for word in (*IDS, option, path)]
    more = ["--save-every", "1"] if option == "--session" else []
    cli.main([*words, *more], standalone_mode=False)
    assert path.is_file() and not path.is_symlink() and path.stat().st_size > 20


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
def test_planted_links_of_a_trunk(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "t"
    out.mkdir()
    for name in ("trunk.json", "trunk.partial.json", "layer-000.safetensors", "tables.safetensors"):
        (out / f"{name}.tmp").symlink_to(victim)
    (out / "head.safetensors").symlink_to(victim)
    kimi("repack", "-m", TINY, "--out", out, "--quiet")
    for path in (TINY / "kimi-trunk").iterdir():
        assert not (out / path.name).is_symlink()
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
def test_planted_links_of_locks(tmp_path: Path, victim: Path) -> None:
    model = linked_model(tmp_path / "m")
    trunk = own_trunk(model)
    for lock, words in (
        ("repack.lock", ("repack", "--plain")),
        ("verify.lock", ("verify", "--deep")),
    ):
        (trunk / lock).unlink(missing_ok=True)
        (trunk / lock).symlink_to(tmp_path / "made")
        done = kimi(*words, "-m", model, check=1)
        assert b"cannot be written" in done.stderr and lock.encode() in done.stderr


@pytest.mark.fault("security: a symbolic link planted where a file is replaced", "not followed")
def test_planted_links_of_what_is_written_whole(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "x"
    path.symlink_to(victim)
    path.with_name("x.tmp").symlink_to(victim)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and not path.is_symlink()


# ---- what is shown ----

NAME = "a\x1b]0;owned\x07\x1b[2J\r\nb"
"""A directory's name that would retitle and clear a terminal."""


@pytest.mark.fault("security: escape sequences in the names of files", "shown, not obeyed")
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "hi", "-n", 1, "-m", "{}"), ("repack", "-m", "{}"), ("verify", "-m", "{}"),
        ("plan", "--ram", "1G", "-m", "{}"), ("session", "{}/s"), ("replay", "{}/t"),
        ("generate", "hi", "--trunk", "{}"), ("generate", "--prompt-file", "{}/p"),
        ("repack", "-m", TINY, "--out", "{}/new"),
    ],
)  # fmt: skip
def test_names_are_not_obeyed(
    tmp_path: Path, words: tuple[object, ...], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    place = tmp_path / NAME
    place.mkdir()
    if words[0] == "verify":
        for path in TINY.glob("*.json"):
            shutil.copy(path, place)
        shutil.copy(TINY / "model-00001-of-000007.safetensors", place / f"{NAME}.safetensors")
    asked = [str(word).replace("{}", str(place)) for word in words]
    before = signal.getsignal(signal.SIGTERM)
    console.run(lambda: cli.main(asked, standalone_mode=False))
    signal.signal(signal.SIGTERM, before)
    out, said = capfdbinary.readouterr()
    assert b"\x1b" not in out + said and b"\x07" not in out + said and b"\r" not in out + said
    assert b"\\x1b]0;owned\\x07" in out + said
    assert os.path.isdir(place)
