"""`kimi selftest`: the installed package against golden vectors, on this CPU, offline.

The expected numbers come from an independent float64 implementation; the expected bits of the
kernels were computed once by the scalar rooms and hold on every CPU.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kimi_cli import console, memory, native
from kimi_cli.builtin import PSALM, ROOT, TINY
from kimi_cli.config import Config, load_config, parse_config
from kimi_cli.engine import READERS, Engine, Source, plan_for
from kimi_cli.errors import KimiError, VerifyError
from kimi_cli.native import F32
from kimi_cli.plan import Request
from kimi_cli.repack import repack
from kimi_cli.trunk import Trunk
from kimi_cli.units import GIB

LOGIT_BOUND = 5e-4
"""A float32 engine is within about 1e-4 of float64 here; a mistake moves logits by 1e-3 or more."""
KERNEL_BITS = {
    "bf16": 0xB52F4BAF,
    "packed": 0xB52F4BAF,
    "mxfp4": 0xCFA8056A,
    "elementary": 0xA9DD2CBD,
}
VARIANTS = {
    "golden": ("tiny", None),
    "golden_block12": ("tiny", "config_block12.json"),
    "psalm": ("psalm", None),
}
"""By golden file: the checkpoint, and the config where it is not the checkpoint's own."""


class Check(NamedTuple):
    """One line of the table."""

    name: str
    passed: bool
    detail: str


class Run(NamedTuple):
    """What one pass over a golden prompt gave."""

    prompt_logits: F32
    next_logits: F32
    ids: list[int]
    routed: dict[tuple[int, int], tuple[int, ...]]


def selftest(isa: str | None = None) -> None:
    """Prints one line a check. Raises VerifyError if any failed."""
    memory.one_arena()
    isas = [native.set_isa(isa)] if isa else native.supported_isas()
    failed = 0
    for check in _checks(isas):
        failed += not check.passed
        console.put(f"{'PASS' if check.passed else 'FAIL'}  {check.name:<44} {check.detail}\n")
    if failed:
        raise VerifyError(f"{failed} checks failed: do not trust this build on this CPU")
    console.put("all passed\n")


def _checks(isas: Sequence[str]) -> Iterator[Check]:
    for isa in isas:
        native.set_isa(isa)
        for name, bits in kernel_bits().items():
            yield _equal(f"kernel {name}, {isa}", bits, KERNEL_BITS[name])
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for checkpoint, model in {"tiny": TINY, "psalm": PSALM}.items():
                plain = repack(model, Path(scratch) / checkpoint, plain=True)
                for name, (which, file) in VARIANTS.items():
                    if which == checkpoint:
                        config = load_config(model) if file is None else _config(ROOT / file)
                        yield from _golden(name, model, config, isas, plain)
        except KimiError as error:
            yield Check("built-in model", False, str(error))


def _golden(
    name: str, model: Path, config: Config, isas: Sequence[str], plain: Path
) -> Iterator[Check]:
    packed = Source(config, Trunk.open(model / "kimi-trunk", model, config))
    golden = _read_golden(ROOT / f"{name}.npz")
    prompt, ids = golden["prompt_ids"].tolist(), golden["gen_ids"].tolist()
    many = max(memory.cpus(), 2)
    first: Run | None = None
    for isa in isas:
        native.set_isa(isa)
        run = run_golden(packed, prompt, ids, chunk=len(prompt), threads=1)
        if first is None:
            first = run
            yield _close(f"{name}: prompt logits", run.prompt_logits, golden["logits"])
            yield _close(f"{name}: continuation logits", run.next_logits, golden["gen_logits"])
            yield _equal(f"{name}: continuation ids", run.ids, ids)
            yield _equal(f"{name}: routing", run.routed, routing(golden["routed_ids"]))
        else:
            yield _same(f"{name}: {isa} equals {isas[0]}", run, first)
    assert first is not None
    for chunk in (1, 7):
        run = run_golden(packed, prompt, ids, chunk=chunk, threads=1)
        yield _same(f"{name}: prompt in chunks of {chunk} equals whole", run, first)
    run = run_golden(packed, prompt, ids, chunk=len(prompt), threads=many)
    yield _same(f"{name}: {many} threads equal 1", run, first)
    source = Source(config, Trunk.open(plain, model, config))
    run = run_golden(source, prompt, ids, chunk=len(prompt), threads=1)
    yield _same(f"{name}: plain trunk equals packed", run, first)


def run_golden(
    source: Source, prompt: list[int], ids: list[int], chunk: int, threads: int, budget: int = GIB
) -> Run:
    """Feeds `prompt` in chunks, then all but the last of `ids` one by one."""
    request = Request(
        context=len(prompt) + len(ids),
        prompt=len(prompt),
        threads=min(threads, memory.cpus()),
        readers=READERS,
        chunk=chunk,
        all_logits=True,
    )
    routed: dict[tuple[int, int], tuple[int, ...]] = {}

    def trace(layer: int, position: int, chosen: np.ndarray, weights: F32) -> None:
        for t, row in enumerate(chosen.tolist()):
            routed[layer, position + t] = tuple(sorted(row))

    with Engine(source, plan_for(source, request, memory.rss() + budget), trace=trace) as engine:
        engine.load()
        rows = [row.copy() for row in engine.prefill(prompt, True, True)]
        after = [engine.step(token, True).copy() for token in ids[:-1]]
    prompt_logits, next_logits = np.concatenate(rows), np.concatenate(after)
    chosen_ids = [native.argmax(row) for row in (prompt_logits[-1], *next_logits)]
    return Run(prompt_logits, next_logits, chosen_ids, routed)


def routing(routed_ids: np.ndarray) -> dict[tuple[int, int], tuple[int, ...]]:
    """golden `routed_ids` [layers, T, k] as {(layer, position): experts ascending}."""
    layers, positions, _ = routed_ids.shape
    return {
        (layer, t): tuple(routed_ids[layer, t].tolist())
        for layer in range(layers)
        for t in range(positions)
        if routed_ids[layer, t, 0] >= 0
    }


def _read_golden(path: Path) -> dict[str, np.ndarray]:
    """The arrays used here. Raises VerifyError if they are not all there."""
    names = ("prompt_ids", "gen_ids", "logits", "gen_logits", "routed_ids")
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise VerifyError(f"{path} cannot be read: {error}") from None


def _config(path: Path) -> Config:
    return parse_config(json.loads(path.read_bytes()), str(path))


def _equal(name: str, found: object, wanted: object) -> Check:
    detail = "equal" if found == wanted else f"found {found}, wanted {wanted}"
    return Check(name, found == wanted, detail[:100])


def _close(name: str, found: F32, wanted: F32) -> Check:
    if found.shape != wanted.shape:
        return Check(name, False, f"shape {found.shape}, wanted {wanted.shape}")
    error = float(np.abs(found.astype(np.float64) - wanted).max())
    return Check(name, error <= LOGIT_BOUND, f"largest error {error:.1e}, bound {LOGIT_BOUND:.0e}")


def _same(name: str, found: Run, wanted: Run) -> Check:
    pairs = [
        (found.prompt_logits, wanted.prompt_logits),
        (found.next_logits, wanted.next_logits),
    ]
    differing = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)
    same = differing == 0 and found.routed == wanted.routed
    return Check(name, same, "same bits" if same else f"{differing} logits differ")


def kernel_bits() -> dict[str, int]:
    """CRC-32C of what each kind of kernel makes of fixed inputs, several shapes each."""
    results: dict[str, list[F32]] = {name: [] for name in KERNEL_BITS}
    for rows, cols, count in ((5, 192, 1), (7, 1088, 3), (66, 64, 5)):
        x = _numbers(count * cols).reshape(count, cols)
        weights = (_numbers(rows * cols).view(np.uint32) >> 16).astype(np.uint16)
        y = np.empty((count, rows), dtype=np.float32)
        scratch = np.empty(native.scratch_floats(cols, count), dtype=np.float32)
        for name, matrix in _matrices(weights.reshape(rows, cols)).items():
            native.product(matrix, x, y, scratch)
            results[name].append(y.copy())
        packed = (weights[: rows * cols // 2] >> 3).astype(np.uint8).reshape(rows, cols // 2)
        scales = (100 + weights[: rows * cols // 32] % 40).astype(np.uint8)
        native.product_mxfp4(packed, scales.reshape(rows, cols // 32), x, y, scratch)
        results["mxfp4"].append(y.copy())
        functions: list[Callable[[F32, F32], None]] = [native.exp, native.sigmoid, native.tanh]
        for function in functions:
            out = np.empty_like(x)
            function(x, out)
            results["elementary"].append(out)
    return {
        name: native.crc32c(np.concatenate([a.ravel() for a in arrays]).tobytes())
        for name, arrays in results.items()
    }


def _numbers(count: int) -> F32:
    """Fixed float32 values of mixed sign, from 2^-9 to 2^6, by integer arithmetic alone."""
    i = np.arange(1, count + 1, dtype=np.uint32)
    i = (i ^ (i >> np.uint32(7))) * np.uint32(2654435761)
    i = (i ^ (i >> np.uint32(13))) * np.uint32(2246822519)
    exponent = np.uint32(118) + (i >> np.uint32(23)) % np.uint32(15)
    bits = (
        (i << np.uint32(31))
        | (exponent << np.uint32(23))
        | ((i >> np.uint32(1)) & np.uint32(0x7FFFFF))
    )
    values: F32 = bits.view(np.float32)
    return values


def _matrices(weights: np.ndarray) -> dict[str, native.Matrix]:
    """The same bf16 weights [rows, cols], as they are and packed with a table that misses some."""
    rows, cols = weights.shape
    counts = np.bincount((weights >> 8).ravel(), minlength=256)
    table: native.U8 = counts.argsort(kind="stable")[-16:].astype(np.uint8)
    packed = np.empty((rows, native.row_bytes(native.Format.PACKED, cols)), dtype=np.uint8)
    starts = np.zeros(rows + 1, dtype=np.uint32)
    escapes = np.empty(native.pack_escapes(weights, table) or 1, dtype=np.uint32)
    native.pack_rows(weights, table, packed, starts, escapes)
    return {
        "bf16": native.Matrix(native.Format.BF16, rows, cols, weights.view(np.uint8)),
        "packed": native.Matrix(native.Format.PACKED, rows, cols, packed, table, starts, escapes),
    }
