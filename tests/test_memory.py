"""What the machine and its control groups allow: fixture trees, hostile bytes, a real group."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kimi_cli import cgroup, memory
from kimi_cli.cgroup import Allowance
from kimi_cli.units import GIB, MIB

NO_LIMIT = str((1 << 63) - 4096)


class Tree:
    """A made-up /proc/self and the control group mounts it tells of."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc, self._count = root, root / "proc", 0
        self.proc.mkdir()
        self.write("proc/mountinfo", "22 1 0:5 / / rw - ext4 /dev/sda rw\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def mount(self, kind: str, point: str, options: str = "rw", root: str = "/") -> None:
        self._count += 1
        (self.root / point).mkdir(parents=True, exist_ok=True)
        place = str(self.root / point).replace(" ", "\\040")
        line = f"{30 + self._count} 22 0:9 {root} {place} rw shared:3 - {kind} {kind} {options}\n"
        self.write("proc/mountinfo", line)

    def group(self, text: str) -> None:
        self.write("proc/cgroup", text)

    def limits(self, group: str, **files: str) -> None:
        """`memory_max="1"` writes memory.max."""
        for name, text in files.items():
            controller, _, rest = name.partition("_")
            self.write(f"{group}/{controller}.{rest}", text + "\n")

    def memory(self) -> Allowance | None:
        return cgroup.memory(self.proc)

    def processors(self) -> int | None:
        return cgroup.processors(self.proc)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def v2(tree: Tree) -> Tree:
    tree.mount("cgroup2", "cg")
    tree.group("0::/user/work\n")
    return tree


@pytest.fixture
def v1(tree: Tree) -> Tree:
    tree.mount("cgroup", "cg/memory", "rw,memory")
    tree.mount("cgroup", "cg/cpu,cpuacct", "rw,cpu,cpuacct")
    tree.mount("cgroup", "cg/systemd", "rw,xattr,name=systemd")
    tree.group("5:name=systemd:/\n4:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n")
    return tree


def test_no_files_is_no_limit(tmp_path: Path) -> None:
    assert cgroup.memory(tmp_path) is None
    assert cgroup.processors(tmp_path) is None


def test_v2_limit_less_usage(v2: Tree) -> None:
    v2.limits("cg/user/work", memory_max=str(GIB), memory_current=str(300 * MIB))
    assert v2.memory() == Allowance(GIB, 724 * MIB)


@pytest.mark.parametrize(
    "text", ["max", "", "-1", "1G", "1_000", "0x10", "1.5", "\u0661", "9" * 30]
)
def test_v2_what_is_no_count_is_no_limit(v2: Tree, text: str) -> None:
    v2.limits("cg/user/work", memory_max=text, memory_current="5")
    assert v2.memory() is None


def test_v2_zero_is_a_limit(v2: Tree) -> None:
    v2.limits("cg/user/work", memory_max="0", memory_current="5")
    assert v2.memory() == Allowance(0, 0)


def test_v2_ancestors_count_with_their_own_usage(v2: Tree) -> None:
    v2.limits("cg/user/work", memory_max=str(4 * GIB), memory_current=str(GIB))
    v2.limits("cg/user", memory_max=str(8 * GIB), memory_current=str(7 * GIB))
    v2.limits("cg", memory_max=str(16 * GIB), memory_current=str(8 * GIB))
    assert v2.memory() == Allowance(4 * GIB, GIB)


def test_v2_throttling_begins_at_high(v2: Tree) -> None:
    v2.limits("cg/user/work", memory_max="max", memory_high=str(GIB), memory_current="0")
    assert v2.memory() == Allowance(GIB, GIB)


def test_v2_clean_page_cache_is_not_usage(v2: Tree) -> None:
    stat = f"anon 5\nactive_file {100 * MIB}\ninactive_file {200 * MIB}\nfile_dirty {20 * MIB}"
    v2.limits("cg/user/work", memory_max=str(GIB), memory_current=str(500 * MIB), memory_stat=stat)
    assert v2.memory() == Allowance(GIB, (1024 - 500 + 300 - 20) * MIB)


def test_v2_more_cache_than_usage_is_not_more_than_the_limit(v2: Tree) -> None:
    v2.limits("cg/user/work", memory_max="100", memory_current="5", memory_stat="inactive_file 50")
    assert v2.memory() == Allowance(100, 100)


def test_v1_limit_less_usage_of_the_subtree(v1: Tree) -> None:
    stat = (
        f"inactive_file 0\nactive_file 0\nhierarchical_memory_limit {NO_LIMIT}\n"
        f"total_inactive_file {200 * MIB}\ntotal_active_file 0"
    )
    v1.limits(
        "cg/memory/docker/a",
        memory_limit_in_bytes=str(GIB),
        memory_usage_in_bytes=str(300 * MIB),
        memory_stat=stat,
    )
    assert v1.memory() == Allowance(GIB, 924 * MIB)


def test_v1_own_numbers_where_there_are_no_totals(v1: Tree) -> None:
    v1.limits(
        "cg/memory/docker/a",
        memory_limit_in_bytes="1000",
        memory_usage_in_bytes="900",
        memory_stat="inactive_file 500\nactive_file 100\ndirty 50",
    )
    assert v1.memory() == Allowance(1000, 650)


def test_v1_unlimited(v1: Tree) -> None:
    v1.limits("cg/memory/docker/a", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes="5")
    assert v1.memory() is None


def test_v1_nested(v1: Tree) -> None:
    v1.limits("cg/memory/docker/a", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes="5")
    v1.limits("cg/memory/docker", memory_limit_in_bytes="700", memory_usage_in_bytes="600")
    assert v1.memory() == Allowance(700, 100)


def test_v1_limit_of_an_ancestor_out_of_sight(v1: Tree) -> None:
    v1.limits(
        "cg/memory/docker/a",
        memory_limit_in_bytes=NO_LIMIT,
        memory_usage_in_bytes="100",
        memory_stat="hierarchical_memory_limit 400",
    )
    assert v1.memory() == Allowance(400, 300)


def test_v1_in_a_container_whose_mount_is_its_group(tree: Tree) -> None:
    tree.mount("cgroup", "cg/memory", "rw,memory", root="/docker/a")
    tree.group("3:memory:/docker/a/inner\n")
    tree.limits("cg/memory", memory_limit_in_bytes="700", memory_usage_in_bytes="0")
    tree.limits("cg/memory/inner", memory_limit_in_bytes="600", memory_usage_in_bytes="0")
    assert tree.memory() == Allowance(600, 600)


def test_v1_in_a_container_that_sees_another_root(tree: Tree) -> None:
    tree.mount("cgroup", "cg/memory", "rw,memory", root="/kubepods/pod1/b")
    tree.group("3:memory:/docker/a\n")
    tree.limits("cg/memory", memory_limit_in_bytes="700", memory_usage_in_bytes="0")
    assert tree.memory() == Allowance(700, 700)


@pytest.mark.parametrize("group", ["/", "/../..", "/../other", "", "/no/such/group", "/a/../../b"])
def test_v2_in_a_namespace_the_mount_is_the_last_resort(tree: Tree, group: str) -> None:
    tree.mount("cgroup2", "cg")
    tree.group(f"0::{group}\n")
    tree.limits("cg", memory_max="900", memory_current="100")
    tree.limits(".", memory_max="1", memory_current="0")  # above the mount: not ours to read
    assert tree.memory() == Allowance(900, 800)


def test_v2_mounted_from_above_the_namespace(tree: Tree) -> None:
    tree.mount("cgroup2", "cg", root="/../..")
    tree.group("0::/\n")
    tree.limits("cg", memory_max="900", memory_current="0")
    assert tree.memory() == Allowance(900, 900)


def test_hybrid_takes_each_controller_where_it_is(v1: Tree) -> None:
    v1.mount("cgroup2", "cg/unified")
    v1.group("0::/docker/a\n")
    v1.limits("cg/memory/docker/a", memory_limit_in_bytes="800", memory_usage_in_bytes="0")
    v1.limits("cg/unified/docker/a", cpu_max="150000 100000")
    assert v1.memory() == Allowance(800, 800)
    assert v1.processors() == 2


def test_mount_point_with_a_space(tree: Tree) -> None:
    tree.mount("cgroup2", "con trol")
    tree.group("0::/a\n")
    tree.limits("con trol/a", memory_max="900", memory_current="0")
    assert tree.memory() == Allowance(900, 900)


def test_group_name_with_colons(tree: Tree) -> None:
    tree.mount("cgroup2", "cg")
    tree.group("0::/system.slice/a:b:c\n")
    tree.limits("cg/system.slice/a:b:c", memory_max="900", memory_current="0")
    assert tree.memory() == Allowance(900, 900)


@pytest.mark.parametrize(
    "text, count",
    [
        ("max 100000", None), ("max", None), ("100000 100000", 1), ("100001 100000", 2),
        ("50000 100000", 1), ("1000 100000", 1), ("350000 100000", 4), ("100000 0", None),
        ("100000", None), ("", None), ("a b", None), ("1 2 3", None), ("-1 100000", None),
    ],
)  # fmt: skip
def test_v2_processors(v2: Tree, text: str, count: int | None) -> None:
    v2.limits("cg/user/work", cpu_max=text)
    assert v2.processors() == count


@pytest.mark.parametrize(
    "quota, period, count",
    [("-1", "100000", None), ("250000", "100000", 3), ("100", "100000", 1), ("100000", "x", None)],
)
def test_v1_processors(v1: Tree, quota: str, period: str, count: int | None) -> None:
    v1.limits("cg/cpu,cpuacct/docker/a", cpu_cfs_quota_us=quota, cpu_cfs_period_us=period)
    assert v1.processors() == count


def test_nested_processors(v1: Tree) -> None:
    v1.limits("cg/cpu,cpuacct/docker/a", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    v1.limits("cg/cpu,cpuacct/docker", cpu_cfs_quota_us="120000", cpu_cfs_period_us="100000")
    v1.limits("cg/cpu,cpuacct", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert v1.processors() == 2


def test_nested_processors_v2(v2: Tree) -> None:
    v2.limits("cg/user/work", cpu_max="max 100000")
    v2.limits("cg/user", cpu_max="300000 100000")
    assert v2.processors() == 3


LINES = st.lists(
    st.sampled_from(
        [
            b"31 22 0:9 / %s rw - cgroup2 cgroup2 rw",
            b"32 22 0:9 /a %s rw - cgroup c rw,memory,cpu",
            b"- - - -", b"31 22 0:9 /\\000 \\000 rw - cgroup2 a b", b"1 2 3 4 5 6 - cgroup2",
            b"0::/", b"0::/../a", b"3:memory,cpu:/a/b", b"3:memory:\0", b"::", b":memory:",
        ]
    ) | st.binary(max_size=40)
).map(b"\n".join)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    mountinfo=st.binary(max_size=200) | LINES,
    groups=st.binary(max_size=200) | LINES,
    control=st.binary(max_size=60)
    | st.sampled_from([b"max", b"5 7", b"9" * 400, b"inactive_file \xb2", b"\xff 5"]),
)
@example(mountinfo=b"\xff", groups=b"\xff:\xff:\xff", control=b"\xff")
def test_any_bytes_raise_nothing(
    tmp_path: Path, mountinfo: bytes, groups: bytes, control: bytes
) -> None:
    (tmp_path / "mountinfo").write_bytes(mountinfo.replace(b"%s", os.fsencode(tmp_path)))
    (tmp_path / "cgroup").write_bytes(groups)
    names = ["max", "high", "current", "stat", "limit_in_bytes", "usage_in_bytes"]
    for name in [f"memory.{n}" for n in names] + ["cpu.max", "cpu.cfs_quota_us"]:
        (tmp_path / name).write_bytes(control)
    (tmp_path / "cpu.cfs_period_us").write_bytes(b"7")
    (tmp_path / "meminfo").write_bytes(control)
    found, processors = cgroup.memory(tmp_path), cgroup.processors(tmp_path)
    assert found is None or 0 <= found.left <= found.limit < cgroup.UNLIMITED
    assert processors is None or processors >= 0
    assert memory.machine_available(tmp_path / "meminfo") >= 0


@pytest.mark.parametrize(
    "text, size",
    [("MemTotal: 9 kB\nMemAvailable:   2048 kB\nX: 1\n", 2 * MIB), ("MemAvailable: 0 kB", 0)],
)
def test_machine_available(tmp_path: Path, text: str, size: int) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert memory.machine_available(tmp_path / "meminfo") == size


@pytest.mark.parametrize("text", [None, "", "MemAvailable: many kB", "MemAvailable:"])
def test_machine_available_without_the_field(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    assert memory.machine_available(tmp_path / "meminfo") > 0


@pytest.mark.parametrize(
    "machine, group, left",
    [
        (8 * GIB, None, 8 * GIB + 100 * MIB),
        (8 * GIB, Allowance(2 * GIB, GIB), GIB + 100 * MIB),
        (GIB, Allowance(16 * GIB, 8 * GIB), GIB + 100 * MIB),
        (8 * GIB, Allowance(GIB, GIB), GIB),  # usage not told: never more than the limit
    ],
)
def test_available(
    monkeypatch: pytest.MonkeyPatch, machine: int, group: Allowance | None, left: int
) -> None:
    monkeypatch.setattr(memory, "machine_available", lambda: machine)
    monkeypatch.setattr(memory, "rss", lambda: 100 * MIB)
    monkeypatch.setattr(cgroup, "memory", lambda: group)
    least = min(machine, group.left if group else machine)
    assert memory.available() == left - memory.MARGIN - least // 32


def test_available_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: Allowance(MIB, 0))
    assert memory.available() == 0


@pytest.mark.parametrize("quota, count", [(None, 4), (1, 1), (3, 3), (9, 4), (0, 1)])
def test_cpus(monkeypatch: pytest.MonkeyPatch, quota: int | None, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setattr(cgroup, "processors", lambda: quota)
    assert memory.cpus() == count


def test_this_process() -> None:
    assert 0 < memory.rss() <= memory.peak_rss()
    assert memory.available() > 0 and memory.cpus() >= 1


REPORT = """
import os, sys
for path in sys.argv[1:]:
    with open(path + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from kimi_cli import cgroup, memory
print(cgroup.memory().limit, memory.available(), cgroup.processors(), memory.cpus())
"""


def _own_group(controller: str) -> Path | None:
    """The directory of this process's own group, where groups below it can be limited."""
    found = next(cgroup._groups(controller, cgroup.SELF), None)
    if found is None or not os.access(found[1], os.W_OK):
        return None
    if found[0] == 2:  # a group with processes passes no controller on
        enabled = (found[1] / "cgroup.subtree_control").read_text().split()
        return found[1] if controller in enabled else None
    return found[1]


def test_a_real_group() -> None:
    places = {name: _own_group(name) for name in ("memory", "cpu")}
    name = f"kimi-test-{uuid.uuid4().hex[:8]}"
    made: list[Path] = []
    try:
        for controller, parent in places.items():
            if parent is None:
                pytest.skip(f"no group with a {controller} limit can be made here")
            group = parent / name
            if group in made:
                continue
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"{parent} takes no new group: {error.strerror}")
            made.append(group)
        limits = {
            "memory.max": str(512 * MIB), "memory.limit_in_bytes": str(512 * MIB),
            "cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000",
        }  # fmt: skip
        for group in made:
            for file, text in limits.items():
                if (group / file).exists():
                    (group / file).write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", REPORT, *map(str, made)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        limit, available, quota, cpus = map(int, done.stdout.split())
        assert limit == 512 * MIB and 300 * MIB < available < 512 * MIB - memory.MARGIN
        assert quota == 1 and cpus == 1
    finally:
        for group in made:
            group.rmdir()
