/* moe.c: the weighted sum of the chosen experts' outputs. */
#include "room.h"

KIMI_TARGET void KIMI_FN(expert_sum)(const float *x, const float *weights, int64_t k, int64_t n,
                                     float *y) {
    memset(y, 0, (size_t)n * sizeof *y);
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < n; i++) y[i] = fmaf(weights[j], x[j * n + i], y[i]);
}
