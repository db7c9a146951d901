/* packed_avx2.h: packed blocks to bf16 in column order, in registers, for every AVX2 or wider room.
 */
#ifndef KIMI_PACKED_AVX2_H
#define KIMI_PACKED_AVX2_H

#include <immintrin.h>

#include "decode.h"

#define PACKED_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

PACKED_INLINE __m256i load_bits(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

PACKED_INLINE __m256i load_table(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

/* One packed block of 64 columns as four vectors of bf16 in column order. */
PACKED_INLINE void unpack_block(const uint8_t *block, __m256i table, __m256i out[4]) {
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
PACKED_INLINE void patch_block(const kimi_matrix *w, const uint8_t *block, int64_t column,
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
PACKED_INLINE int64_t next_escape(const kimi_matrix *w, uint32_t e, uint32_t end, int64_t stop) {
    if (e == end) return stop;
    int64_t block = (int64_t)(w->escapes[e] >> 16) / 64 * 64;
    return block < stop ? block : stop;
}

/* The last n (under 16) bf16 weights of a row, padded with +0. */
PACKED_INLINE __m256i load_tail(const uint16_t *row, int64_t n) {
    uint16_t tail[16] = {0};
    memcpy(tail, row, (size_t)n * sizeof *row);
    return load_bits(tail);
}

#endif
