/* mxfp4_neon.c: the MXFP4 product for NEON.
 *
 * x is prepared as for AVX2: per 128 columns (4 groups), 8 vectors of 16 lanes, where vector j,
 * lane 4g + l holds column 32g + 4l + (0, 1, 2, 3, 16, 17, 18, 19)[j]. A group is one register:
 * two table look-ups turn nibbles into the bytes of a bf16, zips join those, and interleaving
 * with zeros widens each weight into its lane:
 *
 *     bytes of a group   2l: columns 4l, 4l+1     2l+1: 4l+2, 4l+3     2l+8: 4l+16, 4l+17 ...
 *     zip1, dword l      low nibbles:  [j=0 | j=2]     high nibbles:  [j=1 | j=3]
 *     zip2, dword l      low nibbles:  [j=4 | j=6]     high nibbles:  [j=5 | j=7]
 */
#if defined(__aarch64__)
#define KIMI_VARIANT neon
#define KIMI_TARGET
#include <arm_neon.h>

#define VEC float32x4_t
#define VEC_WIDTH 4
#define vec_load vld1q_f32
#define vec_store vst1q_f32
#define vec_mul vmulq_f32
#define vec_fma(a, b, c) vfmaq_f32(c, a, b)
#define vec_hold(v) __asm__("" : "+w"(v))
#define BATCH_TARGET
#define BATCH_ROWS 1 /* not used here */
#define BATCH_COLUMNS 1
#define SCALED_ROWS 4
#define SCALED_COLUMNS 2
#include "batch.h"

enum { STREAMS = 2 };

void prepare_mxfp4_neon(const float *x, int64_t cols, float *out) {
    for (int64_t c = 0; c < cols; c += 16) {
        float32x4x4_t columns = vld4q_f32(x + c); /* every fourth: a 4 x 4 transpose */
        float *to = out + c / 128 * 128 + c % 128 / 32 * 4 + c % 32 / 16 * 64;
        for (int j = 0; j < 4; j++) vst1q_f32(to + 16 * j, columns.val[j]);
    }
    for (int64_t g = cols / 32; g % 4; g++) /* groups that are not there */
        for (int j = 0; j < 8; j++)
            vst1q_f32(out + g / 4 * 128 + 16 * j + g % 4 * 4, vdupq_n_f32(0.0f));
}

/* The upper and lower bytes of the sixteen values as bf16. */
static const uint8_t high_byte[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                      0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
static const uint8_t low_byte[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                     0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};

/* One group (16 bytes) as the vectors j = 0..7 of its 4 lanes. */
KIMI_INLINE void expand(const uint8_t *group, uint8x16_t lows, uint8x16_t highs,
                        float32x4_t w[8]) {
    uint8x16_t bytes = vld1q_u8(group);
    uint8x16_t nibbles[2] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
    const uint16x8_t zero = vdupq_n_u16(0);
    for (int odd = 0; odd < 2; odd++) {
        uint8x16_t low = vqtbl1q_u8(lows, nibbles[odd]), high = vqtbl1q_u8(highs, nibbles[odd]);
        uint16x8_t half[2] = {vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                              vreinterpretq_u16_u8(vzip2q_u8(low, high))};
        for (int h = 0; h < 2; h++) {
            w[4 * h + odd] = vreinterpretq_f32_u16(vtrn1q_u16(zero, half[h]));
            w[4 * h + 2 + odd] = vreinterpretq_f32_u16(vtrn2q_u16(zero, half[h]));
        }
    }
}

/* One group times its 32 columns, `x` being their first prepared lane. */
KIMI_INLINE float32x4_t multiply_group(const uint8_t *group, uint8_t scale, const float *x,
                                       float32x4_t acc) {
    float32x4_t w[8];
    expand(group, vld1q_u8(low_byte), vld1q_u8(high_byte), w);
    float32x4_t p = vmulq_f32(w[0], vld1q_f32(x));
    for (int j = 1; j < 8; j++) p = vfmaq_f32(p, w[j], vld1q_f32(x + 16 * j));
    return vfmaq_n_f32(acc, p, scale_float(scale));
}

/* `streams` rows, `step` apart, times one column; `streams` is a constant at every call. */
KIMI_INLINE void column_rows(int64_t row, int64_t step, int streams, const uint8_t *packed,
                             const uint8_t *scales, int64_t groups, const float *x, float *y) {
    float32x4_t acc[STREAMS][4];
    for (int i = 0; i < streams; i++)
        for (int k = 0; k < 4; k++) acc[i][k] = vdupq_n_f32(0.0f);
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4)
        for (int i = 0; i < streams; i++)
            for (int k = 0; k < 4; k++) {
                int64_t at = (row + i * step) * groups + g + k;
                acc[i][k] =
                    multiply_group(packed + at * 16, scales[at], x + 32 * g + 4 * k, acc[i][k]);
            }
    for (int i = 0; i < streams; i++) {
        float a[16];
        for (int k = 0; k < 4; k++) {
            int64_t at = (row + i * step) * groups + g + k;
            if (g + k < groups)
                acc[i][k] =
                    multiply_group(packed + at * 16, scales[at], x + 32 * g + 4 * k, acc[i][k]);
            else if (g < groups) /* p = +0 */
                acc[i][k] = vaddq_f32(acc[i][k], vdupq_n_f32(0.0f));
            vst1q_f32(a + 4 * k, acc[i][k]);
        }
        y[row + i * step] = lanes_sum(a);
    }
}

/* Up to 4 groups as a super-block; those that are not there become weight 0, factor 1. */
KIMI_INLINE void tile_super(const uint8_t *w, const uint8_t *scales, int64_t groups,
                            scaled_super *out) {
    const uint8x16_t lows = vld1q_u8(low_byte), highs = vld1q_u8(high_byte);
    static const uint8_t none[16] = {0};
    for (int k = 0; k < 4; k++) {
        float32x4_t weights[8];
        expand(k < groups ? w + 16 * k : none, lows, highs, weights);
        for (int j = 0; j < 8; j++) vst1q_f32(out->step[j] + 4 * k, weights[j]);
        vst1q_f32(out->factor + 4 * k, vdupq_n_f32(k < groups ? scale_float(scales[k]) : 1.0f));
    }
}

/* `rows` (at most SCALED_ROWS) rows times `count` (at most KIMI_BATCH) columns. */
static void product_tile(const uint8_t *w, const uint8_t *scales, int64_t rows, int64_t groups,
                         const float *x, int64_t x_stride, int64_t count, float *y,
                         int64_t y_stride) {
    scaled_super tile[SCALED_ROWS][TILE_SUPERS] __attribute__((aligned(64)));
    float lanes[SCALED_ROWS][KIMI_BATCH][16] __attribute__((aligned(64)));
    memset(lanes, 0, sizeof lanes);
    int64_t all = (groups + 3) / 4;
    for (int64_t s0 = 0; s0 < all; s0 += TILE_SUPERS) {
        int64_t supers = all - s0 < TILE_SUPERS ? all - s0 : TILE_SUPERS;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t s = 0; s < supers; s++) {
                int64_t g = 4 * (s0 + s), at = r * groups + g;
                tile_super(w + at * 16, scales + at, groups - g, tile[r] + s);
            }
#define TILE(r, tall, t, wide)                                                                    \
    scaled_tile(tile + (r), tall, x + (t) * x_stride + 128 * s0, x_stride, wide, supers,          \
                lanes[r][t], KIMI_BATCH * 16)
        BATCH_EDGES(TILE, rows, count, SCALED_ROWS, SCALED_COLUMNS)
#undef TILE
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < count; t++) y[t * y_stride + r] = lanes_sum(lanes[r][t]);
}

void product_mxfp4_neon(const uint8_t *packed, const uint8_t *scales, int64_t lo, int64_t hi,
                        int64_t cols, const float *x, int64_t x_stride, int64_t count, float *y,
                        int64_t y_stride) {
    int64_t groups = cols / 32;
    if (count == 1) {
        STREAM_ROWS(column_rows, lo, hi, STREAMS, packed, scales, groups, x, y);
        return;
    }
    for (int64_t r = lo; r < hi; r += SCALED_ROWS)
        for (int64_t t = 0; t < count; t += KIMI_BATCH)
            product_tile(packed + r * groups * 16, scales + r * groups,
                         hi - r < SCALED_ROWS ? hi - r : SCALED_ROWS, groups, x + t * x_stride,
                         x_stride, count - t < KIMI_BATCH ? count - t : KIMI_BATCH,
                         y + t * y_stride + r, y_stride);
}
#else
typedef int kimi_no_neon_mxfp4;
#endif
