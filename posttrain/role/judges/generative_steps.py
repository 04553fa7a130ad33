"""A process reward model that writes: a policy that learned to verify judges each step of an answer. It reads the
answer up to the end of a step. The step's score is the chance of Yes after its reasoning (2504.16828, 2504.00891)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.config.env import Reward
from posttrain.core.content import conversation
from posttrain.core.measure.answer_steps import step_ends
from posttrain.core.types import Episode, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.judged.verify_rules import chance_of_yes
from posttrain.role.judges.generative_judge import LEFT_OUT, UNREAD, GenerativeJudge, Vote
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import step_tokens, step_verdicts
from posttrain.system.concurrency import together
from posttrain.system.errors import DataError, InvariantError


@dataclass(frozen=True)
class StepVotes:
    """The result of the votes about one beginning of an answer."""

    score: float | None
    """The mean chance of Yes over the votes that count; None where none of them has a verdict."""
    said: str
    """The chance of Yes of each vote: `-` has no verdict, and `*` was left out by the meta reward model."""
    sample: str = ""
    """The reason why there is no score; '' where there is one."""


@dataclass(eq=False)
class GenerativeStepJudge:
    """`core.ports.EpisodeJudge` of a verifier that writes. Every beginning of an answer that ends with a step is
    verified `votes` times; equal ones of siblings once. The reward says what becomes of the scores, as for every
    process reward model."""

    verifier: GenerativeJudge
    """The verifier: its engine, its form, its votes and its meta reward model."""
    reward: Reward
    ends: TokenEnds
    """The finder of step ends for the policy's tokenizer, at whose tokens steps end."""
    resolution: float = 1e-5
    """Relative difference up to which two scores count as equal; 1e-5 fits a model in float32."""
    line: str = ""
    """Description of the judge and of what it reads, as a line for people."""

    @property
    def name(self) -> str:
        return self.verifier.name

    @property
    def measured(self) -> bool:
        return self.reward.measured

    @property
    def separator(self) -> str:
        return self.verifier.judging.separator

    def close(self) -> None:
        self.verifier.close()

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        verdicts: list[tuple[Judged, ...]] = await self.verifier.run(self.verdicts(episodes))
        return verdicts

    async def verdicts(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        """The verdicts about each episode of a group. An answer of which a step has no readable vote is `failed`."""
        ends = [step_tokens(self.name, e, self.ends, self.separator) for e in episodes]
        texts = [self.beginnings(e) if upto else [] for e, upto in zip(episodes, ends, strict=True)]
        asked: dict[str, tuple[Episode, int]] = {}
        for e, upto, beginnings in zip(episodes, ends, texts, strict=True):
            for number, (end, text) in enumerate(zip(upto, beginnings, strict=True), 1):
                # It must lie within the step's last token: else text and number of tokens are of different steps.
                prefixes = [self.ends.text(_said(e)[:n]) for n in (end - 1, end)]
                reads_to_the_step(text, prefixes[0], prefixes[1], f"task {e.task.id!r}, step {number} of {len(upto)}")
                # The random numbers are those of the first sibling with this beginning, whichever is verified first.
                asked.setdefault(text, (e, number))
        asking = [self.verified(e.task, text, e.visit, e.sibling, number) for text, (e, number) in asked.items()]
        votes = dict(zip(asked, await together(asking), strict=True))
        return [
            self._answer_verdicts(upto, [votes[t] for t in beginnings])
            for upto, beginnings in zip(ends, texts, strict=True)
        ]

    def beginnings(self, e: Episode) -> list[str]:
        """The answer's text up to the end of each step."""
        text = self.ends.text(_said(e))
        return [text[:end] for end in step_ends(text, self.separator)]

    async def verified(self, task: Task, text: str, *place: int | str) -> StepVotes:
        """The votes about one beginning, with the random numbers of `place`."""
        question = task.prompt if isinstance(task.prompt, str) else conversation(task.prompt)
        prompt = self.verifier.judging.prompt(question, [text])
        try:
            votes = await together(
                [self.verifier.vote(prompt, (0,), task.id, *place, k) for k in range(self.verifier.votes)]
            )
        except DataError as error:
            return StepVotes(None, UNREAD, str(error))
        kept = self.verifier.kept(votes)
        chance = await together([self._chance(v) for v in votes])
        marks = [UNREAD if c is None else f"{c:.12g}" + ("" if k in kept else LEFT_OUT) for k, c in enumerate(chance)]
        # The mean chance of the votes that count. fsum makes it independent of their order.
        counted = [c for k in kept if (c := chance[k]) is not None]
        if not counted:
            return StepVotes(None, ",".join(marks), f"such as {votes[0].text[-60:]!r}")
        return StepVotes(math.fsum(counted) / len(counted), ",".join(marks))

    async def of_beginnings(self, task: Task, texts: Sequence[str]) -> list[float | None]:
        """The score of each of these beginnings, as a search asks for them; None where no vote can be read."""
        votes: list[StepVotes] = await self.verifier.run(together([self.verified(task, t, "search", t) for t in texts]))
        return [v.score for v in votes]

    async def _chance(self, vote: Vote) -> float | None:
        """p(Yes) / (p(Yes) + p(No)) after the vote's own reasoning; None where it has no verdict."""
        if vote.scores is None:
            return None
        yes, no = await together([self.verifier.log_says(vote, end) for end in self.verifier.judging.ends])
        return chance_of_yes(yes, no)

    def _answer_verdicts(self, ends: Sequence[int], votes: Sequence[StepVotes]) -> tuple[Judged, ...]:
        """The verdicts about one answer, from the end and the votes of each step."""
        r = self.reward
        if not ends:
            return (Judged(self.name, r.weight, Verdict.abstain("it has no step"), measured=r.measured, by_model=True),)
        scores = [v.score for v in votes if v.score is not None]
        # One unread step fails the whole answer: the other scores would be read as those of all steps.
        if len(scores) < len(votes):
            bad = next(i for i, v in enumerate(votes) if v.score is None)
            why = f"no vote about step {bad + 1} has a verdict: {votes[bad].sample}"
            return (Judged(self.name, r.weight, Verdict.failed("unread", why), measured=r.measured, by_model=True),)
        return step_verdicts(self.name, r, ends, scores, self.resolution, [v.said for v in votes])


def reads_to_the_step(text: str, before: str, upto: str, step: str) -> None:
    """InvariantError where the text that is verified does not end in the step's last token.

    Args:
        before: what was said up to that token, without it.
        upto: the same with it.
    """
    # Without U+FFFD, which stands for the bytes of a character that the step's last token completes.
    if not (upto.startswith(text) and text.startswith(before.rstrip("\ufffd"))):
        raise InvariantError(
            f"{step}: it is judged by {text[-30:]!r}, and the answer up to its end is {upto[-30:]!r}: the score would"
            " be of another step. Show the verifier what was said up to the step"
        )


def _said(e: Episode) -> np.ndarray:
    """The spoken tokens of an answer of one turn."""
    return e.segments[-1].ids[e.segments[-1].mask]
