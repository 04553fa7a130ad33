/* Vectors of LANES floats, in the extensions that gcc and clang share, and what is done to them everywhere. */

#pragma once

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define TILE 16
/* Rows of a cache block, as in `cache_blocks.py`. */
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

/* exp to 2 units in the last place; 0 below -87, saturated above 88; NaN stays NaN. exp(x) = 2^n exp(r): adding 1.5 * 2^23 rounds x / ln 2
   to the whole number n, r = x - n ln 2 takes ln 2 in two parts, and the polynomial (that of Cephes) is exp(r). */
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

/* out[j] = factor times lane j of the sixteen rows from `in` on, `ld` floats apart; rows of `out` are `apart` floats apart. */
static inline void transpose_tile(const float *in, int64_t ld, float factor, float *out, int64_t apart) {
  vec a[LANES], b[LANES];
  for (int j = 0; j < LANES; j++) a[j] = load(in + j * ld) * factor;
  for (int round = 0; round < 2; round++) {
#define ZIP(from, to)                                                                                                          \
  for (int j = 0; j < LANES / 2; j++) {                                                                                        \
    to[2 * j] = __builtin_shufflevector(from[j], from[j + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);         \
    to[2 * j + 1] = __builtin_shufflevector(from[j], from[j + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); \
  }
    ZIP(a, b)
    ZIP(b, a)
#undef ZIP
  }
  for (int j = 0; j < LANES; j++) store(out + j * apart, a[j]);
}
