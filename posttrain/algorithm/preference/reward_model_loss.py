"""The losses of a reward model: they compare its scores of completions with how these were judged.

A minibatch is a weighted mean over judgements. Each is a unit of the batch, so micro-batches add up. Of a pair with
scores R_c and R_r, and of a ranking with scores R_1 (best) to R_K:

    pair      -log sigmoid(R_c - R_r - margin)                                      (Bradley-Terry, B01)
    ranking   -sum_k [ R_k - log sum_{j >= k} exp R_j ]                             (Plackett-Luce)
    pairs     mean over the K (K - 1) / 2 pairs of -log sigmoid(R_i - R_j), i < j   (2203.02155)
    centring  centre * (2 / K * sum_k R_k)^2, for a pair centre * (R_c + R_r)^2     (2312.09244)
    regulariser  (1 - alpha) * the loss above + alpha * -log sigmoid(beta * x)      (2406.10216)
                 with sums of log-probs over a completion, x is
                 sft       log pi(c)
                 dpo_free  log pi(c) - log pi(r)
                 dpo       (log pi(c) - log ref(c)) - (log pi(r) - log ref(r))
    label     -log sigmoid(R) if good, -log sigmoid(-R) if bad
    steps     mean over the labelled steps k of -y log sigmoid(R_k) - (1 - y) log sigmoid(-R_k)   (2312.08935)
    rating    mean over the rated attributes of (output - rating)^2, or the cross entropy of the rating's class

Axis letters: M spoken tokens, S segments, U units, K members of a unit or outputs of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from posttrain.algorithm.loss.policy_loss import Terms
from posttrain.config.stages.reward_model_settings import HeadShape, Regulariser
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import Reads, Rewards, TokenScores
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.streams import MARGIN, RATING, REFERENCE, SIDE, STEP, WEIGHT, Stream
from posttrain.system.errors import InvariantError


@dataclass(frozen=True, kw_only=True)
class RankingLoss:
    """The loss of a reward model. It reads the reward head, and log-probs only where it is regularised by them.

    The streams that it reads are the same for all tokens of a completion. Scores are in order of the segments.
    """

    judged: str = "pair"
    """The kind of judgement: pair, ranking, label, rating or steps (`core.judgements.Kind`)."""
    shape: HeadShape = HeadShape()
    margin: bool = True
    """Subtract the margin of a pair, where the data has one."""
    centre: float = 0.0
    """Coefficient that keeps the scores of a unit around 0; only their differences are judged."""
    pairs: bool = False
    """Take a ranking as all of its pairs, in place of Plackett-Luce."""
    regularise: Regulariser = "none"
    """Loss by which the language head learns from the pairs meanwhile; dpo compares with `REFERENCE`."""
    alpha: float = 0.01
    """The language head's share of the loss."""
    beta: float = 0.1
    """Factor of the log-probs in that loss."""

    def reads(self, micro: Batch) -> Reads:
        return Reads(rewards=True, logp=self.regularise != "none")

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        rewards = scores.rewards
        if rewards is None:
            raise InvariantError("a reward model's loss needs the reward head's scores: call forward with rewards=True")
        if len(micro.lengths_S) != micro.episodes:
            raise InvariantError(
                f"{micro.episodes} judged completions are in {len(micro.lengths_S)} segments: a reward model scores"
                " each in one"
            )
        scored = _ScoredCompletions(micro, rewards)
        match self.judged:
            case "pair" | "ranking":
                terms = self._ordered(scored)
                return terms if self.regularise == "none" else self._regularised(scored, terms, scores.logp)
            case "label":
                return self._labelled(scored, rewards)
            case "steps":
                return self._stepwise(scored, rewards)
            case "rating":
                return self._rated(scored, rewards)
            case _:
                raise InvariantError(f"no loss of a reward model reads judgements of kind {self.judged!r}")

    def gauges(self, batch: Batch, parts: Sequence[Terms]) -> Gauges:
        loss = Gauge(math.fsum(float(p.loss.detach()) for p in parts), 1)
        return {"ranking/loss": loss, "ranking/tokens": Gauge(batch.spoken, 1)} | merge(*(p.gauges for p in parts))

    def _ordered(self, scored: _ScoredCompletions) -> Terms:
        """Returns the terms of pairs or rankings: the members of a unit, best first."""
        loss, right, gaps_by_size = scored.score_S.new_zeros(()), 0.0, list[Tensor]()
        margin_S = scored.first(MARGIN) if self.margin and MARGIN in scored.batch else None
        # Units of one size at a time, so that each is a plain [U, K] table. Their losses add up.
        for members_UK in scored.units():
            score_UK = scored.score_S[members_UK]
            count = members_UK.shape[1]
            margin_U = score_UK.new_zeros(len(members_UK)) if margin_S is None else margin_S[members_UK[:, 0]]
            if self.judged == "pair" and count != 2:
                raise InvariantError(f"a pair has {count} completions in its unit")
            # [U, P] gaps of all P = K (K - 1) / 2 pairs with the better
            # one first. They are also what accuracy is counted of.
            better, worse = torch.triu_indices(count, count, 1, device=score_UK.device)
            gap_UP = score_UK[:, better] - score_UK[:, worse]
            if self.judged == "pair":
                each_U = -logsigmoid(gap_UP[:, 0] - margin_U)
            elif self.pairs:
                each_U = -logsigmoid(gap_UP).mean(-1)
            else:
                # log sum_{j >= k} exp R_j by a cumulative sum from the last
                # one. The last place is log exp R_K - R_K = 0 and is cut off.
                each_U = (score_UK.flip(-1).logcumsumexp(-1).flip(-1) - score_UK)[:, :-1].sum(-1)
            if self.centre:
                # Only differences are judged, so the scores could drift together.
                # The factor 2 / K makes a ranking of two the same as a pair.
                each_U = each_U + self.centre * (2 / count * score_UK.sum(-1)).square()
            loss = loss + (scored.weight_S[members_UK[:, 0]] * each_U).sum()
            detached_UP = gap_UP.detach()
            # A tie is half right: else a head that gives every answer the same score would be all wrong, or all right.
            right += float((detached_UP > 0).sum() + (detached_UP == 0).sum() / 2)
            gaps_by_size.append(detached_UP.flatten())
        gaps = torch.cat(gaps_by_size)
        return Terms(
            loss,
            {
                "ranking/accuracy": Gauge(right, len(gaps)),
                "ranking/margin": Gauge(float(gaps.sum()), len(gaps)),
                **scored.gauges(),
            },
        )

    def _regularised(self, scored: _ScoredCompletions, terms: Terms, logp_M: Tensor) -> Terms:
        """Returns the terms of pairs: the loss, joined with the loss of the language head on their completions."""
        # The three forms differ only in x: log-probs or log-ratios, of the chosen one or of the difference.
        if self.regularise == "dpo":
            logp_M = logp_M - scored.each(REFERENCE)
        logp_S = logp_M.new_zeros(len(scored.score_S)).index_add(0, scored.segment_M, logp_M)
        # Pairs are units of one size, so there is one table.
        (members_U2,) = scored.units()
        chosen_U, rejected_U = logp_S[members_U2].unbind(-1)
        each_U = -logsigmoid(self.beta * (chosen_U if self.regularise == "sft" else chosen_U - rejected_U))
        language_loss = (scored.weight_S[members_U2[:, 0]] * each_U).sum()
        losses_U = each_U.detach().double()
        gauges = terms.gauges | {"ranking/regulariser": Gauge(float(losses_U.sum()), len(losses_U))}
        return Terms((1 - self.alpha) * terms.loss + self.alpha * language_loss, gauges)

    def _labelled(self, scored: _ScoredCompletions, rewards: Rewards) -> Terms:
        """Returns the terms of good and bad completions. A head that reads every token learns the label at each of them
        (2110.14168)."""
        good_S = scored.first(SIDE) > 0
        if self.shape.pool == "token":
            segment_M = scored.segment_M
            sign_M = torch.where(good_S, 1.0, -1.0).to(scored.score_S.dtype)[segment_M]
            spoken_S = torch.bincount(segment_M, minlength=len(good_S)).to(scored.score_S.dtype)
            # Divided by the tokens of its completion: a long one counts once.
            each_M = -logsigmoid(sign_M * rewards.outputs[:, 0]) / spoken_S[segment_M]
            each_S = scored.score_S.new_zeros(len(good_S)).index_add(0, segment_M, each_M)
        else:
            each_S = -logsigmoid(torch.where(good_S, scored.score_S, -scored.score_S))
        right = (scored.score_S.detach() > 0) == good_S
        accuracy = Gauge(float(right.sum()), len(good_S))
        return Terms((scored.weight_S * each_S).sum(), {"ranking/accuracy": accuracy, **scored.gauges()})

    def _stepwise(self, scored: _ScoredCompletions, rewards: Rewards) -> Terms:
        """Returns the terms of labelled steps, each read at the last token of its step. A completion counts once,
        however many steps it has."""
        label_M, score_M = scored.each(STEP), rewards.outputs[:, 0]
        known_M = ~label_M.isnan()
        steps_S = torch.bincount(scored.segment_M[known_M], minlength=len(scored.score_S))
        if not bool((steps_S > 0).all()):
            raise InvariantError("a completion has no labelled step: leave it out of the minibatch")
        # Only the ends of labelled steps, [K] of the whole micro-batch.
        # NaN never enters the arithmetic: a product with 0 would keep it.
        label_K, score_K, segment_K = label_M[known_M], score_M[known_M], scored.segment_M[known_M]
        # -y log sigmoid(R) - (1 - y) log sigmoid(-R) = log(1 + e^R) - y R, also for a label between 0 and 1. Not
        # softplus, which torch makes linear above 20: a sure step would lose its slope.
        each_K = (-logsigmoid(-score_K) - label_K * score_K) / steps_S[segment_K]
        each_S = scored.score_S.new_zeros(len(steps_S)).index_add(0, segment_K, each_K)
        right = (score_K.detach() > 0) == (label_K > 0.5)
        accuracy = Gauge(float(right.sum()), len(label_K))
        return Terms((scored.weight_S * each_S).sum(), {"ranking/accuracy": accuracy, **scored.gauges()})

    def _rated(self, scored: _ScoredCompletions, rewards: Rewards) -> Terms:
        """Returns the terms of ratings: numbers for attributes, or the class of one. An attribute without a rating
        (NaN) adds nothing."""
        rating_SK = scored.first(RATING)
        known_SK = ~rating_SK.isnan()
        if not bool(known_SK.any(-1).all()):
            raise InvariantError("a rated completion has no rating: leave it out of the minibatch")
        if self.shape.classes:
            target_S = rating_SK[:, 0].long()
            each_S = cross_entropy(rewards.outputs, target_S, reduction="none")
            difference_SK = (scored.score_S.detach() - rating_SK[:, 0])[:, None]
        else:
            # The inner `where` takes NaN out before the difference: the
            # outer one alone would leave a NaN in the gradient.
            difference_SK = torch.where(known_SK, rewards.outputs - torch.where(known_SK, rating_SK, 0.0), 0.0)
            each_S = difference_SK.square().sum(-1) / known_SK.sum(-1)
        error = Gauge(float(difference_SK.detach().abs().sum()), int(known_SK.sum()))
        return Terms((scored.weight_S * each_S).sum(), {"ranking/error": error, **scored.gauges()})


class _ScoredCompletions:
    """A micro-batch of judged completions, read on the device of its scores: a score, a weight and streams of each."""

    def __init__(self, batch: Batch, rewards: Rewards) -> None:
        self.batch, self.score_S = batch, rewards.score
        spoken_S = np.bincount(batch.segment_M, minlength=len(batch.lengths_S))
        if not spoken_S.all():
            raise InvariantError(f"{int((spoken_S == 0).sum())} judged completions have no spoken token")
        # A completion's streams are equal on all of its tokens, so the first one is read [S].
        self._first_S = np.cumsum(spoken_S) - spoken_S
        self.weight_S = self.first(WEIGHT)
        self.segment_M = torch.as_tensor(batch.segment_M, dtype=torch.int64, device=self.score_S.device)

    def first(self, stream: Stream) -> Tensor:
        """[S]: a stream that is equal on all tokens of a completion."""
        x_S = self.batch[stream][self._first_S]
        dtype = self.score_S.dtype if x_S.dtype.kind == "f" else torch.int64
        return torch.as_tensor(x_S, dtype=dtype, device=self.score_S.device)

    def each(self, stream: Stream) -> Tensor:
        """[M]: a stream with one entry per spoken token."""
        return torch.as_tensor(self.batch[stream], dtype=self.score_S.dtype, device=self.score_S.device)

    def units(self) -> list[Tensor]:
        """int64 [U, K] for each size K of the units: their members, the best first, as SIDE says, whatever their
        order."""
        unit_E = self.batch.unit_E
        if unit_E is None:
            raise InvariantError("ordered completions lie in units (`Batch.unit_E`), and this batch has none")
        side_S = self.batch[SIDE][self._first_S]
        by_size: dict[int, list[np.ndarray]] = {}
        for unit in range(self.batch.units):
            members = self.batch.members(unit)
            # At least 0 and 1: a unit of one completion orders nothing, and is refused too.
            if sorted(side_S[members].tolist()) != list(range(max(2, len(members)))):
                raise InvariantError(
                    f"the sides of a judgement are {side_S[members].tolist()}: each of its completions says to how many"
                    " of the others it was preferred (of a pair, 1 chosen and 0 rejected)"
                )
            # SIDE counts to how many others a completion was preferred, so descending order is best first.
            by_size.setdefault(len(members), []).append(members[np.argsort(-side_S[members])])
        device = self.score_S.device
        return [torch.as_tensor(np.stack(x), dtype=torch.int64, device=device) for _, x in sorted(by_size.items())]

    def gauges(self) -> Gauges:
        scores_S = self.score_S.detach().double()
        return {
            "ranking/score": Gauge(float(scores_S.sum()), len(scores_S)),
            "ranking/score_square": Gauge(float(scores_S.square().sum()), len(scores_S)),
        }
