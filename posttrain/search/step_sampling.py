"""The next steps of an answer, or whole answers, sampled by an engine and scored.

All continuations of a beginning share it in the engine's cache. The cost of a search is the number of tokens that were
said, each counted once. The work of scoring them is not counted.
"""

from __future__ import annotations

import math
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
from posttrain.core.transcript import shown_segment
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
        sampling: the resolved sampling of the policy. A search over steps also stops at each separator.
        separator: the text that ends a step.
        verifier: scores steps, if there is no `scorer`.
        judge: scores whole answers, if there is neither.
        verified: the environment's own verdict scores whole answers, if none of these is given.
        budget: tokens for a task. A search that has spent them begins no further generation. 0: no limit.
        version: the version of the weights that must say all tokens. None: the version that says the first token.
        right_at: the smallest outcome of a right answer, if it is given.
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
        """int32 ids of the prompt of a task."""
        if task.id not in self._prompts:
            self._prompts[task.id] = np.asarray(self.prompt(task), np.int32)
        return self._prompts[task.id]

    async def whole(self, task: Task, count: int) -> list[Beginning]:
        """`count` whole answers, each with its scores; fewer, but at least one, where the budget is spent before."""
        nothing = Beginning(np.zeros(0, np.int32))

        def answer(i: int) -> Coroutine[Any, Any, Beginning]:
            return self._say(task, nothing, self.sampling, f"answer/{i}")

        # Without a budget all answers are asked for at once and share the engine's batch. With a budget they come one
        # after another, because the cost of an answer is known only at its end.
        if not self.budget:
            return await self.scored(task, await together([answer(i) for i in range(count)]))
        answers = [await answer(0)]
        while len(answers) < count and self.goes_on(task):
            answers.append(await answer(len(answers)))
        return await self.scored(task, answers)

    async def ended(self, task: Task, ones: Sequence[Beginning]) -> Beginning:
        """The best of the answers that ended. If none did, the best beginning is continued to its end."""
        if not (ended_ones := [b for b in ones if b.stop is not None]):
            best_beginning = max(ones, key=self.worth)
            ended_ones = await self.scored(task, [await self._say(task, best_beginning, self.sampling, "end")])
        return max(ended_ones, key=self.worth)

    async def grown(self, task: Task, ones: Sequence[Beginning], count: int, place: str) -> list[Beginning]:
        """`count` continuations of each beginning by one step, with the score of the new step. Equal ones are kept
        once."""
        # The engine ends the turn at the separator, and the separator is part of the step that it ends.
        step_sampling = replace(self.sampling, stop=(*self.sampling.stop, self.separator))
        continued = await together(
            [self._say(task, b, step_sampling, f"{place}/{n}/{i}") for n, b in enumerate(ones) for i in range(count)]
        )
        # Equal continuations are kept once. Otherwise they would take several places in a beam.
        return await self.scored(task, list({b.key: b for b in continued}.values()))

    async def _say(self, task: Task, begun: Beginning, sampling: Sampling, place: str) -> Beginning:
        """A beginning with the next tokens of the policy, up to a stop."""
        # The limit on tokens is for the whole answer, so each step gets the rest of it. An answer without a rest has
        # ended by its length.
        tokens_left = self.sampling.max_tokens - len(begun.ids)
        if tokens_left < 1:
            return replace(begun, stop=Stop.LENGTH)
        ids = np.concatenate([self.seen(task), begun.ids]).astype(np.int32)
        key = seeds.key(self.seed, "search", task.id, place)
        # min_tokens is for a whole answer; for a step it would forbid the separator.
        turn = await self.sampler.generate(ids, replace(sampling, max_tokens=tokens_left, min_tokens=0), key)
        self.version = int(turn.version[0]) if self.version is None else self.version
        said_by_one_version(turn.version, self.version, task.id)
        self.spent_on[task.id] += len(turn.ids)
        at_stop_string = turn.stop is Stop.STRING and self.separator in sampling.stop
        # If the separator ended this turn, a step is complete and the answer goes on. If one of the policy's own stop
        # strings ended it, the answer has ended.
        step_ended = at_stop_string and self.separator in self.text(turn.ids)
        return Beginning(
            np.concatenate([begun.ids, turn.ids]).astype(np.int32), begun.scores, None if step_ended else turn.stop
        )

    async def scored(self, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """The beginnings with the scores of all their steps, or with one score of the whole answer.

        A beginning has no score if there is no source of scores, or if the source failed.
        """
        if not ones:
            return []
        # Only one source is asked. Sources of scores of steps come first, then the judge of whole answers, then the
        # environment's own verdict.
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
        # `score_M` has the scores of all segments in one row. `tokens_upto` has the number of tokens up to the
        # end of each step, so the score of a step is that of its last token.
        packed = Packed.of([self._segment(task, b) for b in ones])
        score_M, ends = scorer.tokens(packed), TokenEnds(self.text)
        out: list[Beginning] = []
        for s, b in enumerate(ones):
            own_scores = score_M[packed.segment_M == s]
            tokens_upto = ends.upto(b.ids, step_ends(self.text(b.ids), self.separator))
            scores = own_scores[np.array(tokens_upto, np.int64) - 1].tolist()
            # As where the same model judges: it has failed on an answer to which it gives no number.
            out.append(replace(b, scores=tuple(scores) if all(map(math.isfinite, scores)) else ()))
        return out

    async def _verified(self, verifier: StepVerifier, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """The beginnings with the scores of all their steps. Only steps without a score are verified, and equal texts
        once.

        An answer with a step that could not be judged has no score.
        """
        texts = [self.text(b.ids) for b in ones]
        upto = [[t[:end] for end in step_ends(t, self.separator)] for t in texts]
        # A beginning keeps the scores of its earlier steps, so only the texts up to later steps are new. Different
        # beginnings may have the same text, and it is asked for once.
        new_texts = list(
            dict.fromkeys(t for b, own_texts in zip(ones, upto, strict=True) for t in own_texts[len(b.scores) :])
        )
        scores = dict(zip(new_texts, await verifier.of_beginnings(task, new_texts), strict=True))
        scored: list[Beginning] = []
        for b, own_texts in zip(ones, upto, strict=True):
            new = [scores[t] for t in own_texts[len(b.scores) :]]
            # With one step missing, a score of the others would be compared with scores of all steps.
            judged = tuple(x for x in new if x is not None and math.isfinite(x))
            scored.append(replace(b, scores=(*b.scores, *judged) if len(judged) == len(new) else ()))
        return scored

    def _segment(self, task: Task, b: Beginning) -> Segment:
        seen = self.seen(task)
        mask = np.arange(len(seen) + len(b.ids)) >= len(seen)
        return shown_segment(np.concatenate([seen, b.ids]), mask, READ)

    def worth(self, b: Beginning) -> float:
        """Its steps' scores as one number; an answer without a step is worth 0."""
        return aggregated(b.scores, self.aggregate) if b.scores else 0.0

    def _episode(self, task: Task, b: Beginning, sibling: int) -> Episode:
        """An answer as judges of episodes read it. One that could go on counts as cut off."""
        stop, text = b.stop or Stop.LENGTH, self.text(b.ids)
        return Episode(task, 0, sibling, (self._segment(task, b),), stop, (), text, turns=(len(b.ids),))

    async def verdict(self, task: Task, b: Beginning) -> float | None:
        """The environment's outcome of an answer; None where it could not be judged."""
        return outcome(await self._judged(task, b))

    async def _judged(self, task: Task, b: Beginning) -> Sequence[Judged]:
        """The environment's verdicts on an answer."""
        turns = (self.text(b.ids),)
        # `int`: the ends of steps stay in characters, since nobody reads them here.
        attempt = attempt_of(task, turns, b.stop or Stop.LENGTH, (self._segment(task, b),), self.text, int)
        return await self.environment.judge(attempt)

    async def judged(self, task: Task, b: Beginning) -> tuple[float, Right] | None:
        """The environment's outcome, and what is right by it; None where it could not be judged."""
        verdicts = await self._judged(task, b)
        paid = outcome(verdicts)
        return None if paid is None else (paid, right_of(verdicts, self.right_at))
