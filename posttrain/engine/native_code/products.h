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

/* Terms summed before a piece of the sums goes back to memory, for few and for many columns: all of a matrix row as it streams by, or
   what of x fits the first cache. The order of the sum is the same. */
#define LONG 512
#define SHORT 64
#define STRIP 96

/* y [rows][columns * WIDTH] = w [rows][terms] @ x [terms][columns * WIDTH], added to what y holds where `more`. Where `ahead`, the rows
   below are fetched into the second cache on the way: the first has no room for them beside x. */
static inline __attribute__((always_inline)) void piece(const float *w, int64_t E, const float *x, int64_t ld, float *y, int64_t terms,
                                                        const int rows, const int columns, int more, int ahead) {
  reg sum[TALLEST][COLUMNS], v[COLUMNS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) sum[r][i] = more ? load_reg(y + r * ld + i * WIDTH) : (reg){0};
  const float *w0 = w, *w3 = w + 3 * E, *w6 = w + 6 * E, *w9 = w + 9 * E;
#define ROW(r, at)                                                                        \
  if (rows > r) {                                                                         \
    float weight = at;                                                                    \
    _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) sum[r][i] += v[i] * weight; \
  }
#define TERM(j)                                                                               \
  _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) v[i] = load_reg(x + i * WIDTH);       \
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
    for (int i = 0; i < columns; i++) store_reg(y + r * ld + i * WIDTH, sum[r][i]);
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
  int64_t vectors = (N + LANES - 1) / LANES * (LANES / WIDTH), span = vectors * WIDTH <= 8 * LANES ? LONG : SHORT;
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
    }
  }
}
