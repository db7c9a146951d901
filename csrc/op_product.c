/* op_product.c: products as operations: rows split over threads, columns of x prepared once. */
#include "matrix.h"
#include "parallel.h"

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

static int64_t padded(int64_t cols) { return (cols + 127) / 128 * 128; }

int64_t kimi_scratch(int64_t cols, int64_t count) { return padded(cols) * count; }

int kimi_product(const kimi_matrix *w, const float *x, int64_t x_stride, int64_t count, float *y,
                 int64_t y_stride, float *scratch) {
    int bad = matrix_check(w);
    if (bad) return bad;
    if (!y || !scratch || count < 1) return KIMI_E_ARGUMENT;
    int64_t stride = padded(w->cols);
    if (x && count == 1) kimi_kernels()->prepare(w->format, x, w->cols, scratch); /* no barrier */
    PARALLEL_BEGIN(w->rows * w->cols * count)
    if (x && count > 1) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++)
            kernels->prepare(w->format, x + t * x_stride, w->cols, scratch + t * stride);
    }
    int64_t lo, hi;
    part_of(w->rows, 4, part, parts, &lo, &hi);
    kernels->product(w, lo, hi, scratch, stride, count, y, y_stride);
    PARALLEL_END
    return 0;
}

int kimi_product_mxfp4(const uint8_t *packed, const uint8_t *scales, int64_t rows, int64_t cols,
                       const float *x, int64_t x_stride, int64_t count, float *y,
                       int64_t y_stride, float *scratch) {
    if (!packed || !scales || !x || !y || !scratch || rows < 1 || cols < 32 || cols % 32 ||
        count < 1)
        return KIMI_E_ARGUMENT;
    int64_t stride = padded(cols);
    for (int64_t t = 0; t < count; t++)
        kimi_kernels()->prepare_mxfp4(x + t * x_stride, cols, scratch + t * stride);
    PARALLEL_BEGIN(rows * cols * count)
    int64_t lo, hi;
    part_of(rows, 4, part, parts, &lo, &hi);
    kernels->product_mxfp4(packed, scales, lo, hi, cols, scratch, stride, count, y, y_stride);
    PARALLEL_END
    return 0;
}

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

int kimi_mla_values(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rank,
                    const float *latent, int64_t latent_stride, int64_t count, float *y,
                    int64_t y_stride, float *scratch) {
    int bad = matrix_check(kv_b);
    if (bad) return bad;
    if (!latent || !y || !scratch || heads < 1 || nope < 0 || count < 1 ||
        kv_b->rows % heads || kv_b->rows / heads <= nope || kv_b->cols != rank)
        return KIMI_E_ARGUMENT;
    int64_t head_rows = kv_b->rows / heads, values = head_rows - nope, stride = padded(rank);
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
