/* norm.c: RMS norm, L2 norm and the attention residual mix; their sums are kept in double. */
#include "elementary.h"

KIMI_INLINE double norm_squares(const float *x, int64_t n) {
    double d[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) d[l] += (double)x[i + l] * (double)x[i + l];
    for (int l = 0; i + l < n; l++) d[l] += (double)x[i + l] * (double)x[i + l];
    return doubles_sum(d);
}

KIMI_TARGET void KIMI_FN(rmsnorm)(const float *x, int64_t n, const float *weight, double eps,
                                  float *y) {
    double r = 1.0 / sqrt(norm_squares(x, n) / (double)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = (float)((double)x[i] * r) * weight[i];
}

KIMI_TARGET void KIMI_FN(l2norm)(float *x, int64_t dim, double eps, double scale) {
    double r = scale / sqrt(norm_squares(x, dim) + eps);
    for (int64_t i = 0; i < dim; i++) x[i] = (float)((double)x[i] * r);
}

/* sum of v norm proj: the two weights are multiplied first, which is exact in double. */
KIMI_INLINE double norm_dot(const float *v, const float *norm, const float *proj, int64_t n) {
    double d[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            d[l] += (double)v[i + l] * ((double)norm[i + l] * (double)proj[i + l]);
    for (int l = 0; i + l < n; l++)
        d[l] += (double)v[i + l] * ((double)norm[i + l] * (double)proj[i + l]);
    return doubles_sum(d);
}

KIMI_TARGET void KIMI_FN(mix)(const float *const *sources, int64_t s, int64_t offset, int64_t n,
                              const float *norm, const float *proj, double eps, float *y) {
    float score[KIMI_MAX_SOURCES], top = -INFINITY;
    for (int64_t j = 0; j < s; j++) {
        const float *v = sources[j] + offset;
        double rms = sqrt(norm_squares(v, n) / (double)n + eps);
        score[j] = (float)(norm_dot(v, norm, proj, n) / rms);
        top = score[j] > top ? score[j] : top;
    }
    double sum = 0.0;
    for (int64_t j = 0; j < s; j++) {
        score[j] = elementary_exp(score[j] - top);
        sum += (double)score[j];
    }
    memset(y, 0, (size_t)n * sizeof *y);
    for (int64_t j = 0; j < s; j++) {
        const float *v = sources[j] + offset;
        float p = (float)((double)score[j] / sum);
        for (int64_t i = 0; i < n; i++) y[i] = fmaf(p, v[i], y[i]);
    }
}
