"""One case of every operation, large enough for several threads and full of subnormals.

Each case is a function of no arguments that makes fresh outputs, calls the operation and returns
the outputs. So the same calls can be repeated in another float environment, on other threads, or
with another build of the extension.
"""

from __future__ import annotations

import numpy as np

from kimi_cli import native
from kimi_cli.native import Format

from . import reference
from .hostile import bf16, floats, generator


def blank(*shape):
    return np.full(shape, np.nan, np.float32)


def fading(rng, shape):
    """Values from the subnormal to the ordinary, so that products and sums cross the border."""
    scale = np.ldexp(1.0, rng.integers(-75, -55, shape)).astype(np.float32)
    values = floats(rng, shape) * scale
    return np.where(rng.random(shape) < 0.2, floats(rng, shape, "tiny"), values)


def fading_weights(rng, fmt, shape):
    """The same as `hostile.matrix` and `stored` want them."""
    weights = fading(rng, shape)
    return weights if fmt == Format.F32 else (weights.view(np.uint32) >> 16).astype(np.uint16)


def stored(fmt, weights):
    """A Matrix made by native, so that another build can make its own."""
    if fmt != Format.PACKED:
        return native.Matrix(fmt, *weights.shape, weights.reshape(-1).view(np.uint8))
    table = reference.common_bytes(weights)
    packed, starts, escapes = reference.pack(weights, table)
    return native.Matrix(fmt, *weights.shape, packed, table, starts, escapes)


def product_case(fmt, count):
    rng = generator("battery", fmt, count)
    weights, x = fading_weights(rng, fmt, (70, 1088)), fading(rng, (count, 1088))

    def case():
        y, work = blank(count, 70), blank(native.scratch_floats(1088, count))
        native.product(stored(fmt, weights), x, y, work)
        return [y]

    return case


def mxfp4_case(count):
    rng = generator("battery mxfp4", count)
    packed = rng.integers(0, 256, (70, 560), dtype=np.uint8)
    scales = rng.choice([0, 60, 61, 62], (70, 35)).astype(np.uint8)
    x = fading(rng, (count, 1120))

    def case():
        y, work = blank(count, 70), blank(native.scratch_floats(1120, count))
        native.product_mxfp4(packed, scales, x, y, work)
        return [y]

    return case


def expert_case(count):
    rng = generator("battery expert", count)
    shapes = [(288, 160), (160, 288), (288, 160)]
    weights = []
    for rows, cols in shapes:
        weights.append(rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8))
        weights.append(rng.choice([60, 90, 120], (rows, cols // 32)).astype(np.uint8))
    x = fading(rng, (count, 160))

    def case():
        gate, up, y = blank(count, 288), blank(count, 288), blank(count, 160)
        out, work = blank(count, 1, 160), blank(native.experts_scratch_floats(160, 288, count))
        wanted = [(native.Expert(weights), range(count))]
        native.experts(wanted, x, gate, up, y, out, 4.0, 25.0, work)
        return [out]

    return case


def elementwise_case(function):
    rng = generator("battery", function.__name__)
    x = np.concatenate([fading(rng, 20000), floats(rng, 20000) * 30, -100 + floats(rng, 20000) * 4])

    def case():
        y = blank(*x.shape)
        function(x, y)
        return [y]

    return case


def binary_case(name):
    rng = generator("battery", name)
    a = np.concatenate([fading(rng, 30000), -95 + floats(rng, 30000) * 6, floats(rng, 9)])
    b, c = fading(rng, len(a)), fading(rng, len(a))

    def case():
        y = b.copy()
        if name == "add":
            native.add(c, y)
        elif name == "gate":
            native.gate(b, a, y)
        else:
            native.situ(a, b, 4.0, 25.0, y)
        return [y]

    return case


def norm_cases():
    rng = generator("battery norm")
    x, weight = fading(rng, (60, 1030)), fading(rng, 1030)
    sources, proj = [fading(rng, (30, 1030)) for _ in range(5)], floats(rng, 1030)

    def rmsnorm():
        y = blank(60, 1030)
        native.rmsnorm(x, weight, 1e-5, y)
        return [y]

    def l2norm():
        y = x.reshape(60, 5, 206).copy()
        native.l2norm(y, 1e-6, 0.125)
        return [y]

    def mix():
        y = blank(30, 1030)
        native.mix(sources, weight, proj, 1e-5, y)
        return [y]

    def gated_norm():
        y = blank(60, 5, 206)
        native.gated_norm(
            x.reshape(60, 5, 206), x[::-1].reshape(60, 5, 206).copy(), weight[:206], 1e-5, y
        )
        return [y]

    return {"rmsnorm": rmsnorm, "l2norm": l2norm, "mix": mix, "gated_norm": gated_norm}


def kda_cases():
    rng = generator("battery kda")
    x, weight, history = fading(rng, (30, 777)), floats(rng, (777, 4)), fading(rng, (3, 777))
    z, bias = floats(rng, (9, 7, 500)) * np.float32(2e37), fading(rng, 3500)
    a_log = -90 + floats(rng, 7)  # so that exp(a_log) is subnormal
    state = fading(rng, (5, 100, 100))
    q, k, v = (fading(rng, (3, 5, 100)) for _ in range(3))
    k[0] = floats(rng, (5, 100))
    decay, beta = rng.random((3, 5, 100)).astype(np.float32), rng.random((3, 5)).astype(np.float32)

    def conv():
        y, moved = blank(30, 777), history.copy()
        native.conv(x, weight, moved, y)
        return [y, moved]

    def decayed():
        y = blank(*z.shape)
        native.decay(z, a_log, bias, -5.0, y)
        return [y]

    def delta():
        after, o = state.copy(), blank(3, 5, 100)
        native.delta(after, q, k, v, decay, beta, o)
        return [after, o]

    return {"conv": conv, "decay": decayed, "delta": delta}


def mla_cases(fmt):
    rng = generator("battery mla", fmt)
    heads, nope, rope, value, rank = 6, 32, 16, 24, 192
    weights = fading_weights(rng, fmt, (heads * (nope + value), rank))
    q = fading(rng, (4, heads * (nope + rope)))
    cache = fading(rng, (200, rank + rope)) * np.float32(2.0**-62)
    queries, latent = floats(rng, (4, heads, rank + rope)), fading(rng, (4, heads * rank))

    def absorb():
        out = blank(4, heads * (rank + rope))
        native.mla_absorb(stored(fmt, weights), heads, nope, rope, q, out)
        return [out]

    def attend():
        out, work = blank(4, heads, rank), blank(native.mla_scratch_floats(200, heads, rank + rope))
        native.mla_attend(cache, 196, rope, queries, 0.1, out, work)
        return [out]

    def values():
        y, work = blank(4, heads * value), blank(native.scratch_floats(rank, 4 * heads))
        native.mla_values(stored(fmt, weights), heads, nope, latent, y, work)
        return [y]

    def whole():
        y = blank(4, heads * value)
        work = blank(native.mla_scratch_floats(200, heads, rank + rope))
        last = blank(native.scratch_floats(rank, 4 * heads))
        between = blank(4, heads, rank + rope), blank(4, heads, rank)
        w = stored(fmt, weights)
        native.mla(w, nope, rope, cache, 196, q, 0.1, *between, work, y, last)
        return [y]

    cases = {
        f"mla_absorb {fmt.name}": absorb,
        f"mla_values {fmt.name}": values,
        f"mla {fmt.name}": whole,
    }
    return {**cases, "mla_attend": attend} if fmt == Format.BF16 else cases


def moe_cases():
    rng = generator("battery moe")
    logits, bias = -95 + 5 * floats(rng, (40, 128)), np.zeros(128, np.float32)
    x, weights = fading(rng, (20, 8, 500)), fading(rng, (20, 8))
    tiny = np.abs(floats(rng, 3000, "tiny")) / np.float32(8)

    def route():
        ids, shares = np.full((40, 16), -7, np.int32), blank(40, 16)
        native.route(logits, bias, 2.5, ids, shares)
        return [ids.view(np.float32), shares]

    def expert_sum():
        y = blank(20, 500)
        native.expert_sum(x, weights, y)
        return [y]

    def argmax():
        return [np.array([native.argmax(tiny)], np.float32)]

    return {"route": route, "expert_sum": expert_sum, "argmax": argmax}


def exact_cases():
    """Operations on bytes, which no float environment can touch."""
    rng = generator("battery bytes")
    weights = bf16(rng, (40, 1088), "special")
    table = reference.common_bytes(weights)
    data = rng.integers(0, 256, 30001, dtype=np.uint8)

    def pack():
        room = native.pack_escapes(weights, table)
        packed = np.zeros((40, 1632), np.uint8)
        starts, escapes = np.zeros(41, np.uint32), np.zeros(room, np.uint32)
        native.pack_rows(weights, table, packed, starts, escapes)
        back = np.zeros_like(weights)
        native.unpack_rows(
            native.Matrix(Format.PACKED, 40, 1088, packed, table, starts, escapes), back
        )
        return [packed.view(np.float32), starts.view(np.float32), back.view(np.float32)]

    def widen():
        y = blank(40, 1088)
        native.widen(Format.BF16, weights.reshape(-1).view(np.uint8), y)
        return [y]

    def crc32c():
        return [
            np.array([native.crc32c(data[:n]) for n in (1, 12287, 30001)], np.uint32).view("f4")
        ]

    return {"pack": pack, "widen": widen, "crc32c": crc32c}


CASES = {
    **{
        f"product {fmt.name} x{count}": product_case(fmt, count)
        for fmt in Format
        for count in (1, 5)
    },
    **{f"product_mxfp4 x{count}": mxfp4_case(count) for count in (1, 5)},
    **{f"expert x{count}": expert_case(count) for count in (1, 5)},
    **{f.__name__: elementwise_case(f) for f in (native.exp, native.sigmoid, native.tanh)},
    **{name: binary_case(name) for name in ("add", "gate", "situ")},
    **norm_cases(),
    **kda_cases(),
    **{name: case for fmt in Format for name, case in mla_cases(fmt).items()},
    **moe_cases(),
    **exact_cases(),
}
"""Name -> case."""
