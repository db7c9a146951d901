/* op_product.c: products as operations: rows split over threads, columns of x prepared once. */
#include "matrix.h"
#include "parallel.h"

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
