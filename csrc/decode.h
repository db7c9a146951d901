/* decode.h: rows of any dense format as float32 in column order, a chunk at a time. */
#ifndef KIMI_DECODE_H
#define KIMI_DECODE_H

#include "room.h"

/* One packed block of 64 columns as bf16 in column order, escapes not applied. */
KIMI_INLINE void decode_block(const uint8_t *block, const uint8_t *table, uint16_t *out) {
    for (int h = 0; h < 2; h++)
        for (int p = 0; p < 32; p++) {
            unsigned high = table[h ? block[64 + p] >> 4 : block[64 + p] & 15];
            out[packed_column(h, p)] = (uint16_t)(high << 8 | block[32 * h + p]);
        }
}

/* First escape of row r at or after `column`; the end of the row's list if there is none. */
KIMI_INLINE uint32_t decode_escape(const kimi_matrix *w, int64_t r, int64_t column) {
    uint32_t lo = w->starts[r], hi = w->starts[r + 1];
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((int64_t)(w->escapes[mid] >> 16) < column)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Columns [c0, c0 + KIMI_CHUNK) of row r into out; returns how many, the row's tail padded with +0
 * to a multiple of 16. c0 is a multiple of KIMI_CHUNK. */
KIMI_INLINE int64_t decode_row(const kimi_matrix *w, int64_t r, int64_t c0, float *out) {
    int64_t n = w->cols - c0 < KIMI_CHUNK ? w->cols - c0 : KIMI_CHUNK;
    if (w->format == KIMI_F32) {
        memcpy(out, (const float *)w->data + r * w->cols + c0, (size_t)n * sizeof *out);
    } else if (w->format == KIMI_BF16) {
        const uint16_t *row = (const uint16_t *)w->data + r * w->cols + c0;
        for (int64_t c = 0; c < n; c++) out[c] = bf16_float(row[c]);
    } else {
        const uint8_t *row = (const uint8_t *)w->data + (r * w->cols + c0) / 64 * 96;
        for (int64_t c = 0; c < n; c += 64) {
            uint16_t block[64];
            decode_block(row + c / 64 * 96, w->table, block);
            for (int i = 0; i < 64; i++) out[c + i] = bf16_float(block[i]);
        }
        for (uint32_t e = decode_escape(w, r, c0); e < w->starts[r + 1]; e++) {
            int64_t column = (int64_t)(w->escapes[e] >> 16) - c0;
            if (column >= n) break;
            out[column] = bf16_float((uint16_t)(w->escapes[e] & 0xFFFFu));
        }
    }
    for (; n % 16; n++) out[n] = 0.0f;
    return n;
}

#endif
