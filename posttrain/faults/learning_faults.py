"""Faults between the reward and the gradient: credit, weights, loss, adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.batch import Batch
from posttrain.core.streams import REFERENCE, START, WEIGHT
from posttrain.core.verdict import outcome
from posttrain.faults.planting import fault
from posttrain.ladder.pieces.pull import KL

Real = Callable[..., Any]
TWICE = ("rl.minibatches=2", "rl.optimizer.lr=0.01")
"""Overrides that give a second optimizer step on the same samples, after the first has clearly moved the policy."""
MICRO = ("rl.micro_tokens=64",)
"""Overrides that give several micro-batches per optimizer step."""


@fault(
    "std_ddof",
    seam="posttrain.algorithm.credit.step_credit:_std",
    what="the group's standard deviation divides by G instead of G - 1",
    harm="credit is too large, most of all in small groups: the effective learning rate depends on the group size",
    source="docs/design/algorithms-notes.md: the group's standard deviation has ddof 1",
    lesson="the group's standard deviation divides by G - 1, and by G every small group learns faster",
    caught_by="StepCreditAudit.credit_agrees",
)
def _(real: Real, rewards: Any, *args: Any, **kwargs: Any) -> Any:
    return float(np.std(rewards))


@fault(
    "groups_mixed",
    seam="posttrain.algorithm.credit.step_credit:_by_samples",
    what=(
        "rewards laid out sample by sample are read as prompt by prompt, so each answer is compared with other prompts'"
        " answers"
    ),
    harm="easy prompts look good and hard ones bad: credit measures the task, not the answer",
    source="pain 18, Search-R1#88",
    lesson="an answer is compared with answers to its own prompt only",
    caught_by="StepCreditAudit.credit_agrees",
)
def _(real: Real, a: Any, samples_P: Any, *args: Any, **kwargs: Any) -> Any:
    # Groups of different sizes have no rectangle to be read along the other axis.
    if len({len(s) for s in samples_P}) != 1:
        return real(a, samples_P, *args, **kwargs)
    # The places of a [P, G] rectangle in the order of its transpose.
    places = np.arange(len(samples_P) * len(samples_P[0])).reshape(len(samples_P), -1).T.ravel()
    flat = [s for samples in samples_P for s in samples]
    mixed = [[flat[i] for i in of_group] for of_group in np.array_split(places, len(samples_P))]
    mixed_credit, *silent_and_after = real(a, mixed, *args, **kwargs)
    # Each result goes back to its own sample: wrong is only what it was compared with.
    by_place = dict(zip(places.tolist(), mixed_credit, strict=True))
    return [by_place[i] for i in range(len(flat))], *silent_and_after


@fault(
    "advantage_off_by_one",
    seam="posttrain.role.pack:_stream",
    what="credit is one token late, across the border of two answers",
    harm="the first token of every answer gets the credit of the answer before it",
    source="pain 15",
    lesson="credit is of its own token: one place beside, the border of answers is crossed",
    caught_by="StepCreditAudit.credit_agrees",
)
def _(real: Real, parts: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    out = real(parts, name, *args, **kwargs)
    # Over the whole batch: the first token of an answer gets what the last one of the answer before it had.
    return np.roll(out, 1) if name == "advantage" and out is not None else out


@fault(
    "sign_flip",
    seam="posttrain.algorithm.loss.losses:objective",
    what="the loss has the wrong sign",
    harm="the policy unlearns what is rewarded, and the surrogate loss still looks like one",
    source="pain 19",
    lesson="a loss with the wrong sign looks like one, and unlearns what is paid",
    caught_by="points_uphill",
)
def _(real: Real, *args: Any, **kwargs: Any) -> Any:
    terms = real(*args, **kwargs)
    return replace(terms, loss=-terms.loss)


@fault(
    "kl_reversed",
    seam="posttrain.algorithm.loss.reference_penalty:estimate",
    what="the KL estimate takes reference - policy instead of policy - reference",
    harm=(
        "its gradient is of the wrong KL: the pull no longer bounds what the policy does where the reference does"
        " not go"
    ),
    source="pain 11, OpenRLHF#768",
    shows=("algorithm=grpo", "rl.optimizer.lr=0.01"),
    lesson="the two directions of a KL are two penalties (the lab's lesson on reward and reference)",
    caught_by="agrees_on_synthetic_batch",
)
def _(real: Real, estimator: Any, gap: Any, *args: Any, **kwargs: Any) -> Any:
    return real(estimator, -gap, *args, **kwargs)


@fault(
    "kl_twice",
    seam="posttrain.algorithm.credit.step_credit:_samples",
    what="a KL that is in the loss is taken from the reward as well",
    harm="the policy is held back more than the coefficient says",
    source="pain 11, trl#4637",
    shows=("algorithm=grpo", "rl.optimizer.lr=0.01"),
    lesson="a KL is in the loss or in the reward, and not in both",
    caught_by="StepCreditAudit.credit_agrees",
)
def _(real: Real, a: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    return [replace(s, shaped=s.shaped - _distance(a, s.scored)) for s in real(a, group, *args, **kwargs)]


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
    lesson="the old log-probs are those before the first optimizer step, or no ratio is ever clipped",
    caught_by="agrees_on_synthetic_batch",
)
def _(real: Real, *args: Any, **kwargs: Any) -> Any:
    # Without the stream the loss takes the log-probs of now.
    return real(*args, **kwargs).having({START: None})


@fault(
    "clip_never_acts",
    seam="posttrain.algorithm.loss.policy_loss:push",
    what="the trust region is computed and not applied",
    harm="off-policy minibatches push without bound",
    source="trap 2",
    shows=("rl.minibatches=2", "rl.optimizer.lr=0.05", "rl.optimizer.warmup=0"),
    lesson="without its min or max a clipped loss still has a gradient where it should have none",
    caught_by="agrees_on_synthetic_batch",
)
def _(real: Real, region: Any, inputs: Any) -> Any:
    return replace(real(region, inputs), push_M=inputs.ratio_M)


@fault(
    "aggregation_swapped",
    seam="posttrain.role.pack:weigh",
    what="tokens are averaged in another way than the algorithm says (over all tokens, not over each answer)",
    harm="long answers weigh more than the paper's objective gives them",
    source="trap 4",
    shows=("algorithm=grpo",),
    lesson="a mean over tokens and a mean over answers are two losses",
    caught_by="StepCreditAudit.weights_agree",
)
def _(real: Real, aggregate: Any, *args: Any, **kwargs: Any) -> Any:
    return real("token_mean", *args, **kwargs)


@fault(
    "filter_on_shaped",
    seam="posttrain.core.types:Group.mixed",
    what="the filter for groups with spread looks at the shaped reward (here: less for long answers)",
    harm="groups that are all wrong pass because their lengths differ, and length is all they teach",
    source="pain 18, NeMo#2431",
    shows=("algorithm=dapo",),
    lesson="groups are filtered by what was right, before rewards are shaped",
    caught_by="filter_reads_outcomes",
)
def _(real: Real, self: Any) -> bool:
    # Lengths differ nearly always, so a group that is all wrong seems to have a spread.
    shaped = [(outcome(e.verdicts) or 0.0) - 0.1 * e.spoken for e in self.judged]
    return len(shaped) > 1 and max(shaped) != min(shaped)


@fault(
    "accumulation_scale",
    seam="posttrain.core.batch:Packed.cut",
    what="the loss is divided by the number of micro-batches although its weights already are a share of the whole",
    harm="the learning rate falls when the memory setting changes",
    source="pain 10, unsloth#3006",
    shows=MICRO,
    lesson="micro-batches change memory and nothing else",
    caught_by="loss_agrees",
)
def _(real: Real, self: Any, *args: Any, **kwargs: Any) -> Any:
    parts = real(self, *args, **kwargs)
    # Sequences without weights are only scored.
    if not isinstance(self, Batch):
        return parts
    return [p.having({WEIGHT: p[WEIGHT] / len(parts)}) for p in parts]


@fault(
    "preference_sign_flip",
    seam="posttrain.algorithm.preference.preference_loss:_Judged._margins",
    what="the margin is rejected minus chosen",
    harm="the policy learns the opposite of what was judged",
    source="pain 19",
    needs="preference",
    lesson="a preference loss has a margin, and its sign is what was judged",
    caught_by="agrees_on_synthetic_judgements",
    see=("run dpo sft.steps=20 dpo.steps=5 FAULT",),
)
def _(real: Real, self: Any, c: Any, r: Any) -> Any:
    return real(self, r, c)


@fault(
    "adapter_left_out",
    seam="posttrain.engine.embedded.cache.fused_decoder:effective",
    what="the engine computes with the weights beneath the adapter alone",
    harm="every answer is that of the model before training, and nothing looks wrong",
    source="pain 5, TRL 1.10.0",
    shows=("model.lora.rank=4",),
    lesson="what samples must hold the adapter that trains",
    caught_by="Sync._try_adapter",
)
def _(real: Real, layer: Any) -> Any:
    # The weight beneath the adapter with the real bias.
    return (getattr(layer, "base_layer", layer).weight.detach().clone(), real(layer)[1])
