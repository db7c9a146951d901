"""The command line: help, exit codes, one sentence for whatever is wrong, and a quick start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command import (
    KIMI,
    environment,
    generate,
    kimi,
    linked_model,
    own_trunk,
    replace_file,
    sentence,
)

from kimi_cli.builtin import PSALM, TINY
from kimi_cli.cli import cli
from kimi_cli.native import supported_isas
from kimi_cli.synth import make_config, write_checkpoint

COMMANDS = sorted(cli.commands)


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, sub in command.commands.items():
            yield from walk(sub, (*path, name))


# --- help ----------------------------------------------------------------------------------------


def test_commands_of_the_design_are_there() -> None:
    assert {"repack", "generate", "selftest"} <= set(COMMANDS)


@pytest.mark.parametrize("path", list(walk(cli)), ids=" ".join)
def test_help_is_one_imperative_line_and_an_example(path: tuple[str, ...]) -> None:
    command: Any = cli
    for name in path:
        command = command.commands[name]
    text = command.help or ""
    first, _, rest = text.partition("\n")
    assert re.fullmatch(r"[A-Z][a-z]+ .*\.", first), first
    assert len(first) <= 100
    example = re.search(r"^\s*Example: (kimi .*)$", rest, re.MULTILINE)
    assert example, "no example"
    words = shlex.split(example[1])
    assert words[1] in cli.commands and all(name in words for name in path)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and path != ("repack",):
            assert parameter.help, f"{parameter.name} has no help"


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("generate", "--help")])
def test_help_is_product(words: tuple[str, ...]) -> None:
    done = kimi(*words)
    assert b"Example: kimi generate" in done.stdout and done.stderr == b""


def test_no_command_shows_the_help_as_an_error() -> None:
    done = kimi(check=2)
    assert done.stdout == b"" and done.stderr.startswith(b"Usage: kimi")
    assert b"Commands:" in done.stderr


def test_version() -> None:
    assert re.fullmatch(rb"kimi, version \d+\.\d+\.\d+\n", kimi("--version").stdout)


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimi_cli", "--version"],
        capture_output=True, timeout=60, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith(b"kimi, version")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['kimi', 'generate', '--help']\n"
        "from kimi_cli.entry import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'numpy', 'tiktoken', 'tqdm', 'safetensors', 'cffi', 'kimi_cli._native',\n"
        "             'kimi_cli.engine', 'json', 'tempfile'}\n"
        "    print(end.code, sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env=environment()
    )
    assert done.stderr in (b"0 []\n", b"0 ['json']\n", b"0 ['tempfile']\n")


# --- 2: usage ------------------------------------------------------------------------------------

USAGE: dict[str, tuple[tuple[object, ...], str]] = {
    "no prompt": ((), r"no prompt: give one of PROMPT, --prompt-file, --messages or --ids"),
    "two prompts": (("hi", "--ids", "1"), r"give one prompt, not PROMPT and --ids"),
    "two arguments": (("hi", "there"), r"unexpected extra argument"),
    "ids are no numbers": (("--ids", "1,a"), r"--ids wants numbers with commas between.*'a'"),
    "no ids": (("--ids", ""), r"--ids wants numbers"),
    "id out of range": (("--ids", "1,2304"), r"id 2304 is outside the vocabulary: 0 to 2303"),
    "empty prompt": (("",), r"the prompt is empty"),
    "empty raw prompt": (("", "--raw"), r"the prompt is empty"),
    "longer than the context": (
        ("--ids", "1,2,3", "--context", 2), r"the prompt has 3 tokens, more than --context of 2"
    ),
    "no room to answer": (
        ("--ids", "1,2,3", "--context", 3), r"3 tokens leave no room to answer in --context of 3"
    ),
    "raw conversation": (("--raw", "--messages", "m.json"), r"cannot be combined with --messages"),
    "raw system": (("x", "--raw", "--system", "s"), r"--system belongs to the chat format"),
    "ids and system": (("--ids", "1", "--system", "s"), r"--system belongs to the chat format"),
    "missing prompt file": (("--prompt-file", "nowhere"), r"nowhere: cannot be read: No such file"),
    "missing messages": (("--messages", "nowhere"), r"nowhere: cannot be read: No such file"),
    "unknown option": (("x", "--fast"), r"No such option"),
    "ram": (("x", "--ram", "8X"), r"size '8X' is not understood: write 8G"),
    "no ram": (("x", "--ram", "0"), r"size '0' is not understood"),
    "threads": (("x", "--threads", "0"), r"'--threads'"),
    "chunk": (("x", "--prefill-chunk", "0"), r"'--prefill-chunk'"),
    "tokens": (("x", "-n", "-1"), r"'--max-tokens'"),
    "context": (("x", "--context", "0"), r"'--context'"),
    "isa": (("x", "--isa", "sse"), r"'--isa'"),
    "isa of another CPU": (("x", "--isa", "neon"), r"'neon' is not available here: this CPU has"),
    "thinking": (("x", "--thinking", "very"), r"'--thinking'"),
    "logits nowhere": (("x", "--logits", "no/x.npy"), r"no/x\.npy: its directory is missing"),
    "logits to a device": (("x", "--logits", "/dev/null"), r"/dev/null: not a regular file"),
    "logits twice": (("x", "--logits", "a.npy", "--all-logits", "./a.npy"), r"give two files"),
    "logits to a directory": (("x", "--logits", "."), r"is a directory"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(USAGE))
def test_usage(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """In this process, for speed: all but the interpreter's start is the command's own."""
    import signal

    from kimi_cli import console, native

    monkeypatch.chdir(tmp_path)
    for variable in ("KIMI_MODEL", "KIMI_TRUNK"):
        monkeypatch.delenv(variable, raising=False)
    args, said = USAGE[name]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        words = ["generate", *map(str, args), "--quiet"]
        code = console.run(lambda: cli.main(words, prog_name="kimi", standalone_mode=False))
    finally:
        signal.signal(signal.SIGTERM, handler)
        native.set_isa("auto")
    out, err = capfd.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("kimi: ") and err.count("\n") == 1, err
    assert re.search(said, err), err
    assert not list(tmp_path.iterdir())


def test_usage_through_the_command() -> None:
    for name in ("no prompt", "two prompts", "id out of range", "ram"):
        args, said = USAGE[name]
        assert re.search(said, sentence(kimi("generate", *args, check=2)))
    for command in COMMANDS:
        assert "No such option" in sentence(kimi(command, "--fast", check=2))
    assert "No such command" in sentence(kimi("conjure", check=2))


def test_prompt_longer_than_the_model_reaches(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 3
    replace_file(model / "config.json", json.dumps(config).encode())
    asked = ("generate", "-m", model, "--quiet", "--ids")
    assert "has 4 tokens, more than the model's limit of 3" in sentence(
        kimi(*asked, "1,2,3,4", check=2)
    )
    assert "leave no room to answer in the model's limit of 3" in sentence(
        kimi(*asked, "1,2,3", "--context", 100, check=2)
    )
    assert len(generate("-m", model, "--ids", "1,2", "-n", 9, "--ignore-eos")["ids"]) == 1


# --- 3: bad checkpoint, config, tokenizer or trunk ------------------------------------------------


def refused(model: Path, *args: object) -> str:
    return sentence(kimi("generate", "-m", model, *(args or ("hi",)), "--quiet", check=3))


def test_missing_model(tmp_path: Path) -> None:
    assert refused(tmp_path / "none").startswith(f"{tmp_path}/none/config.json is absent")
    assert refused(tmp_path).startswith(f"{tmp_path}/config.json is absent")
    (tmp_path / "file").write_bytes(b"")
    assert f"{tmp_path}/file" in refused(tmp_path / "file")


def test_bad_config(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    replace_file(model / "config.json", b"{")
    assert refused(model).startswith(f"{model}/config.json is not JSON")
    config = json.loads((TINY / "config.json").read_text())
    del config["text_config"]["hidden_size"]
    replace_file(model / "config.json", json.dumps(config).encode())
    assert "missing text_config.hidden_size" in refused(model)


def test_bad_tokenizer(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    for content in (b"", b"!!!! 0\n", b"AA== 0\n"):
        replace_file(model / "tiktoken.model", content)
        assert refused(model).startswith(f"{model}/tiktoken.model ")
    lines = (TINY / "tiktoken.model").read_bytes().splitlines(keepends=True)
    replace_file(model / "tiktoken.model", b"".join(lines[:-1]))  # its ids all move by one
    assert refused(model).startswith(f"{model}/tokenizer_config.json: added_tokens_decoder")
    model = linked_model(tmp_path / "none", without=("tiktoken.model",))
    assert "only --ids can be used" in refused(model)
    model = linked_model(tmp_path / "half", without=("tokenizer_config.json",))
    assert refused(model).startswith(f"{model}/tokenizer_config.json cannot be read")


def test_missing_trunk(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m", without=("kimi-trunk",))
    text = refused(model)
    assert text.startswith(f"{model}/kimi-trunk does not exist")
    assert text.endswith(f"run kimi repack -m {model}")
    elsewhere = tmp_path / "else where"
    text = refused(model, "hi", "--trunk", elsewhere)
    assert text.endswith(f"run kimi repack -m {model} --out '{elsewhere}'")
    elsewhere.mkdir()
    assert "holds no trunk.json" in refused(model, "hi", "--trunk", elsewhere)


def test_partial_trunk(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    trunk = own_trunk(model)
    (trunk / "layer-005.safetensors").unlink()
    text = refused(model)
    assert text == f"{trunk}/layer-005.safetensors is absent: run kimi repack -m {model}"
    (trunk / "trunk.json").rename(trunk / "trunk.partial.json")
    text = refused(model)
    assert "unfinished" in text and text.endswith(f"run kimi repack -m {model}")
    kimi("repack", "-m", model, "--quiet")
    assert generate("-m", model, "--ids", "1,2,3", "-n", 1)["ids"]


def test_damaged_trunk(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    trunk = own_trunk(model)
    path = trunk / "layer-005.safetensors"
    sound = path.read_bytes()
    for broken in (sound[:-1], b"\0" * len(sound)):
        path.write_bytes(broken)
        text = refused(model)
        assert text.startswith(str(path)) and text.endswith(f"run kimi repack -m {model}")
    path.write_bytes(sound)
    for content in (b"", b"{}"):
        (trunk / "trunk.json").write_bytes(content)
        text = refused(model)
        assert text.startswith(f"{trunk}/trunk.json is ")
        assert text.endswith(f"run kimi repack -m {model}")


def test_foreign_and_stale_trunks(tmp_path: Path) -> None:
    model = tmp_path / "other"
    write_checkpoint(model, make_config(), 99, shards=7, tokenizer=True)
    shutil.copytree(TINY / "kimi-trunk", model / "kimi-trunk")
    text = refused(model)
    assert "was made from another checkpoint" in text
    assert text.endswith(f"run kimi repack -m {model}")
    stale = linked_model(tmp_path / "stale")
    shard = stale / "model-00003-of-000007.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    replace_file(shard, bytes(data))
    text = refused(stale)
    assert "was made from another checkpoint" in text and shard.name in text
    shard.unlink()
    assert f"{shard.name} is not there" in refused(stale)


def test_trunk_for_another_config(tmp_path: Path) -> None:
    model = linked_model(tmp_path / "m")
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    replace_file(model / "config.json", json.dumps(config).encode())
    assert "kimi repack" in refused(model)


# --- 5: self-test --------------------------------------------------------------------------------


def test_selftest_through_the_command() -> None:
    done = kimi("selftest", "--isa", supported_isas()[-1])
    assert done.stdout.endswith(b"all passed\n") and done.stderr == b""
    assert "not available here" in sentence(kimi("selftest", "--isa", "neon", check=2))


# --- stderr and stdout ---------------------------------------------------------------------------


def test_what_goes_where(tmp_path: Path) -> None:
    asked = ("generate", "--ids", "1,2,3", "-n", 3)
    loud, quiet = kimi(*asked), kimi(*asked, "--quiet")
    assert loud.stdout == quiet.stdout and quiet.stderr == b""
    lines = loud.stderr.decode().splitlines()
    assert len(lines) == 4 and lines[0].startswith("no model given")
    assert lines[1].startswith("held: ") and lines[2].startswith("each token reads ")
    assert re.fullmatch(
        r"3 tokens read in .* s; 3 generated at .* s each; peak .* MiB of .*; read .* of trunk, "
        r".* of experts \(\d+ of \d+ in memory\)",
        lines[3],
    ), lines[3]
    model = kimi(*asked, "-m", PSALM)
    assert model.stdout == loud.stdout and len(model.stderr.splitlines()) == 3


def test_repack_through_the_command(tmp_path: Path) -> None:
    done = kimi("repack", "-m", TINY, "--out", tmp_path / "t")
    assert done.stdout == b"" and done.stderr.decode() == f"trunk: {tmp_path}/t\n"
    done = kimi("repack", "-m", TINY, "--out", tmp_path / "p", "--plain", "--quiet")
    assert (done.stdout, done.stderr) == (b"", b"")
    assert "--model" in sentence(kimi("repack", check=2))


def test_closed_standard_streams() -> None:
    for redirection in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" generate --ids 1,2 -n 2 {redirection}', str(KIMI)],
            capture_output=True,
            timeout=60,
            env=environment(),
        )
        assert done.returncode == 0, (redirection, done.stderr)
        assert b"Traceback" not in done.stderr


def test_interruption_at_any_moment_is_quiet() -> None:
    """Also while modules are imported and weights loaded: never a traceback."""
    import signal
    import time

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        for delay in (0.2, 0.35, 0.5):
            process = subprocess.Popen(
                [KIMI, "generate", "--ids", "1", "-n", "100000", "--ignore-eos", "--quiet"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment(),
            )
            time.sleep(delay)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
            if delay < 0.3 and process.returncode in (-number, 1):
                continue  # so early that not a line of ours had run
            assert process.returncode == code and said.strip() == b"", (delay, said)
