/* What a decode step computes, on CPUs, in float32: all of a decoder layer of the Llama family but the choice of who sees whom.

   Compiled by `native.py` with the machine's own C compiler (gcc >= 12 or clang). Activations are feature-major [F][ld]:
   a row is one feature of all N positions, ld >= N floats apart, a multiple of LANES, so that a lane is a position and
   W @ x reads every weight once, in the order it lies in memory. Heads are position-major [N][heads][D].

   Every sum belongs to one position or one query and runs in a fixed order, whatever stands beside it: no result depends on
   its neighbours, on their number or on the number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define TILE 16
/* Rows of a cache block, as in `blocks.py`. */
#define BLOCK 16
/* Elements below which waking other threads costs more than they save. */
#define SMALL 32768

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec8 __attribute__((vector_size(32)));
typedef double wide8 __attribute__((vector_size(64)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

static inline vec load(const float *p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

static inline vec splat(float x) { return x - (vec){0}; }

static inline vec blend(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

static inline float sum(vec v) {
  vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline float highest(vec v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int j = 0; j < half; j++) v[j] = v[j + half] > v[j] ? v[j + half] : v[j];
  return v[0];
}

static inline double wide_sum(vec v) {
  wide8 a = __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), wide8) +
            __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), wide8);
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* exp to 2 units in the last place; 0 below -87, saturated above 88; NaN stays NaN. */
static inline vec exp_vec(vec x) {
  vec low = splat(-87.0f), high = splat(88.0f);
  vec y = blend(x < low, low, blend(x > high, high, x));
  vec shifted = y * 1.44269504f + 12582912.0f;
  vec n = shifted - 12582912.0f;
  vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  ivec scale = ((ivec)shifted << 23) + 0x3f800000;
  return blend(x < low, splat(0.0f), p * (vec)scale);
}

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

/* A piece of a product whose sums stay in registers has this many vectors of columns at most, and by their number these rows. */
#ifdef __AVX512F__
#define COLUMNS 6
#else
#define COLUMNS 1
#endif
#define TALLEST 12
static const int64_t TALL[COLUMNS + 1] = {0, COLUMNS == 1 ? 6 : 12,
#if COLUMNS > 1
                                          12, 8, 6, 5, 4
#endif
};
/* Terms summed before a piece of the sums goes back to memory, for few and for many columns: all of a matrix row as it streams by, or
   what of x fits the first cache. The order of the sum is the same. */
#define LONG 512
#define SHORT 128
#define STRIP 96

/* y [rows][columns * LANES] = w [rows][terms] @ x [terms][columns * LANES], added to what y holds where `more`. Where `ahead`, the rows
   below are fetched into the second cache on the way: the first has no room for them beside x. */
static inline __attribute__((always_inline)) void piece(const float *w, int64_t E, const float *x, int64_t ld, float *y, int64_t terms,
                                                        const int rows, const int columns, int more, int ahead) {
  vec sum[TALLEST][COLUMNS], v[COLUMNS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) sum[r][i] = more ? load(y + r * ld + i * LANES) : (vec){0};
  const float *w0 = w, *w3 = w + 3 * E, *w6 = w + 6 * E, *w9 = w + 9 * E;
#define ROW(r, at)                                                                        \
  if (rows > r) {                                                                         \
    float weight = at;                                                                    \
    _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) sum[r][i] += v[i] * weight; \
  }
#define TERM(j)                                                                               \
  _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) v[i] = load(x + i * LANES);       \
  x += ld;                                                                                    \
  ROW(0, w0[j]) ROW(1, w0[j + E]) ROW(2, w0[j + 2 * E]) ROW(3, w3[j]) ROW(4, w3[j + E]) ROW(5, w3[j + 2 * E]) \
  ROW(6, w6[j]) ROW(7, w6[j + E]) ROW(8, w6[j + 2 * E]) ROW(9, w9[j]) ROW(10, w9[j + E]) ROW(11, w9[j + 2 * E])
  int64_t k = 0;
  for (; k + LANES <= terms; k += LANES) {
    if (ahead)
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) __builtin_prefetch(w + (rows + r) * E + k, 0, 2);
#pragma GCC unroll 2
    for (int j = 0; j < LANES; j++) { TERM(j) }
    w0 += LANES, w3 += LANES, w6 += LANES, w9 += LANES;
  }
  for (int j = 0; k < terms; k++, j++) { TERM(j) }
#undef TERM
#undef ROW
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) store(y + r * ld + i * LANES, sum[r][i]);
}

static inline __attribute__((always_inline)) void strip(const float *w, int64_t E, const float *x, int64_t ld, float *y, int64_t terms,
                                                        int64_t rows, const int tall, const int columns, int more, int ahead) {
  int64_t r = 0;
  for (; r + tall <= rows; r += tall) piece(w + r * E, E, x, ld, y + r * ld, terms, tall, columns, more, ahead);
  for (; r + 2 <= rows; r += 2) piece(w + r * E, E, x, ld, y + r * ld, terms, 2, columns, more, 0);
  for (; r < rows; r++) piece(w + r * E, E, x, ld, y + r * ld, terms, 1, columns, more, 0);
}

/* Vectors of the next columns, of so many left: as even as pieces can be. */
static inline int64_t wide(int64_t left) {
  int64_t rest = (left + COLUMNS - 1) / COLUMNS;
  return (left + rest - 1) / rest;
}

/* y [F][ld] = weight [F][E] @ x [E][ld], added to what y holds where `add`; N columns, rounded up to whole vectors. */
static void product(const float *weight, const float *x, float *y, int64_t F, int64_t E, int64_t N, int64_t ld, int add) {
  int64_t vectors = (N + LANES - 1) / LANES, span = vectors <= 8 ? LONG : SHORT;
  int64_t strips = (F + STRIP - 1) / STRIP, threads = omp_get_max_threads();
  int64_t unit = TALL[wide(vectors)] < 6 ? TALL[wide(vectors)] : 6;
  strips = (strips + threads - 1) / threads * threads;
  int64_t height = ((F + strips - 1) / strips + unit - 1) / unit * unit;
#pragma omp parallel for schedule(static) if (F * E * N > 8 * SMALL)
  for (int64_t f = 0; f < F; f += height) {
    int64_t rows = F - f < height ? F - f : height;
    for (int64_t k = 0; k < E; k += span) {
      int64_t terms = E - k < span ? E - k : span;
      for (int64_t n = 0, columns; n < vectors; n += columns) {
        const float *w = weight + f * E + k, *from = x + k * ld + n * LANES;
        float *to = y + f * ld + n * LANES;
        int more = add || k, ahead = n == 0;
        columns = wide(vectors - n);
        switch (columns) {
#define CASE(c) \
  case c: strip(w, E, from, ld, to, terms, rows, TALL[c], c, more, ahead); break;
          CASE(1)
#if COLUMNS > 1
          CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
        }
      }
    }
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

/* Rows from rows[t] on that lie one after the other in the same block. */
static inline int64_t run(const int64_t *rows, int64_t t, int64_t count) {
  int64_t most = BLOCK - rows[t] % BLOCK;
  if (most > count - t) most = count - t;
  return rows[t + most - 1] == rows[t] + most - 1 ? most : 1;
}

/* Where head k of a row lies in a pool [block][K][BLOCK][D]. */
static inline int64_t place(int64_t row, int64_t k, int64_t K, int64_t D) { return ((row / BLOCK * K + k) * BLOCK + row % BLOCK) * D; }

/* score[t] = scale * q . keys[rows[t]]; `score` has room for BLOCK more. */
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

/* exp of LANES log-probs from n on, 0 behind the last. */
static inline vec probabilities(const float *row, int64_t n, int64_t V) {
  float tail[LANES];
  if (n + LANES <= V) return exp_vec(load(row + n));
  for (int64_t j = 0; j < LANES; j++) tail[j] = n + j < V ? row[n + j] : -INFINITY;
  return exp_vec(load(tail));
}

/* ids[b]: the first token of row b, log-probs [B][V], whose cumulative probability exceeds uniform[b] times the total; never one of
   probability zero. Sums are double, LANES at a time in order of ids. Returns how many rows have no finite positive total. */
int64_t pick(const float *logp, const double *uniform, int64_t *ids, int64_t B, int64_t V) {
  int64_t failed = 0;
#pragma omp parallel for reduction(+ : failed) if (B * V > SMALL)
  for (int64_t b = 0; b < B; b++) {
    const float *row = logp + b * V;
    double total = 0, sum = 0;
    for (int64_t n = 0; n < V; n += LANES) total += wide_sum(probabilities(row, n, V));
    double target = uniform[b] * total, most = nextafter(total, 0);
    target = target < most ? target : most;
    ids[b] = 0;
    failed += !(total > 0 && total < INFINITY);
    for (int64_t n = 0; n < V; n += LANES) {
      vec p = probabilities(row, n, V);
      double next = sum + wide_sum(p);
      if (next > target) {
        for (int64_t j = 0; j < LANES && sum <= target; j++) {
          sum += (double)p[j];
          if (p[j] > 0) ids[b] = n + j;
        }
        break;
      }
      sum = next;
    }
  }
  return failed;
}

/* Sizes of a decoder: hidden width, features between gate and up, query heads, key-value heads, head width. */
struct sizes {
  int64_t E, F, H, K, D;
};

/* Weights of a layer; a bias or a norm of heads that it has not is null. */
struct layer {
  const float *before, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *after, *gate_up, *down;
  float before_eps, head_eps, after_eps;
};

/* Memory of one forward pass over N positions: x is the residual stream, `heads` what attention takes, `seen` what it gives. */
struct pass {
  float *x, *normed, *qkv, *seen, *both, *inner, *heads;
  const float *cosine, *sine;
  const int64_t *ids, *positions;
  int64_t N, ld;
};

void begin(const struct sizes *s, const struct pass *p, const float *table) { embed(table, p->ids, p->x, p->N, p->ld, s->E); }

/* The first half of a layer, up to attention. */
void before(const struct sizes *s, const struct layer *l, const struct pass *p) {
  rms(p->x, l->before, l->before_eps, p->normed, p->N, p->ld, s->E, 0);
  product(l->qkv, p->normed, p->qkv, (s->H + 2 * s->K) * s->D, s->E, p->N, p->ld, 0);
  heads(p->qkv, l->qkv_bias, l->q_norm, l->k_norm, l->head_eps, p->cosine, p->sine, p->positions, p->heads, p->N, p->ld, s->H, s->K, s->D);
}

/* The second half, given what attention saw: position-major [N][H][D]. */
void after(const struct sizes *s, const struct layer *l, const struct pass *p, const float *attended) {
  int64_t width = s->H * s->D;
  transpose(attended, p->seen, p->N, p->ld, width);
  product(l->out, p->seen, p->x, s->E, width, p->N, p->ld, 1);
  if (l->out_bias)
    for (int64_t f = 0; f < s->E; f++)
      for (int64_t n = 0; n < p->ld; n++) p->x[f * p->ld + n] += l->out_bias[f];
  rms(p->x, l->after, l->after_eps, p->normed, p->N, p->ld, s->E, 0);
  product(l->gate_up, p->normed, p->both, 2 * s->F, s->E, p->N, p->ld, 0);
  swiglu(p->both, p->inner, p->ld, s->F);
  product(l->down, p->inner, p->x, s->E, s->F, p->N, p->ld, 1);
}

/* out [N][E]: the last norm. */
void end(const struct sizes *s, const struct pass *p, const float *norm, float eps, float *out) {
  rms(p->x, norm, eps, out, p->N, p->ld, s->E, 1);
}
