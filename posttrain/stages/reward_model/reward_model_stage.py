"""The stage that trains a reward model: one minibatch of judged completions a step, and nothing is sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config.env import Env
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.gauge import Step
from posttrain.core.ports import Environment
from posttrain.core.streams import REFERENCE
from posttrain.environment.make import environment
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.roles import RewardRoles
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.preference.judged_batches import AgreementReport, drawn, fitting, training_tasks, walk
from posttrain.stages.progress import StageState
from posttrain.stages.reward_model.reward_model_batches import (
    heldout_agreement,
    heldout_of_kind,
    ranking_loss,
    reward_batch,
)
from posttrain.stages.role_parts import data_parts, frozen_start, say_passes
from posttrain.stages.run_parts import RunParts
from posttrain.stages.step_labels.step_label_stage import ROWS, rows_name
from posttrain.stages.training_step import DataBatch, learn_from

KINDS = {
    "pair": "pairs (Bradley-Terry)",
    "ranking": "rankings (Plackett-Luce)",
    "rating": "rated completions",
    "label": "labelled completions",
    "steps": "labelled steps",
}


@dataclass
class RewardModelState(StageState):
    """A minibatch is a function of (seed, stage, step), so nothing more is remembered."""


class RewardModelDriver(Driver[RewardModel, RewardModelState, DataBatch], stage=RewardModel, state=RewardModelState):
    """Learns to score completions as they were judged."""

    async def open(self, checkpoint: Path | None) -> AskAndLearn[DataBatch]:
        parts, stage = self.parts, self.stage
        if stage.labels_of is not None:
            # Before all else: what the stage learns and is measured by are the rows that the earlier stage labelled.
            self.setting = replace(self.setting, environment=labelled(parts, stage))
        setting = self.setting
        context = parts.sampler.context
        source = training_tasks(stage, setting.environment, stage.judgement, parts.renderer, context, parts.say)
        learns = "all pairs of rankings" if stage.pairs else KINDS[stage.judgement]
        several = "" if len(stage.shape.outputs) == 1 else f", {len(stage.shape.outputs)} outputs"
        head = f"a reward model from {learns}; its head reads '{stage.pool}'{several}"
        say_passes(self, source, f"{head}; {stage.batch} a step, {stage.steps} steps")
        self.loss = ranking_loss(stage)
        # With `regularise=dpo` the language head learns DPO too (2406.10216), which needs a reference. `ends` only
        # decodes, so its dialogue has no task.
        self.roles = RewardRoles(
            **data_parts(self),
            source=source,
            reference=frozen_start(self, checkpoint) if stage.regularise == "dpo" else None,
            ends=TokenEnds(setting.rollout.dialogue("").text),
        )
        heldout = heldout_of_kind(setting.environment, stage.judgement)
        self._heldout = fitting(stage, heldout, parts.renderer, context)
        await self.watch.begin(self.roles)
        return self._ask, self._learn

    async def _ask(self, index: int) -> DataBatch:
        roles, stage, seed = self.roles, self.stage, self.parts.run.seed
        with self.clock.of("data"):
            tasks = walk(roles.source, seed=seed, stage=stage.name, first=(index - 1) * stage.batch, count=stage.batch)
            judged = drawn(roles.environment, tasks, stage.judgement, seed=seed, stage=stage.name)
            batch = reward_batch(judged, stage, roles.renderer, roles.context, roles.ends)
        if roles.reference is not None:
            with self.clock.of("score"):
                batch = batch.having({REFERENCE: roles.reference.score(batch)})
        return DataBatch(index, batch)

    async def _learn(self, work: DataBatch) -> Step:
        return await learn_from(self.roles, work, self.loss, "completion")

    def reads(self, packed: Packed) -> Reads:
        # The language head is read only where it learns too.
        return Reads(rewards=True, logp=self.stage.regularise != "none")

    async def evaluate(self) -> EvaluationReport | None:
        """Nothing is sampled from a reward model: it is measured by `agree`."""
        return None

    def agree(self) -> AgreementReport | None:
        """How often the scores order held-out completions as they were judged."""
        roles = self.roles
        with self.clock.of("evaluate"):
            return heldout_agreement(
                self._heldout, self.stage, roles.learner, roles.renderer, roles.context, roles.ends
            )


def labelled(parts: RunParts, stage: RewardModel) -> Environment:
    """The rows that an earlier stage of the run labelled, as an environment of judged data."""
    assert stage.labels_of is not None
    rows = parts.book.kept(rows_name(stage.labels_of)) / ROWS
    args = {"judged": "steps", "separator": stage.separator}
    # As many of these rows are held out as the stage's environment would hold out tasks.
    config = Env(name="prompts", prompts=str(rows), args=args, heldout=parts.run.env_of(stage).heldout)
    labelled_environment = environment(config, parts.run.seed)
    parts.say(f"{stage.name}: {len(labelled_environment.abilities.rows or ())} answers that {stage.labels_of} labelled")
    return labelled_environment
