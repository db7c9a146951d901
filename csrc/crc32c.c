/* crc32c.c: CRC-32C, by the CPU's own instruction where it has one, else eight table look-ups. */
#include <string.h>

#include "kimi.h"

static uint32_t crc_table[8][256];

static void crc_build_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
        crc_table[0][i] = c;
    }
    for (int t = 1; t < 8; t++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[t][i] = crc_table[t - 1][i] >> 8 ^ crc_table[0][crc_table[t - 1][i] & 255];
}

static uint32_t crc_bytes(uint32_t c, const uint8_t *p, int64_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        c ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        c = crc_table[7][c & 255] ^ crc_table[6][c >> 8 & 255] ^ crc_table[5][c >> 16 & 255] ^
            crc_table[4][c >> 24] ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^
            crc_table[1][p[6]] ^ crc_table[0][p[7]];
    }
    for (; n > 0; n--, p++) c = c >> 8 ^ crc_table[0][(c ^ *p) & 255];
    return c;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_TARGET __attribute__((target("sse4.2")))
#define crc_word _mm_crc32_u64
#define crc_byte _mm_crc32_u8
static int crc_instruction(void) { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
/* Not arm_acle.h: some compilers hide its functions unless the whole file is for such CPUs. */
#define CRC_TARGET
#define CRC_STEP(instruction) ".arch_extension crc\n\t" instruction " %w0, %w0, "
static inline uint64_t crc_word(uint64_t crc, uint64_t word) {
    uint32_t c = (uint32_t)crc;
    __asm__(CRC_STEP("crc32cx") "%x1" : "+r"(c) : "r"(word));
    return c;
}
static inline uint32_t crc_byte(uint32_t crc, uint8_t byte) {
    __asm__(CRC_STEP("crc32cb") "%w1" : "+r"(crc) : "r"(byte));
    return crc;
}
#if defined(__ARM_FEATURE_CRC32)
static int crc_instruction(void) { return 1; }
#else
#include <sys/auxv.h>
static int crc_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif
#endif

/* crc_shift[k] moves a CRC over LANE zero bytes: 4 tables of 256, one per byte of the CRC. A lane
 * is several pages long, since the memory's own read-ahead starts anew with each. */
static uint32_t crc_shift[4][256];
enum { LANE = 32768, STRIDE = 64, AHEAD = 512 }; /* LANE: a power of two */

/* A CRC moved over zero bytes, so many as `column` says: what becomes of each of its bits. */
static uint32_t crc_moved(const uint32_t column[32], uint32_t c) {
    uint32_t moved = 0;
    for (int b = 0; b < 32; b++)
        if (c >> b & 1) moved ^= column[b];
    return moved;
}

static void crc_build_shift(void) {
    uint32_t column[32], half[32];
    for (int b = 0; b < 32; b++) column[b] = (1u << b) >> 8 ^ crc_table[0][(1u << b) & 255];
    for (int bytes = 1; bytes < LANE; bytes *= 2) {
        memcpy(half, column, sizeof half);
        for (int b = 0; b < 32; b++) column[b] = crc_moved(half, half[b]);
    }
    for (int t = 0; t < 4; t++)
        for (uint32_t i = 0; i < 256; i++) crc_shift[t][i] = crc_moved(column, i << 8 * t);
}

static uint32_t crc_over(uint32_t c) {
    return crc_shift[0][c & 255] ^ crc_shift[1][c >> 8 & 255] ^ crc_shift[2][c >> 16 & 255] ^
           crc_shift[3][c >> 24];
}

/* Three lanes in flight hide the instruction's latency of 3 cycles. */
CRC_TARGET static uint32_t crc_lanes(uint32_t crc, const uint8_t *p, int64_t n) {
    uint64_t a = crc, word[3];
    for (; n >= 3 * LANE; n -= 3 * LANE, p += 3 * LANE) {
        uint64_t b = 0, c = 0;
        for (const uint8_t *q = p; q < p + LANE; q += STRIDE) {
            for (int lane = 0; lane < 3; lane++) __builtin_prefetch(q + lane * LANE + AHEAD);
            for (int i = 0; i < STRIDE; i += 8) {
                memcpy(word, q + i, 8);
                memcpy(word + 1, q + LANE + i, 8);
                memcpy(word + 2, q + 2 * LANE + i, 8);
                a = crc_word(a, word[0]);
                b = crc_word(b, word[1]);
                c = crc_word(c, word[2]);
            }
        }
        a = crc_over(crc_over((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(word, p, 8);
        a = crc_word(a, word[0]);
    }
    crc = (uint32_t)a;
    for (; n > 0; n--, p++) crc = crc_byte(crc, *p);
    return crc;
}

/* Once, when the library is loaded: threads never see a table half built. */
__attribute__((constructor)) static void crc_build(void) {
    crc_build_table();
    crc_build_shift();
}

uint32_t kimi_crc32c(uint32_t crc, const void *data, int64_t n) {
    if (crc_instruction()) return ~crc_lanes(~crc, data, n);
    return ~crc_bytes(~crc, data, n);
}
