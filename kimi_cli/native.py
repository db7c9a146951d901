"""The one door to the compiled extension: checks shapes, types and contiguity, then calls C.

Arrays are numpy float32 unless said otherwise. A two-dimensional argument may be strided by rows;
its last axis is contiguous. Nothing here keeps a pointer beyond the call, except `Matrix`, `Expert`
and `Calls`, which keep their arrays alive. The GIL is released in every call: an array belongs to
one call at a time. Settings (`set_isa`, `set_threads`) are process-wide and must not be changed
while a call runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kimi_cli._native import ffi, lib
from kimi_cli.errors import CheckpointError, KimiError, NumericError, UsageError
from kimi_cli.threads import require

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Format(IntEnum):
    """How the weights of a dense product are stored."""

    BF16 = lib.KIMI_BF16
    F32 = lib.KIMI_F32
    PACKED = lib.KIMI_PACKED


ISAS = {
    "scalar": lib.KIMI_ISA_SCALAR,
    "avx2": lib.KIMI_ISA_AVX2,
    "avx512": lib.KIMI_ISA_AVX512,
    "neon": lib.KIMI_ISA_NEON,
}
MAX_THREADS: int = lib.KIMI_MAX_THREADS
_FLOAT, _FLOATS = np.dtype(np.float32), ffi.typeof("float[]")
PACKED_BLOCK = 64
PACKED_BLOCK_BYTES = 96


def supported_isas() -> list[str]:
    """Names of the instruction sets this CPU and this build have, slowest first."""
    return [name for name, number in ISAS.items() if lib.kimi_isa_supported(number)]


def set_isa(name: str) -> str:
    """Selects an instruction set, `auto` being the best there is; returns its name."""
    chosen = supported_isas()[-1] if name == "auto" else name
    if chosen not in ISAS or lib.kimi_isa_set(ISAS[chosen]) != 0:
        have = ", ".join(supported_isas())
        raise UsageError(f"instruction set {name!r} is not available here: this CPU has {have}")
    return chosen


def isa() -> str:
    """Name of the instruction set in use."""
    return next(name for name, number in ISAS.items() if number == lib.kimi_isa())


def set_threads(count: int) -> None:
    """Number of threads an operation may use, 1 to MAX_THREADS. Raises KimiError if the system has
    not so many: OpenMP, which starts them at their first use, would end the process."""
    if not 1 <= count <= MAX_THREADS:
        raise UsageError(f"{count} threads are not possible: 1 to {MAX_THREADS} are")
    require(count - 1)
    _call(lib.kimi_threads_set, count)


class Calls:
    """Operations with their arguments, to be done again: the arrays behind them are still there,
    and hold what the operations should then work on."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], object]] = []

    def add(self, function: Any, arguments: tuple[Any, ...], behind: object) -> None:
        """One more, after the others; what is `behind` its arguments is kept alive too."""
        self._calls.append((function, arguments, behind))

    def __call__(self) -> None:
        for function, arguments, _ in self._calls:
            status = function(*arguments)
            if status:
                _refused(status, function)


_recorded: Calls | None = None


@contextmanager
def recording() -> Iterator[Calls]:
    """Keeps the operations that are done meanwhile, which no other thread may do any of."""
    global _recorded
    _recorded = calls = Calls()
    try:
        yield calls
    finally:
        _recorded = None


def _call(function: Any, *arguments: Any, behind: object = None) -> None:
    """An operation; `behind` is what some argument only points to. Raises KimiError, of the kind
    that its status means."""
    if _recorded is not None:
        _recorded.add(function, arguments, behind)
    status = function(*arguments)
    if status:
        _refused(status, function)


def _refused(status: int, function: Any) -> NoReturn:
    if status == lib.KIMI_E_ESCAPES:
        raise CheckpointError(
            "packed weights have escapes out of order: the trunk was not written by kimi repack; "
            "delete it and run kimi repack"
        )
    if status == lib.KIMI_E_NUMERIC:
        raise NumericError("the logits hold NaN or infinity: no token can be chosen from them")
    raise KimiError(f"internal error: {function.__name__} refused its arguments ({status})")


def _raw(array: NDArray[Any], dtype: Any) -> int:
    """Address of a contiguous array of exactly this dtype."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"want contiguous {np.dtype(dtype)}, got {array.dtype}")
    return int(ffi.cast("uintptr_t", ffi.from_buffer(array)))


def _flat(array: F32, *shape: int) -> Any:
    """Pointer to a contiguous float32 array of exactly this shape."""
    if array.dtype != _FLOAT or array.shape != shape:
        raise ValueError(f"want contiguous float32 {shape}, got {array.dtype} {array.shape}")
    return ffi.from_buffer(_FLOATS, array)  # a ValueError where it is not contiguous


def _vector(array: NDArray[Any], size: int, dtype: Any, pointer: str) -> Any:
    """`pointer` to a contiguous array [size] of exactly this dtype."""
    if array.shape != (size,):
        raise ValueError(f"want [{size}], got {array.shape}")
    return ffi.cast(pointer, _raw(array, dtype) or 1)


def _rows(array: F32, cols: int) -> tuple[Any, int]:
    """Pointer to and row stride of a float32 array [count, cols] whose rows are contiguous."""
    if array.dtype != _FLOAT or array.ndim != 2 or array.shape[1] != cols:
        raise ValueError(f"want float32 [n, {cols}], got {array.dtype} {array.shape}")
    if array.flags.c_contiguous:
        return ffi.from_buffer(_FLOATS, array), cols
    if array.strides[1] != 4 or array.strides[0] % 4:
        raise ValueError("want rows that are contiguous")
    address = array.__array_interface__["data"][0]  # slow, and it churns Python's interned strings
    return ffi.cast("float *", address), array.strides[0] // 4


class Matrix:
    """`rows` x `cols` weights somewhere in memory, ready to be multiplied.

    `data` is bytes: [rows, cols] bf16 or float32, or packed rows. `starts` (uint32 [rows + 1]) and
    `escapes` (uint32), with `table` (uint8 [16]), belong to the packed format. `starts` may be a
    slice of a longer matrix's: it need not begin at 0.
    """

    __slots__ = ("_kept", "cols", "format", "rows", "struct")

    def __init__(
        self,
        fmt: Format,
        rows: int,
        cols: int,
        data: U8,
        table: U8 | None = None,
        starts: NDArray[np.uint32] | None = None,
        escapes: NDArray[np.uint32] | None = None,
    ) -> None:
        if data.nbytes < row_bytes(fmt, cols) * rows or not data.flags.c_contiguous:
            raise ValueError(f"{rows} x {cols} weights do not lie in {data.nbytes} bytes")
        self.format, self.rows, self.cols = fmt, rows, cols
        struct = ffi.new("kimi_matrix *")
        struct.format, struct.rows, struct.cols = int(fmt), rows, cols
        struct.data = ffi.cast("void *", _raw(data, np.uint8))
        if fmt == Format.PACKED:
            if table is None or starts is None or escapes is None:
                raise ValueError("packed weights need a table, starts and escapes")
            if len(table) != 16 or len(starts) != rows + 1:
                raise ValueError("table or starts of the wrong length")
            struct.table = ffi.cast("uint8_t *", _raw(table, np.uint8))
            struct.starts = ffi.cast("uint32_t *", _raw(starts, np.uint32))
            struct.escapes = ffi.cast("uint32_t *", _raw(escapes, np.uint32) or 1)
            struct.escape_count = len(escapes)
        self.struct = struct
        self._kept = (data, table, starts, escapes)


def row_bytes(fmt: Format, cols: int) -> int:
    """Stored bytes of one row."""
    if fmt == Format.PACKED:
        return cols // PACKED_BLOCK * PACKED_BLOCK_BYTES
    return cols * (2 if fmt == Format.BF16 else 4)


def scratch_floats(cols: int, count: int) -> int:
    """Floats of scratch that a product of `count` columns of length `cols` needs."""
    return int(lib.kimi_scratch(cols, count))


def _scratch(scratch: F32, floats: int) -> Any:
    if scratch.size < floats:
        raise ValueError(f"scratch of {scratch.size} floats, {floats} are needed")
    return _flat(scratch, scratch.size)


def product(w: Matrix, x: F32, y: F32, scratch: F32, again: bool = False) -> None:
    """y [count, rows] = x [count, cols] W^T, in the dense product's order.

    `again`: `scratch` is as the product before left it, of the same x by another piece of W.
    """
    x_ptr, x_stride = _rows(x, w.cols)
    if again:
        x_ptr = ffi.NULL
    y_ptr, y_stride = _rows(y, w.rows)
    if len(x) != len(y):
        raise ValueError("x and y differ in count")
    work = _scratch(scratch, scratch_floats(w.cols, len(x)))
    _call(lib.kimi_product, w.struct, x_ptr, x_stride, len(x), y_ptr, y_stride, work)


def products(weights: Sequence[Matrix], x: F32, ys: Sequence[F32], scratch: F32) -> None:
    """ys[i] [count, rows] = x [count, cols] W_i^T, for matrices of as many columns."""
    cols, count = weights[0].cols, len(x)
    if any(w.cols != cols for w in weights) or any(len(y) != count for y in ys):
        raise ValueError("matrices of different columns, or arrays of different counts")
    x_ptr, x_stride = _rows(x, cols)
    places = [_rows(y, w.rows) for w, y in zip(weights, ys, strict=True)]
    _call(
        lib.kimi_products,
        ffi.new("kimi_matrix *[]", [w.struct for w in weights]),
        len(weights),
        x_ptr,
        x_stride,
        count,
        ffi.new("float *[]", [pointer for pointer, _ in places]),
        ffi.new("int64_t[]", [stride for _, stride in places]),
        _scratch(scratch, scratch_floats(cols, count)),
        behind=(weights, places),
    )


def product_mxfp4(packed: U8, scales: U8, x: F32, y: F32, scratch: F32) -> None:
    """y [count, rows] = x [count, cols] W^T; packed [rows, cols/2] and scales [rows, cols/32]."""
    rows, cols = packed.shape[0], packed.shape[1] * 2
    if scales.shape != (rows, cols // 32) or cols % 32:
        raise ValueError(f"scales {scales.shape} do not fit packed {packed.shape}")
    x_ptr, x_stride = _rows(x, cols)
    y_ptr, y_stride = _rows(y, rows)
    if len(x) != len(y):
        raise ValueError("x and y differ in count")
    _call(
        lib.kimi_product_mxfp4,
        ffi.cast("uint8_t *", _raw(packed, np.uint8)),
        ffi.cast("uint8_t *", _raw(scales, np.uint8)),
        rows,
        cols,
        x_ptr,
        x_stride,
        len(x),
        y_ptr,
        y_stride,
        _scratch(scratch, scratch_floats(cols, len(x))),
    )


class Expert:
    """A routed expert somewhere in memory, ready to be computed.

    `weights` are packed [rows, cols/2] and scales [rows, cols/32] of W1, W2 and W3 in turn: W1 and
    W3 [inter, latent], W2 [latent, inter].
    """

    __slots__ = ("inter", "latent", "struct", "weights")

    def __init__(self, weights: Sequence[U8]) -> None:
        inter, latent = self.inter, self.latent = weights[0].shape[0], weights[0].shape[1] * 2
        self.struct = ffi.new("kimi_expert *")
        self.weights = weights
        for name, at in (("w1", 0), ("w2", 2), ("w3", 4)):
            packed, scales = weights[at : at + 2]
            rows, cols = (latent, inter) if name == "w2" else (inter, latent)
            if packed.shape != (rows, cols // 2) or scales.shape != (rows, cols // 32) or cols % 32:
                raise ValueError(f"{packed.shape} and {scales.shape} are no {rows} x {cols}")
            matrix = getattr(self.struct, name)
            matrix.packed = ffi.cast("uint8_t *", _raw(packed, np.uint8))
            matrix.scales = ffi.cast("uint8_t *", _raw(scales, np.uint8))


def experts_scratch_floats(latent: int, inter: int, most: int) -> int:
    """Floats of scratch that `experts` needs if no expert has more than `most` places."""
    return int(lib.kimi_experts_scratch(latent, inter, most))


def experts(
    wanted: Sequence[tuple[Expert, Sequence[int]]],
    x: F32,
    gate: F32,
    up: F32,
    y: F32,
    out: F32,
    beta: float,
    linear_beta: float,
    scratch: F32,
) -> None:
    """out[p // k, p % k] = W2 situ(W1 x[p // k], W3 x[p // k]) for each expert and its places p.

    x [count, latent], out [count, k, latent]. `gate` and `up`, [most, inter], and `y`,
    [most, latent], are overwritten; `most`: as many places as one expert may have.
    """
    inter, latent = wanted[0][0].inter, wanted[0][0].latent
    (count, k, _), most = out.shape, len(gate)
    if any((w.inter, w.latent) != (inter, latent) for w, _ in wanted):
        raise ValueError("experts of different sizes")
    places = [place for _, places in wanted for place in places]
    _call(
        lib.kimi_experts,
        [w.struct for w, _ in wanted],
        len(wanted),
        [0, *accumulate(len(places) for _, places in wanted)],
        places,
        latent,
        inter,
        beta,
        linear_beta,
        _flat(x, count, latent),
        count,
        k,
        most,
        _flat(gate, most, inter),
        _flat(up, most, inter),
        _flat(y, most, latent),
        _flat(out, count, k, latent),
        _scratch(scratch, experts_scratch_floats(latent, inter, most)),
    )


def scale_nan(scales: U8) -> int:
    """Index of the first scale byte that means NaN, or -1."""
    pointer = ffi.from_buffer("uint8_t[]", scales)
    return int(lib.kimi_scale_nan(pointer, scales.size))


def crc32c(data: Any, start: int = 0) -> int:
    """CRC-32C of a bytes-like object; `start` is the CRC of what went before."""
    view = ffi.from_buffer(data)
    return int(lib.kimi_crc32c(start, view, len(view)))


def pack_histogram(weights: NDArray[np.uint16], counts: NDArray[np.int64]) -> None:
    """Adds to counts [256] how often each high byte occurs in bf16 `weights`."""
    if counts.shape != (256,) or counts.dtype != np.int64 or weights.dtype != np.uint16:
        raise ValueError("want uint16 weights and int64 counts [256]")
    pointer = ffi.from_buffer("uint16_t[]", weights)
    into = ffi.from_buffer("int64_t[]", counts, require_writable=True)
    _call(lib.kimi_pack_histogram, pointer, weights.size, into)


def pack_escapes(weights: NDArray[np.uint16], table: U8) -> int:
    """How many bf16 `weights` have a high byte that is not in table [16]."""
    if weights.dtype != np.uint16 or table.shape != (16,) or table.dtype != np.uint8:
        raise ValueError("want uint16 weights and a table of 16 bytes")
    return int(
        lib.kimi_pack_escapes(
            ffi.from_buffer("uint16_t[]", weights),
            weights.size,
            ffi.from_buffer("uint8_t[]", table),
        )
    )


def pack_rows(
    weights: NDArray[np.uint16],
    table: U8,
    packed: U8,
    starts: NDArray[np.uint32],
    escapes: NDArray[np.uint32],
) -> None:
    """Packs bf16 weights [rows, cols] (cols a multiple of 64).

    Writes packed [rows, cols/64*96], starts [rows + 1] continuing from starts[0], and
    escapes[starts[0] : starts[-1]], which must have room.
    """
    rows, cols = weights.shape
    if packed.shape != (rows, row_bytes(Format.PACKED, cols)) or starts.shape != (rows + 1,):
        raise ValueError("packed or starts of the wrong shape")
    if int(starts[0]) + pack_escapes(weights, table) > len(escapes):
        raise ValueError("no room for the escapes")
    _call(
        lib.kimi_pack_rows,
        ffi.from_buffer("uint16_t[]", weights),
        rows,
        cols,
        ffi.from_buffer("uint8_t[]", table),
        ffi.cast("uint8_t *", _raw(packed, np.uint8)),
        ffi.cast("uint32_t *", _raw(starts, np.uint32)),
        ffi.cast("uint32_t *", _raw(escapes, np.uint32) or 1),
    )


def unpack_rows(w: Matrix, out: NDArray[np.uint16]) -> None:
    """Exact bf16 weights [rows, cols] of a packed matrix."""
    if out.shape != (w.rows, w.cols) or out.dtype != np.uint16 or not out.flags.c_contiguous:
        raise ValueError(f"want contiguous uint16 [{w.rows}, {w.cols}]")
    _call(lib.kimi_unpack_rows, w.struct, ffi.cast("uint16_t *", _raw(out, np.uint16)))


def widen(fmt: Format, source: U8, out: F32) -> None:
    """Exact float32 values of bf16 or float32 bytes; any alignment."""
    if source.nbytes != out.size * (2 if fmt == Format.BF16 else 4):
        raise ValueError(f"{source.nbytes} bytes do not hold {out.size} values")
    _call(
        lib.kimi_widen,
        int(fmt),
        ffi.cast("void *", _raw(source, np.uint8)),
        out.size,
        _flat(out, *out.shape),
    )


def _elementwise(name: str, x: F32, y: F32) -> None:
    _call(getattr(lib, name), _flat(x, *x.shape), x.size, _flat(y, *x.shape))


def exp(x: F32, y: F32) -> None:
    """y = e^x."""
    _elementwise("kimi_exp", x, y)


def sigmoid(x: F32, y: F32) -> None:
    """y = 1 / (1 + e^-x); y may be x."""
    _elementwise("kimi_sigmoid", x, y)


def tanh(x: F32, y: F32) -> None:
    """y = tanh x."""
    _elementwise("kimi_tanh", x, y)


def add(x: F32, y: F32) -> None:
    """y = y + x."""
    _elementwise("kimi_add", x, y)


def gate(x: F32, by: F32, y: F32) -> None:
    """y = x sigmoid(by); y may be x."""
    _call(lib.kimi_gate, _flat(x, *x.shape), _flat(by, *x.shape), x.size, _flat(y, *x.shape))


def situ(g: F32, u: F32, beta: float, linear_beta: float, y: F32) -> None:
    """y = beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta); y may be g or u."""
    _call(
        lib.kimi_situ,
        _flat(g, *g.shape),
        _flat(u, *g.shape),
        g.size,
        beta,
        linear_beta,
        _flat(y, *g.shape),
    )


def rmsnorm(x: F32, weight: F32, eps: float, y: F32) -> None:
    """Row-wise RMS norm of x [count, n] into y [count, n], both perhaps strided; y may be x."""
    n = x.shape[1]
    x_ptr, x_stride = _rows(x, n)
    y_ptr, y_stride = _rows(y, n)
    if len(x) != len(y):
        raise ValueError("x and y differ in count")
    _call(lib.kimi_rmsnorm, x_ptr, x_stride, len(x), n, _flat(weight, n), eps, y_ptr, y_stride)


def mix(sources: Sequence[F32], norm: F32, proj: F32, eps: float, y: F32) -> None:
    """Attention residual of sources [count, n] each, into y [count, n] (not one of them)."""
    count, n = y.shape
    pointers = [_flat(s, count, n) for s in sources]
    _call(
        lib.kimi_mix,
        ffi.new("float *[]", pointers),
        len(sources),
        count,
        n,
        _flat(norm, n),
        _flat(proj, n),
        eps,
        _flat(y, count, n),
        behind=pointers,
    )


def conv(x: F32, weight: F32, history: F32, y: F32) -> None:
    """Causal depthwise convolution and SiLU of x [count, channels]; weight [channels, taps].

    history [taps - 1, channels] holds the columns before x and is moved on. y is not x.
    """
    count, channels = x.shape
    taps = weight.shape[1]
    _call(
        lib.kimi_conv,
        _flat(x, count, channels),
        count,
        channels,
        taps,
        _flat(weight, channels, taps),
        _flat(history, taps - 1, channels),
        _flat(y, count, channels),
    )


def l2norm(x: F32, eps: float, scale: float) -> None:
    """x [count, heads, dim] /= sqrt(sum of squares + eps) per head, times scale, in place."""
    _call(lib.kimi_l2norm, _flat(x, *x.shape), *x.shape, eps, scale)


def decay(z: F32, a_log: F32, dt_bias: F32, lower_bound: float, y: F32) -> None:
    """Factors exp(g) that decay the KDA state; z, y [count, heads, dim], a_log [heads]."""
    _, heads, dim = z.shape
    _call(
        lib.kimi_decay,
        _flat(z, *z.shape),
        *z.shape,
        _flat(a_log, heads),
        _flat(dt_bias, heads * dim),
        lower_bound,
        _flat(y, *z.shape),
    )


def delta(state: F32, q: F32, k: F32, v: F32, factors: F32, beta: F32, o: F32) -> None:
    """Delta-rule steps: state [heads, dim, dim], beta [count, heads], the rest
    [count, heads, dim].
    """
    count, heads, dim = q.shape
    _call(
        lib.kimi_delta,
        _flat(state, heads, dim, dim),
        count,
        heads,
        dim,
        *(_flat(a, count, heads, dim) for a in (q, k, v, factors)),
        _flat(beta, count, heads),
        _flat(o, count, heads, dim),
    )


def gated_norm(x: F32, by: F32, weight: F32, eps: float, y: F32) -> None:
    """y = rmsnorm(x) sigmoid(by) within each head; x, by, y [count, heads, dim]; weight [dim]."""
    _call(
        lib.kimi_gated_norm,
        _flat(x, *x.shape),
        _flat(by, *x.shape),
        *x.shape,
        _flat(weight, x.shape[2]),
        eps,
        _flat(y, *x.shape),
    )


def mla_absorb(kv_b: Matrix, heads: int, nope: int, rope: int, q: F32, out: F32) -> None:
    """Queries in latent space: q [count, heads (nope + rope)] -> out [count, heads (rank + rope)].

    `kv_b` holds just these heads' rows, (nope + value) each.
    """
    q_ptr, q_stride = _rows(q, heads * (nope + rope))
    out_ptr, out_stride = _rows(out, heads * (kv_b.cols + rope))
    if len(q) != len(out):
        raise ValueError("q and out differ in count")
    _call(
        lib.kimi_mla_absorb,
        kv_b.struct,
        heads,
        nope,
        rope,
        q_ptr,
        q_stride,
        len(q),
        out_ptr,
        out_stride,
    )


def mla_scratch_floats(positions: int, heads: int, width: int) -> int:
    """Floats of scratch that `heads` heads need for `positions` cached positions of `width`."""
    return int(lib.kimi_mla_scratch(positions, heads, width))


def mla_attend(
    cache: F32, start: int, rope: int, q: F32, scale: float, out: F32, work: F32
) -> None:
    """Latent attention: q [count, heads, rank + rope] over cache [>= start + count, rank + rope].

    Token t sees the first start + t + 1 positions. out [count, heads, rank].
    """
    count, heads, width = q.shape
    if cache.shape[0] < start + count or cache.shape[1] != width:
        raise ValueError(f"cache {cache.shape} is too small for {start} + {count} positions")
    _call(
        lib.kimi_mla_attend,
        _flat(cache, *cache.shape),
        start,
        count,
        heads,
        width - rope,
        rope,
        _flat(q, count, heads, width),
        scale,
        _flat(out, count, heads, width - rope),
        _scratch(work, mla_scratch_floats(start + count, heads, width)),
    )


def mla_values(kv_b: Matrix, heads: int, nope: int, latent: F32, y: F32, scratch: F32) -> None:
    """y [count, heads value] = W_v[h] latent[t, h]; latent [count, heads rank]."""
    count, rank = len(latent), kv_b.cols
    latent_ptr, latent_stride = _rows(latent, heads * rank)
    y_ptr, y_stride = _rows(y, heads * (kv_b.rows // heads - nope))
    if count != len(y):
        raise ValueError("latent and y differ in count")
    _call(
        lib.kimi_mla_values,
        kv_b.struct,
        heads,
        nope,
        rank,
        latent_ptr,
        latent_stride,
        count,
        y_ptr,
        y_stride,
        _scratch(scratch, scratch_floats(rank, count * heads)),
    )


def mla(
    kv_b: Matrix,
    nope: int,
    rope: int,
    cache: F32,
    start: int,
    q: F32,
    scale: float,
    queries: F32,
    latent: F32,
    attend: F32,
    y: F32,
    scratch: F32,
) -> None:
    """The three in turn: y [count, heads value] of the heads of `kv_b` from q [count, heads (nope +
    rope)]. `queries` [count, heads, rank + rope] and `latent` [count, heads, rank] are overwritten;
    `attend` and `scratch` are the scratch of the second and of the third.
    """
    (count, heads, rank), width = latent.shape, cache.shape[1]
    if cache.shape[0] < start + count or (rank, width) != (kv_b.cols, kv_b.cols + rope):
        raise ValueError(f"cache {cache.shape} does not suit {kv_b.cols} and {start} + {count}")
    q_ptr, q_stride = _rows(q, heads * (nope + rope))
    y_ptr, y_stride = _rows(y, heads * (kv_b.rows // heads - nope))
    if count != len(q) or count != len(y):
        raise ValueError("q, latent and y differ in count")
    _call(
        lib.kimi_mla,
        kv_b.struct,
        heads,
        nope,
        rope,
        _flat(cache, *cache.shape),
        start,
        count,
        q_ptr,
        q_stride,
        scale,
        _flat(queries, count, heads, width),
        _flat(latent, count, heads, rank),
        _scratch(attend, mla_scratch_floats(start + count, heads, width)),
        y_ptr,
        y_stride,
        _scratch(scratch, scratch_floats(rank, count * heads)),
    )


def route(logits: F32, bias: F32, factor: float, ids: NDArray[np.int32], weights: F32) -> None:
    """Top experts of logits [count, experts] into ids and weights [count, k], best first."""
    count, experts = logits.shape
    k = ids.shape[1]
    if ids.dtype != np.int32 or ids.shape != (count, k) or not ids.flags.c_contiguous:
        raise ValueError(f"want contiguous int32 ids [{count}, k]")
    _call(
        lib.kimi_route,
        _flat(logits, count, experts),
        _flat(bias, experts),
        count,
        experts,
        k,
        factor,
        ffi.cast("int32_t *", _raw(ids, np.int32)),
        _flat(weights, count, k),
    )


def expert_sum(x: F32, weights: F32, y: F32) -> None:
    """y [count, n] = sum over k, in order, of weights [count, k] times x [count, k, n]."""
    _call(
        lib.kimi_expert_sum,
        _flat(x, *x.shape),
        _flat(weights, *x.shape[:2]),
        *x.shape,
        _flat(y, x.shape[0], x.shape[2]),
    )


def argmax(x: F32) -> int:
    """Index of the largest of x [n], the lowest on a tie; -1 if any value is not finite."""
    return int(lib.kimi_argmax(_flat(x, x.size), x.size))


def sample(
    logits: F32,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    index: int,
    weights: F32,
    order: I32,
) -> int:
    """An id drawn from logits [n], as kimi.h says; `weights` and `order` [n] are scratch.

    Raises NumericError when a logit is not finite.
    """
    chosen = ffi.new("int32_t *")
    _call(
        lib.kimi_sample,
        _flat(logits, logits.size),
        logits.size,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        index,
        _flat(weights, logits.size),
        _vector(order, logits.size, np.int32, "int32_t *"),
        chosen,
    )
    return int(chosen[0])


def logprobs(logits: F32, ids: I32, values: F64, top_ids: I32, top_values: F64) -> None:
    """Natural log-probabilities under logits [n] of `ids` into `values`, and of the best
    len(top_ids), largest first, into `top_ids` and `top_values`.

    Raises NumericError when a logit is not finite.
    """
    top = len(top_ids)
    _call(
        lib.kimi_logprobs,
        _flat(logits, logits.size),
        logits.size,
        _vector(ids, len(ids), np.int32, "int32_t *"),
        len(ids),
        _vector(values, len(ids), np.float64, "double *"),
        top,
        _vector(top_ids, top, np.int32, "int32_t *"),
        _vector(top_values, top, np.float64, "double *"),
    )


def perplexity(total: float, count: int) -> float:
    """exp(-total / count) of `count` log-probabilities that add up to `total`."""
    return float(lib.kimi_perplexity(total, count))


def roof_read(words: NDArray[np.uint64]) -> int:
    """Sum of `words` modulo 2^64, read as fast as this machine can."""
    total = ffi.new("uint64_t *")
    pointer = ffi.cast("uint64_t *", _raw(words, np.uint64))
    _call(lib.kimi_roof_read, pointer, words.size, total)
    return int(total[0])


def roof_fma(rounds: int) -> tuple[int, float]:
    """`rounds` steps of multiply-adds as fast as this machine can: floating-point operations done
    by all threads, and a mean near 0.5 that depends on every one."""
    flops, mean = ffi.new("int64_t *"), ffi.new("float *")
    _call(lib.kimi_roof_fma, rounds, flops, mean)
    return int(flops[0]), float(mean[0])
