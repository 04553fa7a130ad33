"""Stages one after another: pretrain, SFT and RL on the same learner, each evaluated, checkpointed and resumable."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.algorithm.steer import Memory
from posttrain.controller.house import Parts
from posttrain.controller.loop import loop
from posttrain.controller.step import ask, imitate, learn
from posttrain.controller.stop import Interrupted, Stopper
from posttrain.core import reader
from posttrain.core.batch import Batch
from posttrain.core.experience import Experience
from posttrain.core.ports import Examiner
from posttrain.core.run import Reinforce, Stage, Supervised
from posttrain.core.types import Step, merge
from posttrain.diagnose.gauges import unjudged_words
from posttrain.engine.fingerprint import fingerprint
from posttrain.role.demonstrate import demonstrations
from posttrain.role.evaluate import Report
from posttrain.role.events import EvaluatedEvent, RestoredEvent
from posttrain.role.pack import batch_algebra
from posttrain.role.prompts import Prompts
from posttrain.role.roles import Clock, Roles, Teaching
from posttrain.role.trainer import Trainer
from posttrain.role.weights import load_optimizer, load_weights, restore, save_optimizer, save_weights, snapshot


@dataclass(frozen=True)
class StageResult:
    """What one stage did, in plain numbers (it is part of every later checkpoint's state)."""

    name: str
    kind: str
    steps: int
    optimizer_steps: int
    seconds: float
    roles: dict[str, float]
    accuracy: tuple[float, float, float] | None
    """Share of held-out answers that are right (pass@1) with its 95 % interval; None where nothing was measured, or nothing could be judged."""
    greedy: float | None
    """The same of argmax answers."""
    pass_at: dict[str, float]
    before: float | None
    """Accuracy the stage started from."""
    why: str
    beside: str | None = None
    reward: tuple[float, float, float] | None = None
    """Mean held-out outcome with its 95 % interval: another number than accuracy where a reward grades."""
    reward_before: float | None = None
    graded: bool = False
    """Whether some held-out outcome was neither 0 nor 1."""


@dataclass
class Progress:
    """Where a run stands. Everything here is a function of what was done, except `seconds`."""

    stage: int = 0
    step: int = 0
    version: int = 0
    cursor: int = 0
    memory: dict[str, Any] | None = None
    """What the algorithm remembers (`algorithm.steer.Memory`)."""
    rates: dict[str, float] | None = None
    visits: dict[str, int] | None = None
    """What a curriculum has seen of each task."""
    checks: dict[str, Any] = field(default_factory=dict[str, Any])
    """What those who check the run keep of it, over all stages."""
    reference: str = ""
    """Name of the kept weights the reference was last refreshed with; '' where it never was."""
    optimizer_steps: int = 0
    before: float | None = None
    reward_before: float | None = None
    accuracy: tuple[float, float, float] | None = None
    reward: tuple[float, float, float] | None = None
    weights: str = ""
    """Fingerprint of the policy's weights at the checkpoint."""
    optimizer: str = ""
    """Fingerprint of the optimizer's state at the checkpoint, where a stage was cut in the middle."""
    ended: str = ""
    """Why the stage needs no further step, where a stop condition was met."""
    seconds: float = 0.0
    roles: dict[str, float] | None = None
    results: list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def done(self) -> list[StageResult]:
        return [StageResult(**r) for r in self.results or []]


class Stages:
    """Runs all stages of `parts.run` from where `progress` stands."""

    def __init__(self, parts: Parts, progress: Progress, stopper: Stopper) -> None:
        self.parts, self.progress, self.stopper = parts, progress, stopper
        self._begun = 0.0
        self._clock = Clock()
        self._last: tuple[int, Report] | None = None

    async def run(self, checkpoint: Path | None = None) -> list[StageResult]:
        """All remaining stages. `checkpoint` holds the optimizer of a stage that was cut in the middle."""
        p, parts = self.progress, self.parts
        parts.watch.tell(parts, RestoredEvent("weights", p.weights, parts.learner.fingerprint))
        if not p.stage and not p.step:
            parts.book.keep("start", lambda folder: save_weights(folder, parts.learner))
        for position in range(p.stage, len(parts.run.stages)):
            stage = parts.run.stages[position]
            await self._stage(stage, checkpoint if p.step else None)
            p.stage, p.step, p.cursor, p.optimizer_steps = position + 1, 0, 0, 0
            p.memory, p.rates, p.visits, p.reference = None, None, None, ""
            p.before, p.reward_before, p.ended, p.seconds, p.roles = None, None, "", 0.0, None
            parts.book.keep(stage.name, lambda folder: save_weights(folder, parts.learner))
            self._checkpoint(stage, None, p.reward[0] if p.reward else None)
        return p.done

    async def _stage(self, stage: Stage, checkpoint: Path | None) -> None:
        self._begun = time.perf_counter()
        self._clock = Clock(total=dict(self.progress.roles or {}))
        self._carried = self.progress.seconds
        self.parts.version = self.progress.version
        if isinstance(stage, Supervised):
            result = await self._imitate(stage, checkpoint)
        else:
            result = await self._reinforce(stage, checkpoint)
        self.progress.results = [*(self.progress.results or []), asdict(result)]
        measured = f"; held-out accuracy {result.accuracy[0]:.3f}" if result.accuracy else ""
        if result.reward and result.graded:
            measured += f", mean reward {result.reward[0]:.3f}"
        self.parts.say(f"{stage.name}: done, {result.why}{measured}")

    # --- supervised ------------------------------------------------------------------------------------------------

    async def _imitate(self, stage: Supervised, checkpoint: Path | None) -> StageResult:
        parts, p = self.parts, self.progress
        if stage.beside:
            load_weights(parts.book.kept(self._before(stage.beside)), parts.learner)
            p.version += 1
            parts.version = p.version
        trainer = parts.trainer(stage.optimizer, stage.micro_tokens)
        if checkpoint is not None:
            self._load_optimizer(checkpoint, trainer)
        limit = next((r.seconds for r in p.done if r.name == stage.beside), None)
        parts.say(self._describe(stage, limit))
        why = f"all {stage.steps} steps"
        h = self._teaching(stage, trainer)
        await h.watch.begin(h)

        async def imagine(index: int) -> Batch:
            with h.clock.of("learn"):
                return await demonstrations(
                    parts.environment, parts.renderer, parts.rollout.dialogue, stage, seed=parts.run.seed, step=index - 1, context=h.context
                )

        async def study(index: int, batch: Batch) -> bool:
            nonlocal why
            parts.tell(imitate(h, index, batch))
            p.step, p.version, p.optimizer_steps = index, trainer.version, p.optimizer_steps + 1
            self._border(stage, trainer, None)
            if limit is not None and self._seconds() >= limit:
                why = f"stopped after the {limit:.0f} s that {stage.beside} took"
                return False
            return True

        await loop(imagine, study, first=p.step + 1, last=stage.steps)
        parts.version = p.version
        report = await self._evaluate(stage) if stage.eval else None
        result = self._result(stage, "supervised", report, why)
        if stage.beside:
            load_weights(parts.book.kept(self._before(stage.name)), parts.learner)
            p.version += 1
            parts.version = p.version
        return result

    def _load_optimizer(self, checkpoint: Path, trainer: Trainer) -> None:
        load_optimizer(checkpoint, trainer.optimizer)
        now = lambda: fingerprint(trainer.optimizer.state_tensors().items())  # noqa: E731
        self.parts.watch.tell(self.parts, RestoredEvent("optimizer state", self.progress.optimizer, now))

    def _before(self, stage: str) -> str:
        """Name of the kept weights a stage started from."""
        names = ["start", *(s.name for s in self.parts.run.stages)]
        return names[names.index(stage) - 1]

    # --- reinforcement ---------------------------------------------------------------------------------------------

    async def _reinforce(self, stage: Reinforce, checkpoint: Path | None) -> StageResult:
        parts, p = self.parts, self.progress
        fresh = p.step == 0
        if fresh:
            report = await self._evaluate(stage)
            if report is not None:
                p.accuracy, p.reward = report.accuracy.known, report.reward.known
                p.before, p.reward_before = (x and x[0] for x in (p.accuracy, p.reward))
            parts.say(productive_band(report) if report else "no task is held out, so nothing is measured (env.heldout=0)")
        h = self._roles(stage, checkpoint)
        parts.say(f"{stage.name}: {stage.algorithm.name} ({stage.algorithm.paper}); {batch_algebra(stage)}")
        if stage.algorithm.curriculum is not None and h.prompts.curriculum is None:
            parts.say(
                f"{stage.name}: no task comes twice (they are generated without end), so the algorithm's curriculum has nothing to choose from"
            )
        await parts.publish()
        await h.watch.begin(h)
        report: Report | None = None

        async def study(index: int, e: Experience) -> bool:
            nonlocal report
            step = await learn(h, e)
            p.step, p.version, p.memory = index, h.trainer.version, asdict(h.memory)
            p.cursor, p.rates, p.visits, p.checks = e.walk.cursor, dict(e.walk.rates), dict(e.walk.visits), h.watch.state()
            step = self._refresh(stage, h, step)
            p.optimizer_steps += int(step.gauges["optim/steps"].sum)
            parts.version = p.version
            report = None
            if stage.eval_every and p.step % stage.eval_every == 0 and p.step < stage.steps:
                report = await self._evaluate(stage)
            if report is not None:
                step = replace(step, gauges=merge(step.gauges, report.gauges()), clock={**step.clock, **self._clock.take()})
            parts.tell(step)
            p.ended = self._enough(stage, report)
            self._border(stage, h.trainer, report)
            return not p.ended

        if not p.ended:
            await loop(partial(ask, h), study, first=p.step + 1, last=stage.steps)
        final = report or await self._evaluate(stage)
        return self._result(stage, "reinforce", final, p.ended or f"all {stage.steps} steps")

    def _teaching(self, stage: Supervised, trainer: Trainer) -> Teaching:
        parts, p = self.parts, self.progress
        return Teaching(
            run=parts.run,
            stage=stage,
            learner=parts.learner,
            trainer=trainer,
            sync=parts.sync,
            book=parts.book,
            text=parts.text,
            watch=parts.observe(stage, self._history(stage) if p.step else (), {}),
            clock=self._clock,
            environment=parts.environment,
            renderer=parts.renderer,
            dialogue=parts.rollout.dialogue,
            stop_ids=parts.stop_ids,
            context=parts.sampler.context,
        )

    def _history(self, stage: Stage) -> list[Step]:
        return [s for s in reader.steps(self.parts.book.folder) if s.stage == stage.name]

    def _roles(self, stage: Reinforce, checkpoint: Path | None) -> Roles:
        parts, p = self.parts, self.progress
        reference = self._reference(stage, checkpoint)
        trainer = parts.trainer(stage.optimizer, stage.micro_tokens)
        if checkpoint is not None:
            self._load_optimizer(checkpoint, trainer)
        return Roles(
            run=parts.run,
            stage=stage,
            sampling=parts.sampling(stage),
            rollout=parts.rollout,
            prompts=Prompts(
                parts.environment.train, parts.run.seed, p.cursor, stage.algorithm.curriculum, dict(p.rates or {}), dict(p.visits or {})
            ),
            learner=parts.learner,
            trainer=trainer,
            sync=parts.sync,
            reference=reference,
            reference_digest=reference.fingerprint() if reference else "",
            book=parts.book,
            text=parts.text,
            memory=Memory(**p.memory) if p.memory else Memory(),
            freeze=parts.freeze,
            own_reference=stage.reference is None,
            watch=parts.observe(stage, self._history(stage) if p.step else (), p.checks),
            clock=self._clock,
        )

    def _reference(self, stage: Reinforce, checkpoint: Path | None) -> Examiner | None:
        """The frozen model the algorithm reads: a named one, or the policy as the stage began or as it was last refreshed with."""
        parts = self.parts
        if not stage.algorithm.reads & {"reference", "teacher"}:
            return None
        if stage.reference is not None and not self.progress.reference:
            return parts.teacher(stage.reference)
        if checkpoint is None:
            return parts.freeze()
        now = snapshot(parts.learner)
        load_weights(parts.book.kept(self.progress.reference or self._before(stage.name)), parts.learner)
        reference = parts.freeze()
        restore(parts.learner, now)
        return reference

    def _refresh(self, stage: Reinforce, h: Roles, step: Step) -> Step:
        """The policy becomes its own reference where the algorithm says so; its weights are kept, for a resumed run."""
        every, p = stage.algorithm.refresh, self.progress
        if not every or p.step % every:
            return step
        h.reference = self.parts.freeze()
        h.reference_digest = h.reference.fingerprint()
        p.reference = f"{stage.name}-reference-{p.step:06d}"
        self.parts.book.keep(p.reference, lambda folder: save_weights(folder, self.parts.learner))
        return replace(step, notes=(*step.notes, f"the reference is now the policy of step {p.step}"))

    def _enough(self, stage: Reinforce, report: Report | None) -> str:
        """Why the stage may end before its last step, or ''."""
        if stage.target is not None and report is not None and report.reward.mean >= stage.target:
            return f"target {stage.target:g} reached at step {self.progress.step}"
        if stage.wall_time is not None and self._seconds() >= stage.wall_time:
            return f"wall time of {stage.wall_time:g} s reached at step {self.progress.step}"
        return ""

    # --- borders ---------------------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        return self._carried + time.perf_counter() - self._begun

    async def _evaluate(self, stage: Stage) -> Report | None:
        """Held-out evaluation, remembered per version so that no weights are evaluated twice. None: no task is held out."""
        if not self.parts.environment.heldout:
            return None
        sampling = self.parts.sampling(stage)
        if self._last is not None and self._last[0] == self.parts.version and self._sampled == sampling:
            return self._last[1]
        with self._clock.of("evaluate"):
            report = await self.parts.evaluate(sampling)
        self.parts.watch.tell(self.parts, EvaluatedEvent(report, self.parts.version))
        if report.failed and self.progress.step:  # before the first step the pass rate says it
            self.parts.say(f"{stage.name}: held-out samples could not be judged. {unjudged_words(report.groups)}")
        self._last, self._sampled = (self.parts.version, report), sampling
        if self.parts.run.record_episodes:
            self.parts.book.write_evaluation(stage.name, self.progress.step, report.groups)
        return report

    def _border(self, stage: Stage, trainer: Trainer, report: Report | None) -> None:
        """Between two steps: checkpoint when due, and end here if somebody asked.

        A stage that only runs beside another is not checkpointed: its weights are nobody's, and it is begun anew.
        """
        p = self.progress
        handed_on = not (isinstance(stage, Supervised) and stage.beside)
        due = stage.checkpoint_every and p.step % stage.checkpoint_every == 0
        if handed_on and (due or self.stopper.number):
            self._checkpoint(stage, trainer, report.reward.known[0] if report and report.reward.known else None)
        if self.stopper.number:
            raise Interrupted(
                self.stopper.number,
                f"stopped at {stage.name} step {p.step}; the last checkpoint is complete. Go on with: posttrain run --resume {self.parts.book.folder}",
            )

    def _checkpoint(self, stage: Stage, trainer: Trainer | None, metric: float | None = None) -> None:
        p, parts = self.progress, self.parts
        if trainer is not None:
            p.seconds, p.roles = self._seconds(), dict(self._clock.total)
        p.weights = parts.learner.fingerprint()
        p.optimizer = fingerprint(trainer.optimizer.state_tensors().items()) if trainer is not None else ""

        def write(folder: Path) -> None:
            save_weights(folder, parts.learner)
            if trainer is not None:
                save_optimizer(folder, trainer.optimizer)

        with self._clock.of("checkpoint"):
            parts.book.checkpoint(f"{p.version:08d}-{stage.name}-{p.step:06d}", write, p.plain(), metric)

    def _result(self, stage: Stage, kind: str, report: Report | None, why: str) -> StageResult:
        p = self.progress
        beside = stage.beside if isinstance(stage, Supervised) else None
        accuracy, reward = (report.accuracy.known, report.reward.known) if report else (None, None)
        if beside is not None:
            before, reward_before = next((r.before, r.reward_before) for r in p.done if r.name == beside)
        else:
            first = kind == "supervised"
            before = p.accuracy[0] if first and p.accuracy else p.before
            reward_before = p.reward[0] if first and p.reward else p.reward_before
            p.accuracy, p.reward = accuracy or p.accuracy, reward or p.reward
        return StageResult(
            name=stage.name,
            kind=kind,
            steps=p.step,
            optimizer_steps=p.optimizer_steps,
            seconds=self._seconds(),
            roles={k: round(v, 3) for k, v in self._clock.total.items()},
            accuracy=accuracy,
            greedy=report.greedy.mean if report and report.greedy and report.greedy.known else None,
            pass_at={str(k): s.mean for k, s in report.pass_at.items()} if report else {},
            before=before,
            why=why,
            beside=beside,
            reward=reward,
            reward_before=reward_before,
            graded=report is not None and report.graded,
        )

    def _describe(self, stage: Supervised, limit: float | None) -> str:
        bound = f"{stage.steps} steps" if limit is None else f"as long as {stage.beside} took ({limit:.0f} s)"
        wrong = f", {stage.wrong:.0%} of them wrong" if stage.wrong else ""
        return f"{stage.name}: imitate '{stage.style}' texts{wrong}; {stage.batch} a step, {bound}"


def productive_band(report: Report, low: float = 0.1, high: float = 0.8) -> str:
    """Whether reinforcement has work to do: the pass rate before it lies between 10 and 80 %. No rate is said where nothing could be judged."""
    if report.unmeasured:
        return f"pass rate before RL: not known, none of {report.unjudged} held-out samples could be judged. {report.unmeasured}"
    left = (
        f" ({report.unjudged} of {sum(len(g.episodes) for g in report.groups)} samples could not be judged and are left out)"
        if report.unjudged
        else ""
    )
    rate = report.pass_at[1].mean if report.pass_at else 0.0
    if low <= rate <= high:
        return f"pass rate before RL: {rate:.1%}, inside the productive band ({low:.0%} to {high:.0%}){left}"
    advice = (
        "most groups will be all wrong: teach it more by imitation first"
        if rate < low
        else "most groups will be all right: use harder tasks"
    )
    return f"pass rate before RL: {rate:.1%}, OUTSIDE the productive band ({low:.0%} to {high:.0%}); {advice}{left}"
