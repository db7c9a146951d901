/* panel.h: many columns of x times many rows of weights, for any vector width.
 *
 * A chunk of columns of W is decoded for TALL rows into a panel and multiplied by panels of WIDE
 * columns of x, TALL x WIDE sums in registers. Panels hold their vectors in the order that the
 * inner loop reads them, one vector of the 16 lanes after the other: two streams without a stride,
 * since vectors 64 bytes apart collide in the banks of the first-level cache and pages apart in
 * its sets. The sums of BLOCK rows wait in the second level between chunks, so that x is fetched
 * once per block; the bytes of the rows to come are fetched while a panel is multiplied.
 *
 * A SIMD room defines, before it includes this once: VEC_WIDTH (vec.h), and STEPS, the steps of
 * 16 columns in a chunk, a multiple of 8.
 */
#ifndef KIMI_PANEL_H
#define KIMI_PANEL_H

#include "decode.h"
#include "vec.h"

/* TALL x WIDE sums, TALL weights and one x fit the registers; the sums of BLOCK rows, for BATCH
 * columns, half of the second-level cache. */
#if VEC_WIDTH == 8
enum { TALL = 3, WIDE = 4, BLOCK = 96 };
#elif VEC_WIDTH == 16
enum { TALL = 6, WIDE = 4, BLOCK = 192 };
#else
enum { TALL = 4, WIDE = 4, BLOCK = 96 };
#endif
enum { PARTS = 16 / VEC_WIDTH, BATCH = 32 };

/* [part of the lanes][step][column of x][lane] */
typedef struct {
    float at[PARTS][STEPS][WIDE][VEC_WIDTH];
} x_panel;

/* [part][step][row][lane]; MXFP4 also has a factor of each lane per 8 steps. */
typedef struct {
    float at[PARTS][STEPS][TALL][VEC_WIDTH];
    float factor[PARTS][STEPS / 8][TALL][VEC_WIDTH];
} w_panel;

/* [part][column of x][row][lane] */
typedef struct {
    float at[PARTS][WIDE][TALL][VEC_WIDTH];
} sum_panel;

/* MXFP4 weights: rows of `groups` groups. */
typedef struct {
    const uint8_t *packed, *scales;
    int64_t groups;
} expert_rows;

/* How a room multiplies `weights`, an expert_rows or a kimi_matrix. */
typedef struct {
    /* which of the two: whether 8 steps are multiplied by a factor, then added to the sums */
    int scaled;
    /* `steps` steps of one row from step `first` on, into row r of a panel */
    void (*decode)(const void *weights, int64_t row, int64_t first, int64_t steps, int r,
                   w_panel *out);
    /* the tree over 16 lanes */
    float (*end)(const void *weights, const VEC lanes[PARTS]);
} panel_format;

/* Where the bytes of a row's step begin; past the last step, where the row ends. */
VEC_INLINE const char *panel_bytes(panel_format format, const void *weights, int64_t row,
                                     int64_t step) {
    if (format.scaled) {
        const expert_rows *e = weights;
        int64_t group = step / 2 < e->groups ? step / 2 : e->groups;
        return (const char *)e->packed + (row * e->groups + group) * 16;
    }
    const kimi_matrix *w = weights;
    int64_t at = row * w->cols + (16 * step < w->cols ? 16 * step : w->cols);
    return (const char *)w->data + (w->format == KIMI_F32    ? at * 4
                                    : w->format == KIMI_BF16 ? at * 2
                                                             : at / 64 * 96);
}

VEC_INLINE VEC panel_load(const float *p) {
    VEC v = vec_load(p);
    vec_hold(v);
    return v;
}

/* out += w times x; `fresh`: out has nothing in it yet */
VEC_INLINE void panel_multiply(const w_panel *w, const x_panel *x, int64_t steps, int fresh,
                                 sum_panel *out) {
    for (int i = 0; i < PARTS; i++) {
        VEC acc[WIDE][TALL];
        for (int t = 0; t < WIDE; t++)
            for (int r = 0; r < TALL; r++)
                acc[t][r] = fresh ? vec_zero() : vec_load(out->at[i][t][r]);
        for (int64_t s = 0; s < steps; s++) {
            VEC row[TALL];
            for (int r = 0; r < TALL; r++) row[r] = panel_load(w->at[i][s][r]);
            for (int t = 0; t < WIDE; t++) {
                VEC column = panel_load(x->at[i][s][t]);
                for (int r = 0; r < TALL; r++) acc[t][r] = vec_fma(row[r], column, acc[t][r]);
            }
        }
        for (int t = 0; t < WIDE; t++)
            for (int r = 0; r < TALL; r++) vec_store(out->at[i][t][r], acc[t][r]);
    }
}

/* out += factor times (w times x), every 8 steps */
VEC_INLINE void panel_multiply_scaled(const w_panel *w, const x_panel *x, int64_t steps,
                                        int fresh, sum_panel *out) {
    for (int i = 0; i < PARTS; i++)
        for (int64_t s = 0; s < steps; s += 8) {
            VEC p[WIDE][TALL], row[TALL];
            for (int r = 0; r < TALL; r++) row[r] = vec_load(w->at[i][s][r]);
            for (int t = 0; t < WIDE; t++) {
                VEC column = vec_load(x->at[i][s][t]);
                for (int r = 0; r < TALL; r++) p[t][r] = vec_mul(row[r], column);
            }
#pragma GCC unroll 8
            for (int64_t j = s + 1; j < s + 8; j++) {
                for (int r = 0; r < TALL; r++) row[r] = panel_load(w->at[i][j][r]);
                for (int t = 0; t < WIDE; t++) {
                    VEC column = panel_load(x->at[i][j][t]);
                    for (int r = 0; r < TALL; r++) p[t][r] = vec_fma(row[r], column, p[t][r]);
                }
            }
            for (int r = 0; r < TALL; r++) row[r] = vec_load(w->factor[i][s / 8][r]);
            for (int t = 0; t < WIDE; t++)
                for (int r = 0; r < TALL; r++) {
                    float *sum = out->at[i][t][r];
                    VEC before = fresh && s == 0 ? vec_zero() : vec_load(sum);
                    vec_store(sum, vec_fma(p[t][r], row[r], before));
                }
        }
}

/* `columns` (past WIDE: WIDE) columns of prepared x; what is missing is zero. */
VEC_INLINE void panel_columns(const float *x, int64_t x_stride, int64_t columns, int64_t steps,
                                x_panel *out) {
    for (int64_t t = 0; t < WIDE; t++)
        for (int64_t s = 0; s < steps; s++)
            for (int i = 0; i < PARTS; i++)
                if (t < columns)
                    memcpy(out->at[i][s][t], x + t * x_stride + 16 * s + VEC_WIDTH * i,
                           sizeof out->at[i][s][t]);
                else
                    memset(out->at[i][s][t], 0, sizeof out->at[i][s][t]);
}

/* Asks for every `stride`th line, from `line` on, of `steps` steps of `rows` rows: a few at a time,
 * since loads that miss the first-level cache wait behind all that was asked for before. */
VEC_INLINE void panel_prefetch(panel_format format, const void *weights, int64_t row,
                                 int64_t rows, int64_t first, int64_t steps, int64_t line,
                                 int64_t stride) {
    for (int64_t r = row; r < row + rows; r++) {
        const char *end = panel_bytes(format, weights, r, first + steps);
        const char *p = panel_bytes(format, weights, r, first) + 64 * line;
        for (; p < end; p += 64 * stride) __builtin_prefetch(p);
    }
}

/* Rows [lo, lo + rows) (at most BLOCK) of `all` steps times `count` (at most BATCH) prepared
 * columns. */
VEC_INLINE void panel_block(panel_format format, const void *weights, int64_t lo, int64_t rows,
                              int64_t all, const float *x, int64_t x_stride, int64_t count,
                              float *y, int64_t y_stride) {
    x_panel columns[BATCH / WIDE] __attribute__((aligned(64)));
    w_panel panel __attribute__((aligned(64)));
    sum_panel sums[BLOCK / TALL][BATCH / WIDE] __attribute__((aligned(64)));
    int64_t wide = (count + WIDE - 1) / WIDE, tall = (rows + TALL - 1) / TALL;
    memset(&panel, 0, sizeof panel); /* rows that are not there */
    for (int64_t first = 0; first < all; first += STEPS) {
        int64_t steps = all - first < STEPS ? all - first : STEPS, next = first + steps;
        int64_t after = all - next < STEPS ? all - next : STEPS;
        for (int64_t t = 0; t < wide; t++)
            panel_columns(x + t * WIDE * x_stride + 16 * first, x_stride, count - t * WIDE, steps,
                          columns + t);
        /* x of the next chunk is asked for from here on, a few lines at a time too */
        int64_t column = after ? 0 : count, step = 0;
        int64_t few = (count * after + tall * wide - 1) / (tall * wide);
        for (int64_t g = 0; g < tall; g++) {
            int64_t at = g * TALL, high = rows - at < TALL ? rows - at : TALL;
            int64_t below = rows - at - high, then = below < TALL ? below : TALL;
            for (int r = 0; r < high; r++)
                format.decode(weights, lo + at + r, first, steps, r, &panel);
            for (int64_t t = 0; t < wide; t++) {
                for (int64_t i = 0; i < few && column < count; i++) {
                    __builtin_prefetch(x + column * x_stride + 16 * (next + step), 0, 2);
                    if (++step == after) step = 0, column++;
                }
                if (below)
                    panel_prefetch(format, weights, lo + at + TALL, then, first, steps, t, wide);
                else
                    panel_prefetch(format, weights, lo, rows < TALL ? rows : TALL, next, after, t,
                                   wide);
                if (format.scaled)
                    panel_multiply_scaled(&panel, columns + t, steps, first == 0, &sums[g][t]);
                else
                    panel_multiply(&panel, columns + t, steps, first == 0, &sums[g][t]);
            }
        }
    }
    for (int64_t t = 0; t < count; t++)
        for (int64_t r = 0; r < rows; r++) {
            VEC lanes[PARTS];
            for (int i = 0; i < PARTS; i++)
                lanes[i] = vec_load(sums[r / TALL][t / WIDE].at[i][t % WIDE][r % TALL]);
            y[t * y_stride + lo + r] = format.end(weights, lanes);
        }
}

/* Rows [lo, hi) of `steps` steps times `count` prepared columns. */
VEC_INLINE void panel_product(panel_format format, const void *weights, int64_t lo, int64_t hi,
                                int64_t steps, const float *x, int64_t x_stride, int64_t count,
                                float *y, int64_t y_stride) {
    for (int64_t r = lo; r < hi; r += BLOCK)
        for (int64_t t = 0; t < count; t += BATCH)
            panel_block(format, weights, r, hi - r < BLOCK ? hi - r : BLOCK, steps,
                        x + t * x_stride, x_stride, count - t < BATCH ? count - t : BATCH,
                        y + t * y_stride, y_stride);
}

#endif
