"""Checks of judges: prompts show no verdict, sides come in random order, and votes are counted as they were given.

A judge that learns is checked before its stage, a judge that pays a policy at every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from posttrain.core.abilities import Judging
from posttrain.core.measure.answer_steps import aggregated
from posttrain.core.ports import Environment
from posttrain.core.types import Episode, Group, Task
from posttrain.core.verdict import State, Verdict
from posttrain.environment.scripted_policy import ScriptedPolicy
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent
from posttrain.role.judges.generative_judge import LEFT_OUT, UNREAD, GenerativeJudge
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.roles import DataRoles, ReinforceRoles
from posttrain.system.errors import InvariantError

SHOWN = 16
"""Tasks of training, and as many held-out ones, of which all that is shown is compared."""
ORDERED = 256
"""Training tasks over which the order of the sides is counted."""
CHANCE = 1e-9
"""How improbable a count must be in fair orders. It is the chance of a false alarm, once a stage."""
# A comparison in a verdict's `why`, such as "vs 3:1,0,-": the sibling it was compared with, and the marks of its votes.
VERSUS = re.compile(r"vs (\d+):(\S+)")


# --- a judge that learns ----------------------------------------------------------------------------------------------


async def shows_no_verdict(environment: Environment, judging: Judging, task: Task) -> None:
    """InvariantError where anything that the environment shows of a task depends on which verdict is right."""
    # The same task with the other verdict as the right one: all that is shown must stay the same, letter for letter.
    as_it_is, regraded = [await _shown(environment, judging, t) for t in (task, judging.regraded(task))]
    if as_it_is == regraded:
        return
    # The lists may differ in length. The empty words at their ends then make the difference.
    first, second = next((a, b) for a, b in zip([*as_it_is, ""], [*regraded, ""], strict=False) if a != b)
    raise InvariantError(
        f"task {task.id!r}: what the judge is shown depends on the right verdict: {first!r:.120} becomes"
        f" {second!r:.120} when the other one is right. It would learn to read the verdict instead"
        " of the completions. Write the prompt from the question and the completions alone"
    )


async def _shown(environment: Environment, judging: Judging, task: Task) -> list[str]:
    """All that the environment shows in a game in which every seat says the first verdict.

    It is what the policy's seat is shown, then what the other seats are shown.
    """
    seats = environment.abilities.seats
    # The other seats answer by script too, so that the game ends without a model.
    others = {} if seats is None else {name: (judging.ends[0],) * len(turns) for name, turns in seats(task).items()}
    # The games here ask one turn of the policy. Turns that are not asked for stay unused.
    talk = ScriptedPolicy((judging.ends[0],) * 8, seats=others)
    await environment.play(task, talk)
    return [str(s) for s in (*talk.seen, *(s for o in talk.others.values() for s in o.seen))]


def tail(count: int, total: int) -> float:
    """The exact chance that `total` fair draws give a count at least as far from half of them as `count` is.

    >>> tail(2, 2), tail(1, 2)
    (0.5, 1.0)
    """
    far = max(count, total - count)
    if 2 * far == total:
        return 1.0
    return min(1.0, 2 * math.fsum(math.comb(total, k) / 2**total for k in range(far, total + 1)))


def order_is_random(firsts: Sequence[bool]) -> None:
    """InvariantError where the better side comes first too often or too seldom.

    In a fair order that happens in at most one of a billion stages.
    """
    count = sum(firsts)
    if tail(count, len(firsts)) < CHANCE:
        raise InvariantError(
            f"the better completion comes first in {count} of {len(firsts)} training pairs: a judge that looks at the"
            " place alone is right that often. Draw the order of the two sides from the seeds"
        )


class JudgingCheck(Observer):
    """Checks a stage that learns to judge, by imitation or by RL, before its first step.

    No prompt may show the verdict, and the order of the sides must be random.
    """

    async def begin(self, roles: DataRoles[Any] | ReinforceRoles) -> None:
        environment = roles.environment if isinstance(roles, DataRoles) else roles.rollout.environment
        judging = environment.abilities.judging
        if judging is None:
            return
        count = ORDERED if environment.train.count is None else min(ORDERED, environment.train.count)
        train = [environment.train.task(i) for i in range(count)]
        for task in (*train[:SHOWN], *environment.heldout[:SHOWN]):
            await shows_no_verdict(environment, judging, task)
        # An order of sides exists only where two are compared.
        if judging.sides == 2:
            order_is_random([judging.better(t) == 0 for t in train])


# --- a judge that pays ------------------------------------------------------------------------------------------------


def votes_are_counted(judge: GenerativeJudge, group: Group, episode: Episode) -> None:
    """The score of an answer is the mean of its recorded votes.

    The votes must be about this answer. An answer without votes must have no score.

    Raises:
        InvariantError: otherwise.
    """
    verdict = next((j.verdict for j in episode.verdicts if j.source == judge.name), None)
    if verdict is None or verdict.state is not State.VALUE or verdict.score is None:
        return
    rivals = VERSUS.findall(verdict.why)
    judged = [e for e in group.episodes if any(j.source == judge.name for j in e.verdicts)]
    # Where all siblings say the same, the one answer is compared with itself, and its own number is its rival's.
    other_texts = {e.text for e in judged} - {episode.text}
    if other_texts and any(int(other) == episode.sibling for other, _ in rivals):
        raise InvariantError(
            f"task {group.task.id!r}: the votes recorded of sibling {episode.sibling} compare it with itself, so they"
            " are about another answer. Return one verdict for each episode, in order"
        )
    counted = _counted(verdict, rivals)
    # A judge of one answer alone gives p(Yes), which is no mean of the marks.
    if judge.judging.sides == 2 and (not counted or abs(math.fsum(counted) / len(counted) - verdict.score) > 1e-9):
        mean = f"is {math.fsum(counted) / len(counted):g}" if counted else "does not exist, as none has a verdict"
        raise InvariantError(
            f"task {group.task.id!r}, sibling {episode.sibling}: judge {judge.name!r} gave {verdict.score:g}, and the"
            f" mean of its recorded votes {mean} ({verdict.why:.120}). An answer that could not be judged is failed,"
            " never a low score"
        )


def _counted(verdict: Verdict, rivals: Sequence[tuple[str, str]]) -> list[float]:
    """The votes that count, from the record: of each comparison in `rivals`, or of the plain list of marks in `why`."""
    votes = [w for _, marks in rivals for w in marks.split(",")] or verdict.why.split(",")
    # A vote that could not be read, or that was left out, is in the record but not in the mean.
    return [float(w) for w in votes if w and w != UNREAD and not w.endswith(LEFT_OUT)]


def step_votes_are_counted(judge: GenerativeStepJudge, episode: Episode) -> None:
    """Every step of an answer has a score, and it is the mean of that step's recorded votes.

    Raises:
        InvariantError: otherwise.
    """
    of_judge = [j for j in episode.verdicts if j.source == judge.name]
    if not of_judge or of_judge[0].verdict.state is not State.VALUE:
        return
    task, reward = f"task {episode.task.id!r}, sibling {episode.sibling}", judge.reward
    # Blank pieces are no steps, so there are no votes about them.
    steps = [s for s in episode.text.split(judge.separator) if s.strip()]
    # As one outcome the answer has one verdict, whose record has the votes of its steps one after the other.
    records = of_judge[0].verdict.why.split(" ") if reward.steps == "outcome" else [j.verdict.why for j in of_judge]
    if len(records) != len(steps):
        raise InvariantError(f"{task}: {len(records)} steps were verified, and the answer has {len(steps)}: {steps}")
    counted = [[float(w) for w in s.split(",") if w != UNREAD and not w.endswith(LEFT_OUT)] for s in records]
    if unread := [i + 1 for i, votes in enumerate(counted) if not votes]:
        raise InvariantError(
            f"{task}: no vote about step {unread[0]} of {len(steps)} has a verdict, and it has a score. What could not"
            " be judged is failed, never a low score"
        )
    means = [math.fsum(votes) / len(votes) for votes in counted]
    want = means
    if reward.steps == "outcome":
        want = [aggregated(means, reward.aggregate)]
    elif reward.progress:
        # Progress pays what a step adds to the score of the step before it; the first one counts from 0.
        want = [after - before for before, after in zip([0.0, *means], means, strict=False)]
    scores = [j.verdict.score or 0.0 for j in of_judge]
    if any(abs(a - b) > 1e-9 for a, b in zip(scores, want, strict=True)):
        raise InvariantError(
            f"{task}: verifier {judge.name!r} gave {[round(x, 4) for x in scores]}, and its recorded votes make"
            f" {[round(x, 4) for x in want]}: a score of another step, or of other votes"
        )


class VotesCheck(Observer):
    """The verdicts of generative judges are those of their votes."""

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent):
            return None
        for group, judge in product(event.experience.played, roles.rollout.judges):
            for episode in group.episodes:
                if isinstance(judge, GenerativeJudge):
                    votes_are_counted(judge, group, episode)
                elif isinstance(judge, GenerativeStepJudge):
                    step_votes_are_counted(judge, episode)
        return None
