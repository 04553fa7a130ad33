"""Parts that a run shares between its stages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.config.run import Run
from posttrain.config.stages.stage import Optimizer as OptimizerConfig
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step
from posttrain.core.ports import Environment, EpisodeJudge, Learner, PairRenderer, Reference, Sampler, Tracker
from posttrain.core.sampling import Sampling, Spell
from posttrain.record.run_folder import RunFolder
from posttrain.role.events import Observers, RestoredEvent
from posttrain.role.group_queue import GroupQueue
from posttrain.role.heldout_evaluation import EvaluationReport, evaluate
from posttrain.role.learning.reference_scores import Opponent
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.role.trainer import Trainer, WeightOptimizer
from posttrain.role.weights.saved_weights import load_weights, save_weights
from posttrain.stages.progress import Progress
from posttrain.system.errors import InvariantError


def nothing_sleeps() -> None:
    """Does nothing, for runs where no engine must sleep."""


ROUNDS = 16
"""Rounds of the event loop after which a requested group has reached its engine: first its task starts, then the tasks
of its siblings, then their turns."""


async def nothing_waits() -> None:
    """Does not wait, for runs whose learner need not wait for the engine."""


async def turns_reach() -> None:
    """Lets the event loop run until requested turns have reached an engine in another process.

    While the learner computes, nothing else in this process can start. Turns that have reached their engine by then go
    on without this process.
    """
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class StageSetting:
    """The environment of a stage, and the rollout role that plays it."""

    environment: Environment
    rollout: Rollout

    def judged_by(self, judges: tuple[EpisodeJudge, ...]) -> StageSetting:
        """The same setting, whose rollout is judged by these reward models."""
        return replace(self, rollout=replace(self.rollout, judges=judges))


@dataclass(frozen=True)
class MeasuredReport:
    """A held-out evaluation, with everything it depends on."""

    version: int
    """Version of the weights."""
    sampling: Sampling
    environment: Environment
    judges: tuple[str, ...]
    """Names of the reward models that judged beside the environment."""
    report: EvaluationReport


@dataclass
class RunParts:
    """The parts that all stages of a run share: learner, engine, environment, record, observers and trackers."""

    run: Run
    environment: Environment
    renderer: PairRenderer
    learner: Learner
    sampler: Sampler
    rollout: Rollout
    sync: Sync
    book: RunFolder
    stop_ids: tuple[int, ...]
    spell: Spell
    """Returns the token sequences that spell a word."""
    text: Callable[[np.ndarray], str]
    freeze: Callable[[], Reference]
    """Makes a reference that scores as the learner does now and never changes: a copy of the model, or the learner's
    own model without its adapter."""
    teacher: Callable[[str], Reference]
    """Loads a frozen model from a directory. It must have the policy's tokenizer."""
    oppose: Callable[[Reference, float], Opponent]
    """Makes an opponent that samples from pi^(1 - share) ref^share, from a reference (ref) and a share."""
    optimize: Callable[[OptimizerConfig], WeightOptimizer]
    """Makes a new optimizer for the learner's parameters."""
    trained_copy: Callable[[OptimizerConfig], tuple[Learner, WeightOptimizer]]
    """Makes a second model that trains: a copy of the learner as it is now, with an optimizer of its own."""
    make_trainer: Callable[[Learner, WeightOptimizer, int, int], Trainer] = Trainer
    """Makes a trainer from a learner, an optimizer, the tokens of a micro-batch, and the version of the weights."""
    settings: Mapping[str, StageSetting] = field(default_factory=dict[str, StageSetting])
    """For the stages that have an environment of their own, by the stage's name."""
    trained_judges: Callable[[Stage], tuple[EpisodeJudge, ...]] = lambda stage: ()
    """The reward models that the run itself has trained before a stage, and that judge in it."""
    observe: Callable[[Stage, Sequence[Step], Mapping[str, Any]], Observers] = lambda stage, steps, kept: Observers()
    """The observers of a stage. They get the steps already taken, and what a checkpoint stored of the observers."""
    watch: Observers = field(default_factory=Observers)
    """The observers of what happens between steps."""
    trackers: list[Tracker] = field(default_factory=list[Tracker])
    close: Callable[[], None] = lambda: None
    """Stops the engine and frees its threads, processes and memory."""
    idle: Callable[[], Awaitable[None]] = nothing_waits
    """Waits until the learner may compute: an engine here has nothing to do, or one elsewhere has its turns."""
    sleep: Callable[[], None] = nothing_sleeps
    """Called before the learner works: engines in this process that must sleep then free their caches."""
    queue: GroupQueue | None = None
    """Groups that the current stage asked ahead of the learner."""
    version: int = 0
    """Optimizer steps so far, over all stages. It is the version of the learner's weights."""
    measured: MeasuredReport | None = None
    """The last held-out evaluation. It is kept so that no weights are evaluated twice."""

    def tell(self, step: Step) -> None:
        """Write one line of the record and pass it to the trackers."""
        self.book.write(step)
        for tracker in self.trackers:
            tracker.log(step)

    def say(self, line: str) -> None:
        """Pass a line for people to the trackers."""
        for tracker in self.trackers:
            tracker.say(line)

    def setting(self, stage: Stage) -> StageSetting:
        """The stage's own environment and rollout, or the run's where it has none."""
        return self.settings.get(stage.name) or StageSetting(self.environment, self.rollout)

    def judged_setting(self, stage: Stage) -> StageSetting:
        """The stage's setting, judged also by the reward models that the run itself trained before. Call it when the
        stage begins: only then are they trained."""
        setting = self.setting(stage)
        return setting.judged_by((*setting.rollout.judges, *self.trained_judges(stage)))

    def sampling(self, stage: Stage) -> Sampling:
        """The sampling settings with which a stage is evaluated, resolved: its own; or, where its policy does not
        generate, those of the next stage that does, else of the first one in the run."""
        this_and_later = self.run.stages[self.run.stages.index(stage) :]
        # Later stages come first in the list, then all stages: a last stage that imitates takes an earlier stage's.
        settings_and_tops = [
            (s.contract, s.stores_top) for s in (*this_and_later, *self.run.stages) if s.contract is not None
        ]
        contract, top = settings_and_tops[0] if settings_and_tops else (Sampling(), 0)
        resolved = contract.resolve(self.stop_ids, self.spell)
        return replace(resolved, top=top) if top != resolved.top else resolved

    def other_environments(self, stage: Stage) -> tuple[Environment, ...]:
        """The environments on which the run is measured during or after this stage, without the stage's own.

        They are the run's environment and those of later stages.
        """
        stages = self.run.stages
        later = [self.setting(s).environment for s in stages[stages.index(stage) + 1 :]]
        own_environment = self.setting(stage).environment
        # By identity: several stages may share an environment, which counts once.
        return tuple({id(e): e for e in (self.environment, *later) if e is not own_environment}.values())

    async def publish(self) -> None:
        """Push the learner's weights to the sampler, unless it serves them already."""
        if self.sampler.version != self.version:
            await self.sync.push(self.version)

    def known(self, sampling: Sampling, environment: Environment, judges: tuple[str, ...]) -> EvaluationReport | None:
        """The last evaluation, if it was of the present weights with the same sampling, tasks and judges."""
        last = self.measured
        if last is None or last.environment is not environment:
            return None
        same = (last.version, last.sampling, last.judges) == (self.version, sampling, judges)
        return last.report if same else None

    async def evaluate(self, setting: StageSetting, sampling: Sampling) -> EvaluationReport:
        """Evaluate the learner's weights on held-out tasks. The engine's counters and caches are emptied afterwards: a
        resumed run does not repeat the evaluation, and its record must be the same."""
        await self.publish()
        result = await evaluate(setting.rollout, setting.environment.heldout, sampling, self.run.evaluation)
        # The call empties the counters; what it returns is dropped.
        self.sampler.gauges()
        self.sync.forget()
        return result

    def trainer(self, config: OptimizerConfig, micro_tokens: int) -> Trainer:
        return self.make_trainer(self.learner, self.optimize(config), micro_tokens, self.version)


def keep(parts: RunParts, progress: Progress, name: str) -> None:
    """Keep the learner's weights in the run folder under a name. Checkpoints store their fingerprint, which
    `load_kept` compares.

    Raises:
        InvariantError: other weights have this name already.
    """
    now = parts.learner.fingerprint()
    # Keeping the same weights twice is allowed. Other weights would change what a later stage starts from.
    if (then := progress.kept.get(name, now)) != now:
        raise InvariantError(
            f"the weights kept as {name!r} have fingerprint {then}, and others ({now}) would take their place: a later"
            " comparison with the start of a stage would then use other weights. Go on from an older checkpoint"
        )
    progress.kept = {**progress.kept, name: now}
    parts.book.keep(name, lambda folder: save_weights(folder, parts.learner))


def load_kept(parts: RunParts, progress: Progress, name: str) -> None:
    """Load the weights that were kept under a name into the learner, and compare them with their fingerprint."""
    load_weights(parts.book.kept(name), parts.learner)
    then = progress.kept.get(name, "")  # an older posttrain wrote none
    parts.watch.emit(RestoredEvent(f"weights kept as {name!r}", then, parts.learner.fingerprint))
