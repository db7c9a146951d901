/* The elementwise pieces of training, each with its derivative, one pass over memory: what
 * `pieces.py` and `kda.py` say in torch, which is what they are held against.
 *
 * Rows are float32 and contiguous. Gradients of parameters come in partial sums, one per sequence
 * or thread slot, which the caller adds up. Compiled with -ffast-math: nothing here is NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define D 32 /* head width of KDA */
#define CHUNK 16
#define SLOTS 8
#define MAX_HIDDEN 256
#define MAX_SOURCES 8

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* ---- KDA: convolution, SiLU, L2 norm, decay, delta rule ------------------------------------ */

typedef struct {
    float act[3][256][D]; /* after SiLU; q and k after their norms, q unscaled */
    float pre[3][256][D]; /* before SiLU */
    float inv[2][256];    /* 1 / norm of q and k */
    float decay[256][D], open[256][D], beta[256];
} Head;

/* raw [T, 3, heads, D], taps [3, heads, D, 4], z [T, heads, D], blin [T, heads] */
static void head_inputs(Head *s, int T, int heads, int h, const float *raw, const float *taps,
                        const float *z, const float *blin, float alog, const float *bias,
                        float bound)
{
    float rate = expf(alog);
    int row = 3 * heads * D;
    for (int part = 0; part < 3; part++) {
        const float *w = taps + (part * heads + h) * D * 4;
        float wt[4][D];
        for (int c = 0; c < D; c++)
            for (int j = 0; j < 4; j++)
                wt[j][c] = w[c * 4 + j];
        for (int t = 0; t < T; t++) {
            float *y = s->pre[part][t], *a = s->act[part][t];
            for (int c = 0; c < D; c++)
                y[c] = 0;
            for (int j = 0; j < 4; j++) {
                int from = t - 3 + j;
                if (from < 0)
                    continue;
                const float *x = raw + (size_t)from * row + (part * heads + h) * D;
                for (int c = 0; c < D; c++)
                    y[c] += wt[j][c] * x[c];
            }
            float sum = 1e-6f;
            for (int c = 0; c < D; c++) {
                a[c] = y[c] * sigmoid(y[c]);
                sum += a[c] * a[c];
            }
            if (part < 2) {
                float inv = 1.0f / sqrtf(sum);
                s->inv[part][t] = inv;
                for (int c = 0; c < D; c++)
                    a[c] *= inv;
            }
        }
    }
    for (int t = 0; t < T; t++) {
        const float *x = z + ((size_t)t * heads + h) * D;
        for (int c = 0; c < D; c++) {
            s->open[t][c] = sigmoid(rate * (x[c] + bias[c]));
            s->decay[t][c] = expf(bound * s->open[t][c]);
        }
        s->beta[t] = sigmoid(blin[t * heads + h]);
    }
}

/* One token: state becomes that after t; u gets what is written. */
static inline void advance(const Head *s, int t, float (*state)[D], float *u)
{
    float read[D] = {0};
    const float *k = s->act[1][t], *v = s->act[2][t], *a = s->decay[t];
    for (int i = 0; i < D; i++) {
        float both = a[i] * k[i];
        for (int j = 0; j < D; j++)
            read[j] += both * state[i][j];
    }
    for (int j = 0; j < D; j++)
        u[j] = s->beta[t] * (v[j] - read[j]);
    for (int i = 0; i < D; i++)
        for (int j = 0; j < D; j++)
            state[i][j] = a[i] * state[i][j] + k[i] * u[j];
}

/* o [B, T, heads, D] */
void kda_forward(int B, int T, int heads, const float *raw, const float *taps, const float *z,
                 const float *blin, const float *alog, const float *bias, float bound, float *o)
{
    float scale = 1.0f / sqrtf((float)D);
#pragma omp parallel
    {
        Head *s = malloc(sizeof *s);
#pragma omp for
        for (int bh = 0; bh < B * heads; bh++) {
            int b = bh / heads, h = bh % heads;
            head_inputs(s, T, heads, h, raw + (size_t)b * T * 3 * heads * D, taps,
                        z + (size_t)b * T * heads * D, blin + (size_t)b * T * heads, alog[h],
                        bias + h * D, bound);
            float state[D][D] = {{0}}, u[D];
            for (int t = 0; t < T; t++) {
                advance(s, t, state, u);
                float out[D] = {0};
                for (int i = 0; i < D; i++)
                    for (int j = 0; j < D; j++)
                        out[j] += s->act[0][t][i] * state[i][j];
                float *to = o + (((size_t)b * T + t) * heads + h) * D;
                for (int j = 0; j < D; j++)
                    to[j] = out[j] * scale;
            }
        }
        free(s);
    }
}

static inline float dot(const float *a, const float *b)
{
    float sum = 0;
    for (int j = 0; j < D; j++)
        sum += a[j] * b[j];
    return sum;
}

/* Gradients: draw, dz, dblin as their inputs; dtaps [B, 3, heads, D, 4], dbias [B, heads, D],
 * dalog [B, heads] per sequence. */
void kda_backward(int B, int T, int heads, const float *raw, const float *taps, const float *z,
                  const float *blin, const float *alog, const float *bias, float bound,
                  const float *grad, float *draw, float *dz, float *dblin, float *dtaps,
                  float *dbias, float *dalog)
{
    float scale = 1.0f / sqrtf((float)D);
    int row = 3 * heads * D;
#pragma omp parallel
    {
        Head *s = malloc(sizeof *s);
        float(*start)[D][D] = malloc(sizeof(float) * D * D * (256 / CHUNK));
        float(*states)[D][D] = malloc(sizeof(float) * D * D * (CHUNK + 1));
        float(*wrote)[D] = malloc(sizeof(float) * D * 256);
        float(*da)[256][D] = malloc(sizeof(float) * 3 * 256 * D);
#pragma omp for
        for (int bh = 0; bh < B * heads; bh++) {
            int b = bh / heads, h = bh % heads;
            const float *rawb = raw + (size_t)b * T * row;
            const float *zb = z + (size_t)b * T * heads * D;
            float rate = expf(alog[h]);
            head_inputs(s, T, heads, h, rawb, taps, zb, blin + (size_t)b * T * heads, alog[h],
                        bias + h * D, bound);
            float state[D][D] = {{0}}, ds[D][D] = {{0}}, sum_alog = 0, sum_bias[D] = {0};
            for (int t = 0; t < T; t++) {
                if (t % CHUNK == 0)
                    memcpy(start[t / CHUNK], state, sizeof state);
                advance(s, t, state, wrote[t]);
            }
            for (int first = T - CHUNK; first >= 0; first -= CHUNK) {
                memcpy(states[0], start[first / CHUNK], sizeof state);
                for (int n = 0; n < CHUNK; n++) {
                    const float *a = s->decay[first + n], *k = s->act[1][first + n];
                    const float *u = wrote[first + n];
                    for (int i = 0; i < D; i++)
                        for (int j = 0; j < D; j++)
                            states[n + 1][i][j] = a[i] * states[n][i][j] + k[i] * u[j];
                }
                for (int n = CHUNK - 1; n >= 0; n--) {
                    int t = first + n;
                    const float *q = s->act[0][t], *k = s->act[1][t];
                    const float *a = s->decay[t], *u = wrote[t];
                    const float *from = grad + (((size_t)b * T + t) * heads + h) * D;
                    float go[D], du[D] = {0}, dr[D], dk[D], ddecay[D], dbeta = 0;
                    float beta = s->beta[t];
                    for (int j = 0; j < D; j++)
                        go[j] = from[j] * scale;
                    for (int i = 0; i < D; i++) {
                        for (int j = 0; j < D; j++) {
                            ds[i][j] += q[i] * go[j];
                            du[j] += k[i] * ds[i][j];
                        }
                        da[0][t][i] = dot(states[n + 1][i], go);
                        dk[i] = dot(ds[i], u);
                    }
                    for (int j = 0; j < D; j++) {
                        dr[j] = -beta * du[j];
                        da[2][t][j] = beta * du[j];
                        dbeta += du[j] * u[j]; /* u = beta (v - read) */
                    }
                    for (int i = 0; i < D; i++) {
                        float decayed = 0, slope = 0;
                        for (int j = 0; j < D; j++) {
                            ds[i][j] += k[i] * dr[j];
                            decayed += states[n][i][j] * dr[j];
                            slope += ds[i][j] * states[n][i][j];
                            ds[i][j] *= a[i];
                        }
                        dk[i] += a[i] * decayed;
                        ddecay[i] = slope * a[i];
                    }
                    memcpy(da[1][t], dk, sizeof dk);
                    dblin[((size_t)b * T + t) * heads + h] = dbeta * (1 - beta);
                    const float *x = zb + ((size_t)t * heads + h) * D;
                    float *to = dz + (((size_t)b * T + t) * heads + h) * D;
                    for (int i = 0; i < D; i++) {
                        float g = ddecay[i] * bound * s->open[t][i] * (1 - s->open[t][i]) * rate;
                        to[i] = g;
                        sum_bias[i] += g;
                        sum_alog += g * (x[i] + bias[h * D + i]);
                    }
                }
            }
            dalog[b * heads + h] = sum_alog;
            memcpy(dbias + ((size_t)b * heads + h) * D, sum_bias, sizeof sum_bias);
            for (int part = 0; part < 3; part++) {
                const float *w = taps + (part * heads + h) * D * 4;
                float wt[4][D], dw[4][D] = {{0}};
                for (int c = 0; c < D; c++)
                    for (int j = 0; j < 4; j++)
                        wt[j][c] = w[c * 4 + j];
                for (int t = 0; t < T; t++) {
                    float *g = da[part][t];
                    const float *y = s->pre[part][t], *n = s->act[part][t];
                    if (part < 2) {
                        float along = dot(g, n), inv = s->inv[part][t];
                        for (int c = 0; c < D; c++)
                            g[c] = (g[c] - along * n[c]) * inv;
                    }
                    for (int c = 0; c < D; c++) {
                        float m = sigmoid(y[c]);
                        g[c] *= m * (1 + y[c] * (1 - m));
                    }
                }
                for (int t = 0; t < T; t++) {
                    float out[D] = {0};
                    for (int j = 0; j < 4; j++) {
                        int to = t + 3 - j;
                        if (to >= T)
                            continue;
                        const float *g = da[part][to];
                        const float *x = rawb + (size_t)t * row + (part * heads + h) * D;
                        for (int c = 0; c < D; c++) {
                            out[c] += wt[j][c] * g[c];
                            dw[j][c] += x[c] * g[c];
                        }
                    }
                    memcpy(draw + ((size_t)b * T + t) * row + (part * heads + h) * D, out,
                           sizeof out);
                }
                float *to = dtaps + ((size_t)b * 3 + part) * heads * D * 4 + h * D * 4;
                for (int c = 0; c < D; c++)
                    for (int j = 0; j < 4; j++)
                        to[c * 4 + j] = dw[j][c];
            }
        }
        free(s), free(start), free(states), free(wrote), free(da);
    }
}

/* ---- residual mix, then RMS norm ----------------------------------------------------------- */

/* sources: `count` pointers to [N, H]; x [N, H]. With one source the mix is that source. */
static float mixed(const float **v, int count, int H, const float *wp, float eps, float *p,
                   float *rs, float *along, float *h)
{
    float top = -INFINITY, sum = 0, square = 0;
    for (int s = 0; s < count; s++) {
        float a = 0, q = 0;
        for (int i = 0; i < H; i++) {
            a += v[s][i] * wp[i];
            q += v[s][i] * v[s][i];
        }
        rs[s] = 1.0f / sqrtf(q / (float)H + eps);
        along[s] = a;
        p[s] = a * rs[s];
        top = p[s] > top ? p[s] : top;
    }
    for (int s = 0; s < count; s++)
        sum += p[s] = expf(p[s] - top);
    for (int i = 0; i < H; i++)
        h[i] = 0;
    for (int s = 0; s < count; s++) {
        p[s] /= sum;
        for (int i = 0; i < H; i++)
            h[i] += p[s] * v[s][i];
    }
    for (int i = 0; i < H; i++)
        square += h[i] * h[i];
    return 1.0f / sqrtf(square / (float)H + eps);
}

void mix_forward(int N, int H, int count, const float **sources, const float *wp,
                 const float *norm, float eps, float *x)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *v[MAX_SOURCES];
        float p[MAX_SOURCES], rs[MAX_SOURCES], along[MAX_SOURCES], h[MAX_HIDDEN];
        for (int s = 0; s < count; s++)
            v[s] = sources[s] + (size_t)n * H;
        float r = mixed(v, count, H, wp, eps, p, rs, along, h);
        for (int i = 0; i < H; i++)
            x[(size_t)n * H + i] = h[i] * r * norm[i];
    }
}

/* dsources as sources, overwritten; dwp and dnorm [SLOTS, H], zero before */
void mix_backward(int N, int H, int count, const float **sources, const float *wp,
                  const float *norm, float eps, const float *grad, float **dsources, float *dwp,
                  float *dnorm)
{
#pragma omp parallel for schedule(static)
    for (int slot = 0; slot < SLOTS; slot++)
        for (int n = N * slot / SLOTS; n < N * (slot + 1) / SLOTS; n++) {
            const float *v[MAX_SOURCES], *g = grad + (size_t)n * H;
            float p[MAX_SOURCES], rs[MAX_SOURCES], along[MAX_SOURCES], dp[MAX_SOURCES];
            float h[MAX_HIDDEN], dh[MAX_HIDDEN], inner = 0, mean = 0;
            for (int s = 0; s < count; s++)
                v[s] = sources[s] + (size_t)n * H;
            float r = mixed(v, count, H, wp, eps, p, rs, along, h);
            for (int i = 0; i < H; i++) {
                dnorm[slot * H + i] += g[i] * h[i] * r;
                dh[i] = g[i] * norm[i];
                inner += dh[i] * h[i];
            }
            inner *= r * r / (float)H;
            for (int i = 0; i < H; i++)
                dh[i] = r * (dh[i] - h[i] * inner);
            for (int s = 0; s < count; s++) {
                float sum = 0;
                for (int i = 0; i < H; i++)
                    sum += dh[i] * v[s][i];
                dp[s] = sum;
                mean += p[s] * sum;
            }
            for (int s = 0; s < count; s++) {
                float *to = dsources[s] + (size_t)n * H;
                float d = p[s] * (dp[s] - mean) * rs[s];
                float back = d * rs[s] * rs[s] * along[s] / (float)H;
                for (int i = 0; i < H; i++) {
                    to[i] = p[s] * dh[i] + d * wp[i] - back * v[s][i];
                    dwp[slot * H + i] += d * v[s][i];
                }
            }
        }
}

/* ---- RMS norm, times a sigmoid gate -------------------------------------------------------- */

/* x and gate [N, W]; a row is W / G groups of G with norms of their own; weight [G] */
void gated_norm_forward(int N, int W, int G, const float *x, const float *weight,
                        const float *gate, float eps, float *y)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int first = 0; first < W; first += G) {
            const float *v = x + (size_t)n * W + first, *z = gate + (size_t)n * W + first;
            float *to = y + (size_t)n * W + first, q = 0;
            for (int i = 0; i < G; i++)
                q += v[i] * v[i];
            float r = 1.0f / sqrtf(q / (float)G + eps);
            for (int i = 0; i < G; i++)
                to[i] = v[i] * r * weight[i] * sigmoid(z[i]);
        }
}

void gated_norm_backward(int N, int W, int G, const float *x, const float *weight,
                         const float *gate, float eps, const float *grad, float *dx, float *dw,
                         float *dgate)
{
#pragma omp parallel for schedule(static)
    for (int slot = 0; slot < SLOTS; slot++)
        for (int n = N * slot / SLOTS; n < N * (slot + 1) / SLOTS; n++)
            for (int first = 0; first < W; first += G) {
                size_t at = (size_t)n * W + first;
                const float *v = x + at, *z = gate + at, *g = grad + at;
                float q = 0, inner = 0, t[MAX_HIDDEN];
                for (int i = 0; i < G; i++)
                    q += v[i] * v[i];
                float r = 1.0f / sqrtf(q / (float)G + eps);
                for (int i = 0; i < G; i++) {
                    float m = sigmoid(z[i]);
                    t[i] = g[i] * m;
                    dw[slot * G + i] += t[i] * v[i] * r;
                    t[i] *= weight[i];
                    dgate[at + i] = t[i] * v[i] * r * (1 - m);
                    inner += t[i] * v[i];
                }
                inner *= r * r / (float)G;
                for (int i = 0; i < G; i++)
                    dx[at + i] = r * (t[i] - v[i] * inner);
            }
}

/* ---- SiTU ---------------------------------------------------------------------------------- */

/* both [N, 2 W], gate then up; y [N, W] */
void situ_forward(int N, int W, const float *both, float beta, float linear, float *y)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *g = both + (size_t)n * 2 * W, *u = g + W;
        for (int i = 0; i < W; i++)
            y[(size_t)n * W + i] =
                beta * tanhf(g[i] / beta) * sigmoid(g[i]) * linear * tanhf(u[i] / linear);
    }
}

void situ_backward(int N, int W, const float *both, float beta, float linear, const float *grad,
                   float *dboth)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *g = both + (size_t)n * 2 * W, *u = g + W;
        float *dg = dboth + (size_t)n * 2 * W, *du = dg + W;
        for (int i = 0; i < W; i++) {
            float a = tanhf(g[i] / beta), m = sigmoid(g[i]), b = tanhf(u[i] / linear);
            float d = grad[(size_t)n * W + i];
            dg[i] = d * linear * b * m * ((1 - a * a) + beta * a * (1 - m));
            du[i] = d * beta * a * m * (1 - b * b);
        }
    }
}

/* ---- experts ------------------------------------------------------------------------------- */

/* rows [R, W] = x[there[r]], zeros where there[r] is negative */
void spread(int R, int W, const float *x, const int *there, float *rows)
{
#pragma omp parallel for
    for (int r = 0; r < R; r++)
        if (there[r] < 0)
            memset(rows + (size_t)r * W, 0, sizeof(float) * W);
        else
            memcpy(rows + (size_t)r * W, x + (size_t)there[r] * W, sizeof(float) * W);
}

/* y [N, W] = sum_k weight[n, k] * rows[slot[n, k]] */
void gather(int N, int K, int W, const float *rows, const int *slot, const float *weight, float *y)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float *to = y + (size_t)n * W;
        memset(to, 0, sizeof(float) * W);
        for (int k = 0; k < K; k++) {
            const float *x = rows + (size_t)slot[n * K + k] * W;
            float m = weight ? weight[n * K + k] : 1.0f;
            for (int i = 0; i < W; i++)
                to[i] += m * x[i];
        }
    }
}

/* drows zero before; dweight [N, K] */
void gather_backward(int N, int K, int W, const float *rows, const int *slot, const float *weight,
                     const float *grad, float *drows, float *dweight)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *g = grad + (size_t)n * W;
        for (int k = 0; k < K; k++) {
            const float *x = rows + (size_t)slot[n * K + k] * W;
            float *to = drows + (size_t)slot[n * K + k] * W, m = weight[n * K + k], sum = 0;
            for (int i = 0; i < W; i++) {
                to[i] = m * g[i];
                sum += x[i] * g[i];
            }
            dweight[n * K + k] = sum;
        }
    }
}

/* ---- cross entropy ------------------------------------------------------------------------- */

/* loss [N]; logits [N, V] become the gradient of the mean loss */
void entropy(int N, int V, float *logits, const int *wanted, float *loss)
{
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float *x = logits + (size_t)n * V, top = x[0], sum = 0, at = x[wanted[n]];
        for (int i = 0; i < V; i++)
            top = x[i] > top ? x[i] : top;
        for (int i = 0; i < V; i++)
            sum += x[i] = expf(x[i] - top);
        loss[n] = logf(sum) + top - at;
        float scale = 1.0f / (sum * (float)N);
        for (int i = 0; i < V; i++)
            x[i] *= scale;
        x[wanted[n]] -= 1.0f / (float)N;
    }
}
