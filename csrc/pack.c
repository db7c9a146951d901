/* pack.c: bf16 rows to packed rows and back, and the scan for scale bytes that mean NaN. */
#include "decode.h"
#include "matrix.h"
#include "parallel.h"

int kimi_pack_histogram(const uint16_t *w, int64_t n, int64_t *counts) {
    if (!w || !counts || n < 0) return KIMI_E_ARGUMENT;
    for (int64_t i = 0; i < n; i++) counts[w[i] >> 8]++;
    return 0;
}

/* index[high byte] = its place in the table, or 16. */
static void pack_index(const uint8_t *table, uint8_t index[256]) {
    memset(index, 16, 256);
    for (int i = 15; i >= 0; i--) index[table[i]] = (uint8_t)i;
}

int64_t kimi_pack_escapes(const uint16_t *w, int64_t n, const uint8_t *table) {
    uint8_t index[256];
    int64_t count = 0;
    pack_index(table, index);
    for (int64_t i = 0; i < n; i++) count += index[w[i] >> 8] == 16;
    return count;
}

static void pack_row(const uint16_t *w, int64_t cols, const uint8_t *index, uint8_t *packed) {
    for (int64_t c = 0; c < cols; c += 64, packed += 96)
        for (int p = 0; p < 32; p++) {
            uint16_t first = w[c + packed_column(0, p)], second = w[c + packed_column(1, p)];
            packed[p] = (uint8_t)first;
            packed[32 + p] = (uint8_t)second;
            packed[64 + p] =
                (uint8_t)((index[first >> 8] & 15) | (index[second >> 8] & 15) << 4);
        }
}

int kimi_pack_rows(const uint16_t *w, int64_t rows, int64_t cols, const uint8_t *table,
                   uint8_t *packed, uint32_t *starts, uint32_t *escapes) {
    if (!w || !table || !packed || !starts || !escapes || rows < 1 || cols < 64 || cols % 64 ||
        cols > 65536)
        return KIMI_E_ARGUMENT;
    uint8_t index[256];
    pack_index(table, index);
    PARALLEL_BEGIN(rows * cols)
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        pack_row(w + r * cols, cols, index, packed + r * (cols / 64 * 96));
    PARALLEL_END
    uint32_t at = starts[0];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++)
            if (index[w[r * cols + c] >> 8] == 16)
                escapes[at++] = (uint32_t)c << 16 | w[r * cols + c];
        starts[r + 1] = at;
    }
    return 0;
}

int kimi_unpack_rows(const kimi_matrix *w, uint16_t *out) {
    int bad = matrix_check(w);
    if (bad) return bad;
    if (!out || w->format != KIMI_PACKED) return KIMI_E_ARGUMENT;
    const uint8_t *data = w->data;
    PARALLEL_BEGIN(w->rows * w->cols)
#pragma omp for schedule(static)
    for (int64_t r = 0; r < w->rows; r++) {
        for (int64_t c = 0; c < w->cols; c += 64)
            decode_block(data + (r * w->cols + c) / 64 * 96, w->table, out + r * w->cols + c);
        for (uint32_t e = w->starts[r]; e < w->starts[r + 1]; e++)
            out[r * w->cols + (w->escapes[e] >> 16)] = (uint16_t)(w->escapes[e] & 0xFFFFu);
    }
    PARALLEL_END
    return 0;
}

int64_t kimi_scale_nan(const uint8_t *scales, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (scales[i] == 255) return i;
    return -1;
}
