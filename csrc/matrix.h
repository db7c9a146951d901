/* matrix.h: whether dense weights can be computed with: asked once by every operation that does. */
#ifndef KIMI_MATRIX_H
#define KIMI_MATRIX_H

#include <stddef.h>

#include "kimi.h"

/* Escapes come from a file and steer writes inside a row: each row's columns must ascend. */
static inline int escapes_check(const kimi_matrix *w) {
    if (w->starts[w->rows] > w->escape_count) return KIMI_E_ESCAPES;
    for (int64_t r = 0; r < w->rows; r++)
        if (w->starts[r] > w->starts[r + 1]) return KIMI_E_ESCAPES;
    for (int64_t r = 0; r < w->rows; r++) {
        int64_t last = -1;
        for (uint32_t e = w->starts[r]; e < w->starts[r + 1]; e++) {
            int64_t column = w->escapes[e] >> 16;
            if (column <= last || column >= w->cols) return KIMI_E_ESCAPES;
            last = column;
        }
    }
    return 0;
}

static inline int matrix_check(const kimi_matrix *w) {
    if (!w || !w->data || w->rows < 1 || w->cols < 1) return KIMI_E_ARGUMENT;
    if (w->format == KIMI_BF16 || w->format == KIMI_F32) return 0;
    if (w->format != KIMI_PACKED || w->cols % 64 || w->cols > 65536 || !w->table || !w->starts ||
        !w->escapes)
        return KIMI_E_ARGUMENT;
    return escapes_check(w);
}

#endif
