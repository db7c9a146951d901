/* harness.c: the generator, the guarded memory and the runner of harness.h. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARENA = 1 << 26, OUT = 1 << 20, GUARD = 64 };

#define POISON 0x7FA5A5A5u

static unsigned char *arena;
static int64_t arena_used;
static uint64_t state;
static uint32_t *out, *first;
static const char *suite = "start";
static uint32_t crc;
static int64_t cases;
static int failed;

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned environment;
static environment environment_get(void) { return _mm_getcsr(); }
static void environment_set(environment e) { _mm_setcsr(e); }
#define HOSTILE (0x1F80u | 0x8000u | 0x6000u | 0x0040u) /* FTZ, towards zero, DAZ */
#define CONTROL 0xFFC0u                                 /* all but the sticky flags */
#else
typedef unsigned long environment;
static environment environment_get(void) {
    environment e;
    __asm__ volatile("mrs %0, fpcr" : "=r"(e));
    return e;
}
static void environment_set(environment e) { __asm__ volatile("msr fpcr, %0" : : "r"(e)); }
#define HOSTILE 0x1C00000ul /* FZ, towards zero */
#define CONTROL (~0ul)
#endif

/* The hostile environment must be one: else nothing here says that operations leave it. OpenMP's
 * threads are born in it, and keep it between operations. */
static void environment_check(void) {
    volatile float tiny = 1e-40f, three = 3.0f; /* volatile: not moved out of the environment */
    environment before = environment_get();
    environment_set(HOSTILE);
    tiny = tiny + tiny;
    three = 1.0f / three;
    kimi_threads_set(3);
    kimi_add(take_floats(1 << 20), 1 << 20, take_floats(1 << 20));
    environment_set(before);
    if (tiny != 0.0f || three >= 0.33333333f)
        fail("the hostile float environment has no effect", NULL);
}

void *take(int64_t bytes) {
    int64_t at = (arena_used + 63) / 64 * 64 + 4;
    if (!arena) arena = malloc(ARENA);
    if (!arena || at + bytes > ARENA) {
        fprintf(stderr, "out of memory\n");
        exit(2);
    }
    arena_used = at + bytes;
    memset(arena + at, 0xA5, (size_t)bytes);
    return arena + at;
}

float *take_floats(int64_t n) { return take(n * (int64_t)sizeof(float)); }

uint32_t random_bits(void) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}

int64_t random_below(int64_t n) { return random_bits() % n; }

static float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_between(uint32_t lo, uint32_t hi) { return lo + random_bits() % (hi - lo); }

float random_float(enum kind kind) {
    static const uint32_t special[] = {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0u, 0x80000000u,
                                       1u, 0x80000001u, 0x00800000u, 0x7F7FFFFFu, 0xFF7FFFFFu};
    uint32_t sign = random_bits() & 0x80000000u;
    if (kind == SPECIAL && random_below(16) == 0) return float_of(special[random_below(10)]);
    if (kind == TINY && random_below(10) == 0) return float_of(sign);
    if (kind == TINY) return float_of(sign | bits_between(0, 0x01800000u));
    if (kind == LARGE) return float_of(sign | bits_between(0x7D000000u, 0x7F800000u));
    if (kind == WIDE) return float_of(sign | bits_between(0, 0x7F800000u));
    return float_of(sign | bits_between(118u << 23, 133u << 23));
}

float *random_floats(int64_t n, enum kind kind) {
    float *x = take_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = random_float(kind);
    return x;
}

float *random_scaled(int64_t n, int shift) {
    float *x = take_floats(n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t exponent = (uint32_t)(118 + shift) + random_bits() % 15u;
        x[i] = float_of((random_bits() & 0x807FFFFFu) | exponent << 23);
    }
    return x;
}

kimi_matrix random_matrix(int format, int64_t rows, int64_t cols, enum kind kind) {
    kimi_matrix w = {.format = format, .rows = rows, .cols = cols};
    float *values = random_floats(rows * cols, kind);
    w.data = values;
    if (format == KIMI_F32) return w;
    uint16_t *bits = take(rows * cols * 2);
    for (int64_t i = 0; i < rows * cols; i++) /* the upper half of each, little-endian */
        memcpy(bits + i, (const char *)(values + i) + 2, 2);
    w.data = bits;
    if (format == KIMI_BF16) return w;
    uint8_t *table = take(16), *packed = take(rows * cols / 64 * 96);
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(bits[random_below(rows * cols)] >> 8);
    uint32_t *starts = take((rows + 1) * 4), *escapes = take((rows * cols + 4) * 4);
    starts[0] = 3;
    kimi_pack_rows(bits, rows, cols, table, packed, starts, escapes);
    w.data = packed, w.table = table, w.starts = starts, w.escapes = escapes;
    w.escape_count = starts[rows];
    return w;
}

void fail(const char *what, const shape *s) {
    static const char *const formats[] = {"bf16", "f32", "packed"};
    if (++failed > 20) return;
    fprintf(stderr, "FAILED %s, case %lld: %s", suite, (long long)cases, what);
    if (s)
        fprintf(stderr, " (%s, %lld rows, %lld cols, %lld columns of x, kinds %d and %d)",
                formats[s->format], (long long)s->rows, (long long)s->cols, (long long)s->count,
                (int)s->weights, (int)s->x);
    fprintf(stderr, "\n");
}

int failures(void) { return failed; }

void suite_begin(const char *name) {
    if (!out) {
        out = malloc((OUT + 2 * GUARD) * sizeof *out);
        first = malloc(OUT * sizeof *first);
        if (!out || !first) exit(2);
        for (int64_t i = 0; i < OUT + 2 * GUARD; i++) out[i] = POISON;
        environment_check();
    }
    suite = name;
    crc = 0;
    cases = 0;
}

void suite_end(void) {
    printf("%-16s %08X  %lld cases\n", suite, (unsigned)crc, (long long)cases);
    fflush(stdout);
}

/* Runs once, into poison that is put back by `forget`. Returns how many floats, or -1 if memory
 * around them was touched. NaN are made alike. */
static int64_t run_once(case_fn run, const shape *s, int hostile) {
    environment before = environment_get();
    arena_used = 0;
    state = (uint64_t)cases * 7919u + 1u;
    if (hostile) environment_set(HOSTILE);
    environment inside = environment_get();
    int64_t n = run(s, (float *)(void *)(out + GUARD)), touched = 0;
    environment after = environment_get();
    environment_set(before);
    if ((inside & CONTROL) != (after & CONTROL)) fail("the float environment was left changed", s);
    for (int64_t i = 0; i < GUARD; i++)
        touched += (out[i] != POISON) + (out[GUARD + n + i] != POISON);
    for (int64_t i = GUARD; i < GUARD + n; i++) {
        if (out[i] == POISON) fail("an output was not written", s);
        if ((out[i] & 0x7FFFFFFFu) > 0x7F800000u) out[i] = 0x7FC00000u;
    }
    return touched ? -1 : n;
}

static void forget(int64_t n) {
    for (int64_t i = 0; i < n + 2 * GUARD; i++) out[i] = POISON;
}

void run_case(case_fn run, shape s) {
    static const char *const names[] = {"scalar", "avx2", "avx512", "neon"};
    static const int threads[] = {1, 3};
    int64_t count = -1;
    cases++;
    for (int isa = KIMI_ISA_SCALAR; isa <= KIMI_ISA_NEON; isa++) {
        if (!kimi_isa_supported(isa)) continue;
        for (int i = 0; i < 4; i++) {
            char what[80];
            kimi_isa_set(isa);
            kimi_threads_set(threads[i & 1]);
            int64_t n = run_once(run, &s, i >> 1);
            if (count < 0) {
                count = n;
                if (n > 0) memcpy(first, out + GUARD, (size_t)n * sizeof *first);
                crc = kimi_crc32c(crc, first, n > 0 ? n * 4 : 0);
            }
            snprintf(what, sizeof what, "%s, %d threads, %s environment", names[isa],
                     threads[i & 1], i >> 1 ? "hostile" : "ordinary");
            if (n < 1 || n != count || memcmp(first, out + GUARD, (size_t)n * sizeof *first)) {
                fail(what, &s);
                forget(OUT);
                break;
            }
            forget(n);
        }
    }
}
