/* softmax.h: scores to unnormalised probabilities, and their sum. */
#ifndef KIMI_SOFTMAX_H
#define KIMI_SOFTMAX_H

#include "elementary.h"

/* x = exp(x - largest of x); returns their double sum (kimi.h). n is at least 1. */
KIMI_INLINE double softmax_exp(float *x, int64_t n) {
    float top[8];
    for (int l = 0; l < 8; l++) top[l] = -INFINITY;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
    for (int l = 0; i + l < n; l++) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
    for (int l = 1; l < 8; l++) top[0] = top[l] > top[0] ? top[l] : top[0];
    for (i = 0; i < n; i++) x[i] = elementary_exp(x[i] - top[0]);
    double d[8] = {0};
    for (i = 0; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) d[l] += (double)x[i + l];
    for (int l = 0; i + l < n; l++) d[l] += (double)x[i + l];
    return doubles_sum(d);
}

#endif
