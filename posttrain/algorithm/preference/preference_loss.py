"""The loss of preference algorithms: episodes of a unit become one score each, a pair's two scores one margin.

    loss = sum over units of weight * own * coef * link + the added terms (sums over tokens)

`own` is how likely the policy itself says both sides of the pair (weights=wpo), else 1. The weights were normalised
over the whole minibatch, so the losses of micro-batches of whole units add up. Everything that is computed over the
whole minibatch (`algorithm.preference.preference_minibatch`) is in the batch as streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.algorithm.loss.torch_streams import Streams, streams
from posttrain.algorithm.preference.preference_link import Completions, Margins, noisy, owed, side, statistic
from posttrain.algorithm.preference.preference_minibatch import (
    LIKELIHOOD,
    MATCH,
    OWN,
    SHIFT,
    completions,
    score,
    sides_of,
)
from posttrain.algorithm.register import missing
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.streams import MARGIN, OPPONENT, REFERENCE, SIDE, WEIGHT
from posttrain.ladder.pieces.link import Nash
from posttrain.ladder.pieces.preference_pieces import Added, ChosenNLL, GoldNLL, Optimism
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a preference algorithm.

    It reads SIDE and WEIGHT, REFERENCE and MARGIN where the algorithm does, and the streams of `prepared`. Each unit of
    the batch holds the completions of one row, in the order of `ladder.preference_algorithm.SIDES`.
    """

    algorithm: PreferenceAlgorithm

    def reads(self, micro: Batch) -> Reads:
        # The default: log-probs of the spoken tokens, and nothing else.
        return Reads()

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        judged = _Judged.of(self.algorithm, micro, scores.logp)
        loss = judged.preference() + judged.added()
        return Terms(loss, judged.gauges())

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        total = math.fsum(float(p.loss.detach()) for p in parts)
        totals = {"preference/loss": Gauge(total, 1), "preference/tokens": Gauge(batch.spoken, 1)}
        return merge(*(p.gauges for p in parts)) | totals


@dataclass(frozen=True, eq=False)
class _Judged:
    """One micro-batch: its completions, their scores, and the terms and gauges that are computed from them."""

    a: PreferenceAlgorithm
    logp_M: Tensor
    held: Streams
    """The streams of the micro-batch, beside its log-probs on their device."""
    side_E: np.ndarray
    first_E: Tensor
    """int64: the first token of each completion, where streams that are equal within a completion are read."""
    plain: Completions
    """The completions with log pi alone, without a reference."""
    h_E: Tensor
    """The score of each completion."""

    @staticmethod
    def of(a: PreferenceAlgorithm, micro: Batch, logp_M: Tensor) -> _Judged:
        """The micro-batch with the scores of its completions under these log-probs of the policy."""
        # Axes: M tokens, E completions, U pairs. A micro-batch holds whole units, with completions in the
        # order that the sides say, so chosen and rejected ones of a pair stand at equal places of their lists.
        side_E = sides_of(a, micro)
        batch_streams = streams(micro, logp_M.device, logp_M.dtype)
        # The same completions twice: with log pi (`plain`), and with log pi - log ref where there is
        # a reference. Gauges, Nash-MD and matched margins read `plain`.
        plain = completions(micro, logp_M)
        ratio_M = logp_M - batch_streams[REFERENCE] if a.against == "reference" else logp_M
        h_E = score(a, replace(plain, l_M=ratio_M))
        first_E = torch.as_tensor(np.searchsorted(micro.sequence_M, np.arange(micro.episodes)), device=logp_M.device)
        return _Judged(a, logp_M, batch_streams, side_E, first_E, plain, h_E)

    def at(self, wanted: int) -> Tensor:
        """int64: the completions of one side, in order."""
        return torch.as_tensor(np.flatnonzero(self.side_E == wanted), device=self.h_E.device)

    def each(self, stream_M: Tensor) -> Tensor:
        """[M] -> [E] of a stream that is equal within a completion."""
        return stream_M[self.first_E]

    def preference(self) -> Tensor:
        """The preference term, a sum over the micro-batch."""
        a, weight_E = self.a, self.each(self.held[WEIGHT])
        if isinstance(a.link, Nash):
            return a.coef * (weight_E * self._nash()).sum()
        if a.rows == "label":
            good = torch.as_tensor(self.side_E == 1, device=self.h_E.device)
            # Good and bad completions may have different weights, for data with many more of one kind.
            of_side = torch.where(good, a.good, a.bad)
            return a.coef * (weight_E * of_side * side(a.link, self._reward(), good, a.beta)).sum()
        # A gold completion (side 2) is in no difference: it is only imitated, by what is added.
        c, r = self.at(1), self.at(0)
        each_U = self._matched(c, r) if a.match == "rewards" else noisy(a.noise, a.link, self._margins(c, r))
        # Both completions of a unit have its weight, so the chosen one's is read.
        weight_U = weight_E[c] * self.each(self.held[OWN])[c] if a.weights == "wpo" else weight_E[c]
        return a.coef * (weight_U * each_U).sum()

    def _reward(self) -> Tensor:
        """[E]: u of each completion."""
        u_E = self.a.beta * self.h_E
        return u_E if self.a.shift is None else u_E - self.each(self.held[SHIFT])

    def _margins(self, c: Tensor, r: Tensor) -> Margins:
        """The margins of pairs of chosen completions `c` and rejected ones `r`, less the lead that `owed` asks for."""
        a, u_E = self.a, self._reward()
        if a.match == "margins":
            plain_E = statistic(a.statistic, self.plain)
            # The policy's own margin against the reference's at the same rank, which need
            # not be this pair's. So the reference is in MATCH, and `plain` has none.
            x_U = a.beta * (plain_E[c] - plain_E[r] - self.each(self.held[MATCH])[c])
        else:
            x_U = u_E[c] - u_E[r]
        # Subtracted after the product with beta, because `owed` is in units of x.
        if a.margin is not None:
            margin_U = self.each(self.held[MARGIN])[c] if MARGIN in self.held else None
            x_U = x_U - owed(a.margin, margin_U, a.beta)
        return Margins(x_U, u_E[c], u_E[r], a.beta)

    def _matched(self, c: Tensor, r: Tensor) -> Tensor:
        """[U]: each side against its match on the other side, which may lie in another micro-batch and is a constant
        here. Value and gradient of the pairs of all micro-batches add up to those of the minibatch."""
        a, match_E = self.a, self.each(self.held[MATCH])
        # Each sorted pair has a chosen and a rejected side, and both know the score that
        # they are paired with. The first form gives the gradient by h_c and the value,
        # the second the gradient by h_r and the value 0: together the pair counts once.
        up = a.beta * (self.h_E[c] - match_E[c])
        down = a.beta * (match_E[r] - self.h_E[r])
        # A link of differences reads x alone; the rewards of the sides are given because the type has them.
        from_chosen, from_rejected = (noisy(a.noise, a.link, Margins(x, x, -x, a.beta)) for x in (up, down))
        return from_chosen + from_rejected - from_rejected.detach()

    def _nash(self) -> Tensor:
        """[E]: the Nash-MD term of each completion that the policy wrote; 0 where its opponent wrote it."""
        batch_streams = self.held
        own_E = (~self.each(batch_streams[OPPONENT])).to(self.logp_M.dtype)
        chosen_E = torch.as_tensor(self.side_E == 1, device=self.h_E.device)
        p_E = self.each(batch_streams[MARGIN])
        # MARGIN is the probability that the chosen one is preferred, on both completions of a pair.
        preferred_E = torch.where(chosen_E, p_E, 1 - p_E)
        # sg[log pi_t - log ref_t] * log pi_t: a score function whose mean
        # is the gradient of the KL at each token. 1/2 is the baseline of P.
        charged_M = (self.logp_M - batch_streams[REFERENCE]).detach() * self.logp_M
        plain = self.plain
        return own_E * (self.a.beta * plain.sum(charged_M) - (preferred_E - 0.5) * plain.sum(self.logp_M))

    def added(self) -> Tensor:
        """The sum of the terms that are added to the preference term."""
        out = self.logp_M.new_zeros(())
        for term in self.a.add:
            out = out + added(term, self.logp_M, self.held)
        return out

    def gauges(self) -> Gauges:
        """Rewards and log-probs of both sides, their margins, and the share of them that agrees with the judgement."""
        with torch.no_grad():
            # Both rows in one transfer from the device.
            table = torch.stack([self._reward(), self.plain.sum(self.logp_M)]).double().cpu()
        u_E, logp_E = np.asarray(table[0]), np.asarray(table[1])
        out: Gauges = {}
        for word, wanted in (("chosen", 1), ("rejected", 0)):
            out[f"preference/{word}_reward"] = Gauge.of(u_E[self.side_E == wanted])
            out[f"preference/{word}_logp"] = Gauge.of(logp_E[self.side_E == wanted])
        if self.a.rows == "label":
            ahead = np.where(self.side_E == 1, u_E, -u_E)
        else:
            ahead = u_E[self.side_E == 1] - u_E[self.side_E == 0]
            out["preference/margin"] = Gauge.of(ahead)
        # A tie counts one half. Where the policy begins as its own reference, all rewards are 0 at first.
        out["preference/accuracy"] = Gauge.of(np.where(ahead == 0, 0.5, (ahead > 0).astype(np.float64)))
        return out


@singledispatch
def added(term: Added, logp_M: Tensor, batch: Streams) -> Tensor:
    """A further term of the loss: one number, a sum over the tokens of the micro-batch. `batch` has SIDE, WEIGHT (the
    weights of a minibatch's units sum to 1) and what the algorithm reads, each [M]."""
    raise missing(term, added)


@added.register
def _(term: ChosenNLL, logp_M: Tensor, batch: Streams) -> Tensor:
    # WEIGHT is the unit's weight on each token, so its sum is a mean over
    # completions of their sums; LIKELIHOOD divides by the number of tokens.
    weight_M = batch[WEIGHT] if term.over == "sequences" else batch[LIKELIHOOD]
    return -term.coef * (weight_M * (batch[SIDE] == 1) * logp_M).sum()


@added.register
def _(term: GoldNLL, logp_M: Tensor, batch: Streams) -> Tensor:
    return -term.coef * (batch[LIKELIHOOD] * (batch[SIDE] == 2) * logp_M).sum()


@added.register
def _(term: Optimism, logp_M: Tensor, batch: Streams) -> Tensor:
    # Added to a loss that falls, so the policy lowers the log-prob of what the reference said.
    return term.coef * (batch[WEIGHT] * batch[OPPONENT] * logp_M).sum()
