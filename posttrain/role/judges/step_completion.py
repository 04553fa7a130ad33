"""Labels of steps by completion: an answer is cut into steps, and the policy goes on from the end of each (2312.08935).

An answer and its completions share their beginnings, which the engine computes once. The random numbers of a completion
are those of (task, visit, sibling, step, number of the completion), so no neighbour changes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core import seeds
from posttrain.core.measure.answer_steps import StepValues, step_ends, steps_of_text
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.types import Episode, Group, SampledTurn, TruncationSets
from posttrain.role.episode_conversation import tokens_upto
from posttrain.role.judging import SiblingVerdicts
from posttrain.role.rollout import Rollout
from posttrain.system.concurrency import together
from posttrain.system.errors import ConfigError

ENDED = (Stop.SAID, Stop.STRING)
"""Stop reasons of an answer that ended by itself."""


@dataclass
class TokenEnds:
    """A finder of the tokens that end the steps of some text.

    Args:
        text: decodes token ids, without the stop token.
    """

    text: Callable[[np.ndarray], str]
    _widths: dict[int, int] = field(default_factory=dict[int, int])

    def upto(self, ids: np.ndarray, ends: Sequence[int]) -> tuple[int, ...]:
        """Returns for each step the number of tokens up to its end. The last step ends with the last token, the stop
        token included.

        A token that two steps share belongs to the first of them. A step without a token of its own ends at the same
        token as the step before it: the caller then sees two equal numbers.

        Args:
            ends: the number of characters up to the end of each step, rising.
        """
        if not ends:
            return ()
        # Adding up the widths of single tokens takes linear time. It is right where the widths sum to the
        # length of the whole text. A character whose bytes lie in several tokens breaks this: then prefixes
        # are decoded instead.
        widths = [self._width(int(i)) for i in ids]
        length = len(self.text(ids))
        if sum(widths) == length:  # each token has its own text, as almost all tokenizers write it
            # The first token whose text reaches the end of the step; + 1 makes a number of tokens of its index.
            upto_T = np.cumsum(widths)
            tokens_before = np.searchsorted(upto_T, np.array(ends[:-1], np.int64)) + 1
        else:
            tokens_before = [tokens_upto(self.text, ids, end) for end in ends[:-1]]
        return (*(int(n) for n in tokens_before), len(ids))

    def _width(self, token: int) -> int:
        """The number of characters of a token that is decoded alone."""
        if token not in self._widths:
            self._widths[token] = len(self.text(np.array([token], np.int32)))
        return self._widths[token]


@dataclass(frozen=True)
class ContinuedSampler:
    """A sampler whose first turn begins with these tokens, for episodes of one turn. The rest of `Sampler` is that of
    `inner`."""

    inner: Sampler
    said: SampledTurn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """The tokens said before, and what the engine says after them: at most `max_tokens` together."""
        said_before = self.said
        # Both parts are one turn: the tokens said before count in its limits.
        tokens_left = sampling.max_tokens - len(said_before.ids)
        if tokens_left < 1:
            return replace(said_before, stop=Stop.LENGTH)
        sampling_left = replace(
            sampling, max_tokens=tokens_left, min_tokens=max(0, sampling.min_tokens - len(said_before.ids))
        )
        new = await self.inner.generate(np.concatenate([ids, said_before.ids]).astype(np.int32), sampling_left, place)
        sets = None if said_before.kept is None else [*said_before.kept.sets(), *(new.kept.sets() if new.kept else [])]
        # A transcript needs the kept set of every spoken token, those of `said` included.
        kept = None if sets is None else TruncationSets.of(sets)
        return SampledTurn(
            np.concatenate([said_before.ids, new.ids]).astype(np.int32),
            np.concatenate([said_before.logp, new.logp]).astype(np.float32),
            np.concatenate([said_before.version, new.version]).astype(np.int32),
            new.stop,
            kept,
        )


@dataclass(frozen=True)
class RecitedSampler:
    """A sampler that says this one turn. The rest of `Sampler` is that of `inner`."""

    inner: Sampler
    said: SampledTurn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        return self.said


@dataclass(frozen=True, eq=False)
class LabelledAnswer:
    """An answer in steps, with how its completions were judged."""

    episode: Episode
    steps: tuple[str, ...]
    """The steps' texts. Joined, they are the answer of the policy."""
    tokens: tuple[int, ...]
    """Spoken tokens up to the end of each step."""
    values: StepValues
    soft: tuple[float, ...] = ()
    """The soft label of each step."""
    completions: tuple[tuple[Episode, ...], ...] = ()
    """The completions from the end of each step. Of the last step of an answer that ended: the answer itself."""
    early: bool = False
    """Whether this is the shortened beginning of another answer: the policy itself did not end here."""

    def row(self, step: int) -> dict[str, Any]:
        """The labels as a row of a data file, as `environment.judged.judged_rows` reads it. `step`: of the stage."""
        e = self.episode
        return {
            "id": f"{e.task.id}/{e.visit}/{e.sibling}{'/early' if self.early else ''}",
            "prompt": e.task.prompt,
            "completions": list(self.steps),
            "labels": list(self.values.hard),
            "values": list(self.soft),
            "right": list(self.values.right),
            "asked": list(self.values.asked),
            "step": step,
        }


@dataclass
class StepLabeler:
    """Labels the answers of groups by completing them.

    Args:
        ends: of the policy's tokenizer.
        stream: name of the random stream of the answers.
    """

    rollout: Rollout
    stage: StepLabeling
    sampling: Sampling
    ends: TokenEnds
    stream: str

    async def label(self, groups: Sequence[Group]) -> tuple[LabelledAnswer, ...]:
        """Every judged answer with at least one step, in order. An answer is left out where no completion of some step
        could be judged. ConfigError where an answer has several turns."""
        answers = await together([self._group(g) for g in groups])
        return tuple(x for of_group in answers for x in of_group)

    async def _group(self, group: Group) -> list[LabelledAnswer]:
        """Equal beginnings of siblings are completed once, as those of the first sibling that has them."""
        known: dict[bytes, asyncio.Task[tuple[Episode, ...]]] = {}
        judging = SiblingVerdicts(self.rollout.environment)
        answers = [e for e in group.episodes if e.figure is not None]
        try:
            labelled_or_none = await together([self._answer(e, known, judging) for e in answers])
            whole = [x for x in labelled_or_none if x is not None]
            early = await together([self._early(x, judging) for x in whole]) if self.stage.early_ends else []
        finally:
            for task in known.values():
                task.cancel()
            await judging.close()
        return [*whole, *(x for x in early if x is not None)]

    async def _early(self, answer: LabelledAnswer, judging: SiblingVerdicts) -> LabelledAnswer | None:
        """The answer as if it had ended after one of its earlier steps, without the separator behind this step. None
        where it has one step, no token ends there, there is no stop token, or it could not be judged."""
        e, stage = answer.episode, self.stage
        if len(answer.steps) < 2 or not self.sampling.stop_ids:
            return None
        # The step is drawn with random numbers of its own, so the random numbers of completions stay the same.
        place = (f"{self.stream}/early", e.task.id, e.visit, e.sibling)
        number = int(seeds.generator(self.rollout.seed, *place).integers(1, len(answer.steps)))
        text = "".join(answer.steps[:number]).rstrip()
        # An answer that ended there would not have written the separator of a next step.
        while text.endswith(stage.separator):
            text = text.removesuffix(stage.separator).rstrip()
        # The last end always gets all tokens (`upto`), so the end of the whole answer stands behind the wanted one.
        upto, _ = self.ends.upto(self.said(e), (len(text), len(e.text)))
        # Where no token ends at this character, no beginning of the tokens has this text.
        if self.ends.text(self.said(e)[:upto]) != text:
            return None
        # The environment is played with the shortened answer, so that it is judged, and stopped, as any answer.
        reciting = replace(
            self.rollout, sampler=RecitedSampler(self.rollout.sampler, ended(e, upto, self.sampling)), judges=()
        )
        stream = f"{self.stream}/early/{e.sibling}"
        shortened = await reciting.episode(e.task, e.visit, e.sibling, self.sampling, stream, judging=judging)
        if shortened.figure is None or shortened.stop not in ENDED:
            return None
        # The steps before keep their labels: their completions begin before the new end. The last is judged by this
        # answer.
        tokens, before = self.cut(shortened), slice(number - 1)
        values = StepValues(
            right=(*answer.values.right[before], int(shortened.right.of(shortened.figure))),
            asked=(*answer.values.asked[before], 1),
        )
        steps, completions = steps_of_text(shortened.text, stage.separator), (*answer.completions[before], (shortened,))
        return LabelledAnswer(shortened, steps, tokens, values, self.soft(values), completions, early=True)

    async def _answer(
        self, e: Episode, known: dict[bytes, asyncio.Task[tuple[Episode, ...]]], judging: SiblingVerdicts
    ) -> LabelledAnswer | None:
        """The answer with its labels; None where it has no step, or a step's completions could not be judged."""
        spoken, tokens = self.said(e), self.cut(e)
        if not tokens:
            return None
        asked: list[asyncio.Task[tuple[Episode, ...]] | tuple[Episode, ...]] = []
        for number, upto in enumerate(tokens, 1):
            # The answer is its own completion from its last step: nothing can follow a stop token.
            if upto == len(spoken) and e.stop in ENDED:
                asked.append((e,))
                continue
            asked.append(self.from_step(e, number, upto, known, judging))
        # All were started above and run side by side; here they are only collected, in the order of the steps.
        completions = tuple([x if isinstance(x, tuple) else await x for x in asked])
        # For each step a list with True for every right completion and False for every wrong one.
        judged = [[c.right.of(c.figure) for c in of_step if c.figure is not None] for of_step in completions]
        if not all(judged):
            return None
        values = StepValues(
            right=tuple(sum(of_step) for of_step in judged), asked=tuple(len(of_step) for of_step in judged)
        )
        steps, soft = steps_of_text(e.text, self.stage.separator), self.soft(values)
        return LabelledAnswer(e, steps, tokens, values, soft, completions)

    def soft(self, values: StepValues) -> tuple[float, ...]:
        """The soft labels: the share of right completions, or the value of a prover."""
        return values.soft if self.stage.prover == 1 else values.best_of(self.stage.prover)

    def said(self, e: Episode) -> np.ndarray:
        """The spoken tokens of an answer; ConfigError where it has several turns."""
        if len(e.turns) > 1:
            raise ConfigError(
                f"{self.stage.name}: an answer to task {e.task.id!r} has {len(e.turns)} turns, and steps are completed"
                " in answers of one turn: use an environment without tools or seats"
            )
        return e.segments[-1].ids[e.segments[-1].mask]

    def cut(self, e: Episode) -> tuple[int, ...]:
        """Spoken tokens up to the end of each step; () without a step, or where two end with the same token."""
        tokens = self.ends.upto(self.said(e), step_ends(e.text, self.stage.separator))
        return tokens if len(set(tokens)) == len(tokens) else ()

    def from_step(
        self,
        e: Episode,
        number: int,
        upto: int,
        known: dict[bytes, asyncio.Task[tuple[Episode, ...]]],
        judging: SiblingVerdicts,
    ) -> asyncio.Task[tuple[Episode, ...]]:
        """The completions of the answer up to token `upto`, which ends step `number` (from 1). Siblings with the same
        beginning share them, through `known`."""
        beginning = self.said(e)[:upto].tobytes()
        if beginning not in known:
            known[beginning] = asyncio.create_task(self._completions(e, number, upto, judging))
        return known[beginning]

    async def _completions(self, e: Episode, number: int, upto: int, judging: SiblingVerdicts) -> tuple[Episode, ...]:
        """The answer up to token `upto`, which ends step `number` (from 1), completed several times."""
        # Judges that read tokens are left out: a label says whether
        # the answer becomes right, which the environment decides.
        continuing = replace(self.rollout, sampler=ContinuedSampler(self.rollout.sampler, begun(e, upto)), judges=())
        stream = f"{self.stream}/from/{e.sibling}/{number}"
        count, sampling = self.stage.completions, self.sampling
        return tuple(
            await together(
                [continuing.episode(e.task, e.visit, c, sampling, stream, judging=judging) for c in range(count)]
            )
        )


def ended(e: Episode, upto: int, sampling: Sampling) -> SampledTurn:
    """The first `upto` tokens that the policy said, and a stop token that it did not say there.

    The log-prob of the stop token is written as 0, as in demonstrations. Nothing is learned from these tokens as
    samples.
    """
    first = begun(e, upto)
    stop, zero = np.array((sampling.stop_ids or ())[:1], np.int32), np.zeros(1, np.float32)
    # The stop token was not drawn, so the set that truncation would have kept is unknown. It holds the token alone.
    kept = None if first.kept is None else TruncationSets.of([*first.kept.sets(), stop])
    version = np.concatenate([first.version, first.version[-1:]])
    return SampledTurn(np.concatenate([first.ids, stop]), np.concatenate([first.logp, zero]), version, Stop.SAID, kept)


def begun(e: Episode, upto: int) -> SampledTurn:
    """The first `upto` tokens that the policy said in an answer of one turn, as an engine would return them."""
    s = e.segments[-1]
    kept = None if s.kept is None else TruncationSets.of(s.kept.sets()[:upto])
    return SampledTurn(s.ids[s.mask][:upto], s.logp[s.mask][:upto], s.version[s.mask][:upto], Stop.LENGTH, kept)
