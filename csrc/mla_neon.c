/* mla_neon.c: the two sides of latent attention that sum rows, for NEON. */
#if defined(__aarch64__)
#define KIMI_VARIANT neon
#define KIMI_TARGET
#include "dense_neon.h"

#define VEC_WIDTH 4
#include "blend.h"

enum { ABSORB_ROWS = 32, ABSORB_COLUMNS = 64 };

/* out (`vectors` of 4 columns) += rows times q; rows are ABSORB_COLUMNS apart. */
KIMI_INLINE void absorb_tile(const float *tile, int64_t rows, int vectors, const float *q,
                             float *out) {
    float32x4_t acc[ABSORB_COLUMNS / 4];
    for (int v = 0; v < vectors; v++) acc[v] = vld1q_f32(out + 4 * v);
    for (int64_t i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++)
            acc[v] = vfmaq_n_f32(acc[v], vld1q_f32(tile + i * ABSORB_COLUMNS + 4 * v), q[i]);
    for (int v = 0; v < vectors; v++) vst1q_f32(out + 4 * v, acc[v]);
}

void absorb_neon(const kimi_matrix *w, int64_t lo, int64_t nope, const float *q, int64_t q_stride,
                 int64_t count, float *out, int64_t out_stride) {
    float tile[ABSORB_ROWS][ABSORB_COLUMNS] __attribute__((aligned(64)));
    float sums[KIMI_BATCH][ABSORB_COLUMNS] __attribute__((aligned(64)));
    for (int64_t t0 = 0; t0 < count; t0 += KIMI_BATCH) {
        int64_t batch = count - t0 < KIMI_BATCH ? count - t0 : KIMI_BATCH;
        for (int64_t c0 = 0; c0 < w->cols; c0 += ABSORB_COLUMNS) {
            int64_t n = w->cols - c0 < ABSORB_COLUMNS ? w->cols - c0 : ABSORB_COLUMNS;
            memset(sums, 0, (size_t)batch * sizeof *sums);
            for (int64_t i = 0; i < nope; i += ABSORB_ROWS) {
                int64_t rows = nope - i < ABSORB_ROWS ? nope - i : ABSORB_ROWS;
                for (int64_t r = 0; r < rows; r++)
                    tile_row(w, lo + i + r, c0, n, tile[r], 16, 4);
                for (int64_t t = 0; t < batch; t++) {
                    const float *from = q + (t0 + t) * q_stride + i;
                    if (n == ABSORB_COLUMNS)
                        absorb_tile(tile[0], rows, ABSORB_COLUMNS / 4, from, sums[t]);
                    else
                        for (int64_t c = 0; c < n; c += 16)
                            absorb_tile(tile[0] + c, rows, 4, from, sums[t] + c);
                }
            }
            for (int64_t t = 0; t < batch; t++)
                memcpy(out + (t0 + t) * out_stride + c0, sums[t], (size_t)n * sizeof *out);
        }
    }
}

void blend_neon(const float *cache, int64_t positions, int64_t width, int64_t lo, int64_t hi,
                const float *e, int64_t e_stride, const double *sum, int64_t heads, float *out,
                int64_t rank) {
    blend_columns(cache, positions, width, lo, hi, e, e_stride, sum, heads, out, rank);
}
#else
typedef int kimi_no_neon_mla;
#endif
