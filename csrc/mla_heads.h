/* mla_heads.h: attention of a group of heads over the cache, out of a SIMD room's own steps.
 *
 * The room defines before it includes this once: HEADS_TARGET, SCORE_ROWS, VALUE_WIDE, and
 *   score_rows     scores of SCORE_ROWS cache rows, or of one, against a group's queries
 *   value_columns  VALUE_WIDE columns of the numerator, one block of positions
 *
 * Groups of KIMI_HEAD_GROUP heads take a block of positions in turn, so that it comes from memory
 * once for all of them.
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

/* Scores of one block of positions; `heads` is a constant at every call, as below. */
HEADS_INLINE void score_block(const float *block, int64_t width, int64_t count, const float *q,
                              int heads, float scale, float *e, int64_t positions) {
    int64_t s = 0;
    for (; s + SCORE_ROWS <= count; s += SCORE_ROWS)
        score_rows(block + s * width, SCORE_ROWS, q, width, heads, scale, e + s, positions);
    for (; s < count; s++)
        score_rows(block + s * width, 1, q, width, heads, scale, e + s, positions);
}

HEADS_INLINE void value_block(const float *block, int64_t width, int64_t count, int heads,
                              const float *e, int64_t positions, float *out, int64_t rank) {
    int64_t c = 0;
    for (; c + VALUE_WIDE <= rank; c += VALUE_WIDE)
        value_columns(block + c, width, count, heads, e, positions, out + c, rank);
    for (; c < rank; c++)
        for (int h = 0; h < heads; h++)
            value_column(block + c, width, count, e + h * positions, out + h * rank + c);
}

/* Whole groups of heads together, the rest head by head. */
#define HEAD_GROUPS(call)                                                                         \
    for (int64_t h = 0; h < heads;) {                                                             \
        if (heads - h >= KIMI_HEAD_GROUP) {                                                       \
            call(h, KIMI_HEAD_GROUP);                                                             \
            h += KIMI_HEAD_GROUP;                                                                 \
        } else {                                                                                  \
            call(h, 1);                                                                           \
            h++;                                                                                  \
        }                                                                                         \
    }

/* scratch holds a float per head and position. */
HEADS_INLINE void attend_heads(const float *cache, int64_t positions, int64_t heads, int64_t rank,
                               int64_t rope, const float *q, float scale, float *out,
                               float *scratch) {
    int64_t width = rank + rope;
    for (int64_t s = 0; s < positions; s += KIMI_POSITION_BLOCK) {
        int64_t count = positions - s < KIMI_POSITION_BLOCK ? positions - s : KIMI_POSITION_BLOCK;
#define SCORES(h, group)                                                                          \
    score_block(cache + s * width, width, count, q + (h) * width, group, scale,                   \
                scratch + (h) * positions + s, positions)
        HEAD_GROUPS(SCORES)
#undef SCORES
    }
    double sum[KIMI_HEADS];
    for (int64_t h = 0; h < heads; h++) sum[h] = softmax_exp(scratch + h * positions, positions);
    memset(out, 0, (size_t)(heads * rank) * sizeof *out);
    for (int64_t s = 0; s < positions; s += KIMI_POSITION_BLOCK) {
        int64_t count = positions - s < KIMI_POSITION_BLOCK ? positions - s : KIMI_POSITION_BLOCK;
#define VALUES(h, group)                                                                          \
    value_block(cache + s * width, width, count, group, scratch + (h) * positions + s, positions, \
                out + (h) * rank, rank)
        HEAD_GROUPS(VALUES)
#undef VALUES
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < rank; c++)
            out[h * rank + c] = (float)((double)out[h * rank + c] / sum[h]);
}

#endif
