/* A piece of a product and a strip of pieces, for vectors of one width: included once for each, with REG, its floats WIDE, LOAD, STORE,
   ADDED, and the names PIECE and STRIP_OF, which end here. */

/* y [rows][columns * WIDE] = w [rows][terms] @ x [terms][columns * WIDE], added to what y holds where `more`. Where `ahead`, the rows
   below are fetched into the second cache on the way: the first has no room for them beside x. */
static inline __attribute__((always_inline)) void PIECE(const float *w, int64_t E, const float *x, int64_t ld, float *y, int64_t terms,
                                                        const int rows, const int columns, int more, int ahead) {
  REG sum[TALLEST][COLUMNS], v[COLUMNS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) sum[r][i] = more ? LOAD(y + r * ld + i * WIDE) : (REG){0};
  const float *w0 = w, *w3 = w + 3 * E, *w6 = w + 6 * E, *w9 = w + 9 * E;
#define ROW(r, at)                                                                        \
  if (rows > r) {                                                                         \
    float weight = at;                                                                    \
    _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) sum[r][i] = ADDED(sum[r][i], v[i], weight); \
  }
#define TERM(j)                                                                               \
  _Pragma("GCC unroll 6") for (int i = 0; i < columns; i++) v[i] = LOAD(x + i * WIDE);       \
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
    for (int i = 0; i < columns; i++) STORE(y + r * ld + i * WIDE, sum[r][i]);
}

static inline __attribute__((always_inline)) void STRIP_OF(const float *w, int64_t E, const float *x, int64_t ld, float *y, int64_t terms,
                                                        int64_t rows, const int tall, const int columns, int more, int ahead) {
  int64_t r = 0;
  for (; r + tall <= rows; r += tall) PIECE(w + r * E, E, x, ld, y + r * ld, terms, tall, columns, more, ahead);
  for (; r + 2 <= rows; r += 2) PIECE(w + r * E, E, x, ld, y + r * ld, terms, 2, columns, more, 0);
  for (; r < rows; r++) PIECE(w + r * E, E, x, ld, y + r * ld, terms, 1, columns, more, 0);
}

#undef REG
#undef WIDE
#undef LOAD
#undef STORE
#undef ADDED
#undef PIECE
#undef STRIP_OF
