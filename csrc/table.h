/* table.h: the kernels that exist once per instruction set, and the table they are called through.
 *
 * A kernel is serial, cannot fail and owns nothing. KIMI_KERNELS lists each with its signature;
 * an instruction set is one `kimi_table`. The operations of kimi.h split the work and call these.
 */
#ifndef KIMI_TABLE_H
#define KIMI_TABLE_H

#include <stddef.h>

#include "kimi.h"

/* Columns of X that one pass over the weights serves, and columns of W decoded at once. */
enum { KIMI_BATCH = 64, KIMI_CHUNK = 1024 };

/* Rooms of their own in every instruction set. */
#define KIMI_WIDE_KERNELS(K)                                                                      \
    /* rows [lo, hi) of w times `count` prepared columns */                                       \
    K(product, (const kimi_matrix *w, int64_t lo, int64_t hi, const float *x, int64_t x_stride,   \
                int64_t count, float *y, int64_t y_stride))                                       \
    K(product_mxfp4, (const uint8_t *packed, const uint8_t *scales, int64_t lo, int64_t hi,       \
                      int64_t cols, const float *x, int64_t x_stride, int64_t count, float *y,    \
                      int64_t y_stride))                                                          \
    /* out[h][c] = sum over positions of e[h][.] cache[.][c], over sum[h]; columns [lo, hi) */    \
    K(blend, (const float *cache, int64_t positions, int64_t width, int64_t lo, int64_t hi,       \
              const float *e, int64_t e_stride, const double *sum, int64_t heads, float *out,     \
              int64_t rank))

/* Rooms of their own in AVX2 and NEON; AVX-512 shares AVX2's. */
#define KIMI_VECTOR_KERNELS(K)                                                                    \
    /* x, cols floats -> out, in the order the product wants, padded with +0 to 16 */             \
    K(prepare, (int format, const float *x, int64_t cols, float *out))                            \
    /* the same for product_mxfp4, padded to a multiple of 128 */                                 \
    K(prepare_mxfp4, (const float *x, int64_t cols, float *out))                                  \
    K(absorb, (const kimi_matrix *w, int64_t lo, int64_t nope, const float *q, int64_t q_stride,  \
               int64_t count, float *out, int64_t out_stride))

/* The rest: plain rooms, compiled again per instruction set, but for arm64, where NEON is part of
 * the base. */
#define KIMI_PLAIN_KERNELS(K)                                                                     \
    K(exp, (const float *x, int64_t n, float *y))                                                 \
    K(sigmoid, (const float *x, int64_t n, float *y))                                             \
    K(tanh, (const float *x, int64_t n, float *y))                                                \
    K(gate, (const float *x, const float *gate, int64_t n, float *y))                             \
    K(situ, (const float *g, const float *u, int64_t n, float beta, float linear_beta, float *y)) \
    /* x = exp(scale x - its largest) */                                                          \
    K(softmax, (float *x, int64_t n, float scale, double *sum))                                   \
    K(rmsnorm, (const float *x, int64_t n, const float *weight, double eps, float *y))            \
    K(mix, (const float *const *sources, int64_t s, int64_t offset, int64_t n, const float *norm, \
            const float *proj, double eps, float *y))                                             \
    K(conv, (const float *x, int64_t count, int64_t channels, int64_t lo, int64_t hi,             \
             int64_t taps, const float *w, float *history, float *y))                             \
    K(l2norm, (float *x, int64_t dim, double eps, double scale))                                  \
    K(decay, (const float *z, int64_t dim, float a_log, const float *dt_bias, float lower_bound,  \
              float *y))                                                                          \
    K(delta, (float *state, int64_t dim, const float *q, const float *k, const float *v,          \
              const float *decay, float beta, float *o))                                          \
    K(expert_sum, (const float *x, const float *weights, int64_t k, int64_t n, float *y))

#define KIMI_KERNELS(K) KIMI_WIDE_KERNELS(K) KIMI_VECTOR_KERNELS(K) KIMI_PLAIN_KERNELS(K)

#define KIMI_POINTER(name, args) void(*name) args;
typedef struct {
    KIMI_KERNELS(KIMI_POINTER)
} kimi_table;
#undef KIMI_POINTER

#define KIMI_DECLARE_BASE(name, args) void name##_base args;
#define KIMI_DECLARE_FMA(name, args) void name##_fma args;
#define KIMI_DECLARE_AVX2(name, args) void name##_avx2 args;
#define KIMI_DECLARE_AVX512(name, args) void name##_avx512 args;
#define KIMI_DECLARE_NEON(name, args) void name##_neon args;
KIMI_KERNELS(KIMI_DECLARE_BASE)
#if defined(__x86_64__)
KIMI_KERNELS(KIMI_DECLARE_FMA)
KIMI_KERNELS(KIMI_DECLARE_AVX2)
KIMI_WIDE_KERNELS(KIMI_DECLARE_AVX512)
#elif defined(__aarch64__)
KIMI_WIDE_KERNELS(KIMI_DECLARE_NEON)
KIMI_VECTOR_KERNELS(KIMI_DECLARE_NEON)
#endif

/* The table in use, chosen by kimi_isa_set. */
const kimi_table *kimi_kernels(void);
int kimi_threads(void);

#endif
