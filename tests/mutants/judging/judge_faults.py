"""Faults of policies that learn to judge, and of judges that pay a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from posttrain.core.judgements import Pair
from posttrain.core.verdict import State, Verdict
from posttrain.environment.judged.judge_rules import chosen
from posttrain.faults.planting import fault

Real = Callable[..., Any]


# --- a judge that learns ---------------------------------------------------------------------------------------------


@fault(
    "judge_order_not_random",
    seam="posttrain.environment.gallery.judge:Judge._ordered",
    what="the chosen completion of a pair always comes first",
    harm="the judge learns to name the first side, and is as good as chance in use",
    source="trap of C05: columns chosen and rejected written into the prompt in this order",
    needs="judging",
)
def _(real: Real) -> Real:
    def ordered(self: Any, pair: Pair, rng: np.random.Generator) -> tuple[tuple[str, str], int]:
        real(self, pair, rng)
        return (pair.chosen, pair.rejected), 0

    return ordered


# --- a judge that pays -----------------------------------------------------------------------------------------------


@fault(
    "judge_of_another_sibling",
    seam="posttrain.role.judges.generative_judge:GenerativeJudge.verdicts",
    what="the verdicts of a group come back in another order",
    harm="each answer is paid for its sibling, and the mean reward looks right",
    source="pain 18: rewards and completions misaligned",
    needs="votes",
)
def _(real: Real) -> Real:
    async def verdicts(self: Any, episodes: Any) -> Any:
        found = await real(self, episodes)
        return [*found[1:], *found[:1]]

    return verdicts


@fault(
    "judge_outage_scored_low",
    seam="posttrain.role.judges.generative_judge:GenerativeJudge._verdict",
    what="an answer about which no vote could be read scores 0",
    harm="answers are punished for what the judge could not say",
    source="pain 16: an outage read as a wrong answer",
    shows=("rl.sampling.max_tokens=12",),
    needs="votes",
)
def _(real: Real) -> Real:
    def verdict(self: Any, episode: Any, values: Any, said: str, votes: Any) -> Verdict:
        found = real(self, episode, values if episode.sibling else (), said, votes)
        return Verdict.value(0.0, why=said) if found.state is State.FAILED else found

    return verdict


@fault(
    "judge_votes_lost",
    seam="posttrain.role.judges.generative_judge:GenerativeJudge._values",
    what="only the votes of the first order are counted",
    harm="what the judge prefers by place is paid, and the record shows that both orders were asked",
    source="trap of C05: both orders sampled, one read",
    needs="votes",
)
def _(real: Real) -> Real:
    return lambda i, votes, kept: real(i, votes, [k for k in kept if votes[k].sides == votes[0].sides])


@fault(
    "judge_yes_of_another_tokenizer",
    seam="posttrain.role.judges.generative_judge:GenerativeJudge._verdict_ids",
    what="the tokens of Yes are those of the policy's tokenizer, which numbers them otherwise",
    harm="the reward is the probability of a word that means nothing, and lies in 0..1 like any other",
    source="trap of 2408.15240: the id of the verdict's token",
    shows=("env.rewards.0.votes=2",),
    needs="yes",
)
def _(real: Real) -> Real:
    return lambda self, text: real(self, text) + 1


# --- a verifier of steps ---------------------------------------------------------------------------------------------


@fault(
    "verifier_reads_ahead",
    seam="posttrain.role.judges.generative_steps:GenerativeStepJudge.beginnings",
    what="a verifier is shown the answer up to the end of the step after the one that it judges",
    harm="each step has the score of the next one, so the step before an error is punished for it",
    source="labels one step late",
    needs="verifies",
)
def _(real: Real) -> Real:
    def beginnings(self: Any, e: Any) -> list[str]:
        found = real(self, e)
        return [*found[1:], *found[-1:]]

    return beginnings


@fault(
    "verifier_votes_of_another_step",
    seam="posttrain.role.judges.generative_steps:step_verdicts",
    what="the scores of an answer's steps come back in another order than they were voted",
    harm="credit for an error falls on another step, and the mean score of an answer looks right",
    source="trap of C06: the scores of steps and the steps misaligned",
    needs="verifies",
)
def _(real: Real) -> Real:
    return lambda name, r, ends, scores, resolution, why: real(name, r, ends, scores[::-1], resolution, why)


# --- a meta reward model of its judgements ---------------------------------------------------------------------------


@fault(
    "meta_labels_are_its_votes",
    seam="posttrain.role.judges.generative_judge:labels",
    what="a judgement counts as right where it names what most of the judge's votes about the pair name",
    harm="the meta reward model learns what the judge likes to say, and its filter makes the judge surer of its errors",
    source="meta-RM trained on its own votes",
    needs="meta",
)
def _(real: Real) -> Real:
    def labels(judging: Any, each: Any) -> list[bool | None]:
        named = [None if v.scores is None else chosen(v.scores) for v in each.votes]
        sides = [side for side in named if side is not None]
        most = max(sides, key=sides.count, default=None)
        return [None if v.scores is None else side == most for v, side in zip(each.votes, named, strict=True)]

    return labels
