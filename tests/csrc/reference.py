"""What kimi.h says, written a second time in numpy: slow, literal and independent of csrc/.

`fma` is exact: the product of two float32 is exact in float64, the sum is rounded to odd there,
and so rounding it again to float32 gives what one rounding would. Everything named `*64` is the
plain formula in float64, whatever its order, for comparison within a bound.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

F32, F64 = np.float32, np.float64
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
QUIET = {"all": "ignore"}

# ---- rounding ----


def round_f32(value: Fraction) -> float:
    """The float32 nearest to a rational, ties to even; the sign of zero is lost."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = max(exponent, -126) - 23
    result = math.ldexp(round(value / Fraction(2) ** unit), unit)
    return math.copysign(math.inf, result) if abs(result) >= 2.0**128 else result


def fma(a, b, c):
    """fmaf(a, b, c), correctly rounded."""
    with np.errstate(**QUIET):
        product = np.multiply(a, b, dtype=F64)
        addend = np.asarray(c, F64)
        total = np.atleast_1d(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0) & even
        total = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
        return total.astype(F32)


def ulps(got, truth):
    """Distance of float32 `got` from float64 `truth` in units of float32's last place there."""
    with np.errstate(**QUIET):
        _, exponent = np.frexp(truth)
        exponent = np.where(truth == 0, -126, exponent - 1)
        unit = np.ldexp(1.0, np.maximum(exponent, -126) - 23)
        limit = 2.0**128
        near = np.clip(np.asarray(got, F64), -limit, limit) - np.clip(truth, -limit, limit)
        distance = np.abs(near) / np.where(np.isfinite(truth), unit, 1.0)
    both_nan = np.isnan(got) & np.isnan(truth)
    return np.where(both_nan, 0.0, np.where(np.isnan(distance), np.inf, distance))


# ---- sums ----


def tree(lanes):
    """The tree that ends a product; lanes [..., 16]."""
    with np.errstate(**QUIET):
        s = lanes[..., 0::2] + lanes[..., 1::2]
        h = s[..., :4] + s[..., 4:]
        return (h[..., 0] + h[..., 2]) + (h[..., 1] + h[..., 3])


def double_sum(terms):
    """The order of double sums; terms float64 [n]."""
    d = np.zeros(8)
    with np.errstate(**QUIET):
        for i, term in enumerate(terms):
            d[i % 8] += term
        return ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]))


def padded(array, multiple):
    """The last axis padded with zeros to a multiple."""
    short = -array.shape[-1] % multiple
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, short)])


# ---- products ----


def dense(weights, x):
    """y [count, rows] of weights [rows, cols] and x [count, cols]."""
    weights, x = padded(weights, 16), padded(x, 16)
    lanes = np.zeros((len(x), len(weights), 16), F32)
    for c in range(0, x.shape[1], 16):
        lanes = fma(weights[None, :, c : c + 16], x[:, None, c : c + 16], lanes)
    return tree(lanes)


def mxfp4_values(packed):
    """Weights without their scale: packed [rows, cols/2] -> [rows, cols]."""
    values = np.empty((packed.shape[0], packed.shape[1] * 2), F32)
    values[:, 0::2] = MXFP4[packed & 15]
    values[:, 1::2] = MXFP4[packed >> 4]
    return values


def mxfp4(packed, scales, x):
    """y [count, rows]; scales [rows, cols/32]."""
    values = mxfp4_values(packed)
    factors = np.ldexp(1.0, scales.astype(np.int64) - 127).astype(F32)
    groups = scales.shape[1]
    lanes = np.zeros((len(x), len(packed), 16), F32)
    for g in range(-(-groups // 4) * 4):
        for lane in range(4):
            at = 4 * (g % 4) + lane
            if g >= groups:
                lanes[..., at] += F32(0)
                continue
            columns = [32 * g + 4 * lane + j for j in (0, 1, 2, 3, 16, 17, 18, 19)]
            with np.errstate(**QUIET):
                p = values[None, :, columns[0]] * x[:, None, columns[0]]
            for c in columns[1:]:
                p = fma(values[None, :, c], x[:, None, c], p)
            lanes[..., at] = fma(p, factors[None, :, g], lanes[..., at])
    return tree(lanes)


def widen(bf16):
    """Float32 values of bf16 bit patterns."""
    return (bf16.astype(np.uint32) << 16).view(F32)


# ---- packed rows ----

POSITIONS = np.array(
    [[32 * h + 16 * (p >> 3 & 1) + 8 * (p >> 4) + (p & 7) for p in range(32)] for h in range(2)]
)


def common_bytes(bf16):
    """A table: the 16 most frequent high bytes."""
    counts = np.bincount((bf16 >> 8).ravel(), minlength=256)
    return np.argsort(-counts, kind="stable")[:16].astype(np.uint8)


def pack(bf16, table, first=0):
    """(packed, starts, escapes) of bf16 [rows, cols]; `first` is starts[0], escapes begin there."""
    index = {int(byte): i for i, byte in reversed(list(enumerate(table)))}
    place = np.array([index.get(byte, -1) for byte in range(256)])
    rows, cols = bf16.shape
    blocks = bf16.reshape(rows, cols // 64, 64)
    nibbles = np.maximum(place[blocks >> 8], 0).astype(np.uint8)
    packed = np.empty((rows, cols // 64, 96), np.uint8)
    for h in range(2):
        packed[..., 32 * h : 32 * h + 32] = (blocks & 255)[..., POSITIONS[h]]
    packed[..., 64:] = nibbles[..., POSITIONS[0]] | nibbles[..., POSITIONS[1]] << 4
    escaped = place[bf16 >> 8] < 0
    starts = first + np.concatenate([[0], np.cumsum(escaped.sum(axis=1))])
    row, column = np.nonzero(escaped)
    escapes = np.concatenate(
        [np.zeros(first, np.uint32), column.astype(np.uint32) << 16 | bf16[row, column]]
    )
    return packed.reshape(rows, -1), starts.astype(np.uint32), escapes.astype(np.uint32)


def crc32c(data, crc=0):
    """Bit by bit, the polynomial 0x1EDC6F41 reflected."""
    crc ^= 0xFFFFFFFF
    for byte in bytes(data):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# ---- elementary functions in float64 ----


def sigmoid64(x):
    """1 / (1 + e^-x) without cancellation."""
    x = np.asarray(x, F64)
    with np.errstate(**QUIET):
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1.0, e) / (1.0 + e)


def situ64(g, u, beta, linear_beta):
    """4 tanh(g/4) sigmoid(g) * 25 tanh(u/25), the numbers being the two betas."""
    g, u = np.asarray(g, F64), np.asarray(u, F64)
    return beta * np.tanh(g / beta) * sigmoid64(g) * linear_beta * np.tanh(u / linear_beta)


# ---- norms and the residual mix ----


def rmsnorm64(x, weight, eps):
    """x [..., n]."""
    x = np.asarray(x, F64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def mix_scores(sources, norm, proj, eps):
    """float32 scores [s] of one token; sources [s, n]. Literal."""
    scores = []
    for v in sources.astype(F64):
        with np.errstate(**QUIET):
            dot = double_sum(v * (norm.astype(F64) * proj.astype(F64)))
            scores.append(F32(dot / np.sqrt(double_sum(v * v) / len(v) + eps)))
    return np.array(scores, F32)


def mix(sources, norm, proj, eps, exp):
    """One token, sources [s, n] -> [n]; `exp` is the float32 exponential. Literal."""
    scores = mix_scores(sources, norm, proj, eps)
    e = exp(scores - scores.max())
    total = 0.0
    for value in e:
        total += float(value)
    y = np.zeros(sources.shape[1], F32)
    for value, source in zip(e, sources, strict=True):
        y = fma(F32(float(value) / total), source, y)
    return y


def mix64(sources, norm, proj, eps):
    """sources [s, count, n] -> [count, n]."""
    v = sources.astype(F64)
    rms = np.sqrt(np.mean(v * v, axis=-1) + eps)
    p = np.exp((v * norm.astype(F64) * proj.astype(F64)).sum(axis=-1) / rms)
    return (v * (p / p.sum(axis=0))[..., None]).sum(axis=0)


# ---- KDA ----


def conv_sums(x, weight, history):
    """The sums before SiLU, [count, channels]; weight [channels, taps]. Literal."""
    columns = np.concatenate([history, x])
    sums = np.zeros_like(x)
    for j in range(weight.shape[1]):
        sums = fma(weight[:, j], columns[j : j + len(x)], sums)
    return sums


def delta(state, q, k, v, decay, beta):
    """One head: state [dim, dim] -> (state, o [count, dim]); beta [count]. Literal."""
    state, outputs = state.copy(), []
    dim = len(state)
    for t in range(len(q)):
        u, o = np.zeros(dim, F32), np.zeros(dim, F32)
        for i in range(dim):
            state[i] = state[i] * decay[t, i]
            u = fma(state[i], k[t, i], u)
        d = beta[t] * (v[t] - u)
        for i in range(dim):
            state[i] = fma(k[t, i], d, state[i])
            o = fma(state[i], q[t, i], o)
        outputs.append(o)
    return state, np.array(outputs, F32)


def delta64(state, q, k, v, decay, beta):
    """The recurrence of the paper, one head, in float64."""
    s, outputs = state.astype(F64), []
    q, k, v, decay, beta = (a.astype(F64) for a in (q, k, v, decay, beta))
    for t in range(len(q)):
        s = decay[t][:, None] * s
        s = s + beta[t] * np.outer(k[t], v[t] - s.T @ k[t])
        outputs.append(s.T @ q[t])
    return s, np.array(outputs)


# ---- MLA ----


def absorb(weights, q):
    """One head: weights [nope, rank], q [nope] -> [rank]. Literal."""
    out = np.zeros(weights.shape[1], F32)
    for i in range(len(q)):
        out = fma(q[i], weights[i], out)
    return out


def attend(cache, q, rank, scale, exp):
    """One head and token: cache [positions, width], q [width] -> [rank]. Literal."""
    scores = dense(cache, q[None])[0] * F32(scale)
    e = exp(scores - scores.max())
    total = 0.0
    for value in e:
        total += float(value)
    out = np.zeros(rank, F32)
    for start in range(0, len(cache), 128):
        block = np.zeros(rank, F32)
        for s in range(start, min(start + 128, len(cache))):
            block = fma(e[s], cache[s, :rank], block)
        out = out + block
    return (out.astype(F64) / total).astype(F32)


def attention64(queries, keys, values, scale):
    """Plain attention of one head, one token: keys [n, d], values [n, dv]."""
    scores = keys @ queries * scale
    p = np.exp(scores - scores.max())
    return p @ values / p.sum()


# ---- MoE ----


def route(scores, bias, k, factor):
    """One token: float32 sigmoid scores -> (ids, weights)."""
    choice = (scores + bias).astype(F32)
    ids = sorted(range(len(scores)), key=lambda e: (-float(choice[e]), e))[:k]
    total = 0.0
    for e in ids:
        total += float(scores[e])
    return ids, [F32(float(scores[e]) / (total + 1e-20) * factor) for e in ids]


def expert_sum(x, weights):
    """One token: x [k, n], weights [k] -> [n]. Literal."""
    y = np.zeros(x.shape[1], F32)
    for weight, row in zip(weights, x, strict=True):
        y = fma(weight, row, y)
    return y
