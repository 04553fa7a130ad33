"""A stage's roles in one hand, and what a stage carries from step to step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from posttrain.core.book import Book
from posttrain.core.ports import Environment, Learner, Sampler, Scorer, Tracker
from posttrain.core.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.core.types import Step
from posttrain.role.prompts import Prompts
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.role.trainer import Trainer


@dataclass
class Clock:
    """Wall seconds per role. Facts for people: no digest covers them."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def of(self, role: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[role] = self.seconds.get(role, 0.0) + time.perf_counter() - begun

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


@dataclass
class House:
    """The six roles of one reinforcement stage, and the little state that a checkpoint must carry."""

    run: Run
    stage: Reinforce
    sampling: Sampling
    """The stage's contract, resolved."""
    rollout: Rollout
    prompts: Prompts
    learner: Learner
    trainer: Trainer
    sync: Sync
    reference: Scorer | None
    reference_digest: str
    book: Book
    text: Callable[[np.ndarray], str]
    """Decodes token ids, for messages."""
    ema: float = 0.0
    clock: Clock = field(default_factory=Clock)

    def state(self) -> dict[str, float | int]:
        """What `restore` needs beside weights and optimizer."""
        return {"cursor": self.prompts.cursor, "ema": self.ema, "version": self.trainer.version}

    def restore(self, state: dict[str, float | int]) -> None:
        self.prompts.cursor = int(state["cursor"])
        self.ema = float(state["ema"])
        self.trainer.version = int(state["version"])


@dataclass
class Parts:
    """What all stages of a run share: the policy's learner, the engine, the environment, the book, who listens."""

    run: Run
    environment: Environment
    learner: Learner
    sampler: Sampler
    rollout: Rollout
    book: Book
    stop_ids: tuple[int, ...]
    dtype: str
    text: Callable[[np.ndarray], str]
    trackers: list[Tracker] = field(default_factory=list[Tracker])

    def tell(self, step: Step) -> None:
        """Write one line of the record and tell whoever listens."""
        self.book.write(step)
        for tracker in self.trackers:
            tracker.log(step)
