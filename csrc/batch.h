/* batch.h: many columns of X times a tile of decoded rows, for any vector width.
 *
 * A SIMD room defines, before it includes this once:
 *   VEC, VEC_WIDTH          the vector of floats and how many it holds
 *   vec_load, vec_store, vec_mul(a, b), vec_fma(a, b, c)
 *   vec_hold(a)             keeps a loaded vector in its register: compilers like to fold a load
 *                           into every use, and loads are what these loops run out of
 *   BATCH_TARGET            the room's target attribute
 *   BATCH_ROWS, BATCH_COLUMNS   rows and columns of one register tile of the dense product
 *   SCALED_ROWS, SCALED_COLUMNS the same for MXFP4
 *
 * The 16 lanes of a result are PARTS vectors. The register tile walks a chunk of columns with its
 * accumulators in registers and spills them to `lanes` between chunks.
 */
#ifndef KIMI_BATCH_H
#define KIMI_BATCH_H

#include "room.h"

#define BATCH_INLINE static inline __attribute__((always_inline)) BATCH_TARGET

enum { PARTS = 16 / VEC_WIDTH, TILE_COLUMNS = 256, TILE_SUPERS = 4 };

/* lanes[r][t] += tile rows times x columns, over n columns of W; rows and columns are constants at
 * every call. row_lanes is the distance between rows of `lanes`. */
BATCH_INLINE void dense_tile(float tile[][TILE_COLUMNS], int rows, const float *x, int64_t x_stride,
                             int columns, int64_t n, float *lanes, int64_t row_lanes) {
    VEC acc[BATCH_ROWS][BATCH_COLUMNS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < columns; t++)
            for (int i = 0; i < PARTS; i++)
                acc[r][t][i] = vec_load(lanes + r * row_lanes + 16 * t + VEC_WIDTH * i);
    for (int64_t c = 0; c < n; c += 16)
        for (int i = 0; i < PARTS; i++) {
            VEC column[BATCH_COLUMNS];
            for (int t = 0; t < columns; t++)
                column[t] = vec_load(x + t * x_stride + c + VEC_WIDTH * i);
            for (int r = 0; r < rows; r++) {
                VEC w = vec_load(tile[r] + c + VEC_WIDTH * i);
                vec_hold(w);
                for (int t = 0; t < columns; t++)
                    acc[r][t][i] = vec_fma(w, column[t], acc[r][t][i]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < columns; t++)
            for (int i = 0; i < PARTS; i++)
                vec_store(lanes + r * row_lanes + 16 * t + VEC_WIDTH * i, acc[r][t][i]);
}

/* A super-block is 128 columns: 8 steps of 16 lanes, then the lanes' scale factors. */
typedef struct {
    float step[8][16];
    float factor[16];
} scaled_super;

/* lanes[r][t] += (tile rows times x columns, in 8 steps) times factor, for each super-block. */
BATCH_INLINE void scaled_tile(scaled_super tile[][TILE_SUPERS], int rows, const float *x,
                              int64_t x_stride, int columns, int64_t supers, float *lanes,
                              int64_t row_lanes) {
    for (int64_t s = 0; s < supers; s++)
        for (int i = 0; i < PARTS; i++) {
            VEC p[SCALED_ROWS][SCALED_COLUMNS], w[SCALED_ROWS];
            const float *at = x + 128 * s + VEC_WIDTH * i;
            for (int j = 0; j < 8; j++) {
                for (int r = 0; r < rows; r++) w[r] = vec_load(tile[r][s].step[j] + VEC_WIDTH * i);
                for (int t = 0; t < columns; t++) {
                    VEC column = vec_load(at + t * x_stride + 16 * j);
                    vec_hold(column);
                    for (int r = 0; r < rows; r++)
                        p[r][t] = j ? vec_fma(w[r], column, p[r][t]) : vec_mul(w[r], column);
                }
            }
            for (int r = 0; r < rows; r++) {
                VEC factor = vec_load(tile[r][s].factor + VEC_WIDTH * i);
                for (int t = 0; t < columns; t++) {
                    float *a = lanes + r * row_lanes + 16 * t + VEC_WIDTH * i;
                    vec_store(a, vec_fma(p[r][t], factor, vec_load(a)));
                }
            }
        }
}

/* Whole register tiles first, then what is left at the edges, one row or column at a time. */
#define BATCH_EDGES(call, rows, columns, ROWS, COLUMNS)                                           \
    for (int64_t t = 0; t < (columns);) {                                                         \
        int wide = (columns) - t >= COLUMNS;                                                      \
        for (int64_t r = 0; r < (rows);) {                                                        \
            int tall = (rows) - r >= ROWS;                                                        \
            if (tall && wide)                                                                     \
                call(r, ROWS, t, COLUMNS);                                                        \
            else if (wide)                                                                        \
                call(r, 1, t, COLUMNS);                                                           \
            else if (tall)                                                                        \
                call(r, ROWS, t, 1);                                                              \
            else                                                                                  \
                call(r, 1, t, 1);                                                                 \
            r += tall ? ROWS : 1;                                                                 \
        }                                                                                         \
        t += wide ? COLUMNS : 1;                                                                  \
    }

#endif
