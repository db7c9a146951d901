/* kimi.h: every C function that Python may call, and the arithmetic each one promises.
 *
 * The part between the two cdef markers is read by build.py and *is* the cffi declaration: plain
 * C declarations and integer #defines only. Arrays are row-major and contiguous unless a stride
 * (in elements) is given. Three shapes of function:
 *
 *   operation   int, 0 or a negative KIMI_E_*; splits its work over threads
 *   question    returns a value, no side effects
 *   setting     kimi_isa_set, kimi_threads_set: process-wide, not while an operation runs
 *
 * Nothing here allocates, prints, exits, or reads a file or the environment. Results are the same
 * bits for any thread count and instruction set: only rows, heads, channels or experts are split.
 *
 * THE DENSE PRODUCT, y = W x, per output row, for bf16, float32 and packed weights alike:
 *
 *     16 float32 lanes a[0..15] = +0;  for c ascending:  a[c % 16] = fmaf(w_c, x_c, a[c % 16])
 *     s[i] = a[2i] + a[2i+1];  h[i] = s[i] + s[i+4];  y = (h[0] + h[2]) + (h[1] + h[3])
 *
 * A tail of columns behaves as if padded with +0 to a multiple of 16.
 *
 * THE MXFP4 PRODUCT. 32 columns are one group of 16 bytes (low nibble = even column), one scale
 * byte each. In group g, for l = 0..3:
 *
 *     p = w x of column 4l, then seven fmaf over columns 4l+1, 4l+2, 4l+3, 4l+16 .. 4l+19
 *     a[4 (g % 4) + l] = fmaf(p, 2^(scale - 127), a[4 (g % 4) + l])
 *
 * and the same tree ends it; missing groups behave as p = +0 up to a multiple of 4 groups.
 *
 * A PACKED ROW is a run of blocks of 64 columns, 96 bytes each:
 *
 *     byte  0                              64                    96
 *           | low bytes of 64 weights       | 32 bytes of nibbles |
 *             h = 0: bytes 0..31              low nibble:  h = 0
 *             h = 1: bytes 32..63             high nibble: h = 1
 *
 *     position p of half h holds column 32h + 16 ((p >> 3) & 1) + 8 (p >> 4) + (p & 7),
 *     so that interleaving low bytes with looked-up high bytes inside 128-bit lanes gives 16-bit
 *     weights in column order. weight = table[nibble] << 8 | low byte, except where the row has an
 *     escape. Escapes of row r are escapes[starts[r] .. starts[r+1]), each column << 16 | bf16,
 *     columns ascending.
 *
 * DOUBLE SUMS (norms, residual mix): 8 double lanes, lane i % 8, i ascending, each term rounded to
 * double before it is added; then ((d0+d4) + (d2+d6)) + ((d1+d5) + (d3+d7)).
 */
#ifndef KIMI_H
#define KIMI_H

#include <stdint.h>

/* cdef begin */
#define KIMI_E_ARGUMENT -1    /* a null pointer, or a dimension out of range */
#define KIMI_E_UNSUPPORTED -2 /* this CPU, or this build, lacks the instruction set */
#define KIMI_E_ESCAPES -3     /* packed weights whose escapes are out of order or out of range */
#define KIMI_E_NUMERIC -4     /* a logit is NaN or infinite */

#define KIMI_BF16 0
#define KIMI_F32 1
#define KIMI_PACKED 2

#define KIMI_ISA_SCALAR 0
#define KIMI_ISA_AVX2 1
#define KIMI_ISA_AVX512 2
#define KIMI_ISA_NEON 3

#define KIMI_MAX_THREADS 256
#define KIMI_POSITION_BLOCK 128
#define KIMI_MAX_SOURCES 256  /* residual snapshots that one mix can weigh */
#define KIMI_MAX_DIM 1024     /* largest KDA head */
#define KIMI_MAX_RANK 8192    /* largest kv_lora_rank */
#define KIMI_MAX_TAPS 64      /* widest short convolution */
#define KIMI_MAX_TOP 256      /* most experts per token */

/* Settings. Selecting an instruction set never changes a result. */
int kimi_isa_supported(int isa);
int kimi_isa_set(int isa);
int kimi_isa(void);
int kimi_threads_set(int threads);

/* Weights of a dense product: `rows` consecutive rows of a matrix. `table` (16 bytes), `starts`
 * (rows + 1 entries) and `escapes` (escape_count entries) are read for KIMI_PACKED only; starts[0]
 * need not be 0. */
typedef struct {
    int format;
    int64_t rows;
    int64_t cols;
    const void *data;
    const uint8_t *table;
    const uint32_t *starts;
    const uint32_t *escapes;
    int64_t escape_count;
} kimi_matrix;

/* y[t][r] = sum over c of W[r][c] x[t][c], for `count` columns t; x_stride, y_stride in floats.
 * `scratch` holds kimi_scratch(cols, count) floats. x may be null where scratch is as the last
 * product left it, of the same x and as many columns of W in the same format. */
int64_t kimi_scratch(int64_t cols, int64_t count);
int kimi_product(const kimi_matrix *w, const float *x, int64_t x_stride, int64_t count, float *y,
                 int64_t y_stride, float *scratch);
/* The same for `n` matrices of as many columns, each with its y and y_stride. */
int kimi_products(const kimi_matrix *const *w, int64_t n, const float *x, int64_t x_stride,
                  int64_t count, float *const *y, const int64_t *y_stride, float *scratch);
int kimi_product_mxfp4(const uint8_t *packed, const uint8_t *scales, int64_t rows, int64_t cols,
                       const float *x, int64_t x_stride, int64_t count, float *y,
                       int64_t y_stride, float *scratch);

/* Rows of an MXFP4 matrix: packed [rows][cols / 2], scales [rows][cols / 32]. */
typedef struct {
    const uint8_t *packed;
    const uint8_t *scales;
} kimi_mxfp4;

/* A routed expert: w1, w3 [inter][latent], w2 [latent][inter], both multiples of 32. */
typedef struct {
    kimi_mxfp4 w1, w2, w3;
} kimi_expert;

/* out[p] = W2 situ(W1 x[p / k], W3 x[p / k]) for `n` experts: expert i is wanted at the places
 * p = places[starts[i]] .. places[starts[i + 1] - 1]; x [count][latent], out [count * k][latent].
 * No expert is wanted at more than `most` places. gate and up, [most][inter], and y,
 * [most][latent], are overwritten; `scratch` holds kimi_experts_scratch(latent, inter, most)
 * floats. */
int64_t kimi_experts_scratch(int64_t latent, int64_t inter, int64_t most);
int kimi_experts(const kimi_expert *const *experts, int64_t n, const int32_t *starts,
                 const int32_t *places, int64_t latent, int64_t inter, float beta,
                 float linear_beta, const float *x, int64_t count, int64_t k, int64_t most,
                 float *gate, float *up, float *y, float *out, float *scratch);

/* Index of the first scale byte of 255 (NaN), or -1. */
int64_t kimi_scale_nan(const uint8_t *scales, int64_t n);

/* Packed rows. kimi_pack_histogram adds to counts[256] how often each high byte occurs.
 * kimi_pack_escapes counts the weights whose high byte is not in `table`.
 * kimi_pack_rows writes packed rows, starts[0..rows] continuing from starts[0], and the escapes
 * at escapes[starts[0]..]. cols is a multiple of 64, at most 65536. */
int kimi_pack_histogram(const uint16_t *w, int64_t n, int64_t *counts);
int64_t kimi_pack_escapes(const uint16_t *w, int64_t n, const uint8_t *table);
int kimi_pack_rows(const uint16_t *w, int64_t rows, int64_t cols, const uint8_t *table,
                   uint8_t *packed, uint32_t *starts, uint32_t *escapes);
int kimi_unpack_rows(const kimi_matrix *w, uint16_t *out);

/* CRC-32C (Castagnoli, RFC 3720) of n bytes; `crc` is the value for the bytes before them, 0 at
 * the start. */
uint32_t kimi_crc32c(uint32_t crc, const void *data, int64_t n);

/* Elementwise, n values: exact widening, and our own exp, sigmoid and tanh, each within 3 ulp. */
int kimi_widen(int format, const void *src, int64_t n, float *y);
int kimi_exp(const float *x, int64_t n, float *y);
int kimi_sigmoid(const float *x, int64_t n, float *y);
int kimi_tanh(const float *x, int64_t n, float *y);
int kimi_add(const float *x, int64_t n, float *y);                 /* y = y + x */
int kimi_gate(const float *x, const float *gate, int64_t n, float *y); /* y = x sigmoid(gate) */
/* y = (beta tanh(g / beta)) sigmoid(g) * (linear_beta tanh(u / linear_beta)) */
int kimi_situ(const float *g, const float *u, int64_t n, float beta, float linear_beta, float *y);

/* y[t] = (float)(x[t][i] * (1 / sqrt(mean of squares + eps))) * weight[i], in double. */
int kimi_rmsnorm(const float *x, int64_t x_stride, int64_t count, int64_t n, const float *weight,
                 double eps, float *y, int64_t y_stride);

/* Attention residual over S sources, sources[s] being [count][n]:
 * score = sum v w p / sqrt(mean v^2 + eps) in double, rounded to float32; p = exp(score - max);
 * y = sum over s ascending of fmaf((float)(p_s / sum p), v_s, y). */
int kimi_mix(const float *const *sources, int64_t s, int64_t count, int64_t n, const float *norm,
             const float *proj, double eps, float *y);

/* KDA. Vectors are [count][heads * dim]. */
/* y = SiLU(sum over taps ascending of fmaf(w[c][j], .)); history [taps-1][channels] holds the raw
 * columns before x and is moved on. */
int kimi_conv(const float *x, int64_t count, int64_t channels, int64_t taps, const float *w,
              float *history, float *y);
/* x = (float)(x * (scale / sqrt(sum of squares + eps))) within each head, in place, in double. */
int kimi_l2norm(float *x, int64_t count, int64_t heads, int64_t dim, double eps, double scale);
/* y = exp(lower_bound * sigmoid(exp(a_log[h]) * (z + dt_bias))): the factor that decays S. */
int kimi_decay(const float *z, int64_t count, int64_t heads, int64_t dim, const float *a_log,
               const float *dt_bias, float lower_bound, float *y);
/* state [heads][dim][dim]. Per token: S[i][j] = S[i][j] decay[i]; u[j] = sum over i ascending of
 * fmaf(S[i][j], k[i], u[j]); d = beta (v - u); S[i][j] = fmaf(k[i], d[j], S[i][j]);
 * o[j] = sum over i ascending of fmaf(S[i][j], q[i], o[j]). dim is at most KIMI_MAX_DIM. */
int kimi_delta(float *state, int64_t count, int64_t heads, int64_t dim, const float *q,
               const float *k, const float *v, const float *decay, const float *beta, float *o);
/* y = rmsnorm(x, weight[dim]) within each head, times sigmoid(gate). */
int kimi_gated_norm(const float *x, const float *gate, int64_t count, int64_t heads, int64_t dim,
                    const float *weight, double eps, float *y);

/* MLA, never expanding keys or values. `kv_b` holds `heads` heads of (nope + value) rows of
 * `rank` columns. */
/* out[t][h] = (sum over i ascending of fmaf(q_nope[i], W[h i][c], .), then the rope values). */
int kimi_mla_absorb(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rope,
                    const float *q, int64_t q_stride, int64_t count, float *out,
                    int64_t out_stride);
/* q [count][heads][rank + rope]; cache [start + count][rank + rope], token t seeing the first
 * start + t + 1 rows. score = dense-product order, times scale; e = exp(score - max); the
 * denominator is a double sum of e; the numerator is, per block of KIMI_POSITION_BLOCK positions,
 * fmaf ascending from +0, blocks added ascending to +0.
 * scratch: kimi_mla_scratch(start + count, heads, rank + rope) floats. */
int64_t kimi_mla_scratch(int64_t positions, int64_t heads, int64_t width);
int kimi_mla_attend(const float *cache, int64_t start, int64_t count, int64_t heads, int64_t rank,
                    int64_t rope, const float *q, float scale, float *out, float *scratch);
/* y[t][h value] = W_v[h] latent[t][h], the dense product. */
int kimi_mla_values(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rank,
                    const float *latent, int64_t latent_stride, int64_t count, float *y,
                    int64_t y_stride, float *scratch);
/* The three in turn: y [count][y_stride] of these heads from their q [count][q_stride]. `queries`
 * [count][heads][rank + rope] and `latent` [count][heads][rank] are overwritten; `attend` is the
 * scratch of the second, `scratch` that of the third. */
int kimi_mla(const kimi_matrix *kv_b, int64_t heads, int64_t nope, int64_t rope,
             const float *cache, int64_t start, int64_t count, const float *q, int64_t q_stride,
             float scale, float *queries, float *latent, float *attend, float *y,
             int64_t y_stride, float *scratch);

/* Router: s = sigmoid(logits); the k largest of s + bias, ties to the lower index, in that order;
 * weight = s / (sum of chosen s, in that order, + 1e-20) * factor, in double. k is at most
 * KIMI_MAX_TOP. KIMI_E_NUMERIC if a logit is NaN or infinite: the choice would pass over it. */
int kimi_route(const float *logits, const float *bias, int64_t count, int64_t experts, int64_t k,
               double factor, int32_t *ids, float *weights);
/* y[t] = sum over k ascending of fmaf(weights[t][k], x[t][k][i], y). */
int kimi_expert_sum(const float *x, const float *weights, int64_t count, int64_t k, int64_t n,
                    float *y);

/* Index of the largest value, the lowest on a tie; -1 when any value is NaN or infinite. */
int64_t kimi_argmax(const float *x, int64_t n);

/* Draws one of n logits. "Order" is larger logit first, ties to the lower index; a sum is in
 * double, indices ascending, unless said otherwise. In turn:
 *
 *   e = exp((l - max) / temperature), the exponent in double, at least -104, rounded to float32
 *   top-k keeps the first top_k in order (0: all)
 *   top-p keeps the first in order until their e, added in order, reach top_p times the sum of e
 *         over what top-k kept (1: all)
 *   min-p keeps those with e >= min_p, the largest e being 1 (0: all)
 *   u = the upper 53 bits of (r[0] << 32 | r[1]) / 2^53, r = philox(counter index, key seed)
 *   id = the first, indices ascending, where the running sum of e over the kept exceeds u times
 *        the whole of it
 *
 * temperature > 0, finite; 0 < top_p <= 1; 0 <= min_p <= 1. Scratch: e [n], order [n]. Returns
 * KIMI_E_NUMERIC, and leaves *id alone, when a logit is not finite. */
int kimi_sample(const float *logits, int64_t n, double temperature, int64_t top_k, double top_p,
                double min_p, uint64_t seed, uint64_t index, float *e, int32_t *order,
                int32_t *id);
/* Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): four words
 * that depend on counter [4] and key [2] alone. A 64-bit number fills words 0 and 1, low first. */
int kimi_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out);

/* logprob[i] = (l[ids[i]] - max) - log(sum of exp(l - max)), in double but for the float32 exp, for
 * `count` ids; and the same for the first `top` logits in order, with their ids. `top` is at most
 * KIMI_MAX_TOP and n. Returns KIMI_E_NUMERIC when a logit is not finite. */
int kimi_logprobs(const float *logits, int64_t n, const int32_t *ids, int64_t count,
                  double *logprob, int64_t top, int32_t *top_ids, double *top_logprob);
/* Natural logarithm of a positive finite double, within 3 ulp. */
double kimi_log(double x);
/* exp(-total / count), within 4 ulp of that of the rounded quotient; infinity beyond the largest
 * double. count > 0. */
double kimi_perplexity(double total, int64_t count);

/* Roofs: the most this machine can do, which `kimi bench` holds the kernels against. */
/* *sum = sum of n words modulo 2^64, every thread reading four streams far apart. */
int kimi_roof_read(const uint64_t *data, int64_t n, uint64_t *sum);
/* `rounds` (at most 2^31 - 1) steps of independent multiply-adds on every thread: *flops is how
 * many operations that was, two a multiply-add; *mean, about 0.5, depends on all of them. */
int kimi_roof_fma(int64_t rounds, int64_t *flops, float *mean);
/* cdef end */

#endif
