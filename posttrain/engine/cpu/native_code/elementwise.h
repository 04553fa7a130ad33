/* Between the products of a layer: embedding, norms, the gate, heads and their rotation. */

#pragma once

#include "vectors.h"

/* out[f][n] = table[ids[n]][f] */
static void embed(const float *table, const int64_t *ids, float *out, int64_t N, int64_t ld, int64_t E) {
#pragma omp parallel for if (N * E > SMALL)
  for (int64_t n0 = 0; n0 < N; n0 += TILE) {
    int64_t end = n0 + TILE < N ? n0 + TILE : N;
    for (int64_t f = 0; f < E; f++)
      for (int64_t n = n0; n < end; n++) out[f * ld + n] = table[ids[n] * E + f];
  }
}

/* out[f][n] = in[n][f] */
static void transpose(const float *in, float *out, int64_t N, int64_t ld, int64_t E) {
#pragma omp parallel for if (N * E > SMALL)
  for (int64_t f0 = 0; f0 < E; f0 += TILE) {
    int64_t last = f0 + TILE < E ? f0 + TILE : E;
    for (int64_t n0 = 0; n0 < N; n0 += TILE) {
      int64_t end = n0 + TILE < N ? n0 + TILE : N;
      for (int64_t f = f0; f < last; f++)
        for (int64_t n = n0; n < end; n++) out[f * ld + n] = in[n * E + f];
    }
  }
}

/* out = x / rms(x) * weight; position-major [N][E] where `rows`, else feature-major. */
static void rms(const float *x, const float *weight, float eps, float *out, int64_t N, int64_t ld, int64_t E, int64_t rows) {
#pragma omp parallel for if (N * E > SMALL)
  for (int64_t n = 0; n < N; n += LANES) {
    vec squares = {0};
    for (int64_t f = 0; f < E; f++) {
      vec v = load(x + f * ld + n);
      squares += v * v;
    }
    float scale[LANES];
    squares = squares * (1.0f / (float)E) + eps;
    for (int64_t j = 0; j < LANES; j++) scale[j] = 1.0f / sqrtf(squares[j]);
    vec factor = load(scale);
    if (!rows) {
      for (int64_t f = 0; f < E; f++) store(out + f * ld + n, load(x + f * ld + n) * factor * weight[f]);
      continue;
    }
    int64_t end = n + LANES < N ? LANES : N - n;
    for (int64_t f = 0; f < E; f++) {
      vec v = load(x + f * ld + n) * factor * weight[f];
      for (int64_t j = 0; j < end; j++) out[(n + j) * E + f] = v[j];
    }
  }
}

/* inner = silu(gate) * up, the two one below the other. */
static void swiglu(const float *both, float *inner, int64_t ld, int64_t F) {
  int64_t size = F * ld;
#pragma omp parallel for if (size > SMALL)
  for (int64_t i = 0; i < size; i += LANES) {
    vec gate = load(both + i), up = load(both + size + i);
    store(inner + i, gate / (1.0f + exp_vec(-gate)) * up);
  }
}

/* Feature-major qkv [(H + 2 K) * D][ld] to position-major heads [N][H + 2 K][D], on the way: bias, norm of queries and keys,
   rotation x * cos + roll(x, D / 2) * sin. `bias`, `q_norm`, `k_norm` may be null. */
static void heads(const float *qkv, const float *bias, const float *q_norm, const float *k_norm, float eps, const float *cosine, const float *sine,
           const int64_t *positions, float *out, int64_t N, int64_t ld, int64_t H, int64_t K, int64_t D) {
  int64_t all = H + 2 * K, half = D / 2;
#pragma omp parallel for collapse(2) if (N * all * D > SMALL)
  for (int64_t n0 = 0; n0 < N; n0 += TILE) {
    for (int64_t h = 0; h < all; h++) {
      int64_t count = n0 + TILE < N ? TILE : N - n0;
      float tile[TILE * D];
      for (int64_t d = 0; d < D; d++) {
        const float *row = qkv + (h * D + d) * ld + n0;
        float b = bias ? bias[h * D + d] : 0.0f;
        for (int64_t j = 0; j < TILE; j++) tile[j * D + d] = row[j] + b;
      }
      const float *norm = h < H ? q_norm : k_norm;
      for (int64_t j = 0; j < count; j++) {
        float *x = tile + j * D, *to = out + ((n0 + j) * all + h) * D;
        if (h >= H + K) {
          memcpy(to, x, D * sizeof(float));
          continue;
        }
        if (norm) {
          float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
          for (int64_t d = 0; d < D; d++) squares += x[d] * x[d];
          float scale = 1.0f / sqrtf(squares / (float)D + eps);
          for (int64_t d = 0; d < D; d++) x[d] *= scale * norm[d];
        }
        const float *c = cosine + positions[n0 + j] * D, *s = sine + positions[n0 + j] * D;
        for (int64_t d = 0; d < half; d++) to[d] = x[d] * c[d] + x[d + half] * s[d];
        for (int64_t d = half; d < D; d++) to[d] = x[d] * c[d] + x[d - half] * s[d];
      }
    }
  }
}
