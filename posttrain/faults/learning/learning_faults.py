"""Faults between the reward and the gradient: credit, weights, loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import REFERENCE, START, VALUE
from posttrain.core.types import Stop
from posttrain.core.verdict import outcome
from posttrain.faults.planting import fault
from posttrain.ladder.pieces.pull import KL

Real = Callable[..., Any]
TWICE = ("rl.minibatches=2", "rl.optimizer.lr=0.01")
"""Overrides that give a second optimizer step on the same samples, after the first has clearly moved the policy."""


@fault(
    "std_ddof",
    seam="posttrain.algorithm.credit.step_credit:_std",
    what="the group's standard deviation divides by G instead of G - 1",
    harm="credit is too large, most of all in small groups: the effective learning rate depends on the group size",
    source="docs/algorithms-notes.md: the group's standard deviation has ddof 1",
)
def _(real: Real) -> Real:
    return lambda rewards, *args, **kwargs: float(np.std(rewards))


@fault(
    "groups_mixed",
    seam="posttrain.algorithm.credit.step_credit:_by_samples",
    what=(
        "rewards laid out sample by sample are read as prompt by prompt, so each answer is compared with other prompts'"
        " answers"
    ),
    harm="easy prompts look good and hard ones bad: credit measures the task, not the answer",
    source="pain 18, Search-R1#88",
)
def _(real: Real) -> Real:
    def by_samples(a: Any, samples_P: Any, *args: Any, **kwargs: Any) -> Any:
        if len({len(s) for s in samples_P}) != 1:
            return real(a, samples_P, *args, **kwargs)
        places = np.arange(len(samples_P) * len(samples_P[0])).reshape(len(samples_P), -1).T.ravel()
        flat = [s for samples in samples_P for s in samples]
        mixed = [[flat[i] for i in part] for part in np.array_split(places, len(samples_P))]
        raw, *rest = real(a, mixed, *args, **kwargs)
        home = dict(zip(places.tolist(), raw, strict=True))
        return [home[i] for i in range(len(flat))], *rest

    return by_samples


@fault(
    "advantage_off_by_one",
    seam="posttrain.role.pack:_stream",
    what="credit is one token late, across the border of two answers",
    harm="the first token of every answer gets the credit of the answer before it",
    source="pain 15",
)
def _(real: Real) -> Real:
    def stream(parts: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        out = real(parts, name, *args, **kwargs)
        return np.roll(out, 1) if name == "advantage" and out is not None else out

    return stream


@fault(
    "sign_flip",
    seam="posttrain.algorithm.loss.losses:objective",
    what="the loss has the wrong sign",
    harm="the policy unlearns what is rewarded, and the surrogate loss still looks like one",
    source="pain 19",
)
def _(real: Real) -> Real:
    def objective(*args: Any, **kwargs: Any) -> Any:
        terms = real(*args, **kwargs)
        return replace(terms, loss=-terms.loss)

    return objective


@fault(
    "kl_reversed",
    seam="posttrain.algorithm.loss.kl:estimate",
    what="the KL estimate takes reference - policy instead of policy - reference",
    harm=(
        "its gradient is of the wrong KL: the pull no longer bounds what the policy does where the reference does"
        " not go"
    ),
    source="pain 11, OpenRLHF#768",
    shows=("algorithm=grpo", "rl.optimizer.lr=0.01"),
)
def _(real: Real) -> Real:
    return lambda estimator, gap, *args, **kwargs: real(estimator, -gap, *args, **kwargs)


@fault(
    "kl_twice",
    seam="posttrain.algorithm.credit.step_credit:_samples",
    what="a KL that is in the loss is taken from the reward as well",
    harm="the policy is held back more than the coefficient says",
    source="pain 11, trl#4637",
    shows=("algorithm=grpo", "rl.optimizer.lr=0.01"),
)
def _(real: Real) -> Real:
    def samples(a: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        return [replace(s, shaped=s.shaped - _distance(a, s.scored)) for s in real(a, group, *args, **kwargs)]

    return samples


def _distance(a: Any, scored: Any) -> float:
    """coef * (log mu - log reference), summed over a whole answer."""
    if not isinstance(a.pull, KL) or REFERENCE not in scored:
        return 0.0
    mu = np.concatenate([s.logp[s.mask] for s in scored.episode.segments]).astype(np.float64)
    return a.pull.coef * float(np.sum(mu - np.concatenate(scored[REFERENCE])))


@fault(
    "old_logprob_after_step",
    seam="posttrain.algorithm.loss.losses:streams",
    what="the old log-prob is recomputed with the weights of now",
    harm="every ratio is 1, so the clip never acts and later optimizer steps run away",
    source="pain 3",
    shows=TWICE,
)
def _(real: Real) -> Real:
    return lambda *args, **kwargs: real(*args, **kwargs).having({START: None})


@fault(
    "clip_never_acts",
    seam="posttrain.algorithm.loss.policy_loss:push",
    what="the trust region is computed and not applied",
    harm="off-policy minibatches push without bound",
    source="trap 2",
    shows=("rl.minibatches=2", "rl.optimizer.lr=0.05", "rl.optimizer.warmup=0"),
)
def _(real: Real) -> Real:
    def push(region: Any, look: Any) -> Any:
        return replace(real(region, look), push_M=look.ratio_M)

    return push


@fault(
    "aggregation_swapped",
    seam="posttrain.role.pack:weigh",
    what="tokens are averaged in another way than the algorithm says (over all tokens, not over each answer)",
    harm="long answers weigh more than the paper's objective gives them",
    source="trap 4",
    shows=("algorithm=grpo",),
)
def _(real: Real) -> Real:
    return lambda aggregate, *args, **kwargs: real("token_mean", *args, **kwargs)


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
    "filter_on_shaped",
    seam="posttrain.core.types:Group.mixed",
    what="the filter for groups with spread looks at the shaped reward (here: less for long answers)",
    harm="groups that are all wrong pass because their lengths differ, and length is all they teach",
    source="pain 18, NeMo#2431",
    shows=("algorithm=dapo",),
)
def _(real: Real) -> Real:
    def mixed(self: Any) -> bool:
        shaped = [(outcome(e.verdicts) or 0.0) - 0.1 * e.spoken for e in self.judged]
        return len(shaped) > 1 and max(shaped) != min(shaped)

    return mixed


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
