/* check.c: runs every suite, then the golden kernel bits of `kimi selftest` computed in C.
 *
 * Built for several architectures, this must print the same text on each: see `make neon`.
 */
#include "harness.h"

#include <stdio.h>
#include <string.h>

static float number(uint32_t i) {
    i = (i ^ i >> 7) * 2654435761u;
    i = (i ^ i >> 13) * 2246822519u;
    uint32_t bits = i << 31 | (118u + (i >> 23) % 15u) << 23 | (i >> 1 & 0x7FFFFFu);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float *numbers(int64_t n) {
    float *x = take_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = number((uint32_t)i + 1);
    return x;
}

/* The 16 most frequent high bytes, rarest first, ties by value. */
static void common_bytes(const uint16_t *w, int64_t n, uint8_t table[16]) {
    int64_t counts[256] = {0};
    int order[256];
    kimi_pack_histogram(w, n, counts);
    for (int i = 0; i < 256; i++) {
        int at = i;
        for (; at > 0 && counts[order[at - 1]] > counts[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)order[240 + i];
}

enum { DENSE, PACKED, MXFP4, ELEMENTARY, GOLDEN };

/* Adds what one shape gives to the four checksums. */
static void golden_shape(int64_t rows, int64_t cols, int64_t count, uint32_t crc[GOLDEN]) {
    float *x = numbers(count * cols), *values = numbers(rows * cols);
    float *y = take_floats(count * rows), *out = take_floats(count * cols);
    float *scratch = take_floats(kimi_scratch(cols, count));
    uint16_t *w = take(rows * cols * 2);
    for (int64_t i = 0; i < rows * cols; i++) memcpy(w + i, (const char *)(values + i) + 2, 2);
    uint8_t *table = take(16), *packed = take(rows * cols / 64 * 96);
    uint32_t *starts = take((rows + 1) * 4), *escapes = take(rows * cols * 4);
    common_bytes(w, rows * cols, table);
    starts[0] = 0;
    kimi_pack_rows(w, rows, cols, table, packed, starts, escapes);
    kimi_matrix dense = {.format = KIMI_BF16, .rows = rows, .cols = cols, .data = w};
    kimi_matrix small = {KIMI_PACKED, rows, cols, packed, table, starts, escapes, starts[rows]};
    kimi_product(&dense, x, cols, count, y, rows, scratch);
    crc[DENSE] = kimi_crc32c(crc[DENSE], y, count * rows * 4);
    kimi_product(&small, x, cols, count, y, rows, scratch);
    crc[PACKED] = kimi_crc32c(crc[PACKED], y, count * rows * 4);
    uint8_t *nibbles = take(rows * cols / 2), *scales = take(rows * cols / 32);
    for (int64_t i = 0; i < rows * cols / 2; i++) nibbles[i] = (uint8_t)(w[i] >> 3);
    for (int64_t i = 0; i < rows * cols / 32; i++) scales[i] = (uint8_t)(100 + w[i] % 40);
    kimi_product_mxfp4(nibbles, scales, rows, cols, x, cols, count, y, rows, scratch);
    crc[MXFP4] = kimi_crc32c(crc[MXFP4], y, count * rows * 4);
    int (*const functions[])(const float *, int64_t, float *) = {kimi_exp, kimi_sigmoid, kimi_tanh};
    for (int i = 0; i < 3; i++) {
        functions[i](x, count * cols, out);
        crc[ELEMENTARY] = kimi_crc32c(crc[ELEMENTARY], out, count * cols * 4);
    }
}

static void golden(void) {
    static const char *const names[] = {"bf16", "packed", "mxfp4", "elementary"};
    uint32_t first[GOLDEN];
    for (int isa = KIMI_ISA_SCALAR; isa <= KIMI_ISA_NEON; isa++) {
        uint32_t crc[GOLDEN] = {0};
        if (kimi_isa_set(isa)) continue;
        golden_shape(5, 192, 1, crc);
        golden_shape(7, 1088, 3, crc);
        golden_shape(66, 64, 5, crc);
        if (isa == KIMI_ISA_SCALAR) memcpy(first, crc, sizeof first);
        if (memcmp(first, crc, sizeof first)) fail("golden kernel bits differ from scalar's", NULL);
    }
    for (int i = 0; i < GOLDEN; i++) printf("golden %-10s %08X\n", names[i], (unsigned)first[i]);
}

int main(void) {
    product_suites();
    layer_suites();
    byte_suites();
    golden();
    fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
