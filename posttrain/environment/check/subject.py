"""The environment under test: its tasks, its right and wrong answers, and what each source pays for them."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from posttrain.core.content import prompt_words
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.environment.check.probe import Dependence, JudgedAnswer, dependences, questions
from posttrain.environment.check.probe_answers import SHAPES
from posttrain.environment.rows.row_reader import answer_text
from posttrain.environment.scripted_policy import ScriptedPolicy, ScriptEnded
from posttrain.environment.single import SingleTurn
from posttrain.system.errors import EndpointError

TURNS = 64
"""How often an answer that does not depend on the question is repeated, in environments of several turns."""
AT_ONCE = 64
"""The most answers that are judged at the same time."""
WRITTEN = "completion"
"""The name of the form in which the right answers are the completions of the data."""
SHAPED = 8
"""The number of tasks on which the form of right answers is determined."""


@dataclass
class Subject:
    """An environment with the data that all probes use: the verdicts of a right and a wrong answer (`gold` and `wrong`,
    by task id), and the form in which right answers are rewarded (`shape`). Create it with `Subject.of`."""

    env: SingleTurn
    tasks: tuple[Task, ...]
    rate: float
    shape: str = "bare"
    gold: dict[str, JudgedAnswer] = field(default_factory=dict[str, JudgedAnswer])
    wrong: dict[str, JudgedAnswer] = field(default_factory=dict[str, JudgedAnswer])
    depends: dict[str, Dependence] = field(default_factory=dict[str, Dependence])
    """What each of the user's rewards depends on, by source; empty where it cannot be found out."""
    counted: Callable[[str], None] = lambda _: None
    """Called with a text such as `3 of 40 answers judged`."""
    earned: tuple[float, ...] = ()
    """Rewards that real answers earned in a run."""
    _limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    @staticmethod
    async def of(
        env: SingleTurn,
        tasks: Sequence[Task],
        rate: float,
        counted: Callable[[str], None] = lambda _: None,
        earned: Sequence[float] = (),
    ) -> Subject:
        """Finds the form of right answers, and judges a right and a wrong answer to every task. EndpointError if a
        judge gives no answer at all."""
        subject = Subject(env, tuple(tasks), rate, counted=counted, earned=tuple(earned))
        # If a judge cannot be reached, every probe would wait for its time-outs, so one answer is judged first.
        for task in tasks[:1]:
            for j in (await subject.judge(task, ("?",))).judged:
                if j.verdict.kind == "outage":
                    raise EndpointError(f"{j.source} judges nothing: {j.verdict.why}", "judge")
        answerable = [t for t in tasks if env.knows_gold(t)]
        # The form is found first, because `right` and `near` write in it.
        if not env.vouches_for_gold:
            subject.shape = await subject._find_shape(answerable[:SHAPED])
        for turns, verdicts in ((subject.right, subject.gold), (subject.near, subject.wrong)):
            judged = await subject.judge_all([(t, turns(t)) for t in answerable])
            verdicts.update({t.id: x for t, x in zip(answerable, judged, strict=True)})
        if not env.vouches_for_gold:
            subject.depends = await subject._dependences()
        return subject

    async def _find_shape(self, tasks: Sequence[Task]) -> str:
        """The form in which right answers earn most with the user's rewards. Of several, the plainest one."""
        earned: dict[str, float] = {}
        has_completions = self.env.abilities.rows is not None and all(t.id in self.completions for t in tasks)
        for name in (*SHAPES, *([WRITTEN] if has_completions else [])):
            self.shape = name  # `right` writes in this form; whoever calls sets the best one
            judged = await self.judge_all([(t, self.right(t)) for t in tasks])
            earned[name] = math.fsum(answer.outcome or 0.0 for answer in judged)
        return max(earned, key=lambda n: earned[n])

    async def _dependences(self) -> dict[str, Dependence]:
        """What each of the user's rewards depends on, from pairs of tasks with different answers."""
        answerable = [t for t in self.tasks if self.env.knows_gold(t)]
        pairs = [(a, b) for a, b in pairwise(answerable) if self.core(a) != self.core(b)]
        rounds = questions([(a, b, (self.right(a), self.right(b))) for a, b in pairs])
        judged = [await self.judge_all(round_, repeat=True) for round_ in rounds]
        return dependences(*judged)

    @cached_property
    def known(self) -> tuple[Task, ...]:
        """Tasks with a right answer that earns more than a wrong one with some source."""
        return tuple(t for t in self.tasks if t.id in self.gold and self.deciding(t))

    @cached_property
    def completions(self) -> Mapping[str, str]:
        """The demonstrations of the user's data, by task id."""
        return {r.task.id: r.completion for r in self.env.abilities.rows or () if r.completion is not None}

    def core(self, task: Task) -> str:
        """The right answer as the task gives it: the last turn, without the form in which it is rewarded."""
        return self.env.gold(task)[-1] if task.answer is None else answer_text(task.answer)

    def right(self, task: Task) -> tuple[str, ...]:
        """The turns of a right answer."""
        if self.env.vouches_for_gold:
            return self.env.gold(task)
        if self.shape == WRITTEN:
            return (self.completions.get(task.id, ""),)
        return (self.shaped(self.core(task)),)

    def shaped(self, text: str) -> str:
        """An answer in the form in which right answers are rewarded."""
        return SHAPES.get(self.shape, "{}").format(text)

    def near(self, task: Task) -> tuple[str, ...]:
        """Turns that look right and are not: the environment's distractor, or the answer to another question. Where all
        answers are equal, the right one with a question mark."""
        if self.env.vouches_for_gold and self.env.knows_distractor:
            return self.env.distractor(task)
        right = self.core(task)
        others = [t for t in self.tasks if self.env.knows_gold(t) and self.core(t) != right]
        # The right answer of another task whose length is nearest: neither form nor length shows that it is wrong.
        nearest = min(others, key=lambda t: abs(len(self.core(t)) - len(right)), default=None)
        return (f"{right}?",) if nearest is None else self.right(nearest)

    def last(self, task: Task, text: str) -> tuple[str, ...]:
        """The right turns, with `text` in place of the last one."""
        return (*self.right(task)[:-1], text)

    def answers(self) -> list[str]:
        """The distinct right answers of all tasks, most common first."""
        return [a for a, _ in Counter(self.core(t) for t in self.known).most_common()]

    def random(self, name: str) -> random.Random:
        """Random numbers of the probe `name`, the same in every check."""
        return random.Random(f"posttrain check {name}")

    async def judge(self, task: Task, turns: Sequence[str], repeat: bool = False) -> JudgedAnswer:
        """Play and judge one scripted episode. With `repeat` the last turn is repeated as often as it is asked for."""
        talk = ScriptedPolicy([*turns, *tuple(turns[-1:]) * (TURNS if repeat else 0)])
        try:
            stop = await self.env.play(task, talk)
        except ScriptEnded:
            stop = Stop.TURNS
        # int: there are no tokens here, so positions of verdicts on steps stay in characters.
        attempt = Attempt(task, tuple(talk.said), stop, int, talk.state)
        return JudgedAnswer(task, attempt.turns, (*await self.env.judge(attempt), *talk.paid))

    async def seen(self, task: Task) -> list[Any]:
        """Returns the observations that the environment shows in an episode of the right turns, after the prompt."""
        talk = ScriptedPolicy(self.right(task))
        await self.env.play(task, talk)
        return talk.seen[1:]

    async def judge_all(self, asked: Iterable[tuple[Task, Sequence[str]]], repeat: bool = False) -> list[JudgedAnswer]:
        """Judge many episodes concurrently. The results are in the order of `asked`."""
        episodes, numbers = list(asked), itertools.count(1)

        async def limited(task: Task, turns: Sequence[str]) -> JudgedAnswer:
            async with self._limit:
                judged = await self.judge(task, turns, repeat)
            self.counted(f"{next(numbers)} of {len(episodes)} answers judged")
            return judged

        return await asyncio.gather(*(limited(t, turns) for t, turns in episodes))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Sources that tell right from wrong: the right answer scores higher on at least a tenth of the tasks, and the
        wrong one on fewer than half as many. A source that does not depend on the task is left out."""
        # Only a tenth, because a source may judge some kinds of tasks only. Half as many excludes sources whose scores
        # differ by chance, such as one of length.
        candidates = [s for s in self._scored if s not in self.depends or self.depends[s].on_task]
        wins = [(s, self._wins(s, 1), self._wins(s, -1)) for s in candidates]
        return tuple(s for s, won, lost in wins if won >= 0.1 * len(self.gold) and won > 2 * lost)

    @property
    def _scored(self) -> list[str]:
        """All sources that gave a right answer a score."""
        return list(dict.fromkeys(s for answer in self.gold.values() for s in answer.scores))

    def _wins(self, source: str, sign: int) -> int:
        """The number of tasks on which a source scores the right answer higher (sign 1), or the wrong one (sign -1)."""
        scores = [(self.gold[i].scores.get(source), self.wrong[i].scores.get(source)) for i in self.gold]
        return sum(right is not None and wrong is not None and sign * (right - wrong) > 0 for right, wrong in scores)

    @property
    def shaping(self) -> tuple[str, ...]:
        """The other sources: they do not look at the answer, seldom tell right from wrong, or turn them round."""
        return tuple(s for s in self._scored if s not in self.sources)

    def deciding(self, task: Task) -> tuple[str, ...]:
        """Sources that score the right answer to this task higher than the wrong one."""
        right, wrong = self.gold[task.id].scores, self.wrong[task.id].scores
        return tuple(s for s in self.sources if s in right and (s not in wrong or right[s] > wrong[s]))

    def paid(self, answer: JudgedAnswer) -> tuple[str, ...]:
        """Sources that score this answer as high as the right one, up to rounding."""
        right, scores = self.gold[answer.task.id].scores, answer.scores
        return tuple(s for s in self.deciding(answer.task) if s in scores and scores[s] >= right[s] - 1e-9)

    def part_paid(self, answer: JudgedAnswer) -> tuple[str, ...]:
        """Sources that score this answer above 0 and higher than the wrong one, as a graded reward does for a partly
        right answer."""
        wrong, scores = self.wrong[answer.task.id].scores, answer.scores
        return tuple(
            s for s in self.deciding(answer.task) if s in scores and s in wrong and scores[s] > max(wrong[s], 0.0)
        )

    def chance(self, count: int) -> float:
        """The largest share of `count` tasks that an answer may get right by chance: the share of the most common
        answer, plus three standard deviations and 0.02."""
        counts = Counter(self.core(t) for t in self.known)
        share = counts.most_common(1)[0][1] / counts.total() if counts else 0.0
        # Of `count` tries, each right with probability `share`, a result three standard deviations above the mean
        # happens about once in 700.
        return share + 3 * math.sqrt(share * (1 - share) / max(1, count)) + 0.02

    async def attack(self, say: Callable[[Task], Mapping[str, str]], tasks: Sequence[Task]) -> list[Attack]:
        """Give every task the answers of `say`, by kind. Returns how often each kind is scored like a right answer."""
        attempts = [(task, kind, text) for task in tasks for kind, text in say(task).items()]
        judged = await self.judge_all([(task, (text,)) for task, _, text in attempts], repeat=True)
        attacks: dict[str, Attack] = {}
        for (_, kind, _), answer in zip(attempts, judged, strict=True):
            attacks.setdefault(kind, Attack(kind)).add(answer, self.paid(answer))
        return sorted(attacks.values(), key=lambda a: -a.share)


@dataclass
class Attack:
    """One kind of answer that does not depend on the question, and its results."""

    kind: str
    tried: int = 0
    hits: list[tuple[JudgedAnswer, tuple[str, ...]]] = field(default_factory=list[tuple[JudgedAnswer, tuple[str, ...]]])
    """(answer, the sources that pay it like a right one), where there is such a source."""

    def add(self, answer: JudgedAnswer, paid: tuple[str, ...]) -> None:
        self.tried += 1
        if paid:
            self.hits.append((answer, paid))

    @property
    def share(self) -> float:
        return len(self.hits) / self.tried

    @property
    def shown(self) -> str:
        judged, sources = self.hits[0]
        return (
            f"{self.kind} earns what a right answer earns on {len(self.hits)} of {self.tried} tasks with"
            f" {' and '.join(sources)}, such as {judged.said} to {prompt_words(judged.task.prompt)}"
        )
