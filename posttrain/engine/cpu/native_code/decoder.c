/* What a decode step computes, on CPUs, in float32: all of a decoder layer of the Llama family but the choice of who sees whom.

   Compiled by `compile_native.py` with the machine's own C compiler (gcc >= 12 or clang). Activations are feature-major [F][ld]:
   a row is one feature of all N positions, ld >= N floats apart, a multiple of LANES, so that a lane is a position and
   W @ x reads every weight once, in the order it lies in memory. Heads are position-major [N][heads][D].

   Every sum belongs to one position or one query and runs in a fixed order, whatever stands beside it: no result depends on
   its neighbours, on their number or on the number of threads. */

#include "attention.h"
#include "elementwise.h"
#include "products.h"
#include "sampling.h"
#include "training.h"
#include "segments.h"
#include "digest.h"
#include "head.h"

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
