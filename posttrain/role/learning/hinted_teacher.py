"""Sequences for a teacher that is shown more than the policy: the same answers behind prompts with a hint.

Worked example: the policy was asked [p q] and said [A B]; the prompt with the hint is [p h q]. The teacher reads
[p h q A B], and its log-probs of A and B stand beside the policy's. The mask moves along: A and B stay spoken tokens.
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
    """The rollout that played the episodes: its environment writes the hinted prompts, its encoder makes the tokens."""
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
        """One episode with the hint in its prompt, or unchanged with the reason why there is no hint."""
        # An episode without a hint has no gradient. Its credit shows the reason (`EpisodeCredit.dropped`).
        task_with_hint = self.given(group, e)
        if not isinstance(task_with_hint, Task):
            return HintedEpisode(e.segments, task_with_hint)
        prompt = abilities.hints(self.rollout.environment)(task_with_hint)
        if prompt is None:
            return HintedEpisode(e.segments, "the environment has no hint for this task")
        # hint.of=sibling asks for a teacher that saw a sibling's answer. An environment that
        # always writes the task's own answer would make a teacher that knows the solution.
        if self.how.of == "sibling" and not holds(prompt, str(task_with_hint.answer)):
            raise ConfigError(
                f"environment {self.rollout.environment.name!r}: the hint of task {e.task.id!r} does not hold the"
                " answer that it was given, so the teacher cannot be shown a sibling's. Write `Task.answer` into the"
                " hint, or set hint.of=answer"
            )
        # Checked before `asked`: a prompt that fills the context is cut, and is then not the task's.
        if not e.spoken:
            return HintedEpisode(e.segments, "it says nothing")
        if len(e.segments) != 1:
            return HintedEpisode(e.segments, "its history was rewritten, so it has several prompts")
        hinted = behind(e.segments[0], self.asked(e), self.ids(e.task, prompt))
        if len(hinted.ids) > self.rollout.sampler.context:
            return HintedEpisode(e.segments, "with a hint it is longer than the model's context")
        return HintedEpisode((hinted,))

    def given(self, group: Group, e: Episode) -> Task | str:
        """The task whose answer is the hint for an episode; or why there is none."""
        if self.how.of == "answer":
            return e.task
        # Never the episode's own answer: a teacher that has read it would call every token of it certain.
        right = [o for o in group.judged if o is not e and o.solved]
        return replace(e.task, answer=said(self.rollout.dialogue(e.task.id), right[0])) if right else NOBODY

    def asked(self, e: Episode) -> np.ndarray:
        """int32: the prompt that the policy was asked with; ConfigError where it is not the task's alone."""
        segment = e.segments[0]
        prompt_ids = segment.ids[: int(np.argmax(segment.mask))]
        # The hinted prompt replaces the policy's prompt as tokens. If the environment had written more than
        # the task's prompt, the hinted prompt would lack this text, and the models would read different questions.
        if not np.array_equal(prompt_ids, self.ids(e.task, e.task.prompt)):
            raise ConfigError(
                f"environment {self.rollout.environment.name!r} asks task {e.task.id!r} with more than its prompt, so"
                " the prompt with a hint cannot take its place. Write all of it into `Task.prompt`, or set hint=none"
            )
        return prompt_ids

    def ids(self, task: Task, prompt: str | Sequence[Message]) -> np.ndarray:
        """int32: a prompt of a task as tokens."""
        tools = task.tools or (self.rollout.environment.abilities.tools or (lambda _: ()))(task)
        return self.rollout.dialogue(task.id).see(prompt, tools)


NOBODY = "no other answer of its group is right"
"""The reason for no hint where a sibling's answer is the hint."""


def said(dialogue: Dialogue, e: Episode) -> str:
    """Returns the text that an episode says, turn by turn, without stop tokens."""
    ids = np.concatenate([s.ids[s.mask] for s in e.segments])
    # `turns` are lengths in spoken tokens over all segments; their sums are where one turn ends.
    return "\n".join(dialogue.text(turn) for turn in np.split(ids, np.cumsum(e.turns, dtype=int)[:-1]))


def holds(prompt: str | Sequence[Message], text: str) -> bool:
    """Returns whether some message of the prompt contains the text."""
    contents = [prompt] if isinstance(prompt, str) else [content_of(m["content"]) for m in prompt]
    return any(text in (c if isinstance(c, str) else "".join(part.text for part in c)) for c in contents)


def behind(segment: Segment, own: np.ndarray, prompt: np.ndarray) -> Segment:
    """The segment with the new `prompt` (int32) in place of its `own`, the tokens before its first spoken one. All
    after it stays, except the experts that the sampler chose: a teacher with another prompt chooses its own."""
    # All arrays of the segment are cut at the same place, so each spoken token keeps its log-prob and version.
    after, n = slice(len(own), None), len(prompt)
    return replace(
        segment,
        ids=np.concatenate([prompt, segment.ids[after]]).astype(np.int32),
        mask=np.concatenate([np.zeros(n, np.bool_), segment.mask[after]]),
        logp=np.concatenate([np.full(n, np.nan, np.float32), segment.logp[after]]),
        version=np.concatenate([np.full(n, -1, np.int32), segment.version[after]]),  # -1: read, not spoken
        routed=None,
    )


def same_words(segments: Sequence[Segment], hinted: Sequence[Segment]) -> None:
    """Raises InvariantError where the teacher would be asked about other tokens than the policy said."""
    for of_policy, other in zip(segments, hinted, strict=True):
        if not np.array_equal(of_policy.ids[of_policy.mask], other.ids[other.mask]):
            raise InvariantError(
                "behind its hint the teacher would score other tokens than the policy said. The hint goes before them,"
                " and the mask moves with the tokens"
            )
