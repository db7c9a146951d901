/* cpu.c: which instruction set and how many threads the operations use. */
#include "table.h"

#define KIMI_ENTRY_BASE(name, args) .name = name##_base,
#define KIMI_ENTRY_FMA(name, args) .name = name##_fma,
#define KIMI_ENTRY_AVX2(name, args) .name = name##_avx2,
#define KIMI_ENTRY_AVX512(name, args) .name = name##_avx512,
#define KIMI_ENTRY_NEON(name, args) .name = name##_neon,

static const kimi_table table_base = {KIMI_KERNELS(KIMI_ENTRY_BASE)};
#if defined(__x86_64__)
static const kimi_table table_fma = {KIMI_KERNELS(KIMI_ENTRY_FMA)};
static const kimi_table table_avx2 = {KIMI_KERNELS(KIMI_ENTRY_AVX2)};
static const kimi_table table_avx512 = {KIMI_WIDE_KERNELS(KIMI_ENTRY_AVX512)
                                         KIMI_VECTOR_KERNELS(KIMI_ENTRY_AVX2)
                                             KIMI_PLAIN_KERNELS(KIMI_ENTRY_AVX2)};
#elif defined(__aarch64__)
static const kimi_table table_neon = {KIMI_WIDE_KERNELS(KIMI_ENTRY_NEON)
                                       KIMI_VECTOR_KERNELS(KIMI_ENTRY_NEON)
                                           KIMI_PLAIN_KERNELS(KIMI_ENTRY_BASE)};
#endif

static int current_isa = -1; /* -1: the best one, not asked for yet */
static int current_threads = 1;

static const kimi_table *table_of(int isa) {
    switch (isa) {
    case KIMI_ISA_SCALAR:
#if defined(__x86_64__)
        if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx")) return &table_fma;
#endif
        return &table_base;
#if defined(__x86_64__)
    case KIMI_ISA_AVX2:
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &table_avx2;
        return NULL;
    case KIMI_ISA_AVX512:
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            table_of(KIMI_ISA_AVX2))
            return &table_avx512;
        return NULL;
#elif defined(__aarch64__)
    case KIMI_ISA_NEON: /* part of every arm64 CPU */
        return &table_neon;
#endif
    default:
        return NULL;
    }
}

int kimi_isa_supported(int isa) { return table_of(isa) != NULL; }

int kimi_isa_set(int isa) {
    if (!table_of(isa)) return KIMI_E_UNSUPPORTED;
    current_isa = isa;
    return 0;
}

int kimi_isa(void) {
    if (current_isa >= 0) return current_isa;
    int isa = KIMI_ISA_NEON;
    while (!table_of(isa)) isa--;
    return isa;
}

int kimi_threads_set(int threads) {
    if (threads < 1 || threads > KIMI_MAX_THREADS) return KIMI_E_ARGUMENT;
    current_threads = threads;
    return 0;
}

int kimi_threads(void) { return current_threads; }

const kimi_table *kimi_kernels(void) { return table_of(kimi_isa()); }
