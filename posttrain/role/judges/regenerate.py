"""Regeneration: a wrong answer is continued anew from the end of its last right step.

The first wrong step is found by completions, or by the scores that the answer's steps have. The search by completions
halves the steps (2406.06592). If any completion from the end of the first half is right, then the first half is right,
because a completion keeps these steps. An answer of L steps needs log2 L such tests, rounded up. The beginnings of
completions are in the engine's cache already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.stages.rejection import Regenerate
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.measure.answer_steps import first_error
from posttrain.core.types import Episode, Group
from posttrain.role.judges.step_completion import StepLabeler
from posttrain.role.judging import SiblingVerdicts
from posttrain.system.concurrency import together
from posttrain.system.errors import ConfigError

From = Callable[[int], Awaitable[tuple[Episode, ...]]]
"""Completions of an answer from the end of a step, by the step's number from 1."""


@dataclass(frozen=True, eq=False)
class RegeneratedAnswer:
    """A wrong answer, the place of its first wrong step, and completions from its steps."""

    episode: Episode
    ends: tuple[int, ...]
    """Spoken tokens up to the end of each step."""
    kept: int
    """Steps before the first wrong one."""
    asked: Mapping[int, tuple[Episode, ...]]
    """Completions, by the number of the step from whose end they go on."""

    @property
    def completions(self) -> tuple[Episode, ...]:
        """The completions that replace the first wrong step and all after it; none where that is the first."""
        return self.asked.get(self.kept, ())


def any_right(completions: Sequence[Episode]) -> bool | None:
    """Returns whether one of these completions was judged right; None where none could be judged."""
    judged = [c.right.of(c.figure) for c in completions if c.figure is not None]
    return any(judged) if judged else None


def right_steps(scores: Sequence[float], at: float) -> int:
    """Steps before the first one that scores below `at`; all where none does.

    >>> right_steps([0.9, 0.4, 0.8], 0.5), right_steps([0.9], 0.5)
    (1, 1)
    """
    first = first_error(scores, at)
    return len(scores) if first < 0 else first


def scored_steps(e: Episode) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The end of each step that has a score, and the scores: the lowest of steps that end with the same token, between
    which no completion can start. ConfigError where two sources score its steps."""
    of_steps = [j for j in e.verdicts if j.end is not None and not j.paid and j.verdict.score is not None]
    if len(sources := {j.source for j in of_steps}) > 1:
        raise ConfigError(
            f"the steps of an answer to task {e.task.id!r} have scores of {' and '.join(sorted(sources))}, and one of"
            " them must find the first wrong step: leave one out of env.rewards"
        )
    lowest: dict[int, float] = {}
    # Descending, so that the lowest score of an end is written last and stays. `or` is for the type checker: `of_steps`
    # has both numbers.
    for end, score in sorted(((j.end or 0, j.verdict.score or 0.0) for j in of_steps), reverse=True):
        lowest[end] = score
    ordered = sorted(lowest.items())
    return tuple(end for end, _ in ordered), tuple(score for _, score in ordered)


async def halved(steps: int, from_step: From) -> tuple[int, dict[int, tuple[Episode, ...]]] | None:
    """(steps before the first wrong one, the completions that were asked) of a wrong answer with `steps` steps. None
    where no completion of some step could be judged, so that nothing is known."""
    asked: dict[int, tuple[Episode, ...]] = {}
    # After the first `low` steps a completion can be right, after the first `high` steps it cannot: it is assumed that
    # after a wrong step none is right.
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        asked[middle] = await from_step(middle)
        right = any_right(asked[middle])
        if right is None:
            return None
        low, high = (middle, high) if right else (low, middle)
    return low, asked


@dataclass
class Regenerator:
    """Says the wrong answers of groups anew.

    Args:
        labeler: completes answers from the end of a step.
        how: whether completions or scores find the first wrong step, and which score is a wrong step's.
    """

    labeler: StepLabeler
    how: Regenerate

    async def regenerate(self, groups: Sequence[Group]) -> tuple[RegeneratedAnswer, ...]:
        """Every wrong answer whose first wrong step was found, in order. ConfigError where an answer has several turns,
        or no step has the scores that are to be read."""
        regenerated = [x for of_group in await together([self._group(g) for g in groups]) for x in of_group]
        wrong = [e for g in groups for e in wrong_ones(g)]
        if self.how.by == "scores" and wrong and not any(scored_steps(e)[0] for e in wrong):
            raise ConfigError(
                "method.regenerate.by=scores: no step of any wrong answer has a score. Give a process reward model"
                " (env.rewards=model:RUN, with steps=score), an environment that judges steps, or by=completions"
            )
        return tuple(regenerated)

    async def _group(self, group: Group) -> list[RegeneratedAnswer]:
        """Equal beginnings of siblings are completed once, as those of the first sibling that has them: which sibling
        asks first depends on time, and must not change what is said."""
        known: dict[bytes, asyncio.Task[tuple[Episode, ...]]] = {}
        judging = SiblingVerdicts(self.labeler.rollout.environment)
        first: dict[bytes, Episode] = {}
        wrong = [(e, self._ends(e)) for e in wrong_ones(group)]
        # `first` is filled before anything is asked: the sibling that completes a
        # beginning follows from the order of siblings, not from who asks first.
        for e, ends in wrong:
            for upto in ends:
                first.setdefault(self.labeler.said(e)[:upto].tobytes(), e)
        try:
            regenerated = await together([self._answer(e, ends, first, known, judging) for e, ends in wrong])
        finally:
            # Several answers may wait for one task of completions. After an error nobody waits for it.
            for task in known.values():
                task.cancel()
            await judging.close()
        return [x for x in regenerated if x is not None]

    def _ends(self, e: Episode) -> tuple[int, ...]:
        """Spoken tokens up to the end of each step of an answer; empty where it has no usable steps."""
        return self.labeler.cut(e) if self.how.by == "completions" else scored_steps(e)[0]

    async def _answer(
        self,
        e: Episode,
        ends: tuple[int, ...],
        first: Mapping[bytes, Episode],
        known: dict[bytes, asyncio.Task[tuple[Episode, ...]]],
        judging: SiblingVerdicts,
    ) -> RegeneratedAnswer | None:
        """The wrong answer with its first wrong step; None where that is not known. `first`: the sibling that completes
        a beginning; `known`: the completions of each beginning that were asked so far."""
        spoken_ids = self.labeler.said(e)

        async def from_step(number: int) -> tuple[Episode, ...]:
            upto = ends[number - 1]
            return await self.labeler.from_step(first[spoken_ids[:upto].tobytes()], number, upto, known, judging)

        if not ends:
            return None
        if self.how.by == "completions":
            steps_and_completions = await halved(len(ends), from_step)
            return None if steps_and_completions is None else RegeneratedAnswer(e, ends, *steps_and_completions)
        # `kept == len(ends)`: all steps have good scores though the answer is wrong, so nothing is known.
        kept = right_steps(scored_steps(e)[1], self.how.at)
        if kept == len(ends):
            return None
        return RegeneratedAnswer(e, ends, kept, {kept: await from_step(kept)} if kept else {})


def wrong_ones(group: Group) -> list[Episode]:
    """The group's answers that were judged and are not right."""
    return [e for e in group.episodes if e.figure is not None and not e.right.of(e.figure)]


def regenerated_gauges(answers: Sequence[RegeneratedAnswer]) -> Gauges:
    """Gauges of a step: the share of right steps, completions per answer, and answers with a right completion."""
    # A set, because siblings with the same beginning share its completions.
    completions = {c for a in answers for from_one_step in a.asked.values() for c in from_one_step}
    return {
        "reject/right_steps": Gauge(sum(a.kept for a in answers), sum(len(a.ends) for a in answers)),
        "reject/completions": Gauge(len(completions), len(answers)),
        "reject/mended": Gauge(sum(bool(any_right(a.completions)) for a in answers), len(answers)),
    }
