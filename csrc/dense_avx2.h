/* dense_avx2.h: dense weights of every format into registers and tiles, for AVX2 and wider rooms.
 *
 * Split order: per 16 columns, the 8 even ones, then the 8 odd ones. Shift and mask widen bf16 into
 * it; float32 weights keep column order.
 */
#ifndef KIMI_DENSE_AVX2_H
#define KIMI_DENSE_AVX2_H

#include <immintrin.h>

#include "decode.h"

#define DENSE_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

DENSE_INLINE __m256i load_bits(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

DENSE_INLINE __m256i load_table(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

/* One packed block of 64 columns as four vectors of bf16 in column order. */
DENSE_INLINE void unpack_block(const uint8_t *block, __m256i table, __m256i out[4]) {
    const __m256i low4 = _mm256_set1_epi8(15);
    __m256i nibbles = load_bits(block + 64);
    __m256i high[2] = {
        _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, low4)),
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low4))};
    for (int h = 0; h < 2; h++) {
        __m256i low = load_bits(block + 32 * h);
        out[2 * h] = _mm256_unpacklo_epi8(low, high[h]);
        out[2 * h + 1] = _mm256_unpackhi_epi8(low, high[h]);
    }
}

/* The block at `column` with the row's escapes from *e on that fall into it. */
DENSE_INLINE void patch_block(const kimi_matrix *w, const uint8_t *block, int64_t column,
                               uint32_t *e, uint32_t end, __m256i out[4]) {
    uint16_t weights[64];
    unpack_block(block, load_table(w->table), out);
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)(void *)(weights + 16 * i), out[i]);
    for (; *e < end && (int64_t)(w->escapes[*e] >> 16) < column + 64; ++*e)
        weights[(int64_t)(w->escapes[*e] >> 16) - column] = (uint16_t)(w->escapes[*e] & 0xFFFFu);
    for (int i = 0; i < 4; i++) out[i] = load_bits(weights + 16 * i);
}

/* Where the block of the row's next escape begins, if that is before `stop`. */
DENSE_INLINE int64_t next_escape(const kimi_matrix *w, uint32_t e, uint32_t end, int64_t stop) {
    if (e == end) return stop;
    int64_t block = (int64_t)(w->escapes[e] >> 16) / 64 * 64;
    return block < stop ? block : stop;
}

/* The last n (under 16) bf16 weights of a row, padded with +0. */
DENSE_INLINE __m256i load_tail(const uint16_t *row, int64_t n) {
    uint16_t tail[16] = {0};
    memcpy(tail, row, (size_t)n * sizeof *row);
    return load_bits(tail);
}

/* Lanes 0..7 and 8..15 of the contract, or, split, its even and odd lanes. */
typedef struct {
    __m256 a, b;
} lanes16;

/* The tree of kimi.h, pair by pair in registers. */
DENSE_INLINE float lanes_end(lanes16 v, int split) {
    __m128 h;
    if (split) { /* even + odd: s[0..7] in order */
        __m256 s = _mm256_add_ps(v.a, v.b);
        h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    } else { /* s: 0 1 4 5 | 2 3 6 7 */
        __m256 s = _mm256_hadd_ps(v.a, v.b);
        __m256 swapped = _mm256_permute_ps(s, 0x4E);
        s = _mm256_add_ps(s, swapped); /* h: 0 1 . . | 2 3 . . */
        h = _mm_movelh_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    }
    __m128 pair = _mm_add_ps(h, _mm_movehl_ps(h, h)); /* h0 + h2, h1 + h3 */
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

DENSE_INLINE __m256 widen_even(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }

DENSE_INLINE __m256 widen_odd(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000u)));
}

/* Columns [c0, c0 + n) of row r as float32, padded to 16: the 16 columns of step s as two halves
 * of 8, half i at out + s step + i half; split order for 16-bit formats. */
DENSE_INLINE void tile_row(const kimi_matrix *w, int64_t r, int64_t c0, int64_t n, float *out,
                           int64_t step, int64_t half) {
    int64_t c = 0;
    if (w->format == KIMI_F32) {
        const float *row = (const float *)w->data + r * w->cols + c0;
        float tail[16] = {0.0f};
        for (; c < n; c += 16) {
            const float *from = row + c;
            if (c + 16 > n) from = memcpy(tail, from, (size_t)(n - c) * sizeof *tail);
            _mm256_storeu_ps(out + c / 16 * step, _mm256_loadu_ps(from));
            _mm256_storeu_ps(out + c / 16 * step + half, _mm256_loadu_ps(from + 8));
        }
        return;
    }
    if (w->format == KIMI_BF16) {
        const uint16_t *row = (const uint16_t *)w->data + r * w->cols + c0;
        for (; c < n; c += 16) {
            __m256i v = c + 16 <= n ? load_bits(row + c) : load_tail(row + c, n - c);
            _mm256_storeu_ps(out + c / 16 * step, widen_even(v));
            _mm256_storeu_ps(out + c / 16 * step + half, widen_odd(v));
        }
        return;
    }
    const uint8_t *row = (const uint8_t *)w->data + (r * w->cols + c0) / 64 * 96;
    __m256i table = load_table(w->table), weights[4];
    for (; c < n; c += 64) {
        unpack_block(row + c / 64 * 96, table, weights);
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_ps(out + (c / 16 + i) * step, widen_even(weights[i]));
            _mm256_storeu_ps(out + (c / 16 + i) * step + half, widen_odd(weights[i]));
        }
    }
    for (uint32_t e = decode_escape(w, r, c0); e < w->starts[r + 1]; e++) {
        int64_t column = (int64_t)(w->escapes[e] >> 16) - c0;
        if (column >= n) break;
        out[column / 16 * step + (column & 1) * half + column % 16 / 2] =
            bf16_float((uint16_t)(w->escapes[e] & 0xFFFFu));
    }
}

#endif
