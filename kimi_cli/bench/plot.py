"""The ladder as a picture: seconds a token by budget, and where one token's time went.

The only place that knows matplotlib, an optional extra.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kimi_cli.bench.ladder import Rung
from kimi_cli.errors import KimiError, UsageError
from kimi_cli.units import GIB


def require_matplotlib() -> None:
    """Raises UsageError, with the command that installs it, if matplotlib is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'kimi-k3-cpu[plot]'")


def draw(rungs: Sequence[Rung], path: Path) -> None:
    """Writes the picture. Raises KimiError if it cannot be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    budgets = [rung.plan.budget / GIB for rung in rungs]
    speed.plot(budgets, [rung.seconds.total for rung in rungs], "o-", label="measured")
    speed.plot(budgets, [rung.limit for rung in rungs], "s--", label="limit: memory or disk")
    speed.set(xlabel="memory budget, GiB", ylabel="seconds a token", ylim=(0, None))
    speed.grid(alpha=0.3)
    speed.legend()
    places = range(len(rungs))
    computing = [rung.seconds.computing for rung in rungs]
    parts.bar(places, computing, 0.4, label="computing")
    parts.bar(
        places, [rung.seconds.waiting for rung in rungs], 0.4, bottom=computing, label="waiting"
    )
    shifted = [place + 0.4 for place in places]
    parts.bar(shifted, [rung.seconds.disk for rung in rungs], 0.4, label="disk busy, beside them")
    parts.set_xticks([place + 0.2 for place in places], [f"{budget:.1f}" for budget in budgets])
    parts.set(xlabel="memory budget, GiB", ylabel="seconds of one token")
    parts.legend()
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise KimiError(f"{path}: cannot be written: {error.strerror}") from None
