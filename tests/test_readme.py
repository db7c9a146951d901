"""The README: finished, and true to the program where that can be told cheaply."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kimi_cli.errors import Exit

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
KIMI = Path(sys.executable).parent / "kimi"


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z]+@|TODO|FIXME|XXX", README)


def test_every_command_it_names_exists() -> None:
    shown = subprocess.run([KIMI, "--help"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.MULTILINE))
    named = set(re.findall(r"kimi ([a-z]+)", README)) - {"runs", "talk"}
    assert named <= commands | {"command"}, named - commands


def test_every_exit_code_is_listed() -> None:
    listed = {int(code) for code in re.findall(r"\b(\d+)\b", README.partition("## Exit codes")[2])}
    assert {int(code) for code in Exit} <= listed


def test_every_option_it_names_exists() -> None:
    options = set(re.findall(r"`[^`]*?(--[a-z][a-z-]*)", README)) - {"--local-dir"}
    helps = ""
    for command in ("repack", "generate", "chat", "verify", "plan", "bench"):
        helps += subprocess.run([KIMI, command, "--help"], capture_output=True, text=True).stdout
    assert options <= set(re.findall(r"--[a-z][a-z-]*", helps)), options
