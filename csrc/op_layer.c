/* op_layer.c: everything between the products as operations: tokens, heads or channels split. */
#include "parallel.h"
#include "room.h"

enum { ELEMENT_UNIT = 1024 };

int kimi_widen(int format, const void *src, int64_t n, float *y) {
    if (!src || !y || n < 0 || (format != KIMI_BF16 && format != KIMI_F32)) return KIMI_E_ARGUMENT;
    const uint8_t *bytes = src; /* tensors in a file need not be aligned */
    if (format == KIMI_F32) {
        memcpy(y, bytes, (size_t)n * sizeof *y);
        return 0;
    }
    for (int64_t i = 0; i < n; i++)
        y[i] = bits_float((uint32_t)bytes[2 * i] << 16 | (uint32_t)bytes[2 * i + 1] << 24);
    return 0;
}

/* `second` is the operand besides x, or x again. */
#define ELEMENTWISE(name, second, arguments, call)                                                \
    int kimi_##name arguments {                                                                   \
        if (!x || !(second) || !y || n < 0) return KIMI_E_ARGUMENT;                               \
        PARALLEL_BEGIN(n * 8)                                                                     \
        int64_t lo, hi;                                                                           \
        part_of(n, ELEMENT_UNIT, part, parts, &lo, &hi);                                          \
        kernels->call;                                                                            \
        PARALLEL_END                                                                              \
        return 0;                                                                                 \
    }

ELEMENTWISE(exp, x, (const float *x, int64_t n, float *y), exp(x + lo, hi - lo, y + lo))
ELEMENTWISE(sigmoid, x, (const float *x, int64_t n, float *y), sigmoid(x + lo, hi - lo, y + lo))
ELEMENTWISE(tanh, x, (const float *x, int64_t n, float *y), tanh(x + lo, hi - lo, y + lo))
ELEMENTWISE(gate, gate, (const float *x, const float *gate, int64_t n, float *y),
            gate(x + lo, gate + lo, hi - lo, y + lo))
ELEMENTWISE(situ, u,
            (const float *x, const float *u, int64_t n, float beta, float linear_beta, float *y),
            situ(x + lo, u + lo, hi - lo, beta, linear_beta, y + lo))

int kimi_add(const float *x, int64_t n, float *y) {
    if (!x || !y || n < 0) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(n)
    int64_t lo, hi;
    part_of(n, ELEMENT_UNIT, part, parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) y[i] += x[i];
    PARALLEL_END
    return 0;
}

int kimi_rmsnorm(const float *x, int64_t x_stride, int64_t count, int64_t n, const float *weight,
                 double eps, float *y, int64_t y_stride) {
    if (!x || !weight || !y || count < 1 || n < 1) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * n)
#pragma omp for schedule(static)
    for (int64_t t = 0; t < count; t++)
        kernels->rmsnorm(x + t * x_stride, n, weight, eps, y + t * y_stride);
    PARALLEL_END
    return 0;
}

int kimi_mix(const float *const *sources, int64_t s, int64_t count, int64_t n, const float *norm,
             const float *proj, double eps, float *y) {
    if (!sources || !norm || !proj || !y || s < 1 || s > KIMI_MAX_SOURCES || count < 1 || n < 1)
        return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * n * s)
#pragma omp for schedule(static)
    for (int64_t t = 0; t < count; t++)
        kernels->mix(sources, s, t * n, n, norm, proj, eps, y + t * n);
    PARALLEL_END
    return 0;
}

int kimi_conv(const float *x, int64_t count, int64_t channels, int64_t taps, const float *w,
              float *history, float *y) {
    if (!x || !w || !history || !y || count < 1 || channels < 1 || taps < 1 ||
        taps > KIMI_MAX_TAPS)
        return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * channels * taps * 4)
    int64_t lo, hi;
    part_of(channels, 16, part, parts, &lo, &hi);
    kernels->conv(x, count, channels, lo, hi, taps, w, history, y);
    PARALLEL_END
    return 0;
}

int kimi_l2norm(float *x, int64_t count, int64_t heads, int64_t dim, double eps, double scale) {
    if (!x || count < 1 || heads < 1 || dim < 1) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * heads * dim)
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * heads; i++) kernels->l2norm(x + i * dim, dim, eps, scale);
    PARALLEL_END
    return 0;
}

int kimi_decay(const float *z, int64_t count, int64_t heads, int64_t dim, const float *a_log,
               const float *dt_bias, float lower_bound, float *y) {
    if (!z || !a_log || !dt_bias || !y || count < 1 || heads < 1 || dim < 1) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * heads * dim * 8)
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * heads; i++)
        kernels->decay(z + i * dim, dim, a_log[i % heads], dt_bias + i % heads * dim, lower_bound,
                       y + i * dim);
    PARALLEL_END
    return 0;
}

int kimi_delta(float *state, int64_t count, int64_t heads, int64_t dim, const float *q,
               const float *k, const float *v, const float *decay, const float *beta, float *o) {
    if (!state || !q || !k || !v || !decay || !beta || !o || count < 1 || heads < 1 || dim < 1 ||
        dim > KIMI_MAX_DIM)
        return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * heads * dim * dim)
#pragma omp for schedule(static)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < count; t++) {
            int64_t at = (t * heads + h) * dim;
            kernels->delta(state + h * dim * dim, dim, q + at, k + at, v + at, decay + at,
                           beta[t * heads + h], o + at);
        }
    PARALLEL_END
    return 0;
}

int kimi_gated_norm(const float *x, const float *gate, int64_t count, int64_t heads, int64_t dim,
                    const float *weight, double eps, float *y) {
    if (!x || !gate || !weight || !y || count < 1 || heads < 1 || dim < 1) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * heads * dim * 4)
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * heads; i++) {
        kernels->rmsnorm(x + i * dim, dim, weight, eps, y + i * dim);
        kernels->gate(y + i * dim, gate + i * dim, dim, y + i * dim);
    }
    PARALLEL_END
    return 0;
}

/* Insertion into a list of k kept in order; NaN never wins, and ids stay distinct and in range. */
static void route_token(const float *logits, const float *bias, int64_t experts, int64_t k,
                        double factor, int32_t *ids, float *weights) {
    float best[KIMI_MAX_TOP], score[KIMI_MAX_TOP];
    int64_t held = 0;
    for (int64_t e = 0; e < experts; e++) {
        float s;
        kimi_kernels()->sigmoid(logits + e, 1, &s);
        float choice = s + bias[e];
        if (choice != choice) choice = -INFINITY;
        if (held == k && !(choice > best[k - 1])) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && choice > best[at - 1]; at--) {
            best[at] = best[at - 1];
            score[at] = score[at - 1];
            ids[at] = ids[at - 1];
        }
        best[at] = choice;
        score[at] = s;
        ids[at] = (int32_t)e;
    }
    double sum = 0.0;
    for (int64_t j = 0; j < k; j++) sum += (double)score[j];
    for (int64_t j = 0; j < k; j++) weights[j] = (float)((double)score[j] / (sum + 1e-20) * factor);
}

int kimi_route(const float *logits, const float *bias, int64_t count, int64_t experts, int64_t k,
               double factor, int32_t *ids, float *weights) {
    if (!logits || !bias || !ids || !weights || count < 1 || k < 1 || k > KIMI_MAX_TOP ||
        experts < k)
        return KIMI_E_ARGUMENT;
    int bad = 0;
    PARALLEL_BEGIN(count * experts * 32)
#pragma omp for schedule(static)
    for (int64_t t = 0; t < count; t++) {
        if (kimi_argmax(logits + t * experts, experts) < 0) {
#pragma omp atomic write
            bad = KIMI_E_NUMERIC;
        }
        route_token(logits + t * experts, bias, experts, k, factor, ids + t * k, weights + t * k);
    }
    PARALLEL_END
    return bad;
}

int kimi_expert_sum(const float *x, const float *weights, int64_t count, int64_t k, int64_t n,
                    float *y) {
    if (!x || !weights || !y || count < 1 || k < 1 || n < 1) return KIMI_E_ARGUMENT;
    PARALLEL_BEGIN(count * k * n)
#pragma omp for schedule(static)
    for (int64_t t = 0; t < count; t++)
        kernels->expert_sum(x + t * k * n, weights + t * k, k, n, y + t * n);
    PARALLEL_END
    return 0;
}

int64_t kimi_argmax(const float *x, int64_t n) {
    int64_t best = n > 0 ? 0 : -1;
    const __typeof__(float_enter()) float_state = float_enter(); /* else subnormals would tie */
    for (int64_t i = 0; i < n && best >= 0; i++) {
        if (!(x[i] - x[i] == 0.0f))
            best = -1; /* NaN or infinite */
        else if (x[i] > x[best])
            best = i;
    }
    float_leave(float_state);
    return best;
}
