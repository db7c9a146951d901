/* blend.h: the sums of latent attention over positions, for any vector width.
 *
 * A block of positions is copied in strips of BLEND_COLUMNS columns, since in rows pages apart
 * they would share a few sets of the first-level cache; a strip is multiplied for BLEND_HEADS heads
 * at a time. A SIMD room defines VEC_WIDTH (vec.h) before it includes this once.
 */
#ifndef KIMI_BLEND_H
#define KIMI_BLEND_H

#include "room.h"
#include "vec.h"

/* The sums of the heads, a row of a strip and one weight fit the registers. */
#if VEC_WIDTH == 16
enum { BLEND_HEADS = 12, BLEND_COLUMNS = 32 };
#else
enum { BLEND_HEADS = 6, BLEND_COLUMNS = 16 };
#endif
enum { BLEND_VECTORS = BLEND_COLUMNS / VEC_WIDTH };

/* out[h] (`vectors` vectors of columns) += `count` positions of a strip, for `heads` heads; the
 * latter two are constants at every call. */
VEC_INLINE void blend_tile(const float strip[][BLEND_COLUMNS], int64_t count, const float *e,
                           int64_t e_stride, int heads, int vectors, float *out, int64_t rank) {
    VEC sum[BLEND_HEADS][BLEND_VECTORS];
    const float *weights[BLEND_HEADS];
    for (int h = 0; h < heads; h++) {
        weights[h] = e + h * e_stride;
        for (int v = 0; v < vectors; v++) sum[h][v] = vec_zero();
    }
    for (int64_t s = 0; s < count; s++) {
        VEC row[BLEND_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = vec_load(strip[s] + VEC_WIDTH * v);
        for (int h = 0; h < heads; h++) {
            VEC p = vec_splat(weights[h] + s);
            for (int v = 0; v < vectors; v++) sum[h][v] = vec_fma(p, row[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++) {
            float *o = out + h * rank + VEC_WIDTH * v;
            vec_storeu(o, vec_add(vec_loadu(o), sum[h][v]));
        }
}

/* out[h] += `vectors` vectors of columns of one block of positions. */
VEC_INLINE void blend_strip(const float *cache, int64_t width, int64_t count, const float *e,
                            int64_t e_stride, int64_t heads, int vectors, float *out,
                            int64_t rank) {
    float strip[KIMI_POSITION_BLOCK][BLEND_COLUMNS] __attribute__((aligned(64)));
    for (int64_t s = 0; s < count; s++)
        for (int v = 0; v < vectors; v++)
            vec_store(strip[s] + VEC_WIDTH * v, vec_loadu(cache + s * width + VEC_WIDTH * v));
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
VEC_INLINE void blend_prefetch(const float *cache, int64_t width, int64_t lo, int64_t hi,
                               int64_t columns) {
    for (int64_t s = lo; s < hi; s++)
        for (int64_t c = 0; c < columns; c += 16)
            __builtin_prefetch(cache + s * width + c, 0, 2);
}

/* The kernel `blend` (table.h). */
VEC_INLINE void blend_columns(const float *cache, int64_t positions, int64_t width, int64_t lo,
                              int64_t hi, const float *e, int64_t e_stride, const double *sum,
                              int64_t heads, float *out, int64_t rank) {
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
                        BLEND_VECTORS, out + c, rank);
        }
        for (; c + VEC_WIDTH <= hi; c += VEC_WIDTH)
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

#endif
