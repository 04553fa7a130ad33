"""Faults between what a policy said and what of it is imitated: selection, prompts, and the weights of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.faults.planting import fault

Real = Callable[..., Any]
RFT = ("reject.method=rft",)
SCORED = ("reject.method.regenerate.by=scores", "env.args.judge_steps=true")


@fault(
    "worst_is_best",
    seam="posttrain.config.stages.keep_rule:Best.chosen",
    what="best of n keeps the completion with the lowest reward",
    harm="the policy learns what the reward says is worst",
    source="B10, RAFT: a cost read as a reward",
    shows=("reject.method=raft",),
    needs="reject",
)
def _(real: Real) -> Real:
    return lambda self, rewards, improvement=0: real(self, [-r for r in rewards], improvement)


@fault(
    "hint_left_in_prompt",
    seam="posttrain.role.learning.rejection_selection:without_hint",
    what="a completion that was sampled with the answer as a hint is imitated under the prompt with the hint",
    harm="the policy learns to answer questions that hold their answers, and no other",
    source="B10, STaR: rationalisations are trained without the hint",
    needs="reject",
)
def _(real: Real) -> Real:
    return lambda prompts, name: None


@fault(
    "duplicates_kept",
    seam="posttrain.role.learning.rejection_selection:once",
    what="equal completions of a prompt are all kept",
    harm="easy prompts, which give the same answer again and again, outweigh the others",
    source="B10, RFT: deduplicate before SFT",
    shows=RFT,
    needs="reject",
)
def _(real: Real) -> Real:
    return lambda chosen: list(chosen)


@fault(
    "kept_under_other_prompt",
    seam="posttrain.stages.rejection.rejection_stage:drawn",
    what="kept completions are imitated under the prompt of their neighbour in the minibatch",
    harm="right answers to other questions are learned",
    source="pain 22: rows of two lists that are joined after one of them was filtered",
    needs="reject",
)
def _(real: Real) -> Real:
    from posttrain.role.learning.rejection_selection import imitation

    def drawn(*args: Any, **kwargs: Any) -> Any:
        ones = real(*args, **kwargs)
        heads = [c.segments[0].ids[: int(np.argmax(c.segments[0].mask))] for c in ones]
        moved = [*heads[1:], *heads[:1]]
        return [
            replace(c, segments=(imitation(c.segments[0], head), *c.segments[1:]))
            for c, head in zip(ones, moved, strict=True)
        ]

    return drawn


@fault(
    "rounds_add_up",
    seam="posttrain.stages.rejection.rejection_stage:RejectionDriver._restart",
    what="a round goes on with the last weights though the method begins each with the first ones",
    harm="what early rounds kept is imitated again and again, and the policy loses its variety",
    source="B10: STaR and ReST-EM restart from the base model each round",
    needs="reject",
)
def _(real: Real) -> Real:
    return lambda self: None


@fault(
    "optimizer_survives_restart",
    seam="posttrain.stages.rejection.rejection_stage:RejectionDriver._restart",
    what="a round that begins with the first weights keeps the optimizer's moments of the round before",
    harm="the first steps of a round go where other weights were going, without a warm-up",
    source="B10: a restart of weights alone",
    needs="reject",
)
def _(real: Real) -> Real:
    def restart(self: Any) -> None:
        held = self.trainer.optimizer
        real(self)
        self.trainer.optimizer = held

    return restart


@fault(
    "cut_off_kept",
    seam="posttrain.role.learning.rejection_selection:whole",
    what="a completion that reached the limit of tokens is kept where its beginning was right",
    harm="the policy is taught never to stop",
    source="pain 22: no stop token in what is imitated",
    shows=("reject.sampling.max_tokens=1", *RFT),
    needs="reject",
)
def _(real: Real) -> Real:
    return lambda e: e.spoken > 0


@fault(
    "last_round_kept_again",
    seam="posttrain.stages.rejection.rejection_stage:select",
    what="every round selects from the completions of the first one",
    harm="nothing new is learned, and what the newest policy can do is never seen",
    source="B10: a file of samples that is read again instead of written",
    needs="reject",
)
def _(real: Real) -> Real:
    first: list[Any] = []

    def select(candidates: Any, *args: Any, **kwargs: Any) -> Any:
        first.append(candidates)
        return real(first[0], *args, **kwargs)

    return select


@fault(
    "imitated_at_sampling_temperature",
    seam="posttrain.role.learning.rejection_selection:imitation",
    what="kept completions are learned under the temperature at which they were sampled",
    harm="the likelihood is that of another distribution than the model's own",
    source="pain 3: log-probs under another sampling contract",
    shows=("reject.sampling.temperature=0.7",),
    needs="reject",
)
def _(real: Real) -> Real:
    def imitation(segment: Any, prompt: Any = None) -> Any:
        found = real(segment, prompt)
        return replace(found, sampling=replace(found.sampling, temperature=segment.sampling.temperature))

    return imitation


@fault(
    "demonstrations_left_out",
    seam="posttrain.stages.rejection.rejection_stage:demonstrated",
    what="the share of ordinary demonstrations is empty",
    harm="what they taught is forgotten, round after round",
    source="B10: RFT and ReST train on the first data and the kept completions together",
    shows=("reject.general=0.25", "reject.style=answer"),
    needs="reject",
)
def _(real: Real) -> Real:
    async def demonstrated(*args: Any, **kwargs: Any) -> list[Any]:
        return []

    return demonstrated


# --- wrong answers said anew ------------------------------------------------------------------------------------------


@fault(
    "right_steps_said_anew",
    seam="posttrain.role.judges.regenerate:any_right",
    what="a step counts as wrong where some completion from its end is wrong",
    harm="steps that are right are said anew, and what is learned is far from the error",
    source="C06: the hard label of a step is whether any completion is right",
    needs="regenerate",
)
def _(real: Real) -> Real:
    return lambda completions: real([min(completions, key=lambda c: c.figure or 0.0)])


@fault(
    "first_wrong_step_late",
    seam="posttrain.role.judges.regenerate:right_steps",
    what="answers go on from the end of their first wrong step, and not from before it",
    harm="the error stays, and what is kept teaches to write it and to come right by chance",
    source="labels one step late",
    shows=SCORED,
    needs="regenerate",
)
def _(real: Real) -> Real:
    return lambda scores, at: min(real(scores, at) + 1, len(scores))


@fault(
    "regenerated_is_lost",
    seam="posttrain.role.learning.rejection_selection:regenerated_candidates",
    what="what was said in place of first wrong steps becomes no candidate",
    harm="hard prompts cost completions and teach nothing",
    source="B10: what is right of hard prompts is rare, and what imitation gains is there",
    needs="regenerate",
)
def _(real: Real) -> Real:
    return lambda regenerated: []
