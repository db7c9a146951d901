/* harness.h: hostile inputs by integer arithmetic alone, and the runner that compares bits.
 *
 * A case fills `out` from the generator and the shape it is given, so that running it again from
 * the same seed repeats it. `run_case` runs it with every instruction set this CPU has, on one
 * thread and on three, under an ordinary and a hostile float environment, and compares each result
 * with what scalar gave first. Each suite prints one line: its name and the CRC-32C of all that
 * scalar gave. The line must be the same on every architecture.
 */
#ifndef KIMI_TEST_HARNESS_H
#define KIMI_TEST_HARNESS_H

#include <stdint.h>

#include "kimi.h"

enum kind { PLAIN, TINY, LARGE, WIDE, SPECIAL, KINDS };

typedef struct {
    int format;
    int64_t rows, cols, count;
    enum kind weights, x;
} shape;

/* Writes its results to out and returns how many floats they are. */
typedef int64_t (*case_fn)(const shape *s, float *out);

void suite_begin(const char *name);
void suite_end(void);
void run_case(case_fn run, shape s);
int failures(void);
void fail(const char *what, const shape *s);

/* Memory of the case that runs, gone when it returns; misaligned by one float, guarded behind. */
void *take(int64_t bytes);
float *take_floats(int64_t n);

uint32_t random_bits(void);
int64_t random_below(int64_t n);
float random_float(enum kind kind);
float *random_floats(int64_t n, enum kind kind);
/* 2^-9 to 2^6 when 0; each step of `shift` doubles that. */
float *random_scaled(int64_t n, int shift);

/* A matrix of `rows` by `cols`, packed ones with escapes and starts[0] = 3. */
kimi_matrix random_matrix(int format, int64_t rows, int64_t cols, enum kind kind);

void product_suites(void);
void layer_suites(void);
void byte_suites(void);

#endif
