"""How many groups may be asked ahead of the updates, so that no sample is older than promised, and how old samples then
are in the mean: closed forms for two stages that wait for each other. `plan.simulation` plays all other cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.system.errors import ConfigError


def capacity(*, staleness: int, prompts: int, left: int, taken: int, waiting: int) -> int:
    """Returns the number of further groups that may be asked now.

    A step learns from `prompts` groups, in the order of asking. Groups of the present step and of the `staleness` steps
    after it may be on their way at once, and no more. So a group that is asked now is learned from at most `staleness`
    updates later, and nothing that was played is ever thrown away for its age.

    Args:
        staleness: by how many steps a sample may be older than the weights that learn from it.
        prompts: groups of a step.
        left: steps of the stage that are not learned yet, the present one included.
        taken: groups that the present step has taken so far.
        waiting: groups asked and not taken yet. Those that a filter refused do not count, since no step uses them.

    >>> capacity(staleness=1, prompts=32, left=100, taken=0, waiting=0)
    64
    >>> capacity(staleness=1, prompts=32, left=100, taken=32, waiting=20)
    12
    >>> capacity(staleness=4, prompts=32, left=2, taken=0, waiting=60)
    4
    """
    # Near the end of a stage fewer steps are left than the bound allows, and groups beyond them
    # would be played for nothing.
    return max(0, min(staleness + 1, left) * prompts - taken - waiting)


@dataclass(frozen=True)
class CoupledStages:
    """Engines that need `rollout` seconds for the groups of a step, and a learner that needs `learn`, sync included.

    The engines work at one step's groups after the other. Where they are `even` both always take as long. Else both
    times are exponential, and a step that has its groups waits in a queue of at most `staleness` others (the queue
    M/M/1/K+1 with K = staleness).
    With other spreads, or engines that work at several steps at once, `plan.simulation.simulator` says what comes.

    >>> CoupledStages(2.0, 1.0, 4, even=True).behind
    0.5
    >>> round(CoupledStages(1.0, 1.0, 1).step, 6)
    1.5
    """

    rollout: float
    learn: float
    staleness: int
    even: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rollout < math.inf or not 0 < self.learn < math.inf or self.staleness < 0:
            raise ConfigError("rollout and learn must be seconds above 0, and staleness at least 0")

    @property
    def _waiting(self) -> list[float]:
        """Entry n is the probability that n steps have all their groups and are not learned yet, the one that the
        learner works at included; n = 0 to staleness + 1."""
        # p_n is proportional to (learn / rollout)^n, as in every M/M/1 queue. All powers are divided by the largest one
        # where the ratio is above 1, so that none overflows.
        ratio = self.learn / self.rollout
        each = [ratio ** (n - self.staleness - 1 if ratio > 1 else n) for n in range(self.staleness + 2)]
        return [x / math.fsum(each) for x in each]

    @property
    def step(self) -> float:
        """Mean seconds from one update to the next."""
        # The learner works unless no step has its groups, and each step takes it `learn` seconds, so
        # 1 / step = (1 - p_0) / learn.
        if not self.even:
            return self.learn / (1 - self._waiting[0])
        return max(self.rollout, self.learn) if self.staleness else self.rollout + self.learn

    @property
    def idle(self) -> dict[str, float]:
        """Share of the time in which each waits for the other."""
        return {"learner": 1 - self.learn / self.step, "engines": 1 - self.rollout / self.step}

    @property
    def behind(self) -> float:
        """Mean age of a token: the updates between its sampling and its own step's."""
        # While the queue is full the engines wait and say nothing, so that state is left out. A token that is said with
        # n steps before it is learned n steps later.
        if not self.even:
            said = self._waiting[:-1]
            return math.fsum(n * p for n, p in enumerate(said)) / math.fsum(said)
        if not self.staleness:
            return 0.0
        # Faster engines keep the queue full. Slower ones never wait, and while the learner is at the step before,
        # `learn` of `rollout` seconds, what they say is one step old.
        return float(self.staleness) if self.rollout < self.learn else self.learn / self.rollout
