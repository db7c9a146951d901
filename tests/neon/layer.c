/* layer.c: everything between the products: tails, subnormals, special values. */
#include "harness.h"

#include <string.h>

static float *copy_of(const float *x, int64_t n) {
    float *y = take_floats(n);
    memcpy(y, x, (size_t)n * sizeof *y);
    return y;
}

/* exp, sigmoid, tanh, gate, situ and add, one after the other; cols = n. */
static int64_t elementwise(const shape *s, float *out) {
    int64_t n = s->cols;
    float *x = random_floats(n, s->x), *z = random_floats(n, s->weights);
    kimi_exp(x, n, out);
    kimi_sigmoid(x, n, out + n);
    kimi_tanh(x, n, out + 2 * n);
    kimi_gate(z, x, n, out + 3 * n);
    kimi_situ(x, z, n, 4.0f, 25.0f, out + 4 * n);
    memcpy(out + 5 * n, z, (size_t)n * sizeof *out);
    kimi_add(x, n, out + 5 * n);
    return 6 * n;
}

/* The same functions where their results fade: between exp(-107) and exp(90). */
static int64_t edges(const shape *s, float *out) {
    int64_t n = s->cols;
    float *x = take_floats(n);
    for (int64_t i = 0; i < n; i++) { /* multiples of 2^-8, exact in any rounding */
        int64_t step = random_below(197 * 256) - 107 * 256;
        x[i] = (float)step * 0.00390625f;
    }
    kimi_exp(x, n, out);
    kimi_sigmoid(x, n, out + n);
    kimi_tanh(x, n, out + 2 * n);
    return 3 * n;
}

static int64_t norms(const shape *s, float *out) {
    int64_t n = s->count * s->cols;
    float *x = random_floats(n, s->x), *weight = random_floats(s->cols, PLAIN);
    kimi_rmsnorm(x, s->cols, s->count, s->cols, weight, 1e-5, out, s->cols);
    memcpy(out + n, x, (size_t)n * sizeof *x);
    kimi_l2norm(out + n, s->count, 1, s->cols, 1e-6, 0.125);
    float *gate = random_floats(n, s->weights);
    kimi_gated_norm(x, gate, s->count, 1, s->cols, weight, 1e-5, out + 2 * n);
    return 3 * n;
}

static int64_t mix(const shape *s, float *out) {
    const float *sources[9];
    for (int64_t j = 0; j < s->rows; j++) sources[j] = random_floats(s->count * s->cols, s->x);
    float *norm = random_floats(s->cols, PLAIN), *proj = random_floats(s->cols, s->weights);
    kimi_mix(sources, s->rows, s->count, s->cols, norm, proj, 1e-5, out);
    return s->count * s->cols;
}

/* rows = taps, cols = channels. */
static int64_t conv(const shape *s, float *out) {
    int64_t n = s->count * s->cols, past = (s->rows - 1) * s->cols;
    float *x = random_floats(n, s->x), *w = random_floats(s->cols * s->rows, s->weights);
    float *history = random_floats(past, s->x);
    memcpy(out + n, history, (size_t)past * sizeof *out);
    float *moved = past ? out + n : take_floats(1);
    kimi_conv(x, s->count, s->cols, s->rows, w, moved, out);
    return n + past;
}

/* rows = heads, cols = dim. */
static int64_t delta(const shape *s, float *out) {
    int64_t n = s->count * s->rows * s->cols, states = s->rows * s->cols * s->cols;
    float *q = random_floats(n, s->x), *k = random_floats(n, s->x);
    float *v = random_floats(n, s->weights);
    float *z = random_floats(n, s->x), *a_log = random_scaled(s->rows, -6);
    float *bias = random_floats(s->rows * s->cols, PLAIN);
    float *beta = random_scaled(s->count * s->rows, -8);
    float *state = random_floats(states, s->weights);
    kimi_decay(z, s->count, s->rows, s->cols, a_log, bias, -5.0f, out + states + n);
    float *decay = copy_of(out + states + n, n);
    memcpy(out, state, (size_t)states * sizeof *out);
    kimi_delta(out, s->count, s->rows, s->cols, q, k, v, decay, beta, out + states);
    return states + 2 * n;
}

/* rows = k, cols = experts. */
static int64_t route(const shape *s, float *out) {
    float *logits = random_floats(s->count * s->cols, s->x);
    float *bias = random_floats(s->cols, s->weights);
    int32_t *ids = take(s->count * s->rows * 4);
    kimi_route(logits, bias, s->count, s->cols, s->rows, 2.5, ids, out);
    int64_t n = s->count * s->rows;
    for (int64_t i = 0; i < n; i++) memcpy(out + n + i, ids + i, 4);
    return 2 * n;
}

static int64_t expert_sum(const shape *s, float *out) {
    float *x = random_floats(s->count * s->rows * s->cols, s->x);
    float *weights = random_floats(s->count * s->rows, s->weights);
    kimi_expert_sum(x, weights, s->count, s->rows, s->cols, out);
    return s->count * s->cols;
}

/* argmax and one draw, from logits of everyday size. */
static int64_t choice(const shape *s, float *out) {
    float *logits = s->x == TINY ? random_floats(s->cols, TINY) : random_scaled(s->cols, 0);
    float *e = take_floats(s->cols);
    int32_t *order = take(s->cols * 4), id[2] = {-7, -7};
    id[0] = (int32_t)kimi_argmax(logits, s->cols);
    kimi_sample(logits, s->cols, 0.7, s->rows * 5, 0.95, 0.001, 42, (uint64_t)s->count, e, order,
                id + 1);
    memcpy(out, id, sizeof id);
    return 2;
}

/* Logprobs of two ids and of the first few in order, a logarithm and a perplexity. No arithmetic
 * here: it would be done in the hostile environment. */
static int64_t logprobs(const shape *s, float *out) {
    float *logits = random_scaled(s->cols, 0);
    int32_t ids[2] = {0, (int32_t)s->cols - 1}, order[3] = {-7, -7, -7};
    double found[7] = {0};
    int64_t top = s->rows < s->cols ? s->rows : s->cols;
    kimi_logprobs(logits, s->cols, ids, 2, found, top, order, found + 2);
    found[5] = kimi_log(logits[0] < 0 ? (double)-logits[0] : (double)logits[0]);
    found[6] = kimi_perplexity((double)logits[0], 3);
    memcpy(out, found, sizeof found);
    memcpy(out + 14, order, sizeof order);
    return 17;
}

static void layer(const char *name, case_fn run, const int64_t *cols, int64_t n, int64_t rows) {
    static const int64_t counts[] = {1, 2, 3, 17};
    static const enum kind kinds[] = {PLAIN, TINY, WIDE, SPECIAL, LARGE};
    suite_begin(name);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < 20; j++) {
            shape s = {KIMI_F32, 1 + (i + j) % rows, cols[i], counts[j % 4], kinds[j % 3],
                       kinds[j % 5]};
            run_case(run, s);
        }
    suite_end();
}

void layer_suites(void) {
    static const int64_t tails[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,   15,
                                    16, 17, 23, 31, 32, 33, 63, 65, 500, 5003};
    static const int64_t experts[] = {8, 9, 16, 31, 64, 128};
    static const int64_t dims[] = {1, 2, 3, 4, 5, 8, 12, 16, 17, 33, 64, 100};
    layer("elementwise", elementwise, tails, 20, 1);
    layer("edges", edges, tails + 15, 5, 1);
    layer("norms", norms, tails, 19, 1);
    layer("mix", mix, tails, 19, 9);
    layer("conv", conv, tails, 19, 5);
    layer("delta", delta, dims, 12, 3);
    layer("route", route, experts, 6, 8);
    layer("expert_sum", expert_sum, tails, 19, 8);
    layer("choice", choice, tails, 19, 4);
    layer("logprobs", logprobs, tails, 19, 3);
}
