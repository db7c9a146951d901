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
