"""What the model card says of a run: losses on held-out chapters, routing, the loss curve.

    python -m tests.builtin.evaluate DIR [CURVE.png]      writes DIR/report.json

Losses are nats per token over the same tokens for all three models: sequences of 256 that begin
with one token of context.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tests.builtin.ngram import KneserNey
from tests.builtin.text import load_streams
from tests.builtin.train import LENGTH, Run, held_loss, logits_of
from tests.builtin.vocabulary import VOCAB


@torch.no_grad()
def routing_counts(run: Run, held: Sequence[int]) -> NDArray[np.int64]:
    """How often each expert of each layer is chosen on `held`, [expert layers, experts]."""
    weights = run.weights()
    count = len(held) // LENGTH
    ids = torch.tensor(held[: count * LENGTH]).view(count, LENGTH).long()
    total = 0
    for part in ids.split(16):
        routing = logits_of(weights, run.text, part)[1]
        total = total + torch.stack([routing[layer].load for layer in sorted(routing)])
    assert isinstance(total, torch.Tensor)
    return total.numpy()


def draw_curve(log: Path, out: Path, baselines: dict[str, float]) -> None:
    """The loss over tokens as a small PNG, the baselines as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = np.array([int(row["step"]) for row in rows])
    loss = np.array([float(row["loss"]) for row in rows])
    held = [(int(row["step"]), float(row["held"])) for row in rows if row["held"]]
    width = max(1, len(loss) // 200)
    smooth = np.convolve(loss, np.ones(width) / width, "valid")
    figure, axes = plt.subplots(figsize=(6, 3), dpi=90)
    axes.plot(steps[width - 1 :], smooth, lw=1, label="training")
    if held:
        axes.plot(*zip(*held, strict=True), "o", ms=3, label="held out")
    for name, value in baselines.items():
        axes.axhline(value, lw=0.8, ls="--", color="gray")
        axes.annotate(name, (steps[-1], value), ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="step", ylabel="nats per token", ylim=(2, 6.5))
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """The command line."""
    directory = Path(sys.argv[1])
    run, streams = Run(directory, 0), load_streams(directory)
    train, held = streams.train.tolist(), streams.held.tolist()
    baselines = {
        name: KneserNey(train, order, VOCAB).loss(held, LENGTH)
        for name, order in (("bigram", 2), ("trigram", 3))
    }
    with torch.no_grad():
        loss = held_loss(run.weights(), run.text, streams.held)
    counts = routing_counts(run, held)
    report = {
        "steps": run.step,
        "minutes": round(run.seconds / 60),
        "held": round(loss, 3),
        **{name: round(value, 3) for name, value in baselines.items()},
        "held_tokens": len(held),
        "routing": counts.tolist(),
    }
    (directory / "report.json").write_text(json.dumps(report) + "\n", "utf-8")
    print(json.dumps(report))
    if len(sys.argv) > 2:
        draw_curve(directory / "log.csv", Path(sys.argv[2]), baselines)


if __name__ == "__main__":
    main()
