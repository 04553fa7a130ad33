"""The loop over the steps of a stage, and what all kinds of stage share around it. A kind of stage has settings
(`config.stages.stage.Stage`), a state (`StageState`) and a driver: a class derived from `Driver`, which says how the
stage opens and how it takes one step. Defining the class enters it into `DRIVERS` under its settings type.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from posttrain.config.stages.stage import START, Stage, come_to, starts
from posttrain.core.abilities import declared
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.gauge import Step, merge
from posttrain.core.measure.heldout_loss import HeldoutLoss
from posttrain.diagnose.gauges.rollout_gauges import unjudged_words
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.record import run_reader
from posttrain.role.events import EvaluatedEvent, RestoredEvent
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.memory_peaks import PeakMemory
from posttrain.role.roles import RoleCosts
from posttrain.role.weights.saved_weights import load_optimizer, save_optimizer, save_weights
from posttrain.stages.interrupt import Interrupted, Stopper
from posttrain.stages.measure_heldout_loss import HeldoutDemonstrations
from posttrain.stages.preference.judged_batches import AgreementReport
from posttrain.stages.progress import Progress, Reopening, StageState, state_fingerprint
from posttrain.stages.run_parts import MeasuredReport, RunParts, keep, load_kept
from posttrain.stages.stage_result import (
    is_recorded,
    measure_agreement,
    measured_words,
    refuse_unjudged,
    result_of,
    waited_out,
)
from posttrain.stages.warm_up import largest, warm_up
from posttrain.system.errors import ConfigError
from posttrain.system.machine import during_steps
from posttrain.system.shell import command_line

S = TypeVar("S", bound=Stage)
T = TypeVar("T", bound=StageState)
A = TypeVar("A")
AskAndLearn = tuple[Callable[[int], Awaitable[A]], Callable[[A], Awaitable[Step]]]
"""What `Driver.open` returns: (`ask`, `learn`)."""

DRIVERS: dict[type[Stage], type[Driver[Any, Any, Any]]] = {}
"""Drivers that take the steps of a stage, by the type of its settings."""


class Driver(ABC, Generic[S, T, A]):
    """One stage of a run. A kind derives `class MyDriver(Driver[MyStage, MyState, RoundSamples], stage=MyStage,
    state=MyState)`, where `RoundSamples` is what its `ask` returns and its `learn` takes."""

    state_type: ClassVar[type[StageState]]
    measures_before: ClassVar[bool] = False
    """Whether held-out tasks are evaluated before the first step; else the last measurement of the same weights is
    used. A stage that begins with a loaded model (`model.path`) measures it in any case, so that its gain is known."""

    def __init_subclass__(cls, *, stage: type[Stage], state: type[StageState]) -> None:
        super().__init_subclass__()
        if stage in DRIVERS:
            raise ConfigError(
                f"{stage.__name__} has a driver already, {DRIVERS[stage].__name__}; derive another settings type for"
                " another one"
            )
        cls.state_type, DRIVERS[stage] = state, cls

    def __init__(
        self, parts: RunParts, progress: Progress, stage: S, stopper: Stopper, checkpoint: Path | None = None
    ) -> None:
        """`checkpoint`: the folder with the stage's optimizer, where the stage was interrupted in its middle."""
        self.parts, self.progress, self.stage = parts, progress, stage
        self.stopper, self.checkpoint = stopper, checkpoint
        # The state lives in `progress`, which every checkpoint contains. So a resumed stage finds its own state there.
        progress.running = progress.running or self.state_type()
        self.state = cast("T", progress.running)
        self.setting = parts.judged_setting(stage)
        self.clock = RoleCosts(
            total=dict(self.state.roles), most=dict(self.state.peaks), peak=PeakMemory(parts.run.model.device)
        )
        self.report: EvaluationReport | None = None
        """Report of the evaluation after the last step, where there was one."""
        self.agreement: AgreementReport | None = None
        """Agreement of the scores with held-out judgements after the last step, where it was measured."""
        self.heldout_loss: HeldoutLoss | None = None
        """Loss of held-out demonstrations after the last step, where it was measured."""
        env, rollout = self.setting.environment, self.setting.rollout
        self._shown = HeldoutDemonstrations.of(stage, env, parts.renderer, rollout)
        # Most seconds of a stage that shall take as long as an earlier one; in a resumed stage the same number.
        self.limit = next((r.seconds for r in progress.results if r.name == stage.time_of), None)
        # `_carried`: seconds of the stage before an interruption.
        self._begun, self._carried = time.perf_counter(), self.state.seconds
        self._files: Callable[[Path], None] = lambda folder: None
        """Writes the kind's files into a checkpoint at the end of the stage (`_reopening`)."""

    # --- what a kind writes ------------------------------------------------------------------------------------------

    @abstractmethod
    async def open(self, checkpoint: Path | None) -> AskAndLearn[A]:
        """Called before the first step, when weights and optimizer are in place; returns (`ask`, `learn`). `ask(index)`
        returns the data from which step `index` (from 1) learns. `learn(asked)` takes the step with `self.trainer`, and
        returns its line of the record. `checkpoint`: the folder from which an interrupted stage goes on; None where the
        stage begins."""

    def reads(self, packed: Packed) -> Reads:
        """Returns what the stage's loss reads of a forward pass over these sequences."""
        return Reads()

    def remember(self, asked: A, step: Step) -> Step:
        """Called after a step: stores in `self.state` what later steps need. Returns the line, maybe with a note."""
        return step

    async def close(self) -> None:
        """Called after the last step, or when something stops the stage: cancels requests that are still running."""

    @property
    def at_rest(self) -> bool:
        """True where the run may be interrupted after this step, and go on later as if it had not been."""
        return True

    async def catch_up(self) -> None:
        """Called before a checkpoint: does now what a resumed run would do at its start, such as pushing the weights to
        the sampler. So both go on alike."""

    def note(self) -> Callable[[Path], None]:
        """Called before a checkpoint inside the stage: stores in `self.state` what changes between steps. Returns a
        function that writes further files into the checkpoint's folder."""
        return lambda folder: None

    def measured_before(self, report: EvaluationReport | None) -> None:
        """Reports the evaluation before the first step. None: no task is held out."""

    def agree(self) -> AgreementReport | None:
        """Returns how well the scores order held-out judgements now. None: the stage does not learn from them."""
        return None

    def enough(self, report: EvaluationReport | None) -> str:
        """Returns the reason why the stage ends after this step, or ''. `report`: the evaluation after it, if any."""
        seconds = self.seconds()
        if self.stage.wall_time is not None and seconds >= self.stage.wall_time:
            return f"wall time of {self.stage.wall_time:g} s reached at step {self.state.step}"
        if self.limit is not None and seconds >= self.limit:
            return f"stopped after the {self.limit:.0f} s that {self.stage.time_of} took"
        return ""

    # --- what all share ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs the stage to its end. After a signal it ends earlier, with `Interrupted`."""
        # False: a signal came, and the running step did not end in time. It was cancelled, and nothing of it is kept.
        if not await self.stopper.ended(self._run(), lambda: self.state.step):
            where = f"in the middle of {self.stage.name} step {self.state.step + 1}"
            raise self._interrupted(f"{where}, which did not end after the signal, so nothing of it was kept")

    async def _run(self) -> None:
        # The order below matters, since each part reads the parts before it: weights, optimizer, observers, then the
        # parts of the kind. The weights of an interrupted stage are loaded already. A stage that begins loads its own.
        checkpoint = self.checkpoint
        if checkpoint is None:
            await self._start()
        # After the weights: an optimizer may copy them when it is made.
        self.trainer = self.parts.trainer(self.stage.optimizer, self.stage.micro_tokens)
        if isinstance(optimizer := self.trainer.optimizer, StageOptimizer) and (words := optimizer.words()):
            self.parts.say(f"{self.stage.name}: {words}")
        if checkpoint is not None:
            load_optimizer(checkpoint, optimizer)
            fingerprint_now = partial(state_fingerprint, optimizer)
            self.parts.watch.emit(RestoredEvent("optimizer state", self.state.optimizer, fingerprint_now))
            # A count that began at 0 again would let each resumed run skip `optimizer.skips` steps more.
            self.trainer.skipped = self.state.skipped
        # Checks and rules compare a step with those before it, so a resumed stage reads its own lines again.
        lines = [] if checkpoint is None else run_reader.steps(self.parts.book.folder)
        taken = [s for s in lines if s.stage == self.stage.name]
        self.watch = self.parts.observe(self.stage, taken, self.progress.checks)
        ask, learn = await self.open(checkpoint)
        # After `open`, when the stage's other models are in memory: the largest pass must fit beside them.
        self._warm_up()
        # Also after `open`, which draws the held-out judgements. A resumed stage has both numbers in its state.
        if checkpoint is None and self.stage.eval:
            agreement, loss = measure_agreement(self), await self.likelihood()
            self.state.agreement_before = agreement and agreement.accuracy.mean
            self.state.loss_before = loss and loss.score.mean
            if loss is not None:
                self.parts.say(f"{self.stage.name}: {loss.words} before its first step ({len(loss.rows)} rows)")
        # A stop condition that was met before the checkpoint still holds: the range is then empty.
        last = 0 if self.state.ended else self.stage.steps
        try:
            with during_steps():
                # The whole loop. Whether samples are played for the step or ahead of it is the kind's own matter
                # (`ask`), so the same lines run a synchronous and an asynchronous stage.
                for index in range(self.state.step + 1, last + 1):
                    asked = await ask(index)
                    # The learner may need the memory of the engine's cache; the next push wakes the engine.
                    self.parts.sleep()
                    if not await self._goes_on(index, self.remember(asked, await learn(asked))):
                        break
        finally:
            # Also after an error: turns that are on their way would go on in an engine that nobody reads.
            await self.close()
        self.watch.end()
        if self.stage.eval:
            # If there was an evaluation after the last step, it is used: the weights are still the same.
            self.report = self.report or await self.evaluate()
            self.agreement = self.agreement or measure_agreement(self)
            self.heldout_loss = self.heldout_loss or await self.likelihood()
        self._finish(self.report)

    def _warm_up(self) -> None:
        """Runs the largest pass before the first step, where the run asks for it."""
        model, parts = self.parts.run.model, self.parts
        if self.state.ended or not (model.device != "cpu" if model.warm_up is None else model.warm_up):
            return
        packed = largest(self.stage, parts.sampler.context, parts.sync.probe_ids)
        with self.clock.of("warm-up"):
            report_line = warm_up(self.trainer, packed, self.reads(packed), PeakMemory(model.device))
        parts.say(f"{self.stage.name}: {report_line}")

    async def _start(self) -> None:
        """Loads the weights that the stage starts from, and notes their accuracy and reward, measured now or before."""
        p, parts, s = self.progress, self.parts, self.state
        start = starts(parts.run.stages, self.stage)
        s.before, s.reward_before = self._known(start)
        if start != come_to(parts.run.stages, self.stage):
            # Other weights get a new version. Else engine and remembered evaluation would take them for those before.
            load_kept(parts, p, start)
            p.version = parts.version = p.version + 1
            if self._of_the_run:
                # The run's last measurement is of the weights before.
                p.accuracy = p.reward = None
        loaded = start == START and parts.run.model.path is not None  # built weights know nothing
        if not ((self.measures_before or loaded) and self.stage.eval):
            return
        report = await self.evaluate()
        if report is not None:
            accuracy, reward = report.accuracy.known, report.reward.known
            s.before, s.reward_before = _mean(accuracy), _mean(reward)
            s.proxy_before = report.proxy.mean if report.proxy else None
            if self._of_the_run:
                p.accuracy, p.reward = accuracy, reward
        self.measured_before(report)

    def _known(self, start: str) -> tuple[float | None, float | None]:
        """(accuracy, mean reward) of the weights `start`, where they were measured on this stage's held-out tasks."""
        progress, run = self.progress, self.parts.run
        # The stage starts from the weights that the run has come to, so the run's last measurement is theirs.
        if start == come_to(run.stages, self.stage) and self._on_its_tasks:
            return _mean(progress.accuracy), _mean(progress.reward)
        # Else earlier stages with the same tasks: one that ended with these weights, then one that started from them.
        same_tasks = [
            result for result in progress.results if run.env_of(run.stage(result.name)) == run.env_of(self.stage)
        ]
        for result in same_tasks:
            if result.name == start and (result.accuracy or result.reward):
                return _mean(result.accuracy), _mean(result.reward)
        for result in same_tasks:
            if result.start == start:
                return result.before, result.reward_before
        return None, None

    @property
    def _of_the_run(self) -> bool:
        """True where a measure of the stage is one of the run: its weights are handed on, its tasks are the run's."""
        return self.stage.hands_on and self._on_its_tasks

    @property
    def _on_its_tasks(self) -> bool:
        """True where the stage is measured on the run's held-out tasks."""
        return self.parts.run.env_of(self.stage) == self.parts.run.env

    async def _goes_on(self, index: int, step: Step) -> bool:
        """Does what follows a step: evaluates when due, writes the record, and checkpoints (`_border`). Returns whether
        the stage goes on."""
        # The order must stay: state, measurements, the line of the record, and the checkpoint last. So no checkpoint
        # contains a step whose line is not written.
        p, s, stage = self.progress, self.state, self.stage
        p.checks = {**p.checks, **self.watch.state()}
        s.step, p.version, s.skipped = index, self.trainer.version, self.trainer.skipped
        self.parts.version = p.version
        s.optimizer_steps += int(step.gauges["optim/steps"].sum) if "optim/steps" in step.gauges else 0
        # Measurements after an earlier step are dropped. At its end the stage measures only what is None here, so an
        # old value would be taken for one of the last weights.
        self.report = report = self.agreement = self.heldout_loss = None
        # Not after the last step: the end of the stage measures the same weights for its result.
        if stage.eval_every and s.step % stage.eval_every == 0 and s.step < stage.steps:
            self.report = report = await self.evaluate()
            self.agreement, self.heldout_loss = measure_agreement(self), await self.likelihood()
        for measured in (self.agreement, self.heldout_loss):
            step = step if measured is None else replace(step, gauges=merge(step.gauges, measured.gauges()))
        if report is not None:
            step = replace(step, gauges=merge(step.gauges, report.gauges()), clock={**step.clock, **self.clock.take()})
        self.parts.tell(line := self.watch.line(replace(step, memory=self.clock.take_memory())))
        ended_by_program = self.stopper.after(line)
        # Before the border, whose checkpoint has to say that the stage needs no further step.
        s.ended = self.enough(report) or waited_out(self, report) or ended_by_program
        await self._border(report)
        return not s.ended

    def _finish(self, report: EvaluationReport | None) -> None:
        """Writes the stage's result and its last checkpoint. Its weights are kept, and then handed on, or the run's
        weights from before are loaded again."""
        p, parts, stage = self.progress, self.parts, self.stage
        # Before weights and state are replaced: a finished run that is made longer goes on from this.
        reopening = self._reopening(report) if stage is parts.run.stages[-1] and stage.hands_on else None
        if stage.hands_on:
            # Unknown (None) where the stage was measured on other tasks than the run's.
            of_run = report if self._of_the_run else None
            p.accuracy = None if of_run is None else of_run.accuracy.known
            p.reward = None if of_run is None else of_run.reward.known
        result = result_of(self, report)
        p.results = (*p.results, result)
        parts.say(f"{stage.name}: done, {result.why}{measured_words(result)}{'' if report is None else report.words}")
        # Before the checkpoint, which holds the fingerprint of the kept weights.
        keep(parts, p, stage.name)
        if not stage.hands_on:
            # The weights from before come back under a new version, which no engine and no remembered evaluation has.
            load_kept(parts, p, come_to(parts.run.stages, stage))
            p.version = parts.version = p.version + 1
        p.stage, p.running, p.reopening = p.stage + 1, None, reopening
        self._checkpoint(p.reward[0] if p.reward else self._unjudged_metric)

    def _reopening(self, report: EvaluationReport | None) -> Reopening:
        """Returns the content of a checkpoint at this border, and the evaluation that belongs to it."""
        s, stage = self.state, self.stage
        # `_finish` sets `progress.running` to None before it writes the checkpoint. Then `_note_state` cannot call
        # `note()` of the kind any more, so the function that writes the kind's files is kept here.
        self._files = self._note_state()
        due = stage.eval_every and s.step % stage.eval_every == 0
        measured = [x.gauges() for x in (report, self.agreement, self.heldout_loss) if x is not None and due]
        gauges = {n: [g.sum, g.count] for n, g in merge(*measured).items()}
        return Reopening(self.progress.plain(), gauges)

    def _note_state(self) -> Callable[[Path], None]:
        """Stores the present fingerprints and times in the state. Returns a function that writes the kind's files."""
        self.progress.weights = self.parts.learner.fingerprint()
        s = self.progress.running
        if s is None:
            return self._files
        s.seconds, s.roles, s.peaks = self.seconds(), dict(self.clock.total), dict(self.clock.most)
        s.optimizer = state_fingerprint(self.trainer.optimizer)
        return self.note()

    def seconds(self) -> float:
        """Wall seconds of the stage so far, over all its parts."""
        return self._carried + time.perf_counter() - self._begun

    async def evaluate(self) -> EvaluationReport | None:
        """Held-out evaluation, remembered per version so that no weights are evaluated twice. None: no task is held
        out, or nothing judges the answers."""
        parts, environment = self.parts, self.setting.environment
        judges = tuple(j.name for j in self.setting.rollout.judges)
        if not environment.heldout or not (declared(environment).judges or judges):
            return None
        sampling = parts.sampling(self.stage)
        if (known := parts.known(sampling, environment, judges)) is not None:
            return known
        with self.clock.of("evaluate"):
            report = await parts.evaluate(self.setting, sampling)
        parts.watch.emit(EvaluatedEvent(report, parts.version))
        if report.failed and self.state.step:  # before the first step the pass rate says it
            parts.say(f"{self.stage.name}: held-out samples could not be judged. {unjudged_words(report.groups)}")
        parts.measured = MeasuredReport(parts.version, sampling, environment, judges, report)
        if parts.run.record_episodes and not is_recorded(self, judges):
            parts.book.write_evaluation(self.stage.name, self.state.step, report.groups)
        # Last, so that the record already holds the samples that the error sends the user to.
        refuse_unjudged(self, report)
        return report

    async def likelihood(self) -> HeldoutLoss | None:
        """How likely held-out demonstrations are now, as a loss (mean -log p), written down. None: the stage imitates
        none, or none is held out."""
        if self._shown is None:
            return None
        with self.clock.of("evaluate"):
            loss = await self._shown.loss(self.parts.learner, self.stage.micro_tokens)
        if loss is not None:
            self.parts.book.write_losses(self.stage.name, self.state.step, loss)
        return loss

    @property
    def _unjudged_metric(self) -> float | None:
        """The number by which checkpoints are compared where nothing judges answers: minus the held-out loss."""
        judges = declared(self.setting.environment).judges or self.setting.rollout.judges
        return None if self.heldout_loss is None or judges or not self._on_its_tasks else -self.heldout_loss.score.mean

    # --- borders -----------------------------------------------------------------------------------------------------

    async def _border(self, report: EvaluationReport | None) -> None:
        """Called between two steps: writes a checkpoint when due, and raises `Interrupted` after a signal. A stage that
        hands nothing on gets no checkpoint: a resumed run begins it anew."""
        stage, step = self.stage, self.state.step
        due = stage.checkpoint_every and step % stage.checkpoint_every == 0
        # A signal waits for a step at which the kind is at rest. With `sync_steps` above 1 the sampler has older
        # weights in between, and a resumed run, which pushes when it begins, would go on with other samples.
        stopped = bool(self.stopper.number) and self.at_rest
        if stage.hands_on and (due or stopped):
            # A checkpoint that is due is written at once, even if the kind is not at rest. A resumed run would begin by
            # pushing the weights, so this run pushes them now too (`catch_up`).
            await self.catch_up()
            # All checkpoints are compared by this number, so it counts only if measured on the run's own tasks.
            known = report.reward.known if self._on_its_tasks and report else None
            self._checkpoint(known[0] if known else self._unjudged_metric)
        if stopped:
            raise self._interrupted(f"at {stage.name} step {step}")

    def _interrupted(self, where: str) -> Interrupted:
        not_checkpointed = "it hands nothing on, so it is not checkpointed and begins anew"
        return Interrupted(
            self.stopper.number,
            f"stopped {where}; {'the last checkpoint is complete' if self.stage.hands_on else not_checkpointed}. Go on"
            f" with: {command_line('run', '--resume', self.parts.book.folder)}",
        )

    def _checkpoint(self, metric: float | None) -> None:
        """Writes a checkpoint: all that the run needs to go on from here.

        It contains the optimizer in the middle of a stage, and at the end of the last stage, which may be made longer.
        """
        p, parts, s = self.progress, self.parts, self.progress.running
        write_files_of_kind = self._note_state()

        def write(folder: Path) -> None:
            save_weights(folder, parts.learner)
            # Between two stages no optimizer is kept: the next stage begins with a new one.
            if s is not None or p.reopening is not None:
                save_optimizer(folder, self.trainer.optimizer)
                write_files_of_kind(folder)

        with self.clock.of("checkpoint"):
            name = f"{p.version:08d}-{self.stage.name}-{s.step if s is not None else 0:06d}"
            parts.book.checkpoint(name, write, p.plain(), metric)


def _mean(measured: tuple[float, float, float] | None) -> float | None:
    """The mean of a measurement, which is its first number; None where nothing was measured."""
    return measured and measured[0]
