/* product_avx512.c: the dense product for AVX-512.
 *
 * One column is bound by memory, which AVX2's room already keeps busy. Many columns: the 16 lanes
 * of the contract are one register, in AVX2's split order, so that x is prepared alike.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx512
#include "dense_avx2.h"

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

enum { TILE_ROWS = 8 };

/* `rows` (at most TILE_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
AVX512 static void product_tile(const kimi_matrix *w, int64_t r0, int64_t rows, const float *x,
                                int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    float tile[TILE_ROWS][TILE_COLUMNS] __attribute__((aligned(64)));
    float lanes[TILE_ROWS][KIMI_BATCH][16] __attribute__((aligned(64)));
    memset(lanes, 0, sizeof lanes);
    for (int64_t c0 = 0; c0 < w->cols; c0 += TILE_COLUMNS) {
        int64_t n = w->cols - c0 < TILE_COLUMNS ? w->cols - c0 : TILE_COLUMNS;
        for (int64_t r = 0; r < rows; r++) tile_row(w, r0 + r, c0, n, tile[r], 16, 8);
#define TILE(r, tall, t, wide)                                                                    \
    dense_tile(tile + (r), tall, x + (t) * x_stride + c0, x_stride, wide, n, lanes[r][t],         \
               KIMI_BATCH * 16)
        BATCH_EDGES(TILE, rows, count, BATCH_ROWS, BATCH_COLUMNS)
#undef TILE
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < count; t++) {
            lanes16 v = {_mm256_load_ps(lanes[r][t]), _mm256_load_ps(lanes[r][t] + 8)};
            y[t * y_stride + r0 + r] = lanes_end(v, w->format != KIMI_F32);
        }
}

AVX512 void product_avx512(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                           int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    if (count == 1) {
        product_avx2(w, lo, hi, x, x_stride, count, y, y_stride);
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
