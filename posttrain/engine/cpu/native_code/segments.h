/* Attention of packed segments, forward and backward, over position-major rows.

   A run is `length` rows from `start` on. Each of its queries sees the rows `above` the run, in this order, then the rows of the run up to
   its own; of all these the last `window` where window > 0. Many runs may lie below the same rows.

   Queries are taken QUERIES at a time, and the scores of such a block lie transposed, [keys][QUERIES]: a lane is a query, so that a maximum
   or a sum over keys needs no work across lanes. Every sum of a result runs in a fixed order, whatever the number of threads. */

#pragma once

#include "products.h"
#include "training.h"

#define QUERIES 32
#define PARTS (QUERIES / LANES)
/* Terms of a product that are summed before the sums go back to memory. */
#define SPAN 256

/* R runs; those of run r see the rows above[begin[r]] to above[begin[r] + deep[r] - 1]. Of C trees of runs, tree c holds runs first[c] to
   first[c + 1] - 1, and shares no row with another tree. H query heads, K key-value heads, widths Dk of keys and Dv of values. */
struct segments {
  const int64_t *start, *length, *begin, *deep, *above, *first;
  int64_t R, C, N, H, K, Dk, Dv, window;
  float scale;
};

/* Memory of one thread: rows of keys, values and their gradients [T][Dk or Dv, padded]; a block of queries and of output gradients, as rows
   and transposed; scores and their gradients [T][QUERIES]. */
struct scratch {
  float *key, *value, *dkey, *dvalue, *query, *query_T, *out, *out_T, *score, *dscore;
};

static inline int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

static int64_t longest_run(const struct segments *s) {
  int64_t most = 0;
  for (int64_t r = 0; r < s->R; r++)
    if (s->deep[r] + s->length[r] > most) most = s->deep[r] + s->length[r];
  return most;
}

/* One allocation, in `base`; 0 where memory ran out. */
static int open_scratch(const struct segments *s, int64_t T, int backward, struct scratch *m, float **base) {
  int64_t Dk = whole(s->Dk), Dv = whole(s->Dv), rows = whole(T), twice = backward ? 2 : 1;
  int64_t floats = twice * rows * (Dk + Dv + QUERIES) + 2 * QUERIES * (Dk + Dv);
  float *p = *base = aligned_alloc(64, floats * sizeof(float));
  if (!p) return 0;
  float **fields[] = {&m->key, &m->value, &m->score, &m->query, &m->query_T, &m->out, &m->out_T, &m->dkey, &m->dvalue, &m->dscore};
  int64_t sizes[] = {rows * Dk,    rows * Dv, rows * QUERIES, QUERIES * Dk, QUERIES * Dk, QUERIES * Dv,
                     QUERIES * Dv, rows * Dk, rows * Dv,      rows * QUERIES};
  for (int i = 0; i < (backward ? 10 : 7); i++) *fields[i] = p, p += sizes[i];
  return 1;
}

/* Row `at` of the run's keys: one above it, or its own. */
static inline int64_t row_of(const struct segments *s, int64_t r, int64_t t) {
  int64_t deep = s->deep[r];
  return t < deep ? s->above[s->begin[r] + t] : s->start[r] + t - deep;
}

/* D floats, then zeros up to `wide_row`. */
static inline void copy_row(const float *from, float *to, int64_t D, int64_t wide_row) {
  int64_t d = 0;
  for (; d + LANES <= D; d += LANES) store(to + d, load(from + d));
  for (; d < wide_row; d++) to[d] = d < D ? from[d] : 0.0f;
}

/* Head h of the first T rows that the run's queries see, of [N][heads][D], to rows of whole vectors, zeros behind D. */
static void gather(const struct segments *s, int64_t r, const float *rows, int64_t heads, int64_t h, int64_t D, int64_t T, float *out) {
  int64_t wide_row = whole(D);
  for (int64_t t = 0; t < T; t++) copy_row(rows + (row_of(s, r, t) * heads + h) * D, out + t * wide_row, D, wide_row);
}

/* A block of queries as rows [QUERIES][D, padded], and transposed and scaled [D, padded][QUERIES]; zeros where there is no query. */
static void take_block(const float *rows, int64_t heads, int64_t h, int64_t D, int64_t start, int64_t count, float scale, float *out,
                       float *out_T) {
  int64_t wide_row = whole(D);
  for (int64_t i = 0; i < count; i++) copy_row(rows + ((start + i) * heads + h) * D, out + i * wide_row, D, wide_row);
  memset(out + count * wide_row, 0, (QUERIES - count) * wide_row * sizeof(float));
  for (int64_t d = 0; d < wide_row; d += LANES)
    for (int64_t i = 0; i < QUERIES; i += LANES) transpose_tile(out + i * wide_row + d, wide_row, scale, out_T + d * QUERIES + i, QUERIES);
}

/* y [rows][ld] = w @ x [terms][ld] for the first `vectors` * WIDTH columns, w [rows][E]; added to y where `add`. */
static inline void panel(const float *w, int64_t E, const float *x, float *y, int64_t rows, int64_t terms, int64_t vectors, int64_t ld, int add) {
  for (int64_t k = 0; k < terms; k += SPAN) {
    int64_t span = terms - k < SPAN ? terms - k : SPAN;
    int more = add || k;
    for (int64_t n = 0, columns; n < vectors; n += columns) {
      columns = wide(vectors - n);
      switch (columns) {
#define CASE(c) \
  case c: strip(w + k, E, x + k * ld + n * WIDTH, ld, y + n * WIDTH, span, rows, TALL[c], c, more, 0); break;
        CASE(1) CASE(2)
#if COLUMNS > 2
        CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
      }
    }
  }
}

/* y [rows][columns * WIDTH] = the sum over t of w[t][row] * x[t], `rows` and `columns` constant. */
static inline __attribute__((always_inline)) void mix_piece(const float *w, const float *x, int64_t ld, float *y, int64_t terms, const int rows,
                                                            const int columns) {
  reg sum[TALLEST][COLUMNS], v[COLUMNS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) sum[r][i] = (reg){0};
  for (int64_t t = 0; t < terms; t++, x += ld, w += QUERIES) {
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) v[i] = load_reg(x + i * WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int i = 0; i < columns; i++) sum[r][i] += v[i] * w[r];
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int i = 0; i < columns; i++) store_reg(y + r * ld + i * WIDTH, sum[r][i]);
}

/* y [QUERIES][ld]: for each query the sum over the keys it sees of w[t][query] * x[t]. Query i sees none behind last + i. */
static void mixed(const float *w, const float *x, float *y, int64_t count, int64_t T, int64_t last, int64_t vectors, int64_t ld) {
  for (int64_t n = 0, columns; n < vectors; n += columns) {
    columns = vectors - n < 2 ? 1 : 2;
    int64_t tall = columns == 1 ? TALL[1] : TALL[2];
    for (int64_t i = 0; i < count; i += tall) {
      int64_t terms = last + i + tall < T ? last + i + tall : T, left = QUERIES - i;
      const float *from = w + i, *rows = x + n * WIDTH;
      float *to = y + i * ld + n * WIDTH;
      if (columns == 2) {
        if (left >= TALL[2]) mix_piece(from, rows, ld, to, terms, TALL[2], 2);
        else
          for (int64_t j = 0; j < left; j += 2) mix_piece(from + j, rows, ld, to + j * ld, terms, 2, 2);
      } else {
        if (left >= TALL[1]) mix_piece(from, rows, ld, to, terms, TALL[1], 1);
        else
          for (int64_t j = 0; j < left; j += 2) mix_piece(from + j, rows, ld, to + j * ld, terms, 2, 1);
      }
    }
  }
}

/* Lanes of part p whose query does not see key t of the block whose first query is at depth `depth`. */
static inline ivec hidden(int64_t t, int64_t depth, int p, int64_t window) {
  const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t ahead = (int32_t)(t - depth - p * LANES);
  ivec out = lane < ahead;
  if (window) out |= lane >= (int32_t)(ahead + window);
  return out;
}

/* The block of queries of a run from i on: its keys are lo to hi - 1, and the first query is at depth `depth`. */
struct block {
  int64_t i, count, lo, hi, depth;
};

static inline struct block block_at(const struct segments *s, int64_t r, int64_t i) {
  struct block b = {.i = i, .count = s->length[r] - i < QUERIES ? s->length[r] - i : QUERIES, .depth = s->deep[r] + i};
  b.hi = b.depth + b.count;
  b.lo = s->window && b.depth >= s->window ? b.depth - s->window + 1 : 0;
  return b;
}

/* Scores of a block, minus infinity where a key is not seen. From `inside` to the first query's own depth every query sees all. */
static void scores(const struct segments *s, const struct block *b, const struct scratch *m) {
  int64_t Dk = whole(s->Dk), vectors = (b->count + WIDTH - 1) / WIDTH, parts = (b->count + LANES - 1) / LANES;
  panel(m->key + b->lo * Dk, Dk, m->query_T, m->score + b->lo * QUERIES, b->hi - b->lo, s->Dk, vectors, QUERIES, 0);
  int64_t inside = s->window ? b->depth + b->count - s->window : b->lo;
  for (int64_t t = b->lo; t < b->hi; t++) {
    if (t >= inside && t <= b->depth) {
      t = b->depth;
      continue;
    }
    for (int p = 0; p < parts; p++) {
      float *at = m->score + t * QUERIES + p * LANES;
      store(at, blend(hidden(t, b->depth, p, s->window), splat(-INFINITY), load(at)));
    }
  }
}

/* Scores of a block to exp(score - most of the query), and their sum. */
static void weights(const struct block *b, const struct scratch *m, float *most, float *sum_of) {
  int64_t parts = (b->count + LANES - 1) / LANES;
  for (int p = 0; p < parts; p++) {
    vec top = load(m->score + b->lo * QUERIES + p * LANES), all = {0};
    for (int64_t t = b->lo + 1; t < b->hi; t++) {
      vec x = load(m->score + t * QUERIES + p * LANES);
      top = blend(x > top, x, top);
    }
    for (int64_t t = b->lo; t < b->hi; t++) {
      float *at = m->score + t * QUERIES + p * LANES;
      vec e = exp_vec(load(at) - top);
      store(at, e);
      all += e;
    }
    store(most + p * LANES, top);
    store(sum_of + p * LANES, all);
  }
}

/* out [N][H][Dv], and total [N][H]: the logarithm of the sum of exp(score) of each query. Returns 1 where memory ran out, else 0. */
int64_t segments_forward(const struct segments *s, const float *query, const float *key, const float *value, float *out, float *total) {
  int64_t T = longest_run(s), groups = s->H / s->K, Dv = whole(s->Dv), failed = 0;
#pragma omp parallel if (s->N * s->H * s->Dk > SMALL)
  {
    struct scratch m;
    float *memory;
    int ready = open_scratch(s, T, 0, &m, &memory);
    if (!ready) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < s->R * s->H; unit++) {
      int64_t r = unit / s->H, h = unit % s->H, keys = s->deep[r] + s->length[r];
      if (!ready) continue;
      gather(s, r, key, s->K, h / groups, s->Dk, keys, m.key);
      gather(s, r, value, s->K, h / groups, s->Dv, keys, m.value);
      for (int64_t i = 0; i < s->length[r]; i += QUERIES) {
        struct block b = block_at(s, r, i);
        float most[QUERIES], sums_of[QUERIES];
        take_block(query, s->H, h, s->Dk, s->start[r] + i, b.count, s->scale, m.query, m.query_T);
        scores(s, &b, &m);
        weights(&b, &m, most, sums_of);
        mixed(m.score + b.lo * QUERIES, m.value + b.lo * Dv, m.out, b.count, b.hi - b.lo, b.depth - b.lo, Dv / WIDTH, Dv);
        for (int64_t j = 0; j < b.count; j++) {
          int64_t row = (s->start[r] + i + j) * s->H + h;
          float share = 1.0f / sums_of[j];
          for (int64_t d = 0; d < s->Dv; d++) out[row * s->Dv + d] = m.out[j * Dv + d] * share;
          total[row] = most[j] + logf(sums_of[j]);
        }
      }
    }
    free(memory);
  }
  return failed;
}

/* Scores of a block to weights, and `dscore`, what their products with the values are pulled by, to gradients of the scores. `total` and
   `pull` [QUERIES]: of each query the logarithm of its sum, and the product of its output with its gradient. */
static void score_gradients(const struct block *b, const struct scratch *m, const float *total, const float *pull, float scale) {
  int64_t parts = (b->count + LANES - 1) / LANES;
  for (int p = 0; p < parts; p++) {
    vec log_sum = load(total + p * LANES), mean = load(pull + p * LANES);
    for (int64_t t = b->lo; t < b->hi; t++) {
      int64_t at = t * QUERIES + p * LANES;
      vec weight = exp_vec(load(m->score + at) - log_sum);
      store(m->score + at, weight);
      store(m->dscore + at, weight * (load(m->dscore + at) - mean) * scale);
    }
  }
}

/* Adds the gradients of the rows that a run sees to those of all rows. */
static void add_rows(const struct segments *s, int64_t r, const float *rows, int64_t h, int64_t D, int64_t T, float *out) {
  int64_t wide_row = whole(D);
  for (int64_t t = 0; t < T; t++) {
    const float *from = rows + t * wide_row;
    float *to = out + (row_of(s, r, t) * s->H + h) * D;
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) store(to + d, load(to + d) + load(from + d));
    for (; d < D; d++) to[d] += from[d];
  }
}

/* Gradients of query, key and value for that of the output, `grad`. dkey and dvalue are [N][H][D], by query head, and zero before. */
int64_t segments_backward(const struct segments *s, const float *query, const float *key, const float *value, const float *out,
                          const float *total, const float *grad, float *dquery, float *dkey, float *dvalue) {
  int64_t T = longest_run(s), groups = s->H / s->K, Dk = whole(s->Dk), Dv = whole(s->Dv), failed = 0;
#pragma omp parallel if (s->N * s->H * s->Dk > SMALL)
  {
    struct scratch m;
    float *memory;
    int ready = open_scratch(s, T, 1, &m, &memory);
    if (!ready) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < s->C * s->H; unit++) {
      int64_t c = unit / s->H, h = unit % s->H;
      if (!ready) continue;
      for (int64_t r = s->first[c]; r < s->first[c + 1]; r++) {
        int64_t keys = s->deep[r] + s->length[r];
        gather(s, r, key, s->K, h / groups, s->Dk, keys, m.key);
        gather(s, r, value, s->K, h / groups, s->Dv, keys, m.value);
        memset(m.dkey, 0, keys * Dk * sizeof(float));
        memset(m.dvalue, 0, keys * Dv * sizeof(float));
        for (int64_t i = 0; i < s->length[r]; i += QUERIES) {
          struct block b = block_at(s, r, i);
          int64_t first = s->start[r] + i, vectors = (b.count + WIDTH - 1) / WIDTH, seen = b.hi - b.lo;
          float log_sum[QUERIES] = {0}, pull[QUERIES] = {0};
          for (int64_t j = 0; j < b.count; j++) {
            int64_t row = (first + j) * s->H + h;
            log_sum[j] = total[row];
            pull[j] = dot_row(out + row * s->Dv, grad + row * s->Dv, s->Dv);
          }
          take_block(query, s->H, h, s->Dk, first, b.count, s->scale, m.query, m.query_T);
          take_block(grad, s->H, h, s->Dv, first, b.count, 1.0f, m.out, m.out_T);
          scores(s, &b, &m);
          panel(m.value + b.lo * Dv, Dv, m.out_T, m.dscore + b.lo * QUERIES, seen, s->Dv, vectors, QUERIES, 0);
          score_gradients(&b, &m, log_sum, pull, s->scale);
          panel(m.score + b.lo * QUERIES, QUERIES, m.out, m.dvalue + b.lo * Dv, seen, b.count, Dv / WIDTH, Dv, 1);
          panel(m.dscore + b.lo * QUERIES, QUERIES, m.query, m.dkey + b.lo * Dk, seen, b.count, Dk / WIDTH, Dk, 1);
          mixed(m.dscore + b.lo * QUERIES, m.key + b.lo * Dk, m.query, b.count, seen, b.depth - b.lo, Dk / WIDTH, Dk);
          for (int64_t j = 0; j < b.count; j++)
            memcpy(dquery + ((first + j) * s->H + h) * s->Dk, m.query + j * Dk, s->Dk * sizeof(float));
        }
        add_rows(s, r, m.dkey, h, s->Dk, keys, dkey);
        add_rows(s, r, m.dvalue, h, s->Dv, keys, dvalue);
      }
    }
    free(memory);
  }
  return failed;
}
