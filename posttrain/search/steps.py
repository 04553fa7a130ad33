"""The next steps of an answer, sampled by an engine and scored by a process reward model.

All continuations of a beginning share it in the engine's cache. What a search spends is counted in tokens that were
said; what was said before it went on is not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.ports import Attempt, Environment, Sampler
from posttrain.core.process import Aggregate, aggregated, step_ends
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.transcript import Transcript
from posttrain.core.types import Segment, Task
from posttrain.core.verdict import SOLVED, outcome
from posttrain.role.concurrency import together
from posttrain.role.probe import READ
from posttrain.role.step_judge import StepScorer
from posttrain.role.steps import TokenEnds


@dataclass(frozen=True, eq=False)
class Beginning:
    """An answer up to the end of a step, with the score of each step."""

    ids: np.ndarray
    """int32: the tokens said so far."""
    scores: tuple[float, ...] = ()
    stop: Stop | None = None
    """Why the answer ended; None where it goes on."""

    @property
    def key(self) -> bytes:
        return self.ids.tobytes()


@dataclass
class StepSearch:
    """What every search over steps uses: the engine, the scorer, and the count of what was spent.

    Args:
        prompt: the prompt of a task as token ids.
        text: decodes token ids, without the stop token.
        sampling: of the policy, resolved; a search stops it at each separator.
    """

    sampler: Sampler
    scorer: StepScorer
    environment: Environment
    prompt: Callable[[Task], np.ndarray]
    text: Callable[[np.ndarray], str]
    sampling: Sampling
    separator: str
    aggregate: Aggregate = "min"
    seed: int = 0
    spent: int = 0
    """Tokens said since the search began."""
    _prompts: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def seen(self, task: Task) -> np.ndarray:
        if task.id not in self._prompts:
            self._prompts[task.id] = np.asarray(self.prompt(task), np.int32)
        return self._prompts[task.id]

    async def whole(self, task: Task, count: int) -> list[Beginning]:
        """`count` whole answers, each with the scores of its steps."""
        found = await together(
            [self._say(task, Beginning(np.zeros(0, np.int32)), self.sampling, f"answer/{i}") for i in range(count)]
        )
        return self.scored(task, found)

    async def grown(self, task: Task, ones: Sequence[Beginning], count: int, place: str) -> list[Beginning]:
        """`count` continuations of each beginning by one step, equal ones once, with the new step's score."""
        stepwise = replace(self.sampling, stop=(self.separator,))
        found = await together(
            [self._say(task, b, stepwise, f"{place}/{n}/{i}") for n, b in enumerate(ones) for i in range(count)]
        )
        return self.scored(task, list({b.key: b for b in found}.values()))

    async def _say(self, task: Task, begun: Beginning, sampling: Sampling, place: str) -> Beginning:
        left = self.sampling.max_tokens - len(begun.ids)
        if left < 1:
            return replace(begun, stop=Stop.LENGTH)
        ids = np.concatenate([self.seen(task), begun.ids]).astype(np.int32)
        key = seeds.key(self.seed, "search", task.id, place)
        said = await self.sampler.generate(ids, replace(sampling, max_tokens=left, min_tokens=0), key)
        self.spent += len(said.ids)
        goes_on = said.stop is Stop.STRING and sampling.stop == (self.separator,)
        return Beginning(
            np.concatenate([begun.ids, said.ids]).astype(np.int32), begun.scores, None if goes_on else said.stop
        )

    def scored(self, task: Task, ones: Sequence[Beginning]) -> list[Beginning]:
        """Each with the scores of all of its steps, read off one pass of the reward model."""
        if not ones:
            return []
        packed = Packed.of([self._segment(task, b) for b in ones])
        score_M, ends = self.scorer.tokens(packed), TokenEnds(self.text)
        out: list[Beginning] = []
        for s, b in enumerate(ones):
            own = score_M[packed.segment_M == s]
            at = ends.upto(b.ids, step_ends(self.text(b.ids), self.separator))
            out.append(replace(b, scores=tuple(own[np.array(at, np.int64) - 1].tolist()) if at else ()))
        return out

    def _segment(self, task: Task, b: Beginning) -> Segment:
        transcript = Transcript(READ)
        transcript.see(self.seen(task))
        transcript.show(b.ids)
        return transcript.segment()

    def worth(self, b: Beginning) -> float:
        """Its steps' scores as one number; an answer without a step is worth 0."""
        return aggregated(b.scores, self.aggregate) if b.scores else 0.0

    async def right(self, task: Task, b: Beginning) -> bool:
        """Whether the environment judges it right."""
        attempt = Attempt(task, (self.text(b.ids),), b.stop or Stop.LENGTH, ids=tuple(b.ids.tolist()))
        found = outcome(await self.environment.judge(attempt))
        return found is not None and found >= SOLVED
