/* Weights times activations: W @ x over feature-major x, with the sums of a piece in registers. */

#pragma once

#include "vectors.h"

/* A vector of columns is one register of the processor: a compiler that has to split wider ones keeps sums in memory.
   A piece of a product, whose sums stay in registers, has this many vectors of columns at most, and by their number these rows. */
#ifdef __AVX512F__
#define WIDTH 16
#define COLUMNS 6
#else
#define WIDTH 8
#define COLUMNS 2
#endif
#define TALLEST 12
static const int64_t TALL[COLUMNS + 1] = {0,
#if COLUMNS > 2
                                          12, 12, 8, 6, 5, 4
#else
                                          6, 6
#endif
};
typedef float reg __attribute__((vector_size(4 * WIDTH)));

static inline reg load_reg(const float *p) {
  reg v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store_reg(float *p, reg v) { memcpy(p, &v, sizeof v); }

static inline reg added(reg sum, reg v, float weight) { return sum + v * weight; }

/* Terms summed before a piece of the sums goes back to memory, for few and for many columns: all of a matrix row as it streams by, or
   what of x fits the first cache. The order of the sum is the same. */
#define LONG 512
#define SHORT 64
#define STRIP 96

#define REG reg
#define WIDE WIDTH
#define LOAD load_reg
#define STORE store_reg
#define ADDED added
#define PIECE piece
#define STRIP_OF strip
#include "pieces.h"

/* The last columns, where half a vector holds them. A lane's sum is the same in both. */
#define HALF 8
#if WIDTH > HALF
#include <immintrin.h>

static inline vec8 load_half(const float *p) {
  vec8 v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void store_half(float *p, vec8 v) { memcpy(p, &v, sizeof v); }

/* Rounded once, as a whole vector's. Left to itself gcc multiplies two terms at once, and rounds before it adds. */
static inline vec8 added_half(vec8 sum, vec8 v, float weight) { return _mm256_fmadd_ps(v, _mm256_set1_ps(weight), sum); }

#define REG vec8
#define WIDE HALF
#define LOAD load_half
#define STORE store_half
#define ADDED added_half
#define PIECE half_piece
#define STRIP_OF half_strip
#include "pieces.h"
#endif

/* Vectors of the next columns, of so many left: as even as pieces can be. */
static inline int64_t wide(int64_t left) {
  int64_t rest = (left + COLUMNS - 1) / COLUMNS;
  return (left + rest - 1) / rest;
}

/* y [F][ld] = weight [F][E] @ x [E][ld], added to what y holds where `add`; N columns, rounded up to whole halves. Rows are cut into strips
   of `height`, a multiple of `unit`, so that threads have about equally many of them. */
static void product(const float *weight, const float *x, float *y, int64_t F, int64_t E, int64_t N, int64_t ld, int add) {
  int64_t halves = (N + HALF - 1) / HALF, vectors = halves / (WIDTH / HALF), span = halves * HALF <= 8 * LANES ? LONG : SHORT;
  int64_t strips = (F + STRIP - 1) / STRIP, threads = omp_get_max_threads();
  int64_t unit = vectors && TALL[wide(vectors)] < 6 ? TALL[wide(vectors)] : 6;
  strips = (strips + threads - 1) / threads * threads;
  int64_t height = ((F + strips - 1) / strips + unit - 1) / unit * unit;
#pragma omp parallel for schedule(static) if (F * E * N > 8 * SMALL)
  for (int64_t f = 0; f < F; f += height) {
    int64_t rows = F - f < height ? F - f : height;
    for (int64_t k = 0; k < E; k += span) {
      int64_t terms = E - k < span ? E - k : span;
      for (int64_t n = 0, columns; n < vectors; n += columns) {
        const float *w = weight + f * E + k, *from = x + k * ld + n * WIDTH;
        float *to = y + f * ld + n * WIDTH;
        int more = add || k, ahead = n == 0;
        columns = wide(vectors - n);
        switch (columns) {
#define CASE(c) \
  case c: strip(w, E, from, ld, to, terms, rows, TALL[c], c, more, ahead); break;
          CASE(1) CASE(2)
#if COLUMNS > 2
          CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
        }
      }
#if WIDTH > HALF
      int64_t n = vectors * WIDTH;
      if (n < halves * HALF)
        half_strip(weight + f * E + k, E, x + k * ld + n, ld, y + f * ld + n, terms, rows, TALL[1], 1, add || k, !n);
#endif
    }
  }
}
