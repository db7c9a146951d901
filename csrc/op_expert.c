/* op_expert.c: routed experts as one operation: its threads meet twice an expert, not 11 times. */
#include <string.h>

#include "parallel.h"

/* Rows of W1 and W3 that a thread takes at least: the columns that prepare_mxfp4 wants together. It
 * leaves no more than 24 threads work on 3072 rows. */
enum { EXPERT_ROWS = 128 };

int64_t kimi_experts_scratch(int64_t latent, int64_t inter, int64_t most) {
    return kimi_scratch(latent, most) + kimi_scratch(inter, most);
}

static int expert_whole(const kimi_expert *e) {
    return e && e->w1.packed && e->w1.scales && e->w2.packed && e->w2.scales && e->w3.packed &&
           e->w3.scales;
}

static int experts_check(const kimi_expert *const *experts, int64_t n, const int32_t *starts,
                         const int32_t *places, int64_t all, int64_t most) {
    if (starts[0] != 0) return KIMI_E_ARGUMENT;
    for (int64_t i = 0; i < n; i++) {
        int64_t here = (int64_t)starts[i + 1] - starts[i];
        if (!expert_whole(experts[i]) || here < 1 || here > most) return KIMI_E_ARGUMENT;
        for (int32_t at = starts[i]; at < starts[i + 1]; at++)
            if (places[at] < 0 || places[at] >= all) return KIMI_E_ARGUMENT;
    }
    return 0;
}

int kimi_experts(const kimi_expert *const *experts, int64_t n, const int32_t *starts,
                 const int32_t *places, int64_t latent, int64_t inter, float beta,
                 float linear_beta, const float *x, int64_t count, int64_t k, int64_t most,
                 float *gate, float *up, float *y, float *out, float *scratch) {
    if (!experts || n < 1 || !starts || !places || !x || !gate || !up || !y || !out || !scratch ||
        latent < 32 || latent % 32 || inter < 32 || inter % 32 || count < 1 || k < 1 || most < 1 ||
        experts_check(experts, n, starts, places, count * k, most))
        return KIMI_E_ARGUMENT;
    int64_t in = kimi_scratch(latent, 1), mid = kimi_scratch(inter, 1);
    float *hidden = scratch + in * most;
    PARALLEL_BEGIN(inter * latent * starts[n])
    for (int64_t i = 0; i < n; i++) {
        const kimi_expert *e = experts[i];
        const int32_t *at = places + starts[i];
        int64_t here = starts[i + 1] - starts[i], lo, hi;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < here; t++)
            kernels->prepare_mxfp4(x + at[t] / k * latent, latent, scratch + t * in);
        part_of(inter, EXPERT_ROWS, part, parts, &lo, &hi);
        kernels->product_mxfp4(e->w1.packed, e->w1.scales, lo, hi, latent, scratch, in, here, gate,
                               inter);
        kernels->product_mxfp4(e->w3.packed, e->w3.scales, lo, hi, latent, scratch, in, here, up,
                               inter);
        for (int64_t t = 0; t < here && lo < hi; t++) {
            float *g = gate + t * inter + lo;
            kernels->situ(g, up + t * inter + lo, hi - lo, beta, linear_beta, g);
            kernels->prepare_mxfp4(g, hi - lo, hidden + t * mid + lo);
        }
#pragma omp barrier
        part_of(latent, 4, part, parts, &lo, &hi);
        float *into = here == 1 ? out + at[0] * latent : y;
        kernels->product_mxfp4(e->w2.packed, e->w2.scales, lo, hi, inter, hidden, mid, here, into,
                               latent);
        for (int64_t t = 0; here > 1 && t < here; t++)
            memcpy(out + at[t] * latent + lo, y + t * latent + lo, (size_t)(hi - lo) * sizeof *y);
    }
    PARALLEL_END
    return 0;
}
