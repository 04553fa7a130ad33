"""Checks that verdicts repeat: an answer that is judged again gets the same score, and right answers keep scoring 1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from posttrain.checks.stage_history import due
from posttrain.core.abilities import GoldAnswers, Together, Turns
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.ports import Attempt, Environment
from posttrain.core.redact_secrets import scrubbed
from posttrain.core.stop import StepNumber
from posttrain.core.types import Episode, Group, Stop, Task
from posttrain.core.verdict import SOLVED, Judged
from posttrain.environment.scripted_policy import attempt
from posttrain.role.judging import attempt_of
from posttrain.system.errors import InvariantError, PosttrainError
from posttrain.verifier.batch_functions import misplaced, same_scores

GOLD = 8
"""How many tasks' right answers are judged again."""


Text = Callable[[np.ndarray], str]
"""Decodes token ids."""
Verdicts = Sequence[Judged]
"""What the sources said of one answer."""
JudgedGold = tuple[Turns, Attempt, tuple[Judged, ...]]
"""Turns of a right answer, the episode they make, and its verdicts."""


@dataclass
class RejudgedAnswers:
    """Answers that are judged again at every step: a right one that was judged at the start, and one of the step.

    A second one of the step is added if an answer was cut off. If the environment vouches for its right answers, they
    must score 1 at the start and at every step.
    """

    text: Text = lambda ids: ""
    _gold: list[JudgedGold] = field(default_factory=list[JudgedGold])
    _steps_before: int = 0
    """Steps before this one."""
    _wavering_noted: bool = False
    """Whether a source was noted whose verdicts vary."""
    _order_noted: bool = False
    """Whether a reward was noted that reads the order of the answers."""
    _vouched: str | None = None
    """The source for which the environment vouches that right answers score 1; None if it does not."""

    async def begin(self, env: Environment, steps_before: int) -> None:
        """Judge the right answers of some held-out tasks, or of training tasks if none are held out.

        Only environments that know right answers, and can play them as a script, have any.

        Raises:
            InvariantError: the environment vouches for a right answer, and it does not score 1.
        """
        self._steps_before = steps_before
        self._vouched = env.name if env.abilities.vouched else None
        for task, right in _known_answers(env, env.abilities.gold):
            try:
                played = await attempt(env, task, right)
            except IndexError:  # the environment asks for more turns than its right answer has
                continue
            judged = await env.judge(played)
            # Asked twice: a single bad answer of a verifier may be an outage.
            if self._scores_not_one(judged) and self._scores_not_one(judged := await env.judge(played)):
                raise InvariantError(self._not_one_message(env, played, judged, "before the first step"))
            self._gold.append((right, played, judged))

    async def after(self, env: Environment, played: Sequence[Group], at: StepNumber = StepNumber()) -> tuple[str, ...]:
        """Judge one right answer and one or two episodes of the step again. Returns notes on what may be intended.

        Raises:
            InvariantError: a verdict changed and stayed changed, or a right answer no longer scores 1.
        """
        notes: list[str] = []
        if self._gold:
            # Another right answer at every step, so that all are asked again in turn.
            notes += await self._right_answer(env, *self._gold[self._steps_before % len(self._gold)])
        for e in _sample([e for g in played for e in g.episodes], self._steps_before):
            ask = partial(_asked_again, env, e, next(g for g in played if e in g.episodes), at, self.text)
            notes += await self._repeats(ask, _recorded_attempt(e, self.text), e.verdicts, "an answer of this step")
        # `_steps_before` counts the steps before this one, and `due` counts steps from 1.
        if env.abilities.together is not None and due(self._steps_before + 1):
            notes += await self._siblings(env.abilities.together, played, at)
        self._steps_before += 1
        return tuple(notes)

    async def _siblings(self, together: Together, played: Sequence[Group], at: StepNumber) -> list[str]:
        """Judge a group in another order. InvariantError if scores go to the wrong siblings."""
        # An episode that broke was in no group that the source was given.
        groups = [[m for m in g.episodes if m.stop is not Stop.ERROR] for g in played]
        # Where all siblings have one reward, scores that went to the wrong ones look right.
        groups = [g for g in groups if all(map(_turns, g)) and len({m.reward for m in g}) > 1]
        if not groups:
            return []
        task = groups[0][0].task.id
        attempts = [_recorded_attempt(m, self.text) for m in groups[0]]
        fault = await misplaced(together, attempts, at, self._steps_before)
        if fault == "siblings":
            raise InvariantError(
                f"a reward gives scores to the wrong siblings: answers to task {task!r} that are judged alone have the"
                " scores that others of their group got. Return one score for each completion, in their order"
            )
        # Told once: a reward that reads the order does so at every step.
        if not fault or self._order_noted:
            return []
        self._order_noted = True
        return [
            f"rule reward_reads_order: judged in another order, answers to task {task!r} have other scores. A reward"
            " that breaks ties by place tells equal siblings apart by chance"
        ]

    async def _right_answer(self, env: Environment, right: Turns, answer: Attempt, before: Verdicts) -> list[str]:
        """Judge one right answer again. Returns notes.

        If the environment vouches for it, it is also played again, since the environment that plays it may break.
        """
        if self._vouched is not None:
            try:
                answer = await attempt(env, answer.task, right)
            # Our own errors stop the run as everywhere else. An error of the world is noted.
            except PosttrainError:
                raise
            except Exception as error:
                why = scrubbed(f"{type(error).__name__}: {error}")
                return [
                    f"rule gold_unplayed: the world broke under the right answer to task {answer.task.id!r}: {why}."
                    " Episodes may break like it"
                ]
            now = await env.judge(answer)
            if self._scores_not_one(now) and self._scores_not_one(now := await env.judge(answer)):
                raise InvariantError(self._not_one_message(env, answer, now, "any more"))
        return await self._repeats(partial(env.judge, answer), answer, before, "the right answer")

    def _scores_not_one(self, judged: Sequence[Judged]) -> bool:
        """Returns whether the source that is vouched for gave a right answer another score than 1. An outage is no
        score."""
        scores = [j.verdict.score for j in judged if j.source == self._vouched and j.end is None]
        # A score above 1 is wrong too: the promise is a score of 1, up to rounding.
        return any(score is not None and not SOLVED <= score <= 2 - SOLVED for score in scores)

    def _not_one_message(self, env: Environment, answer: Attempt, judged: Sequence[Judged], when: str) -> str:
        """The error message of a right answer that does not score 1."""
        whys = "; ".join(scrubbed(j.verdict.why) for j in judged if j.source == self._vouched and j.verdict.why)
        return (
            f"the right answer {list(answer.turns)} to task {answer.task.id!r} does not score 1 {when}:"
            f" {_shown(judged)}{f' ({whys})' if whys else ''}. The policy would be trained away from what is right."
            f" Look at the verifier of {env.name!r}, at what it asks (a service, a sandbox, a tool), and at what stands"
            " between its verdict and the record"
        )

    def mute(self, played: Sequence[Group]) -> Gauges:
        """Counts the sources that gave only 0 in this step and to the known right answers too."""
        if not self._gold:
            return {}
        # A source that paid a right answer can pay. One that paid neither these nor the step's answers may be broken.
        paid = {j.source for _, _, verdicts in self._gold for j in verdicts if j.verdict.score not in (0.0, None)}
        scored = [j for g in played for e in g.episodes for j in e.verdicts if j.verdict.score is not None]
        # A source with a negative weight is a penalty, and 0 says that there was nothing to subtract.
        sources = {j.source for j in scored if j.weight > 0}
        mute = sources - paid - {j.source for j in scored if j.verdict.score}
        return {"canary/mute_sources": Gauge(len(mute), len(sources))}

    async def _repeats(
        self, ask: Callable[[], Awaitable[Verdicts]], answer: Attempt, before: Verdicts, what: str
    ) -> list[str]:
        """Judge again (`ask`) and compare. A changed verdict that repeats is an error; one that varies is noted
        once."""
        now = await ask()
        if same_scores(before, now):
            return []
        # Two new verdicts agree, and not with the record: the source is not random, and the record is wrong.
        if same_scores(now, await ask()):
            was, is_ = _shown(before), _shown(now)
            raise InvariantError(
                f"{what} to task {answer.task.id!r} ({answer.text[-60:]!r}, stop reason {answer.stop.value!r}) has"
                f" verdict {was} in this run, and the environment asked again says {is_}. Either the verifier broke and"
                " hides it (an outage must raise, or return Verdict.failed: never a score), or verdicts are changed or"
                " reordered after judging. A verdict must depend on task and text alone"
            )
        if self._wavering_noted:
            return []
        self._wavering_noted = True
        return [
            f"rule verifier_wavers: asked twice about {what} to task {answer.task.id!r} the verifier said"
            f" {_shown(before)} and {_shown(now)}. If it is not random on purpose, an outage may be scored as an answer"
        ]


def _recorded_attempt(e: Episode, text: Text) -> Attempt:
    """The attempt of a recorded episode.

    `int` stands for the function that finds the token of a character. Only verdicts about parts of an answer read it,
    and those are not compared here.
    """
    return attempt_of(e.task, _turns(e), e.stop, e.segments, text, int, e.state)


async def _asked_again(env: Environment, e: Episode, group: Group, at: StepNumber, text: Text) -> Sequence[Judged]:
    """New verdicts about one episode.

    Sources that judge whole groups get its group again. They are left out where an attempt of the group cannot be read
    from its record.
    """
    together = env.abilities.together
    if together is None:
        return await env.judge(_recorded_attempt(e, text))
    # Marked as batched, an attempt is judged only by the sources that judge one answer at a time.
    alone = await env.judge(replace(_recorded_attempt(e, text), batched=True))
    members = [m for m in group.episodes if m.stop is not Stop.ERROR]
    if not all(_turns(m) for m in members):
        return alone
    # The group's sources see all siblings again, since their scores may depend on each other.
    by_group, _ = await together([_recorded_attempt(m, text) for m in members], at)
    return (*alone, *by_group[members.index(e)])


def _known_answers(env: Environment, gold: GoldAnswers | None) -> list[tuple[Task, Turns]]:
    """The known right answers of the first held-out tasks, or of the first training tasks if none are held out."""
    if gold is None:
        return []
    count = env.train.count
    # A source without end has no list of its tasks: the first ones are asked for by their number.
    tasks = env.heldout[:GOLD] or [env.train.task(i) for i in range(GOLD if count is None else min(GOLD, count))]
    return gold.known(tasks)


def _sample(episodes: Sequence[Episode], steps_before: int) -> list[Episode]:
    """One episode, a different one at every step, and one that was cut off if there is any.

    Episodes whose turns cannot be read from their text are left out.
    """
    # Cut answers are a case of their own: their text ends in the middle, where a parser may fail.
    cut = [e for e in episodes if e.stop is Stop.LENGTH]
    chosen = [x[steps_before % len(x)] for x in (episodes, cut) if x]
    return [e for e in chosen if e.stop is not Stop.ERROR and e.reward is not None and not e.shown and _turns(e)]


def _turns(e: Episode) -> tuple[str, ...]:
    """The turns of an episode; empty if line breaks inside a turn leave them unclear."""
    # A turn begins where the mask rises. Where the text has as many lines, each line is a turn.
    spoken = sum(int(np.sum(np.diff(s.mask.astype(np.int8), prepend=0) == 1)) for s in e.segments)
    turns = (e.text,) if spoken == 1 else tuple(e.text.split("\n"))
    return turns if len(turns) == spoken else ()


def _shown(verdicts: Sequence[Judged]) -> str:
    """Each verdict for a message: its source, and its score or else its state."""
    return ", ".join(
        f"{j.source} {j.verdict.state.value if j.verdict.score is None else format(j.verdict.score, 'g')}"
        for j in verdicts
    )
