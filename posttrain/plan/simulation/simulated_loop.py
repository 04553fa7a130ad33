"""Sizes and times of a loop that `plan.simulation.simulator` plays, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import ConfigError

Update = Literal["inflight", "drain", "rest"]
"""New weights come between two passes, or once the turns that were given to engines have ended, or all groups."""
LEAST = dict.fromkeys(("prompts", "siblings", "engines", "slots", "turns", "judges"), 1)
LEAST |= dict.fromkeys(("staleness", "prefill", "sync", "handle", "reward", "extra", "failed", "restart"), 0)


@dataclass(frozen=True, kw_only=True)
class SimulatedLoop:
    """Sizes and times (seconds) of a loop. From a sequence one value is drawn each time, all alike."""

    prompts: int
    siblings: int = 1
    staleness: int = 0
    engines: int = 1
    slots: int = 256
    lengths: Sequence[float]
    """Tokens of a turn."""
    passes: Callable[[int], float]
    """Time of a pass over so many answers."""
    prefill: float = 0.0
    """Time to read a turn's prompt, once for siblings that are asked together."""
    learn: Sequence[float] = (0.0,)
    """Time from a step's last group until weights are sent."""
    sync: float = 0.0
    """Time to send them. Engines stand for `install` of it; None: for all of it."""
    install: float | None = None
    handle: float = 0.0
    """Time of the learner's process for each turn that has ended."""
    turns: int = 1
    waits: Sequence[float] = (0.0,)
    """Time of a tool between two turns."""
    reward: float = 0.0
    """Time of a verifier for one answer, of which it judges `judges` at once."""
    judges: int = 1
    kept: float = 1.0
    """Share of groups that a filter keeps."""
    extra: int = 0
    """Siblings that are asked beside those wanted: when these have ended, the others are given up (dynamic K)."""
    failed: float = 0.0
    """Share of answers that cannot be judged: nothing is learned from them."""
    deaths: float = math.inf
    """Mean time until an engine dies. What it has not ended is asked again."""
    restart: float = 0.0
    """Time until another engine stands in its place."""
    update: Update = "inflight"
    apart: bool = True
    """Whether engines work while the learner computes."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name):g}: must be at least {least}")
        if not 0 < self.kept <= 1 or self.failed > 1 or not self.deaths > 0 or (self.install or 0) < 0:
            raise ConfigError("kept and failed are shares of 1, kept and deaths above 0, install not below it")
        if not all(x and min(x) >= 0 and max(x) < math.inf for x in (self.lengths, self.learn, self.waits)):
            raise ConfigError("lengths, learn and waits: give at least one number each, none below 0")


@dataclass(frozen=True, kw_only=True)
class LoopOutcome:
    """The measured steps, with shares of their time."""

    seconds: tuple[float, ...]
    """From one push to the next."""
    ages: Mapping[int, float]
    """Share of the tokens that are so many steps older than the weights that learn from them."""
    idle: Mapping[str, float]
    """Share of the time in which the learner waits for groups or engines, engines have no turn, judges no answer."""
    slots_used: float
    lost: float
    """Share of the tokens that were said and not learned from: refused, failed, given up, said again."""

    @property
    def step(self) -> float:
        """Mean time of a step."""
        return math.fsum(self.seconds) / len(self.seconds)

    @property
    def behind(self) -> float:
        """Mean age of a token, in steps."""
        return math.fsum(age * share for age, share in self.ages.items())
