/* The softmax over tiles of scores z [C][B] of a head: what is kept of a tile, and its gradient (`engine/head/tiles.py`). Each row is computed
   by itself in a fixed order. */

#pragma once

#include "vectors.h"
#include <float.h>

/* Below this distance from the largest score a probability is 0 (`exp_vec`). */
#define FAR -88.0f

/* z - by, no less than FAR, so that 0 times it is 0 where a token cannot be said; NaN stays NaN. */
static inline vec below(vec z, vec by) {
  vec q = z - by;
  return blend(q < FAR, splat(FAR), q);
}

/* Lanes i to i + LANES of a row of B scores; those behind its end are -inf. */
static inline vec of_row(const float *z, int64_t i, int64_t B) {
  if (i + LANES <= B) return load(z + i);
  vec v = splat(-INFINITY);
  memcpy(&v, z + i, (B - i) * sizeof(float));
  return v;
}

/* m, S and U of every row; U only where `spread` is given. */
void fold_rows(const float *z, float *most, float *mass, float *spread, int64_t C, int64_t B) {
#pragma omp parallel for if (C * B > SMALL)
  for (int64_t n = 0; n < C; n++) {
    const float *row = z + n * B;
    vec top = splat(-FLT_MAX), s = {0}, u = {0};
    for (int64_t i = 0; i < B; i += LANES) {
      vec v = of_row(row, i, B);
      top = blend(v > top, v, top);
    }
    float m = highest(top);
    for (int64_t i = 0; i < B; i += LANES) {
      vec q = below(of_row(row, i, B), splat(m)), p = exp_vec(q);
      s += p;
      if (spread) u += p * q;
    }
    most[n] = m;
    mass[n] = sum(s);
    if (spread) spread[n] = sum(u);
  }
}

/* to = -(total + by_entropy (q + entropy)) exp(q) with q = z - norm; without `by_entropy`: -total exp(q). `to` may be z. */
void cotangent_rows(const float *z, const float *norm, const float *total, const float *by_entropy, const float *entropy, float *to, int64_t C,
                    int64_t B) {
#pragma omp parallel for if (C * B > SMALL)
  for (int64_t n = 0; n < C; n++) {
    vec by = splat(total[n]);
    for (int64_t i = 0; i < B; i += LANES) {
      vec q = below(of_row(z + n * B, i, B), splat(norm[n])), p = exp_vec(q);
      vec d = by_entropy ? -(by + by_entropy[n] * (q + entropy[n])) * p : -by * p;
      memcpy(to + n * B + i, &d, (i + LANES <= B ? LANES : B - i) * sizeof(float));
    }
  }
}
