"""The roles of a stage in one object, of a class for each kind: a step calls them in order, and observers read them.
`RoleCosts` measures time and memory of each role."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState
from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core import seeds
from posttrain.core.ports import Dialogue, Environment, Learner, PairRenderer, Reference, TaskSource
from posttrain.core.sampling import Sampling
from posttrain.record.run_folder import RunFolder
from posttrain.role.events import Observers
from posttrain.role.group_queue import GroupSource
from posttrain.role.judges.regenerate import Regenerator
from posttrain.role.judges.step_completion import StepLabeler, TokenEnds
from posttrain.role.learning.hinted_teacher import Hints
from posttrain.role.learning.implicit_reward_model import ImplicitModel
from posttrain.role.learning.reference_scores import Opponent, ReferenceScores
from posttrain.role.learning.replay_buffer import ReplayBuffer
from posttrain.role.memory_peaks import PeakMemory
from posttrain.role.prompt_order import Prompts
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.role.trainer import Trainer


@dataclass
class RoleCosts:
    """Wall-clock seconds and peak memory per role, for people, in no digest. A role within another counts for both."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of the roles since the last call of `take`; `total`: of the whole stage."""
    total: dict[str, float] = field(default_factory=dict[str, float])
    peak: PeakMemory = field(default_factory=PeakMemory)
    memory: dict[str, float] = field(default_factory=dict[str, float])
    """Most bytes in use, of the roles since the last call of `take_memory`; `most`: of the whole stage."""
    most: dict[str, float] = field(default_factory=dict[str, float])
    _open: list[float] = field(default_factory=list[float])
    """A stack with one number for each role that is running, the innermost last: its peak bytes so far."""
    _now: tuple[tuple[str, float], ...] = ()
    """(role, when it began) of the roles that are running, the innermost last."""

    @property
    def now(self) -> tuple[str, float] | None:
        """The innermost running role, and the seconds since it began; None between roles. Any thread may ask."""
        open_now = self._now
        return (open_now[-1][0], time.perf_counter() - open_now[-1][1]) if open_now else None

    def spent(self, role: str) -> float:
        """Seconds of a role so far, in the whole stage. Any thread may ask."""
        return self.total.get(role, 0.0) + sum(time.perf_counter() - since for name, since in self._now if name == role)

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        """Measures a role: around its work."""
        # The process has one peak counter, and an inner role resets it: the outer role's peak until now is put on the
        # stack, and the inner role's counts for it too.
        if self._open:
            self._open[-1] = max(self._open[-1], self.peak.read())
        self._open.append(0.0)
        self.peak.reset()
        begun = time.perf_counter()
        # A new tuple each time, and never a changed one: other threads read it without a lock.
        self._now = (*self._now, (role, begun))
        try:
            yield
        finally:
            self._now = self._now[:-1]
            spent = time.perf_counter() - begun
            self.seconds[role] = self.seconds.get(role, 0.0) + spent
            self.total[role] = self.total.get(role, 0.0) + spent
            used = max(self._open.pop(), self.peak.read())
            self.memory[role] = max(self.memory.get(role, 0.0), used)
            self.most[role] = max(self.most.get(role, 0.0), used)
            if self._open:
                self._open[-1] = max(self._open[-1], used)

    def phase(self, name: str = "") -> None:
        """A phase of the innermost role ends now. Its peak memory is noted as `ROLE/name`; '' notes nothing."""
        if not self._open:
            return
        # The reset clears the counter, and the role's own peak is the largest of its phases.
        used = self.peak.read()
        self._open[-1] = max(self._open[-1], used)
        if name:
            role = f"{self._now[-1][0]}/{name}"
            self.memory[role] = max(self.memory.get(role, 0.0), used)
            self.most[role] = max(self.most.get(role, 0.0), used)
        self.peak.reset()

    def take(self) -> dict[str, float]:
        """The seconds per role since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def take_memory(self) -> dict[str, float]:
        """The peak bytes per role since the last call."""
        taken, self.memory = self.memory, {}
        return taken


S = TypeVar("S", bound=Stage)


@dataclass(kw_only=True)
class StageRoles(Generic[S]):
    """The roles that every training stage works with."""

    run: Run
    stage: S
    learner: Learner
    trainer: Trainer
    sync: Sync
    book: RunFolder
    text: Callable[[np.ndarray], str]
    """Decodes token ids, for messages."""
    watch: Observers = field(default_factory=Observers)
    clock: RoleCosts = field(default_factory=RoleCosts)


@dataclass(kw_only=True)
class DataRoles(StageRoles[S]):
    """The roles of a stage that learns from data."""

    environment: Environment
    renderer: PairRenderer
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    stop_ids: tuple[int, ...]
    context: int
    """The largest number of tokens a text of the data may have."""


@dataclass(kw_only=True)
class SupervisedRoles(DataRoles[Supervised]):
    """The roles of a supervised stage."""


@dataclass(kw_only=True)
class PreferenceRoles(DataRoles[Preference]):
    """The roles of a stage that learns from preferences."""

    source: TaskSource
    """The training tasks whose judgements fit into the context."""
    reference: Reference | ReferenceScores | None
    """The model that the policy is compared with, or its log-probs, computed ahead."""


@dataclass(kw_only=True)
class RewardRoles(DataRoles[RewardModel]):
    """The roles of a stage that trains a reward model."""

    source: TaskSource
    """The training tasks whose judgements fit into the context."""
    reference: Reference | None = None
    """The model as the stage began, where the language head is compared with it (regularise=dpo)."""
    ends: TokenEnds
    """Finds the token that ends a step, for labels of steps."""


@dataclass(kw_only=True)
class SamplingRoles(StageRoles[S]):
    """The roles of a stage that samples."""

    sampling: Sampling
    """The stage's sampling settings, resolved."""
    rollout: Rollout
    prompts: Prompts
    other_environments: tuple[Environment, ...] = ()
    """Other environments on which the run or a later stage is evaluated: their held-out tasks stay untrained."""


@dataclass(kw_only=True)
class OnlineRoles(SamplingRoles[OnlinePreference]):
    """The roles of a stage that learns from preferences between its own samples."""

    reference: Reference | None
    opponent: Opponent | None = None
    """The player that says the completions of `stage.opposed`; None: the policy itself."""

    @property
    def place(self) -> int:
        """Random key of the draws that choose which completions become pairs."""
        return seeds.key(self.run.seed, "pairs", self.stage.name)


@dataclass(kw_only=True)
class RejectionRoles(DataRoles[Rejection], SamplingRoles[Rejection]):
    """The roles of a stage that imitates the best of its own samples."""

    regenerator: Regenerator | None = None
    """Says wrong answers anew from their first wrong step, where the method asks for it."""
    reference: Reference | None = None
    """None: nothing here compares with one. Checks of sampling stages ask for it."""


@dataclass(kw_only=True)
class LabelRoles(SamplingRoles[StepLabeling]):
    """The roles of a stage that labels steps of its own answers."""

    environment: Environment
    labeler: StepLabeler


def stream_of(stage: Stage) -> str:
    """The name of the random stream of a stage's rollouts."""
    return f"train/{stage.name}"


@dataclass(kw_only=True)
class ReinforceRoles(SamplingRoles[Reinforce]):
    """The roles of a reinforcement stage, and the small state that a checkpoint must store."""

    groups: GroupSource
    """Plays the prompts, for the step that learns from them or ahead of it."""
    reference: Reference | None
    replay: ReplayBuffer | None = None
    """Groups of earlier steps, from which this one learns again."""
    implicit: ImplicitModel | None = None
    """Learns outcomes beside the policy, where the algorithm reads implicit process rewards."""
    adaptive: AdaptiveState = AdaptiveState()
    """Adaptive coefficients and moving averages, which change from step to step."""
    own_reference: bool = True
    """Whether the reference began as a copy of the policy and reads the same: their KL is 0 before the first step."""
    hints: Hints | None = None
    """Prompts that the reference reads instead of the policy's, where the algorithm has a hint."""

    @property
    def stream(self) -> str:
        return stream_of(self.stage)


JudgedRoles = ReinforceRoles | OnlineRoles | RejectionRoles
"""The roles of a stage whose own samples are judged."""
