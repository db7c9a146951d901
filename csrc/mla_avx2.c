/* mla_avx2.c: latent attention for AVX2 and FMA.
 *
 * KIMI_HEAD_GROUP heads share each load of the cache, two of its rows each load of the queries;
 * accumulators stay in registers.
 */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "dense_avx2.h"
#include "softmax.h"

#define HEADS_TARGET __attribute__((target("avx2,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { ABSORB_ROWS = 32, ABSORB_COLUMNS = 64, SCORE_ROWS = 2, VALUE_WIDE = 16 };

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

/* Scores of `rows` cache rows against `heads` queries, half of the 16 lanes after the other; both
 * are constants at every call. */
AVX2_INLINE void score_rows(const float *cache, int rows, const float *q, int64_t width, int heads,
                            float scale, float *out, int64_t out_stride) {
    float tail[SCORE_ROWS + KIMI_HEAD_GROUP][16];
    int64_t whole = width / 16 * 16, left = width - whole;
    __m256 half[2][SCORE_ROWS][KIMI_HEAD_GROUP];
    if (left) {
        memset(tail, 0, sizeof tail);
        for (int r = 0; r < rows; r++)
            memcpy(tail[r], cache + r * width + whole, (size_t)left * sizeof *cache);
        for (int h = 0; h < heads; h++)
            memcpy(tail[SCORE_ROWS + h], q + h * width + whole, (size_t)left * sizeof *q);
    }
    for (int i = 0; i < 2; i++) {
        __m256 acc[SCORE_ROWS][KIMI_HEAD_GROUP], row[SCORE_ROWS];
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < heads; h++) acc[r][h] = _mm256_setzero_ps();
        for (int64_t c = 8 * i; c < whole; c += 16) {
            for (int r = 0; r < rows; r++) row[r] = _mm256_loadu_ps(cache + r * width + c);
            for (int h = 0; h < heads; h++) {
                __m256 query = _mm256_loadu_ps(q + h * width + c);
                for (int r = 0; r < rows; r++)
                    acc[r][h] = _mm256_fmadd_ps(query, row[r], acc[r][h]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < heads; h++)
                half[i][r][h] =
                    left ? _mm256_fmadd_ps(_mm256_loadu_ps(tail[SCORE_ROWS + h] + 8 * i),
                                           _mm256_loadu_ps(tail[r] + 8 * i), acc[r][h])
                         : acc[r][h];
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++)
            out[h * out_stride + r] =
                lanes_end((lanes16){half[0][r][h], half[1][r][h]}, 0) * scale;
}

/* out[h][c .. c + VALUE_WIDE) += one block of positions; heads is a constant at every call. */
AVX2_INLINE void value_columns(const float *cache, int64_t width, int64_t count, int heads,
                               const float *e, int64_t positions, float *out, int64_t rank) {
    __m256 block[KIMI_HEAD_GROUP][2];
    for (int h = 0; h < heads; h++) block[h][0] = block[h][1] = _mm256_setzero_ps();
    for (int64_t s = 0; s < count; s++) {
        __m256 a = _mm256_loadu_ps(cache + s * width), b = _mm256_loadu_ps(cache + s * width + 8);
        for (int h = 0; h < heads; h++) {
            __m256 p = _mm256_broadcast_ss(e + h * positions + s);
            block[h][0] = _mm256_fmadd_ps(p, a, block[h][0]);
            block[h][1] = _mm256_fmadd_ps(p, b, block[h][1]);
        }
    }
    for (int h = 0; h < heads; h++) {
        float *o = out + h * rank;
        _mm256_storeu_ps(o, _mm256_add_ps(_mm256_loadu_ps(o), block[h][0]));
        _mm256_storeu_ps(o + 8, _mm256_add_ps(_mm256_loadu_ps(o + 8), block[h][1]));
    }
}

#include "mla_heads.h"

AVX2 void attend_avx2(const float *cache, int64_t positions, int64_t heads, int64_t rank,
                      int64_t rope, const float *q, float scale, float *out, float *scratch) {
    attend_heads(cache, positions, heads, rank, rope, q, scale, out, scratch);
}
#else
typedef int kimi_no_avx2_mla;
#endif
