"""The kernels over the released widths, against memory reads and multiply-adds of the same run.

All operands lie in one buffer, larger than the caches and read in turn: no kernel finds its weights
where it left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kimi_cli import native
from kimi_cli.bench.contest import ROUNDS, Contender, Effort, best, cache_bytes, turns
from kimi_cli.bench.table import BYTES, FLOPS, WEIGHTS, Row
from kimi_cli.config import Config
from kimi_cli.layout import BLOCK_ROWS
from kimi_cli.native import F32, U8, Format, Matrix
from kimi_cli.predict import Kernel
from kimi_cli.stream import allocate
from kimi_cli.tensors import expert_shapes
from kimi_cli.units import MIB

COLUMNS = 32
"""Columns of a batched product."""
POSITIONS = 4096
"""Cached positions that attention runs over."""
FMA_ROUNDS = 4_000_000
SHORTER = 3
"""So many more turns, and each so much shorter: the quiet moments of a shared machine are short."""
_TABLE = bytes([*range(0x38, 0x40), *range(0xB8, 0xC0)])  # bf16 high bytes of about 1e-5 to 2
_SCALE = 112
_FORMATS = (Format.BF16, Format.PACKED)


class Operands:
    """One buffer seen as words, bf16 and packed matrices, experts, KDA states and latent caches.

    Any view may be read at any time; once `delta` has run, the bf16 values are of no use.
    """

    def __init__(self, config: Config, size: int) -> None:
        self.config = config
        shapes = expert_shapes(config)[:2]
        (self._rows, half), (_, groups) = shapes
        self.expert_bytes = self._rows * (half + groups)
        least = max(self._rows * half, 4 * config.kda_num_heads * config.kda_head_dim**2)
        size = max(size, least) // 4096 * 4096
        self.buffer = np.frombuffer(allocate(size), np.uint8)
        tile = np.random.default_rng(0).integers(0, 256, min(size, 16 * MIB), np.uint8)
        tile[1::2] = np.frombuffer(_TABLE, np.uint8)[tile[1::2] & 15]
        for at in range(0, size, len(tile)):
            part = self.buffer[at : at + len(tile)]
            part[:] = tile[: len(part)]
        count = size // (self._rows * half)
        scales = np.frombuffer(allocate(count * self._rows * groups), np.uint8)
        scales[:] = _SCALE
        self.experts = [
            (
                self.buffer[n * self._rows * half :][: self._rows * half].reshape(self._rows, half),
                scales[n * self._rows * groups :][: self._rows * groups].reshape(-1, groups),
            )
            for n in range(count)
        ]

    def matrices(self, fmt: Format) -> list[Matrix]:
        """Projections of the attention's width, or of fewer rows in a small buffer."""
        config, stride = self.config, native.row_bytes(fmt, self.config.hidden_size)
        fitting = len(self.buffer) // 2 // stride // BLOCK_ROWS * BLOCK_ROWS
        rows = max(min(config.kda_num_heads * config.kda_head_dim, fitting), BLOCK_ROWS)
        table = np.frombuffer(_TABLE, np.uint8)
        starts, escapes = np.zeros(rows + 1, np.uint32), np.empty(0, np.uint32)
        return [
            Matrix(
                fmt,
                rows,
                config.hidden_size,
                self.buffer[at : at + rows * stride],
                table,
                starts,
                escapes,
            )
            for at in range(0, len(self.buffer) - rows * stride + 1, rows * stride)
        ]

    def floats(self, *shape: int) -> list[F32]:
        """The buffer as arrays of this shape."""
        count = int(np.prod(shape))
        whole = self.buffer.view(np.float32)
        return [
            whole[at : at + count].reshape(shape) for at in range(0, len(whole) - count + 1, count)
        ]

    def read(self) -> Contender:
        """Memory reads, bytes a second."""
        words = self.buffer.view(np.uint64)
        return turns([partial(native.roof_read, words)], words.nbytes)

    def dense(self, fmt: Format, columns: int) -> Contender:
        """Dense products, weights a second."""
        found = self.matrices(fmt)
        x, y, work = _vectors(found[0].rows, found[0].cols, columns)
        calls = [partial(native.product, matrix, x, y, work) for matrix in found]
        return turns(calls, found[0].rows * found[0].cols)

    def mxfp4(self, columns: int) -> Contender:
        """Products of an expert's first matrix, weights a second."""
        cols = 2 * self.experts[0][0].shape[1]
        x, y, work = _vectors(self._rows, cols, columns)
        calls = [partial(native.product_mxfp4, p, s, x, y, work) for p, s in self.experts]
        return turns(calls, self._rows * cols)

    def delta(self) -> Contender:
        """Steps of one layer's KDA state, steps a second."""
        config, random = self.config, np.random.default_rng(2)
        heads, dim = config.kda_num_heads, config.kda_head_dim
        q, k, v, o = (random.standard_normal((1, heads, dim), np.float32) for _ in range(4))
        native.l2norm(q, 1e-6, dim**-0.5)
        native.l2norm(k, 1e-6, 1.0)
        decay, beta = np.full_like(q, 0.9), np.full((1, heads), 0.5, np.float32)
        states = self.floats(heads, dim, dim)
        return turns([partial(native.delta, s, q, k, v, decay, beta, o) for s in states], 1)

    def attend(self) -> Contender:
        """One layer's latent attention over `positions` positions, layers a second."""
        config, rope = self.config, self.config.qk_rope_head_dim
        rank, heads = config.kv_lora_rank, config.num_attention_heads
        caches = self.floats(self.positions, rank + rope)
        q = np.random.default_rng(3).standard_normal((1, heads, rank + rope), np.float32)
        out = np.empty((1, heads, rank), np.float32)
        work = np.empty(native.mla_scratch_floats(self.positions, heads, rank + rope), np.float32)
        scale = (config.qk_nope_head_dim + rope) ** -0.5
        last = self.positions - 1
        calls = [partial(native.mla_attend, c, last, rope, q, scale, out, work) for c in caches]
        return turns(calls, 1)

    @property
    def positions(self) -> int:
        """POSITIONS, or as many as the buffer holds."""
        width = 4 * (self.config.kv_lora_rank + self.config.qk_rope_head_dim)
        return min(POSITIONS, len(self.buffer) // width)


def operand_bytes(effort: Effort, available: int) -> int:
    """Bytes of the buffer: an eighth of memory at most."""
    return min(max(effort.buffer, effort.caches * cache_bytes()), available // 8)


def fma() -> Contender:
    """Multiply-adds, operations a second (two each)."""
    flops, _ = native.roof_fma(FMA_ROUNDS)
    return turns([partial(native.roof_fma, FMA_ROUNDS)], flops)


@dataclass(frozen=True)
class Kernels:
    """What was measured: the table, and the rates that other parts build on.

    `products` are seconds per weight by format's name, mxfp4 included; `delta` seconds of a layer's
    KDA step, `attend` of a layer's attention per cached position.
    """

    rows: Sequence[Row]
    products: dict[str, Kernel]
    read: float
    delta: float
    attend: float


def measure_kernels(operands: Operands, seconds: float) -> Kernels:
    """Half a minute or so. Afterwards only words, experts and floats of `operands` are of use."""
    config, size = operands.config, _expert_weight_bytes(operands)
    turn, rounds = seconds / SHORTER, ROUNDS * SHORTER
    names = {fmt: fmt.name.lower() for fmt in _FORMATS}
    one = best(
        {
            "read": operands.read(),
            **{names[fmt]: operands.dense(fmt, 1) for fmt in _FORMATS},
            "mxfp4": operands.mxfp4(1),
        },
        turn,
        rounds,
    )
    many = best(
        {
            "fma": fma(),
            **{names[fmt]: operands.dense(fmt, COLUMNS) for fmt in _FORMATS},
            "mxfp4": operands.mxfp4(COLUMNS),
        },
        turn,
        rounds,
    )
    layer = best(
        {
            "read": operands.read(),
            "fma": fma(),
            "attend": operands.attend(),
            "delta": operands.delta(),
        },
        turn,
        rounds,
    )
    rows = [_read_row(f"{names[f]}, one column", one[names[f]] * _bytes(f), one) for f in _FORMATS]
    rows += [
        Row("kernels", "packed against bf16", WEIGHTS, one["packed"], one["bf16"], "bf16"),
        _read_row("mxfp4, one column", one["mxfp4"] * size, one),
    ]
    for name in (*names.values(), "mxfp4"):
        flops = 2 * COLUMNS * many[name]
        title = f"{name}, {COLUMNS} columns"
        rows.append(Row("kernels", title, FLOPS, flops, many["fma"], "multiply-adds"))
    state = 4 * config.kda_num_heads * config.kda_head_dim**2
    width = config.kv_lora_rank + config.qk_rope_head_dim
    title = f"latent attention, {operands.positions:,} positions"
    work = 2 * config.num_attention_heads * operands.positions * (width + config.kv_lora_rank)
    rows += [
        _read_row("KDA step, read and written", layer["delta"] * 2 * state, layer),
        _read_row(title, layer["attend"] * 4 * operands.positions * width, layer),
        Row("kernels", title, FLOPS, layer["attend"] * work, layer["fma"], "multiply-adds"),
    ]
    products = {
        name: kernel_of(1 / one[name], 1 / many[name]) for name in (*names.values(), "mxfp4")
    }
    attend = 1 / layer["attend"] / operands.positions
    return Kernels(rows, products, one["read"], 1 / layer["delta"], attend)


def kernel_of(first: float, all_columns: float) -> Kernel:
    """Seconds per weight of one column and of a further one, from those of 1 and of COLUMNS."""
    return Kernel(first, max(all_columns - first, 0.0) / (COLUMNS - 1))


def _read_row(name: str, rate: float, found: dict[str, float]) -> Row:
    return Row("kernels", name, BYTES, rate, found["read"], "memory reads")


def _bytes(fmt: Format) -> float:
    """Bytes that one weight takes."""
    return native.row_bytes(fmt, native.PACKED_BLOCK) / native.PACKED_BLOCK


def _expert_weight_bytes(operands: Operands) -> float:
    packed: U8 = operands.experts[0][0]
    return operands.expert_bytes / (2 * packed.size)


def _vectors(rows: int, cols: int, columns: int) -> tuple[F32, F32, F32]:
    x = np.random.default_rng(1).standard_normal((columns, cols), np.float32)
    y = np.empty((columns, rows), np.float32)
    return x, y, np.empty(native.scratch_floats(cols, columns), np.float32)
