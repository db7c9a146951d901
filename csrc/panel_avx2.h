/* panel_avx2.h: many columns of x times many rows of weights, for AVX2.
 *
 * A chunk of columns of W is decoded for TALL rows into a panel and multiplied by panels of WIDE
 * columns of x, TALL x WIDE sums in registers. Panels hold their vectors in the order that the
 * inner loop reads them, one half of the 16 lanes after the other: two streams without a stride,
 * since vectors 64 bytes apart collide in the banks of the first-level cache and pages apart in
 * its sets. The sums of BLOCK rows wait in the second level between chunks, so that x is fetched
 * once per block; the bytes of the rows to come are fetched while a panel is multiplied.
 *
 * A room defines STEPS, the steps of 16 columns in a chunk, a multiple of 8, before it includes
 * this.
 */
#ifndef KIMI_PANEL_AVX2_H
#define KIMI_PANEL_AVX2_H

#include <immintrin.h>

#include "room.h"

#define PANEL_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { TALL = 3, WIDE = 4, BLOCK = 96, BATCH = 32 };

/* [half][step][column of x][lane] */
typedef struct {
    float at[2][STEPS][WIDE][8];
} x_panel;

/* [half][step][row][lane]; MXFP4 also has a factor of each lane per 8 steps. */
typedef struct {
    float at[2][STEPS][TALL][8];
    float factor[2][STEPS / 8][TALL][8];
} w_panel;

/* [half][column of x][row][lane] */
typedef struct {
    float at[2][WIDE][TALL][8];
} sum_panel;

/* The sums of a block. */
typedef struct {
    sum_panel of[BLOCK / TALL][BATCH / WIDE];
} block_sums;

/* What a format does with its weights. */
typedef struct {
    /* `steps` steps of one row from step `first` on, into row r of a panel */
    void (*decode)(const void *weights, int64_t row, int64_t first, int64_t steps, int r,
                   w_panel *out);
    /* out += w times x */
    void (*multiply)(const w_panel *w, const x_panel *x, int64_t steps, sum_panel *out);
    /* where the bytes of a row's step begin */
    const char *(*bytes)(const void *weights, int64_t row, int64_t step);
} panel_format;

/* Keeps a loaded vector in its register: compilers like to fold a load into every use, and loads
 * are what these loops run out of. */
PANEL_INLINE __m256 panel_load(const float *p) {
    __m256 v = _mm256_load_ps(p);
    __asm__("" : "+x"(v));
    return v;
}

/* `columns` (past WIDE: WIDE) columns of prepared x; what is missing is zero. */
PANEL_INLINE void panel_columns(const float *x, int64_t x_stride, int64_t columns, int64_t steps,
                                x_panel *out) {
    for (int64_t t = 0; t < WIDE; t++)
        for (int64_t s = 0; s < steps; s++)
            for (int i = 0; i < 2; i++)
                _mm256_store_ps(out->at[i][s][t],
                                t < columns ? _mm256_loadu_ps(x + t * x_stride + 16 * s + 8 * i)
                                            : _mm256_setzero_ps());
}

/* Asks for the `steps` steps of a row that are multiplied next. */
PANEL_INLINE void panel_prefetch(panel_format format, const void *weights, int64_t row,
                                 int64_t first, int64_t steps) {
    const char *end = format.bytes(weights, row, first + steps);
    for (const char *p = format.bytes(weights, row, first); p < end; p += 64)
        _mm_prefetch(p, _MM_HINT_T0);
}

/* Rows [lo, lo + rows) (at most BLOCK) of `all` steps times `count` (at most BATCH) prepared
 * columns. */
PANEL_INLINE void panel_block(panel_format format, const void *weights, int64_t lo, int64_t rows,
                              int64_t all, const float *x, int64_t x_stride, int64_t count,
                              block_sums *sums) {
    x_panel columns[BATCH / WIDE] __attribute__((aligned(64)));
    w_panel panel __attribute__((aligned(64)));
    int64_t wide = (count + WIDE - 1) / WIDE, tall = (rows + TALL - 1) / TALL;
    memset(&panel, 0, sizeof panel); /* rows that are not there */
    for (int64_t g = 0; g < tall; g++)
        memset(sums->of[g], 0, (size_t)wide * sizeof sums->of[g][0]);
    for (int64_t first = 0; first < all; first += STEPS) {
        int64_t steps = all - first < STEPS ? all - first : STEPS, next = first + steps;
        int64_t after = all - next < STEPS ? all - next : STEPS;
        for (int64_t t = 0; t < wide; t++)
            panel_columns(x + t * WIDE * x_stride + 16 * first, x_stride, count - t * WIDE, steps,
                          columns + t);
        for (int64_t g = 0; g < tall; g++) {
            for (int r = 0; r < TALL && g * TALL + r < rows; r++) {
                int64_t row = g * TALL + r;
                format.decode(weights, lo + row, first, steps, r, &panel);
                if (row + TALL < rows)
                    panel_prefetch(format, weights, lo + row + TALL, first, steps);
                else
                    panel_prefetch(format, weights, lo + row % TALL, next, after);
            }
            for (int64_t t = g * count / tall; t < (g + 1) * count / tall; t++)
                for (int64_t s = 0; s < after; s++)
                    _mm_prefetch((const char *)(x + t * x_stride + 16 * (next + s)), _MM_HINT_T1);
            for (int64_t t = 0; t < wide; t++)
                format.multiply(&panel, columns + t, steps, &sums->of[g][t]);
        }
    }
}

/* The 16 lanes of row r and column t. */
PANEL_INLINE void panel_lanes(const block_sums *sums, int64_t r, int64_t t, __m256 out[2]) {
    for (int i = 0; i < 2; i++)
        out[i] = _mm256_load_ps(sums->of[r / TALL][t / WIDE].at[i][t % WIDE][r % TALL]);
}

#endif
