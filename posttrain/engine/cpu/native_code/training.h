/* What a learner computes between the products of a layer, forward and backward, over position-major rows [N][E].

   Every row is computed by itself in a fixed order. Gradients of weights are summed over chunks of CHUNK rows, and the caller adds
   the chunks in order, so that no result depends on the number of threads. */

#pragma once

#include "vectors.h"

#define CHUNK 256

/* The sum of a[i] * b[i] over E elements. */
static inline float dot_row(const float *a, const float *b, int64_t E) {
  vec s = {0};
  int64_t i = 0;
  for (; i + LANES <= E; i += LANES) s += load(a + i) * load(b + i);
  float t = sum(s);
  for (; i < E; i++) t += a[i] * b[i];
  return t;
}

/* The sum of a[i] * b[i] * c[i] over E elements. */
static inline float dot3_row(const float *a, const float *b, const float *c, int64_t E) {
  vec s = {0};
  int64_t i = 0;
  for (; i + LANES <= E; i += LANES) s += load(a + i) * load(b + i) * load(c + i);
  float t = sum(s);
  for (; i < E; i++) t += a[i] * b[i] * c[i];
  return t;
}

static inline float inverse_rms(const float *x, float eps, int64_t E) { return 1.0f / sqrtf(dot_row(x, x, E) / (float)E + eps); }

/* dx of x * inverse * weight for the gradient g of its result; adds g * x * inverse to dw. dx may be g. */
static inline void rms_row_back(const float *g, const float *x, const float *weight, float inverse, float *dx, float *dw, int64_t E) {
  float pull = dot3_row(g, x, weight, E) * inverse * inverse / (float)E;
  int64_t i = 0;
  for (; i + LANES <= E; i += LANES) {
    vec grad = load(g + i), here = load(x + i);
    store(dw + i, load(dw + i) + grad * here * inverse);
    store(dx + i, (grad * load(weight + i) - here * pull) * inverse);
  }
  for (; i < E; i++) {
    float grad = g[i], here = x[i];
    dw[i] += grad * here * inverse;
    dx[i] = (grad * weight[i] - here * pull) * inverse;
  }
}

/* out = x * inverse * weight, inverse[n] = 1 / rms(x[n]). */
void rms_rows(const float *x, const float *weight, float eps, float *out, float *inverse, int64_t N, int64_t E) {
#pragma omp parallel for if (N * E > SMALL)
  for (int64_t n = 0; n < N; n++) {
    const float *from = x + n * E;
    float *to = out + n * E, factor = inverse_rms(from, eps, E);
    for (int64_t i = 0; i < E; i++) to[i] = from[i] * factor * weight[i];
    inverse[n] = factor;
  }
}

/* dw [chunks][E]: the gradient of the weight by chunks of CHUNK rows. */
void rms_rows_back(const float *g, const float *x, const float *weight, const float *inverse, float *dx, float *dw, int64_t N, int64_t E) {
#pragma omp parallel for if (N * E > SMALL)
  for (int64_t c = 0; c < (N + CHUNK - 1) / CHUNK; c++) {
    memset(dw + c * E, 0, E * sizeof(float));
    for (int64_t n = c * CHUNK; n < N && n < (c + 1) * CHUNK; n++)
      rms_row_back(g + n * E, x + n * E, weight, inverse[n], dx + n * E, dw + c * E, E);
  }
}

/* x [N][H][D] -> its heads, normed where `weight` is given, then rotated: y * cos + roll(y) * sin, where the first half of roll(y) is
   minus the second half of y. cosine, sine [N][D]; inverse [N][H] only with a weight. */
void heads_rows(const float *x, const float *weight, float eps, const float *cosine, const float *sine, float *out, float *inverse, int64_t N,
                int64_t H, int64_t D) {
  int64_t half = D / 2;
#pragma omp parallel for if (N * H * D > SMALL)
  for (int64_t n = 0; n < N; n++) {
    const float *c = cosine + n * D, *s = sine + n * D;
    for (int64_t h = 0; h < H; h++) {
      const float *from = x + (n * H + h) * D;
      float *to = out + (n * H + h) * D, y[D];
      if (weight) {
        float factor = inverse_rms(from, eps, D);
        inverse[n * H + h] = factor;
        for (int64_t d = 0; d < D; d++) y[d] = from[d] * factor * weight[d];
        from = y;
      }
      for (int64_t d = 0; d < half; d++) to[d] = from[d] * c[d] - from[d + half] * s[d];
      for (int64_t d = half; d < D; d++) to[d] = from[d] * c[d] + from[d - half] * s[d];
    }
  }
}

/* dx of `heads_rows`: the rotation back, then the norm's gradient; dw [chunks][D] as in `rms_rows_back`. */
void heads_rows_back(const float *g, const float *x, const float *weight, const float *inverse, const float *cosine, const float *sine, float *dx,
                     float *dw, int64_t N, int64_t H, int64_t D) {
  int64_t half = D / 2;
#pragma omp parallel for if (N * H * D > SMALL)
  for (int64_t chunk = 0; chunk < (N + CHUNK - 1) / CHUNK; chunk++) {
    if (weight) memset(dw + chunk * D, 0, D * sizeof(float));
    for (int64_t n = chunk * CHUNK; n < N && n < (chunk + 1) * CHUNK; n++) {
      const float *c = cosine + n * D, *s = sine + n * D;
      for (int64_t h = 0; h < H; h++) {
        int64_t at = (n * H + h) * D;
        const float *grad = g + at;
        float *to = dx + at;
        for (int64_t d = 0; d < half; d++) to[d] = grad[d] * c[d] + grad[d + half] * s[d + half];
        for (int64_t d = half; d < D; d++) to[d] = grad[d] * c[d] - grad[d - half] * s[d - half];
        if (weight) rms_row_back(to, x + at, weight, inverse[n * H + h], to, dw + chunk * D, D);
      }
    }
  }
}

/* out = silu(gate) * up over `size` elements. */
void gate_rows(const float *gate, const float *up, float *out, int64_t size) {
  int64_t whole = size / LANES * LANES;
#pragma omp parallel for if (size > SMALL)
  for (int64_t i = 0; i < whole; i += LANES) {
    vec a = load(gate + i);
    store(out + i, a / (1.0f + exp_vec(-a)) * load(up + i));
  }
  for (int64_t i = whole; i < size; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* With s = 1 / (1 + exp(-a)), `share`: silu(a) = a s, and its derivative is s (1 + a (1 - s)). */
void gate_rows_back(const float *g, const float *gate, const float *up, float *dgate, float *dup, int64_t size) {
  int64_t whole = size / LANES * LANES;
#pragma omp parallel for if (size > SMALL)
  for (int64_t i = 0; i < whole; i += LANES) {
    vec a = load(gate + i), grad = load(g + i), share = 1.0f / (1.0f + exp_vec(-a));
    store(dup + i, grad * a * share);
    store(dgate + i, grad * load(up + i) * share * (1.0f + a * (1.0f - share)));
  }
  for (int64_t i = whole; i < size; i++) {
    float share = 1.0f / (1.0f + expf(-gate[i]));
    dup[i] = g[i] * gate[i] * share;
    dgate[i] = g[i] * up[i] * share * (1.0f + gate[i] * (1.0f - share));
  }
}

/* to [E][N] = x [N][E] */
void transposed(const float *x, float *to, int64_t N, int64_t E) {
  int64_t whole = E / LANES * LANES;
#pragma omp parallel for schedule(static) if (N * E > SMALL)
  for (int64_t n = 0; n < N; n += LANES) {
    int64_t rows = N - n < LANES ? N - n : LANES, e = 0;
    if (rows == LANES)
      for (; e < whole; e += LANES) transpose_tile(x + n * E + e, E, 1.0f, to + e * N + n, N);
    for (; e < E; e++)
      for (int64_t i = n; i < n + rows; i++) to[e * N + i] = x[i * E + e];
  }
}
