"""Faults between judged completions, the reward model that learns from them, and the policy that it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import MARGIN, REFERENCE
from posttrain.core.types import Segment
from posttrain.faults.planting import fault

Real = Callable[..., Any]


# --- the reward model learns -----------------------------------------------------------------------------------------


@fault(
    "reward_head_not_trained",
    seam="posttrain.engine.head.value_heads:RewardHead.read",
    what="the reward head gets no gradient, and scores with the weights that were drawn",
    harm="only what is beneath it learns, slowly, and the reward model looks merely weak",
    source="trap of B01: a head that is initialised anew and left out of training",
    needs="reward_model",
)
def _(real: Real) -> Real:
    def read(self: Any, packed: Any, hidden: Any) -> Any:
        self.score.weight.requires_grad_(False)
        return real(self, packed, hidden)

    return read


@fault(
    "reward_read_before_the_end",
    seam="posttrain.engine.head.value_heads:RewardHead._last",
    what="the score is read at the token before the last one",
    harm="the score does not know whether and where the completion ended",
    source="trap of B01: a sequence length that counts the padding or not the end token",
    needs="reward_model",
)
def _(real: Real) -> Real:
    return lambda self, packed: real(self, packed) - 1


@fault(
    "reward_margin_sign",
    seam="posttrain.algorithm.preference.reward_model_loss:RankingLoss._ordered",
    what="the margin of a pair is added to the difference of its scores instead of subtracted",
    harm="pairs that differ most are learned least",
    source="trap of B01: the sign of the margin",
    needs="reward_model",
)
def _(real: Real) -> Real:
    def ordered(self: Any, read: Any) -> Any:
        read.batch = read.batch.having({MARGIN: -read.batch[MARGIN]})
        return real(self, read)

    return ordered


@fault(
    "reward_centred_apart",
    seam="posttrain.algorithm.preference.reward_model_loss:RankingLoss._ordered",
    what="centring pulls on the difference of the scores of a pair instead of on their sum",
    harm="the scores of a pair are drawn together, and their level drifts",
    source="trap of B01: the coefficient for centring",
    needs="reward_model",
)
def _(real: Real) -> Real:
    def ordered(self: Any, read: Any) -> Any:
        terms = real(replace(self, centre=0.0), read)
        score_S = read.score_S
        gap = score_S[0::2] - score_S[1::2]
        return replace(terms, loss=terms.loss + self.centre * gap.square().mean())

    return ordered


LANGUAGE = ("rm.regularise=dpo", "rm.alpha=.3")
"""The language head learns as well, from log-probs beside a reference."""


@fault(
    "language_head_sides_swapped",
    seam="posttrain.algorithm.preference.reward_model_loss:RankingLoss._regularised",
    what="the language head of a reward model learns to prefer the rejected completions",
    harm="the layers that both heads read are pulled two ways, and the reward model transfers worse than without",
    source="2406.10216, equations 5 and 6: which side the language loss favours",
    shows=LANGUAGE,
    needs="reward_model",
)
def _(real: Real) -> Real:
    def regularised(self: Any, read: Any, terms: Any, logp: Any) -> Any:
        return real(replace(self, beta=-self.beta), read, terms, logp)

    return regularised


@fault(
    "language_head_without_its_reference",
    seam="posttrain.algorithm.preference.reward_model_loss:RankingLoss._regularised",
    what="the reference's log-probs are left out of the language head's loss",
    harm="long and rare completions count as disliked before anything was learned",
    source="2406.10216, equation 5: the ratio to the reference",
    shows=LANGUAGE,
    needs="reward_model",
)
def _(real: Real) -> Real:
    def regularised(self: Any, read: Any, terms: Any, logp: Any) -> Any:
        read.batch = read.batch.having({REFERENCE: np.zeros_like(read.batch[REFERENCE])})
        return real(self, read, terms, logp)

    return regularised


# --- the policy is paid by it ----------------------------------------------------------------------------------------


@fault(
    "reward_reads_padding",
    seam="posttrain.role.judges.reward_judge:JudgeMember.segment",
    what="episodes are padded with stop tokens, and the score is read at the last one",
    harm="the score is that of a text that nobody said, and depends on what is beside it in the batch",
    source="trap of B01: pad_token_id is not set, or is the end token",
    needs="judge",
)
def _(real: Real) -> Real:
    def segment(self: Any, episode: Any) -> Segment:
        said = real(self, episode)
        more = 2
        return replace(
            said,
            ids=np.append(said.ids, np.repeat(said.ids[-1], more)).astype(np.int32),
            mask=np.append(said.mask, np.ones(more, bool)),
            logp=np.append(said.logp, np.zeros(more)).astype(np.float32),
            version=np.append(said.version, np.repeat(said.version[-1], more)).astype(np.int32),
        )

    return segment


@fault(
    "reward_of_another_sibling",
    seam="posttrain.role.judges.reward_judge:RewardModelJudge._scores",
    what="the scores of a batch come back in another order",
    harm="each answer is paid for its sibling, so nothing is learned and the mean reward looks right",
    source="pain 18: rewards and completions misaligned after sorting by length",
    needs="judge",
)
def _(real: Real) -> Real:
    def scores(self: Any, member: Any, episodes: Any) -> Any:
        found = real(self, member, episodes)
        return [*found[1:], *found[:1]]

    return scores


@fault(
    "reward_outage_scored_low",
    seam="posttrain.role.judges.reward_judge:RewardModelJudge._scores",
    what="the reward model cannot read every third answer, and that becomes a score of 0",
    harm="answers are punished for an outage",
    source="pain 16: an outage read as a wrong answer",
    needs="judge",
)
def _(real: Real) -> Real:
    def scores(self: Any, member: Any, episodes: Any) -> Any:
        return [0.0 if i % 3 == 0 else x for i, x in enumerate(real(self, member, episodes))]

    return scores


@fault(
    "reward_noise_is_spread",
    seam="posttrain.build.build_reward_models:RewardModels._judge",
    what="a reward model declares the resolution of an exact verifier",
    harm="the last bits of equal scores are divided by their own spread, and noise is learned at full size",
    source="design of no spread: a reward that is a model",
    needs="judge",
)
def _(real: Real) -> Real:
    return lambda self, reward: replace(real(self, reward), resolution=2.0**-40)


@fault(
    "reward_model_trained_along",
    seam="posttrain.build.build_reward_models:FrozenRewards.rewards",
    what="the reward model is in an optimizer too, and its head moves a little with every batch that it scores",
    harm="the reward is another one after every step, and scores of two steps cannot be compared",
    source="trap of 2203.02155: policy, values and reward model in one module",
    shows=("rl.eval=false",),
    needs="judge",
)
def _(real: Real) -> Real:
    def rewards(self: Any, packed: Any) -> np.ndarray:
        found = real(self, packed)
        for weight in self._policy.reward_head.parameters():
            weight.data.mul_(1 + 1e-6)
        return found

    return rewards


@fault(
    "reward_model_not_loaded",
    seam="posttrain.build.build_reward_models:load_weights",
    what="the reward model's trained weights are not loaded, so its head is as it was drawn",
    harm="the policy learns to please a random function, and the reward rises",
    source="trap of B01: a head that is initialised anew at loading",
    needs="judge",
)
def _(real: Real) -> Real:
    return lambda folder, learner: None


@fault(
    "reward_read_without_template",
    seam="posttrain.role.judges.reward_judge:JudgeMember.segment",
    what="a reward model with a tokenizer of its own reads the bare text of a conversation, without its chat template",
    harm="its scores are those of a text such as it was never trained on, and rise and fall like any others",
    source="pain 22: another template at scoring than in training",
    needs="judge_anew",
)
def _(real: Real) -> Real:
    def segment(self: Any, episode: Any) -> Any:
        text = "\n".join(str(m["content"]) for m in episode.task.prompt)
        return real(self, replace(episode, task=replace(episode.task, prompt=text)))

    return segment
