/* mla.c: latent attention over the cache, never expanding keys or values. */
#include "decode.h"
#include "softmax.h"

/* out[t] = sum over i ascending of q[t][i] * W[lo + i], i < nope: rows summed, not dotted. */
KIMI_TARGET void KIMI_FN(absorb)(const kimi_matrix *w, int64_t lo, int64_t nope, const float *q,
                                 int64_t q_stride, int64_t count, float *out, int64_t out_stride) {
    float row[KIMI_CHUNK];
    for (int64_t t = 0; t < count; t++)
        memset(out + t * out_stride, 0, (size_t)w->cols * sizeof *out);
    for (int64_t c0 = 0; c0 < w->cols; c0 += KIMI_CHUNK) {
        int64_t n = w->cols - c0 < KIMI_CHUNK ? w->cols - c0 : KIMI_CHUNK;
        for (int64_t i = 0; i < nope; i++) {
            decode_row(w, lo + i, c0, row);
            for (int64_t t = 0; t < count; t++) {
                float qi = q[t * q_stride + i], *o = out + t * out_stride + c0;
                for (int64_t c = 0; c < n; c++) o[c] = fmaf(qi, row[c], o[c]);
            }
        }
    }
}

/* The dense product's order on two float32 vectors. */
KIMI_INLINE float mla_dot(const float *a, const float *b, int64_t n) {
    float lanes[16] = {0.0f};
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        for (int l = 0; l < 16; l++) lanes[l] = fmaf(a[c + l], b[c + l], lanes[l]);
    if (c < n)
        for (int l = 0; l < 16; l++)
            lanes[l] = c + l < n ? fmaf(a[c + l], b[c + l], lanes[l]) : lanes[l] + 0.0f;
    return lanes_sum(lanes);
}

/* Up to KIMI_HEADS heads over the first `positions` cache rows; scratch holds one float per
 * head and position, then rank floats. */
KIMI_TARGET void KIMI_FN(attend)(const float *cache, int64_t positions, int64_t heads,
                                 int64_t rank, int64_t rope, const float *q, float scale,
                                 float *out, float *scratch) {
    int64_t width = rank + rope;
    float *block = scratch + heads * positions;
    for (int64_t s = 0; s < positions; s++)
        for (int64_t h = 0; h < heads; h++)
            scratch[h * positions + s] = mla_dot(q + h * width, cache + s * width, width) * scale;
    for (int64_t h = 0; h < heads; h++) {
        float *e = scratch + h * positions, *o = out + h * rank;
        double sum = softmax_exp(e, positions);
        memset(o, 0, (size_t)rank * sizeof *o);
        for (int64_t s0 = 0; s0 < positions; s0 += KIMI_POSITION_BLOCK) {
            int64_t left = positions - s0;
            int64_t end = left < KIMI_POSITION_BLOCK ? positions : s0 + KIMI_POSITION_BLOCK;
            memset(block, 0, (size_t)rank * sizeof *block);
            for (int64_t s = s0; s < end; s++)
                for (int64_t c = 0; c < rank; c++)
                    block[c] = fmaf(e[s], cache[s * width + c], block[c]);
            for (int64_t c = 0; c < rank; c++) o[c] += block[c];
        }
        for (int64_t c = 0; c < rank; c++) o[c] = (float)((double)o[c] / sum);
    }
}
