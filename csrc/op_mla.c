/* op_mla.c: latent attention as operations. The cache is never expanded: queries are taken into its
 * space, and what they find is taken out of it.
 *
 * Threads split the heads of the weights; of the cache, which every head reads, they split the
 * positions for the scores and the columns for the sums, so that each reads a part of it once.
 */
#include "matrix.h"
#include "parallel.h"

int kimi_mla_absorb(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rope,
                    const float *q, int64_t q_stride, int64_t count, float *out,
                    int64_t out_stride) {
    int bad = matrix_check(kv_b);
    if (bad) return bad;
    if (!q || !out || heads < 1 || nope < 1 || rope < 0 || count < 1 ||
        kv_b->rows % heads || kv_b->rows / heads < nope)
        return KIMI_E_ARGUMENT;
    int64_t head_rows = kv_b->rows / heads, rank = kv_b->cols;
    PARALLEL_BEGIN(count * heads * nope * rank)
#pragma omp for schedule(static)
    for (int64_t h = 0; h < heads; h++) {
        const float *from = q + h * (nope + rope);
        float *into = out + h * (rank + rope);
        kernels->absorb(kv_b, h * head_rows, nope, from, q_stride, count, into, out_stride);
        for (int64_t t = 0; t < count; t++)
            for (int64_t c = 0; c < rope; c++)
                into[t * out_stride + rank + c] = from[t * q_stride + nope + c];
    }
    PARALLEL_END
    return 0;
}

/* Heads that attention takes together. */
enum { ATTEND_HEADS = 128 };

static int64_t together(int64_t heads) { return heads < ATTEND_HEADS ? heads : ATTEND_HEADS; }

/* Scores of a head: an odd number of cache lines, or heads would share the sets of a cache. */
static int64_t score_stride(int64_t positions) { return ((positions + 15) / 16 | 1) * 16; }

int64_t kimi_mla_scratch(int64_t positions, int64_t heads, int64_t width) {
    return together(heads) * (score_stride(positions) + kimi_scratch(width, 1));
}

int kimi_mla_attend(const float *cache, int64_t start, int64_t count, int64_t heads, int64_t rank,
                    int64_t rope, const float *q, float scale, float *out, float *scratch) {
    if (!cache || !q || !out || !scratch || start < 0 || count < 1 || heads < 1 || rank < 1 ||
        rank > KIMI_MAX_RANK || rope < 0)
        return KIMI_E_ARGUMENT;
    int64_t width = rank + rope, padded = kimi_scratch(width, 1);
    int64_t e_stride = score_stride(start + count);
    float *queries = scratch + together(heads) * e_stride;
    double sum[ATTEND_HEADS];
    PARALLEL_BEGIN(count * heads * (start + count) * width)
    for (int64_t t = 0; t < count; t++)
        for (int64_t first = 0; first < heads; first += ATTEND_HEADS) {
            int64_t group = together(heads - first), at = t * heads + first, lo, hi;
            const kimi_matrix keys = {
                .format = KIMI_F32, .rows = start + t + 1, .cols = width, .data = cache};
#pragma omp for schedule(static)
            for (int64_t h = 0; h < group; h++)
                kernels->prepare(keys.format, q + (at + h) * width, width, queries + h * padded);
            part_of(keys.rows, 4, part, parts, &lo, &hi);
            kernels->product(&keys, lo, hi, queries, padded, group, scratch, e_stride);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t h = 0; h < group; h++)
                kernels->softmax(scratch + h * e_stride, keys.rows, scale, sum + h);
            part_of(rank, 16, part, parts, &lo, &hi);
            if (lo < hi)
                kernels->blend(cache, keys.rows, width, lo, hi, scratch, e_stride, sum, group,
                               out + at * rank, rank);
        }
    PARALLEL_END
    return 0;
}

/* `rows` rows of w from `row` on. */
static kimi_matrix rows_of(const kimi_matrix *w, int64_t row, int64_t rows) {
    int64_t bytes = w->format == KIMI_PACKED ? w->cols / 64 * 96
                    : w->cols * (w->format == KIMI_BF16 ? 2 : 4);
    kimi_matrix part = *w;
    part.rows = rows;
    part.data = (const uint8_t *)w->data + row * bytes;
    if (w->format == KIMI_PACKED) part.starts = w->starts + row;
    return part;
}

int kimi_mla_values(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rank,
                    const float *latent, int64_t latent_stride, int64_t count, float *y,
                    int64_t y_stride, float *scratch) {
    int bad = matrix_check(kv_b);
    if (bad) return bad;
    if (!latent || !y || !scratch || heads < 1 || nope < 0 || count < 1 ||
        kv_b->rows % heads || kv_b->rows / heads <= nope || kv_b->cols != rank)
        return KIMI_E_ARGUMENT;
    int64_t head_rows = kv_b->rows / heads, values = head_rows - nope;
    int64_t stride = kimi_scratch(rank, 1);
    PARALLEL_BEGIN(count * heads * values * rank)
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * heads; i++)
        kernels->prepare(kv_b->format, latent + i / heads * latent_stride + i % heads * rank, rank,
                         scratch + i * stride);
#pragma omp for schedule(static)
    for (int64_t h = 0; h < heads; h++) {
        kimi_matrix mine = rows_of(kv_b, h * head_rows + nope, values);
        kernels->product(&mine, 0, values, scratch + h * stride, heads * stride, count,
                         y + h * values, y_stride);
    }
    PARALLEL_END
    return 0;
}

int kimi_mla(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rope,
             const float *cache, int64_t start, int64_t count, const float *q, int64_t q_stride,
             float scale, float *queries, float *latent, float *attend, float *y,
             int64_t y_stride, float *scratch) {
    if (!kv_b) return KIMI_E_ARGUMENT;
    int64_t rank = kv_b->cols;
    int bad = kimi_mla_absorb(kv_b, heads, nope, rope, q, q_stride, count, queries,
                              heads * (rank + rope));
    if (!bad)
        bad = kimi_mla_attend(cache, start, count, heads, rank, rope, queries, scale, latent,
                              attend);
    if (!bad)
        bad = kimi_mla_values(kv_b, heads, nope, rank, latent, heads * rank, count, y, y_stride,
                              scratch);
    return bad;
}
