/* product_avx512.c: the dense product for AVX-512: the 16 lanes of the contract are one register.
 *
 * Lanes keep column order. One column streams four rows far apart (two where they are packed);
 * many columns multiply a decoded tile of rows that stays in the first-level cache.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx512
#include "packed_avx2.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define AVX512_INLINE static inline __attribute__((always_inline)) AVX512

#define VEC __m512
#define VEC_WIDTH 16
#define vec_load _mm512_loadu_ps
#define vec_store _mm512_storeu_ps
#define vec_mul _mm512_mul_ps
#define vec_fma _mm512_fmadd_ps
#define vec_hold(v) __asm__("" : "+v"(v))
#define BATCH_TARGET AVX512
#define BATCH_ROWS 4
#define BATCH_COLUMNS 4
#define SCALED_ROWS 1 /* not used here */
#define SCALED_COLUMNS 1
#include "batch.h"

enum { STREAMS = 4, TILE_ROWS = 8 };

AVX512 void prepare_avx512(int format, const float *x, int64_t cols, float *out) {
    (void)format;
    memcpy(out, x, (size_t)cols * sizeof *x);
    for (int64_t c = cols; c % 16; c++) out[c] = 0.0f;
}

AVX512_INLINE float lanes_end(__m512 lanes) {
    float a[16];
    _mm512_storeu_ps(a, lanes);
    return lanes_sum(a);
}

AVX512_INLINE __m512 widen(__m256i w) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
}

AVX512_INLINE __mmask16 tail_mask(int64_t n) { return (__mmask16)((1u << n) - 1u); }

/* `streams` rows, `step` apart, times one column; `streams` is a constant at every call. */
AVX512_INLINE void rows_bf16(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                             const float *x, float *y) {
    __m512 acc[STREAMS];
    const uint16_t *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i] = _mm512_setzero_ps();
        from[i] = (const uint16_t *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        __m512 column = _mm512_loadu_ps(x + c);
        for (int i = 0; i < streams; i++)
            acc[i] = _mm512_fmadd_ps(widen(load_bits(from[i] + c)), column, acc[i]);
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            acc[i] = _mm512_fmadd_ps(widen(load_tail(from[i] + c, w->cols - c)),
                                     _mm512_loadu_ps(x + c), acc[i]);
        y[row + i * step] = lanes_end(acc[i]);
    }
}

AVX512_INLINE void rows_f32(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                            const float *x, float *y) {
    __m512 acc[STREAMS];
    const float *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i] = _mm512_setzero_ps();
        from[i] = (const float *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        __m512 column = _mm512_loadu_ps(x + c);
        for (int i = 0; i < streams; i++)
            acc[i] = _mm512_fmadd_ps(_mm512_loadu_ps(from[i] + c), column, acc[i]);
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            acc[i] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(tail_mask(w->cols - c), from[i] + c),
                                     _mm512_loadu_ps(x + c), acc[i]);
        y[row + i * step] = lanes_end(acc[i]);
    }
}

AVX512_INLINE __m512 multiply_block(__m512 acc, const __m256i weights[4], const float *x) {
    for (int i = 0; i < 4; i++)
        acc = _mm512_fmadd_ps(widen(weights[i]), _mm512_loadu_ps(x + 16 * i), acc);
    return acc;
}

/* Runs of blocks without an escape in any stream, then one block with the escapes patched in. */
AVX512_INLINE void rows_packed(const kimi_matrix *w, int64_t row, int64_t step, int streams,
                               const float *x, float *y) {
    __m512 acc[STREAMS];
    const uint8_t *from[STREAMS];
    uint32_t e[STREAMS], end[STREAMS];
    __m256i table = load_table(w->table);
    for (int i = 0; i < streams; i++) {
        acc[i] = _mm512_setzero_ps();
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
                acc[i] = multiply_block(acc[i], weights, x + c);
            }
        if (c < w->cols) {
            for (int i = 0; i < streams; i++) {
                __m256i weights[4];
                patch_block(w, from[i] + c / 64 * 96, c, e + i, end[i], weights);
                acc[i] = multiply_block(acc[i], weights, x + c);
            }
            c += 64;
        }
    }
    for (int i = 0; i < streams; i++) y[row + i * step] = lanes_end(acc[i]);
}

/* One column: the range is cut into equal parts that are walked together. */
AVX512 static void product_column(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                                  float *y) {
    int streams = w->format == KIMI_PACKED ? 2 : 4;
    int64_t step = (hi - lo) / streams, r = lo;
    for (; r < lo + step; r++) {
        if (w->format == KIMI_BF16)
            rows_bf16(w, r, step, 4, x, y);
        else if (w->format == KIMI_F32)
            rows_f32(w, r, step, 4, x, y);
        else
            rows_packed(w, r, step, 2, x, y);
    }
    for (r = lo + streams * step; r < hi; r++) {
        if (w->format == KIMI_BF16)
            rows_bf16(w, r, 0, 1, x, y);
        else if (w->format == KIMI_F32)
            rows_f32(w, r, 0, 1, x, y);
        else
            rows_packed(w, r, 0, 1, x, y);
    }
}

/* Columns [c0, c0 + n) of row r as float32 in column order, padded to a multiple of 16. */
AVX512_INLINE void tile_row(const kimi_matrix *w, int64_t r, int64_t c0, int64_t n, float *out) {
    int64_t c = 0;
    if (w->format == KIMI_F32) {
        const float *row = (const float *)w->data + r * w->cols + c0;
        for (; c < n; c += 16)
            _mm512_storeu_ps(out + c, n - c < 16 ? _mm512_maskz_loadu_ps(tail_mask(n - c), row + c)
                                                 : _mm512_loadu_ps(row + c));
        return;
    }
    if (w->format == KIMI_BF16) {
        const uint16_t *row = (const uint16_t *)w->data + r * w->cols + c0;
        for (; c < n; c += 16)
            _mm512_storeu_ps(out + c,
                             widen(n - c < 16 ? load_tail(row + c, n - c) : load_bits(row + c)));
        return;
    }
    const uint8_t *row = (const uint8_t *)w->data + (r * w->cols + c0) / 64 * 96;
    __m256i table = load_table(w->table), weights[4];
    for (; c < n; c += 64) {
        unpack_block(row + c / 64 * 96, table, weights);
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + c + 16 * i, widen(weights[i]));
    }
    for (uint32_t e = decode_escape(w, r, c0); e < w->starts[r + 1]; e++) {
        int64_t column = (int64_t)(w->escapes[e] >> 16) - c0;
        if (column >= n) break;
        out[column] = bf16_float((uint16_t)(w->escapes[e] & 0xFFFFu));
    }
}

/* `rows` (at most TILE_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
AVX512 static void product_tile(const kimi_matrix *w, int64_t r0, int64_t rows, const float *x,
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
        for (int64_t t = 0; t < count; t++) y[t * y_stride + r0 + r] = lanes_sum(lanes[r][t]);
}

AVX512 void product_avx512(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                           int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    if (count == 1) {
        product_column(w, lo, hi, x, y);
        return;
    }
    for (int64_t r = lo; r < hi; r += TILE_ROWS)
        for (int64_t t = 0; t < count; t += KIMI_BATCH)
            product_tile(w, r, hi - r < TILE_ROWS ? hi - r : TILE_ROWS, x + t * x_stride, x_stride,
                         count - t < KIMI_BATCH ? count - t : KIMI_BATCH, y + t * y_stride,
                         y_stride);
}
#else
typedef int kimi_no_avx512_product;
#endif
