/* bytes.c: operations on bytes, against something dumber than themselves. */
#include "harness.h"

#include <stdio.h>
#include <string.h>

static uint32_t crc_by_bit(uint32_t crc, const uint8_t *p, int64_t n) {
    crc = ~crc;
    for (int64_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

/* cols bytes, begun anywhere. */
static int64_t checksum(const shape *s, float *out) {
    uint8_t *bytes = take(s->cols + 8);
    for (int64_t i = 0; i < s->cols + 8; i++) bytes[i] = (uint8_t)random_bits();
    uint32_t before = random_bits(), found = kimi_crc32c(before, bytes + s->rows, s->cols);
    if (found != crc_by_bit(before, bytes + s->rows, s->cols)) fail("CRC-32C is wrong", s);
    memcpy(out, &found, sizeof found);
    return 1;
}

/* Packed and back, and widened from an odd address. */
static int64_t unpack(const shape *s, float *out) {
    kimi_matrix w = random_matrix(KIMI_PACKED, s->rows, s->cols, s->weights);
    uint16_t *bits = take(s->rows * s->cols * 2);
    kimi_unpack_rows(&w, bits);
    uint8_t *odd = take(s->rows * s->cols * 2 + 1);
    memcpy(odd + 1, bits, (size_t)(s->rows * s->cols) * 2);
    kimi_widen(KIMI_BF16, odd + 1, s->rows * s->cols, out);
    for (int64_t i = 0; i < s->rows * s->cols; i++)
        if (memcmp((const char *)(out + i) + 2, bits + i, 2)) fail("widened wrongly", s);
    return s->rows * s->cols;
}

void byte_suites(void) {
    suite_begin("crc32c");
    for (int64_t n = 0; n < 40; n++)
        run_case(checksum, (shape){KIMI_BF16, n % 8, n, 1, PLAIN, PLAIN});
    for (int64_t n = 98296; n < 98316; n += 3)
        run_case(checksum, (shape){KIMI_BF16, n % 8, n, 1, PLAIN, PLAIN});
    run_case(checksum, (shape){KIMI_BF16, 3, 300001, 1, PLAIN, PLAIN});
    suite_end();
    suite_begin("unpack");
    for (int kind = PLAIN; kind < SPECIAL; kind++)
        for (int64_t rows = 1; rows < 6; rows++)
            run_case(unpack, (shape){KIMI_PACKED, rows, 64 * rows, 1, (enum kind)kind, PLAIN});
    suite_end();
}
