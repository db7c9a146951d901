/* product_avx2.c: the dense product for AVX2 and FMA.
 *
 * bf16 weights are widened by shift and mask, which parts even columns from odd ones; so x is
 * prepared as [even 8 | odd 8] per 16 columns and the lanes live in that order ("split"). float32
 * weights keep column order ("natural"). One column streams four or five rows far apart; many
 * columns multiply decoded panels.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "dense_avx2.h"

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

#define VEC_WIDTH 8
#define STEPS 24
#include "panel.h"

enum { STREAMS = 4, BF16_STREAMS = 5 };

AVX2 void prepare_avx2(int format, const float *x, int64_t cols, float *out) {
    int64_t c = 0;
    if (format != KIMI_F32) {
        for (; c + 16 <= cols; c += 16) {
            __m256 a = _mm256_loadu_ps(x + c), b = _mm256_loadu_ps(x + c + 8);
            __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)); /* a b a b, in pairs */
            __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD));
            _mm256_storeu_ps(out + c, _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xD8)));
            _mm256_storeu_ps(out + c + 8, _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xD8)));
        }
        if (c == cols) return;
        for (int i = 0; i < 16; i++)
            out[c + (i & 1) * 8 + i / 2] = c + i < cols ? x[c + i] : 0.0f;
        return;
    }
    memcpy(out, x, (size_t)cols * sizeof *x);
    for (c = cols; c % 16; c++) out[c] = 0.0f;
}

AVX2_INLINE void multiply_bf16(lanes16 *acc, __m256i w, __m256 even, __m256 odd) {
    acc->a = _mm256_fmadd_ps(widen_even(w), even, acc->a);
    acc->b = _mm256_fmadd_ps(widen_odd(w), odd, acc->b);
}

AVX2_INLINE void step_bf16(lanes16 *acc, const uint16_t *const *from, int streams, int64_t c,
                           const float *x) {
    __m256 even = _mm256_loadu_ps(x + c), odd = _mm256_loadu_ps(x + c + 8);
    for (int i = 0; i < streams; i++) multiply_bf16(acc + i, load_bits(from[i] + c), even, odd);
}

/* `streams` rows, `step` apart, times one column; unrolled by the compiler per constant. */
AVX2_INLINE void rows_bf16(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                           const float *x, float *y) {
    lanes16 acc[BF16_STREAMS];
    const uint16_t *from[BF16_STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i].a = acc[i].b = _mm256_setzero_ps();
        from[i] = (const uint16_t *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 32 <= w->cols; c += 32) { /* a line of each row */
        for (int i = 0; i < streams; i++)
            _mm_prefetch((const char *)(from[i] + c) + 384, _MM_HINT_T0);
        step_bf16(acc, from, streams, c, x);
        step_bf16(acc, from, streams, c + 16, x);
    }
    if (c + 16 <= w->cols) {
        step_bf16(acc, from, streams, c, x);
        c += 16;
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            multiply_bf16(acc + i, load_tail(from[i] + c, w->cols - c), _mm256_loadu_ps(x + c),
                          _mm256_loadu_ps(x + c + 8));
        y[row + i * step] = lanes_end(acc[i], 1);
    }
}

AVX2_INLINE void rows_f32(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                          const float *x, float *y) {
    lanes16 acc[STREAMS];
    const float *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i].a = acc[i].b = _mm256_setzero_ps();
        from[i] = (const float *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        __m256 a = _mm256_loadu_ps(x + c), b = _mm256_loadu_ps(x + c + 8);
        for (int i = 0; i < streams; i++) {
            acc[i].a = _mm256_fmadd_ps(_mm256_loadu_ps(from[i] + c), a, acc[i].a);
            acc[i].b = _mm256_fmadd_ps(_mm256_loadu_ps(from[i] + c + 8), b, acc[i].b);
        }
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols) {
            float tail[16] = {0.0f};
            memcpy(tail, from[i] + c, (size_t)(w->cols - c) * sizeof *tail);
            acc[i].a = _mm256_fmadd_ps(_mm256_loadu_ps(tail), _mm256_loadu_ps(x + c), acc[i].a);
            acc[i].b =
                _mm256_fmadd_ps(_mm256_loadu_ps(tail + 8), _mm256_loadu_ps(x + c + 8), acc[i].b);
        }
        y[row + i * step] = lanes_end(acc[i], 0);
    }
}

AVX2_INLINE void multiply_block(lanes16 *acc, const __m256i weights[4], const float *x) {
    for (int i = 0; i < 4; i++)
        multiply_bf16(acc, weights[i], _mm256_loadu_ps(x + 16 * i),
                      _mm256_loadu_ps(x + 16 * i + 8));
}

/* Runs of blocks without an escape in any stream, then one block with the escapes patched in. The
 * rows are walked by bytes: columns and their divisions would cost the loop a tenth. */
AVX2_INLINE void rows_packed(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                             const float *x, float *y) {
    lanes16 acc[STREAMS];
    const uint8_t *from[STREAMS];
    uint32_t e[STREAMS], end[STREAMS];
    __m256i table = load_table(w->table), weights[4];
    int64_t row_bytes = w->cols / 64 * 96;
    for (int i = 0; i < streams; i++) {
        acc[i].a = acc[i].b = _mm256_setzero_ps();
        from[i] = (const uint8_t *)w->data + (row + i * step) * row_bytes;
        e[i] = w->starts[row + i * step];
        end[i] = w->starts[row + i * step + 1];
    }
    for (int64_t at = 0; at < row_bytes; at += 96, x += 64) {
        int64_t stop = w->cols;
        for (int i = 0; i < streams; i++) stop = next_escape(w, e[i], end[i], stop);
        stop = stop / 64 * 96;
        for (; at < stop; at += 96, x += 64)
            for (int i = 0; i < streams; i++) {
                const uint8_t *block = from[i] + at;
                _mm_prefetch((const char *)(block + 1024), _MM_HINT_T0);
                _mm_prefetch((const char *)(block + 1088), _MM_HINT_T0); /* 96 bytes: 2 lines */
                unpack_block(block, table, weights);
                multiply_block(acc + i, weights, x);
            }
        if (at == row_bytes) break;
        for (int i = 0; i < streams; i++) {
            patch_block(w, from[i] + at, at / 96 * 64, e + i, end[i], weights);
            multiply_block(acc + i, weights, x);
        }
    }
    for (int i = 0; i < streams; i++) y[row + i * step] = lanes_end(acc[i], 1);
}

AVX2 static void product_column(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                                float *y) {
    if (w->format == KIMI_BF16)
        STREAM_ROWS(rows_bf16, lo, hi, BF16_STREAMS, w, x, y);
    else if (w->format == KIMI_F32)
        STREAM_ROWS(rows_f32, lo, hi, STREAMS, w, x, y);
    else
        STREAM_ROWS(rows_packed, lo, hi, STREAMS, w, x, y);
}

AVX2_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps, int r,
                              w_panel *out) {
    const kimi_matrix *w = weights;
    int64_t c0 = 16 * first, n = w->cols - c0 < 16 * steps ? w->cols - c0 : 16 * steps;
    tile_row(w, row, c0, n, out->at[0][0][r], TALL * 8, STEPS * TALL * 8);
}

AVX2_INLINE float panel_end(const void *weights, const __m256 lanes[2]) {
    const kimi_matrix *w = weights;
    return lanes_end((lanes16){lanes[0], lanes[1]}, w->format != KIMI_F32);
}

AVX2 void product_avx2(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                       int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    if (count <= 2) { /* twice over the weights is quicker than panels half empty */
        for (int64_t t = 0; t < count; t++)
            product_column(w, lo, hi, x + t * x_stride, y + t * y_stride);
        return;
    }
    const panel_format format = {0, decode_panel, panel_end};
    panel_product(format, w, lo, hi, (w->cols + 15) / 16, x, x_stride, count, y, y_stride);
}
#else
typedef int kimi_no_avx2_product;
#endif
