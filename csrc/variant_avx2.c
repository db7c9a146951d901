/* variant_avx2.c: the plain rooms again, left to the compiler's vectoriser for AVX2 and FMA. The
 * products and latent attention have rooms of their own. */
#if defined(__x86_64__)
#define KIMI_VARIANT avx2
#define KIMI_TARGET __attribute__((target("avx2,fma")))
#include "elementwise.c"
#include "kda.c"
#include "moe.c"
#include "norm.c"
#else
typedef int kimi_no_avx2_variant;
#endif
