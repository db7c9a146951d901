/* product.c: the dense product with bf16, float32 and packed weights; the meaning of the order. */
#include "decode.h"

KIMI_TARGET void KIMI_FN(prepare)(int format, const float *x, int64_t cols, float *out) {
    (void)format;
    memcpy(out, x, (size_t)cols * sizeof *x);
    for (int64_t c = cols; c % 16; c++) out[c] = 0.0f;
}

KIMI_TARGET void KIMI_FN(product)(const kimi_matrix *w, int64_t lo, int64_t hi, const float *x,
                                  int64_t x_stride, int64_t count, float *y, int64_t y_stride) {
    float weights[KIMI_CHUNK], lanes[KIMI_BATCH][16];
    for (int64_t r = lo; r < hi; r++) {
        for (int64_t t0 = 0; t0 < count; t0 += KIMI_BATCH) {
            int64_t batch = count - t0 < KIMI_BATCH ? count - t0 : KIMI_BATCH;
            memset(lanes, 0, sizeof lanes);
            for (int64_t c0 = 0; c0 < w->cols; c0 += KIMI_CHUNK) {
                int64_t n = decode_row(w, r, c0, weights);
                for (int64_t t = 0; t < batch; t++) {
                    const float *column = x + (t0 + t) * x_stride + c0;
                    float a[16];
                    memcpy(a, lanes[t], sizeof a);
                    for (int64_t c = 0; c < n; c += 16)
                        for (int l = 0; l < 16; l++)
                            a[l] = fmaf(weights[c + l], column[c + l], a[l]);
                    memcpy(lanes[t], a, sizeof a);
                }
            }
            for (int64_t t = 0; t < batch; t++) y[(t0 + t) * y_stride + r] = lanes_sum(lanes[t]);
        }
    }
}
