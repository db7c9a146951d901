"""Where every byte of a trunk file lies: a pure function of how its tensors are stored.

A unit is one file, a layer or the head (final mix, final norm, lm_head):

    0             header.length                4096 x                          4096 y        size
    | n | JSON .. | vectors, tables, escapes,  | row block | row block | ...   | row block | ...
    |    padded   | small matrices             | first matrix                  | second matrix
    '- block -----'- head blocks --------------'- block ---'- block ---'

The blocks tile the file, each with its CRC-32C; padding belongs to the block before it. A matrix
of more than INLINE stored bytes begins on a multiple of ALIGN and is cut into whole rows, a
multiple of 128 (and of a head's rows in kv_b_proj), as many as fit BLOCK bytes, one multiple at
least; all else is in the head, each tensor on a multiple of HEAD_ALIGN. The safetensors format
refuses holes, so padding is tensors, `padding.0` and so on. It reads and writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod

from kimi_cli.config import Config
from kimi_cli.header import Entry
from kimi_cli.native import Format, row_bytes
from kimi_cli.tensors import Tensor, head_tensors, layer_tensors
from kimi_cli.trunkfile import Block, RowBlock, StoredMatrix, Unit, Vector

FORMAT, VERSION = "kimi-trunk", 1
ALIGN = 4096
HEAD_ALIGN = 64
INLINE = 64 << 10
BLOCK = 4 << 20
BLOCK_ROWS = 128
MIN_PACKED, MAX_COLS, COLUMNS = 4096, 65536, 64
"""Fewest weights and most columns of a packed matrix, and what its columns are a multiple of."""
ESCAPES_IN = 200
"""A matrix with more than one escape in so many weights stays plain."""

_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
_DTYPES = {Format.BF16: "BF16", Format.F32: "F32"}
_FORMATS = {dtype: fmt for fmt, dtype in _DTYPES.items()}
_TABLE = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """How one tensor is stored: all that the layout depends on. `shape` is the checkpoint's."""

    tensor: Tensor
    format: Format
    shape: tuple[int, ...]
    escapes: int = 0


def unit_tensors(config: Config) -> list[tuple[str, tuple[Tensor, ...]]]:
    """File name and tensors of every unit, in the order of use."""
    layers = range(config.num_hidden_layers)
    units = [(f"layer-{layer:03d}.safetensors", layer_tensors(config, layer)) for layer in layers]
    return [*units, ("head.safetensors", head_tensors(config))]


def plan_units(config: Config, packed: bool) -> tuple[Unit, ...]:
    """The units of a trunk as the released checkpoint would give it, without a file.

    BF16 but for what the released model has in F32, no escapes, every crc 0. Real escapes add
    their 4 bytes each to the heads, at most 2 % of a matrix's packed bytes.
    """
    return tuple(
        lay_out(file, [_usual(tensor, packed) for tensor in tensors], config)[0]
        for file, tensors in unit_tensors(config)
    )


def _usual(tensor: Tensor, packed: bool) -> Stored:
    fmt = Format.F32 if tensor.name.endswith(_F32) else Format.BF16
    if packed and may_pack(tensor, fmt):
        fmt = Format.PACKED
    shape = (tensor.size // 32 * 32 + 32,) if tensor.padded else tensor.shape
    return Stored(tensor, fmt, shape)


def may_pack(tensor: Tensor, fmt: Format) -> bool:
    """Whether a tensor stored as `fmt` is packed, provided that its escapes are few."""
    if tensor.kind != "matrix" or fmt != Format.BF16 or tensor.size < MIN_PACKED:
        return False
    return tensor.shape[1] % COLUMNS == 0 and tensor.shape[1] <= MAX_COLS


def few_escapes(tensor: Tensor, escapes: int) -> bool:
    """Whether so many escapes still leave packing worth it."""
    return escapes * ESCAPES_IN <= tensor.size


def block_rows(name: str, stride: int, head_rows: int) -> int:
    """Rows of a full row block of a matrix whose stored rows have `stride` bytes."""
    unit = lcm(BLOCK_ROWS, head_rows) if name.endswith(".kv_b_proj.weight") else BLOCK_ROWS
    return max(1, BLOCK // stride // unit) * unit


def header_block(tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The safetensors header of `tensors` (name, dtype, shape, bytes), padded to ALIGN."""
    entries: dict[str, object] = {"__metadata__": {"format": FORMAT, "version": str(VERSION)}}
    end = 0
    for name, dtype, shape, length in tensors:
        offsets = (end, end := end + length)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGN)
    return len(raw).to_bytes(8, "little") + raw


class _Data:
    """Tensors one after the other; offsets count from the end of the header."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, str, Sequence[int], int]] = []
        self.end = 0
        self._paddings = 0

    def align(self, unit: int) -> int:
        gap = -self.end % unit
        if gap:
            self.add(f"padding.{self._paddings}", "U8", (gap,), gap)
            self._paddings += 1
        return self.end

    def add(self, name: str, dtype: str, shape: Sequence[int], length: int) -> int:
        begin = self.end
        self.tensors.append((name, dtype, shape, length))
        self.end += length
        return begin


def lay_out(file: str, stored: Sequence[Stored], config: Config) -> tuple[Unit, bytes]:
    """The unit that `stored` makes, every crc 0, and its header block.

    `stored` is in the order of `unit_tensors`: vectors, then matrices in order of use.
    """
    data, cuts = _Data(), [0]
    begins: dict[str, int] = {}

    def put(name: str, dtype: str, shape: Sequence[int], length: int) -> None:
        begin = begins[name] = data.align(HEAD_ALIGN)
        if begin + length - cuts[-1] > BLOCK:
            cuts.extend(cut for cut in range(begin, begin + length, BLOCK) if cut > cuts[-1])
        data.add(name, dtype, shape, length)

    apart = []
    for piece in stored:
        name, size = piece.tensor.name, _stored_bytes(piece)
        if piece.tensor.kind == "matrix":
            if piece.format == Format.PACKED:
                rows = piece.shape[0]
                put(name + ".table", "U8", (_TABLE,), _TABLE)
                listed = 4 * (rows + 1 + piece.escapes)
                put(name + ".escapes", "U8", (listed,), listed)
            if size > INLINE:
                apart.append(piece)
                continue
        put(*_entry(piece), size)
    data.align(ALIGN)
    cuts.append(data.end)
    spans = [(data.add(*_entry(p), _stored_bytes(p)), data.align(ALIGN)) for p in apart]
    header = header_block(data.tensors)
    base, head_rows = len(header), config.qk_nope_head_dim + config.v_head_dim
    blocks = {
        piece.tensor.name: _row_blocks(piece, base + begin, base + end, head_rows)
        for piece, (begin, end) in zip(apart, spans, strict=True)
    }
    unit = Unit(
        file=file,
        size=base + data.end,
        header=Block(0, base, 0),
        head=tuple(Block(base + begin, end - begin, 0) for begin, end in pairwise(cuts)),
        vectors=tuple(
            Vector(p.tensor.name, p.format, p.shape, base + begins[p.tensor.name], _stored_bytes(p))
            for p in stored
            if p.tensor.kind == "vector"
        ),
        matrices=tuple(
            _matrix(p, base, begins, blocks.get(p.tensor.name, ()))
            for p in stored
            if p.tensor.kind == "matrix"
        ),
    )
    return unit, header


def _stored_bytes(piece: Stored) -> int:
    if piece.tensor.kind == "matrix":
        rows, cols = piece.shape
        return rows * row_bytes(piece.format, cols)
    return row_bytes(piece.format, prod(piece.shape))


def _entry(piece: Stored) -> tuple[str, str, tuple[int, ...]]:
    """Name, dtype and shape under which the tensor's own bytes are listed."""
    if piece.format == Format.PACKED:
        rows, cols = piece.shape
        return piece.tensor.name + ".packed", "U8", (rows, row_bytes(piece.format, cols))
    return piece.tensor.name, _DTYPES[piece.format], piece.shape


def _row_blocks(piece: Stored, begin: int, end: int, head_rows: int) -> tuple[RowBlock, ...]:
    total, stride = piece.shape[0], row_bytes(piece.format, piece.shape[1])
    step = block_rows(piece.tensor.name, stride, head_rows)
    found = []
    for row in range(0, total, step):
        rows = min(step, total - row)
        stop = end if row + rows == total else begin + (row + rows) * stride
        start = begin + row * stride
        found.append(RowBlock(row, rows, Block(start, stop - start, 0)))
    return tuple(found)


def _matrix(
    piece: Stored, base: int, begins: dict[str, int], blocks: tuple[RowBlock, ...]
) -> StoredMatrix:
    name, (rows, cols) = piece.tensor.name, piece.shape
    table = starts = escapes = -1
    if piece.format == Format.PACKED:
        table, starts = base + begins[name + ".table"], base + begins[name + ".escapes"]
        escapes = starts + 4 * (rows + 1)
    inline = -1 if blocks else base + begins[_entry(piece)[0]]
    return StoredMatrix(
        name, piece.format, rows, cols, table, starts, escapes, piece.escapes, inline, blocks
    )


def read_stored(entries: dict[str, Entry], tensors: Sequence[Tensor]) -> list[Stored]:
    """How a file whose header has `entries` stores `tensors`; ValueError says what is wrong."""
    found = []
    for tensor in tensors:
        plain, packed = entries.get(tensor.name), entries.get(tensor.name + ".packed")
        if plain is not None:
            fmt = _FORMATS.get(plain.dtype)
            if fmt is None:
                raise ValueError(f"{tensor.name} is {plain.dtype}, wanted BF16 or F32")
            if plain.shape not in tensor.shapes and not _padded(tensor, plain.shape):
                raise ValueError(_differs(tensor.name, plain.shape, tensor.shape))
            piece = Stored(tensor, fmt, plain.shape)
        elif packed is not None and may_pack(tensor, Format.BF16):
            wanted = (tensor.shape[0], row_bytes(Format.PACKED, tensor.shape[1]))
            if packed.shape != wanted:
                raise ValueError(_differs(tensor.name + ".packed", packed.shape, wanted))
            listed = entries.get(tensor.name + ".escapes")
            if listed is None:
                raise ValueError(f"{tensor.name}.escapes is absent")
            escapes = listed.length // 4 - tensor.shape[0] - 1
            if escapes < 0 or not few_escapes(tensor, escapes):
                raise ValueError(f"{tensor.name}.escapes has {listed.length} bytes")
            piece = Stored(tensor, Format.PACKED, tensor.shape, escapes)
        else:
            raise ValueError(f"{tensor.name} is absent")
        found.append(piece)
    return found


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    size = prod(shape)
    return tensor.padded and size >= tensor.size and shape in ((size,), (1, 1, size, 1))


def _differs(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name} is {list(found)}, wanted {list(wanted)}"
