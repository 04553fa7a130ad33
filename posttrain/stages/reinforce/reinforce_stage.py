"""The stage that learns from reward: its driver, the start of its roles, and what it prints at the start. The step
itself is `ask` and `learn` of `stages.training_step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState
from posttrain.checks.learning.gradient_by_definition import computed_once
from posttrain.config.run import Reinforce
from posttrain.core.batch import Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.scores import Reads
from posttrain.core.gauge import Step
from posttrain.core.measure.number_text import number_text
from posttrain.core.ports import Reference
from posttrain.core.sampling import Sampling
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.record.queued_groups import QUEUE, REPLAY, QueuedGroup, load_groups, save_groups
from posttrain.role.events import RestoredEvent
from posttrain.role.group_queue import GroupQueue, GroupSource, StepGroups
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.learning.hinted_teacher import Hints
from posttrain.role.learning.implicit_reward_model import ImplicitModel
from posttrain.role.learning.replay_buffer import ReplayBuffer
from posttrain.role.pack import batch_algebra
from posttrain.role.prompt_order import Prompts
from posttrain.role.roles import ReinforceRoles, stream_of
from posttrain.role.trainer import Trainer
from posttrain.role.weights.saved_weights import load_optimizer, load_weights, save_optimizer, save_weights
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.progress import StageState
from posttrain.stages.reinforce.teacher_average import AveragePolicy
from posttrain.stages.role_parts import frozen_start, same_reference, stage_parts
from posttrain.stages.run_parts import keep, nothing_waits
from posttrain.stages.training_step import ask, learn

IMPLICIT = "implicit"
"""The folder of a checkpoint that holds the implicit process reward model."""


@dataclass
class ReinforceState(StageState):
    """State that the next step needs of the steps before it."""

    cursor: int = 0
    """Tasks that were asked so far."""
    walked: int = 0
    """Number of asked tasks whose groups a step has taken."""
    queue: tuple[QueuedGroup, ...] = ()
    """Groups that were asked ahead, in order. The episodes of groups that had ended are files of the checkpoint."""
    replay: tuple[QueuedGroup, ...] = ()
    """Groups that the replay buffer held. Their `begun` is the step that added them."""
    versions: tuple[int, ...] = ()
    """Versions of the weights at the beginning of the last steps."""
    memory: AdaptiveState = AdaptiveState()
    """Adaptive coefficients and moving averages of the algorithm."""
    rates: dict[str, float] = field(default_factory=dict[str, float])
    visits: dict[str, int] = field(default_factory=dict[str, int])
    """Pass rates (`rates`) and visits of each task that a curriculum has seen."""
    reference: str = ""
    """Name of the kept weights with which the reference was last refreshed; '' where it never was."""
    implicit: str = ""
    """Fingerprint of the implicit process reward model; '' where the algorithm reads none."""


class ReinforceDriver(Driver[Reinforce, ReinforceState, Experience], stage=Reinforce, state=ReinforceState):
    """Learns from reward."""

    measures_before = True

    def measured_before(self, report: EvaluationReport | None) -> None:
        if report is not None and report.proxy is not None:
            self.parts.say(
                f"before RL: held-out answers are worth {report.reward}, and its reward pays {report.proxy} for them"
            )
            return
        self.parts.say(
            productive_band(report) if report else "no task is held out, so nothing is measured (env.heldout=0)"
        )

    async def open(self, checkpoint: Path | None) -> AskAndLearn[Experience]:
        parts, stage = self.parts, self.stage
        self.roles = self._roles(self._reference(checkpoint), self._implicit(checkpoint))
        played, _, learned = batch_algebra(stage).partition(" -> ")
        parts.say(f"{stage.name}: {stage.algorithm.name} ({stage.algorithm.paper}); {played}")
        parts.say(f"  -> {learned}")
        if once := computed_once(stage.algorithm):
            parts.say(f"  {once}")
        for line in staleness_words(stage, parts.run.deterministic):
            parts.say(line)
        if stage.algorithm.curriculum is not None and self.roles.prompts.curriculum is None:
            parts.say(
                f"{stage.name}: no task comes twice (they are generated without end), so the algorithm's curriculum has"
                " nothing to choose from"
            )
        # First the weights: groups of the checkpoint that had not ended are asked again at once, under these.
        await parts.publish()
        self._resume_queue(checkpoint)
        await self.watch.begin(self.roles)
        return partial(ask, self.roles), partial(learn, self.roles)

    async def close(self) -> None:
        # First disconnect the queue from the weight sync. Else a push of a later stage would wait for the groups that
        # are cancelled here.
        self.parts.sync.ready = self.parts.queue = None
        await self.roles.groups.close()

    @property
    def at_rest(self) -> bool:
        return self.parts.sampler.version == self.trainer.version

    async def catch_up(self) -> None:
        await self.parts.publish()

    def note(self) -> Callable[[Path], None]:
        state, prompts, groups = self.state, self.roles.prompts, self.roles.groups
        state.cursor, state.rates, state.visits = prompts.cursor, dict(prompts.rates), dict(prompts.visits)
        state.walked, state.versions = groups.cursor, tuple(groups.versions)
        state.queue, ended = groups.queued() if isinstance(groups, GroupQueue) else ((), ())
        buffer = self.roles.replay
        state.replay, kept = (buffer.rows(), [b.group for b in buffer.held]) if buffer else ((), [])
        implicit = self.roles.implicit
        state.implicit = implicit.fingerprint() if implicit else ""
        # The groups to write are chosen now. `write` is called later, with the checkpoint's folder.
        to_write = [(name, groups) for name, groups in ((QUEUE, ended), (REPLAY, kept)) if groups]

        def write(folder: Path) -> None:
            for name, groups_of_file in to_write:
                save_groups(folder / name, groups_of_file)
            if implicit is not None:
                (folder / IMPLICIT).mkdir()
                save_weights(folder / IMPLICIT, implicit.trainer.learner)
                save_optimizer(folder / IMPLICIT, implicit.trainer.optimizer)

        return write

    def reads(self, packed: Packed) -> Reads:
        a = self.stage.algorithm
        # `reads` is called for the warm-up only. There the number of candidates a token matters, and not which tokens
        # they are: any ids of the right shape will do.
        candidates_MK = np.resize(packed.target_M, (packed.spoken, a.stores_top)) if a.stores_top else None
        if a.distill is not None:
            candidates_MK = self.parts.learner.top(packed, a.distill.top).ids
        return Reads(a.entropy is not None, a.learns_values is not None, candidates_MK, heard=a.hears)

    def remember(self, asked: Experience, step: Step) -> Step:
        self.state.memory = self.roles.adaptive
        return self._refresh(step)

    def enough(self, report: EvaluationReport | None) -> str:
        if self.stage.target is not None and report is not None and report.reward.mean >= self.stage.target:
            return f"target {self.stage.target:g} reached at step {self.state.step}"
        return super().enough(report)

    def _implicit(self, checkpoint: Path | None) -> ImplicitModel | None:
        """The implicit process reward model, where the algorithm reads one. It begins as the policy does."""
        stage, baseline = self.stage, self.stage.algorithm.baseline
        if not isinstance(baseline, ImplicitOthers):
            return None
        settings = replace(stage.optimizer, lr=stage.optimizer.lr * baseline.lr_factor)
        learner, optimizer = self.parts.trained_copy(settings)
        model = ImplicitModel(Trainer(learner, optimizer, stage.micro_tokens), baseline.beta)
        # It is a copy of the present policy. In a resumed stage this model had already learned by itself, so its own
        # weights are loaded.
        if checkpoint is not None:
            load_weights(checkpoint / IMPLICIT, learner)
            load_optimizer(checkpoint / IMPLICIT, optimizer)
            what = "implicit process reward model"
            self.parts.watch.emit(RestoredEvent(what, self.state.implicit, model.fingerprint))
        return model

    def _roles(self, reference: Reference | None, implicit: ImplicitModel | None) -> ReinforceRoles:
        parts, stage, state = self.parts, self.stage, self.state
        source, curriculum = self.setting.environment.train, stage.algorithm.curriculum
        prompts = Prompts(source, parts.run.seed, state.cursor, curriculum, dict(state.rates), dict(state.visits))
        sampling = parts.sampling(stage)
        return ReinforceRoles(
            **stage_parts(self),
            sampling=sampling,
            rollout=self.setting.rollout,
            prompts=prompts,
            groups=self._groups(prompts, sampling),
            replay=ReplayBuffer(stage.replay, parts.run.seed, stage.name) if stage.replay else None,
            reference=reference,
            implicit=implicit,
            adaptive=state.memory,
            other_environments=parts.other_environments(stage),
            own_reference=stage.reference is None and stage.algorithm.hint is None,
            hints=self._hints(),
        )

    def _hints(self) -> Hints | None:
        hint = self.stage.algorithm.hint
        if hint is None:
            return None
        average = AveragePolicy(self.parts.learner, self.trainer.optimizer) if hint.weights == "average" else None
        return Hints(hint, self.setting.rollout, average)

    def _groups(self, prompts: Prompts, sampling: Sampling) -> GroupSource:
        """The source of the groups: played for the step that learns from them, or ahead of it."""
        stage, state, rollout, stream = self.stage, self.state, self.setting.rollout, stream_of(self.stage)
        # A sample may be up to `most_behind` steps old. So the versions of the weights are kept for the present step
        # and for `most_behind` steps before it. Where the stage begins, there is only the first version.
        begun = (self.trainer.version,) * stage.most_behind
        versions = deque(state.versions or begun, maxlen=stage.most_behind + 1)
        if not stage.staleness:
            return StepGroups(rollout, prompts, sampling, stream, versions)
        request, run = stage.algorithm.request(stage), self.parts.run
        # After the request: index, steps, staleness, deterministic, asks_again, versions, idle, cursor.
        return GroupQueue(
            rollout,
            prompts,
            sampling,
            stream,
            request,
            state.step + 1,
            stage.steps,
            stage.staleness,
            run.deterministic,
            stage.unfinished == "ask_again",
            versions,
            nothing_waits if stage.unfinished == "pause" else self.parts.idle,
            state.walked,
        )

    def _resume_queue(self, checkpoint: Path | None) -> None:
        """Restore replay buffer and queue from a checkpoint, and connect the queue with the weight sync."""
        groups, buffer, state = self.roles.groups, self.roles.replay, self.state
        if buffer is not None and checkpoint is not None and state.replay:
            buffer.restore(state.replay, load_groups(checkpoint / REPLAY, state.replay))
        if not isinstance(groups, GroupQueue):
            return
        self.parts.sync.ready, self.parts.queue = groups.ready, groups
        if checkpoint is not None and state.queue:
            groups.restore(state.queue, load_groups(checkpoint / QUEUE, state.queue, groups.prompts.source.task))

    def _reference(self, checkpoint: Path | None) -> Reference | None:
        """The frozen model that the algorithm reads: a named model, the policy as the stage began, or the policy of the
        last refresh. None where the algorithm reads none."""
        parts = self.parts
        if not self.stage.algorithm.reads & {"reference", "teacher"} or self.stage.algorithm.own_teacher:
            return None
        # After a refresh the reference is in the kept weights, even where the settings name a model.
        if self.stage.reference is not None and not self.state.reference:
            return same_reference(self, parts.teacher(self.stage.reference))
        return frozen_start(self, checkpoint, self.state.reference)

    def _refresh(self, step: Step) -> Step:
        """Every `refresh` steps the policy becomes its own reference. Returns the step's line, with a note about it."""
        every = self.stage.algorithm.refresh
        if not every or step.index % every:
            return step
        self.roles.reference = reference = self.parts.freeze()
        self.state.reference_digest = reference.digest
        self.state.reference = f"{step.stage}-reference-{step.index:06d}"
        # The weights are kept under a name with the step's number, for a resumed run, which cannot compute them again.
        keep(self.parts, self.progress, self.state.reference)
        return replace(step, notes=(*step.notes, f"the reference is now the policy of step {step.index}"))


def staleness_words(stage: Reinforce, deterministic: bool) -> list[str]:
    """Lines about samples that are older than the weights which learn from them: how old, and with what effect."""
    a, steps_behind, replay = stage.algorithm, stage.most_behind, stage.replay
    if not steps_behind and replay is None:
        return []
    ahead = f"{stage.name}: staleness={stage.staleness}"
    waits = "; new weights wait until all that was asked has ended" if stage.staleness and deterministic else ""
    lines = (
        [f"{ahead}: samples may be {steps_behind} step{'s' * (steps_behind > 1)} older than the learner{waits}"]
        if steps_behind
        else []
    )
    if replay is not None:
        lines.append(
            f"{stage.name}: each step learns again from up to {replay.groups} groups of the {replay.age} steps before"
            " it"
        )
    if a.anchor == "start" and not a.correction:
        lines.append(
            f"{stage.name}: {a.name} compares with the learner at the start of a step, so it cannot see that samples"
            " are older, and learns from them as if they were its own. algorithm=decoupled_ppo,"
            " algorithm.anchor=behaviour or algorithm.correction=truncate sees it"
        )
    return lines


PRODUCTIVE = (0.1, 0.8)
"""Pass rates before reinforcement between which most groups have both right and wrong answers."""


def productive_band(report: EvaluationReport) -> str:
    """A line that says whether there is something to learn from: whether the pass rate lies in the band `PRODUCTIVE`,
    or for grades whether the answers to one prompt differ in reward; or why no rate is known."""
    if report.unmeasured:
        return (
            f"pass rate before RL: not known, none of {report.unjudged} held-out samples could be judged."
            f" {report.unmeasured}"
        )
    left_out = (
        f" ({report.unjudged} of {sum(len(g.episodes) for g in report.groups)} samples could not be judged and are left"
        " out)"
        if report.unjudged
        else ""
    )
    if report.graded:
        return _spread_before(report) + left_out
    (low, high), rate = PRODUCTIVE, report.pass_at[1].mean if report.pass_at else 0.0
    if low <= rate <= high:
        return f"pass rate before RL: {rate:.1%}, inside the productive band ({low:.0%} to {high:.0%}){left_out}"
    advice = (
        "most groups will be all wrong: teach it more by imitation first"
        if rate < low
        else "most groups will be all right: use harder tasks"
    )
    return f"pass rate before RL: {rate:.1%}, OUTSIDE the productive band ({low:.0%} to {high:.0%}); {advice}{left_out}"


def _spread_before(report: EvaluationReport) -> str:
    """`productive_band` for grades: a group teaches something only where its answers earn different rewards."""
    groups = [g for g in report.groups if sum(e.figure is not None for e in g.episodes) > 1]
    begun = f"mean reward before RL: {number_text(report.reward.mean, '.4g')}"
    if not groups:
        return f"{begun}; one sample of a prompt does not tell the spread within a group (evaluation.samples=4 does)"
    share = sum(g.mixed for g in groups) / len(groups)
    samples = min(len(g.episodes) for g in groups)
    spread_words = (
        f"{begun}; the answers to one prompt differ in reward on {share:.0%} of the prompts ({samples} samples each)"
    )
    if share >= PRODUCTIVE[0]:
        return f"{spread_words}: groups have a spread to learn from"
    return (
        f"{spread_words}: most groups will have NO SPREAD, and teach nothing. A reward of finer grades, a higher"
        " sampling.temperature, or prompts of another difficulty give it"
    )
