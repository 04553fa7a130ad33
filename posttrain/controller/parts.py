"""What a run shares between its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.core.book import Book
from posttrain.core.gauge import Step
from posttrain.core.ports import Environment, Learner, PairRenderer, Reference, Sampler, Tracker
from posttrain.core.run import Run
from posttrain.core.sampling import Sampling, Spell
from posttrain.core.stage import Optimizer as OptimizerConfig
from posttrain.core.stage import Stage
from posttrain.role.evaluate import EvaluationReport, evaluate
from posttrain.role.events import Observers
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.role.trainer import Trainer, WeightOptimizer


@dataclass(frozen=True)
class StageSetting:
    """Where a stage plays: an environment, and the rollout in it."""

    environment: Environment
    rollout: Rollout


@dataclass(frozen=True)
class MeasuredReport:
    """A held-out evaluation, with all it depends on."""

    version: int
    sampling: Sampling
    environment: Environment
    report: EvaluationReport


@dataclass
class RunParts:
    """What all stages of a run share: the policy's learner, the engine, the environment, the book, who listens."""

    run: Run
    environment: Environment
    renderer: PairRenderer
    learner: Learner
    sampler: Sampler
    rollout: Rollout
    sync: Sync
    book: Book
    stop_ids: tuple[int, ...]
    spell: Spell
    """The token sequences that write a word."""
    text: Callable[[np.ndarray], str]
    freeze: Callable[[], Reference]
    """The learner as it is now, frozen."""
    teacher: Callable[[str], Reference]
    """A frozen model of this directory, which must share the policy's tokenizer."""
    optimize: Callable[[OptimizerConfig], WeightOptimizer]
    """A new optimizer of the learner's parameters."""
    settings: Mapping[str, StageSetting] = field(default_factory=dict[str, StageSetting])
    """Of the stages that have an environment of their own, by name."""
    observe: Callable[[Stage, Sequence[Step], Mapping[str, Any]], Observers] = lambda stage, steps, kept: Observers()
    """Who observes a stage, of which these steps are taken; with what a checkpoint kept of them."""
    watch: Observers = field(default_factory=Observers)
    """Who observes what happens between steps."""
    trackers: list[Tracker] = field(default_factory=list[Tracker])
    close: Callable[[], None] = lambda: None
    """Ends the engine: its threads, processes and memory."""
    version: int = 0
    """Optimizer steps so far, over all stages: the version of the learner's weights."""
    measured: MeasuredReport | None = None
    """The last held-out evaluation, so that no weights are evaluated twice."""

    def tell(self, step: Step) -> None:
        """Write one line of the record and tell whoever listens."""
        self.book.write(step)
        for tracker in self.trackers:
            tracker.log(step)

    def say(self, line: str) -> None:
        """A line for people, where the run is watched."""
        for tracker in self.trackers:
            tracker.say(line)

    def setting(self, stage: Stage) -> StageSetting:
        """Where a stage plays."""
        return self.settings.get(stage.name) or StageSetting(self.environment, self.rollout)

    def sampling(self, stage: Stage) -> Sampling:
        """The contract under which a stage is evaluated: its own, or that of the run's next stage in which the policy
        speaks."""
        after = self.run.stages[self.run.stages.index(stage) :]
        own = [(s.contract, s.stores_top) for s in (*after, *self.run.stages) if s.contract is not None]
        said, stores = own[0] if own else (Sampling(), 0)
        contract = said.resolve(self.stop_ids, self.spell)
        return replace(contract, top=stores) if stores != contract.top else contract

    def other_environments(self, stage: Stage) -> tuple[Environment, ...]:
        """Environments beside the stage's own on which the run is measured while it goes on or later: its own, and
        those of later stages."""
        stages = self.run.stages
        later = [self.setting(s).environment for s in stages[stages.index(stage) + 1 :]]
        own = self.setting(stage).environment
        return tuple({id(e): e for e in (self.environment, *later) if e is not own}.values())

    async def publish(self) -> None:
        """Serve the learner's weights, unless they are being served."""
        if self.sampler.version != self.version:
            await self.sync.push(self.version)

    async def evaluate(self, setting: StageSetting, sampling: Sampling) -> EvaluationReport:
        """Held-out evaluation of the learner's weights."""
        await self.publish()
        result = await evaluate(setting.rollout, setting.environment.heldout, sampling, self.run.evaluation)
        self.sampler.gauges()
        return result

    def trainer(self, config: OptimizerConfig, micro_tokens: int) -> Trainer:
        return Trainer(self.learner, self.optimize(config), micro_tokens, self.version)
