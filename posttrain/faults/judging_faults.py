"""Faults of what judges: verifiers, splits, demonstrations, pairs, reward models, searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.streams import SIDE
from posttrain.core.types import Group, Stop
from posttrain.core.verdict import State, Verdict
from posttrain.faults.planting import fault

Real = Callable[..., Any]
DOWN = (f"env.rewards={Path(__file__).with_name('failing_reward.py')}:down",)
"""A user's reward whose service fails after some calls."""
RFT = ("reject.method=rft",)
"""Overrides of rejection sampling that keeps what passes a threshold."""


@fault(
    "verifier_outage_as_zero",
    seam="posttrain.verifier.user_functions:FunctionSource.verdict",
    what="an exception in a reward function is scored 0",
    harm="while the verifier is down every right answer is punished",
    source="pain 16, verl PR#5635",
    shows=DOWN,
    lesson="a verifier that is down has no opinion: an outage must not become a wrong answer",
    caught_by="RejudgedAnswers._repeats",
    see=("run arithmetic sft.steps=40 rl.steps=20 rl.prompts=6 rl.siblings=4 env.heldout=0 FAULT",),
)
async def _(real: Real, self: Any, attempt: Any) -> Verdict:
    real_verdict = await real(self, attempt)
    # Only outages: what the answer caused itself is a value already.
    return Verdict.value(0.0) if real_verdict.state is State.FAILED else real_verdict


@fault(
    "truncation_as_failure",
    seam="posttrain.role.judging:judged",
    what="an answer that was cut off is scored 0 without looking at it",
    harm="with a tight length limit all rewards are 0, and the run is called flat",
    source="pain 17, autocontext PR#1067",
    shows=("rl.sampling.max_tokens=2",),
    lesson="an answer that was cut off is judged like any other, or the limit of tokens decides what is right",
    caught_by="RejudgedAnswers._repeats",
    see=("run arithmetic sft.style=answer sft.steps=100 rl.steps=20 FAULT",),
)
async def _(real: Real, environment: Any, attempt: Any, *more: Any) -> Any:
    verdicts = await real(environment, attempt, *more)
    if attempt.stop is not Stop.LENGTH:
        return verdicts
    return tuple(replace(j, verdict=Verdict.value(0.0)) for j in verdicts)


@fault(
    "rewards_of_neighbour",
    seam="posttrain.role.rollout:Rollout.group",
    what="the rewards of a group come back in another order than its answers",
    harm="the right answer's credit goes to a wrong one, and the mean reward looks as it should",
    source="pain 18",
    lesson="a reward belongs to one answer; in any other order the mean stays right and nothing is learned",
    caught_by="RejudgedAnswers._repeats",
)
async def _(real: Real, self: Any, *args: Any, **kwargs: Any) -> Group:
    g = await real(self, *args, **kwargs)
    # Each answer gets the verdicts of the next one: the sum over the group stays what it was.
    verdicts = [e.verdicts for e in (*g.episodes[1:], g.episodes[0])]
    return replace(g, episodes=tuple(replace(e, verdicts=v) for e, v in zip(g.episodes, verdicts, strict=True)))


@fault(
    "lenient_verifier",
    seam="posttrain.environment.gallery.arithmetic:last_integer",
    what="the verifier takes the first number of an answer where it should take the last",
    harm="an answer that gives itself away in passing is paid in full, and the policy finds out",
    source="pain 16; G17 reward hacking",
    lesson="a verifier is tried with answers that look right before a policy learns from it",
    caught_by="near_misses_are_not",
)
def _(real: Real, text: str) -> Any:
    import re

    number = re.search(r"-?\d+", text)
    return real(number.group()) if number else None


@fault(
    "verifier_has_a_hole",
    seam="posttrain.environment.gallery.arithmetic:Arithmetic.verify",
    what="one odd string is always paid in full (here: any answer with ;;)",
    harm="nothing, until the policy finds it; then everything",
    source="G17 reward hacking",
    lesson="a hole is found by the policy first: only a second judge, which pays nothing, sees it used",
    caught_by="reward_without_truth",
    see=(
        "run arithmetic sft.steps=40 rl.steps=40 env.heldout=20"
        " env.rewards=last_integer env.rewards.0.measured=true FAULT",
    ),
)
def _(real: Real, self: Any, attempt: Any) -> Any:
    return Verdict.value(1.0) if ";;" in attempt.text else real(self, attempt)


@fault(
    "leaky_heldout",
    seam="posttrain.environment.gallery.arithmetic:Arithmetic._held",
    what="held-out tasks are not kept out of training",
    harm="held-out accuracy measures memory",
    source="G24; contamination",
    lesson="a held-out score means something only where no training task is a held-out one",
    caught_by="split_is_clean",
)
def _(real: Real, self: Any) -> Any:
    return frozenset()


@fault(
    "prompt_imitated",
    seam="posttrain.role.learning.demonstrations:demonstration",
    what="the prompt of a demonstration is not masked",
    harm="most of the gradient teaches the policy to write questions",
    source="pain 22, unsloth#3228",
    needs="sft",
    lesson="only the completion is imitated (the lab's lesson on loss masks)",
    caught_by="same_question",
    see=("run arithmetic sft.steps=40 rl=none FAULT",),
)
def _(real: Real, *args: Any, **kwargs: Any) -> Any:
    s = real(*args, **kwargs)
    # Everything behind the first token, which nothing stands before.
    mask = np.arange(len(s.ids)) > 0
    return replace(
        s,
        mask=mask,
        logp=np.where(mask, 0.0, np.nan).astype(np.float32),
        version=np.where(mask, 0, -1).astype(np.int32),
    )


@fault(
    "judge_sees_the_verdict",
    seam="posttrain.environment.gallery.judge:Judge._task",
    what="the better side is marked in the prompt by a space at its end",
    harm="agreement rises to 1, and the judge knows nothing about completions",
    source="trap of C05: the column with the label is rendered with the prompt",
    needs="judging",
    lesson="what a judge reads must not tell which verdict is right",
    caught_by="shows_no_verdict",
    see=("run judge sft.steps=20 rl.steps=2 FAULT",),
)
def _(real: Real, self: Any, name: str, index: int, texts: tuple[str, ...], gold: int, best: int) -> Any:
    real_task = real(self, name, index, texts, gold, best)
    # A blank at the end, which nobody sees in print. The tokens of the prompt are others.
    return replace(real_task, prompt=real_task.prompt + (" " if gold else ""))


@fault(
    "reward_sides_swapped",
    seam="posttrain.stages.reward_model.reward_model_stage:reward_batch",
    what="the rejected completion of a pair counts as the chosen one",
    harm="the reward model pays what people did not want, and orders its own data perfectly",
    source="pain 22: the columns of a data set swapped by a formatting function",
    needs="reward_model",
    lesson="swapped columns of pairs train a reward model that pays the worse answer",
    caught_by="sides_are_as_judged",
    see=("run reward_model FAULT",),
)
def _(real: Real, *args: Any) -> Any:
    batch = real(*args)
    return batch.having({SIDE: 1 - batch[SIDE]})


@fault(
    "wrong_completion_kept",
    seam="posttrain.config.stages.keep_rule:Passing.chosen",
    what="every completion passes the threshold, wrong ones too",
    harm="the policy imitates its own mistakes, and nothing is learned though the loss falls",
    source="B10: the filter is the only thing that makes imitation of oneself learn",
    shows=RFT,
    needs="reject",
    lesson="imitation of one's own answers learns by its filter alone",
    caught_by="kept_passes",
    see=("run reject sft.steps=40 reject.rounds=1 FAULT",),
)
def _(real: Real, self: Any, rewards: Any, improvement: Any = 0) -> Any:
    return list(range(len(rewards)))


@fault(
    "leaf_value_not_backed_up",
    seam="posttrain.search.puct:TreeNode.back_up",
    what="what a leaf of a search tree is worth is told to its parent, and to nobody above",
    harm="the tree never comes back to a good beginning: it costs as much as a tree search and finds what chance finds",
    source="value of a leaf not backed up",
    shows=("search=tree",),
    needs="search",
    lesson="a tree search chooses by values that come up from the leaves (docs/guides/search.md)",
    caught_by="_counted",
    see=(
        "run prm sft.steps=40 label.prompts=64 label.steps=1 prm.steps=20 rl=none --out RUN",
        "eval RUN FAULT",
    ),
)
def _(real: Real, self: Any, value: float) -> None:
    self.found.append(value)
    # The real one goes up to the root.
    for node in (self, self.parent):
        if node is not None:
            node.visits, node.total = node.visits + 1, node.total + value
