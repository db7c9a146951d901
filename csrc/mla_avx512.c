/* mla_avx512.c: the sums of latent attention over positions, for AVX-512. */
#if defined(__x86_64__)
#define KIMI_VARIANT avx512
#define VEC_WIDTH 16
#include "blend.h"

VEC_TARGET void blend_avx512(const float *cache, int64_t positions, int64_t width, int64_t lo,
                             int64_t hi, const float *e, int64_t e_stride, const double *sum,
                             int64_t heads, float *out, int64_t rank) {
    blend_columns(cache, positions, width, lo, hi, e, e_stride, sum, heads, out, rank);
}
#else
typedef int kimi_no_avx512_mla;
#endif
