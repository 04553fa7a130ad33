"""Computes the values that a preference loss needs of a whole minibatch before it is split, so that a split changes
nothing: normalised weights, the order of margins, the point of reference of labels.

`prepared` makes them. What it remembers between steps goes in and comes out as plain numbers, which a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.preference.preference_link import Completions, divergence, statistic
from posttrain.core.batch import Batch
from posttrain.core.streams import COLLISION, REFERENCE, SIDE, START, WEIGHT, Maker, Stream
from posttrain.core.types import SHOWN, Segment
from posttrain.ladder.pieces.preference_pieces import ChosenNLL, GoldNLL
from posttrain.ladder.preference_algorithm import SIDES, PreferenceAlgorithm
from posttrain.system.errors import DataError, InvariantError

LIKELIHOOD = Stream(
    "likelihood",
    "float64",
    "the weights of tokens whose likelihood is added: those of chosen and those of gold completions sum to 1",
    "the likelihood that a preference loss adds (add=chosennll, add=goldnll)",
)
MATCH = Stream(
    "match",
    "float64",
    "what the score of a completion, or the margin of a pair, is compared with in the order of the whole minibatch",
    "optimal transport over the minibatch (match=...)",
)
OWN = Stream("own", "float64", "how likely the policy itself says both sides of a pair, per token", "weights=wpo")
SHIFT = Stream("shift", "float64", "what is subtracted from each reward, the same in the whole minibatch", "shift=...")


@dataclass(frozen=True, eq=False)
class CompletionLayout:
    """The lengths of completions, and the positions of their tokens."""

    length_E: np.ndarray
    """int64: tokens of each completion."""
    shared_E: np.ndarray
    """int64: tokens of the shortest completion of its unit."""
    position_M: np.ndarray
    """int64: position of each token in its completion."""


def unit_of_each(batch: Batch) -> np.ndarray:
    """The unit of each completion [E]. Without `unit_E` each is a unit of its own."""
    return np.arange(batch.episodes) if batch.unit_E is None else batch.unit_E


def layout(batch: Batch) -> CompletionLayout:
    """The layout of a batch's completions; InvariantError where one has no spoken token."""
    length_E = np.bincount(batch.sequence_M, minlength=batch.episodes)
    if batch.episodes and not length_E.all():
        raise InvariantError(
            f"{int((length_E == 0).sum())} of {batch.episodes} completions have no spoken token: each has at least its"
            " stop token"
        )
    # Tokens of a completion lie together, in order of the completions, so positions follow from the starts.
    starts_E = np.cumsum(length_E) - length_E
    unit_E = unit_of_each(batch)
    shortest_U = np.full(batch.units, np.iinfo(np.int64).max)
    # A scatter with several completions a unit; the completions of one unit share the result.
    np.minimum.at(shortest_U, unit_E, length_E)
    position_M = np.arange(batch.spoken) - starts_E[batch.sequence_M]
    return CompletionLayout(length_E, shortest_U[unit_E], position_M)


def sides_of(a: PreferenceAlgorithm, batch: Batch) -> np.ndarray:
    """int32 [E]: the `SIDE` of each completion; InvariantError where these are not units of `a.rows`, in order."""
    # The value of a completion's first token is read, and then all others are compared with it.
    first_E = np.searchsorted(batch.sequence_M, np.arange(batch.episodes))
    side_M = batch[SIDE]
    side_E = side_M[first_E]
    if not np.array_equal(side_M, side_E[batch.sequence_M]):
        raise InvariantError("the tokens of one completion are on different sides")
    # Links read chosen and rejected by their places, so an order that is not kept would swap labels without an error.
    order = SIDES[a.rows]
    if not order:
        if not np.isin(side_E, (0, 1)).all():
            raise InvariantError(f"a completion with a label is on side 0 or 1, and {sorted({*side_E.tolist()})} stand")
        return side_E
    unit_E = batch.unit_E
    if (
        unit_E is None
        or not np.array_equal(unit_E, np.repeat(np.arange(batch.units), len(order)))
        or not np.array_equal(side_E, np.tile(np.array(order), batch.units))
    ):
        raise InvariantError(
            f"rows={a.rows}: the completions of each unit are on the sides {order}, in this order, and the batch has"
            f" {side_E[:6].tolist()}... in {batch.units} units of {batch.episodes} completions"
        )
    return side_E


def completions(batch: Batch, l_M: Tensor) -> Completions:
    """The completions of a batch with the log-probs or log-ratios `l_M` of their tokens."""
    lengths, device = layout(batch), l_M.device
    length_E, shared_E = (torch.as_tensor(x, device=device) for x in (lengths.length_E, lengths.shared_E))
    sequence_M = torch.as_tensor(batch.sequence_M, dtype=torch.int64, device=device)
    return Completions(l_M, sequence_M, length_E, shared_E, torch.as_tensor(lengths.position_M, device=device))


def score(a: PreferenceAlgorithm, of: Completions) -> Tensor:
    """[E]: h of each completion, from its log-ratios (or log-probs without a reference)."""
    return divergence(a.divergence, statistic(a.statistic, of))


def scores_of(a: PreferenceAlgorithm, batch: Batch, l_M: np.ndarray) -> np.ndarray:
    """float64 [E]: `score` of each completion."""
    # The same functions as in the loss, in float64 and without gradient: what is matched is what is learned.
    return score(a, completions(batch, torch.as_tensor(l_M.astype(np.float64)))).numpy()


@dataclass(frozen=True, eq=False)
class PreferenceContext:
    """The context of makers of these streams: a minibatch with all its units and what was scored."""

    algorithm: PreferenceAlgorithm
    batch: Batch
    shift: float
    """Value of `SHIFT`, where it is wanted."""

    def spread(self, x_E: np.ndarray) -> np.ndarray:
        """[E] -> [M]."""
        return x_E[self.batch.sequence_M]

    @property
    def log_ratio_M(self) -> np.ndarray:
        """float64: of the policy at the start of the step to the reference; without one, its log-probs."""
        start_M = self.batch[START].astype(np.float64)
        return start_M - self.batch[REFERENCE] if self.algorithm.against == "reference" else start_M


def _likelihood(w: PreferenceContext) -> np.ndarray:
    """float64 [M]: each token's share of the weight of its side, 1 chosen or 2 gold; 0 on other sides."""
    side_M, weight_M = w.batch[SIDE], w.batch[WEIGHT]
    out = np.zeros(w.batch.spoken)
    # Chosen and gold tokens are normalised apart, so each likelihood is a mean over its own tokens.
    for wanted in (1, 2):
        of_side_M = weight_M * (side_M == wanted)
        out += of_side_M / of_side_M.sum() if of_side_M.sum() > 0 else 0
    return out


def _match(w: PreferenceContext) -> np.ndarray:
    """Returns, where margins are matched, the margin of the reference at the rank of the pair's own margin; where
    rewards are matched, the score on the other side at the rank of the completion's own score."""
    a, batch = w.algorithm, w.batch
    first_E = np.searchsorted(batch.sequence_M, np.arange(batch.episodes))
    # In one dimension optimal transport pairs equal ranks, which is only so where all points have the same mass. Equal
    # weights differ by their rounding alone, far below 1e-12.
    if np.ptp(batch[WEIGHT][first_E]) > 1e-12:
        raise DataError(
            f"match={a.match} joins sides of different pairs, so all pairs weigh the same: leave weights out"
        )
    out_E = np.zeros(batch.episodes)
    if a.match == "margins":
        start_E, reference_E = (scores_of(a, batch, batch[s]) for s in (START, REFERENCE))
        # rows=pair: chosen at the even places, rejected at the odd ones (`sides_of`).
        policy_U, reference_U = start_E[::2] - start_E[1::2], reference_E[::2] - reference_E[1::2]
        # sort(x)[rank(y)]: for each y the x of the same rank. The order is
        # that before the optimizer step, so it is a constant of the loss.
        matched_U = np.sort(reference_U)[_ranks(policy_U)]
        return w.spread(np.repeat(matched_U, 2))
    h_E = scores_of(a, batch, w.log_ratio_M)
    c, r = h_E[::2], h_E[1::2]
    out_E[::2], out_E[1::2] = np.sort(r)[_ranks(c)], np.sort(c)[_ranks(r)]
    return w.spread(out_E)


def _ranks(x: np.ndarray) -> np.ndarray:
    """The rank of each entry, from 0; equal ones in their order."""
    out = np.empty(len(x), np.int64)
    out[np.argsort(x, kind="stable")] = np.arange(len(x))
    return out


def _own(w: PreferenceContext) -> np.ndarray:
    """exp of the mean of log pi - log sum pi^2 of each side, multiplied over the two (2406.11827, Eq. 2)."""
    batch = w.batch
    # sum_v pi_v^2 is the mean of pi(y_t) over the policy's own draws: a token
    # of the data is compared with what the policy says there on average.
    aligned_M = batch[START].astype(np.float64) - np.log(batch[COLLISION].astype(np.float64))
    sums_E = np.bincount(batch.sequence_M, aligned_M, batch.episodes)
    each_E = np.exp(sums_E / layout(batch).length_E)
    unit_E = unit_of_each(batch)
    product_U = np.ones(batch.units)
    # exp of the mean for each side [E], the product over the two sides [U].
    np.multiply.at(product_U, unit_E, each_E)
    return w.spread(product_U[unit_E])


def _imitates(w: PreferenceContext) -> bool:
    return any(isinstance(x, ChosenNLL | GoldNLL) for x in w.algorithm.add)


PREFERENCE_WHOLE: list[Maker[PreferenceContext]] = [
    Maker((LIKELIHOOD,), _imitates, lambda w: (_likelihood(w),)),
    Maker((MATCH,), lambda w: w.algorithm.match is not None, lambda w: (_match(w),)),
    Maker((OWN,), lambda w: w.algorithm.weights == "wpo", lambda w: (_own(w),)),
    Maker((SHIFT,), lambda w: w.algorithm.shift is not None, lambda w: (np.full(w.batch.spoken, w.shift),)),
]
"""The makers of these streams, in the order in which they run."""


def prepared(
    a: PreferenceAlgorithm,
    batch: Batch,
    running: Mapping[str, float] | None = None,
    mismatched_E: np.ndarray | None = None,
) -> tuple[Batch, dict[str, float]]:
    """A minibatch with the streams that are made over all of it, and what is remembered after it.

    Args:
        batch: with SIDE, with what `a.reads` names, and with WEIGHT where rows weigh differently.
        running: what the call before it returned; none at the beginning of a stage.
        mismatched_E: log-ratios of policy to reference, summed over each completion of `mismatched`, where
            `a.reads_mismatched`.
    """
    # First the sides, whose order the makers rely on. Then the weights, since the makers read WEIGHT normalised.
    sides_of(a, batch)
    batch = batch.having({WEIGHT: _normalised(batch)})
    remembered = dict(running or {})
    shift = 0.0
    if a.shift == "mismatched":
        if mismatched_E is None or not len(mismatched_E):
            raise InvariantError(
                f"algorithm {a.name!r} compares with completions under other prompts, and none were scored: score"
                " `mismatched` by policy and reference"
            )
        # KTO's z_0 estimates a KL, which is never below 0, though its estimate from a few completions may be.
        shift = a.beta * max(0.0, float(np.mean(mismatched_E)))
    if a.shift == "running":
        u_E = a.beta * scores_of(a, batch, PreferenceContext(a, batch, 0.0).log_ratio_M)
        # This minibatch is in the mean that shifts it. Sums and counts,
        # not a mean, are kept: they go on exactly from a checkpoint.
        total = remembered.get("sum", 0.0) + float(u_E.sum())
        count = remembered.get("count", 0.0) + len(u_E)
        remembered, shift = {"sum": total, "count": count}, total / count
    context = PreferenceContext(a, batch, shift)
    made_streams = {s: x for maker in PREFERENCE_WHOLE for s, x in maker.make(context).items()}
    return batch.having(made_streams), remembered


def _normalised(batch: Batch) -> np.ndarray:
    """float64 [M]: the weight of each token's unit; those of units sum to 1."""
    if not batch.spoken:
        raise InvariantError("the minibatch has no spoken token")
    first_E = np.searchsorted(batch.sequence_M, np.arange(batch.episodes))
    row_weight_M = batch.find(WEIGHT)
    weight_E = np.ones(batch.episodes) if row_weight_M is None else row_weight_M[first_E]
    unit_E = unit_of_each(batch)
    # [U]: the first completion of each unit, whose weight is the unit's.
    # Divided by the sum over units, not over completions or tokens.
    first_U = np.searchsorted(unit_E, np.arange(batch.units))
    weight_U = weight_E[first_U]
    if np.any(weight_U < 0) or not weight_U.sum() > 0:
        raise DataError("the weights of a minibatch's rows are at least 0, and one is above 0")
    return (weight_U / weight_U.sum())[unit_E][batch.sequence_M]


def mismatched(segments: Sequence[Segment], longest: int) -> list[Segment]:
    """Each prompt with the completion of the nearest row before it, in a circle, whose prompt is another one; DataError
    where there is none. What is longer than `longest` tokens is left out."""
    # The first spoken token ends the prompt.
    cuts = [int(np.argmax(s.mask)) for s in segments]
    prompts = [s.ids[:cut].tobytes() for s, cut in zip(segments, cuts, strict=True)]
    out: list[Segment] = []
    for i, (segment, cut) in enumerate(zip(segments, cuts, strict=True)):
        # Backwards around the circle: a negative j counts from the end, as Python indexes.
        j = next((j % len(segments) for j in range(i - 1, i - len(segments), -1) if prompts[j] != prompts[i]), None)
        if j is None or cut + len(segments[j].ids) - cuts[j] > longest:
            continue
        other = segments[j]
        ids = np.concatenate([segment.ids[:cut], other.ids[cuts[j] :]])
        mask = np.concatenate([np.zeros(cut, np.bool_), other.mask[cuts[j] :]])
        # Nobody sampled this sequence: its tokens are marked as shown, and are only scored.
        logp = np.where(mask, 0.0, np.nan).astype(np.float32)
        out.append(Segment(ids, mask, logp, np.where(mask, SHOWN, -1).astype(np.int32), segment.sampling))
    if not out:
        raise DataError(
            "no completion of the minibatch can be read under the prompt of another row, because all rows have one"
            " prompt or the context is too short: raise batch, or take an algorithm with shift=none"
        )
    return out
