/* op_expert.c: a routed expert as one operation: its threads meet three times, not eleven. */
#include "parallel.h"

/* Rows of W1 and W3 that a thread takes at least: the columns that prepare_mxfp4 wants together. */
enum { EXPERT_ROWS = 128 };

int64_t kimi_expert_scratch(int64_t latent, int64_t inter, int64_t count) {
    return kimi_scratch(latent, count) + kimi_scratch(inter, count);
}

int kimi_expert(const kimi_mxfp4 *w1, const kimi_mxfp4 *w3, const kimi_mxfp4 *w2, int64_t latent,
                int64_t inter, float beta, float linear_beta, const float *x, int64_t x_stride,
                int64_t count, float *gate, float *up, float *y, int64_t y_stride,
                float *scratch) {
    if (!w1 || !w1->packed || !w1->scales || !w3 || !w3->packed || !w3->scales || !w2 ||
        !w2->packed || !w2->scales || !x || !gate || !up || !y || !scratch || latent < 32 ||
        latent % 32 || inter < 32 || inter % 32 || count < 1)
        return KIMI_E_ARGUMENT;
    int64_t in = kimi_scratch(latent, 1), mid = kimi_scratch(inter, 1);
    float *hidden = scratch + in * count;
    for (int64_t t = 0; t < count; t++)
        kimi_kernels()->prepare_mxfp4(x + t * x_stride, latent, scratch + t * in);
    PARALLEL_BEGIN(inter * latent * count)
    int64_t lo, hi;
    part_of(inter, EXPERT_ROWS, part, parts, &lo, &hi);
    kernels->product_mxfp4(w1->packed, w1->scales, lo, hi, latent, scratch, in, count, gate, inter);
    kernels->product_mxfp4(w3->packed, w3->scales, lo, hi, latent, scratch, in, count, up, inter);
    for (int64_t t = 0; t < count && lo < hi; t++) {
        float *g = gate + t * inter + lo;
        kernels->situ(g, up + t * inter + lo, hi - lo, beta, linear_beta, g);
        kernels->prepare_mxfp4(g, hi - lo, hidden + t * mid + lo);
    }
#pragma omp barrier
    part_of(latent, 4, part, parts, &lo, &hi);
    kernels->product_mxfp4(w2->packed, w2->scales, lo, hi, inter, hidden, mid, count, y, y_stride);
    PARALLEL_END
    return 0;
}
