"""Faults between a hint and what is learned from a teacher that was shown it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.streams import REFERENCE, TOP_IDS, TOP_LOGP
from posttrain.core.types import Group
from posttrain.faults.planting import fault
from posttrain.role.learning.hinted_teacher import HintedEpisode

Real = Callable[..., Any]
SIBLING, ANSWER = (
    ("algorithm=sdpo", "rl.algorithm.hint.weights=now"),
    ("algorithm=sdft", "rl.algorithm.hint.weights=now"),
)


@fault(
    "hint_shifts_labels",
    seam="posttrain.role.learning.hinted_teacher:behind",
    what="behind the hint the mask stays where it was, so the teacher is asked about tokens of the prompt",
    harm="the policy is pulled towards what the teacher thinks of other tokens",
    source="2601.20802: log-probs of the teacher are those of the completion, behind the longer prompt",
    shows=ANSWER,
)
def _(real: Real) -> Real:
    def behind(segment: Any, own: Any, prompt: Any) -> Any:
        out, early = real(segment, own, prompt), len(prompt) - len(own)
        roll = lambda x: np.concatenate([x[early:], x[:early]]) if early > 0 else x  # noqa: E731
        return replace(out, mask=roll(out.mask), logp=roll(out.logp), version=roll(out.version))

    return behind


@fault(
    "teacher_off_by_one",
    seam="posttrain.role.score:_cut",
    what="the teacher's numbers are one token late, across the border of two answers",
    harm="each token is pulled towards the teacher's opinion of the token before it",
    source="2601.20802: a token has the policy's and the teacher's log-prob side by side, whatever their prompts",
    shows=SIBLING,
)
def _(real: Real) -> Real:
    def cut(stream: Any, x_M: Any, episodes: Any) -> Any:
        return real(stream, np.roll(x_M, 1, 0) if stream in (REFERENCE, TOP_IDS, TOP_LOGP) else x_M, episodes)

    return cut


@fault(
    "hint_forgotten",
    seam="posttrain.role.score:_told",
    what="the teacher reads the policy's prompt, without the hint",
    harm="the policy is its own teacher and knows no more: nothing is learned, and the loss is near 0",
    source="2601.20802: the teacher differs from the policy in what it is shown, and in nothing else",
    shows=SIBLING,
)
def _(real: Real) -> Real:
    def told(groups: Any, a: Any, hints: Any) -> Any:
        found = real(groups, a, hints)
        own = [e for g in groups for e in g.judged]
        return found and [HintedEpisode(e.segments, t.missing) for e, t in zip(own, found, strict=True)]

    return told


@fault(
    "own_answer_as_hint",
    seam="posttrain.role.learning.hinted_teacher:Hints.given",
    what="each answer is its own hint, right or wrong",
    harm="the teacher finds every answer likely, so mistakes are made more certain",
    source="2601.20802, dont_reprompt_on_self_success: what is right is shown to the others",
    shows=SIBLING,
)
def _(real: Real) -> Real:
    def given(self: Any, group: Any, e: Any) -> Any:
        return real(self, Group(group.task, group.visit, (replace(e, verdicts=_right(group), sibling=99),)), e)

    def _right(group: Any) -> Any:
        return max(group.judged, key=lambda o: o.reward).verdicts

    return given


@fault(
    "hint_learned",
    seam="posttrain.stages.training_step:score",
    what="the policy learns its answer behind the teacher's prompt, with the hint",
    harm="it learns to answer questions that hold their answers, and no other",
    source="2601.19897: the student is conditioned on the question alone",
    shows=ANSWER,
)
def _(real: Real) -> Real:
    def score(groups: Any, *args: Any, hints: Any = None, **kwargs: Any) -> Any:
        found = real(groups, *args, hints=hints, **kwargs)
        if hints is None:
            return found
        return tuple(
            replace(
                g,
                episodes=tuple(
                    replace(s, episode=replace(s.episode, segments=t.segments))
                    for s, t in zip(g.episodes, hints.of(g.group), strict=True)
                ),
            )
            for g in found
        )

    return score
