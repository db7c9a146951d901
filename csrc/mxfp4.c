/* mxfp4.c: the product with MXFP4 weights; the meaning of its order. */
#include "room.h"

static const float mxfp4_value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

KIMI_TARGET void KIMI_FN(prepare_mxfp4)(const float *x, int64_t cols, float *out) {
    memcpy(out, x, (size_t)cols * sizeof *x);
    for (int64_t c = cols; c % 128; c++) out[c] = 0.0f;
}

/* lanes += one group of 32 columns: 16 bytes, its scale, 32 floats of x. */
KIMI_INLINE void mxfp4_group(const uint8_t *w, float scale, const float *x, float lanes[4]) {
    for (int l = 0; l < 4; l++) {
        float p = 0.0f;
        for (int j = 0; j < 8; j++) {
            int c = 4 * l + (j & 3) + 16 * (j >> 2);
            float v = mxfp4_value[c & 1 ? w[c / 2] >> 4 : w[c / 2] & 15];
            p = j ? fmaf(v, x[c], p) : v * x[c];
        }
        lanes[l] = fmaf(p, scale, lanes[l]);
    }
}

KIMI_TARGET void KIMI_FN(product_mxfp4)(const uint8_t *packed, const uint8_t *scales, int64_t lo,
                                        int64_t hi, int64_t cols, const float *x,
                                        int64_t x_stride, int64_t count, float *y,
                                        int64_t y_stride) {
    int64_t groups = cols / 32;
    for (int64_t r = lo; r < hi; r++)
        for (int64_t t = 0; t < count; t++) {
            float a[16] = {0.0f};
            for (int64_t g = 0; g < groups; g++)
                mxfp4_group(packed + (r * groups + g) * 16, scale_float(scales[r * groups + g]),
                            x + t * x_stride + g * 32, a + 4 * (g % 4));
            for (int64_t g = groups; g % 4; g++)
                for (int l = 0; l < 4; l++) a[4 * (g % 4) + l] += 0.0f;
            y[t * y_stride + r] = lanes_sum(a);
        }
}
