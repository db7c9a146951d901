"""Memory and threads that the system refuses: a sentence, never a crash; and the plan suffices."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command import KIMI, environment, kimi, sentence
from running import make_model, run, tighten
from shim import faulty, spread
from streamed import Streamed

from kimi_cli.builtin import TINY
from kimi_cli.units import MIB

Record = Callable[[str, object], None]
WORDS = ("generate", "hi", "-n", 4, "--ignore-eos", "--threads", 2, "--quiet")
LIBRARIES, STACK = 128, 8
"""MiB of address space beyond --ram that a run is given, as the README says: libraries that are
mapped and hardly touched, the readers' stacks; and a stack for each of --threads."""

REFUSED = re.compile(
    r"kimi: the system refused (\S+ \S+ of the memory that was planned \(Cannot allocate memory\): "
    r"lower --ram, or allow the process more|memory that the plan had counted on; lower --ram|"
    r"a thread that was planned: lower --threads, or allow the process more threads or memory)\n"
)


# ---- refused ----


ARENA = 1 << 20
"""What Python takes for its own small objects at a time."""
FRAME = 16 << 10
"""What Python takes for the frames of a thread at first."""


@pytest.mark.fault("memory: refused at any planned allocation", "said, exit code 1")
@pytest.mark.parametrize("kind", ["tiny", "streamed"])
def test_memory_refused(
    kind: str, streamed: Streamed, tmp_path: Path, long: bool, record_property: Record
) -> None:
    words = WORDS if kind == "tiny" else streamed.words
    good, made = faulty(tmp_path / "fired", "mmap trunk.json 1+ none", *words)
    planned = [number for number, (_, size) in enumerate(made, 1) if int(size) != ARENA]
    assert len(planned) > 15
    chosen = spread(len(planned), 30 if long else 3)
    for number in (planned[at - 1] for at in chosen):
        rules = f"mmap trunk.json {number}+ ENOMEM"
        done, _ = faulty(tmp_path / "fired", rules, *words, check=None)
        if done.returncode == 0:  # the C library or Python made do with what they had
            assert done.stdout == good.stdout
            continue
        assert done.returncode == 1 and REFUSED.fullmatch(done.stderr.decode()), done.stderr
        assert good.stdout.startswith(done.stdout.rstrip(b"\n"))
    record_property("tried", len(chosen))


@pytest.mark.fault("memory: refused to a thread's first frame of Python", "said, exit code 1")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames lie with other objects")
def test_no_memory_to_begin_with(tmp_path: Path, record_property: Record) -> None:
    _, made = faulty(tmp_path / "fired", "mmap trunk.json 1+ none", *WORDS)
    frames = [number for number, (_, size) in enumerate(made, 1) if int(size) == FRAME]
    assert len(frames) >= 4  # threading.Thread would wait for each of these for ever
    for number in frames:
        done, _ = faulty(tmp_path / "fired", f"mmap trunk.json {number} ENOMEM", *WORDS, check=1)
        assert "refused a thread that was planned" in sentence(done)
    record_property("tried", len(frames))


@pytest.mark.fault("threads: refused at any of those planned", "said, exit code 1")
@pytest.mark.parametrize(
    ("after", "number", "words"),
    [
        ("trunk.json", 1, WORDS),
        ("trunk.json", 4, WORDS),
        ("trunk.json", 5, WORDS),  # OpenMP's, which is asked for before it ends the process
        ("config.json", 1, ("repack", "-m", TINY, "--out", "{}", "--quiet")),
        ("config.json", 2, ("repack", "-m", TINY, "--out", "{}", "--quiet")),
        ("trunk.json", 3, ("verify", "--deep", "-m", TINY)),
    ],
)
def test_threads_refused(
    tmp_path: Path, after: str, number: int, words: tuple[object, ...]
) -> None:
    asked = [str(word).replace("{}", str(tmp_path / "t")) for word in words]
    done, hit = faulty(tmp_path / "fired", f"thread {after} {number}+ EAGAIN", *asked, check=1)
    assert hit and REFUSED.fullmatch(done.stderr.decode()), done.stderr
    assert not (tmp_path / "t" / "trunk.json").exists()


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))


@pytest.mark.fault("memory: ulimit -v of any size", "the whole text, or a sentence and exit code 1")
def test_any_limit_on_address_space(long: bool, record_property: Record) -> None:
    words = [str(KIMI), *map(str, WORDS), "--ram", "70M"]
    good = subprocess.run(words, capture_output=True, timeout=60, env=environment()).stdout
    said, sizes = set(), range(20, 240, 8 if long else 30)
    for size in sizes:
        done = subprocess.run(
            words, capture_output=True, timeout=60, env=environment(),
            preexec_fn=limited(size * MIB), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = done.stderr.decode()
        if done.returncode == 0:
            assert (done.stdout, text) == (good, "")
            continue
        loading = text.startswith(("kimi: the program cannot be loaded: ", "OpenBLAS error: "))
        assert done.returncode == 1 and text.count("\n") == 1, (size, text)
        assert loading or REFUSED.fullmatch(text), (size, text)
        said.add(text)
    assert len(said) >= 2
    record_property("tried", len(sizes))


# ---- the plan suffices ----


@pytest.mark.fault("memory: ulimit -v at the budget and the README's allowance", "the same text")
def test_the_plan_and_the_allowance_suffice(streamed: Streamed) -> None:
    budget = int(re.sub(r"\D", "", str(streamed.words[-1]))) * MIB
    done = kimi(*streamed.words, preexec_fn=limited(budget + (LIBRARIES + 2 * STACK) * MIB))
    assert done.stdout == streamed.good
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    assert f"{LIBRARIES} MiB and {STACK} MiB for each of `--threads`" in " ".join(text.split())


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of ours, where one can be made."""
    roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")]
    place = next((root for root in roots if (root / "memory.limit_in_bytes").exists()), roots[0])
    made = place / f"kimi-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        if not any((made / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip("no memory controller is delegated here")
        yield made
    finally:
        made.rmdir()


@pytest.mark.fault("memory: a control group of the budget's size", "the same text, not killed")
def test_the_plan_suffices_in_a_control_group(streamed: Streamed, group: Path) -> None:
    budget = int(re.sub(r"\D", "", str(streamed.words[-1]))) * MIB
    limit = next(group / n for n in ("memory.max", "memory.limit_in_bytes") if (group / n).exists())
    limit.write_text(str(budget))
    if (group / "memory.swap.max").exists():
        (group / "memory.swap.max").write_text("0")

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    assert kimi(*streamed.words, preexec_fn=enter).stdout == streamed.good


# ---- many switches between threads ----


@pytest.mark.fault("threads: a switch every microsecond (sys.setswitchinterval)", "the same bits")
def test_switching_all_the_time(tmp_path: Path, long: bool, record_property: Record) -> None:
    source = make_model(tmp_path / "m", num_hidden_layers=6, num_experts=9)
    prompt, feed = list(range(3, 20)), [5, 9, 2, 600, 31]
    wanted = run(source, prompt, feed, threads=1)
    before = sys.getswitchinterval()
    plans = [
        (slots, pinned, threads) for slots in (1, 4) for pinned in (0.0, 0.4) for threads in (1, 2)
    ]
    rounds = 10 if long else 1
    sys.setswitchinterval(1e-6)
    try:
        for number in range(rounds):
            for slots, pinned, threads in plans:
                edit = tighten(pinned, slots)
                found = run(source, prompt, feed, threads=threads, chunk=1 + number, edit=edit)
                assert found.same(wanted), (number, slots, pinned, threads)
    finally:
        sys.setswitchinterval(before)
    assert np.isfinite(wanted.logits).all()
    record_property("tried", rounds * len(plans))
