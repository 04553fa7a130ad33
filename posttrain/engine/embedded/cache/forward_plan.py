"""One forward pass as arrays: the tokens it computes, where these are stored, what each position sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.engine.embedded.cache.key_value_cache import ragged_arange
from posttrain.engine.embedded.schedule.slots import Prompt, Slots

BUDGET = 2048
"""Positions of one forward pass: those of the generating slots, then pieces of prompts."""
SHORT = 64
"""Pieces of at most this length are ragged. Longer ones use dense attention: a call per bucket and layer."""
LANES_PAY = 48, 256
"""A forward pass avoids idle lanes where at least 48 slots generate and fewer than 256 positions are to be computed.
With fewer slots, most of the time is reading the weights. With more positions, a few idle lanes cost little."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """Tokens proposed after the pending one of each generating slot: the first `counts[i]` of row i of `ids` [n, k].
    `q[j]` [n, V]: the distributions that the j-th drafts were drawn from; None where they were not drawn."""

    ids: np.ndarray
    counts: np.ndarray
    q: list[Tensor] | None = None


@dataclass(frozen=True, eq=False)
class PrefillPieces:
    """Prompts, each with the position it is computed up to, grouped by the kind of attention of their queries."""

    ragged: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    dense: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    """Pieces at the start of their prompts."""
    chunks: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    """Later pieces, after positions that are cached."""


@dataclass(eq=False)
class Plan:
    """One forward pass of N positions, in this order: those of generating slots and of short pieces (ragged), starts of
    prompts (dense), later pieces (chunks), idle ones."""

    generating: np.ndarray
    """Slots whose pending token is computed."""
    front: int
    """Positions of the generating slots, at the front of the pass: pending tokens and their drafts."""
    ids: np.ndarray
    """int64 [N]: the tokens."""
    positions: np.ndarray
    """int64 [N]: where each stands in its sequence."""
    rows: np.ndarray
    """Pool row of every position that is not idle: there its keys and values are written."""
    visible: np.ndarray
    """Pool rows. Ragged position i sees `lengths[i]` of them from `starts[i]` on."""
    starts: np.ndarray
    lengths: np.ndarray
    """0 for idle positions."""
    dense: list[int]
    """Length of each piece at the start of its prompt."""
    chunks: list[tuple[np.ndarray, int]]
    """For each later piece: pool rows of the whole prompt so far, and the length of the piece at their end."""
    pieces: list[tuple[Prompt, int]]
    """Prompts in order, with the number of positions cached after this pass."""
    ends: list[int]
    """Index of the last position of each piece."""


def make_plan(s: Slots, at: np.ndarray, drafts: Drafts | None, pieces: PrefillPieces, least: int) -> Plan:
    """The pass over the pending tokens of the slots `at`, drafts and pieces, filled up to `least` positions."""
    # `each` has the slot of every position at the front: once for its pending token, and once for each of its drafts.
    each, tokens = at, s.pending[at]
    position = s.cached[at]
    if drafts is not None:
        widths = drafts.counts + 1
        each = np.repeat(at, widths)
        position = s.cached[each] + ragged_arange(widths)
        # Selected by a mask, row by row: each slot's pending token, then its first drafts.
        tokens = np.concatenate([tokens[:, None], drafts.ids], 1)[np.arange(drafts.ids.shape[1] + 1) < widths[:, None]]
    # The slots' tables serve as they are: position p of slot s sees the entries 0..p of row s.
    rows, visible, starts, lengths = s.table[each, position], s.table.ravel(), each * s.table.shape[1], position + 1
    ordered = pieces.ragged + pieces.dense + pieces.chunks
    if not ordered and not least:  # most passes
        return Plan(at, len(each), tokens, position, rows, visible, starts, lengths, [], [], [], [])
    spans = [(p, p.done, to) for p, to in ordered]
    ids = np.concatenate([tokens, *(p.ids[a:b] for p, a, b in spans)]).astype(np.int64)
    # A pass without any position is not computed, and not filled up either.
    idle = np.zeros(max(0, least - len(ids)) if len(ids) else 0, np.int64)
    # The rows of short pieces are in no table, so one list of visible rows is written out: first the slots' own rows,
    # then for each position of a short piece all rows of its prompt up to itself.
    if pieces.ragged:
        short = [(p, np.arange(a + 1, b + 1)) for p, a, b in spans[: len(pieces.ragged)]]
        slot_rows = visible[np.repeat(starts, lengths) + ragged_arange(lengths)]
        visible = np.concatenate([slot_rows, *(p.rows[ragged_arange(n)] for p, n in short)])
        lengths = np.concatenate([lengths, *(n for _, n in short)])
        starts = np.cumsum(lengths) - lengths
    return Plan(
        generating=at,
        front=len(each),
        ids=np.append(ids, idle),
        positions=np.concatenate([position, *(np.arange(a, b) for _, a, b in spans), idle]),
        rows=np.concatenate([rows, *(p.rows[a:b] for p, a, b in spans)]),
        visible=visible,
        starts=np.append(starts, idle),
        lengths=np.append(lengths, idle),
        dense=[to for _, to in pieces.dense],
        chunks=[(p.rows[:to], to - p.done) for p, to in pieces.chunks],
        pieces=ordered,
        ends=(len(each) - 1 + np.cumsum([b - a for _, a, b in spans], dtype=np.int64)).tolist(),
    )


def room_in_lanes(computed: int, left: int, budget: int, lanes: int) -> int:
    """Returns the number of prompt positions to compute in a pass with `computed` other ones, where `left` prompt
    positions are not cached yet and a pass has at most `budget`. Positions that would begin one more vector of lanes
    without filling it wait for the next pass: else, with 64 slots and short prompts, one lane in nine would be idle."""
    # Whole vectors only if that still leaves a position for prompts, and if all that is wanted would be computed.
    wanted = computed + left
    whole = wanted // lanes * lanes
    least_computed, most_wanted = LANES_PAY
    return (whole if least_computed <= computed < whole and wanted < min(most_wanted, budget) else budget) - computed
