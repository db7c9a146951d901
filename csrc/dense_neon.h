/* dense_neon.h: dense weights of every format into registers and tiles, for NEON rooms.
 *
 * Always in column order: interleaving 16-bit weights with zeros widens bf16 at the cost of one
 * instruction for four columns, so that nothing is gained by parting even columns from odd ones.
 */
#ifndef KIMI_DENSE_NEON_H
#define KIMI_DENSE_NEON_H

#include <arm_neon.h>

#include "decode.h"

/* The 16 lanes of the contract. */
typedef struct {
    float32x4_t v[4];
} lanes16;

/* The tree of kimi.h, pair by pair in registers. */
KIMI_INLINE float lanes_end(lanes16 a) {
    float32x4_t h = vaddq_f32(vpaddq_f32(a.v[0], a.v[1]), vpaddq_f32(a.v[2], a.v[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(h), vget_high_f32(h)));
}

KIMI_INLINE lanes16 lanes_zero(void) {
    float32x4_t zero = vdupq_n_f32(0.0f);
    return (lanes16){{zero, zero, zero, zero}};
}

/* 16 consecutive floats. */
KIMI_INLINE lanes16 lanes_load(const float *p) {
    return (lanes16){{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}

/* n (under 16) floats, padded with +0. */
KIMI_INLINE lanes16 lanes_tail(const float *p, int64_t n) {
    float tail[16] = {0.0f};
    memcpy(tail, p, (size_t)n * sizeof *p);
    return lanes_load(tail);
}

KIMI_INLINE void lanes_fma(lanes16 *acc, lanes16 w, lanes16 x) {
    for (int i = 0; i < 4; i++) acc->v[i] = vfmaq_f32(acc->v[i], w.v[i], x.v[i]);
}

KIMI_INLINE float32x4_t widen_low(uint16x8_t w) {
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), w));
}

KIMI_INLINE float32x4_t widen_high(uint16x8_t w) {
    return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), w));
}

/* 16 bf16 weights in column order. */
KIMI_INLINE lanes16 lanes_widen(uint16x8_t a, uint16x8_t b) {
    return (lanes16){{widen_low(a), widen_high(a), widen_low(b), widen_high(b)}};
}

KIMI_INLINE lanes16 lanes_load_bf16(const uint16_t *p) {
    return lanes_widen(vld1q_u16(p), vld1q_u16(p + 8));
}

/* n (under 16) bf16 weights, padded with +0. */
KIMI_INLINE lanes16 lanes_tail_bf16(const uint16_t *p, int64_t n) {
    uint16_t tail[16] = {0};
    memcpy(tail, p, (size_t)n * sizeof *p);
    return lanes_load_bf16(tail);
}

/* One packed block of 64 columns as eight vectors of bf16 in column order. */
KIMI_INLINE void unpack_block(const uint8_t *block, uint8x16_t table, uint16x8_t out[8]) {
    for (int i = 0; i < 2; i++) { /* bytes 16 i .. of both halves: columns 8 i .. and 16 + 8 i .. */
        uint8x16_t nibbles = vld1q_u8(block + 64 + 16 * i);
        uint8x16_t high[2] = {vqtbl1q_u8(table, vandq_u8(nibbles, vdupq_n_u8(15))),
                              vqtbl1q_u8(table, vshrq_n_u8(nibbles, 4))};
        for (int h = 0; h < 2; h++) {
            uint8x16_t low = vld1q_u8(block + 32 * h + 16 * i);
            out[4 * h + i] = vreinterpretq_u16_u8(vzip1q_u8(low, high[h]));
            out[4 * h + 2 + i] = vreinterpretq_u16_u8(vzip2q_u8(low, high[h]));
        }
    }
}

/* The block at `column` with the row's escapes from *e on that fall into it. */
KIMI_INLINE void patch_block(const kimi_matrix *w, const uint8_t *block, int64_t column,
                             uint32_t *e, uint32_t end, uint16x8_t out[8]) {
    uint16_t weights[64];
    unpack_block(block, vld1q_u8(w->table), out);
    for (int i = 0; i < 8; i++) vst1q_u16(weights + 8 * i, out[i]);
    for (; *e < end && (int64_t)(w->escapes[*e] >> 16) < column + 64; ++*e)
        weights[(int64_t)(w->escapes[*e] >> 16) - column] = (uint16_t)(w->escapes[*e] & 0xFFFFu);
    for (int i = 0; i < 8; i++) out[i] = vld1q_u16(weights + 8 * i);
}

/* Where the block of the row's next escape begins, if that is before `stop`. */
KIMI_INLINE int64_t next_escape(const kimi_matrix *w, uint32_t e, uint32_t end, int64_t stop) {
    if (e == end) return stop;
    int64_t block = (int64_t)(w->escapes[e] >> 16) / 64 * 64;
    return block < stop ? block : stop;
}

/* The four vectors of a step, `part` apart. */
KIMI_INLINE void lanes_store(float *out, int64_t part, lanes16 a) {
    for (int i = 0; i < 4; i++) vst1q_f32(out + part * i, a.v[i]);
}

/* Columns [c0, c0 + n) of row r as float32, padded to 16: vector i of the 16 columns of step s at
 * out + s step + i part; c0 is a multiple of 64. */
KIMI_INLINE void tile_row(const kimi_matrix *w, int64_t r, int64_t c0, int64_t n, float *out,
                          int64_t step, int64_t part) {
    int64_t c = 0;
    if (w->format == KIMI_F32) {
        const float *row = (const float *)w->data + r * w->cols + c0;
        for (; c < n; c += 16)
            lanes_store(out + c / 16 * step, part,
                        c + 16 <= n ? lanes_load(row + c) : lanes_tail(row + c, n - c));
        return;
    }
    if (w->format == KIMI_BF16) {
        const uint16_t *row = (const uint16_t *)w->data + r * w->cols + c0;
        for (; c < n; c += 16)
            lanes_store(out + c / 16 * step, part,
                        c + 16 <= n ? lanes_load_bf16(row + c) : lanes_tail_bf16(row + c, n - c));
        return;
    }
    const uint8_t *row = (const uint8_t *)w->data + (r * w->cols + c0) / 64 * 96;
    uint8x16_t table = vld1q_u8(w->table);
    for (; c < n; c += 64) {
        uint16x8_t weights[8];
        unpack_block(row + c / 64 * 96, table, weights);
        for (int i = 0; i < 4; i++)
            lanes_store(out + (c / 16 + i) * step, part,
                        lanes_widen(weights[2 * i], weights[2 * i + 1]));
    }
    for (uint32_t e = decode_escape(w, r, c0); e < w->starts[r + 1]; e++) {
        int64_t column = (int64_t)(w->escapes[e] >> 16) - c0;
        if (column >= n) break;
        out[column / 16 * step + column % 16 / 4 * part + column % 4] =
            bf16_float((uint16_t)(w->escapes[e] & 0xFFFFu));
    }
}

#endif
