"""`pieces` for training: the same functions, forward and backward in C (`fused.c`), by ctypes.

The library is compiled with the machine's gcc when this module is imported. Tensors are float32
on the CPU; KDA wants heads 32 wide and at most 256 tokens, a multiple of 16.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC")
_SLOTS = 8


def _compile() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fused.so"
        source = Path(__file__).with_name("fused.c")
        subprocess.run(["gcc", *_FLAGS, "-o", library, source, "-lm"], check=True)
        return ctypes.CDLL(str(library))


_lib = _compile()


def _call(name: str, *arguments: Tensor | int | float | ctypes.Array[Any] | None) -> None:
    passed: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous() and argument.dtype in (torch.float32, torch.int32)
            passed.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, float):
            passed.append(ctypes.c_float(argument))
        else:
            passed.append(argument)
    getattr(_lib, name)(*passed)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[Any]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, norm: Tensor, eps: float, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weight, norm, *sources)
        ctx.eps = eps
        out = torch.empty_like(sources[0])
        count, size = out.shape
        _call("mix_forward", count, size, len(sources), _pointers(sources), weight, norm, eps, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight, norm, *sources = ctx.saved_tensors
        count, size = grad.shape
        back = [torch.empty_like(source) for source in sources]
        parts = torch.zeros(2, _SLOTS, size)
        _call(
            "mix_backward", count, size, len(sources), _pointers(sources), weight, norm, ctx.eps,
            grad.contiguous(), _pointers(back), parts[0], parts[1],
        )  # fmt: skip
        return *parts.sum(1).unbind(), None, *back


def mix(sources: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `pieces.mix`."""
    return _Mix.apply(weight.contiguous(), norm, eps, *sources)


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: float, *inputs: Tensor) -> Tensor:
        inputs = tuple(x.contiguous() for x in inputs)
        ctx.save_for_backward(*inputs)
        ctx.bound = bound
        batch, length, _, heads, dim = inputs[0].shape
        assert dim == 32 and length % 16 == 0 and length <= 256 and inputs[1].shape[-1] == 4
        out = torch.empty(batch, length, heads, dim)
        _call("kda_forward", batch, length, heads, *inputs, bound, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raw, taps, z, beta, a_log, dt_bias = inputs = ctx.saved_tensors
        batch, length, _, heads, _ = raw.shape
        back = [torch.empty_like(x) for x in (raw, z, beta)]
        parts = [torch.empty(batch, *x.shape) for x in (taps, dt_bias, a_log)]
        _call(
            "kda_backward", batch, length, heads, *inputs, ctx.bound, grad.contiguous(), *back,
            *parts,
        )  # fmt: skip
        dtaps, dbias, dalog = (part.sum(0) for part in parts)
        return None, back[0], dtaps, back[1], back[2], dalog, dbias


def kda(
    raw: Tensor,
    taps: Tensor,
    z: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    bound: float,
) -> Tensor:
    """As `pieces.kda`."""
    return _Kda.apply(bound, raw, taps, z, beta, a_log, dt_bias)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        gate = gate.contiguous()
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        out, size = torch.empty_like(x), len(weight)
        _call("gated_norm_forward", x.numel() // size, size, size, x, weight, gate, eps, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, gate = ctx.saved_tensors
        size = len(weight)
        dx, dgate, parts = torch.empty_like(x), torch.empty_like(x), torch.zeros(_SLOTS, size)
        _call(
            "gated_norm_backward", x.numel() // size, size, size, x, weight, gate, ctx.eps,
            grad.contiguous(), dx, parts, dgate,
        )  # fmt: skip
        return dx, parts.sum(0), dgate, None


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """As `pieces.gated_norm`."""
    return _GatedNorm.apply(x, weight, gate, eps)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, beta: float, linear: float) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        ctx.scales = beta, linear
        width = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], width)
        _call("situ_forward", out.numel() // width, width, both, beta, linear, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (both,) = ctx.saved_tensors
        width = both.shape[-1] // 2
        back = torch.empty_like(both)
        count = grad.numel() // width
        _call("situ_backward", count, width, both, *ctx.scales, grad.contiguous(), back)
        return back, None, None


def situ(both: Tensor, beta: float, linear: float) -> Tensor:
    """As `pieces.situ`."""
    return _Situ.apply(both, beta, linear)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        out = x.new_empty(len(there), x.shape[1])
        _call("spread", len(there), x.shape[1], x.contiguous(), there, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        back = grad.new_empty(len(slots), grad.shape[1])
        _call("gather", *slots.shape, grad.shape[1], grad.contiguous(), slots, None, back)
        return back, None, None


def spread(x: Tensor, there: Tensor, slots: Tensor) -> Tensor:
    """As `pieces.spread`."""
    return _Spread.apply(x, there, slots)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, slots, weights)
        out = rows.new_empty(len(slots), rows.shape[1])
        _call("gather", *slots.shape, rows.shape[1], rows, slots, weights, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, slots, weights = ctx.saved_tensors
        back, dweights = torch.zeros_like(rows), torch.empty_like(weights)
        _call(
            "gather_backward", *slots.shape, rows.shape[1], rows, slots, weights,
            grad.contiguous(), back, dweights,
        )  # fmt: skip
        return back, None, dweights


def gather(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """As `pieces.gather`."""
    return _Gather.apply(rows.contiguous(), slots, weights.contiguous())


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        loss = logits.new_empty(len(logits))
        _call("entropy", *logits.shape, logits, wanted.int(), loss)
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable()
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad), None


def mean_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The mean of `pieces.entropy`; uses up `logits`."""
    return _Entropy.apply(logits, wanted)
