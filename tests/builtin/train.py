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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.builtin import fused, model, shape, workers
from tests.builtin.experts import Routing
from tests.builtin.optimise import Optimiser
from tests.builtin.pieces import entropy
from tests.builtin.quantise import stored
from tests.builtin.text import Streams, load_streams
from tests.builtin.vocabulary import VOCAB

LENGTH, BATCH = 256, 12
"""Tokens of a sequence, and sequences of a step."""
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
        ids = workers.own_rows(ids)
        logits, routings = logits_of(self.weights(), self.text, ids[:, :-1])
        mean = fused.mean_entropy(logits, ids[:, 1:].flatten())
        mean.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        loads = {layer: routing.load.float() for layer, routing in routings.items()}
        loss = mean.detach()
        workers.share([*gradients, *loads.values(), loss])
        self.optimiser.step(factor)
        for layer, load in loads.items():
            bias = self.parameters[f"model.layers.{layer}.{BIAS}"]
            bias += BALANCE_RATE * max(factor, 0.05) * torch.sign(load.mean() - load)
        self.step += 1
        return float(loss)

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
    log = Log(run.directory / "log.csv", run.step) if workers.is_first() else None
    saved = last_held = run.seconds
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    while True:
        progress = run.step / steps if steps else run.seconds / (60 * minutes)
        progress, stop = workers.from_first(progress, len(stopped))
        if progress >= 1 or stop:
            break
        began = time.perf_counter()
        loss = run.advance(batch(streams, run.seed, run.step, size), progress)
        if log is not None:
            held = None
            if run.seconds - last_held > HELD_SECONDS:
                last_held = run.seconds
                with torch.no_grad():
                    held = held_loss(run.weights(), run.text, streams.held[:8193])
            log.write(run, progress, loss, held)
            if run.seconds - saved > SAVE_SECONDS:
                saved = run.seconds
                run.save()
        run.seconds += time.perf_counter() - began
    if log is not None:
        run.save()


class Log:
    """log.csv, which goes on where a resumed run goes on; now and then a line is printed."""

    def __init__(self, path: Path, step: int) -> None:
        kept = []
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[0].isdigit() and int(row[0]) <= step]
        self._file = path.open("w", newline="")
        self._table = csv.writer(self._file)
        self._table.writerows([("step", "seconds", "progress", "loss", "held"), *kept])

    def write(self, run: Run, progress: float, loss: float, held: float | None) -> None:
        """One step's row."""
        known = "" if held is None else f"{held:.4f}"
        row = (run.step, f"{run.seconds:.1f}", f"{progress:.5f}", f"{loss:.4f}", known)
        self._table.writerow(row)
        if run.step % 20 == 0 or known:
            self._file.flush()
            print(*row, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    workers.start(args.workers, lambda: _work(args))


def _work(args: argparse.Namespace) -> None:
    run = Run(args.directory, args.seed)
    streams = load_streams(args.directory)
    train(run, streams, args.batch, args.minutes, args.steps)
    if workers.is_first():
        with torch.no_grad():
            loss = held_loss(run.weights(), run.text, streams.held)
        print(json.dumps({"steps": run.step, "seconds": round(run.seconds), "held": loss}))


if __name__ == "__main__":
    main()
