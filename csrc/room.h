/* room.h: how a plain room is compiled once per instruction set.
 *
 * A room x.c defines its kernels as KIMI_FN(name). Compiled alone it is the baseline, name_base;
 * variant_fma.c and variant_avx2.c include it again under a target attribute. The source is the
 * same, -ffp-contract is off, and fmaf is exact everywhere, so the bits are the same.
 */
#ifndef KIMI_VARIANT
#define KIMI_VARIANT base
#define KIMI_TARGET
#endif

#ifndef KIMI_ROOM_H
#define KIMI_ROOM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kimi.h"
#include "table.h"

#define KIMI_JOIN2(a, b) a##_##b
#define KIMI_JOIN(a, b) KIMI_JOIN2(a, b)
#define KIMI_FN(name) KIMI_JOIN(name, KIMI_VARIANT)
#define KIMI_INLINE static inline __attribute__((always_inline))

/* The tree that ends every product (kimi.h). */
KIMI_INLINE float lanes_sum(const float a[16]) {
    float s[8], h[4];
    for (int i = 0; i < 8; i++) s[i] = a[2 * i] + a[2 * i + 1];
    for (int i = 0; i < 4; i++) h[i] = s[i] + s[i + 4];
    return (h[0] + h[2]) + (h[1] + h[3]);
}

/* The tree that ends every double sum (kimi.h). */
KIMI_INLINE double doubles_sum(const double d[8]) {
    return ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
}

KIMI_INLINE float bits_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

KIMI_INLINE uint32_t float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

KIMI_INLINE float bf16_float(uint16_t w) { return bits_float((uint32_t)w << 16); }

/* 2^(scale - 127); 0 is the subnormal 2^-127. */
KIMI_INLINE float scale_float(uint8_t scale) {
    return bits_float(scale ? (uint32_t)scale << 23 : 0x00400000u);
}

/* Rows [lo, hi) by calls rows(row, step, streams, ...), each for rows row, row + step ... walked
 * together; what is left one by one. `streams` is a constant. The step is odd: streams whole pages
 * apart would share the sets of every cache. */
#define STREAM_ROWS(rows, lo, hi, streams, ...)                                                   \
    do {                                                                                          \
        int64_t row_ = (lo);                                                                      \
        while ((hi) - row_ >= (streams)) {                                                        \
            int64_t step_ = (((hi) - row_) / (streams) - 1) | 1, end_ = row_ + step_;             \
            for (; row_ < end_; row_++) rows(row_, step_, streams, __VA_ARGS__);                  \
            row_ += ((streams) - 1) * step_;                                                      \
        }                                                                                         \
        for (; row_ < (hi); row_++) rows(row_, 0, 1, __VA_ARGS__);                                \
    } while (0)

/* Column held at position p of half h of a packed block (kimi.h). */
KIMI_INLINE int packed_column(int h, int p) {
    return 32 * h + 16 * ((p >> 3) & 1) + 8 * (p >> 4) + (p & 7);
}

#endif
