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

#define VEC_WIDTH 8
#define STEPS 8
#include "panel.h"

enum { STREAMS = 2 };

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

/* 32 bytes (2 groups) looked up: the bytes of a bf16 for [low, high] nibbles. */
typedef struct {
    __m256i high[2], low[2];
} bf16_bytes;

AVX2_INLINE bf16_bytes look_up(const uint8_t *w) {
    const __m256i low4 = _mm256_set1_epi8(15);
    const __m256i high_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xBF,
                      (char)0xBF, (char)0xBF, (char)0xC0, (char)0xC0, (char)0xC0, (char)0xC0));
    const __m256i low_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0, 0, 0,
                      (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0));
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)w);
    bf16_bytes found;
    for (int odd = 0; odd < 2; odd++) {
        __m256i nibbles = _mm256_and_si256(odd ? _mm256_srli_epi16(bytes, 4) : bytes, low4);
        found.high[odd] = _mm256_shuffle_epi8(high_byte, nibbles);
        found.low[odd] = _mm256_shuffle_epi8(low_byte, nibbles);
    }
    return found;
}

/* Vector j = 4 half + 2 upper + odd of those 8 lanes is weight(pairs(b, half, odd), upper). */
AVX2_INLINE __m256i pairs(const bf16_bytes *b, int half, int odd) {
    return half ? _mm256_unpackhi_epi8(b->low[odd], b->high[odd])
                : _mm256_unpacklo_epi8(b->low[odd], b->high[odd]);
}

AVX2_INLINE __m256 weight(__m256i pair, int upper) {
    const __m256i mask = _mm256_set1_epi32((int)0xFFFF0000u);
    return _mm256_castsi256_ps(upper ? _mm256_and_si256(pair, mask) : _mm256_slli_epi32(pair, 16));
}

/* Scale bytes 2i and 2i + 1 as the factors of 8 lanes: into bits 24 to 31, and one down. */
AVX2_INLINE __m256 factors(const uint8_t *scales, int i) {
    const char a = (char)(2 * i), b = (char)(2 * i + 1);
    const __m256i order =
        _mm256_setr_epi8(-1, -1, -1, a, -1, -1, -1, a, -1, -1, -1, a, -1, -1, -1, a, -1, -1, -1, b,
                         -1, -1, -1, b, -1, -1, -1, b, -1, -1, -1, b);
    const __m256i least = _mm256_set1_epi32(0x00400000); /* scale byte 0: 2^-127 */
    int32_t four;
    memcpy(&four, scales, sizeof four);
    __m256i e = _mm256_srli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi32(four), order), 1);
    return _mm256_castsi256_ps(_mm256_max_epu32(e, least));
}

/* Super-block s of `streams` rows times 128 columns. Each weight is made where it is multiplied:
 * the chains of multiply-adds then wait less than when all weights come first. */
AVX2_INLINE void multiply_super(int streams, const uint8_t *const *w, const uint8_t *const *scales,
                                int64_t s, const float *x, __m256 (*acc)[2]) {
    for (int i = 0; i < 2; i++) {
        bf16_bytes found[STREAMS];
        __m256 p[STREAMS];
        for (int k = 0; k < streams; k++) found[k] = look_up(w[k] + 64 * s + 32 * i);
        for (int half = 0; half < 2; half++) {
            __m256i pair[STREAMS][2];
            for (int k = 0; k < streams; k++)
                for (int odd = 0; odd < 2; odd++) pair[k][odd] = pairs(&found[k], half, odd);
            for (int j = 0; j < 4; j++) {
                __m256 column = _mm256_loadu_ps(x + 16 * (4 * half + j) + 8 * i);
                for (int k = 0; k < streams; k++) {
                    __m256 a = weight(pair[k][j & 1], j >> 1);
                    p[k] = half + j ? _mm256_fmadd_ps(a, column, p[k]) : _mm256_mul_ps(a, column);
                }
            }
        }
        for (int k = 0; k < streams; k++)
            acc[k][i] = _mm256_fmadd_ps(p[k], factors(scales[k] + 4 * s, i), acc[k][i]);
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
AVX2_INLINE void column_rows(int64_t row, int64_t step, int streams, const uint8_t *packed,
                             const uint8_t *scales, int64_t groups, const float *x, float *y) {
    __m256 acc[STREAMS][2];
    const uint8_t *w[STREAMS], *factor[STREAMS];
    for (int k = 0; k < streams; k++) {
        acc[k][0] = acc[k][1] = _mm256_setzero_ps();
        w[k] = packed + (row + k * step) * groups * 16;
        factor[k] = scales + (row + k * step) * groups;
    }
    int64_t s = 0;
    for (; 4 * s + 4 <= groups; s++) {
        for (int k = 0; k < streams; k++)
            _mm_prefetch((const char *)(w[k] + 64 * s + 1024), _MM_HINT_T0);
        multiply_super(streams, w, factor, s, x + 128 * s, acc);
    }
    for (int k = 0; k < streams; k++) {
        if (4 * s < groups) {
            super_block tail;
            locate(&tail, w[k], factor[k], groups, s);
            multiply_super(1, &tail.w, &tail.scales, 0, x + 128 * s, acc + k);
        }
        y[row + k * step] = end_lanes(acc[k]);
    }
}

AVX2_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps, int r,
                              w_panel *out) {
    const expert_rows *e = weights;
    for (int64_t s = 0; s < steps / 8; s++) {
        super_block b;
        locate(&b, e->packed + row * e->groups * 16, e->scales + row * e->groups, e->groups,
               first / 8 + s);
        for (int i = 0; i < 2; i++) {
            bf16_bytes found = look_up(b.w + 32 * i);
            for (int j = 0; j < 8; j++)
                _mm256_store_ps(out->at[i][8 * s + j][r],
                                weight(pairs(&found, j >> 2, j & 1), j >> 1 & 1));
            _mm256_store_ps(out->factor[i][s][r], factors(b.scales, i));
        }
    }
}

AVX2_INLINE float panel_end(const void *weights, const __m256 lanes[2]) {
    (void)weights;
    return end_lanes(lanes);
}

AVX2 void product_mxfp4_avx2(const uint8_t *packed, const uint8_t *scales, int64_t lo, int64_t hi,
                             int64_t cols, const float *x, int64_t x_stride, int64_t count,
                             float *y, int64_t y_stride) {
    int64_t groups = cols / 32;
    if (count <= 2) { /* twice over the weights is quicker than panels half empty */
        for (int64_t t = 0; t < count; t++, x += x_stride, y += y_stride)
            STREAM_ROWS(column_rows, lo, hi, STREAMS, packed, scales, groups, x, y);
        return;
    }
    const expert_rows w = {packed, scales, groups};
    const panel_format format = {1, decode_panel, panel_end};
    panel_product(format, &w, lo, hi, (groups + 3) / 4 * 8, x, x_stride, count, y, y_stride);
}
#else
typedef int kimi_no_avx2_mxfp4;
#endif
