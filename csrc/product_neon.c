/* product_neon.c: the dense product for NEON, the 16 lanes of the contract in four registers.
 *
 * Weights of every format are brought into column order, so x is prepared as the plain room does.
 * One column streams rows far apart; many columns multiply a decoded tile of rows that stays in
 * the first-level cache.
 */
#if defined(__aarch64__)
#define KIMI_VARIANT neon
#define KIMI_TARGET
#include "dense_neon.h"

#define VEC float32x4_t
#define VEC_WIDTH 4
#define vec_load vld1q_f32
#define vec_store vst1q_f32
#define vec_mul vmulq_f32
#define vec_fma(a, b, c) vfmaq_f32(c, a, b)
#define vec_hold(v) __asm__("" : "+w"(v))
#define BATCH_TARGET
#define BATCH_ROWS 3 /* 24 accumulators, 2 columns and a weight: 27 of 32 registers */
#define BATCH_COLUMNS 2
#define SCALED_ROWS 1 /* not used here */
#define SCALED_COLUMNS 1
#include "batch.h"

/* Decoding packed rows takes the registers that two more streams would need. */
enum { STREAMS = 4, PACKED_STREAMS = 2, TILE_ROWS = 6 };

void prepare_neon(int format, const float *x, int64_t cols, float *out) {
    prepare_base(format, x, cols, out);
}

/* `streams` rows, `step` apart, times one column; unrolled by the compiler per constant. */
KIMI_INLINE void rows_bf16(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                           const float *x, float *y) {
    lanes16 acc[STREAMS];
    const uint16_t *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i] = lanes_zero();
        from[i] = (const uint16_t *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        lanes16 column = lanes_load(x + c);
        for (int i = 0; i < streams; i++)
            lanes_fma(acc + i, lanes_load_bf16(from[i] + c), column);
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            lanes_fma(acc + i, lanes_tail_bf16(from[i] + c, w->cols - c), lanes_load(x + c));
        y[row + i * step] = lanes_end(acc[i]);
    }
}

KIMI_INLINE void rows_f32(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                          const float *x, float *y) {
    lanes16 acc[STREAMS];
    const float *from[STREAMS];
    for (int i = 0; i < streams; i++) {
        acc[i] = lanes_zero();
        from[i] = (const float *)w->data + (row + i * step) * w->cols;
    }
    int64_t c = 0;
    for (; c + 16 <= w->cols; c += 16) {
        lanes16 column = lanes_load(x + c);
        for (int i = 0; i < streams; i++) lanes_fma(acc + i, lanes_load(from[i] + c), column);
    }
    for (int i = 0; i < streams; i++) {
        if (c < w->cols)
            lanes_fma(acc + i, lanes_tail(from[i] + c, w->cols - c), lanes_load(x + c));
        y[row + i * step] = lanes_end(acc[i]);
    }
}

KIMI_INLINE void multiply_block(lanes16 *acc, const uint16x8_t weights[8], const float *x) {
    for (int i = 0; i < 4; i++)
        lanes_fma(acc, lanes_widen(weights[2 * i], weights[2 * i + 1]), lanes_load(x + 16 * i));
}

/* Runs of blocks without an escape in any stream, then one block with the escapes patched in. */
KIMI_INLINE void rows_packed(int64_t row, int64_t step, int streams, const kimi_matrix *w,
                             const float *x, float *y) {
    lanes16 acc[STREAMS];
    const uint8_t *from[STREAMS];
    uint32_t e[STREAMS], end[STREAMS];
    uint16x8_t weights[8];
    uint8x16_t table = vld1q_u8(w->table);
    for (int i = 0; i < streams; i++) {
        acc[i] = lanes_zero();
        from[i] = (const uint8_t *)w->data + (row + i * step) * (w->cols / 64 * 96);
        e[i] = w->starts[row + i * step];
        end[i] = w->starts[row + i * step + 1];
    }
    for (int64_t c = 0; c < w->cols;) {
        int64_t stop = w->cols;
        for (int i = 0; i < streams; i++) stop = next_escape(w, e[i], end[i], stop);
        for (; c < stop; c += 64)
            for (int i = 0; i < streams; i++) {
                unpack_block(from[i] + c / 64 * 96, table, weights);
                multiply_block(acc + i, weights, x + c);
            }
        if (c < w->cols) {
            for (int i = 0; i < streams; i++) {
                patch_block(w, from[i] + c / 64 * 96, c, e + i, end[i], weights);
                multiply_block(acc + i, weights, x + c);
            }
            c += 64;
        }
    }
    for (int i = 0; i < streams; i++) y[row + i * step] = lanes_end(acc[i]);
}

static void product_column(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x, float *y) {
    if (w->format == KIMI_BF16)
        STREAM_ROWS(rows_bf16, lo, hi, STREAMS, w, x, y);
    else if (w->format == KIMI_F32)
        STREAM_ROWS(rows_f32, lo, hi, STREAMS, w, x, y);
    else
        STREAM_ROWS(rows_packed, lo, hi, PACKED_STREAMS, w, x, y);
}

/* `rows` (at most TILE_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
static void product_tile(const kimi_matrix *w, int64_t r0, int64_t rows, const float *x,
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
        for (int64_t t = 0; t < count; t++)
            y[t * y_stride + r0 + r] = lanes_end(lanes_load(lanes[r][t]));
}

void product_neon(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x, int64_t x_stride,
                  int64_t count, float *y, int64_t y_stride) {
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
typedef int kimi_no_neon_product;
#endif
