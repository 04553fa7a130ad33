"""Faults between what a policy and its opponent say and the loss of their pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import MARGIN, OPPONENT
from posttrain.faults.planting import fault

Real = Callable[..., Any]
NASH = ("online.algorithm=nash_md",)
FAST = ("online.optimizer.lr=0.01",)


@fault(
    "worse_sample_chosen",
    seam="posttrain.stages.preference.online_stage:sampled_pairs",
    what="of two samples the one with the lower reward is chosen",
    harm="the policy learns what its judge likes least",
    source="trap of B09: a cost is read as a reward",
    needs="online",
)
def _(real: Real) -> Real:
    def sampled_pairs(*args: Any) -> Any:
        found = real(*args)
        return replace(found, pairs=tuple(replace(p, chosen=p.rejected, rejected=p.chosen) for p in found.pairs))

    return sampled_pairs


@fault(
    "pairs_across_prompts",
    seam="posttrain.stages.preference.online_stage:sampled_pairs",
    what="the rejected sample of a pair is that of the next prompt",
    harm="the policy learns which prompts are easy",
    source="pain 18: a reshape that regroups samples",
    needs="online",
)
def _(real: Real) -> Real:
    def sampled_pairs(*args: Any) -> Any:
        found = real(*args)
        moved = [*found.pairs[1:], *found.pairs[:1]]
        return replace(
            found, pairs=tuple(replace(p, rejected=q.rejected) for p, q in zip(found.pairs, moved, strict=True))
        )

    return sampled_pairs


@fault(
    "ties_are_preferences",
    seam="posttrain.stages.preference.sampled_pairs:spread",
    what="of two samples that were judged alike the first is chosen",
    harm="half of what is learned is noise, and most of it once the policy is good",
    source="trap of B09: argmax of equal rewards",
    needs="online",
)
def _(real: Real) -> Real:
    return lambda *args: True


@fault(
    "online_reference_of_now",
    seam="posttrain.stages.preference.online_stage:OnlineDriver.remember",
    what="the reference follows the policy after every step",
    harm="the divergence is to the step before, and the policy drifts without end",
    source="trap of B02: reference updated",
    shows=FAST,
    needs="online",
)
def _(real: Real) -> Real:
    def remember(self: Any, asked: Any, step: Any) -> Any:
        held = self.roles.reference
        self.roles.reference = type(held)(self.parts.learner.policy)
        vars(self.roles.reference)["digest"] = held.digest
        return real(self, asked, step)

    return remember


@fault(
    "opponent_is_the_policy",
    seam="posttrain.engine.embedded.policy_mixture:MixedModel.logits",
    what="the opponent samples from the policy alone, without the reference",
    harm="Nash-MD becomes self-play, and nothing draws it back to the reference",
    source="trap of B09: mixture_coef is read and not used",
    shows=(*NASH, *FAST),
    needs="online",
)
def _(real: Real) -> Real:
    return lambda self, hidden: self._own.logits(hidden[:, : self._width].contiguous())


@fault(
    "opponent_mixes_probabilities",
    seam="posttrain.engine.embedded.policy_mixture:MixedModel.logits",
    what="the opponent mixes the two probabilities, not their logarithms",
    harm="the opponent is another distribution than the one that the loss's theory needs",
    source="trap of B09: an arithmetic for a geometric mixture",
    shows=(*NASH, *FAST),
    needs="online",
)
def _(real: Real) -> Real:
    def logits(self: Any, hidden: Any) -> Any:
        own = self._own.logits(hidden[:, : self._width].contiguous()).softmax(-1)
        other = self._other.logits(hidden[:, self._width :].contiguous()).softmax(-1)
        return ((1 - self._share) * own + self._share * other).log()

    return logits


@fault(
    "opponent_never_updated",
    seam="posttrain.role.learning.reference_scores:Opponent.follow",
    what="the policy in the opponent's mixture is the one that the stage began with",
    harm="the policy plays against its own past, which becomes ever easier",
    source="pain 4: a sync that leaves out the second engine",
    shows=(*NASH, *FAST),
    needs="online",
)
def _(real: Real) -> Real:
    async def follow(self: Any, version: int) -> None:
        if self.engine.version < 0:
            await real(self, version)

    return follow


@fault(
    "opponent_learned_from",
    seam="posttrain.stages.preference.online_stage:batch_of_pairs",
    what="what the opponent said counts as said by the policy",
    harm="the policy is drawn to its opponent's answers, with the policy's own reward",
    source="trap of B09: Nash-MD's loss is of the policy's sample alone",
    shows=NASH,
    needs="online",
)
def _(real: Real) -> Real:
    def batch_of_pairs(*args: Any) -> Any:
        batch = real(*args)
        return batch.having({OPPONENT: np.zeros_like(batch[OPPONENT])})

    return batch_of_pairs


@fault(
    "preference_probability_is_the_gap",
    seam="posttrain.stages.preference.online_stage:batch_of_pairs",
    what="the difference of the rewards stands where the probability of the preference is read",
    harm="the policy's term grows with the scale of the reward, and is wrong for ties",
    source="trap of B09: scores of a judge taken for probabilities",
    shows=NASH,
    needs="online",
)
def _(real: Real) -> Real:
    def batch_of_pairs(pairs: Any, a: Any) -> Any:
        gaps = np.repeat([p.gap for p in pairs], [p.chosen.spoken + p.rejected.spoken for p in pairs])
        return real(pairs, a).having({MARGIN: gaps})

    return batch_of_pairs


@fault(
    "nash_term_sign_flip",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._nash",
    what="the sign of Nash-MD's loss is turned round",
    harm="the policy learns to lose against its opponent",
    source="trap of B09: the loss is minus the preference",
    shows=NASH,
    needs="online",
)
def _(real: Real) -> Real:
    return lambda self: -real(self)


@fault(
    "online_pairs_weigh_twice",
    seam="posttrain.stages.preference.online_stage:prepared",
    what="the weights of pairs are not normalised over the minibatch",
    harm="the learning rate is that of a sum over pairs",
    source="pain 10",
    needs="online",
)
def _(real: Real) -> Real:
    from posttrain.core.streams import WEIGHT

    def prepared(*args: Any) -> Any:
        batch, running = real(*args)
        return batch.having({WEIGHT: batch[WEIGHT] * batch.units}), running

    return prepared
