/* mla_neon.c: latent attention for NEON.
 *
 * KIMI_HEAD_GROUP heads share each load of the cache; 16 accumulators stay in registers.
 */
#if defined(__aarch64__)
#define KIMI_VARIANT neon
#define KIMI_TARGET
#include "dense_neon.h"
#include "softmax.h"

enum { ABSORB_ROWS = 32, ABSORB_COLUMNS = 64, SCORE_ROWS = 1, VALUE_WIDE = 16 };

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
                for (int64_t r = 0; r < rows; r++) tile_row(w, lo + i + r, c0, n, tile[r]);
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

/* Scores of one cache row against `heads` queries; heads is a constant at every call. */
KIMI_INLINE void score_rows(const float *row, int rows, const float *q, int64_t width, int heads,
                            float scale, float *out, int64_t out_stride) {
    (void)rows; /* one */
    lanes16 acc[KIMI_HEAD_GROUP];
    for (int h = 0; h < heads; h++) acc[h] = lanes_zero();
    int64_t c = 0;
    for (; c + 16 <= width; c += 16) {
        lanes16 k = lanes_load(row + c);
        for (int h = 0; h < heads; h++) lanes_fma(acc + h, lanes_load(q + h * width + c), k);
    }
    for (int h = 0; h < heads; h++) {
        if (c < width)
            lanes_fma(acc + h, lanes_tail(q + h * width + c, width - c),
                      lanes_tail(row + c, width - c));
        out[h * out_stride] = lanes_end(acc[h]) * scale;
    }
}

/* out[h][c .. c + VALUE_WIDE) += one block of positions; heads is a constant at every call. */
KIMI_INLINE void value_columns(const float *cache, int64_t width, int64_t count, int heads,
                               const float *e, int64_t positions, float *out, int64_t rank) {
    lanes16 block[KIMI_HEAD_GROUP];
    for (int h = 0; h < heads; h++) block[h] = lanes_zero();
    for (int64_t s = 0; s < count; s++) {
        lanes16 row = lanes_load(cache + s * width);
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < 4; i++)
                block[h].v[i] = vfmaq_n_f32(block[h].v[i], row.v[i], e[h * positions + s]);
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < 4; i++) {
            float *o = out + h * rank + 4 * i;
            vst1q_f32(o, vaddq_f32(vld1q_f32(o), block[h].v[i]));
        }
}

#define HEADS_TARGET
#include "mla_heads.h"

void attend_neon(const float *cache, int64_t positions, int64_t heads, int64_t rank, int64_t rope,
                 const float *q, float scale, float *out, float *scratch) {
    attend_heads(cache, positions, heads, rank, rope, q, scale, out, scratch);
}
#else
typedef int kimi_no_neon_mla;
#endif
