/* product_neon.c: the dense product for NEON, the 16 lanes of the contract in four registers.
 *
 * Weights of every format are brought into column order, so x is prepared as the plain room does.
 * One column streams rows far apart; many columns multiply decoded panels.
 */
#if defined(__aarch64__)
#define KIMI_VARIANT neon
#define KIMI_TARGET
#include "dense_neon.h"

#define VEC_WIDTH 4
#define STEPS 24
#include "panel.h"

/* Decoding packed rows takes the registers that two more streams would need. */
enum { STREAMS = 4, PACKED_STREAMS = 2 };

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

VEC_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps,
                               int r, w_panel *out) {
    const kimi_matrix *w = weights;
    int64_t c0 = 16 * first, n = w->cols - c0 < 16 * steps ? w->cols - c0 : 16 * steps;
    tile_row(w, row, c0, n, out->at[0][0][r], TALL * 4, STEPS * TALL * 4);
}

VEC_INLINE float panel_end(const void *weights, const float32x4_t lanes[4]) {
    (void)weights;
    return lanes_end((lanes16){{lanes[0], lanes[1], lanes[2], lanes[3]}});
}

void product_neon(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x, int64_t x_stride,
                  int64_t count, float *y, int64_t y_stride) {
    if (count <= 2) { /* twice over the weights is quicker than panels half empty */
        for (int64_t t = 0; t < count; t++)
            product_column(w, lo, hi, x + t * x_stride, y + t * y_stride);
        return;
    }
    const panel_format format = {0, decode_panel, panel_end};
    panel_product(format, w, lo, hi, (w->cols + 15) / 16, x, x_stride, count, y, y_stride);
}
#else
typedef int kimi_no_neon_product;
#endif
