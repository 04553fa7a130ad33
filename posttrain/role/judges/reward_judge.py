"""Reward models as judges of finished episodes. They read the episode's tokens, and score a group in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from posttrain.core.batch import Packed
from posttrain.core.ports import PairRenderer
from posttrain.core.transcript import shown_segment
from posttrain.core.types import Episode, Segment
from posttrain.core.verdict import Judged, Verdict
from posttrain.role.learning.logprob_tolerance import READ
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.thoughts import whole

Combine = Literal["mean", "worst"]


class RewardScorer(Protocol):
    """A model with a reward head."""

    def rewards(self, packed: Packed) -> np.ndarray:
        """float32 [S]: the score of each segment, without gradient."""
        ...

    def tensors(self) -> Mapping[str, Any]:
        """Its weights by name, the head's included."""
        ...


@dataclass(frozen=True, eq=False)
class JudgeMember:
    """One reward model of a judge."""

    name: str
    scorer: RewardScorer
    context: int
    """Most tokens of a sequence."""
    renderer: PairRenderer | None = None
    """Its own tokenizer and chat template, where they are not the policy's. None: it reads the policy's tokens."""
    reads_last: bool = False
    """Whether its head reads the last token, and nothing else."""
    blank: int | None = None
    """The token that its head ignores at the end of a sequence; None: it ignores none."""
    stage: str = ""
    """The stage of this run that trained it; '' for any other."""

    def segment(self, episode: Episode) -> Segment:
        """The episode as this model reads it: the tokens themselves, or the conversation written anew. DataError where
        it cannot be encoded or is too long, ConfigError where it has several turns and the model another tokenizer."""
        if self.renderer is None:
            last = episode.segments[-1]
            ids, mask = last.ids, last.mask
        else:
            if len(episode.turns) > 1:
                raise ConfigError(
                    f"reward model {self.name}: it has another tokenizer or chat template than the policy, and an"
                    f" episode of {len(episode.turns)} turns cannot be written anew in it: what the world answered is"
                    " known as tokens alone. Use a reward model with the policy's tokenizer and template"
                )
            task = episode.task
            prompt_ids, spoken = self.renderer.pair(task.prompt, whole(episode.text), task.id, task.tools)
            ids, mask = (
                np.concatenate([prompt_ids, spoken]),
                np.arange(len(prompt_ids) + len(spoken)) >= len(prompt_ids),
            )
        if len(ids) > self.context:
            raise DataError(f"the episode has {len(ids)} tokens, and the reward model's context is {self.context}")
        # The model reads all tokens, under the contract of sequences that nobody sampled.
        return shown_segment(ids, mask, READ)


@dataclass(eq=False)
class RewardModelJudge:
    """`core.ports.EpisodeJudge` of one or several reward models, combined as mean - pessimism * standard deviation, or
    the worst (2310.02743). The members' own scores are in the verdict's `why`."""

    name: str
    weight: float
    members: tuple[JudgeMember, ...]
    combine: Combine = "mean"
    pessimism: float = 0.0
    resolution: float = 1e-5
    """Relative difference up to which two scores count as equal; 1e-5 fits a model in float32."""
    measured: bool = False
    """Whether its score is measured and not paid."""
    line: str = ""
    """Description of the judge and of what it reads, as a line for people."""
    _one_pass: threading.Lock = field(default_factory=threading.Lock)

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        return await asyncio.to_thread(self.verdicts, episodes)

    def verdicts(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        """One verdict about each episode. What a model cannot read or score is `failed`."""
        scores_K = [self._scores(member, episodes) for member in self.members]
        verdicts = [self._verdict([of_member[i] for of_member in scores_K]) for i in range(len(episodes))]
        # None and False: each is about the whole answer, not paid at a token.
        return [
            (Judged(self.name, self.weight, v, None, False, self.resolution, self.measured, by_model=True),)
            for v in verdicts
        ]

    def _scores(self, member: JudgeMember, episodes: Sequence[Episode]) -> list[float | str]:
        """One model's score of each episode, or the reason why there is none."""
        out: list[float | str] = []
        segments: list[Segment] = []
        for episode in episodes:
            try:
                segments.append(member.segment(episode))
                # A number in the place of the score, which the batch below computes.
                out.append(0.0)
            except DataError as error:
                out.append(f"{member.name}: {error}")
        if not segments:
            return out
        # Groups are judged in threads, and a model computes one pass at a time.
        with self._one_pass:
            scores = iter(member.scorer.rewards(Packed.of(segments)).astype(np.float64).tolist())
        return [x if isinstance(x, str) else next(scores) for x in out]

    def _verdict(self, scores_or_reasons: Sequence[float | str]) -> Verdict:
        """One verdict from the score of each model, or from the reason why it has none."""
        if unread := [x for x in scores_or_reasons if isinstance(x, str)]:
            return Verdict.failed("unreadable", unread[0])
        scores = np.array(scores_or_reasons, np.float64)
        if not np.all(np.isfinite(scores)):
            bad = self.members[int(np.argmin(np.isfinite(scores)))]
            return Verdict.failed("not finite", f"{bad.name} scores {scores[~np.isfinite(scores)][0]}")
        if len(scores) == 1:
            return Verdict.value(float(scores[0]))
        each = ", ".join(f"{x:.4g}" for x in scores)
        return Verdict.value(combined(scores[:, None], self.combine, self.pessimism)[0], why=each)


def combined(score_KS: np.ndarray, combine: Combine, pessimism: float) -> np.ndarray:
    """[K, S] -> [S]: the scores of K models as one: mean - pessimism * std (ddof 0), or the worst.

    >>> combined(np.array([[1.0, 2.0], [3.0, 2.0]]), "mean", 0.5).tolist()
    [1.5, 2.0]
    >>> combined(np.array([[1.0, 2.0], [3.0, 2.0]]), "worst", 0.0).tolist()
    [1.0, 2.0]
    """
    if combine == "worst":
        return score_KS.min(0)
    # Models disagree about answers that are unlike their training data. There the
    # highest mean would reward their errors, so disagreement is subtracted.
    return score_KS.mean(0) - pessimism * score_KS.std(0)
