/* elementwise.c: activations and gates, one value at a time. */
#include "elementary.h"

KIMI_TARGET void KIMI_FN(exp)(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = elementary_exp(x[i]);
}

KIMI_TARGET void KIMI_FN(sigmoid)(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = elementary_sigmoid(x[i]);
}

KIMI_TARGET void KIMI_FN(tanh)(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = elementary_tanh(x[i]);
}

KIMI_TARGET void KIMI_FN(gate)(const float *x, const float *gate, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * elementary_sigmoid(gate[i]);
}

KIMI_TARGET void KIMI_FN(situ)(const float *g, const float *u, int64_t n, float beta,
                               float linear_beta, float *y) {
    for (int64_t i = 0; i < n; i++) {
        float gated = beta * elementary_tanh(g[i] / beta) * elementary_sigmoid(g[i]);
        y[i] = gated * (linear_beta * elementary_tanh(u[i] / linear_beta));
    }
}

KIMI_TARGET void KIMI_FN(softmax)(float *x, int64_t n, float scale, double *sum) {
    float top[8];
    double d[8] = {0};
    for (int l = 0; l < 8; l++) top[l] = -INFINITY;
    int64_t i = 0;
    for (; i < n; i++) x[i] *= scale;
    for (i = 0; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
    for (int l = 0; i + l < n; l++) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
    for (int l = 1; l < 8; l++) top[0] = top[l] > top[0] ? top[l] : top[0];
    for (i = 0; i < n; i++) x[i] = elementary_exp(x[i] - top[0]);
    for (i = 0; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) d[l] += (double)x[i + l];
    for (int l = 0; i + l < n; l++) d[l] += (double)x[i + l];
    *sum = doubles_sum(d);
}
