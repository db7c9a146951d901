/* product_avx512.c: the dense product for AVX-512.
 *
 * One column is bound by memory, which AVX2's room already keeps busy. Many columns multiply
 * decoded panels: the 16 lanes of the contract are one register, in AVX2's split order, so that x
 * is prepared alike.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx512
#include "dense_avx2.h"

#define VEC_WIDTH 16
#define STEPS 32
#include "panel.h"

VEC_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps,
                               int r, w_panel *out) {
    const kimi_matrix *w = weights;
    int64_t c0 = 16 * first, n = w->cols - c0 < 16 * steps ? w->cols - c0 : 16 * steps;
    tile_row(w, row, c0, n, out->at[0][0][r], TALL * 16, 8);
}

VEC_INLINE float panel_end(const void *weights, const __m512 lanes[1]) {
    const kimi_matrix *w = weights;
    lanes16 halves = {_mm512_castps512_ps256(lanes[0]), _mm512_extractf32x8_ps(lanes[0], 1)};
    return lanes_end(halves, w->format != KIMI_F32);
}

VEC_TARGET void product_avx512(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                                 int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    if (count <= 2) {
        product_avx2(w, lo, hi, x, x_stride, count, y, y_stride);
        return;
    }
    const panel_format format = {0, decode_panel, panel_end};
    panel_product(format, w, lo, hi, (w->cols + 15) / 16, x, x_stride, count, y, y_stride);
}
#else
typedef int kimi_no_avx512_product;
#endif
