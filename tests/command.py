"""The installed `kimi` in a process of its own, as a person runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kimi_cli.builtin import TINY

KIMI = Path(sys.executable).parent / "kimi"


def environment(**changes: str) -> dict[str, str]:
    """The tests' own, without anything that `kimi` listens to."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KIMI_")}
    return {**kept, **changes}


def kimi(
    *args: object, check: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Runs `kimi`, which must end with exit code `check` and never with a traceback."""
    options.setdefault("env", environment())
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    words = [str(KIMI), *map(str, args)]
    done = subprocess.run(words, capture_output=True, timeout=120, **options)
    said = done.stderr.decode("utf-8", "replace")
    assert "Traceback" not in said and "Exception ignored" not in said, said
    if check is not None:
        assert done.returncode == check, (args, done.returncode, said)
    return done


def generate(*args: object, **options: Any) -> dict[str, Any]:
    """What `kimi generate --json --quiet` prints; it says nothing else."""
    done = kimi("generate", *args, "--json", "--quiet", **options)
    assert done.stderr == b""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def sentence(done: subprocess.CompletedProcess[bytes]) -> str:
    """The one line of an error; nothing was printed as the product."""
    assert done.stdout == b""
    text = done.stderr.decode()
    lines = [line for line in text.splitlines() if not line.startswith("no model given")]
    assert len(lines) == 1 and lines[0].startswith("kimi: "), text
    return lines[0].removeprefix("kimi: ")


def linked_model(directory: Path, without: Iterable[str] = (), source: Path = TINY) -> Path:
    """A built-in checkpoint as links to its files, to be changed one by one."""
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in without:
            (directory / path.name).symlink_to(path)
    return directory


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in the place of a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def own_trunk(model: Path) -> Path:
    """A copy of the built-in trunk in place of the link to it."""
    trunk = model / "kimi-trunk"
    trunk.unlink()
    shutil.copytree(TINY / "kimi-trunk", trunk)
    return trunk


def smallest_ram(*args: object) -> str:
    """The budget that a refusal of `kimi generate` with these options names."""
    text = sentence(kimi("generate", *args, "--quiet", "--ram", "20M", check=4))
    figure = re.search(r"use --ram (\d+M) or more", text)
    assert figure, text
    return figure[1]
