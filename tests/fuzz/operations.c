/* operations.c: any bytes into the operations that take weights, logits or dimensions from files.
 *
 * Built with libFuzzer, AddressSanitizer and UBSan (`make fuzz`). An input is a choice of operation,
 * its dimensions, then the contents of its arrays; where the input ends, a generator goes on. Every
 * array is a block of its own of exactly the size that kimi.h promises not to leave. Each operation
 * runs with every instruction set this CPU has and must give scalar's status and bits. The program
 * named after a group (see GROUPS) keeps to that group.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kimi.h"

enum { ISAS = KIMI_ISA_NEON + 1, BLOCKS = 64 };

static const uint8_t *in;
static size_t left;
static uint64_t state;
static void *blocks[BLOCKS];
static int used;
static const char *running;

static unsigned byte(void) {
    if (left) {
        left--;
        return *in++;
    }
    uint64_t z = state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ z >> 31) >> 56);
}

static int64_t between(int64_t lo, int64_t hi) {
    unsigned wide = byte();
    if (hi - lo > 255) wide |= byte() << 8;
    return lo + wide % (hi - lo + 1);
}

/* `bytes` bytes, begun at a multiple of `unit` that is not always one of more. */
static void *room(int64_t bytes, int64_t unit) {
    int64_t shift = bytes ? between(0, 3) * unit : 0;
    char *block = malloc((size_t)(shift + bytes) + (bytes == 0));
    if (!block || used == BLOCKS) abort();
    blocks[used++] = block;
    return block + shift;
}

static void *filled(int64_t bytes, int64_t unit) {
    uint8_t *p = room(bytes, unit);
    for (int64_t i = 0; i < bytes; i++) p[i] = (uint8_t)byte();
    return p;
}

/* Floats of a few kinds: any bits, ordinary ones, or bytes as small integers. */
static float *floats(int64_t n) {
    unsigned kind = byte() % 4;
    uint32_t *bits = filled(n * 4, 4);
    for (int64_t i = 0; i < n && kind; i++) {
        if (kind == 1) bits[i] = (bits[i] & 0x87FFFFFFu) | 0x38000000u;
        float value = (float)(int8_t)bits[i];
        if (kind == 2) memcpy(bits + i, &value, sizeof value);
        if (kind == 3 && (bits[i] & 0x7F800000u) == 0x7F800000u) bits[i] ^= 0x40000000u;
    }
    return (float *)bits;
}

static void finding(const char *what) {
    fprintf(stderr, "%s, %s\n", running, what);
    abort();
}

/* What one instruction set gave, NaN made alike, against what scalar gave. */
typedef struct {
    void *bytes;
    int64_t size;
    int status;
} result;

static result first;

static void compare(int isa, int status, void *out, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n && !status; i++) {
        uint32_t *word = (uint32_t *)out + i;
        uint64_t *wide = (uint64_t *)out + i;
        if (width == 4 && (*word & 0x7FFFFFFFu) > 0x7F800000u) *word = 0x7FC00000u;
        if (width == 8 && (*wide & ~(1ull << 63)) > 0x7FFull << 52) *wide = 0x7FFull << 52 | 1;
    }
    if (isa == KIMI_ISA_SCALAR) {
        first = (result){out, n * width, status};
        return;
    }
    if (status != first.status) finding("another status than scalar's");
    if (!status && memcmp(first.bytes, out, (size_t)first.size))
        finding("other bits than scalar's");
}

/* Runs `call`, which fills float `out` [n], with every instruction set. */
#define EVERYWHERE(type, n, call)                                                                 \
    for (int isa = 0; isa < ISAS; isa++) {                                                        \
        if (!kimi_isa_supported(isa)) continue;                                                   \
        kimi_isa_set(isa);                                                                        \
        type *out = room((n) * (int64_t)sizeof(type), (int64_t)sizeof(type));                     \
        memset(out, 0xA5, (size_t)(n) * sizeof(type));                                            \
        int status = (call);                                                                      \
        compare(isa, status, out, n, (int64_t)sizeof(type));                                      \
    }

static kimi_matrix matrix(int64_t rows, int64_t cols, int format) {
    kimi_matrix w = {.format = format, .rows = rows, .cols = cols};
    if (format != KIMI_PACKED) {
        int64_t width = format == KIMI_F32 ? 4 : 2;
        w.data = filled(rows * cols * width, width);
        return w;
    }
    w.data = filled(rows * (cols / 64) * 96, 1);
    w.table = filled(16, 1);
    w.escape_count = between(0, 300);
    unsigned sane = byte() % 4;
    uint32_t *starts = filled((rows + 1) * 4, 4), *escapes = filled(w.escape_count * 4, 4);
    for (int64_t r = 0, at = 0; r <= rows && sane; r++) {
        at += between(0, 7);
        if (at > w.escape_count) at = w.escape_count;
        starts[r] = (uint32_t)at;
    }
    for (int64_t r = 0; r < rows && sane > 1; r++) {
        if (starts[r + 1] > w.escape_count) break;
        for (int64_t e = starts[r], c = -1; e < starts[r + 1]; e++) {
            c += between(1, 64);
            escapes[e] = (uint32_t)c << 16 | (escapes[e] & 0xFFFFu);
        }
    }
    w.starts = starts, w.escapes = escapes;
    return w;
}

/* A format and columns that go with it, now and then ones that do not. */
static int64_t columns(int *format, int64_t most) {
    unsigned choice = byte();
    *format = choice % 3 == 0 ? KIMI_BF16 : choice % 3 == 1 ? KIMI_F32 : KIMI_PACKED;
    int64_t cols = between(1, most);
    if (*format == KIMI_PACKED && choice < 250) cols = (cols + 63) / 64 * 64;
    if (choice == 255) *format = 3;
    return cols;
}

static void product(void) {
    int format;
    int64_t cols = columns(&format, byte() % 16 ? 200 : 1300), rows = between(1, 22);
    int64_t count = byte() % 16 ? between(1, 5) : between(1, 80);
    int64_t x_stride = cols + between(0, 5), y_stride = rows + between(0, 5);
    kimi_matrix w = matrix(rows, cols, format);
    float *x = floats((count - 1) * x_stride + cols);
    float *scratch = room(kimi_scratch(cols, count) * 4, 4);
    EVERYWHERE(float, (count - 1) * y_stride + rows,
               kimi_product(&w, x, x_stride, count, out, y_stride, scratch))
    kimi_matrix more[3] = {w};
    const kimi_matrix *each[3] = {more};
    int64_t n = between(1, 3), strides[3] = {rows, rows, rows}, other = format;
    for (int64_t i = 1; i < n; i++) {
        if (byte() % 4 == 0) other = byte() % 3;
        more[i] = matrix(rows, other == KIMI_PACKED && byte() ? (cols + 63) / 64 * 64 : cols, (int)other);
        each[i] = more + i;
    }
    EVERYWHERE(float, n * count * rows,
               kimi_products(each, n, x, x_stride, count,
                             (float *[]){out, out + count * rows * (n > 1), out + count * rows * 2 * (n > 2)}, strides,
                             scratch))
    if (format != KIMI_PACKED) return;
    EVERYWHERE(uint16_t, rows * cols, kimi_unpack_rows(&w, out))
}

static void mxfp4(void) {
    int64_t cols = 32 * between(1, byte() % 16 ? 8 : 40), rows = between(1, 22);
    int64_t count = byte() % 16 ? between(1, 5) : between(1, 80);
    int64_t x_stride = cols + between(0, 5), y_stride = rows + between(0, 5);
    if (byte() == 0) cols++;
    uint8_t *packed = filled(rows * cols / 2, 1), *scales = filled(rows * cols / 32, 1);
    float *x = floats((count - 1) * x_stride + cols);
    float *scratch = room(kimi_scratch(cols, count) * 4, 4);
    int64_t bad = -1;
    for (int64_t i = rows * cols / 32 - 1; i >= 0; i--)
        if (scales[i] == 255) bad = i;
    if (kimi_scale_nan(scales, rows * cols / 32) != bad) finding("another place of a NaN scale");
    for (int64_t i = 0; i < rows * cols / 32; i++)
        if (scales[i] == 255) scales[i] = 254; /* never computed with */
    EVERYWHERE(float, (count - 1) * y_stride + rows,
               kimi_product_mxfp4(packed, scales, rows, cols, x, x_stride, count, out, y_stride,
                                  scratch))
}

/* Rows of an expert whose scales are never NaN. */
static kimi_mxfp4 scaled(int64_t rows, int64_t cols) {
    uint8_t *packed = filled(rows * cols / 2, 1), *scales = filled(rows * cols / 32, 1);
    for (int64_t i = 0; i < rows * cols / 32; i++)
        if (scales[i] == 255) scales[i] = 254;
    return (kimi_mxfp4){packed, scales};
}

static void experts(void) {
    enum { MOST_EXPERTS = 3 };
    int64_t latent = 32 * between(1, 5), inter = 32 * between(1, 9), n = between(1, MOST_EXPERTS);
    int64_t count = between(1, 4), k = between(1, 3), most = between(1, 6);
    kimi_expert held[MOST_EXPERTS];
    const kimi_expert *chosen[MOST_EXPERTS];
    int32_t *starts = room((n + 1) * 4, 4);
    starts[0] = byte() == 0;
    for (int64_t i = 0; i < n; i++) {
        held[i] = (kimi_expert){scaled(inter, latent), scaled(latent, inter),
                                scaled(inter, latent)};
        chosen[i] = held + i;
        starts[i + 1] = starts[i] + (int32_t)(byte() % 16 ? between(1, most) : between(0, 8));
    }
    int32_t *places = room(starts[n] * 4, 4);
    for (int32_t i = 0; i < starts[n]; i++)
        places[i] = (int32_t)between(0, count * k - (byte() != 0));
    float *x = floats(count * latent), *gate = floats(most * inter), *up = floats(most * inter);
    float *y = floats(most * latent);
    float *scratch = room(kimi_experts_scratch(latent, inter, most) * 4, 4);
    EVERYWHERE(float, count * k * latent,
               kimi_experts(chosen, n, starts, places, latent, inter, 4.0f, 25.0f, x, count, k,
                            most, gate, up, y, out, scratch))
}

static void latent(void) {
    int format;
    int64_t rank = columns(&format, 130), heads = between(1, 6), nope = between(1, 20);
    int64_t rope = between(0, 9), value = between(1, 12), count = between(1, 9);
    int64_t q_stride = heads * (nope + rope) + between(0, 3), stride = heads * (rank + rope);
    kimi_matrix w = matrix(heads * (nope + value) + (byte() == 0), rank, format);
    if (w.rows % heads == 0) value = w.rows / heads - nope;
    float *q = floats(count * q_stride);
    EVERYWHERE(float, count * stride,
               kimi_mla_absorb(&w, heads, nope, rope, q, q_stride, count, out, stride))
    float *into = floats(count * heads * rank);
    float *scratch = room(kimi_scratch(rank, count * heads) * 4, 4);
    EVERYWHERE(float, count * heads * value,
               kimi_mla_values(&w, heads, nope, rank, into, heads * rank, count, out,
                               heads * value, scratch))
    int64_t start = between(0, 20), width = rank + rope;
    float *cache = floats((start + count) * width), *queries = floats(count * heads * width);
    float *attend = room(kimi_mla_scratch(start + count, heads, width) * 4, 4);
    EVERYWHERE(float, count * heads * value,
               kimi_mla(&w, heads, nope, rope, cache, start, count, q, q_stride, 0.125f, queries,
                        into, attend, out, heads * value, scratch))
}

static void attend(void) {
    int64_t rank = between(1, 130), heads = between(1, 9), rope = between(0, 9);
    int64_t count = between(1, 5), start = between(0, 300), width = rank + rope;
    float *cache = floats((start + count) * width), *q = floats(count * heads * width);
    float *scratch = room(kimi_mla_scratch(start + count, heads, width) * 4, 4);
    EVERYWHERE(float, count * heads * rank,
               kimi_mla_attend(cache, start, count, heads, rank, rope, q, 0.125f, out, scratch))
}

static uint32_t crc_by_bit(uint32_t crc, const uint8_t *p, int64_t n) {
    crc = ~crc;
    for (int64_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return ~crc;
}

static void checksum(void) {
    int64_t n = between(0, byte() % 8 ? 200 : 30000);
    uint8_t *data = filled(n, 1);
    uint32_t before = (uint32_t)between(0, 65535) * 65537u;
    if (kimi_crc32c(before, data, n) != crc_by_bit(before, data, n)) finding("a wrong CRC-32C");
}

static void pack(void) {
    int64_t rows = between(1, 9), cols = 64 * between(1, 9), n = rows * cols;
    uint16_t *w = filled(n * 2, 2);
    if (byte() % 2)
        for (int64_t i = 0; i < n; i++) w[i] = (uint16_t)((w[i] & 0x0FFFu) | 0x3000u);
    uint8_t *table = filled(16, 1), *packed = room(rows * (cols / 64) * 96, 1);
    int64_t counts[256] = {0}, known = 0, begin = between(0, 3);
    int64_t escaped = kimi_pack_escapes(w, n, table);
    uint32_t *starts = room((rows + 1) * 4, 4), *escapes = room((begin + escaped) * 4, 4);
    kimi_pack_histogram(w, n, counts);
    for (int i = 0; i < 256; i++)
        if (memchr(table, i, 16)) known += counts[i];
    if (known + escaped != n) finding("escapes and histogram differ");
    starts[0] = (uint32_t)begin;
    if (kimi_pack_rows(w, rows, cols, table, packed, starts, escapes)) finding("did not pack");
    if (starts[rows] != begin + escaped) finding("more or fewer escapes than counted");
    kimi_matrix m = {KIMI_PACKED, rows, cols, packed, table, starts, escapes, begin + escaped};
    uint16_t *back = room(n * 2, 2);
    if (kimi_unpack_rows(&m, back) || memcmp(back, w, (size_t)n * 2)) finding("not what was packed");
}

static void widen(void) {
    int64_t n = between(0, 500), format = between(0, 3);
    const uint8_t *source = filled(n * (format == KIMI_F32 ? 4 : 2), 1);
    EVERYWHERE(float, n, kimi_widen((int)format, source, n, out))
}

static double number(void) {
    static const double edges[] = {0.0, 1.0, -1.0, 1e-300, 5e-324, 1e300, INFINITY, NAN, 0.5, 0.95};
    unsigned choice = byte();
    return choice < 40 ? edges[choice % 10] : (double)between(0, 65535) / 65536.0 * 2.0;
}

static void sample(void) {
    int64_t n = between(1, 700), top_k = between(0, 800);
    float *logits = floats(n), *e = room(n * 4, 4);
    int32_t *order = room(n * 4, 4);
    double temperature = number(), top_p = number(), min_p = byte() % 2 ? 0.0 : number();
    uint64_t seed = (uint64_t)between(0, 65535) << 20, index = (uint64_t)between(0, 65535);
    EVERYWHERE(int32_t, 1,
               kimi_sample(logits, n, temperature, top_k, top_p, min_p, seed, index, e, order, out))
    if (!first.status && (*(int32_t *)first.bytes < 0 || *(int32_t *)first.bytes >= n))
        finding("an id that is none");
}

static void logprobs(void) {
    int64_t n = between(1, 2200), count = between(0, 20), top = between(0, 300);
    float *logits = floats(n);
    int32_t *ids = filled(count * 4, 4), *best = room(top * 4, 4);
    for (int64_t i = 0; i < count && byte() % 16; i++) ids[i] = (int32_t)((uint32_t)ids[i] % n);
    EVERYWHERE(double, count + top,
               kimi_logprobs(logits, n, ids, count, out, top, best, out + count))
    for (int64_t i = 0; i < top && !first.status; i++)
        if (best[i] < 0 || best[i] >= n) finding("an id that is none");
}

static void route(void) {
    int64_t experts = between(1, 300), k = between(1, 260), count = between(1, 5);
    float *logits = floats(count * experts), *bias = floats(experts);
    int32_t *ids = room(count * k * 4, 4);
    EVERYWHERE(float, count * k, kimi_route(logits, bias, count, experts, k, 2.5, ids, out))
    for (int64_t i = 0; i < count * k && !first.status; i++) {
        if (ids[i] < 0 || ids[i] >= experts) finding("an expert that is none");
        for (int64_t j = i / k * k; j < i; j++)
            if (ids[j] == ids[i]) finding("an expert twice");
    }
}

static void elementwise(void) {
    int64_t n = between(0, 5000);
    float *x = floats(n), *by = floats(n);
    EVERYWHERE(float, n, kimi_exp(x, n, out))
    EVERYWHERE(float, n, kimi_tanh(x, n, out))
    EVERYWHERE(float, n, kimi_gate(x, by, n, out))
    EVERYWHERE(float, n, kimi_situ(x, by, n, 4.0f, 25.0f, out))
}

static void norms(void) {
    int64_t n = between(1, 300), count = between(1, 5), heads = between(1, 4), s = between(1, 8);
    float *x = floats(count * heads * n), *gate = floats(count * heads * n), *weight = floats(n);
    EVERYWHERE(float, count * heads * n,
               kimi_gated_norm(x, gate, count, heads, n, weight, 1e-5, out))
    EVERYWHERE(float, count * n, kimi_expert_sum(x, gate, count, heads, n, out))
    const float *sources[8];
    for (int64_t i = 0; i < s; i++) sources[i] = floats(count * n);
    float *proj = floats(n);
    EVERYWHERE(float, count * n, kimi_mix(sources, s, count, n, weight, proj, 1e-5, out))
}

static void delta(void) {
    int64_t dim = between(1, 70), heads = between(1, 3), count = between(1, 4);
    int64_t width = count * heads * dim, states = heads * dim * dim;
    float *q = floats(width), *k = floats(width), *v = floats(width), *decay = floats(width);
    float *beta = floats(count * heads), *before = floats(states);
    EVERYWHERE(float, states + width,
               (memcpy(out, before, (size_t)states * 4),
                kimi_delta(out, count, heads, dim, q, k, v, decay, beta, out + states)))
    float *a_log = floats(heads), *bias = floats(heads * dim);
    EVERYWHERE(float, width, kimi_decay(q, count, heads, dim, a_log, bias, -5.0f, out))
}

static void conv(void) {
    int64_t channels = between(1, 100), taps = between(0, 65), count = between(1, 9);
    int64_t held = taps > 1 ? (taps - 1) * channels : 0, width = count * channels;
    float *x = floats(width), *w = floats(channels * taps), *before = floats(held);
    EVERYWHERE(float, held + width,
               (memcpy(out, before, (size_t)held * 4),
                kimi_conv(x, count, channels, taps, w, out, out + held)))
}

typedef void (*operation)(void);
#define OPERATION(name) {#name, name}
static const struct {
    const char *name;
    operation run;
} OPERATIONS[] = {
    OPERATION(product),  OPERATION(mxfp4),   OPERATION(experts), OPERATION(latent),
    OPERATION(attend),
    OPERATION(checksum), OPERATION(pack),    OPERATION(widen),  OPERATION(sample),
    OPERATION(logprobs), OPERATION(route),   OPERATION(elementwise), OPERATION(norms),
    OPERATION(delta),    OPERATION(conv),
};
enum { ALL = sizeof OPERATIONS / sizeof *OPERATIONS };

/* Groups of neighbours in OPERATIONS; the last is all of them. */
static const struct {
    const char *name;
    unsigned begin, end;
} GROUPS[] = {{"products", 0, 5}, {"others", 5, ALL}, {"", 0, ALL}};
static unsigned group;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    const char *slash = strrchr((*argv)[0], '/');
    const char *name = slash ? slash + 1 : (*argv)[0];
    while (*GROUPS[group].name && strcmp(GROUPS[group].name, name)) group++;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    in = data, left = size, state = size, used = 0;
    unsigned choices = GROUPS[group].end - GROUPS[group].begin;
    unsigned chosen = GROUPS[group].begin + byte() % choices;
    running = OPERATIONS[chosen].name;
    kimi_threads_set(byte() % 8 ? 1 : 3);
    OPERATIONS[chosen].run();
    while (used) free(blocks[--used]);
    return 0;
}
