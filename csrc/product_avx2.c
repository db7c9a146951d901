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
#include <immintrin.h>

#include "decode.h"

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { STREAMS = 4, TILE_ROWS = 4 };

/* Lanes 0..7 and 8..15 of the contract, or, split, its even and odd lanes. */
typedef struct {
    __m256 a, b;
} lanes16;

AVX2_INLINE float lanes_end(lanes16 v, int split) {
    float a[16], even[8], odd[8];
    if (!split) {
        _mm256_storeu_ps(a, v.a);
        _mm256_storeu_ps(a + 8, v.b);
        return lanes_sum(a);
    }
    _mm256_storeu_ps(even, v.a);
    _mm256_storeu_ps(odd, v.b);
    for (int i = 0; i < 8; i++) {
        a[2 * i] = even[i];
        a[2 * i + 1] = odd[i];
    }
    return lanes_sum(a);
}

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

AVX2_INLINE __m256 widen_even(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }

AVX2_INLINE __m256 widen_odd(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000u)));
}

AVX2_INLINE void multiply_bf16(lanes16 *acc, __m256i w, __m256 even, __m256 odd) {
    acc->a = _mm256_fmadd_ps(widen_even(w), even, acc->a);
    acc->b = _mm256_fmadd_ps(widen_odd(w), odd, acc->b);
}

/* One packed block of 64 columns as four vectors of bf16 in column order. */
AVX2_INLINE void unpack_block(const uint8_t *block, __m256i table, __m256i out[4]) {
    const __m256i low4 = _mm256_set1_epi8(15);
    __m256i nibbles = _mm256_loadu_si256((const __m256i *)(const void *)(block + 64));
    __m256i high[2] = {
        _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, low4)),
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low4))};
    for (int h = 0; h < 2; h++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(block + 32 * h));
        out[2 * h] = _mm256_unpacklo_epi8(low, high[h]);
        out[2 * h + 1] = _mm256_unpackhi_epi8(low, high[h]);
    }
}

AVX2_INLINE __m256i load_table(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
}

/* One packed block with the row's escapes from *e on that fall into it. */
AVX2_INLINE void patch_block(const kimi_matrix *w, const uint8_t *block, int64_t column,
                             uint32_t *e, uint32_t end, __m256i out[4]) {
    uint16_t weights[64];
    unpack_block(block, load_table(w->table), out);
    for (int i = 0; i < 4; i++)
        _mm256_storeu_si256((__m256i *)(void *)(weights + 16 * i), out[i]);
    for (; *e < end && (int64_t)(w->escapes[*e] >> 16) < column + 64; ++*e)
        weights[(int64_t)(w->escapes[*e] >> 16) - column] = (uint16_t)(w->escapes[*e] & 0xFFFFu);
    for (int i = 0; i < 4; i++)
        out[i] = _mm256_loadu_si256((const __m256i *)(const void *)(weights + 16 * i));
}

AVX2_INLINE __m256i load_tail(const uint16_t *row, int64_t n) {
    uint16_t tail[16] = {0};
    memcpy(tail, row, (size_t)n * sizeof *row);
    return _mm256_loadu_si256((const __m256i *)(const void *)tail);
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
            multiply_bf16(acc + i, _mm256_loadu_si256((const __m256i *)(const void *)(from[i] + c)),
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
        for (int i = 0; i < streams; i++)
            if (e[i] < end[i] && (int64_t)(w->escapes[e[i]] >> 16) / 64 * 64 < stop)
                stop = (int64_t)(w->escapes[e[i]] >> 16) / 64 * 64;
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
    int64_t step;
    if (w->format == KIMI_PACKED) { /* two streams decode as fast as memory delivers */
        step = (hi - lo) / 2;
        for (int64_t r = lo; r < lo + step; r++) column_rows(w, r, step, 2, x, y);
        lo += 2 * step;
    } else {
        step = (hi - lo) / 4;
        for (int64_t r = lo; r < lo + step; r++) column_rows(w, r, step, 4, x, y);
        lo += 4 * step;
    }
    for (; lo < hi; lo++) column_rows(w, lo, 0, 1, x, y);
}

/* A chunk of one row as float32, in split order for 16-bit formats; returns its padded length. */
AVX2_INLINE int64_t tile_row(const kimi_matrix *w, int64_t r, int64_t c0, float *out) {
    if (w->format == KIMI_F32) return decode_row(w, r, c0, out);
    int64_t n = w->cols - c0 < KIMI_CHUNK ? w->cols - c0 : KIMI_CHUNK, c = 0;
    if (w->format == KIMI_BF16) {
        const uint16_t *row = (const uint16_t *)w->data + r * w->cols + c0;
        for (; c < n; c += 16) {
            __m256i v = c + 16 <= n ? _mm256_loadu_si256((const __m256i *)(const void *)(row + c))
                                    : load_tail(row + c, n - c);
            _mm256_storeu_ps(out + c, widen_even(v));
            _mm256_storeu_ps(out + c + 8, widen_odd(v));
        }
        return c;
    }
    const uint8_t *row = (const uint8_t *)w->data + (r * w->cols + c0) / 64 * 96;
    __m256i table = load_table(w->table), weights[4];
    for (; c < n; c += 64) {
        unpack_block(row + c / 64 * 96, table, weights);
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_ps(out + c + 16 * i, widen_even(weights[i]));
            _mm256_storeu_ps(out + c + 16 * i + 8, widen_odd(weights[i]));
        }
    }
    for (uint32_t e = decode_escape(w, r, c0); e < w->starts[r + 1]; e++) {
        int64_t column = (int64_t)(w->escapes[e] >> 16) - c0;
        if (column >= n) break;
        out[column / 16 * 16 + (column & 1) * 8 + column % 16 / 2] =
            bf16_float((uint16_t)(w->escapes[e] & 0xFFFFu));
    }
    return n;
}

/* `rows` tile rows times `columns` columns over n lanes-multiples; both constants at the call. */
AVX2_INLINE void tile_multiply(float tile[][KIMI_CHUNK], int rows, const float *x,
                               int64_t x_stride, int columns, int64_t n, float *lanes,
                               int64_t row_lanes) {
    lanes16 acc[2][2];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < columns; t++) {
            acc[r][t].a = _mm256_loadu_ps(lanes + r * row_lanes + 16 * t);
            acc[r][t].b = _mm256_loadu_ps(lanes + r * row_lanes + 16 * t + 8);
        }
    for (int64_t c = 0; c < n; c += 16)
        for (int t = 0; t < columns; t++) {
            __m256 a = _mm256_loadu_ps(x + t * x_stride + c);
            __m256 b = _mm256_loadu_ps(x + t * x_stride + c + 8);
            for (int r = 0; r < rows; r++) {
                acc[r][t].a = _mm256_fmadd_ps(_mm256_loadu_ps(tile[r] + c), a, acc[r][t].a);
                acc[r][t].b = _mm256_fmadd_ps(_mm256_loadu_ps(tile[r] + c + 8), b, acc[r][t].b);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < columns; t++) {
            _mm256_storeu_ps(lanes + r * row_lanes + 16 * t, acc[r][t].a);
            _mm256_storeu_ps(lanes + r * row_lanes + 16 * t + 8, acc[r][t].b);
        }
}

/* `rows` (at most TILE_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
AVX2 static void product_tile(const kimi_matrix *w, int64_t r0, int rows, const float *x,
                              int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    float tile[TILE_ROWS][KIMI_CHUNK], lanes[TILE_ROWS][KIMI_BATCH][16];
    memset(lanes, 0, sizeof lanes);
    for (int64_t c0 = 0; c0 < w->cols; c0 += KIMI_CHUNK) {
        int64_t n = 0;
        for (int r = 0; r < rows; r++) n = tile_row(w, r0 + r, c0, tile[r]);
        for (int64_t t = 0; t < count; t += 2)
            for (int r = 0; r < rows; r += 2) {
                const float *column = x + t * x_stride + c0;
                float *into = lanes[r][t];
                int pair = r + 1 < rows;
                if (pair && t + 1 < count)
                    tile_multiply(tile + r, 2, column, x_stride, 2, n, into, KIMI_BATCH * 16);
                else if (pair)
                    tile_multiply(tile + r, 2, column, x_stride, 1, n, into, KIMI_BATCH * 16);
                else if (t + 1 < count)
                    tile_multiply(tile + r, 1, column, x_stride, 2, n, into, KIMI_BATCH * 16);
                else
                    tile_multiply(tile + r, 1, column, x_stride, 1, n, into, KIMI_BATCH * 16);
            }
    }
    for (int r = 0; r < rows; r++)
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
        int rows = hi - r < TILE_ROWS ? (int)(hi - r) : TILE_ROWS;
        for (int64_t t = 0; t < count; t += KIMI_BATCH)
            product_tile(w, r, rows, x + t * x_stride, x_stride,
                         count - t < KIMI_BATCH ? count - t : KIMI_BATCH, y + t * y_stride,
                         y_stride);
    }
}
#else
typedef int kimi_no_avx2_product;
#endif
