/* mla.c: latent attention over the cache, never expanding keys or values. */
#include "decode.h"

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

enum { BLEND_CHUNK = 64 };

KIMI_TARGET void KIMI_FN(blend)(const float *cache, int64_t positions, int64_t width, int64_t lo,
                                int64_t hi, const float *e, int64_t e_stride, const double *sum,
                                int64_t heads, float *out, int64_t rank) {
    float block[BLEND_CHUNK];
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c0 = lo; c0 < hi; c0 += BLEND_CHUNK) {
            int64_t n = hi - c0 < BLEND_CHUNK ? hi - c0 : BLEND_CHUNK;
            float *o = out + h * rank + c0;
            memset(o, 0, (size_t)n * sizeof *o);
            for (int64_t s0 = 0; s0 < positions; s0 += KIMI_POSITION_BLOCK) {
                int64_t left = positions - s0;
                int64_t end = left < KIMI_POSITION_BLOCK ? positions : s0 + KIMI_POSITION_BLOCK;
                memset(block, 0, sizeof block);
                for (int64_t s = s0; s < end; s++) {
                    const float *row = cache + s * width + c0;
                    for (int64_t c = 0; c < n; c++)
                        block[c] = fmaf(e[h * e_stride + s], row[c], block[c]);
                }
                for (int64_t c = 0; c < n; c++) o[c] += block[c];
            }
            for (int64_t c = 0; c < n; c++) o[c] = (float)((double)o[c] / sum[h]);
        }
}
