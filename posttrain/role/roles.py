"""A stage's roles in one hand: what its step calls in order, and what those who observe it look at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from posttrain.algorithm.steer import AdaptiveState
from posttrain.core.book import Book
from posttrain.core.ports import Dialogue, Environment, Learner, PairRenderer, Reference
from posttrain.core.run import Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.core.stage import Stage
from posttrain.role.events import Observers
from posttrain.role.prompts import Prompts
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.role.trainer import Trainer


@dataclass
class RoleSeconds:
    """Wall seconds per role. Facts for people: no digest covers them."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    total: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            self.seconds[role] = self.seconds.get(role, 0.0) + spent
            self.total[role] = self.total.get(role, 0.0) + spent

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


S = TypeVar("S", bound=Stage)


@dataclass(kw_only=True)
class StageRoles(Generic[S]):
    """What every stage that learns works with."""

    run: Run
    stage: S
    learner: Learner
    trainer: Trainer
    sync: Sync
    book: Book
    text: Callable[[np.ndarray], str]
    """Decodes token ids, for messages."""
    watch: Observers = field(default_factory=Observers)
    clock: RoleSeconds = field(default_factory=RoleSeconds)


@dataclass(kw_only=True)
class SupervisedRoles(StageRoles[Supervised]):
    """What a supervised stage works with."""

    environment: Environment
    renderer: PairRenderer
    dialogue: Callable[[str], Dialogue]
    """A new encoder for one episode of the named task."""
    stop_ids: tuple[int, ...]
    context: int
    """Most tokens of a demonstration."""


@dataclass(kw_only=True)
class ReinforceRoles(StageRoles[Reinforce]):
    """The six roles of one reinforcement stage, and the little state that a checkpoint must carry."""

    sampling: Sampling
    """The stage's contract, resolved."""
    rollout: Rollout
    prompts: Prompts
    reference: Reference | None
    adaptive: AdaptiveState = AdaptiveState()
    other_environments: tuple[Environment, ...] = ()
    """Other environments on which the run, this stage or a later one is measured: what they hold out must not be
    trained on either."""
    own_reference: bool = True
    """Whether the reference began as the policy itself, so that nothing lies between them before the first step."""

    @property
    def stream(self) -> str:
        """Of the random numbers of this stage's rollouts."""
        return f"train/{self.stage.name}"
