/* roof.c: the most that this machine reads from memory and multiplies: what kernels are held
 * against. No kernel of the model is here, and nothing but `kimi bench` calls this.
 */
#include "parallel.h"

/* A multiply-add takes 4 or 5 cycles and two begin in each: 8 to 10 chains keep both units busy.
 * With two operands, 12 still fit the 16 registers of AVX2. */
enum { ROOF_CHAINS = 12 };

/* Words that four streams of 64 bytes take in one step. */
enum { ROOF_STEP = 32 };

#if defined(__aarch64__)
#include <arm_neon.h>
#define ROOF_FN(name) roof_##name##_base
#define ROOF_TARGET
#define ROOF_WIDTH 16
#define roof_fma(a, b, c) ((floats)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#include "roof.h"
#else
#define ROOF_FN(name) roof_##name##_base
#define ROOF_TARGET
#define ROOF_WIDTH 16
#define roof_fma(a, b, c) ((a) * (b) + (c)) /* two operations, two instructions */
#include "roof.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>

#define ROOF_FN(name) roof_##name##_avx2
#define ROOF_TARGET __attribute__((target("avx2,fma")))
#define ROOF_WIDTH 32
#define roof_fma(a, b, c) ((floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "roof.h"

#define ROOF_FN(name) roof_##name##_avx512
#define ROOF_TARGET __attribute__((target("avx512f,avx2,fma")))
#define ROOF_WIDTH 64
#define roof_fma(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#include "roof.h"
#endif

/* Bytes of the vectors in use. The scalar rooms are vectorised by the compiler: they get AVX2's
 * roof where there is one. */
static int roof_width(void) {
    if (kimi_isa() == KIMI_ISA_AVX512) return 64;
    return kimi_isa_supported(KIMI_ISA_AVX2) ? 32 : 16;
}

static uint64_t roof_sum(const uint64_t *p, int64_t n) {
#if defined(__x86_64__)
    if (roof_width() == 64) return roof_read_avx512(p, n);
    if (roof_width() == 32) return roof_read_avx2(p, n);
#endif
    return roof_read_base(p, n);
}

static float roof_multiply(int64_t rounds) {
#if defined(__x86_64__)
    if (roof_width() == 64) return roof_fma_avx512(rounds);
    if (roof_width() == 32) return roof_fma_avx2(rounds);
#endif
    return roof_fma_base(rounds);
}

int kimi_roof_read(const uint64_t *data, int64_t n, uint64_t *sum) {
    if (!data || !sum || n < 0) return KIMI_E_ARGUMENT;
    uint64_t total = 0;
    int64_t whole = n / ROOF_STEP * ROOF_STEP;
    PARALLEL_BEGIN(n)
    int64_t lo, hi;
    part_of(whole, ROOF_STEP, part, parts, &lo, &hi);
    uint64_t mine = roof_sum(data + lo, (hi - lo) / 4);
#pragma omp atomic
    total += mine;
    PARALLEL_END
    for (int64_t i = whole; i < n; i++) total += data[i];
    *sum = total;
    return 0;
}

int kimi_roof_fma(int64_t rounds, int64_t *flops, float *mean) {
    if (!flops || !mean || rounds < 1 || rounds > INT32_MAX) return KIMI_E_ARGUMENT;
    int64_t count = 0;
    float total = 0.0f;
    PARALLEL_BEGIN(rounds * ROOF_CHAINS)
    float mine = roof_multiply(rounds);
#pragma omp critical(kimi_roof)
    {
        total += mine / (float)parts;
        count += 2 * (roof_width() / 4) * ROOF_CHAINS * rounds;
    }
    PARALLEL_END
    *flops = count;
    *mean = total;
    return 0;
}
