/* kda.c: Kimi Delta Attention's own steps: short convolution, decay gate, delta rule. */
#include "elementary.h"

enum { CONV_WIDE = 16 };

/* `wide` channels from c on; their taps are turned around first: channels are then contiguous. */
KIMI_INLINE void conv_channels(const float *x, int64_t count, int64_t channels, int64_t c, int wide,
                               int64_t taps, const float *w, const float *history, float *y) {
    float turned[KIMI_MAX_TAPS][CONV_WIDE];
    int64_t past = taps - 1;
    for (int l = 0; l < wide; l++)
        for (int64_t j = 0; j < taps; j++) turned[j][l] = w[(c + l) * taps + j];
    for (int64_t t = 0; t < count; t++) {
        float sum[CONV_WIDE] = {0.0f}, *out = y + t * channels + c;
        for (int64_t j = 0; j < taps; j++) {
            int64_t at = t + j - past;
            const float *v = (at < 0 ? history + (past + at) * channels : x + at * channels) + c;
            for (int l = 0; l < wide; l++) sum[l] = fmaf(turned[j][l], v[l], sum[l]);
        }
        for (int l = 0; l < wide; l++) out[l] = sum[l] * elementary_sigmoid(sum[l]);
    }
}

/* Channels [lo, hi). history and x are rows of `channels` floats. */
KIMI_TARGET void KIMI_FN(conv)(const float *x, int64_t count, int64_t channels, int64_t lo,
                               int64_t hi, int64_t taps, const float *w, float *history,
                               float *y) {
    int64_t past = taps - 1, c = lo;
    for (; c + CONV_WIDE <= hi; c += CONV_WIDE)
        conv_channels(x, count, channels, c, CONV_WIDE, taps, w, history, y);
    for (; c < hi; c++) conv_channels(x, count, channels, c, 1, taps, w, history, y);
    for (int64_t j = 0; j < past; j++) { /* ascending: reads stay ahead of writes */
        int64_t at = count + j - past;
        const float *from = at < 0 ? history + (past + at) * channels : x + at * channels;
        memmove(history + j * channels + lo, from + lo, (size_t)(hi - lo) * sizeof *history);
    }
}

KIMI_TARGET void KIMI_FN(decay)(const float *z, int64_t dim, float a_log, const float *dt_bias,
                                float lower_bound, float *y) {
    float a = elementary_exp(a_log);
    for (int64_t i = 0; i < dim; i++) {
        float gate = lower_bound * elementary_sigmoid(a * (z[i] + dt_bias[i]));
        y[i] = elementary_exp(gate);
    }
}

KIMI_TARGET void KIMI_FN(delta)(float *state, int64_t dim, const float *q, const float *k,
                                const float *v, const float *decay, float beta, float *o) {
    float d[KIMI_MAX_DIM];
    memset(d, 0, (size_t)dim * sizeof *d);
    for (int64_t i = 0; i < dim; i++) {
        float *s = state + i * dim, f = decay[i], ki = k[i];
        for (int64_t j = 0; j < dim; j++) {
            s[j] = s[j] * f;
            d[j] = fmaf(s[j], ki, d[j]);
        }
    }
    for (int64_t j = 0; j < dim; j++) d[j] = beta * (v[j] - d[j]);
    memset(o, 0, (size_t)dim * sizeof *o);
    for (int64_t i = 0; i < dim; i++) {
        float *s = state + i * dim, qi = q[i], ki = k[i];
        for (int64_t j = 0; j < dim; j++) {
            s[j] = fmaf(ki, d[j], s[j]);
            o[j] = fmaf(s[j], qi, o[j]);
        }
    }
}
