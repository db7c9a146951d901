"""tests/FAULTS.md, made by a test run: every fault that was tried, how often, and the outcome.

A test says what it tries with `@pytest.mark.fault(NAME, OUTCOME)`, and how often, if that is not
once, with `record_property("tried", N)`. A plugin of pytest; `--faults FILE` writes the table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE / "FAULTS.md"
HEAD = """# Faults

What is done to `kimi` by its tests, how often in the run that made this table (`make faults`; a
plain `make test` tries some of them less often), and what comes of it. Nothing is lost in any, no
text is printed as good after any, and none ends in a traceback.

| fault | tried | outcome |
|---|---:|---|
"""

_tried: dict[tuple[str, str], int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", metavar="FILE", help="write a table of the faults tried to FILE")
    parser.addoption("--long", action="store_true", help="try faults more often: minutes more")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name, outcome): a fault that the test tries")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.passed:
        times = dict(item.user_properties).get("tried", 1)
        for mark in item.iter_markers("fault"):
            _tried[mark.args] = _tried.get(mark.args, 0) + times
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--faults")
    if path:
        rows = (f"| {name} | {_tried[name, said]} | {said} |\n" for name, said in sorted(_tried))
        Path(path).write_text(HEAD + "".join(rows), "utf-8")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to try a fault often."""
    return bool(request.config.getoption("--long"))


def marked() -> set[tuple[str, str]]:
    """Every (name, outcome) that a test here is marked with."""
    found = set()
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
                name, outcome = map(ast.literal_eval, node.args)
                found.add((name, outcome))
    return found
