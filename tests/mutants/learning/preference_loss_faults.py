"""Faults in the loss of preferences, and in what is made for it over a whole minibatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import REFERENCE, SIDE, WEIGHT
from posttrain.faults.planting import fault
from tests.mutants.learning.preference_faults import FAST

Real = Callable[..., Any]


@fault(
    "beta_on_one_side",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._reward",
    what="beta is missing on the rejected side",
    harm="the rejected completion is pushed down ten times as hard as the chosen one is pulled up",
    source="trap of B02",
    needs="preference",
)
def _(real: Real) -> Real:
    def reward(self: Any) -> Any:
        u_E = real(self).clone()
        rejected = self.at(0)
        return u_E.index_copy(0, rejected, u_E[rejected] / self.a.beta)

    return reward


@fault(
    "label_noise_twice",
    seam="posttrain.algorithm.preference.preference_loss:noisy",
    what="label smoothing is applied twice",
    harm="the labels count as if twice as many were wrong",
    source="trap of B02: smoothing in the trainer and in the loss",
    shows=("algorithm=cdpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    def noisy(noise: Any, kind: Any, of: Any) -> Any:
        if noise is None:
            return real(noise, kind, of)
        return (1 - noise.rate) * real(noise, kind, of) + noise.rate * real(noise, kind, of.swapped())

    return noisy


@fault(
    "margin_wrong_sign",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._margins",
    what="the target margin is added instead of subtracted",
    harm="a pair counts as learned while the chosen completion is still behind",
    source="trap of B05",
    shows=("algorithm=simpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    def margins(self: Any, c: Any, r: Any) -> Any:
        found = real(self, c, r)
        return replace(found, x_U=2 * (found.chosen_U - found.rejected_U) - found.x_U)

    return margins


@fault(
    "simpo_gamma_as_ratio",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._margins",
    what="SimPO's gamma is read as a ratio and multiplied by beta",
    harm="the target margin is several times too large",
    source="trap of B05: gamma and gamma_beta_ratio",
    shows=("algorithm=simpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    def margins(self: Any, c: Any, r: Any) -> Any:
        found, gamma = real(self, c, r), self.a.margin.gamma
        return replace(found, x_U=found.x_U + gamma - gamma * self.a.beta)

    return margins


@fault(
    "ipo_of_averages",
    seam="posttrain.algorithm.preference.preference_loss:score",
    what="IPO reads averages of log-probs in place of sums",
    harm="the target 1 / (2 beta) is per token, so the policy goes many times too far",
    source="trap of B03: TRL's ipo",
    shows=("algorithm=ipo",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda a, of: real(a, of) / of.length_E


@fault(
    "orpo_odds_of_sums",
    seam="posttrain.algorithm.preference.preference_loss:score",
    what="ORPO's odds are those of whole completions",
    harm="the odds vanish for long completions, and the term says nothing",
    source="trap of B06",
    shows=("algorithm=orpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda a, of: real(a, replace(of, l_M=of.l_M * of.length_E[of.sequence_M]))


@fault(
    "kto_shift_with_gradient",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._reward",
    what="the gradient flows through KTO's point of reference",
    harm="what should only be compared with is trained",
    source="trap of B04",
    shows=("algorithm=kto",),
    needs="preference",
)
def _(real: Real) -> Real:
    def reward(self: Any) -> Any:
        mean = (self.a.beta * self.h_E).mean()
        return real(self) - (mean - mean.detach())

    return reward


@fault(
    "kto_shift_of_matched_pairs",
    seam="posttrain.stages.preference.preference_stage:mismatched",
    what="KTO's point of reference is made of the completions under their own prompts",
    harm="the point of reference moves with what is learned, so good completions never look good",
    source="trap of B04",
    shows=("algorithm=kto",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda segments, longest: list(segments)


@fault(
    "running_mean_forgotten",
    seam="posttrain.stages.preference.preference_stage:PreferenceDriver.remember",
    what="BCO's running mean begins again at every step",
    harm="the point of reference is the noise of one minibatch",
    source="B08: delta is a running mean",
    shows=("algorithm=bco", *FAST),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda self, asked, step: real(self, replace(asked, running={}), step)


@fault(
    "chosen_nll_of_both_sides",
    seam="posttrain.algorithm.preference.preference_loss:added",
    what="the added likelihood is that of both sides",
    harm="the rejected completions are imitated",
    source="trap of B06",
    shows=("algorithm=cpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    def added(term: Any, logp_M: Any, batch: Any) -> Any:
        return real(term, logp_M, batch) - term.coef * (batch[WEIGHT] * logp_M).sum() / len(logp_M)

    return added


@fault(
    "wpo_weight_of_one_side",
    seam="posttrain.algorithm.preference.preference_minibatch:_own",
    what="a pair's weight is read off its chosen side alone",
    harm="pairs whose rejected side the policy would never say count as much as its own",
    source="B02: the weight is a product over both sides",
    shows=("algorithm=wpo",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda w: np.sqrt(real(w))


@fault(
    "reference_missing_on_one_side",
    seam="posttrain.algorithm.preference.preference_loss:streams",
    what="the rejected side is not compared with the reference",
    harm="rejected completions are pushed down without bound",
    source="trap of B02",
    needs="preference",
)
def _(real: Real) -> Real:
    def held(micro: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(micro, *args, **kwargs)
        if REFERENCE not in out:
            return out
        return out.having({REFERENCE: out[REFERENCE] * (out[SIDE] == 1)})

    return held
