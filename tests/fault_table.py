"""tests/FAULTS.md, made by a test run: every fault that was tried, how often, and the outcome.

A test says what it tries with `@pytest.mark.fault(NAME, OUTCOME)`, and how often, if that is not
once, with `times=N` there or with `record_property("tried", N)`. A plugin of pytest; `--faults
FILE` writes the table; lines of what was not tried this time stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE / "FAULTS.md"
HEAD = """# Faults

What is done to `kimi` by its tests, how often when this line was made (`make faults`; a plain
`make test` tries some of them less often), and what comes of it. Nothing is lost in any, no text is
printed as good after any, and none ends in a traceback.

| fault | tried | outcome |
|---|---:|---|
"""

Fault = tuple[str, str]
"""Its name and its outcome."""

_tried: dict[Fault, int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", metavar="FILE", help="write a table of the faults tried to FILE")
    parser.addoption("--long", action="store_true", help="try faults more often: minutes more")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name, outcome, times=1): a fault that the test tries")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.passed:
        tried = dict(item.user_properties).get("tried")
        for mark in item.iter_markers("fault"):
            times = mark.kwargs.get("times", 1) if tried is None else tried
            _tried[mark.args] = _tried.get(mark.args, 0) + times
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--faults")
    if path:
        old = read(Path(path)) if Path(path).exists() else {}
        times = {fault: n for fault, n in {**old, **_tried}.items() if fault in marked()}
        rows = (f"| {name} | {times[name, said]} | {said} |\n" for name, said in sorted(times))
        Path(path).write_text(HEAD + "".join(rows), "utf-8")


def read(path: Path) -> dict[Fault, int]:
    """How often each fault was tried, by the table at `path`."""
    rows = path.read_text("utf-8").partition("|---|---:|---|\n")[2].splitlines()
    cells = (row.strip("| ").split(" | ") for row in rows)
    return {(name, said): int(times) for name, times, said in cells}


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to try a fault often."""
    return bool(request.config.getoption("--long"))


def marked() -> set[Fault]:
    """Every fault that a test here is marked with."""
    found = set()
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
                name, outcome = map(ast.literal_eval, node.args)
                found.add((name, outcome))
    return found
