/* elementary.h: exp, sigmoid and tanh as fixed float32 polynomials, the same bits on every CPU.
 *
 * The coefficients are those of the Cephes library (S. L. Moshier). Each is within 3 ulp of the
 * true value, subnormal results included; NaN gives NaN, infinities their limits. Branch-free, so
 * that a loop over them vectorises.
 */
#ifndef KIMI_ELEMENTARY_H
#define KIMI_ELEMENTARY_H

#include "room.h"

KIMI_INLINE float elementary_exp(float x) {
    x = x > 89.0f ? 89.0f : x; /* beyond: infinity all the same */
    x = x < -104.0f ? -104.0f : x;
    float shifted = fmaf(x, 1.44269504088896341f, 12582912.0f); /* 1.5 * 2^23: round to integer */
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    /* 2^n in two factors, since n reaches -150 and 128. Unsigned: a NaN makes n meaningless. */
    uint32_t e = float_bits(shifted) - 0x4B400000u + 256u;
    uint32_t half = e >> 1;
    float a = bits_float((half - 128u + 127u) << 23);
    float b = bits_float((e - half - 128u + 127u) << 23);
    return p * a * b;
}

KIMI_INLINE float elementary_sigmoid(float x) {
    float e = elementary_exp(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

KIMI_INLINE float elementary_tanh(float x) {
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = fmaf(p, z, 2.06390887954e-2f);
    p = fmaf(p, z, -5.37397155531e-2f);
    p = fmaf(p, z, 1.33314422036e-1f);
    p = fmaf(p, z, -3.33332819422e-1f);
    float small = fmaf(p * z, x, x);
    float large = 1.0f - 2.0f / (elementary_exp(2.0f * fabsf(x)) + 1.0f);
    large = x < 0.0f ? -large : large;
    return fabsf(x) < 0.625f ? small : large;
}

#endif
