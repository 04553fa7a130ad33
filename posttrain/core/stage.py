"""Settings that all kinds of stages share: start, environment, length, evaluation, checkpoints.

A kind of stage is a subclass with further settings, and a driver (`posttrain.controller.stages`) that runs its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from posttrain.core.env import Env
from posttrain.core.errors import ConfigError
from posttrain.core.open import Open
from posttrain.core.sampling import Sampling

START = "start"
"""Value of `Stage.start` that means the model as it was loaded."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with a clip of the global gradient norm. The learning rate warms up linearly, then is constant."""

    lr: float = 1e-3
    """Learning rate, after the warm-up."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the root of that mean before dividing by it."""
    weight_decay: float = 0.0
    """Weights shrink by lr times this at each step."""
    clip: float = 1.0
    """A larger global gradient norm is scaled down to this. inf: never."""
    warmup: int = 10
    """Optimizer steps over which lr rises linearly from 0."""

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.clip > 0 or self.warmup < 0:
            raise ConfigError(f"optimizer: lr={self.lr} and clip={self.clip} must be > 0, warmup={self.warmup} >= 0")


@dataclass(frozen=True, kw_only=True)
class Stage(Open, begin=True):
    """One stage of a run. Its kinds are its subclasses; run.json names each by its class."""

    harmless: ClassVar[tuple[str, ...]] = ()
    """Names of the kind's own text and switch fields that reach nothing outside the run folder
    (`posttrain.core.asks`)."""
    models: ClassVar[tuple[str, ...]] = ()
    """Names of the kind's own text fields that hold a model directory or hub id to load."""

    name: str
    """By which overrides and files address it."""
    start: str | None = None
    """The earlier stage whose weights it starts from, or `start` for the model as loaded. None: the weights of the last
    stage before it with `hands_on`, or the model as loaded."""
    env: Env | None = None
    """Its own environment or data. None: the run's."""
    optimizer: Optimizer = Optimizer()
    micro_tokens: int = 4096
    """Packed tokens per forward and backward pass. It only splits the work and never changes the gradient."""
    steps: int = 100
    """Most steps; fewer where a time or a target ends the stage first."""
    wall_time: float | None = None
    """Stop after this many seconds (checked between steps)."""
    time_of: str | None = None
    """Name of an earlier stage: stop after the wall time that it took (checked between steps)."""
    eval: bool = True
    """Evaluate held-out accuracy at the end of the stage. A stage that learns from reward also
    evaluates before it begins."""
    eval_every: int = 0
    """Steps between held-out evaluations (0: none during the stage)."""
    checkpoint_every: int = 100
    """Steps between checkpoints (0: only at the end of the stage)."""
    hands_on: bool = True
    """Whether the run goes on with the weights of this stage. False: they are evaluated, and kept under its name for
    another stage's `start`; the run goes on with the weights from before, and exports those. Such a stage has no
    checkpoints of its own: after a kill it starts from its beginning."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("micro_tokens", 1), ("eval_every", 0), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{self.name}.{name}={getattr(self, name)}: must be >= {least}")
        if self.wall_time is not None and not self.wall_time > 0:
            raise ConfigError(f"{self.name}.wall_time={self.wall_time:g}: must be > 0 seconds, or none")
        if self.wall_time is not None and self.time_of is not None:
            raise ConfigError(
                f"{self.name}: wall_time={self.wall_time:g} and time_of={self.time_of} are two times to stop after;"
                " keep one"
            )
        if self.eval_every and not self.eval:
            raise ConfigError(
                f"{self.name}: eval=false measures nothing, and eval_every={self.eval_every} asks for it; set"
                " eval_every=0"
            )

    @property
    def contract(self) -> Sampling | None:
        """The sampling settings of the policy in this stage; None where it does not sample."""
        return None

    @property
    def stores_top(self) -> int:
        """How many of the most probable tokens are stored with each sampled token."""
        return 0

    @property
    def demonstrated(self) -> bool:
        """Whether it reads demonstrations of the environment."""
        return False

    def refuses(self, env: str, styles: tuple[str, ...]) -> str:
        """Why this stage cannot use an environment of this name that writes demonstrations in these styles;
        '' where it can."""
        return ""


def refusals(stages: tuple[Stage, ...]) -> Iterator[str]:
    """What is wrong with these stages in this order. Each message says what to change."""
    names = [s.name for s in stages]
    for i, s in enumerate(stages):
        before = [START, *names[:i]]
        if s.name == START:
            yield f"a stage cannot be called {START!r}, which stands for the model as loaded; give it another name"
        if s.start is not None and s.start not in before:
            yield (
                f"stage {s.name!r}: start={s.start!r} must name an earlier stage, one of {before}; set {s.name}.start,"
                f" or leave the stage out with {s.name}=none"
            )
        if s.time_of is not None and s.time_of not in before[1:]:
            earlier = f", one of {before[1:]}" if before[1:] else ", and there is none"
            yield (
                f"stage {s.name!r}: time_of={s.time_of!r} must name an earlier stage{earlier}; set"
                f" {s.name}.time_of=none, or leave the stage out with {s.name}=none"
            )
        if not s.hands_on and not s.eval and s.name not in (t.start for t in stages[i + 1 :]):
            yield (
                f"stage {s.name!r}: with hands_on=false and eval=false nothing is measured of it and no later stage"
                f" starts from it; set {s.name}.eval=true or {s.name}.hands_on=true"
            )
    if not any(s.hands_on for s in stages):
        yield (
            "no stage hands its weights on, so the run would end with the model it began with; set"
            f" {names[-1]}.hands_on=true"
        )


def starts(stages: tuple[Stage, ...], stage: Stage) -> str:
    """Name of the kept weights that a stage starts from: an earlier stage's, or `START`."""
    return come_to(stages, stage) if stage.start is None else stage.start


def come_to(stages: tuple[Stage, ...], stage: Stage) -> str:
    """Name of the kept weights that the run has before a stage, whatever the stage's `start` is."""
    earlier = stages[: [s.name for s in stages].index(stage.name)]
    return next((s.name for s in reversed(earlier) if s.hands_on), START)
