/* product_avx2.c: the dense product for AVX2 and FMA.
 *
 * bf16 weights are widened by shift and mask, which parts even columns from odd ones; so x is
 * prepared as [even 8 | odd 8] per 16 columns and the lanes live in that order ("split"). float32
 * weights keep column order ("natural"). One column streams four rows far apart; many columns
 * multiply a decoded tile of rows that stays in the first-level cache.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "dense_avx2.h"

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
#define BATCH_ROWS 3
#define BATCH_COLUMNS 2
#define SCALED_ROWS 1 /* not used here */
#define SCALED_COLUMNS 1
#include "batch.h"

enum { STREAMS = 4, TILE_ROWS = 6 };

AVX2 void prepare_avx2(int format, const float *x, int64_t cols, float *out) {
    int64_t c = 0;
    if (format != KIMI_F32) {
        for (; c + 16 <= cols; c += 16)
            for (int i = 0; i < 8; i++) {
                out[c + i] = x[c + 2 * i];
                out[c + 8 + i] = x[c + 2 * i + 1];
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

/* `streams` rows, `step` apart, times one column; unrolled by the compiler per constant. */
AVX2_INLINE void rows_bf16(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                           const float *x, float *y) {
    lanes16 acc[STREAMS];
    const uint16_t *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i].a = acc[i].b = _mm256_setzero_ps();
        from[i] = (const uint16_t *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        __m256 even = _mm256_loadu_ps(x + c), odd = _mm256_loadu_ps(x + c + 8);
        for (int i = 0; i < streams; i++)
            multiply_bf16(acc + i, load_bits(from[i] + c),
                          even, odd);
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            multiply_bf16(acc + i, load_tail(from[i] + c, w->cols - c), _mm256_loadu_ps(x + c),
                          _mm256_loadu_ps(x + c + 8));
        y[row + i * step] = lanes_end(acc[i], 1);
    }
}

AVX2_INLINE void rows_f32(const kimi_matrix *w, int64_t row, int64_t step, int streams,
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

/* Runs of blocks without an escape in any stream, then one block with the escapes patched in. */
AVX2_INLINE void rows_packed(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                             const float *x, float *y) {
    lanes16 acc[STREAMS];
    const uint8_t *from[STREAMS];
    uint32_t e[STREAMS], end[STREAMS];
    __m256i table = load_table(w->table);
    for (int i = 0; i < streams; i++) {
        acc[i].a = acc[i].b = _mm256_setzero_ps();
        from[i] = (const uint8_t *)w->data + (row + i * step) * (w->cols / 64 * 96);
        e[i] = w->starts[row + i * step];
        end[i] = w->starts[row + i * step + 1];
    }
    for (int64_t c = 0; c < w->cols;) {
        int64_t stop = w->cols;
        for (int i = 0; i < streams; i++) stop = next_escape(w, e[i], end[i], stop);
        for (; c < stop; c += 64)
            for (int i = 0; i < streams; i++) {
                __m256i weights[4];
                const uint8_t *block = from[i] + c / 64 * 96;
                _mm_prefetch((const char *)(block + 1024), _MM_HINT_T0);
                unpack_block(block, table, weights);
                multiply_block(acc + i, weights, x + c);
            }
        if (c < w->cols) {
            for (int i = 0; i < streams; i++) {
                __m256i weights[4];
                patch_block(w, from[i] + c / 64 * 96, c, e + i, end[i], weights);
                multiply_block(acc + i, weights, x + c);
            }
            c += 64;
        }
    }
    for (int i = 0; i < streams; i++) y[row + i * step] = lanes_end(acc[i], 1);
}

/* One column: the range is cut into `streams` equal parts that are walked together. */
AVX2_INLINE void column_rows(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                             const float *x, float *y) {
    if (w->format == KIMI_BF16)
        rows_bf16(w, row, step, streams, x, y);
    else if (w->format == KIMI_F32)
        rows_f32(w, row, step, streams, x, y);
    else
        rows_packed(w, row, step, streams, x, y);
}

AVX2 static void product_column(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                                float *y) {
    int64_t step = (hi - lo) / STREAMS;
    for (int64_t r = lo; r < lo + step; r++) column_rows(w, r, step, STREAMS, x, y);
    lo += STREAMS * step;
    for (; lo < hi; lo++) column_rows(w, lo, 0, 1, x, y);
}

/* `rows` (at most TILE_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
AVX2 static void product_tile(const kimi_matrix *w, int64_t r0, int64_t rows, const float *x,
                              int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    float tile[TILE_ROWS][TILE_COLUMNS] __attribute__((aligned(64)));
    float lanes[TILE_ROWS][KIMI_BATCH][16] __attribute__((aligned(64)));
    memset(lanes, 0, sizeof lanes);
    for (int64_t c0 = 0; c0 < w->cols; c0 += TILE_COLUMNS) {
        int64_t n = w->cols - c0 < TILE_COLUMNS ? w->cols - c0 : TILE_COLUMNS;
        for (int64_t r = 0; r < rows; r++) tile_row(w, r0 + r, c0, n, tile[r]);
#define TILE(r, tall, t, wide)                                                                    \
    dense_tile(tile + (r), tall, x + (t) * x_stride + c0, x_stride, wide, n, lanes[r][t],         \
               KIMI_BATCH * 16)
        BATCH_EDGES(TILE, rows, count, BATCH_ROWS, BATCH_COLUMNS)
#undef TILE
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < count; t++) {
            lanes16 v = {_mm256_loadu_ps(lanes[r][t]), _mm256_loadu_ps(lanes[r][t] + 8)};
            y[t * y_stride + r0 + r] = lanes_end(v, w->format != KIMI_F32);
        }
}

AVX2 void product_avx2(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                       int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    if (count == 1) {
        product_column(w, lo, hi, x, y);
        return;
    }
    for (int64_t r = lo; r < hi; r += TILE_ROWS) {
        int64_t rows = hi - r < TILE_ROWS ? hi - r : TILE_ROWS;
        for (int64_t t = 0; t < count; t += KIMI_BATCH)
            product_tile(w, r, rows, x + t * x_stride, x_stride,
                         count - t < KIMI_BATCH ? count - t : KIMI_BATCH, y + t * y_stride,
                         y_stride);
    }
}
#else
typedef int kimi_no_avx2_product;
#endif
