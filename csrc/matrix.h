/* matrix.h: whether dense weights can be computed with: asked once by every operation that does. */
#ifndef KIMI_MATRIX_H
#define KIMI_MATRIX_H

#include <stddef.h>

#include "kimi.h"

/* Escapes come from a file and steer writes inside a row: each row's columns must ascend. Rows
 * lo..hi-1 may be computed once this is 0. */
static inline int escapes_check(const kimi_matrix *w, int64_t lo, int64_t hi) {
    if (w->format != KIMI_PACKED) return 0;
    if (w->starts[hi] > w->escape_count) return KIMI_E_ESCAPES;
    for (int64_t r = lo; r < hi; r++)
        if (w->starts[r] > w->starts[r + 1]) return KIMI_E_ESCAPES;
    for (int64_t r = lo; r < hi; r++) {
        int64_t last = -1;
        for (uint32_t e = w->starts[r]; e < w->starts[r + 1]; e++) {
            int64_t column = w->escapes[e] >> 16;
            if (column <= last || column >= w->cols) return KIMI_E_ESCAPES;
            last = column;
        }
    }
    return 0;
}

/* All but the escapes. */
static inline int shape_check(const kimi_matrix *w) {
    if (!w || !w->data || w->rows < 1 || w->cols < 1) return KIMI_E_ARGUMENT;
    if (w->format == KIMI_BF16 || w->format == KIMI_F32) return 0;
    if (w->format != KIMI_PACKED || w->cols % 64 || w->cols > 65536 || !w->table || !w->starts ||
        !w->escapes)
        return KIMI_E_ARGUMENT;
    return 0;
}

static inline int matrix_check(const kimi_matrix *w) {
    int bad = shape_check(w);
    return bad ? bad : escapes_check(w, 0, w->rows);
}

#endif
