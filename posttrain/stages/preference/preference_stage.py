"""The stage that learns from preferences of the data: one minibatch of judged completions a step, nothing sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import mismatched, prepared, scores_of
from posttrain.config.stages.preference_settings import Preference
from posttrain.core.batch import Packed
from posttrain.core.gauge import Step
from posttrain.core.judgements import Judgement, Label
from posttrain.core.ports import Learner, PairRenderer, Reference
from posttrain.core.streams import COLLISION, MARGIN, REFERENCE, START
from posttrain.core.types import Segment
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.role.learning.reference_scores import LogProbs, ReferenceScores
from posttrain.role.roles import PreferenceRoles
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.preference.judged_batches import (
    AgreementReport,
    batch_of,
    completions,
    drawn,
    fitting,
    heldout_judgements,
    segments,
    training_tasks,
    walk,
)
from posttrain.stages.progress import StageState
from posttrain.stages.role_parts import data_parts, say_passes, start_weights
from posttrain.stages.training_step import DataBatch, learn_from
from posttrain.system.errors import InvariantError

HELDOUT_PART = 256
"""Held-out judgements that are scored at once."""


@dataclass
class PreferenceState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing more of the data is remembered."""

    reference: str = ""
    """Fingerprint of the model that the policy is compared with; empty where there is none."""
    running: dict[str, float] = field(default_factory=dict[str, float])
    """Moving averages of the algorithm."""


class PreferenceDriver(Driver[Preference, PreferenceState, DataBatch], stage=Preference, state=PreferenceState):
    """Learns from judged completions."""

    async def open(self, checkpoint: Path | None) -> AskAndLearn[DataBatch]:
        parts, stage, setting = self.parts, self.stage, self.setting
        render, context = parts.renderer, parts.sampler.context
        source = training_tasks(stage, setting.environment, stage.judged, render, context, parts.say)
        judgements = {"pair": "pairs", "label": "labelled completions"}.get(stage.judged, stage.judged)
        algorithm_words = f"{stage.algorithm.name} ({stage.algorithm.paper})"
        say_passes(self, source, f"{algorithm_words}; {stage.batch} {judgements} a step, {stage.steps} steps")
        self.roles = PreferenceRoles(**data_parts(self), source=source, reference=None)
        self._heldout = fitting(stage, heldout_judgements(setting.environment), render, context)
        with self.clock.of("score"):
            # Made after the roles: to compute log-probs ahead it reads the data that the roles have.
            self.roles.reference = self._reference(checkpoint)
        await self.watch.begin(self.roles)
        return self._ask, self._learn

    async def _ask(self, index: int) -> DataBatch:
        """The minibatch of a step, with the streams that the algorithm reads: log-probs of reference and policy."""
        roles, a = self.roles, self.stage.algorithm
        with self.clock.of("data"):
            judged = self._judged(index)
            batch = batch_of(judged, roles.renderer, roles.context)
        with self.clock.of("score"):
            if a.reads_reference:
                batch = batch.having({REFERENCE: self._reference_logp(self._segments(judged))})
            if a.reads_start:
                batch = batch.having({START: roles.learner.score(batch)})
            if a.reads_collision:
                batch = batch.having({COLLISION: roles.learner.collision(batch)})
            if a.reads_margin and MARGIN not in batch:
                raise next(j for j in judged if getattr(j, "margin", None) is None).told(
                    f"{a.name} reads a margin of each pair, and not every pair of the minibatch has one: give each row"
                    " a margin, or set margin=none"
                )
            mismatched_E = self._mismatched(judged) if a.reads_mismatched else None
            batch, running = prepared(a, batch, self.state.running, mismatched_E)
        return DataBatch(index, batch, running)

    def _mismatched(self, judged: Sequence[Judgement]) -> np.ndarray:
        """float64 [E]: log-ratios of policy to reference, of completions under the prompts of other rows."""
        mismatched_segments = mismatched(self._segments(judged), self.roles.context)
        packed = Packed.of(mismatched_segments)
        ratio_M = self.roles.learner.score(packed).astype(np.float64) - self._reference_logp(mismatched_segments)
        return np.bincount(packed.sequence_M, ratio_M, packed.episodes)

    async def _learn(self, work: DataBatch) -> Step:
        return await learn_from(self.roles, work, PreferenceLoss(self.stage.algorithm), "completion")

    def remember(self, asked: DataBatch, step: Step) -> Step:
        self.state.running = dict(asked.running)
        return step

    def agree(self) -> AgreementReport | None:
        roles, a = self.roles, self.stage.algorithm
        with self.clock.of("evaluate"):
            return heldout_order(self._heldout, a, roles.learner, roles.renderer, roles.context, self._reference_logp)

    def _judged(self, index: int) -> list[Judgement]:
        stage, roles, seed = self.stage, self.roles, self.parts.run.seed
        tasks = walk(roles.source, seed=seed, stage=stage.name, first=(index - 1) * stage.batch, count=stage.batch)
        return drawn(roles.environment, tasks, stage.judged, seed=seed, stage=stage.name)

    def _segments(self, judged: Sequence[Judgement]) -> list[Segment]:
        """The completions of these judgements as segments, each after its prompt."""
        return [s for j in judged for s in segments(j, self.roles.renderer, self.roles.context)]

    def _reference_logp(self, of: Sequence[Segment]) -> np.ndarray:
        """float32 [M]: the reference's log-probs of these segments."""
        reference = self.roles.reference
        if reference is None:
            raise InvariantError(f"{self.stage.name}: {self.stage.algorithm.name} reads a reference, and there is none")
        return reference.of(of) if isinstance(reference, ReferenceScores) else reference.score(Packed.of(of))

    def _ahead(self) -> bool:
        """Returns whether the reference's log-probs are computed before the first step."""
        if self.stage.ahead is not None:
            return self.stage.ahead
        # By default where tasks come again, so that each completion is computed once. Not with an adapter: then the
        # reference is the model without it, which takes no further memory.
        return self.roles.source.count is not None and self.parts.run.model.lora is None

    def _reference(self, checkpoint: Path | None) -> Reference | ReferenceScores | None:
        """Returns the model that the policy is compared with: a named model, or the policy as the stage began."""
        parts, stage, state = self.parts, self.stage, self.state
        if not stage.algorithm.reads_reference:
            return None
        if stage.reference is not None:
            scorer = parts.teacher(stage.reference)
            state.reference = self._same_fingerprint(scorer.fingerprint())
            return self._computed(scorer) if self._ahead() else scorer
        with start_weights(self, checkpoint):
            if not self._ahead():
                frozen = parts.freeze()
                state.reference = self._same_fingerprint(frozen.digest)
                return frozen
            state.reference = self._same_fingerprint(parts.learner.fingerprint())
            return self._computed(parts.learner)

    def _same_fingerprint(self, fingerprint: str) -> str:
        """Returns the fingerprint. InvariantError where the reference of a resumed run has another one than before."""
        if self.state.reference not in ("", fingerprint):
            raise InvariantError(
                f"{self.stage.name}: the reference is not the model that this stage began with"
                f" ({fingerprint[:12]}, and it was {self.state.reference[:12]}). Give the same model again, or begin a"
                " new run"
            )
        return fingerprint

    def _computed(self, scorer: LogProbs) -> ReferenceScores:
        """The log-probs of all completions that the stage will meet. They are kept in the run folder."""
        stage, parts, folder = self.stage, self.parts, f"reference-{self.stage.name}"
        # Log-probs that an interrupted run computed before with the same reference are read from the folder.
        scores = ReferenceScores.load(parts.book.folder / folder, self.state.reference)
        before = len(scores)
        for of_step in self._segments_by_step():  # each step's own pass, so that a longer stage computes the same bits
            scores.add(scorer, scores.missing(of_step))
        if len(scores) > before:
            parts.book.anew(folder, scores.save)
            parts.say(
                f"{stage.name}: reference log-probs of {len(scores) - before:,} completions computed;"
                f" {scores.tokens:,} tokens are kept in {folder}"
            )
        return scores

    def _segments_by_step(self) -> Iterator[list[Segment]]:
        """Yields the held-out completions, and then for each step the completions that no earlier step had."""
        stage, seen = self.stage, set[tuple[str, object]]()
        yield self._segments(self._heldout)
        for step in range(1, stage.steps + 1):
            judged = self._judged(step)
            if stage.algorithm.reads_mismatched:
                yield mismatched(self._segments(judged), self.roles.context)
            # A judgement may be drawn in many steps. It is yielded only for the first of them.
            new = [j for j in judged if (j.task.id, completions(j)) not in seen]
            seen.update((j.task.id, completions(j)) for j in new)
            yield self._segments(new)


def heldout_order(
    heldout: Sequence[Judgement],
    a: PreferenceAlgorithm,
    learner: Learner,
    renderer: PairRenderer,
    context: int,
    reference_logp: Callable[[Sequence[Segment]], np.ndarray],
) -> AgreementReport | None:
    """How well the learner's scores order held-out judgements. None where all have one label, or there are none."""
    # The list begins with an empty part, so that `concatenate` works without any held-out judgement too.
    scores = [np.zeros(0)]
    for i in range(0, len(heldout), HELDOUT_PART):
        judged = heldout[i : i + HELDOUT_PART]
        batch = batch_of(judged, renderer, context)
        logp_M = learner.score(batch).astype(np.float64)
        if a.reads_reference:
            logp_M -= reference_logp([s for j in judged for s in segments(j, renderer, context)])
        scores.append(scores_of(a, batch, logp_M))
    score_E = np.concatenate(scores)
    if not len(score_E):
        return None
    if isinstance(heldout[0], Label):
        return AgreementReport.of_labels(score_E, np.array([isinstance(j, Label) and j.good for j in heldout]))
    # The order is chosen, rejected, chosen, rejected: even places are the better ones, and two places are one unit.
    units = np.arange(len(score_E))
    return AgreementReport.of(score_E, units % 2 == 0, units // 2, [j.task.id for j in heldout])
