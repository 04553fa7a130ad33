"""Steps 1 to 3 of the log-prob contract (`core.sampling`) for spoken tokens: logit bias, repetition penalty, bans.

The bans are computed again and not stored. They follow from the contract and the token ids before a position,
which are the same integers for sampler and learner. A kept set, in contrast, depends on the last bits of floats. A
stored ban would be a set of nearly V ids per token (150,000 x 4 bytes for each token said). Computed, the bans are
one mask [V] for all tokens and a few pairs. The sampler's side of the same rules is
`engine.embedded.schedule.slot_rules`; laws test that both agree.

The past ids of a position are stored as ragged lists: a penalised id costs one entry, not a row of the vocabulary. With
D distinct ids before a position, work and memory are D per token, one chunk at a time.

Axis letters: N packed positions, M spoken tokens, S segments, V vocabulary, C tokens and B ids of one tile, U
listed ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.system.errors import InvariantError

INF = float("-inf")


class Ragged:
    """A run of ids for each spoken token: `ids[start_M : start_M + count_M]`. Runs may share ids.

    Worked example: ids [7, 8, 9], start [0, 0], count [1, 3] are {7} for the first token and {7, 8, 9} for the second.
    """

    def __init__(self, ids: np.ndarray, start_M: np.ndarray, count_M: np.ndarray, device: torch.device) -> None:
        # All runs laid end to end have sum(count) entries. Entry e belongs to the token m with before[m] <= e <
        # before[m + 1], and reads ids[e - before[m] + start[m]]: one number a token, the shift, leads from e to its id.
        self._before = np.append(0, np.cumsum(count_M, dtype=np.int64))
        self._ids, self._count = device_ids(ids, device), device_ids(count_M, device)
        self._shift = device_ids(start_M - self._before[:-1], device)
        self._last = int(ids.max(initial=-1))

    def places(self, a: int, b: int, width: int, first_id: int = 0) -> Tensor:
        """int64: places of the ids of tokens a..b in a matrix [b - a, width] whose columns are the ids from `first_id`
        on, numbered row by row. Ids that have no column are left out. The places are distinct if the ids of each run
        are."""
        first, last = int(self._before[a]), int(self._before[b])
        # The output size is given. Otherwise the CPU would wait for the GPU to learn it.
        rows = torch.arange(a, b, device=self._ids.device).repeat_interleave(self._count[a:b], output_size=last - first)
        entries = torch.arange(first, last, device=self._ids.device) + self._shift[rows]
        rows, ids = rows - a, self._ids[entries] - first_id
        # Only where an id may have no column: after a selection the CPU waits for the GPU to learn how many are left.
        if first_id or self._last >= width:
            inside = (ids >= 0) & (ids < width)
            rows, ids = rows[inside], ids[inside]
        return rows * width + ids


@dataclass(frozen=True, eq=False)
class LogitRules:
    """The contract's steps on the logits of M spoken tokens before the temperature; see `LogitRules.of`."""

    bias_ids: Tensor | None
    """int64 [K]"""
    bias: Tensor | None
    """[K], float64; added in the dtype of the logits."""
    penalty: float
    seen: Ragged | None
    """Distinct ids in the sequence before each token, where there is a penalty."""
    never_V: Tensor | None
    """bool [V]: banned at every position."""
    now: Ragged | None
    """Ids banned at single positions."""

    @property
    def bans(self) -> bool:
        """True where some token may be banned."""
        return self.never_V is not None or self.now is not None

    @staticmethod
    def of(packed: Packed, vocabulary: int, device: torch.device) -> LogitRules | None:
        """The rules of a packed batch; None, at no cost, where its contract has no rules. InvariantError where they ban
        a token that was said. Kept sets hold no banned token, so with a truncating contract no ban is needed."""
        s = packed.sampling
        if not s.rules:
            return None
        ids = device_ids(np.array([i for i, _ in s.logit_bias], np.int64), device) if s.logit_bias else None
        bias = torch.tensor([x for _, x in s.logit_bias], dtype=torch.float64, device=device) if s.logit_bias else None
        seen = Ragged(*seen_before(packed, vocabulary), device) if s.repetition_penalty != 1 else None
        if packed.kept is not None:
            return LogitRules(ids, bias, s.repetition_penalty, seen, None, None)
        never_V = banned_always(s, vocabulary)
        rows, banned_ids = banned_here(packed)
        _check_said(packed, never_V, rows, banned_ids)
        count_M = np.bincount(rows, minlength=packed.spoken)
        now = Ragged(banned_ids, np.cumsum(count_M) - count_M, count_M, device) if len(rows) else None
        never = None if never_V is None else torch.from_numpy(never_V).to(device)
        return LogitRules(ids, bias, s.repetition_penalty, seen, never, now)

    def adjust(self, z: Tensor, at: int, first: int = 0) -> tuple[Tensor, Tensor] | None:
        """Apply the rules, in place and differentiably, to logits [C, B] of tokens from `at` and ids from `first` on.
        Returns (places, slope) of the penalised logits; the derivative by the logit before is 1 everywhere else."""
        # The sampler's order. The penalty looks at the sign of the biased logit, and nothing is computed with -inf.
        flat, to, width = z.view(-1), at + z.shape[0], z.shape[1]
        if self.bias_ids is not None and self.bias is not None:
            inside = (self.bias_ids >= first) & (self.bias_ids < first + width)
            ids, bias = self.bias_ids[inside] - first, self.bias[inside]
            z.index_add_(1, ids, bias.to(z.dtype).expand(len(z), -1))
        penalised = None
        if self.seen is not None:
            places = self.seen.places(at, to, width, first)
            old, p = flat[places], self.penalty
            # A tensor: by a plain number a GPU would not divide but multiply by 1 / p, which rounds in another way.
            divisor = torch.full((), p, dtype=z.dtype, device=z.device)
            # A penalty p > 1 makes every seen token less probable: it divides logits above 0, and multiplies those
            # below.
            flat.index_copy_(0, places, torch.where(old < 0, old * divisor, old / divisor))
            penalised = places, torch.full_like(old, 1 / p).masked_fill_(old.detach() < 0, p)
        if self.never_V is not None:
            z.masked_fill_(self.never_V[first : first + width], INF)
        if self.now is not None:
            flat.index_fill_(0, self.now.places(at, to, width, first), INF)
        return penalised


# --- past tokens that a position depends on ---------------------------------------------------------------------------


def seen_before(packed: Packed, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids [U], start_M, count_M): the distinct ids of each segment in the order of their first position, and how many
    of them come before each spoken token. In the segment [5 6 5 X] with X spoken: [5, 6], [0], [2]."""
    # segment * V + id is one number for each pair of segment and id. In order of their first positions, those before
    # any place are a run from the start of its segment: all tokens of a segment share one list.
    starts_S = np.cumsum(packed.lengths_S) - packed.lengths_S
    segment_N = np.repeat(np.arange(len(starts_S), dtype=np.int64), packed.lengths_S)
    _, first = np.unique(segment_N * vocabulary + packed.ids_N, return_index=True)
    first = np.sort(first)
    start_M = np.searchsorted(first, starts_S[packed.segment_M])
    # "right": the token at the source position itself comes before the spoken one, and counts.
    return packed.ids_N[first], start_M, np.searchsorted(first, packed.source_M, side="right") - start_M


def banned_always(s: Sampling, vocabulary: int) -> np.ndarray | None:
    """bool [V]: tokens that are banned at every position; None where there are none."""
    single = [b[0] for b in s.bad_ids if len(b) == 1]
    if s.allowed_ids is None and not single:
        return None
    out = np.full(vocabulary, s.allowed_ids is not None)
    out[list(s.allowed_ids or ())] = False
    out[single] = True
    return out


def banned_here(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """(spoken token, id) pairs, ascending in the token: stop ids early in a turn, and last tokens of bad sequences."""
    s, in_turn_M = packed.sampling, packed.in_turn_M
    rows, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    if in_turn_M is not None and s.min_tokens and s.stop_ids:
        early = np.flatnonzero(in_turn_M < s.min_tokens)
        rows.append(np.repeat(early, len(s.stop_ids)))
        ids.append(np.tile(np.array(s.stop_ids, np.int64), len(early)))
    sequences = [b for b in s.bad_ids if len(b) > 1]
    if in_turn_M is not None and sequences:
        # The token before last of a bad sequence must stand directly before. Positions sorted by that token give the
        # few candidates of each sequence by two binary searches; then they are thinned out from the back to the front.
        before_M = packed.ids_N[packed.source_M]
        order = np.argsort(before_M, kind="stable")
        token_before = before_M[order]
        for b in sequences:
            at = order[np.searchsorted(token_before, b[-2]) : np.searchsorted(token_before, b[-2], side="right")]
            # The whole sequence must lie in this turn: the tokens of a prompt do not complete one.
            at = at[in_turn_M[at] >= len(b) - 1]
            for back, token in enumerate(b[-3::-1], 1):
                at = at[packed.ids_N[packed.source_M[at] - back] == token]
            rows.append(at)
            ids.append(np.full(len(at), b[-1], np.int64))
    row, id_of_row = np.concatenate(rows), np.concatenate(ids)
    # `Ragged` needs the ids of one token beside each other.
    order = np.argsort(row, kind="stable")
    return row[order], id_of_row[order]


def _check_said(packed: Packed, never_V: np.ndarray | None, rows: np.ndarray, ids: np.ndarray) -> None:
    """InvariantError where a spoken token is banned: at every position (`never_V`), or by a pair of `rows`, `ids`."""
    banned_tokens = rows[packed.target_M[rows] == ids]
    if never_V is not None:
        banned_tokens = np.append(banned_tokens, np.flatnonzero(never_V[packed.target_M]))
    if len(banned_tokens):
        m = int(banned_tokens.min())
        raise InvariantError(
            f"spoken token {m} has id {int(packed.target_M[m])}, which its contract bans at that place"
            f" ({packed.sampling}): sampler and batch disagree on the distribution"
        )


def device_ids(x: np.ndarray, device: torch.device) -> Tensor:
    """Integers as int64 on the device."""
    return torch.from_numpy(np.array(x, np.int64)).to(device)
