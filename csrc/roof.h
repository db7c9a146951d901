/* roof.h: the two loops of roof.c for one instruction set, included once for each.
 *
 * Before including it define:
 *   ROOF_FN(name)    the name of a function here
 *   ROOF_TARGET      its target attribute
 *   ROOF_WIDTH       bytes of a vector
 *   roof_fma(a, b, c) a b + c on vectors of floats
 */

/* Sum of 4 * n words at p modulo 2^64: four streams, n words apart; n is a multiple of 8. */
ROOF_TARGET static uint64_t ROOF_FN(read)(const uint64_t *p, int64_t n) {
    typedef uint64_t words __attribute__((vector_size(ROOF_WIDTH), aligned(8), may_alias));
    enum { LANES = ROOF_WIDTH / 8 };
    words sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < n; i += 8)
        for (int s = 0; s < 4; s++)
            for (int l = 0; l < 8; l += LANES) sum[s] += *(const words *)(p + s * n + i + l);
    uint64_t total = 0;
    for (int s = 0; s < 4; s++)
        for (int l = 0; l < LANES; l++) total += sum[s][l];
    return total;
}

/* `rounds` steps of ROOF_CHAINS chains x = 0.5 x + 0.25, which tend to 0.5; their mean. */
ROOF_TARGET static float ROOF_FN(fma)(int64_t rounds) {
    typedef float floats __attribute__((vector_size(ROOF_WIDTH)));
    enum { LANES = ROOF_WIDTH / 4 };
    floats x[ROOF_CHAINS], half, quarter;
    for (int l = 0; l < LANES; l++) half[l] = 0.5f, quarter[l] = 0.25f;
    for (int c = 0; c < ROOF_CHAINS; c++) x[c] = quarter * (float)c;
    for (int64_t i = 0; i < rounds; i++)
        for (int c = 0; c < ROOF_CHAINS; c++) x[c] = roof_fma(x[c], half, quarter);
    float total = 0.0f;
    for (int c = 0; c < ROOF_CHAINS; c++)
        for (int l = 0; l < LANES; l++) total += x[c][l];
    return total / (float)(ROOF_CHAINS * LANES);
}

#undef ROOF_FN
#undef ROOF_TARGET
#undef ROOF_WIDTH
#undef roof_fma
