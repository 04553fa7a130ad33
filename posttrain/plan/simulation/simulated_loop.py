"""The sizes and times of a loop that `plan.simulation.simulator` plays, and the outcome of a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import ConfigError

Update = Literal["inflight", "drain", "rest"]
"""When new weights come. inflight: between two passes of an engine. drain: once the turns that engines have are ended.
rest: once all groups that were asked have ended."""
LEAST = dict.fromkeys(("prompts", "siblings", "engines", "slots", "turns", "judges"), 1)
LEAST |= dict.fromkeys(("staleness", "prefill", "sync", "handle", "reward", "extra", "failed", "restart"), 0)
"""The least value of each size and time."""


@dataclass(frozen=True, kw_only=True)
class SimulatedLoop:
    """Sizes and times (seconds) of a loop. Of a sequence one value is drawn each time, all with the same chance."""

    prompts: int
    """Groups that a step learns from."""
    siblings: int = 1
    """Answers of a group."""
    staleness: int = 0
    """Steps by which samples may be older than the weights that learn from them."""
    engines: int = 1
    slots: int = 256
    """Answers that an engine decodes at once."""
    lengths: Sequence[float]
    """Tokens of a turn."""
    passes: Callable[[int], float]
    """Time of one pass of an engine, by the number of answers that it decodes. A pass gives each one a token."""
    prefill: float = 0.0
    """Time to read a turn's prompt, once for siblings that are asked together."""
    learn: Sequence[float] = (0.0,)
    """Time from a step's last group until weights are sent."""
    sync: float = 0.0
    """Time to send the weights."""
    install: float | None = None
    """The part of `sync` in which engines stand still; None: all of it."""
    handle: float = 0.0
    """Time of the learner's process for each turn that has ended."""
    turns: int = 1
    """Turns of an answer."""
    waits: Sequence[float] = (0.0,)
    """Time of a tool between two turns."""
    reward: float = 0.0
    """Time of a verifier for one answer."""
    judges: int = 1
    """Answers that are judged at once."""
    kept: float = 1.0
    """Share of groups that a filter keeps."""
    extra: int = 0
    """Siblings that are asked beyond `siblings`, of whom the last to end are given up (dynamic K)."""
    failed: float = 0.0
    """Share of answers that cannot be judged: nothing is learned from them."""
    deaths: float = math.inf
    """Mean time until an engine dies. Turns that it has not ended are asked again."""
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
    """The outcome of the measured steps of a simulation."""

    seconds: tuple[float, ...]
    """Time of each step, from one push of weights to the next."""
    ages: Mapping[int, float]
    """Share of the learned tokens by their age: the version that learns from a token less the version that said it."""
    idle: Mapping[str, float]
    """Share of the time in which `learner` waits for groups or engines, `engines` have no turn, `judges` no answer."""
    slots_used: float
    """Share of the engines' slots that hold an answer, over the time."""
    lost: float
    """Share of the sampled tokens that are not learned from: refused, failed, given up, or sampled again."""

    @property
    def step(self) -> float:
        """Mean time of a step."""
        return math.fsum(self.seconds) / len(self.seconds)

    @property
    def behind(self) -> float:
        """Mean age of a token, in steps."""
        return math.fsum(age * share for age, share in self.ages.items())
