"""Training by several processes of one thread each: they share every batch, and what they learn.

Two processes that meet once a step lose less to other programs than two threads that meet at every
operation. All do the same arithmetic on the same sums, so their parameters stay equal.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def share(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor, in place, by its mean over all workers."""
    found = list(tensors)
    if not dist.is_initialized():
        return
    flat = torch.cat([tensor.flatten() for tensor in found])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(found, flat.split([t.numel() for t in found]), strict=True):
        tensor.copy_(part.view_as(tensor))


def from_first(*values: float) -> list[float]:
    """The first worker's `values`, on all of them."""
    told = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(told, 0)
    return told.tolist()


def own_rows(batch: Tensor) -> Tensor:
    """This worker's share of a batch."""
    return batch[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else batch


def is_first() -> bool:
    """Whether this is the worker that writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def start(count: int, work: Callable[[], None]) -> None:
    """Runs `work` in `count` processes, this one the first of them, and ends with it."""
    torch.set_num_threads(1)
    if count == 1:
        work()
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        context = multiprocessing.get_context("fork")
        others = [
            context.Process(target=_join, args=(meeting, rank, count, work), daemon=True)
            for rank in range(1, count)
        ]
        for other in others:
            other.start()
        _join(meeting, 0, count, work)
        for other in others:
            other.join()


def _join(meeting: Path, rank: int, count: int, work: Callable[[], None]) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=count)
    work()
    dist.destroy_process_group()
