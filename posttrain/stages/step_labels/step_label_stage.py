"""The stage that labels the steps of the policy's own answers: it completes each answer from the end of each step. A
step is as good as the completions that follow it. Labelled answers become rows of a file; nothing is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.scored import Credit
from posttrain.core.stop import StepNumber
from posttrain.core.verdict import figure_failed
from posttrain.diagnose.gauges.rollout_gauges import rollout_gauges
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.events import LabelledEvent, PlayedEvent
from posttrain.role.judges.step_completion import LabelledAnswer, StepLabeler, TokenEnds
from posttrain.role.roles import LabelRoles, stream_of
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.progress import StageState
from posttrain.stages.role_parts import sampling_parts
from posttrain.system.errors import DataError

ROWS = "steps.jsonl"
"""The file of the labelled rows, in the folder that the run keeps under `rows_name`."""


def rows_name(stage: str) -> str:
    """The name under which a run keeps the rows that a stage wrote."""
    return f"{stage}-rows"


@dataclass
class StepLabelState(StageState):
    """The progress of the stage. The rows are a file of the run folder."""

    cursor: int = 0
    """Tasks that were asked so far."""


@dataclass(frozen=True, eq=False)
class LabelWork:
    """The answers of one step, with their labels."""

    index: int
    experience: Experience
    answers: tuple[LabelledAnswer, ...]
    engine: Gauges
    """The engine's counters, of answers and completions."""


class StepLabelDriver(Driver[StepLabeling, StepLabelState, LabelWork], stage=StepLabeling, state=StepLabelState):
    """Samples answers, completes them from the end of each step, and writes rows."""

    async def open(self, checkpoint: Path | None) -> AskAndLearn[LabelWork]:
        parts, stage, rollout = self.parts, self.stage, self.setting.rollout
        parts.say(
            f"{stage.name}: {stage.prompts} prompts x {stage.siblings} answers a step, {stage.completions} completions"
            f" from the end of each step (a step ends with {stage.separator!r})"
            + (", each answer once more as if it had ended before" if stage.early_ends else "")
            + "; nothing is trained"
        )
        ends = TokenEnds(rollout.dialogue("").text)
        labeler = StepLabeler(rollout, stage, parts.sampling(stage), ends, stream_of(stage))
        self.roles = LabelRoles(
            **sampling_parts(self, self.state.cursor, rollout),
            environment=self.setting.environment,
            labeler=labeler,
        )
        await parts.publish()
        # This call empties the engine's counters, so that the first step counts its own work alone.
        parts.sampler.gauges()
        await self.watch.begin(self.roles)
        return self._ask, self._learn

    async def _ask(self, index: int) -> LabelWork:
        roles, stage = self.roles, self.stage
        request = RolloutRequest(
            groups=stage.prompts, siblings=stage.siblings, at=StepNumber(index, stage.steps), most=1
        )
        with self.clock.of("rollout"):
            groups, passed = await roles.rollout.until(roles.prompts, request, roles.sampling, stream_of(stage))
            answers = await roles.labeler.label(groups)
        engine = roles.sync.sampler.gauges()
        played = Experience(index, self.trainer.version, groups, passed, len(groups), {}, roles.prompts.cursor)
        return LabelWork(index, played, answers, engine)

    async def _learn(self, work: LabelWork) -> Step:
        """Write the step's rows. The weights stay as they are."""
        roles, stage = self.roles, self.stage
        roles.watch.emit(PlayedEvent(work.experience))
        roles.watch.emit(LabelledEvent(work.index, work.answers))
        with self.clock.of("book"):
            if self.parts.run.record_episodes:
                self.parts.book.write_episodes(stage.name, work.index, Credit((), 0.0), work.experience.played)
            self._write(work)
        report = roles.watch.take()
        gauges = merge(
            {**rollout_gauges(work.experience, Credit((), 0.0)), **unjudged_gauges(work)},
            work.engine,
            label_gauges(work),
            report.gauges,
            {"optim/steps": Gauge(0, 1)},
        )
        step = Step(stage.name, work.index, self.trainer.version, gauges, self.clock.take(), report.notes)
        return await roles.watch.after(step)

    def _write(self, work: LabelWork) -> None:
        """Add the step's rows to those of earlier steps. A resumed run may take a step again: its rows are replaced."""
        name = rows_name(self.stage.name)
        before = [] if work.index == 1 else [r for r in rows_of(self.parts.book.kept(name)) if r["step"] < work.index]
        rows = [*before, *(a.row(work.index) for a in work.answers)]
        # `keep` writes the whole file into a new folder, which then replaces the old one. So no row is ever half
        # written. In ASCII, since a line separator of Unicode in an answer would cut its row in two for `splitlines`.
        text = "".join(json.dumps(r) + "\n" for r in rows)

        def write(folder: Path) -> None:
            (folder / ROWS).write_text(text, encoding="utf-8")

        self.parts.book.keep(name, write)

    def remember(self, asked: LabelWork, step: Step) -> Step:
        self.state.cursor = self.roles.prompts.cursor
        # Checked only after the last step, since any step may still find an answer with steps.
        if asked.index == self.stage.steps and not rows_of(self.parts.book.kept(rows_name(self.stage.name))):
            raise DataError(
                f"{self.stage.name}: no answer has a label. Answers need a step that ends with {self.stage.separator!r}"
                f" ({self.stage.name}.separator), and an environment that judges them"
            )
        return step


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The labelled rows of a folder that the run keeps under `rows_name`."""
    return [json.loads(line) for line in (folder / ROWS).read_text(encoding="utf-8").splitlines()]


def unjudged_gauges(work: LabelWork) -> Gauges:
    """Counts the answers without a verdict to label them by. Where the truth is measured, labels come from it, and a
    reward that is paid, such as that of a model that a later stage trains, is not needed."""
    episodes = [e for g in work.experience.played for e in g.episodes]
    return {
        "rollout/unjudged": Gauge.of([e.figure is None for e in episodes]),
        "rollout/abstained": Gauge.of([e.figure is None and not figure_failed(e.verdicts) for e in episodes]),
    }


def label_gauges(work: LabelWork) -> Gauges:
    """Gauges of one step's labels: how many, how many are right, and how many completions they cost."""
    answers = [a for a in work.answers if not a.early]
    judged = sum(e.figure is not None for g in work.experience.played for e in g.episodes)
    soft = [x for a in answers for x in a.values.soft]
    hard = [x for a in answers for x in a.values.hard]
    return {
        "label/answers": Gauge(len(answers), judged),
        "label/steps": Gauge(len(soft), len(answers)),
        "label/hard": Gauge(sum(hard), len(hard)),
        "label/soft": Gauge(sum(soft), len(soft)),
        "label/completions": Gauge(sum(sum(a.values.asked) for a in answers), len(soft)),
    }
