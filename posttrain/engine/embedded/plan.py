"""One forward pass written out as arrays: what is computed, where it is stored, what each position sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from posttrain.engine.embedded.cache import ragged_arange
from posttrain.engine.embedded.slots import Prompt, Slots

BUDGET = 2048
"""Positions of one forward pass: the speaking slots', then pieces of prompts."""
SHORT = 64
"""Pieces up to this length join the ragged queries; longer ones attend densely, which costs a call per bucket and
layer."""
LANES_PAY = 48, 256
"""A forward pass fills its lanes where at least so many slots speak and fewer positions than the second are to be
computed: with fewer slots, reading the weights is what takes time, and with more positions a few idle lanes do not
show."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """Tokens proposed after the pending one of each speaking slot: the first `counts[i]` of row i of `ids` [n, k].

    `q[j]` [n, V] holds the distributions that the j-th ones were drawn from; None where they were not drawn.
    """

    ids: np.ndarray
    counts: np.ndarray
    q: list[Tensor] | None = None


@dataclass(frozen=True, eq=False)
class PrefillPieces:
    """Prompts with the position each is computed up to, by the way their queries attend."""

    ragged: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    dense: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    """From their start."""
    chunks: list[tuple[Prompt, int]] = field(default_factory=list[tuple[Prompt, int]])
    """After what is cached."""


@dataclass(eq=False)
class Plan:
    """One forward pass: ragged positions (speaking slots, then short pieces), dense prompts, later chunks, idle
    positions."""

    speaking: np.ndarray
    """Slots whose pending token is computed."""
    widths: np.ndarray
    """Positions of each speaking slot, at the front: the pending token and its drafts."""
    ids: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    """Pool row of every position that is not idle."""
    visible: np.ndarray
    """Pool rows each ragged position sees, position after position."""
    lengths: np.ndarray
    """How many each sees; 0 for idle ones."""
    dense: list[int]
    """Length of each piece that begins its prompt."""
    chunks: list[tuple[np.ndarray, int]]
    """Of each piece that goes on: pool rows of the whole prompt so far, and the length of the piece at their end."""
    pieces: list[tuple[Prompt, int]]
    """Prompts in order, with the number of positions cached after this pass."""
    ends: list[int]
    """Index of the last position of each piece."""


def make_plan(s: Slots, at: np.ndarray, drafts: Drafts | None, pieces: PrefillPieces, least: int) -> Plan:
    """The pass over the pending tokens of the slots `at`, their drafts and these pieces; `least`: positions it has at
    least."""
    widths = np.ones(len(at), np.int64) if drafts is None else drafts.counts + 1
    each = at if drafts is None else np.repeat(at, widths)
    position = s.cached[each] + (0 if drafts is None else ragged_arange(widths))
    said = s.pending[at]
    if drafts is not None:
        said = np.concatenate([said[:, None], drafts.ids], 1)[np.arange(drafts.ids.shape[1] + 1) < widths[:, None]]
    ordered = pieces.ragged + pieces.dense + pieces.chunks
    spans = [(p, p.done, to) for p, to in ordered]
    short = [np.arange(a + 1, b + 1) for _, a, b in spans[: len(pieces.ragged)]]
    visible = [s.table.ravel()[np.repeat(each * s.table.shape[1], position + 1) + ragged_arange(position + 1)]]
    visible += [p.rows[ragged_arange(n)] for (p, _, _), n in zip(spans[: len(pieces.ragged)], short, strict=True)]
    ids = np.concatenate([said, *(p.ids[a:b] for p, a, b in spans)]).astype(np.int64)
    positions = np.concatenate([position, *(np.arange(a, b) for _, a, b in spans)])
    idle = max(0, least - len(ids)) if len(ids) else 0
    return Plan(
        speaking=at,
        widths=widths,
        ids=np.append(ids, np.zeros(idle, np.int64)),
        positions=np.append(positions, np.zeros(idle, np.int64)),
        rows=np.concatenate([s.table[each, position], *(p.rows[a:b] for p, a, b in spans)]),
        visible=np.concatenate(visible),
        lengths=np.concatenate([position + 1, *short, np.zeros(idle, np.int64)]),
        dense=[to for _, to in pieces.dense],
        chunks=[(p.rows[:to], to - p.done) for p, to in pieces.chunks],
        pieces=ordered,
        ends=(len(each) - 1 + np.cumsum([b - a for _, a, b in spans], dtype=np.int64)).tolist(),
    )


def room_in_lanes(computed: int, left: int, budget: int, lanes: int) -> int:
    """Positions of prompts to compute beside `computed` others, where `left` of them are not cached yet.

    What would begin one more vector of lanes without filling it waits for the next pass, as long as this one has some
    part of a
    prompt: with 64 slots and short prompts one lane in nine would be idle.
    """
    wanted = computed + left
    whole = wanted // lanes * lanes
    least, most = LANES_PAY
    return (whole if least <= computed < whole and wanted < min(most, budget) else budget) - computed
