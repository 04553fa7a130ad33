/* The sums of `fingerprint.py`, modulo 2**64: their order does not matter, so threads and vectors change no bit. */

#include <stdint.h>

/* words [R][n] -> out [2][R]: the sum of each word times its weight, then of the high half of each word (with its sign) times `high`. */
void digest_rows(const int64_t *words, const uint64_t *weights, const uint64_t *high, uint64_t *out, int64_t R, int64_t n) {
#pragma omp parallel for if (R * n > SMALL)
  for (int64_t r = 0; r < R; r++) {
    const int64_t *row = words + r * n;
    uint64_t whole = 0, upper = 0;
    for (int64_t i = 0; i < n; i++) {
      whole += (uint64_t)row[i] * weights[i];
      upper += (uint64_t)(row[i] >> 32) * high[i];
    }
    out[r] = whole;
    out[R + r] = upper;
  }
}
