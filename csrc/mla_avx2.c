/* mla_avx2.c: the two sides of latent attention that sum rows, for AVX2 and FMA. */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "dense_avx2.h"

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { ABSORB_ROWS = 32, ABSORB_COLUMNS = 64, BLEND_HEADS = 6, BLEND_COLUMNS = 16 };

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

/* out[h] (`vectors` x 8 columns) += `count` positions of a strip, for `heads` heads; the latter two
 * are constants at every call. */
AVX2_INLINE void blend_tile(const float strip[][BLEND_COLUMNS], int64_t count, const float *e,
                            int64_t e_stride, int heads, int vectors, float *out, int64_t rank) {
    __m256 sum[BLEND_HEADS][BLEND_COLUMNS / 8];
    const float *weights[BLEND_HEADS];
    for (int h = 0; h < heads; h++) {
        weights[h] = e + h * e_stride;
        for (int v = 0; v < vectors; v++) sum[h][v] = _mm256_setzero_ps();
    }
    for (int64_t s = 0; s < count; s++) {
        __m256 row[BLEND_COLUMNS / 8];
        for (int v = 0; v < vectors; v++) row[v] = _mm256_load_ps(strip[s] + 8 * v);
        for (int h = 0; h < heads; h++) {
            __m256 p = _mm256_broadcast_ss(weights[h] + s);
            for (int v = 0; v < vectors; v++) sum[h][v] = _mm256_fmadd_ps(p, row[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) {
            float *o = out + h * rank + 8 * v;
            _mm256_storeu_ps(o, _mm256_add_ps(_mm256_loadu_ps(o), sum[h][v]));
        }
}

/* out[h] += columns [c, c + 8 vectors) of one block of positions, which are copied together first:
 * in rows pages apart they would share a few sets of the first-level cache. */
AVX2_INLINE void blend_strip(const float *cache, int64_t width, int64_t count, const float *e,
                             int64_t e_stride, int64_t heads, int vectors, float *out,
                             int64_t rank) {
    float strip[KIMI_POSITION_BLOCK][BLEND_COLUMNS] __attribute__((aligned(32)));
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < vectors; v++)
            _mm256_store_ps(strip[s] + 8 * v, _mm256_loadu_ps(cache + s * width + 8 * v));
    const float(*from)[BLEND_COLUMNS] = (const float(*)[BLEND_COLUMNS])strip;
    int64_t h = 0;
    for (; h + BLEND_HEADS <= heads; h += BLEND_HEADS)
        blend_tile(from, count, e + h * e_stride, e_stride, BLEND_HEADS, vectors, out + h * rank,
                   rank);
    for (; h + BLEND_HEADS / 2 <= heads; h += BLEND_HEADS / 2)
        blend_tile(from, count, e + h * e_stride, e_stride, BLEND_HEADS / 2, vectors,
                   out + h * rank, rank);
    for (; h < heads; h++)
        blend_tile(from, count, e + h * e_stride, e_stride, 1, vectors, out + h * rank, rank);
}

/* Asks for the part of rows [lo, hi) of the cache that is copied when their block comes. */
AVX2_INLINE void blend_prefetch(const float *cache, int64_t width, int64_t lo, int64_t hi,
                                int64_t columns) {
    for (int64_t s = lo; s < hi; s++)
        for (int64_t c = 0; c < columns; c += 16)
            _mm_prefetch((const char *)(cache + s * width + c), _MM_HINT_T1);
}

AVX2 void blend_avx2(const float *cache, int64_t positions, int64_t width, int64_t lo, int64_t hi,
                     const float *e, int64_t e_stride, const double *sum, int64_t heads,
                     float *out, int64_t rank) {
    for (int64_t h = 0; h < heads; h++)
        memset(out + h * rank + lo, 0, (size_t)(hi - lo) * sizeof *out);
    for (int64_t s = 0; s < positions; s += KIMI_POSITION_BLOCK) {
        int64_t left = positions - s, next = s + KIMI_POSITION_BLOCK, c = lo;
        int64_t count = left < KIMI_POSITION_BLOCK ? left : KIMI_POSITION_BLOCK;
        int64_t after = left - count < KIMI_POSITION_BLOCK ? left - count : KIMI_POSITION_BLOCK;
        for (; c + BLEND_COLUMNS <= hi; c += BLEND_COLUMNS) {
            blend_prefetch(cache + lo, width, next + after * (c - lo) / (hi - lo),
                           next + after * (c - lo + BLEND_COLUMNS) / (hi - lo), hi - lo);
            blend_strip(cache + s * width + c, width, count, e + s, e_stride, heads,
                        BLEND_COLUMNS / 8, out + c, rank);
        }
        for (; c + 8 <= hi; c += 8)
            blend_strip(cache + s * width + c, width, count, e + s, e_stride, heads, 1, out + c,
                        rank);
        for (; c < hi; c++)
            for (int64_t h = 0; h < heads; h++) {
                float block = 0.0f;
                for (int64_t i = s; i < s + count; i++)
                    block = fmaf(e[h * e_stride + i], cache[i * width + c], block);
                out[h * rank + c] += block;
            }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c = lo; c < hi; c++)
            out[h * rank + c] = (float)((double)out[h * rank + c] / sum[h]);
}
#else
typedef int kimi_no_avx2_mla;
#endif
