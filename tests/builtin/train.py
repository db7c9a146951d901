"""The training run: resumable from its folder, and the same again for the same seed and --steps.

    python -m tests.builtin.train DIR --minutes 55     as many steps as fit
    python -m tests.builtin.train DIR --steps 2400     exactly so many

DIR holds what `tests.builtin.text` wrote. log.csv and checkpoint.pt are added to it; a run that
finds a checkpoint goes on from it. SIGTERM ends it with its state saved.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.builtin import fused, model, shape
from tests.builtin.experts import Routing
from tests.builtin.optimise import Optimiser
from tests.builtin.pieces import entropy
from tests.builtin.quantise import stored
from tests.builtin.text import Streams, load_streams
from tests.builtin.vocabulary import VOCAB

LENGTH = 256
"""Tokens of a sequence."""
CHAT_SHARE = 0.12
"""Of the sequences, those in the chat format."""
WARM_UP, HOLD = 50, 0.3
"""Steps until the peak rate; the share of the run after which it falls, in a line to zero."""
BALANCE_RATE = 2e-3
"""How far a routing bias moves per step towards equal loads."""
SAVE_SECONDS, HELD_SECONDS = 120, 300

BIAS = "block_sparse_moe.gate.e_score_correction_bias"


def batch(streams: Streams, seed: int, step: int, size: int) -> Tensor:
    """Ids [size, LENGTH + 1] of step `step`: from a verse on, or from a conversation on."""
    draw = np.random.default_rng((seed, step))
    rows = []
    for _ in range(size):
        chat = draw.random() < CHAT_SHARE
        ids, starts = (streams.chat, streams.talks) if chat else (streams.train, streams.verses)
        starts = starts[: np.searchsorted(starts, len(ids) - LENGTH)]
        start = int(draw.choice(starts))
        rows.append(ids[start : start + LENGTH + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def rate_factor(step: int, progress: float) -> float:
    """The share of the peak rate at `progress`, 0 to 1, of the run."""
    fall = min(1.0, max(0.0, (1 - progress) / (1 - HOLD)))
    return min(1.0, (step + 1) / WARM_UP) * fall


def logits_of(
    w: model.Weights, text: dict[str, Any], ids: Tensor
) -> tuple[Tensor, dict[int, Routing]]:
    """Logits [B * T, vocab] after each of ids [B, T], and the routing."""
    out = model.forward(w, text, ids, fused)
    return out.hidden.flatten(0, 1) @ w["lm_head.weight"].T, out.routing


@torch.no_grad()
def held_loss(w: model.Weights, text: dict[str, Any], held: np.ndarray[Any, Any]) -> float:
    """Mean nats per token over `held`, in sequences of LENGTH that begin with no context."""
    count = (len(held) - 1) // LENGTH
    rows = np.stack([held[n * LENGTH : (n + 1) * LENGTH + 1] for n in range(count)])
    ids = torch.from_numpy(rows.astype(np.int64))
    found = [
        entropy(logits_of(w, text, part[:, :-1])[0], part[:, 1:].flatten())
        for part in ids.split(16)
    ]
    return float(torch.cat(found).mean())


class Run:
    """Everything that one training run carries from step to step."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.seed = directory, seed
        self.step, self.seconds = 0, 0.0
        self.config = shape.config(VOCAB)
        self.text: dict[str, Any] = self.config["text_config"]
        self.parameters = shape.initial(self.text, seed)
        self._path = directory / "checkpoint.pt"
        trained = {n: p for n, p in self.parameters.items() if not n.endswith(BIAS)}
        self.optimiser = Optimiser(trained)
        if self._path.exists():
            state = torch.load(self._path, weights_only=True)
            self.step, self.seconds = state["step"], state["seconds"]
            for name, value in state["parameters"].items():
                self.parameters[name].copy_(value)
            self.optimiser.load(state["optimiser"])
        for p in trained.values():
            p.requires_grad_()

    def weights(self) -> dict[str, Tensor]:
        """The parameters as the checkpoint will store them."""
        return {name: stored(name, p) for name, p in self.parameters.items()}

    def advance(self, ids: Tensor, progress: float) -> float:
        """One step on `ids`; the mean loss."""
        factor = rate_factor(self.step, progress)
        logits, routings = logits_of(self.weights(), self.text, ids[:, :-1])
        mean = fused.mean_entropy(logits, ids[:, 1:].flatten())
        mean.backward()
        self.optimiser.step(factor)
        for layer, routing in routings.items():
            load = routing.load.float()
            bias = self.parameters[f"model.layers.{layer}.{BIAS}"]
            bias += BALANCE_RATE * max(factor, 0.05) * torch.sign(load.mean() - load)
        self.step += 1
        return float(mean.detach())

    def save(self) -> None:
        """Writes checkpoint.pt, whole or not at all."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "optimiser": self.optimiser.state(),
        }
        torch.save(state, self._path.with_suffix(".tmp"))
        os.replace(self._path.with_suffix(".tmp"), self._path)


def train(run: Run, streams: Streams, size: int, minutes: float, steps: int) -> None:
    """Trains until `steps`, or for `minutes` in all where it is 0; writes the log as it goes."""
    log = run.directory / "log.csv"
    kept = [row for row in _rows(log) if int(row["step"]) <= run.step]
    with log.open("w", newline="") as file:
        table = csv.DictWriter(file, ("step", "seconds", "progress", "loss", "held"))
        table.writeheader()
        table.writerows(kept)
        saved = last_held = run.seconds
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        while not stopped:
            progress = run.step / steps if steps else run.seconds / (60 * minutes)
            if progress >= 1:
                break
            began = time.perf_counter()
            loss = run.advance(batch(streams, run.seed, run.step, size), progress)
            held = ""
            if run.seconds - last_held > HELD_SECONDS:
                last_held = run.seconds
                with torch.no_grad():
                    held = f"{held_loss(run.weights(), run.text, streams.held[:8193]):.4f}"
            run.seconds += time.perf_counter() - began
            row = (run.step, f"{run.seconds:.1f}", f"{progress:.5f}", f"{loss:.4f}", held)
            table.writerow(dict(zip(table.fieldnames, row, strict=True)))
            if run.step % 20 == 0 or held:
                file.flush()
                print(*row, flush=True)
            if run.seconds - saved > SAVE_SECONDS:
                saved = run.seconds
                run.save()
    run.save()


def _rows(log: Path) -> Iterator[dict[str, str]]:
    if log.exists():
        with log.open(newline="") as file:
            yield from csv.DictReader(file)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = Run(args.directory, args.seed)
    streams = load_streams(args.directory)
    train(run, streams, args.batch, args.minutes, args.steps)
    with torch.no_grad():
        loss = held_loss(run.weights(), run.text, streams.held)
    print(json.dumps({"steps": run.step, "seconds": round(run.seconds), "held": loss}))


if __name__ == "__main__":
    main()
