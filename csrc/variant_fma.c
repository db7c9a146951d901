/* variant_fma.c: the plain rooms again, for x86 CPUs with FMA: libm's soft fmaf is 40 times slower.
 * This is what the scalar instruction set means on such a CPU. */
#if defined(__x86_64__)
#define KIMI_VARIANT fma
#define KIMI_TARGET __attribute__((target("fma")))
#include "elementwise.c"
#include "kda.c"
#include "mla.c"
#include "moe.c"
#include "mxfp4.c"
#include "norm.c"
#include "product.c"
#else
typedef int kimi_no_fma_variant;
#endif
