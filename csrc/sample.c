/* sample.c: from logits to a token drawn and to log-probabilities. Serial: a row of logits takes
 * less time than waking threads is worth, next to the pass that made it.
 *
 * What reads floats is never inlined into the operation, which sets the float environment first:
 * the compiler does not know that arithmetic depends on it.
 */
#include <float.h>

#include "parallel.h"
#include "room.h"

#define SAMPLE_APART static __attribute__((noinline))

enum { SAMPLE_BLOCK = 1024, PHILOX_ROUNDS = 10 };

/* The logits with the scratch around them. heap[0 .. left) is a heap, the first in order at its
 * root; behind it are those already taken, the first taken at heap[n - 1]. */
typedef struct {
    const float *logits;
    int64_t n;
    float *e;
    int32_t *heap;
    int64_t left;
} sample_row;

static inline int sample_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sample_sift(sample_row *row, int64_t at) {
    int32_t *heap = row->heap, moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < row->left; at = child) {
        if (child + 1 < row->left && sample_before(row->logits, heap[child + 1], heap[child]))
            child++;
        if (!sample_before(row->logits, heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void sample_order(sample_row *row) {
    row->left = row->n;
    for (int64_t i = 0; i < row->n; i++) row->heap[i] = (int32_t)i;
    for (int64_t i = row->n / 2 - 1; i >= 0; i--) sample_sift(row, i);
}

/* The first in order of those left. */
static int32_t sample_take(sample_row *row) {
    int32_t first = row->heap[0];
    row->heap[0] = row->heap[--row->left];
    sample_sift(row, 0);
    row->heap[row->left] = first;
    return first;
}

/* e[i] = exp((l[i] - max) / temperature) for `count` logits. */
static void sample_exp(const float *logits, int64_t count, float max, double temperature,
                       float *e) {
    for (int64_t i = 0; i < count; i++) {
        double x = ((double)logits[i] - (double)max) / temperature;
        e[i] = (float)(x < -104.0 ? -104.0 : x);
    }
    kimi_kernels()->exp(e, count, e);
}

/* Whether id i is among those up to `last` in order; -1 is the end of the order. */
static inline int sample_kept(const sample_row *row, int64_t i, int32_t last, double min_p) {
    return (last < 0 || !sample_before(row->logits, last, (int32_t)i)) &&
           (double)row->e[i] >= min_p;
}

static double sample_sum(const sample_row *row, int32_t last, double min_p) {
    double sum = 0.0;
    for (int64_t i = 0; i < row->n; i++)
        if (sample_kept(row, i, last, min_p)) sum += (double)row->e[i];
    return sum;
}

/* The last in order that top-k and top-p keep, or -1. */
static int32_t sample_last(sample_row *row, int64_t top_k, double top_p) {
    int32_t last = -1;
    int by_count = top_k > 0 && top_k < row->n;
    if (!by_count && top_p >= 1.0) return last;
    sample_order(row);
    for (int64_t k = 0; by_count && k < top_k; k++) last = sample_take(row);
    if (top_p >= 1.0) return last;
    double enough = top_p * sample_sum(row, last, 0.0), sum = 0.0;
    int64_t most = by_count ? top_k : row->n;
    for (int64_t k = 1; k <= most; k++) {
        int32_t id = by_count ? row->heap[row->n - k] : sample_take(row);
        sum += (double)row->e[id];
        if (sum >= enough) return id;
    }
    return last;
}

static void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    memcpy(out, counter, 4 * sizeof *out);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * out[0], b = (uint64_t)0xCD9E8D57u * out[2];
        out[0] = (uint32_t)(b >> 32) ^ out[1] ^ k0;
        out[1] = (uint32_t)b;
        out[2] = (uint32_t)(a >> 32) ^ out[3] ^ k1;
        out[3] = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Uniform in [0, 1). */
static double sample_uniform(uint64_t seed, uint64_t index) {
    uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, r[4];
    sample_philox(counter, key, r);
    return (double)(((uint64_t)r[0] << 32 | r[1]) >> 11) * 0x1p-53;
}

/* u is at most 1 - 2^-53, so u times the sum is below it, and the running sum gets there. */
SAMPLE_APART int sample_draw(sample_row *row, double temperature, int64_t top_k, double top_p,
                             double min_p, uint64_t seed, uint64_t index, int32_t *id) {
    if (!(temperature > 0.0 && temperature <= DBL_MAX) || !(top_p > 0.0 && top_p <= 1.0) ||
        !(min_p >= 0.0 && min_p <= 1.0))
        return KIMI_E_ARGUMENT;
    int64_t best = kimi_argmax(row->logits, row->n);
    if (best < 0) return KIMI_E_NUMERIC;
    sample_exp(row->logits, row->n, row->logits[best], temperature, row->e);
    int32_t last = sample_last(row, top_k, top_p);
    double target = sample_uniform(seed, index) * sample_sum(row, last, min_p), sum = 0.0;
    int64_t i = 0;
    for (; i + 1 < row->n; i++) {
        if (sample_kept(row, i, last, min_p)) sum += (double)row->e[i];
        if (sum > target) break;
    }
    *id = (int32_t)i;
    return 0;
}

int kimi_sample(const float *logits, int64_t n, double temperature, int64_t top_k, double top_p,
                double min_p, uint64_t seed, uint64_t index, float *e, int32_t *order,
                int32_t *id) {
    if (!logits || !e || !order || !id || n < 1 || n > INT32_MAX || top_k < 0)
        return KIMI_E_ARGUMENT;
    sample_row row = {logits, n, e, order, 0};
    const __typeof__(float_enter()) float_state = float_enter();
    int status = sample_draw(&row, temperature, top_k, top_p, min_p, seed, index, id);
    float_leave(float_state);
    return status;
}

int kimi_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
    if (!counter || !key || !out) return KIMI_E_ARGUMENT;
    sample_philox(counter, key, out);
    return 0;
}

/* ln 2 in two parts: a product of the first with any exponent of a double is exact. */
static const double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

/* x = m 2^k with m within a factor sqrt(2) of 1; log m = 2 atanh(s), s = (m - 1) / (m + 1), by the
 * series up to s^21. */
SAMPLE_APART double sample_log(double x) {
    int k;
    double m = frexp(x, &k);
    if (m < 0.70710678118654752440) {
        m *= 2.0;
        k--;
    }
    double s = (m - 1.0) / (m + 1.0), z = s * s, p = 0.0;
    for (int d = 21; d >= 3; d -= 2) p = (p + 1.0 / (double)d) * z;
    return (double)k * LN2_HIGH + (2.0 * s + (2.0 * s * p + (double)k * LN2_LOW));
}

double kimi_log(double x) {
    const __typeof__(float_enter()) float_state = float_enter();
    double y = sample_log(x);
    float_leave(float_state);
    return y;
}

/* x = k ln 2 + r with r within half of ln 2 of 0; the Taylor series of exp(r) up to r^14. */
SAMPLE_APART double sample_perplexity(double total, int64_t count) {
    double x = -total / (double)count;
    x = x > 710.0 ? 710.0 : x; /* beyond: infinity all the same */
    x = x < -746.0 ? -746.0 : x;
    double k = floor(x * 1.44269504088896340736 + 0.5), p = 1.0;
    double r = (x - k * LN2_HIGH) - k * LN2_LOW;
    for (int d = 14; d >= 1; d--) p = 1.0 + p * r / (double)d;
    return ldexp(p, (int)k);
}

double kimi_perplexity(double total, int64_t count) {
    const __typeof__(float_enter()) float_state = float_enter();
    double y = sample_perplexity(total, count);
    float_leave(float_state);
    return y;
}

/* Insertion into a list of `top` kept in order. */
static void sample_top(const float *logits, int64_t n, int64_t top, int32_t *ids) {
    int64_t held = 0;
    for (int64_t i = 0; top > 0 && i < n; i++) {
        if (held == top && !(logits[i] > logits[ids[top - 1]])) continue;
        int64_t at = held < top ? held++ : top - 1;
        for (; at > 0 && logits[i] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = (int32_t)i;
    }
}

SAMPLE_APART int sample_logprobs(const float *logits, int64_t n, const int32_t *ids, int64_t count,
                                 double *logprob, int64_t top, int32_t *top_ids,
                                 double *top_logprob) {
    float e[SAMPLE_BLOCK];
    int64_t best = kimi_argmax(logits, n);
    if (best < 0) return KIMI_E_NUMERIC;
    double max = (double)logits[best], sum = 0.0;
    for (int64_t lo = 0; lo < n; lo += SAMPLE_BLOCK) {
        int64_t size = n - lo < SAMPLE_BLOCK ? n - lo : SAMPLE_BLOCK;
        sample_exp(logits + lo, size, logits[best], 1.0, e);
        for (int64_t i = 0; i < size; i++) sum += (double)e[i];
    }
    double whole = sample_log(sum);
    for (int64_t i = 0; i < count; i++) logprob[i] = ((double)logits[ids[i]] - max) - whole;
    sample_top(logits, n, top, top_ids);
    for (int64_t i = 0; i < top; i++) top_logprob[i] = ((double)logits[top_ids[i]] - max) - whole;
    return 0;
}

int kimi_logprobs(const float *logits, int64_t n, const int32_t *ids, int64_t count,
                  double *logprob, int64_t top, int32_t *top_ids, double *top_logprob) {
    if (!logits || n < 1 || n > INT32_MAX || count < 0 || (count && (!ids || !logprob)) ||
        top < 0 || top > n || top > KIMI_MAX_TOP || (top && (!top_ids || !top_logprob)))
        return KIMI_E_ARGUMENT;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return KIMI_E_ARGUMENT;
    const __typeof__(float_enter()) float_state = float_enter();
    int status = sample_logprobs(logits, n, ids, count, logprob, top, top_ids, top_logprob);
    float_leave(float_state);
    return status;
}
