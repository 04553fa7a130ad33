"""Checks that a teacher that is shown a hint scored what it should: these answers, behind these prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.checks.stage_history import due
from posttrain.core import abilities
from posttrain.core.batch import Packed
from posttrain.core.gauge import Gauge, merge
from posttrain.core.scored import Scored, ScoredGroup
from posttrain.core.streams import REFERENCE, TOP_LOGP
from posttrain.core.types import Episode, Segment, Task
from posttrain.role.events import Event, Observer, ObserverReport, ScoredEvent
from posttrain.role.learning.logprob_tolerance import Gap, allowed
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

SCORED_AGAIN = 4
"""Most answers of a step that are scored again, each alone."""


def hinted_task(siblings: Sequence[Episode], e: Episode, of: str) -> Task | None:
    """The task whose answer is the hint for an episode; None where no other answer of its group is right. With
    `of="answer"` the hint is the task's own right answer, else a right answer of another sibling."""
    if of == "answer":
        return e.task
    # Never the episode's own answer: the teacher would be shown what it is to judge.
    right = [sibling for sibling in siblings if sibling.sibling != e.sibling and sibling.solved]
    return Task(e.task.id, e.task.prompt, right[0].text, e.task.info, e.task.tools) if right else None


def teacher_scores(recorded: np.ndarray, alone: np.ndarray, bound: Gap, task: str) -> float:
    """Checks that the teacher's log-probs in the step are those that it gives this answer alone; returns the largest
    gap."""
    # Both may be -inf (a token that sampling rules out), and their difference would be no number.
    worst = Gap.of(*(np.maximum(x, -100.0) for x in (recorded, alone))).worst
    if not worst <= bound.worst:
        raise InvariantError(
            f"the teacher's log-probs of an answer to task {task!r} differ by up to {worst:.3g} nats (bound"
            f" {bound.worst:.2g}) from those that it gives the same answer alone, behind the prompt with its hint. The"
            " teacher was shown no hint or another one, or its log-probs stand at other tokens"
        )
    return worst


class HintCheck(Observer):
    """A teacher that is shown a hint scored the policy's answers, each behind the prompt with its own hint.

    At `due` steps a few answers are rendered and scored again, alone.
    """

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        hint = roles.stage.algorithm.hint
        if hint is None or not isinstance(event, ScoredEvent):
            return None
        episodes = [(g, s) for g in event.groups for s in g.episodes]
        hinted = [(g, s) for g, s in episodes if not s.unhinted and s.episode.spoken]
        share = {"teacher/hinted": Gauge(len(hinted), len(episodes))}
        if not due(event.experience.index):
            return ObserverReport(share)
        # Wrong answers first: a right one may be scored alike with and without its hint.
        wrong_first = sorted(hinted, key=lambda x: x[1].episode.reward or 0.0)[:SCORED_AGAIN]
        return ObserverReport(merge(share, *(self._score_again(roles, g, s) for g, s in wrong_first)))

    def _score_again(self, roles: ReinforceRoles, group: ScoredGroup, s: Scored) -> dict[str, Gauge]:
        """Score one answer again and compare it with what was recorded in the step."""
        a, e = roles.stage.algorithm, s.episode
        assert a.hint is not None and roles.hints is not None
        # The hint is chosen again from the group, as the definition says it.
        hint_task = hinted_task(group.group.judged, e, a.hint.of)
        prompt = None if hint_task is None else abilities.hints(roles.rollout.environment)(hint_task)
        if prompt is None:
            raise InvariantError(
                f"an answer to task {e.task.id!r} is learned from with a hint, and there is none for it: no other"
                " answer of its group is right, or the environment has no hint. It must have no gradient"
            )
        # Tools of the task's own data, else those that the environment gives it.
        tools = e.task.tools or (roles.rollout.environment.abilities.tools or (lambda _: ()))(e.task)
        # One segment: an answer with several is not learned from with a hint.
        packed = _behind(roles.rollout.dialogue(e.task.id).see(prompt, tools), e.segments[0])
        teacher = roles.hints.teacher(roles.learner, roles.reference)
        assert teacher is not None
        teacher_M = teacher.score(packed)
        # With a KL a stream has the teacher's log-probs. With distillation it has those of K candidates a token.
        if (reference := s.find(REFERENCE)) is not None:
            recorded_M, alone_M = reference[0], teacher_M
        else:
            assert a.distill is not None
            recorded_M, alone_M = s[TOP_LOGP][0].ravel(), teacher.top(packed, a.distill.top).logp.ravel()
        # Only the learner has a float64 form.
        exact = lambda: roles.learner.exact(packed) if teacher is roles.learner else None  # noqa: E731
        gap, dtype = Gap.of(recorded_M, alone_M), roles.run.model.dtype
        bound = allowed(dtype, gap, teacher_M, exact, packed.sampling.temperature)
        return {"canary/teacher_gap": Gauge(teacher_scores(recorded_M, alone_M, bound, e.task.id), 1)}


def _behind(prompt: np.ndarray, segment: Segment) -> Packed:
    """The spoken part of a segment behind this prompt, as one sequence."""
    spoken = np.flatnonzero(segment.mask)
    ids = np.concatenate([prompt, segment.ids[int(spoken[0]) :]]).astype(np.int32)
    return Packed(
        ids_N=ids,
        lengths_S=np.array([len(ids)], np.int32),
        # The hint moves the answer to the right. Counted from the end, its tokens stay where they are.
        source_M=(len(ids) - (len(segment.ids) - spoken) - 1).astype(np.int64),
        target_M=segment.ids[spoken],
        segment_M=np.zeros(len(spoken), np.int32),
        sequence_S=np.zeros(1, np.int32),
        sampling=segment.sampling,
        kept=segment.kept,
        in_turn_M=segment.in_turn,
    )
