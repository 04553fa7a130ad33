/* Attention of each query over its own rows of a paged cache. */

#pragma once

#include "vectors.h"

/* Lane j of the result is the sum of the lanes of v[j]. */
static inline vec sums(vec v[BLOCK]) {
#define PAIR(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
  for (int j = 0; j < 8; j++)
    v[j] = PAIR(v[j], v[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PAIR(v[j], v[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int j = 0; j < 4; j++)
    v[j] = PAIR(v[j], v[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           PAIR(v[j], v[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int j = 0; j < 2; j++)
    v[j] = PAIR(v[j], v[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           PAIR(v[j], v[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return PAIR(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         PAIR(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#undef PAIR
}

/* Rows from rows[t] on that lie one after the other in the same block. The last is enough to see it: a sequence fills blocks in order. */
static inline int64_t run(const int64_t *rows, int64_t t, int64_t count) {
  int64_t most = BLOCK - rows[t] % BLOCK;
  if (most > count - t) most = count - t;
  return rows[t + most - 1] == rows[t] + most - 1 ? most : 1;
}

/* Where head k of a row lies in a pool [block][K][BLOCK][D]. */
static inline int64_t place(int64_t row, int64_t k, int64_t K, int64_t D) { return ((row / BLOCK * K + k) * BLOCK + row % BLOCK) * D; }

/* score[t] = scale * q . keys[rows[t]]; `score` has room for BLOCK more, because from a block's begin on all its rows are computed. */
static inline __attribute__((always_inline)) void dots(const float *q, const float *keys, int64_t k, int64_t K, const int64_t *rows,
                                                       int64_t count, int64_t D, float scale, float *score) {
  for (int64_t t = 0; t < count;) {
    const float *key = keys + place(rows[t], k, K, D);
    int64_t n = run(rows, t, count);
    if (rows[t] % BLOCK == 0 && D % LANES == 0) {
      vec a[BLOCK];
      for (int j = 0; j < BLOCK; j++) {
        a[j] = load(q) * load(key + j * D);
        for (int64_t d = LANES; d < D; d += LANES) a[j] += load(q + d) * load(key + j * D + d);
      }
      store(score + t, sums(a) * scale);
    } else {
      for (int64_t j = 0; j < n; j++) {
        float s = 0.0f;
        for (int64_t d = 0; d < D; d++) s += q[d] * key[j * D + d];
        score[t + j] = s * scale;
      }
    }
    t += n;
  }
}

/* `vectors` * LANES columns of out = factor * sum over t of weight[t] * values[rows[t]] */
static inline __attribute__((always_inline)) void mix_columns(const float *weight, const float *values, int64_t k, int64_t K,
                                                              const int64_t *rows, int64_t count, int64_t D, int64_t d, int vectors,
                                                              float factor, float *out) {
  vec a[4] = {{0}};
  for (int64_t t = 0; t < count;) {
    const float *value = values + place(rows[t], k, K, D) + d;
    int64_t n = run(rows, t, count);
    for (int64_t j = 0; j < n; j++)
      for (int i = 0; i < vectors; i++) a[i] += load(value + j * D + i * LANES) * weight[t + j];
    t += n;
  }
  for (int i = 0; i < vectors; i++) store(out + d + i * LANES, a[i] * factor);
}

static inline __attribute__((always_inline)) void mix(const float *weight, const float *values, int64_t k, int64_t K, const int64_t *rows,
                                                      int64_t count, int64_t D, float factor, float *out) {
  int64_t d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES) mix_columns(weight, values, k, K, rows, count, D, d, 4, factor, out);
  for (; d + 2 * LANES <= D; d += 2 * LANES) mix_columns(weight, values, k, K, rows, count, D, d, 2, factor, out);
  for (; d + LANES <= D; d += LANES) mix_columns(weight, values, k, K, rows, count, D, d, 1, factor, out);
  for (; d < D; d++) {
    float a = 0.0f;
    for (int64_t t = 0; t < count; t++) a += values[place(rows[t], k, K, D) + d] * weight[t];
    out[d] = a * factor;
  }
}

/* Scores to exp(score - max), in place; returns one over their sum. `score` has room for whole vectors. */
static inline float softmax(float *score, int64_t count, float softcap) {
  for (int64_t t = count; t % LANES; t++) score[t] = -INFINITY;
  if (softcap > 0)
    for (int64_t t = 0; t < count; t++) score[t] = softcap * tanhf(score[t] / softcap);
  vec most = load(score), total = {0};
  for (int64_t t = LANES; t < count; t += LANES) {
    vec s = load(score + t);
    most = blend(s > most, s, most);
  }
  float top = highest(most);
  for (int64_t t = 0; t < count; t += LANES) {
    vec e = exp_vec(load(score + t) - top);
    store(score + t, e);
    total += e;
  }
  return 1.0f / sum(total);
}

/* Store keys and values of the first `stored` positions, [n][K][D] with the given strides, in rows of the pool
   ([block][K][BLOCK][D]); then attention of each query over its own rows, the last `window` of them where window > 0.

   queries [B][H][Dk] with strides, out [B][H][Dv]; `visible` holds the rows of query after query, lengths[b] from starts[b];
   a query that sees nothing gets zeros. Returns 0, or 1 where memory ran out. */
int64_t attend(float *keys, float *values, const float *key, int64_t key_n, int64_t key_h, const float *value, int64_t value_n, int64_t value_h,
               const int64_t *to, int64_t stored, const float *query, int64_t query_n, int64_t query_h, const int64_t *visible,
               const int64_t *starts, const int64_t *lengths, float *out, int64_t B, int64_t H, int64_t K, int64_t Dk, int64_t Dv,
               int64_t window, float scale, float softcap) {
  int64_t groups = H / K, longest = 0, work = 0, failed = 0;
  for (int64_t b = 0; b < B; b++) {
    longest = lengths[b] > longest ? lengths[b] : longest;
    work += lengths[b] * H * Dk;
  }
  longest = (longest / LANES + 2) * LANES;
#pragma omp parallel if (work > SMALL)
  {
    float *score = aligned_alloc(64, longest * sizeof(float));
    if (!score) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for
    for (int64_t n = 0; n < stored; n++) {
      for (int64_t k = 0; k < K; k++) {
        memcpy(keys + place(to[n], k, K, Dk), key + n * key_n + k * key_h, Dk * sizeof(float));
        memcpy(values + place(to[n], k, K, Dv), value + n * value_n + k * value_h, Dv * sizeof(float));
      }
    }
#pragma omp for collapse(2) schedule(dynamic, 4)
    for (int64_t b = 0; b < B; b++) {
      for (int64_t k = 0; k < K; k++) {
        if (!score) continue;
        int64_t count = window > 0 && lengths[b] > window ? window : lengths[b];
        const int64_t *rows = visible + starts[b] + lengths[b] - count;
        for (int64_t h = k * groups; h < (k + 1) * groups; h++) {
          const float *q = query + b * query_n + h * query_h;
          float *o = out + (b * H + h) * Dv;
          if (!count) {
            memset(o, 0, Dv * sizeof(float));
            continue;
          }
          switch (Dk) {
            case 32: dots(q, keys, k, K, rows, count, 32, scale, score); break;
            case 64: dots(q, keys, k, K, rows, count, 64, scale, score); break;
            case 128: dots(q, keys, k, K, rows, count, 128, scale, score); break;
            default: dots(q, keys, k, K, rows, count, Dk, scale, score);
          }
          float factor = softmax(score, count, softcap);
          mix(score, values, k, K, rows, count, Dv, factor, o);
        }
      }
    }
    free(score);
  }
  return failed;
}
