/* mxfp4_avx2.c: the MXFP4 product for AVX2 and FMA.
 *
 * x is prepared per 128 columns (4 groups) as 8 vectors of 16 lanes: vector j, lane 4g + l holds
 * column 32g + 4l + (0, 1, 2, 3, 16, 17, 18, 19)[j]. Two byte shuffles turn nibbles into the halves
 * of a bf16, and interleaving those bytes puts each weight into that same lane:
 *
 *     bytes of a group   2l: columns 4l, 4l+1     2l+1: 4l+2, 4l+3     2l+8: 4l+16, 4l+17 ...
 *     unpacklo, dword l  low nibbles:  [j=0 | j=2]     high nibbles:  [j=1 | j=3]
 *     unpackhi, dword l  low nibbles:  [j=4 | j=6]     high nibbles:  [j=5 | j=7]
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

#define VEC __m256
#define VEC_WIDTH 8
#define vec_load _mm256_loadu_ps
#define vec_store _mm256_storeu_ps
#define vec_mul _mm256_mul_ps
#define vec_fma _mm256_fmadd_ps
#define vec_hold(v) __asm__("" : "+x"(v))
#define BATCH_TARGET AVX2
#define BATCH_ROWS 1 /* not used here */
#define BATCH_COLUMNS 1
#define SCALED_ROWS 4
#define SCALED_COLUMNS 2
#include "batch.h"

/* A 4 x 4 transpose takes columns 4l + j of a half group to vector j, lane l. */
AVX2 void prepare_mxfp4_avx2(const float *x, int64_t cols, float *out) {
    for (int64_t c = 0; c < cols; c += 16) {
        __m128 a = _mm_loadu_ps(x + c), b = _mm_loadu_ps(x + c + 4);
        __m128 d = _mm_loadu_ps(x + c + 8), e = _mm_loadu_ps(x + c + 12);
        _MM_TRANSPOSE4_PS(a, b, d, e);
        float *to = out + c / 128 * 128 + c % 128 / 32 * 4 + c % 32 / 16 * 64;
        _mm_storeu_ps(to, a);
        _mm_storeu_ps(to + 16, b);
        _mm_storeu_ps(to + 32, d);
        _mm_storeu_ps(to + 48, e);
    }
    for (int64_t g = cols / 32; g % 4; g++) /* groups that are not there */
        for (int j = 0; j < 8; j++)
            _mm_storeu_ps(out + g / 4 * 128 + 16 * j + g % 4 * 4, _mm_setzero_ps());
}

/* 2 groups (32 bytes) as the vectors j = 0..7 of their 8 lanes. */
AVX2_INLINE void expand(__m256i bytes, __m256 w[8]) {
    const __m256i low4 = _mm256_set1_epi8(15), upper = _mm256_set1_epi32((int)0xFFFF0000u);
    const __m256i high_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xBF,
                      (char)0xBF, (char)0xBF, (char)0xC0, (char)0xC0, (char)0xC0, (char)0xC0));
    const __m256i low_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0, 0, 0,
                      (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0));
    __m256i nibbles[2] = {_mm256_and_si256(bytes, low4),
                          _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low4)};
    for (int odd = 0; odd < 2; odd++) {
        __m256i high = _mm256_shuffle_epi8(high_byte, nibbles[odd]);
        __m256i low = _mm256_shuffle_epi8(low_byte, nibbles[odd]);
        __m256i half[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
        for (int h = 0; h < 2; h++) {
            w[4 * h + odd] = _mm256_castsi256_ps(_mm256_slli_epi32(half[h], 16));
            w[4 * h + 2 + odd] = _mm256_castsi256_ps(_mm256_and_si256(half[h], upper));
        }
    }
}

/* 4 scale bytes as the factors of 16 lanes. */
AVX2_INLINE void expand_scales(const uint8_t *scales, __m256 out[2]) {
    int32_t four;
    memcpy(&four, scales, sizeof four);
    __m128i lanes = _mm_shuffle_epi8(
        _mm_cvtsi32_si128(four), _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    const __m256i least = _mm256_set1_epi32(0x00400000); /* scale byte 0: 2^-127 */
    for (int i = 0; i < 2; i++) {
        __m256i e = _mm256_cvtepu8_epi32(i ? _mm_srli_si128(lanes, 8) : lanes);
        out[i] = _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(e, 23), least));
    }
}

AVX2_INLINE void multiply_super(const uint8_t *w, const uint8_t *scales, const float *x,
                                __m256 acc[2]) {
    __m256 scale[2], weights[8];
    expand_scales(scales, scale);
    for (int i = 0; i < 2; i++) {
        expand(_mm256_loadu_si256((const __m256i *)(const void *)(w + 32 * i)), weights);
        __m256 p = _mm256_mul_ps(weights[0], _mm256_loadu_ps(x + 8 * i));
        for (int j = 1; j < 8; j++)
            p = _mm256_fmadd_ps(weights[j], _mm256_loadu_ps(x + 16 * j + 8 * i), p);
        acc[i] = _mm256_fmadd_ps(p, scale[i], acc[i]);
    }
}

/* Where super-block s of a row lies; the last, short one is copied aside and padded. */
typedef struct {
    const uint8_t *w, *scales;
    uint8_t w_pad[64], scale_pad[4];
} super_block;

AVX2_INLINE void locate(super_block *b, const uint8_t *w, const uint8_t *scales, int64_t groups,
                        int64_t s) {
    b->w = w + 64 * s;
    b->scales = scales + 4 * s;
    int64_t left = groups - 4 * s;
    if (left >= 4) return;
    memset(b->w_pad, 0, sizeof b->w_pad);
    memset(b->scale_pad, 127, sizeof b->scale_pad);
    memcpy(b->w_pad, b->w, (size_t)left * 16);
    memcpy(b->scale_pad, b->scales, (size_t)left);
    b->w = b->w_pad;
    b->scales = b->scale_pad;
}

AVX2_INLINE float end_lanes(const __m256 acc[2]) {
    float a[16];
    _mm256_storeu_ps(a, acc[0]);
    _mm256_storeu_ps(a + 8, acc[1]);
    return lanes_sum(a);
}

/* `streams` rows, `step` apart, times one column. */
AVX2_INLINE void column_rows(const uint8_t *packed, const uint8_t *scales, int64_t row,
                             int64_t step, int streams, int64_t groups, const float *x, float *y) {
    __m256 acc[2][2];
    for (int i = 0; i < streams; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    int64_t s = 0;
    for (; 4 * s + 4 <= groups; s++)
        for (int i = 0; i < streams; i++) {
            int64_t at = (row + i * step) * groups + 4 * s;
            multiply_super(packed + at * 16, scales + at, x + 128 * s, acc[i]);
        }
    for (int i = 0; i < streams; i++) {
        int64_t at = (row + i * step) * groups;
        if (4 * s < groups) {
            super_block tail;
            locate(&tail, packed + at * 16, scales + at, groups, s);
            multiply_super(tail.w, tail.scales, x + 128 * s, acc[i]);
        }
        y[row + i * step] = end_lanes(acc[i]);
    }
}

AVX2_INLINE void tile_super(const uint8_t *w, const uint8_t *scales, int64_t groups, int64_t s,
                            scaled_super *out) {
    super_block b;
    __m256 weights[8], scale[2];
    locate(&b, w, scales, groups, s);
    expand_scales(b.scales, scale);
    for (int i = 0; i < 2; i++) {
        expand(_mm256_loadu_si256((const __m256i *)(const void *)(b.w + 32 * i)), weights);
        for (int j = 0; j < 8; j++) _mm256_storeu_ps(out->step[j] + 8 * i, weights[j]);
        _mm256_storeu_ps(out->factor + 8 * i, scale[i]);
    }
}

/* `rows` (at most SCALED_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
AVX2 static void product_tile(const uint8_t *w, const uint8_t *scales, int64_t rows,
                              int64_t groups, const float *x, int64_t x_stride, int64_t count,
                              float *y, int64_t y_stride) {
    scaled_super tile[SCALED_ROWS][TILE_SUPERS] __attribute__((aligned(64)));
    float lanes[SCALED_ROWS][KIMI_BATCH][16] __attribute__((aligned(64)));
    memset(lanes, 0, sizeof lanes);
    int64_t all = (groups + 3) / 4;
    for (int64_t s0 = 0; s0 < all; s0 += TILE_SUPERS) {
        int64_t supers = all - s0 < TILE_SUPERS ? all - s0 : TILE_SUPERS;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t s = 0; s < supers; s++)
                tile_super(w + r * groups * 16, scales + r * groups, groups, s0 + s, tile[r] + s);
#define TILE(r, tall, t, wide)                                                                    \
    scaled_tile(tile + (r), tall, x + (t) * x_stride + 128 * s0, x_stride, wide, supers,          \
                lanes[r][t], KIMI_BATCH * 16)
        BATCH_EDGES(TILE, rows, count, SCALED_ROWS, SCALED_COLUMNS)
#undef TILE
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < count; t++) y[t * y_stride + r] = lanes_sum(lanes[r][t]);
}

AVX2 void product_mxfp4_avx2(const uint8_t *packed, const uint8_t *scales, int64_t lo, int64_t hi,
                             int64_t cols, const float *x, int64_t x_stride, int64_t count,
                             float *y, int64_t y_stride) {
    int64_t groups = cols / 32;
    if (count == 1) {
        int64_t step = (hi - lo) / 2;
        for (int64_t r = lo; r < lo + step; r++)
            column_rows(packed, scales, r, step, 2, groups, x, y);
        for (int64_t r = lo + 2 * step; r < hi; r++)
            column_rows(packed, scales, r, 0, 1, groups, x, y);
        return;
    }
    for (int64_t r = lo; r < hi; r += SCALED_ROWS)
        for (int64_t t = 0; t < count; t += KIMI_BATCH)
            product_tile(packed + r * groups * 16, scales + r * groups,
                         hi - r < SCALED_ROWS ? hi - r : SCALED_ROWS, groups, x + t * x_stride,
                         x_stride, count - t < KIMI_BATCH ? count - t : KIMI_BATCH,
                         y + t * y_stride + r, y_stride);
}
#else
typedef int kimi_no_avx2_mxfp4;
#endif
