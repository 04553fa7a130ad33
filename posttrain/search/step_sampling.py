"""The next steps of an answer, or whole answers, sampled by an engine and scored.

All continuations of a beginning share it in the engine's cache. What a search spends is counted in tokens that were
said; what was said before it went on is not counted again. What scores them is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.measure.answer_steps import Aggregate, aggregated, step_ends
from posttrain.core.measure.right import Right, right_of
from posttrain.core.ports import Environment, EpisodeJudge, Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Segment, Task
from posttrain.core.verdict import Judged, outcome
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import StepScorer
from posttrain.role.judging import attempt_of
from posttrain.role.learning.logprob_tolerance import READ
from posttrain.search.search_checks import said_by_one_version
from posttrain.system.concurrency import together


class StepVerifier(Protocol):
    """A verifier that reads an answer up to the end of a step, and says how good the answer is so far."""

    async def of_beginnings(self, task: Task, texts: Sequence[str]) -> list[float | None]:
        """The score of each of these beginnings; None where there is none."""
        ...


@dataclass(frozen=True, eq=False)
class Beginning:
    """An answer up to the end of a step, with the score of each step."""

    ids: np.ndarray
    """int32: the tokens said so far."""
    scores: tuple[float, ...] = ()
    stop: Stop | None = None
    """The reason why the answer ended; None where it goes on."""

    @property
    def key(self) -> bytes:
        return self.ids.tobytes()


@dataclass
class StepSearch:
    """The parts that every search uses: the engine, the source of scores, and the count of what was spent.

    Args:
        scorer: scores steps. None: steps have no score.
        prompt: the prompt of a task as token ids.
        text: decodes token ids, without the stop token.
        sampling: of the policy, resolved; a search over steps stops it at each separator.
        verifier: scores steps, where there is no `scorer`.
        judge: scores whole answers, where there is neither.
        verified: whole answers are scored by the environment's own verdict, where none of these is given.
        budget: tokens a task; a search that has spent them begins nothing more. 0: no limit.
        version: of the weights that say all of it. None: those that say the first token.
        right_at: the smallest outcome of a right answer, where it is named.
    """

    sampler: Sampler
    scorer: StepScorer | None
    environment: Environment
    prompt: Callable[[Task], np.ndarray]
    text: Callable[[np.ndarray], str]
    sampling: Sampling
    separator: str
    aggregate: Aggregate = "min"
    seed: int = 0
    judge: EpisodeJudge | None = None
    verified: bool = False
    verifier: StepVerifier | None = None
    budget: int = 0
    version: int | None = None
    right_at: float | None = None
    spent_on: Counter[str] = field(default_factory=Counter[str])
    """Tokens said since the search began, by task."""
    _prompts: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    @property
    def spent(self) -> int:
        """Tokens said for all tasks."""
        return self.spent_on.total()

    def goes_on(self, task: Task) -> bool:
        """Returns whether the budget lets a search begin something more for this task."""
        return not self.budget or self.spent_on[task.id] < self.budget

    def seen(self, task: Task) -> np.ndarray:
        if task.id not in self._prompts:
            self._prompts[task.id] = np.asarray(self.prompt(task), np.int32)
        return self._prompts[task.id]

    async def whole(self, task: Task, count: int) -> list[Beginning]:
        """`count` whole answers, each with its scores; fewer, but at least one, where the budget is spent before."""
        nothing = Beginning(np.zeros(0, np.int32))

        def answer(i: int) -> Coroutine[Any, Any, Beginning]:
            return self._say(task, nothing, self.sampling, f"answer/{i}")

        # Without a budget all are asked at once and share the engine's batch. With one they come one after
        # another: what an answer costs is known when it has ended.
        if not self.budget:
            return await self.scored(task, await together([answer(i) for i in range(count)]))
        found = [await answer(0)]
        while len(found) < count and self.goes_on(task):
            found.append(await answer(len(found)))
        return await self.scored(task, found)

    async def ended(self, task: Task, ones: Sequence[Beginning]) -> Beginning:
        """The best of those that ended. Where none did, the best of all is continued to its end."""
        if not (over := [b for b in ones if b.stop is not None]):
            begun = max(ones, key=self.worth)
            over = await self.scored(task, [await self._say(task, begun, self.sampling, "end")])
        return max(over, key=self.worth)

    async def grown(self, task: Task, ones: Sequence[Beginning], count: int, place: str) -> list[Beginning]:
        """`count` continuations of each beginning by one step, equal ones once, with the new step's score."""
        # The engine ends the turn at the separator, and the separator is part of the step that it ends.
        stepwise = replace(self.sampling, stop=(*self.sampling.stop, self.separator))
        found = await together(
            [self._say(task, b, stepwise, f"{place}/{n}/{i}") for n, b in enumerate(ones) for i in range(count)]
        )
        # Equal continuations are one beginning: two of them would take two places in a beam and grow alike.
        return await self.scored(task, list({b.key: b for b in found}.values()))

    async def _say(self, task: Task, begun: Beginning, sampling: Sampling, place: str) -> Beginning:
        # The limit is for the whole answer, so each step gets what is left of it. An answer that has no room
        # has ended by its length.
        left = self.sampling.max_tokens - len(begun.ids)
        if left < 1:
            return replace(begun, stop=Stop.LENGTH)
        ids = np.concatenate([self.seen(task), begun.ids]).astype(np.int32)
        key = seeds.key(self.seed, "search", task.id, place)
        # min_tokens is for a whole answer; for a step it would forbid the separator.
        said = await self.sampler.generate(ids, replace(sampling, max_tokens=left, min_tokens=0), key)
        self.version = int(said.version[0]) if self.version is None else self.version
        said_by_one_version(said.version, self.version, task.id)
        self.spent_on[task.id] += len(said.ids)
        stepwise = said.stop is Stop.STRING and self.separator in sampling.stop
        # A stop string ended this turn. If it was the separator, a step is complete and the answer goes on; if
        # it was one of the policy's own, the answer is over.
        further = stepwise and self.separator in self.text(said.ids)
        return Beginning(
            np.concatenate([begun.ids, said.ids]).astype(np.int32), begun.scores, None if further else said.stop
        )

    async def scored(self, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """Each with the scores of all of its steps, or with the one score of the whole answer. No score, where nothing
        scores or what scores failed."""
        if not ones:
            return []
        # One source is asked: a score of steps before one of whole answers, the environment's own verdict last.
        if self.scorer is not None:
            return self._by_steps(self.scorer, task, ones)
        if self.verifier is not None:
            return await self._verified(self.verifier, task, ones)
        if self.judge is not None:
            episodes = [self._episode(task, b, i) for i, b in enumerate(ones)]
            values = [outcome(judged) for judged in await self.judge.judge(episodes)]
        elif self.verified:
            values = await together([self.verdict(task, b) for b in ones])
        else:
            return list(ones)
        return [replace(b, scores=() if v is None else (v,)) for b, v in zip(ones, values, strict=True)]

    def _by_steps(self, scorer: StepScorer, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """The scores of all steps, read off one pass of the reward model."""
        # score_M is flat over all segments, prompts included: `own` are the scores of one answer's positions.
        # `ends` counts tokens of the answer, so the score of a step is that of the last of them.
        packed = Packed.of([self._segment(task, b) for b in ones])
        score_M, ends = scorer.tokens(packed), TokenEnds(self.text)
        out: list[Beginning] = []
        for s, b in enumerate(ones):
            own = score_M[packed.segment_M == s]
            at = ends.upto(b.ids, step_ends(self.text(b.ids), self.separator))
            out.append(replace(b, scores=tuple(own[np.array(at, np.int64) - 1].tolist()) if at else ()))
        return out

    async def _verified(self, verifier: StepVerifier, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """The steps that have no score yet are verified, equal beginnings once. An answer of which a step could not be
        judged has no score."""
        texts = [self.text(b.ids) for b in ones]
        upto = [[t[:end] for end in step_ends(t, self.separator)] for t in texts]
        # A beginning keeps the scores of the steps it had: only the texts beyond them are new. Different
        # beginnings may have the same text, which is asked once.
        asked = list(dict.fromkeys(t for b, own in zip(ones, upto, strict=True) for t in own[len(b.scores) :]))
        found = dict(zip(asked, await verifier.of_beginnings(task, asked), strict=True))
        out: list[Beginning] = []
        for b, own in zip(ones, upto, strict=True):
            new = [found[t] for t in own[len(b.scores) :]]
            # With one step missing, a score of the others would be compared with scores of all steps.
            read = tuple(x for x in new if x is not None)
            out.append(replace(b, scores=(*b.scores, *read) if len(read) == len(new) else ()))
        return out

    def _segment(self, task: Task, b: Beginning) -> Segment:
        transcript = Transcript(READ)
        transcript.see(self.seen(task))
        transcript.show(b.ids)
        return transcript.segment()

    def worth(self, b: Beginning) -> float:
        """Its steps' scores as one number; an answer without a step is worth 0."""
        return aggregated(b.scores, self.aggregate) if b.scores else 0.0

    def _episode(self, task: Task, b: Beginning, sibling: int) -> Episode:
        """An answer as judges of episodes read it."""
        stop, text = b.stop or Stop.LENGTH, self.text(b.ids)
        return Episode(task, 0, sibling, (self._segment(task, b),), stop, (), text, turns=(len(b.ids),))

    async def verdict(self, task: Task, b: Beginning) -> float | None:
        """The environment's outcome of an answer; None where it could not be judged."""
        return outcome(await self._judged(task, b))

    async def _judged(self, task: Task, b: Beginning) -> Sequence[Judged]:
        said = (self.text(b.ids),)
        attempt = attempt_of(task, said, b.stop or Stop.LENGTH, (self._segment(task, b),), self.text, int)
        return await self.environment.judge(attempt)

    async def judged(self, task: Task, b: Beginning) -> tuple[float, Right] | None:
        """The environment's outcome, and what is right by it; None where it could not be judged."""
        found = await self._judged(task, b)
        paid = outcome(found)
        return None if paid is None else (paid, right_of(found, self.right_at))
