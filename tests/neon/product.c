/* product.c: the dense, MXFP4 and latent products over hostile shapes. */
#include "harness.h"

#include <string.h>

static const int64_t columns_of_x[] = {1, 2, 3, 5, 64, 65, 130};
enum { COUNTS = sizeof columns_of_x / sizeof *columns_of_x };

static const enum kind pairs[][2] = {{PLAIN, PLAIN}, {PLAIN, TINY},    {TINY, PLAIN},
                                     {TINY, TINY},   {TINY, LARGE},    {LARGE, LARGE},
                                     {WIDE, WIDE},   {PLAIN, SPECIAL}, {SPECIAL, SPECIAL}};
enum { PAIRS = sizeof pairs / sizeof *pairs };

/* Rows of `out` packed tightly, though written with a gap. */
static int64_t tight(const float *y, int64_t y_stride, int64_t count, int64_t rows, float *out) {
    for (int64_t t = 0; t < count; t++)
        memcpy(out + t * rows, y + t * y_stride, (size_t)rows * sizeof *out);
    return count * rows;
}

/* Rows lo..hi-1 of w. */
static kimi_matrix rows_of(const kimi_matrix *w, int64_t lo, int64_t hi) {
    kimi_matrix piece = *w;
    int64_t bytes = w->format == KIMI_PACKED ? w->cols / 64 * 96
                    : w->cols * (w->format == KIMI_BF16 ? 2 : 4);
    piece.rows = hi - lo;
    piece.data = (const uint8_t *)w->data + lo * bytes;
    if (w->format == KIMI_PACKED) piece.starts = w->starts + lo;
    return piece;
}

static int64_t dense(const shape *s, float *out) {
    kimi_matrix w = random_matrix(s->format, s->rows, s->cols, s->weights);
    int64_t x_stride = s->cols + 3, y_stride = s->rows + (s->cols & 1) * 5;
    float *x = random_floats(s->count * x_stride, s->x);
    float *scratch = take_floats(kimi_scratch(s->cols, s->count));
    float *y = take_floats(s->count * y_stride);
    if (y_stride == s->rows) y = out; /* straight between the guards */
    /* two pieces as one operation: the threads of the first need not wait for the second */
    kimi_matrix upper = rows_of(&w, 0, s->rows / 2), lower = rows_of(&w, s->rows / 2, s->rows);
    const kimi_matrix *const pieces[] = {&lower, &upper};
    float *const ys[] = {y + s->rows / 2, y};
    const int64_t strides[] = {y_stride, y_stride};
    if (kimi_products(pieces, s->rows > 1 ? 2 : 1, x, x_stride, s->count, ys, strides, scratch))
        return 0;
    return y == out ? s->count * s->rows : tight(y, y_stride, s->count, s->rows, out);
}

static kimi_mxfp4 random_mxfp4(int64_t rows, int64_t cols, enum kind kind) {
    static const uint8_t edge[] = {0, 1, 2, 64, 126, 127, 128, 200, 253, 254};
    int64_t groups = rows * cols / 32;
    uint8_t *packed = take(groups * 16), *scales = take(groups);
    for (int64_t i = 0; i < groups * 16; i++) packed[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < groups; i++)
        scales[i] = kind == PLAIN  ? (uint8_t)(100 + random_below(40))
                    : kind == TINY ? (uint8_t)random_below(12)
                                   : edge[random_below(10)];
    return (kimi_mxfp4){packed, scales};
}

static int64_t mxfp4(const shape *s, float *out) {
    int64_t x_stride = s->cols + 1;
    kimi_mxfp4 w = random_mxfp4(s->rows, s->cols, s->weights);
    float *x = random_floats(s->count * x_stride, s->x);
    float *scratch = take_floats(kimi_scratch(s->cols, s->count));
    if (kimi_product_mxfp4(w.packed, w.scales, s->rows, s->cols, x, x_stride, s->count, out,
                           s->rows, scratch))
        return 0;
    return s->count * s->rows;
}

/* Two experts, two places a token, of which the first takes the first; cols = latent, and 32 times
 * rows the width between. */
static int64_t experts(const shape *s, float *out) {
    enum { K = 2 };
    int64_t latent = s->cols, inter = 32 * s->rows, count = s->count;
    kimi_expert held[K];
    const kimi_expert *chosen[K] = {held, held + 1};
    int32_t starts[K + 1] = {0, (int32_t)count, (int32_t)(K * count)};
    int32_t *places = take(K * count * (int64_t)sizeof *places);
    for (int e = 0; e < K; e++) {
        held[e] = (kimi_expert){random_mxfp4(inter, latent, s->weights),
                                random_mxfp4(latent, inter, s->weights),
                                random_mxfp4(inter, latent, s->weights)};
        for (int64_t t = 0; t < count; t++) places[e * count + t] = (int32_t)(K * t + e);
    }
    float *x = random_floats(count * latent, s->x), *y = take_floats(count * latent);
    float *gate = take_floats(count * inter), *up = take_floats(count * inter);
    float *scratch = take_floats(kimi_experts_scratch(latent, inter, count));
    if (kimi_experts(chosen, K, starts, places, latent, inter, 4.0f, 25.0f, x, count, K, count,
                     gate, up, y, out, scratch))
        return 0;
    return count * K * latent;
}

/* rows = heads; each has 11 rows for keys and 6 for values; cols = rank. */
enum { NOPE = 11, VALUE = 6 };

/* Without any, the last column is beside the guard. */
static int64_t rope_of(const shape *s) { return s->cols % 3 ? 5 : 0; }

static int64_t absorb(const shape *s, float *out) {
    kimi_matrix w = random_matrix(s->format, s->rows * (NOPE + VALUE), s->cols, s->weights);
    int64_t rope = rope_of(s), q_stride = s->rows * (NOPE + rope);
    int64_t stride = s->rows * (s->cols + rope);
    float *q = random_floats(s->count * q_stride, s->x);
    if (kimi_mla_absorb(&w, s->rows, NOPE, rope, q, q_stride, s->count, out, stride))
        return 0;
    return s->count * stride;
}

static int64_t values(const shape *s, float *out) {
    kimi_matrix w = random_matrix(s->format, s->rows * (NOPE + VALUE), s->cols, s->weights);
    float *latent = random_floats(s->count * s->rows * s->cols, s->x);
    float *scratch = take_floats(kimi_scratch(s->cols, s->count * s->rows));
    if (kimi_mla_values(&w, s->rows, NOPE, s->cols, latent, s->rows * s->cols, s->count, out,
                        s->rows * VALUE, scratch))
        return 0;
    return s->count * s->rows * VALUE;
}

/* rows = heads, cols = rank; as many positions before the tokens as they are columns. */
static int64_t attend(const shape *s, float *out) {
    int64_t start = 2 * s->count - 1, rope = rope_of(s), width = s->cols + rope;
    float *cache = random_floats((start + s->count) * width, s->weights);
    float *q = random_floats(s->count * s->rows * width, s->x);
    float *scratch = take_floats(kimi_mla_scratch(start + s->count, s->rows, width));
    if (kimi_mla_attend(cache, start, s->count, s->rows, s->cols, rope, q, 0.0625f, out, scratch))
        return 0;
    return s->count * s->rows * s->cols;
}

static void products(const char *name, case_fn run, int format, const int64_t *cols, int64_t n,
                     int64_t most) {
    static const int64_t rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13};
    int64_t turn = 0;
    suite_begin(name);
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < COUNTS; j++)
            for (int k = 0; k < 3; k++, turn++) {
                const enum kind *pair = pairs[turn % PAIRS];
                shape s = {format, rows[turn * 7 % 10], cols[i], columns_of_x[j], pair[0], pair[1]};
                if (s.cols * s.count * s.rows <= most) run_case(run, s);
            }
    suite_end();
}

void product_suites(void) {
    static const int64_t any[] = {1,  2,  3,  4,  7,  8,   9,   12,  13,  15,  16, 17,
                                  20, 31, 33, 63, 65, 100, 255, 257, 513, 1025};
    static const int64_t blocks[] = {64, 128, 192, 256, 320, 1088};
    static const int64_t groups[] = {32,  64,  96,  128, 160, 192, 224, 256,
                                     480, 512, 544, 608, 640, 1120};
    static const int64_t ranks[] = {1, 5, 15, 16, 17, 48, 63, 64, 65, 80, 127, 200};
    int64_t most = 1 << 18;
    products("bf16", dense, KIMI_BF16, any, 22, most);
    products("f32", dense, KIMI_F32, any, 22, most);
    products("packed", dense, KIMI_PACKED, blocks, 6, most);
    products("mxfp4", mxfp4, KIMI_BF16, groups, 14, most);
    products("experts", experts, KIMI_BF16, groups, 14, most / 16);
    products("absorb bf16", absorb, KIMI_BF16, ranks, 12, most / 16);
    products("absorb f32", absorb, KIMI_F32, ranks, 12, most / 16);
    products("absorb packed", absorb, KIMI_PACKED, blocks, 4, most / 16);
    products("values packed", values, KIMI_PACKED, blocks, 4, most / 16);
    products("values bf16", values, KIMI_BF16, ranks, 12, most / 16);
    products("attend", attend, KIMI_F32, ranks, 12, most / 64);
}
