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
#define VEC_WIDTH 4
#define STEPS 24
#include "panel.h"

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

/* Groups that are not there become weight 0, factor 1. */
KIMI_INLINE void decode_panel(const void *weights, int64_t row, int64_t first, int64_t steps, int r,
                              w_panel *out) {
    static const uint8_t none[16] = {0};
    const uint8x16_t lows = vld1q_u8(low_byte), highs = vld1q_u8(high_byte);
    const expert_rows *e = weights;
    for (int64_t s = 0; s < steps / 8; s++)
        for (int i = 0; i < 4; i++) {
            int64_t g = first / 2 + 4 * s + i, at = row * e->groups + g;
            int there = g < e->groups;
            float32x4_t w[8];
            expand(there ? e->packed + at * 16 : none, lows, highs, w);
            for (int j = 0; j < 8; j++) vst1q_f32(out->at[i][8 * s + j][r], w[j]);
            vst1q_f32(out->factor[i][s][r],
                      vdupq_n_f32(there ? scale_float(e->scales[at]) : 1.0f));
        }
}

KIMI_INLINE float panel_end(const void *weights, const float32x4_t lanes[4]) {
    float a[16];
    (void)weights;
    for (int i = 0; i < 4; i++) vst1q_f32(a + 4 * i, lanes[i]);
    return lanes_sum(a);
}

void product_mxfp4_neon(const uint8_t *packed, const uint8_t *scales, int64_t lo, int64_t hi,
                        int64_t cols, const float *x, int64_t x_stride, int64_t count, float *y,
                        int64_t y_stride) {
    int64_t groups = cols / 32;
    if (count <= 2) { /* twice over the weights is quicker than panels half empty */
        for (int64_t t = 0; t < count; t++, x += x_stride, y += y_stride)
            STREAM_ROWS(column_rows, lo, hi, STREAMS, packed, scales, groups, x, y);
        return;
    }
    const expert_rows w = {packed, scales, groups};
    const panel_format format = {1, decode_panel, panel_end};
    panel_product(format, &w, lo, hi, (groups + 3) / 4 * 8, x, x_stride, count, y, y_stride);
}
#else
typedef int kimi_no_neon_mxfp4;
#endif
