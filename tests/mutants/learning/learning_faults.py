"""Faults between the reward and the gradient: credit, weights, loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import VALUE
from posttrain.core.types import Stop
from posttrain.faults.planting import fault

Real = Callable[..., Any]
TWICE = ("rl.minibatches=2", "rl.optimizer.lr=0.01")
"""Overrides that give a second optimizer step on the same samples, after the first has clearly moved the policy."""


@fault(
    "gae_over_observations",
    seam="posttrain.algorithm.credit.baseline_values:_with_values",
    what="advantages step through a tool's tokens as if the policy had said them, with value 0 there",
    harm="credit fades across every tool result, and the last action before it is told the future is worth nothing",
    source="trap 12, pain 15",
    shows=("algorithm=ppo", "rl.optimizer.lr=0.01"),
    needs="tool",
)
def _(real: Real) -> Real:
    def with_values(value: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        from posttrain.algorithm.credit.value_estimates import gae

        segments = sample.scored.episode.segments
        at = np.concatenate([s.mask[np.argmax(s.mask) :] for s in segments])
        values, rewards = np.zeros(len(at)), np.zeros(len(at))
        values[at] = np.concatenate(sample.scored[VALUE])
        rewards[at] = -sample.penalty_T
        rewards[np.flatnonzero(at)[-1]] += sample.shaped
        advantage, returns = gae(values, rewards, gamma=value.gamma, gae_lambda=value.gae_lambda)
        return advantage[at], returns[at]

    return with_values


@fault(
    "group_sum_baseline",
    seam="posttrain.algorithm.credit.baseline_values:mean",
    what="the baseline divides by one sample less than it summed",
    harm="credit no longer sums to zero: answers are pushed down on average, and entropy rises or falls for no reason",
    source="law 4",
)
def _(real: Real) -> Real:
    return lambda rewards: float(np.sum(rewards)) / max(1, len(rewards) - 1)


@fault(
    "truncated_left_out_of_baseline",
    seam="posttrain.stages.training_step:score",
    what="answers that were cut off are removed before credit is computed",
    harm="the baseline is that of finished answers only, so it is too high and finishing is not what is taught",
    source="pain 17, trl#3569",
    shows=("rl.sampling.max_tokens=2",),
)
def _(real: Real) -> Real:
    def score(*args: Any, **kwargs: Any) -> Any:
        out = [
            replace(g, episodes=tuple(e for e in g.episodes if e.episode.stop is not Stop.LENGTH))
            for g in real(*args, **kwargs)
        ]
        return tuple(g for g in out if g.episodes)

    return score


@fault(
    "value_targets_shifted",
    seam="posttrain.role.pack:_stream",
    what="value targets are one token late",
    harm="values learn the wrong token's return, and credit is noise",
    source="pain 15",
    shows=("algorithm=ppo",),
)
def _(real: Real) -> Real:
    def stream(parts: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        out = real(parts, name, *args, **kwargs)
        return np.roll(out, 1) if name == "returns" and out is not None else out

    return stream


@fault(
    "reference_stream_shifted",
    seam="posttrain.role.pack:_stream",
    what="the reference's log-probs are one token late in the batch",
    harm="the KL compares different tokens and pulls at random",
    source="pain 11",
    shows=("algorithm=grpo",),
)
def _(real: Real) -> Real:
    def stream(parts: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        out = real(parts, name, *args, **kwargs)
        return np.roll(out, 1) if name == "reference" and out is not None else out

    return stream


@fault(
    "entropy_bonus_punishes",
    seam="posttrain.algorithm.loss.policy_loss:_further_terms",
    what="the entropy term is weighed with the wrong sign",
    harm="what should keep the policy exploring makes it collapse",
    source="pain 19",
    shows=("entropy=entropybonus", "entropy.coef=0.01"),
)
def _(real: Real) -> Real:
    def beside(a: Any, log_ratio_M: Any, logp_M: Any, batch: Any, scores: Any) -> Any:
        beside_M = real(a, log_ratio_M, logp_M, batch, scores)
        return beside_M if a.entropy is None else beside_M + 2 * a.entropy.coef * scores.entropy

    return beside


@fault(
    "value_loss_forgotten_factor",
    seam="posttrain.algorithm.loss.policy_loss:value_loss",
    what="the value loss lacks its factor of one half",
    harm="the value coefficient means twice what it says",
    source="trap 4: the same name, another scale",
    shows=("algorithm=ppo",),
)
def _(real: Real) -> Real:
    return lambda *args, **kwargs: 2 * real(*args, **kwargs)


@fault(
    "sequence_ratio_not_a_mean",
    seam="posttrain.algorithm.loss.policy_loss:importance",
    what="a sequence-level ratio multiplies its tokens' ratios instead of taking their geometric mean",
    harm="long answers leave any trust region at once and fall silent",
    source="law 1; GSPO's definition",
    shows=("algorithm=gspo", *TWICE),
)
def _(real: Real) -> Real:
    return lambda ratio, *args, **kwargs: real(
        "sequence_product" if ratio == "sequence_mean" else ratio, *args, **kwargs
    )


@fault(
    "correction_upside_down",
    seam="posttrain.algorithm.loss.policy_loss:correct",
    what="the train/inference correction is sampler over learner instead of learner over sampler",
    harm="mismatch is squared instead of removed",
    source="pain 3; A25",
    shows=("algorithm=decoupled_ppo", "rl.minibatches=2"),
)
def _(real: Real) -> Real:
    def correct(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return replace(found, used_M=1 / found.used_M)

    return correct


@fault(
    "baseline_saw_the_sample",
    seam="posttrain.algorithm.credit.step_credit:_centred",
    what="the moving baseline is updated with a sample before that sample is compared with it",
    harm="credit is too small and biased towards 0",
    source="A01",
    shows=("algorithm=reinforce_ema",),
)
def _(real: Real) -> Real:
    def centred(a: Any, rewards: Any, lengths: Any, group: Any, ema: float) -> Any:
        credit, after = real(a, rewards, lengths, group, ema)
        return credit * a.baseline.decay, after

    return centred


@fault(
    "overlong_is_praised",
    seam="posttrain.algorithm.credit.step_credit:shaped",
    what="the penalty for overlong answers is added with the wrong sign",
    harm="answers grow to the limit",
    source="A10; pain 17",
    shows=("algorithm=dapo", "rl.sampling.max_tokens=3"),
)
def _(real: Real) -> Real:
    def shaped(pieces: Any, raw: Any, *args: Any, **kwargs: Any) -> Any:
        rewards, dropped = real(pieces, raw, *args, **kwargs)
        signed = 2 * np.asarray(raw) - 1
        return 2 * signed - rewards, dropped

    return shaped
