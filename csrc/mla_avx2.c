/* mla_avx2.c: the two sides of latent attention that sum rows, for AVX2 and FMA. */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "dense_avx2.h"

#define VEC_WIDTH 8
#include "blend.h"

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { ABSORB_ROWS = 32, ABSORB_COLUMNS = 64 };

/* out (wide columns from c0 on) += rows times q, for every token; the tile is in split order for
 * 16-bit weights, and so is `out` until it is finished. */
AVX2_INLINE void absorb_tile(float tile[][ABSORB_COLUMNS], int64_t rows, int vectors,
                             const float *q, float *out) {
    __m256 acc[ABSORB_COLUMNS / 8];
    for (int v = 0; v < vectors; v++) acc[v] = _mm256_loadu_ps(out + 8 * v);
    for (int64_t i = 0; i < rows; i++) {
        __m256 qi = _mm256_broadcast_ss(q + i);
        for (int v = 0; v < vectors; v++)
            acc[v] = _mm256_fmadd_ps(qi, _mm256_load_ps(tile[i] + 8 * v), acc[v]);
    }
    for (int v = 0; v < vectors; v++) _mm256_storeu_ps(out + 8 * v, acc[v]);
}

/* Up to ABSORB_COLUMNS columns from split order to their own. */
AVX2_INLINE void unsplit(const float *split, int64_t n, float *out) {
    for (int64_t c = 0; c < n; c++) out[c] = split[c / 16 * 16 + (c & 1) * 8 + c % 16 / 2];
}

AVX2 void absorb_avx2(const kimi_matrix *w, int64_t lo, int64_t nope, const float *q,
                      int64_t q_stride, int64_t count, float *out, int64_t out_stride) {
    float tile[ABSORB_ROWS][ABSORB_COLUMNS] __attribute__((aligned(64)));
    float sums[KIMI_BATCH][ABSORB_COLUMNS] __attribute__((aligned(64)));
    for (int64_t t0 = 0; t0 < count; t0 += KIMI_BATCH) {
        int64_t batch = count - t0 < KIMI_BATCH ? count - t0 : KIMI_BATCH;
        for (int64_t c0 = 0; c0 < w->cols; c0 += ABSORB_COLUMNS) {
            int64_t n = w->cols - c0 < ABSORB_COLUMNS ? w->cols - c0 : ABSORB_COLUMNS;
            memset(sums, 0, (size_t)batch * sizeof *sums);
            for (int64_t i = 0; i < nope; i += ABSORB_ROWS) {
                int64_t rows = nope - i < ABSORB_ROWS ? nope - i : ABSORB_ROWS;
                for (int64_t r = 0; r < rows; r++) tile_row(w, lo + i + r, c0, n, tile[r], 16, 8);
                for (int64_t t = 0; t < batch; t++) {
                    const float *from = q + (t0 + t) * q_stride + i;
                    if (n == ABSORB_COLUMNS)
                        absorb_tile(tile, rows, ABSORB_COLUMNS / 8, from, sums[t]);
                    else
                        absorb_tile(tile, rows, (int)((n + 15) / 16 * 2), from, sums[t]);
                }
            }
            for (int64_t t = 0; t < batch; t++) {
                float *into = out + (t0 + t) * out_stride + c0;
                if (w->format == KIMI_F32)
                    memcpy(into, sums[t], (size_t)n * sizeof *into);
                else
                    unsplit(sums[t], n, into);
            }
        }
    }
}

VEC_TARGET void blend_avx2(const float *cache, int64_t positions, int64_t width, int64_t lo,
                           int64_t hi, const float *e, int64_t e_stride, const double *sum,
                           int64_t heads, float *out, int64_t rank) {
    blend_columns(cache, positions, width, lo, hi, e, e_stride, sum, heads, out, rank);
}
#else
typedef int kimi_no_avx2_mla;
#endif
