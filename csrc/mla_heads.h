/* mla_heads.h: attention of a group of heads over the cache, out of a SIMD room's own steps.
 *
 * The room defines before it includes this once: HEADS_TARGET, VALUE_WIDE, and
 *   score_row      scores of one cache row against a group's queries
 *   value_columns  VALUE_WIDE columns of the numerator, one block of positions
 */
#ifndef KIMI_MLA_HEADS_H
#define KIMI_MLA_HEADS_H

#include "softmax.h"

#define HEADS_INLINE static inline __attribute__((always_inline)) HEADS_TARGET

/* value_columns for one column, where the rank is no multiple of VALUE_WIDE. */
HEADS_INLINE void value_column(const float *cache, int64_t width, int64_t count, const float *e,
                              float *out) {
    float block = 0.0f;
    for (int64_t s = 0; s < count; s++) block = fmaf(e[s], cache[s * width], block);
    *out += block;
}

HEADS_INLINE void attend_heads(const float *cache, int64_t positions, int heads, int64_t rank,
                              int64_t rope, const float *q, float scale, float *out, float *e) {
    int64_t width = rank + rope, c;
    double sum[KIMI_HEAD_GROUP];
    for (int64_t s = 0; s < positions; s++)
        score_row(cache + s * width, q, width, heads, scale, e + s, positions);
    for (int h = 0; h < heads; h++) sum[h] = softmax_exp(e + h * positions, positions);
    memset(out, 0, (size_t)(heads * rank) * sizeof *out);
    for (int64_t s = 0; s < positions; s += KIMI_POSITION_BLOCK) {
        int64_t count = positions - s < KIMI_POSITION_BLOCK ? positions - s : KIMI_POSITION_BLOCK;
        const float *block = cache + s * width;
        for (c = 0; c + VALUE_WIDE <= rank; c += VALUE_WIDE)
            value_columns(block + c, width, count, heads, e + s, positions, out + c, rank);
        for (; c < rank; c++)
            for (int h = 0; h < heads; h++)
                value_column(block + c, width, count, e + h * positions + s, out + h * rank + c);
    }
    for (int h = 0; h < heads; h++)
        for (c = 0; c < rank; c++) out[h * rank + c] = (float)((double)out[h * rank + c] / sum[h]);
}

/* A whole group together, else head by head; `heads` is at most KIMI_HEAD_GROUP. */
HEADS_INLINE void attend_group(const float *cache, int64_t positions, int64_t heads, int64_t rank,
                               int64_t rope, const float *q, float scale, float *out,
                               float *scratch) {
    if (heads == KIMI_HEAD_GROUP) {
        attend_heads(cache, positions, KIMI_HEAD_GROUP, rank, rope, q, scale, out, scratch);
        return;
    }
    for (int64_t h = 0; h < heads; h++)
        attend_heads(cache, positions, 1, rank, rope, q + h * (rank + rope), scale, out + h * rank,
                     scratch);
}

#endif
