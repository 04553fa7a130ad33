"""Sequences for a teacher that is shown more than the policy: the same answers behind prompts with a hint.

Worked example: the policy was asked [p q] and said [A B]; the prompt with the hint is [p h q]. The teacher reads
[p h q A B], and its log-probs of A and B stand beside the policy's. No label moves: what is spoken stays spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.core import abilities
from posttrain.core.content import content_of
from posttrain.core.ports import Dialogue, Examiner
from posttrain.core.types import Episode, Group, Message, Segment, Task
from posttrain.ladder.pieces.hint import Hint
from posttrain.role.rollout import Rollout
from posttrain.system.errors import ConfigError, InvariantError


@dataclass(frozen=True, eq=False)
class HintedEpisode:
    """An episode as the teacher reads it."""

    segments: tuple[Segment, ...]
    missing: str = ""
    """The reason why there is no hint; '' where there is one. The segments are then those of the episode."""


@dataclass(frozen=True)
class Hints:
    """Puts episodes behind prompts with a hint."""

    how: Hint
    rollout: Rollout
    """It played the episodes: its environment writes the prompts, its encoder makes them tokens."""
    average: Examiner | None = None
    """The teacher whose weights are a moving average of the policy's, where it is asked."""

    def teacher(self, learner: Examiner, reference: Examiner | None) -> Examiner | None:
        """Returns the model that reads the prompts with a hint."""
        return {"now": learner, "average": self.average, "start": reference}[self.how.weights]

    def of(self, group: Group) -> tuple[HintedEpisode, ...]:
        """The judged episodes of a group, in order.

        Raises:
            ConfigError: the environment asked with more than the task's prompt, or its hint ignores what it is given.
        """
        return tuple(self._hinted(group, e) for e in group.judged)

    def _hinted(self, group: Group, e: Episode) -> HintedEpisode:
        # Each reason why an episode has no hint is kept with it: it then has
        # no gradient, and its credit says why (`EpisodeCredit.dropped`).
        given = self.given(group, e)
        if not isinstance(given, Task):
            return HintedEpisode(e.segments, given)
        prompt = abilities.hints(self.rollout.environment)(given)
        if prompt is None:
            return HintedEpisode(e.segments, "the environment has no hint for this task")
        # An environment that always writes the task's own answer would make a teacher
        # that knows the solution, where one that saw a sibling was asked for.
        if self.how.of == "sibling" and not holds(prompt, str(given.answer)):
            raise ConfigError(
                f"environment {self.rollout.environment.name!r}: the hint of task {e.task.id!r} does not hold the"
                " answer that it was given, so the teacher cannot be shown a sibling's. Write `Task.answer` into the"
                " hint, or set hint.of=answer"
            )
        if len(e.segments) != 1:
            return HintedEpisode(e.segments, "its history was rewritten, so it has several prompts")
        found = behind(e.segments[0], self.asked(e), self.ids(e.task, prompt))
        if len(found.ids) > self.rollout.sampler.context:
            return HintedEpisode(e.segments, "with a hint it is longer than the model's context")
        return HintedEpisode((found,))

    def given(self, group: Group, e: Episode) -> Task | str:
        """The task whose answer is the hint for an episode; or why there is none."""
        if self.how.of == "answer":
            return e.task
        # Never its own answer: a teacher that has read what it scores would call every token of it certain.
        right = [o for o in group.judged if o is not e and o.solved]
        return replace(e.task, answer=said(self.rollout.dialogue(e.task.id), right[0])) if right else NOBODY

    def asked(self, e: Episode) -> np.ndarray:
        """int32: the prompt that the policy was asked with.

        Raises:
            ConfigError: it is not the task's prompt alone.
        """
        segment = e.segments[0]
        # argmax of a mask finds its first True; without any it would say 0.
        own = segment.ids[: int(np.argmax(segment.mask)) if segment.spoken else len(segment.ids)]
        # The prompt is exchanged as tokens. If the environment had written more into it, the
        # hinted prompt would lack that, and the two models would read different questions.
        if not np.array_equal(own, self.ids(e.task, e.task.prompt)):
            raise ConfigError(
                f"environment {self.rollout.environment.name!r} asks task {e.task.id!r} with more than its prompt, so"
                " the prompt with a hint cannot take its place. Write all of it into `Task.prompt`, or set hint=none"
            )
        return own

    def ids(self, task: Task, prompt: str | Sequence[Message]) -> np.ndarray:
        tools = task.tools or (self.rollout.environment.abilities.tools or (lambda _: ()))(task)
        return self.rollout.dialogue(task.id).see(prompt, tools)


NOBODY = "no other answer of its group is right"


def said(dialogue: Dialogue, e: Episode) -> str:
    """Returns the text that an episode says, turn by turn, without stop tokens."""
    ids = np.concatenate([s.ids[s.mask] for s in e.segments])
    # `turns` are lengths in spoken tokens over all segments; their sums are where one turn ends.
    return "\n".join(dialogue.text(turn) for turn in np.split(ids, np.cumsum(e.turns, dtype=int)[:-1]))


def holds(prompt: str | Sequence[Message], text: str) -> bool:
    contents = [prompt] if isinstance(prompt, str) else [content_of(m["content"]) for m in prompt]
    return any(text in (c if isinstance(c, str) else "".join(part.text for part in c)) for c in contents)


def behind(segment: Segment, own: np.ndarray, prompt: np.ndarray) -> Segment:
    """The segment behind another prompt. All that follows its own prompt stays as it is, but for the experts that the
    sampler chose: a teacher that reads more chooses by itself.

    Args:
        own: int32, its own prompt: the tokens before its first spoken one.
        prompt: int32, the other one.
    """
    # All arrays of the segment are cut at the same place, so each spoken token keeps its log-prob and version.
    after, n = slice(len(own), None), len(prompt)
    return replace(
        segment,
        ids=np.concatenate([prompt, segment.ids[after]]).astype(np.int32),
        mask=np.concatenate([np.zeros(n, np.bool_), segment.mask[after]]),
        logp=np.concatenate([np.full(n, np.nan, np.float32), segment.logp[after]]),
        version=np.concatenate([np.full(n, -1, np.int32), segment.version[after]]),
        routed=None,
    )


def same_words(own: Sequence[Segment], hinted: Sequence[Segment]) -> None:
    """Raises InvariantError where the teacher would be asked about other tokens than the policy said."""
    for mine, other in zip(own, hinted, strict=True):
        if not np.array_equal(mine.ids[mine.mask], other.ids[other.mask]):
            raise InvariantError(
                "behind its hint the teacher would score other tokens than the policy said. The hint goes before them,"
                " and the mask moves with the tokens"
            )
