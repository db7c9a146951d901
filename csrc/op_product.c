/* op_product.c: products as operations: rows split over threads, columns of x prepared once. */
#include "matrix.h"
#include "parallel.h"

static int64_t padded(int64_t cols) { return (cols + 127) / 128 * 128; }

int64_t kimi_scratch(int64_t cols, int64_t count) { return padded(cols) * count; }

/* Products of `n` matrices of one format with the same x. */
static int products(const kimi_matrix *const *w, int64_t n, const float *x, int64_t x_stride,
                    int64_t count, float *const *y, const int64_t *y_stride, float *scratch) {
    const int format = w[0]->format;
    const int64_t cols = w[0]->cols, stride = padded(cols);
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) rows += w[i]->rows;
    int bad = 0;
    if (x && count == 1) kimi_kernels()->prepare(format, x, cols, scratch); /* no barrier */
    PARALLEL_BEGIN(rows * cols * count)
    if (x && count > 1) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++)
            kernels->prepare(format, x + t * x_stride, cols, scratch + t * stride);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t lo, hi;
        part_of(w[i]->rows, 4, part, parts, &lo, &hi);
        int mine = escapes_check(w[i], lo, hi);
        if (mine) {
#pragma omp atomic write
            bad = mine;
            break;
        }
        kernels->product(w[i], lo, hi, scratch, stride, count, y[i], y_stride[i]);
    }
    PARALLEL_END
    return bad;
}

int kimi_products(const kimi_matrix *const *w, int64_t n, const float *x, int64_t x_stride,
                  int64_t count, float *const *y, const int64_t *y_stride, float *scratch) {
    if (!w || !y || !y_stride || !scratch || n < 1 || count < 1) return KIMI_E_ARGUMENT;
    for (int64_t i = 0; i < n; i++) {
        int bad = shape_check(w[i]);
        if (bad) return bad;
        if (!y[i] || w[i]->cols != w[0]->cols || (!x && w[i]->format != w[0]->format))
            return KIMI_E_ARGUMENT;
    }
    for (int64_t from = 0, to; from < n; from = to) {
        for (to = from + 1; to < n && w[to]->format == w[from]->format;) to++;
        int bad = products(w + from, to - from, x, x_stride, count, y + from, y_stride + from,
                           scratch);
        if (bad) return bad;
    }
    return 0;
}

int kimi_product(const kimi_matrix *w, const float *x, int64_t x_stride, int64_t count, float *y,
                 int64_t y_stride, float *scratch) {
    return kimi_products(&w, 1, x, x_stride, count, &y, &y_stride, scratch);
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
