/* mxfp4_avx512.c: the MXFP4 product for AVX-512.
 *
 * x is prepared as for AVX2 (mxfp4_avx2.c). A byte shuffle brings the eight nibbles of lane 4g + l
 * of a super-block into one dword, in the order of the steps j = 0..7; a step is then a shift and
 * one look-up in a register that holds the sixteen values:
 *
 *     bytes of group g    2l, 2l+1: columns 4l .. 4l+3      8+2l, 9+2l: columns 4l+16 .. 4l+19
 *     dword 4g + l        [2l | 2l+1 | 8+2l | 9+2l]         nibble j: step j
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx512
#define VEC_WIDTH 16
#define STEPS 32
#include "panel.h"

enum { STREAMS = 2 };

VEC_INLINE __m512 values(void) {
    return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                          -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
}

/* `groups` (at most 4) groups of 16 bytes, the rest zero, as the lanes' nibbles. */
VEC_INLINE __m512i lane_nibbles(const uint8_t *w, int64_t groups) {
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    __mmask16 there = (__mmask16)((1u << (4 * groups)) - 1u);
    return _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(there, w), order);
}

VEC_INLINE __m512 step_weights(__m512i nibbles, unsigned j, __m512 table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4 * j), table);
}

/* The scale bytes of `groups` (at most 4) groups as the factors of 16 lanes. */
VEC_INLINE __m512 lane_factors(const uint8_t *scales, int64_t groups) {
    uint8_t four[4] = {127, 127, 127, 127};
    int32_t word;
    memcpy(four, scales, groups < 4 ? (size_t)groups : 4);
    memcpy(&word, four, sizeof word);
    __m128i lanes = _mm_shuffle_epi8(
        _mm_cvtsi32_si128(word), _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    __m512i e = _mm512_slli_epi32(_mm512_cvtepu8_epi32(lanes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(e, _mm512_set1_epi32(0x00400000)));
}

VEC_INLINE __m512 multiply_super(const uint8_t *w, const uint8_t *scales, int64_t groups,
                                   const float *x, __m512 acc) {
    const __m512 table = values();
    __m512i nibbles = lane_nibbles(w, groups);
    __m512 p = _mm512_mul_ps(step_weights(nibbles, 0, table), _mm512_loadu_ps(x));
    for (unsigned j = 1; j < 8; j++)
        p = _mm512_fmadd_ps(step_weights(nibbles, j, table), _mm512_loadu_ps(x + 16 * j), p);
    return _mm512_fmadd_ps(p, lane_factors(scales, groups), acc);
}

VEC_INLINE float end_lanes(__m512 acc) {
    float a[16];
    _mm512_storeu_ps(a, acc);
    return lanes_sum(a);
}

/* `streams` rows, `step` apart, times one column; `streams` is a constant at every call. */
VEC_INLINE void column_rows(int64_t row, int64_t step, int streams, const uint8_t *packed,
                              const uint8_t *scales, int64_t groups, const float *x, float *y) {
    __m512 acc[STREAMS];
    for (int i = 0; i < streams; i++) acc[i] = _mm512_setzero_ps();
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4)
        for (int i = 0; i < streams; i++) {
            int64_t at = (row + i * step) * groups + g;
            _mm_prefetch((const char *)(packed + at * 16 + 512), _MM_HINT_T0);
            acc[i] = multiply_super(packed + at * 16, scales + at, 4, x + 32 * g, acc[i]);
        }
    for (int i = 0; i < streams; i++) {
        int64_t at = (row + i * step) * groups + g;
        if (g < groups)
            acc[i] = multiply_super(packed + at * 16, scales + at, groups - g, x + 32 * g, acc[i]);
        y[row + i * step] = end_lanes(acc[i]);
    }
}

/* `groups` (at most 4) groups as super-block s of row r; groups that are not there become 0. */
VEC_INLINE void decode_super(const uint8_t *w, const uint8_t *scales, int64_t groups, int64_t s,
                              int r, w_panel *out) {
    __m512i nibbles = lane_nibbles(w, groups);
    for (unsigned j = 0; j < 8; j++)
        _mm512_store_ps(out->at[0][8 * s + j][r], step_weights(nibbles, j, values()));
    _mm512_store_ps(out->factor[0][s][r], lane_factors(scales, groups));
}

VEC_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps,
                               int r, w_panel *out) {
    const expert_rows *e = weights;
    for (int64_t s = 0; s < steps / 8; s++) {
        int64_t g = first / 2 + 4 * s, at = row * e->groups + g;
        int64_t left = e->groups - g < 4 ? e->groups - g : 4;
        if (left == 4) /* a constant, where it matters */
            decode_super(e->packed + at * 16, e->scales + at, 4, s, r, out);
        else
            decode_super(e->packed + at * 16, e->scales + at, left, s, r, out);
    }
}

VEC_INLINE float panel_end(const void *weights, const __m512 lanes[1]) {
    (void)weights;
    return end_lanes(lanes[0]);
}

VEC_TARGET void product_mxfp4_avx512(const uint8_t *packed, const uint8_t *scales, int64_t lo,
                                       int64_t hi, int64_t cols, const float *x, int64_t x_stride,
                                       int64_t count, float *y, int64_t y_stride) {
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
typedef int kimi_no_avx512_mxfp4;
#endif
