/* parallel.h: what every operation does around its kernels: threads, and the float environment.
 *
 * A process may have been left with flush-to-zero, denormals-are-zero or another rounding mode by
 * code that is not ours; inside an operation all are off, on every thread, and put back after.
 */
#ifndef KIMI_PARALLEL_H
#define KIMI_PARALLEL_H

#include <omp.h>

#include "table.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
static inline unsigned float_enter(void) {
    unsigned old = _mm_getcsr();
    _mm_setcsr(old & ~(0x8000u | 0x6000u | 0x0040u)); /* FTZ, rounding, DAZ */
    return old;
}
static inline void float_leave(unsigned old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
static inline unsigned long float_enter(void) {
    unsigned long old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(old & ~(0x1C00000ul | 0x80000ul | 0x7ul)));
    return old;
}
static inline void float_leave(unsigned long old) {
    __asm__ volatile("msr fpcr, %0" : : "r"(old));
}
#else
#error "kimi runs on x86-64 and arm64"
#endif

/* Elementary steps worth waking a thread for, which costs some microseconds. A build that looks for
 * races makes it 1, so that the smallest operation is split too. */
#ifndef KIMI_WORK
#define KIMI_WORK 16384
#endif

static inline int threads_for(int64_t work) {
    int64_t most = work / KIMI_WORK + 1;
    return most < kimi_threads() ? (int)most : kimi_threads();
}

/* Part `part` of `parts` of 0..n, cut at multiples of `unit`. */
static inline void part_of(int64_t n, int64_t unit, int64_t part, int64_t parts, int64_t *lo,
                           int64_t *hi) {
    int64_t units = (n + unit - 1) / unit;
    *lo = units * part / parts * unit;
    *hi = units * (part + 1) / parts * unit;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}

/* Opens a parallel region in which `part` of `parts` is this thread; PARALLEL_END closes it. */
#define PARALLEL_BEGIN(work)                                                                      \
    {                                                                                             \
        const int team = threads_for(work);                                                       \
        _Pragma("omp parallel num_threads(team)") {                                               \
            const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();             \
            const kimi_table *kernels = kimi_kernels();                                           \
            const __typeof__(float_enter()) float_state = float_enter();                          \
            (void)part, (void)parts, (void)kernels;
#define PARALLEL_END                                                                              \
            float_leave(float_state);                                                             \
        }                                                                                         \
    }

#endif
