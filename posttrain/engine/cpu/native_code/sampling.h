/* One token a row, by one uniform each. */

#pragma once

#include "vectors.h"

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
    double target = uniform[b] * total, most = nextafter(total, 0); /* below the total, or no sum would exceed it */
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
