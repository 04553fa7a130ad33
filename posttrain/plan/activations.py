"""Memory of passes through the model: what a forward pass keeps for its backward, and what passes need meanwhile.

Most figures are bytes a token, counted from the layers of this package. Letters as in `shapes`: h hidden width, q and
kv widths of all query heads and of all key heads, f feed-forward width; a bytes of a number.
docs/research/plans-measured.md has these figures beside measured ones.
"""

from __future__ import annotations

from posttrain.plan.work import Work

CHUNK_ELEMENTS = {False: 1 << 21, True: 1 << 27}
CHUNK_ROWS, CHUNK_IDS = 128, 16384
KEPT_ELEMENTS = {False: 1 << 22, True: 0}
TILE = {False: (256, 4096), True: (8192, 16384)}
"""The numbers of `engine.head.logprob`, by whether it is an accelerator; a test compares them."""
SCORE_TOKENS = 16384
"""Tokens of a pass without gradient (`engine.learner.packed_reader`)."""


def _widths(work: Work) -> tuple[int, int, int]:
    """(h, q, kv) of the model."""
    s, x = work.shape, work.shape.latent
    if x is not None:
        # Multi-head latent attention unfolds keys and values of different widths. kv counts once for each of them, so
        # the mean of both stands here.
        return s.hidden, s.heads * (x.plain + x.rope), s.heads * (x.plain + x.rope + x.value) // 2
    return s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim


def inner(work: Work) -> float:
    """f: the width of the feed-forward parts that a token goes through, its experts together."""
    x = work.shape.experts
    return work.shape.feed if x is None else x.active * x.width + x.shared


def _gates(work: Work) -> int:
    """Vectors of width f that a compiled layer keeps: gate and up, and their product beneath an adapter."""
    return 3 if work.adapter_parameters else 2


def layer(work: Work) -> float:
    """Bytes of a token in one layer that is not checkpointed."""
    h, q, kv = _widths(work)
    a, f, head_norms = work.width, inner(work), work.shape.form.query_norms != ""
    # Inputs of both norms and of the products behind them are 4 h; queries and what attention gives are 2 q;
    # keys and values are 2 kv.
    if work.fused:  # inputs of norms and products, q and k before their norm and after, v, attention, gate, up
        return a * (4 * h + 2 * q + 2 * kv + head_norms * (q + kv) + _gates(work) * f)
    norms = work.shape.form.norms * h * (8 if a == 2 else 12)  # input in float32, normed, and times the weight
    of_heads = (q + kv) * (6 if a == 2 else 8) * head_norms
    gathered = 0 if work.shape.experts is None else 2 * work.shape.experts.active * h
    # Four vectors of the feed-forward width with a gate: gate, up, the activation of the gate, and the product. Without
    # a gate it is what goes into the activation and what comes out. Experts also gather their tokens before and after.
    return norms + of_heads + a * (2 * q + 2 * kv + (4 if work.shape.form.gated else 2) * f + gathered)


def kept(work: Work) -> float:
    """Bytes of a token that all layers keep until the backward pass, under the stage's checkpointing."""
    h, q, kv = _widths(work)
    # "selective" keeps the layer's input and what the products made (3 h: the input, and what the output and the down
    # projection make), on an accelerator also what attention made.
    products = q + 2 * kv + (2 if work.shape.form.gated else 1) * inner(work) + work.accelerator * q
    widths = {"selective": 3 * h + products, "full": h}
    bytes_a_layer = layer(work) if work.checkpointing == "none" else work.width * widths[work.checkpointing]
    return bytes_a_layer * work.shape.layers


def backward(work: Work) -> float:
    """Bytes of a token that the backward of a layer needs at once, beside what is kept."""
    # The gradients of gate and up (2 f) less their product (f), which is not needed then, and that of the hidden state.
    return work.width * (inner(work) + work.shape.hidden)


def unread(work: Work) -> float:
    """Bytes that the last compiled layer does not keep of a token whose hidden state no loss reads."""
    # It needs only keys and values there, so it keeps no input of the feed-forward part, no gate and no up.
    return work.width * (2 * work.shape.hidden + _gates(work) * inner(work)) if work.fused else 0.0


def ends(work: Work) -> float:
    """Bytes of a token outside of the layers: the output of the embedding, and input and output of the last norm."""
    return work.width * 3 * work.shape.hidden


def scoring(work: Work) -> float:
    """Bytes of a token in a pass without gradient: the hidden state, and the widest place of a layer."""
    h, q, kv = _widths(work)
    return work.width * (3 * h + max(3 * inner(work), 3 * q + 2 * kv))


def tile(work: Work) -> float:
    """Bytes that the head needs at once, for all tokens: two tiles of scores, and a block of the weight in float32."""
    s, kind, ids = work.shape, work.accelerator, work.shape.vocabulary
    # As the head cuts its scores: all ids in one block where the vocabulary is small, else equal blocks of at most
    # `most`.
    rows = max(CHUNK_ROWS, CHUNK_ELEMENTS[kind] // ids)
    if ids > CHUNK_IDS:
        rows, most = TILE[kind]
        ids = -(-ids // -(-ids // most))
    rows = min(rows, work.spoken_tokens)
    # Few scores are kept until the backward pass (4 bytes each). More are computed again, tile by tile: 8 bytes are a
    # tile of scores and the copy that the softmax makes of it. Of weights in 2 bytes a block is converted, and its
    # gradient is summed, in float32.
    if work.spoken_tokens * s.vocabulary <= KEPT_ELEMENTS[kind]:
        return 4 * work.spoken_tokens * s.vocabulary + 8 * rows * ids
    return 8 * rows * ids + (0 if work.width == 4 else 8 * ids * s.hidden)


def logits(work: Work) -> float:
    """Bytes for drawing one token of each sequence that is decoded."""
    # 8 = 4 of scores and 4 of log-probs. On an accelerator the draw is not compiled: also 4 of probabilities and 8 of
    # their sums.
    return work.together * work.shape.vocabulary * (20 if work.accelerator else 8)


def prefill(work: Work) -> float:
    """Bytes of one pass of the embedded engine over positions of prompts."""
    h, q, kv = _widths(work)
    # At most `engine.budget` positions: a token of each sequence that speaks, and parts of prompts, each prompt once.
    positions = min(max(work.budget, work.together), work.prompts * work.lengths.prompt + work.together)
    return positions * work.width * (3 * h + 2 * (q + 2 * kv) + q + 3 * inner(work))
