"""The definition of a rule: a condition on the gauges of a stage's steps so far, and what to say where it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from posttrain.config.run import Reinforce
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step
from posttrain.core.measure.number_text import number_text


@dataclass(frozen=True)
class Finding:
    """The finding of a rule, and what to do, in words."""

    rule: str
    message: str


Condition = Callable[[Sequence[Step], Reinforce], str]
RoundCondition = Callable[[Sequence[Step], Rejection], str]
PlayedCondition = Callable[[Sequence[Step], Stage], str]
UNJUDGED = 0.05
"""Share of samples that could not be judged, from which on a rule speaks."""

RULES: dict[str, Condition] = {}
"""Every rule by name. A condition returns '' where it does not hold. It gets the first steps of the stage and the last
ones, in order (`FIRST` and `KEPT` of `checks.stage_history`)."""


def rule(condition: Condition) -> Condition:
    """A decorator that adds a condition to `RULES` under the function's name."""
    RULES[condition.__name__] = condition
    return condition


PLAYED_RULES: dict[str, PlayedCondition] = {}
"""The rules of `RULES` that read only what was played and measured. They are the rules of a stage that learns from
pairs of its own samples, too."""


def played_rule(condition: PlayedCondition) -> PlayedCondition:
    """A decorator that adds a condition to `RULES` and to `PLAYED_RULES`."""
    RULES[condition.__name__] = PLAYED_RULES[condition.__name__] = condition
    return condition


ROUND_RULES: dict[str, RoundCondition] = {}
"""The rules of a stage that imitates its own samples. A condition gets the first step of each round: the one that
samples."""


def round_rule(condition: RoundCondition) -> RoundCondition:
    """A decorator that adds a condition to `ROUND_RULES`."""
    ROUND_RULES[condition.__name__] = condition
    return condition


def mean(step: Step, name: str) -> float | None:
    """A gauge's mean in a step; None where nothing was counted."""
    gauge = step.gauges.get(name)
    return gauge.mean if gauge is not None and gauge.count else None


def known(steps: Sequence[Step], name: str) -> list[float]:
    """The gauge's means in the steps that have it."""
    return [x for s in steps if (x := mean(s, name)) is not None]


def graded(history: Sequence[Step]) -> bool:
    """Returns whether the rewards of these steps are grades (`core.measure.right`).

    They are if some step has a reward and no share of right answers.
    """
    return any(mean(s, "rollout/reward") is not None and mean(s, "rollout/solved") is None for s in history)


def last(history: Sequence[Step], name: str, count: int) -> list[float]:
    """The gauge's means in the last `count` steps; empty where one of them lacks it."""
    means = known(history[-count:], name)
    return means if len(means) == count else []


def first(history: Sequence[Step], name: str, count: int) -> list[float]:
    """The gauge's means in the first `count` steps of the stage; empty where one of them is missing or lacks it."""
    means = known(history[:count], name)
    return means if len(means) == count and history[0].index == 1 else []


def average(values: Sequence[float]) -> float:
    """The mean of these numbers; 0 where there is none."""
    return sum(values) / len(values) if values else 0.0


def scale(history: Sequence[Step], name: str, was: float) -> float:
    """Returns the size with which a change of this gauge is compared.

    For a share of right answers it is the earlier value `was`. Grades have no zero that means something, so for them it
    is the standard deviation of single values: from the gauge NAME_std, or from the scatter of the steps' means. Of
    grades in [0, 1] it is the smaller one of the two.
    """
    values = known(history, name)
    shares = all(0 <= x <= 1 for x in values)
    # Of a share 0 means that nothing is right, so a change can be held against the share itself.
    if shares and not graded(history):
        return abs(was)
    stds = known(history, f"{name}_std")
    groups = known(history, "rollout/groups")  # siblings are alike: a step has as many values that differ
    # A step's mean scatters by the spread of single values over the root of their number, which is multiplied out here.
    count = average(groups or [s.gauges[name].count for s in history if mean(s, name) is not None])
    spread = average(stds) if stds else (scatter(running_values(history, name)) * count) ** 0.5
    return min(abs(was), spread) if shares else spread


def running_values(history: Sequence[Step], name: str) -> list[float]:
    """The gauge's means in the last steps that follow one another without a gap."""
    return known(running(history), name)


def scatter(values: Sequence[float]) -> float:
    """The variance of the values about their drift, from the differences of neighbours: a drift is no noise."""
    # A drift enters a difference of neighbours only with one step of it. Each squared difference is twice the variance.
    return average([(y - x) ** 2 for x, y in pairwise(values)]) / 2


@dataclass(frozen=True)
class Trend:
    """The change of a gauge from the first third of some steps to the last third.

    It has the means of both thirds, and the standard error of their difference.
    """

    before: float
    after: float
    error: float
    steps: int

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def sure(self) -> float:
        """The gain in standard errors."""
        # Without scatter every change is sure: infinity, with the sign of the gain.
        return self.gain / self.error if self.error > 0 else (0.0 if self.gain == 0 else float("inf") * self.gain)

    @property
    def words(self) -> str:
        return f"{reward_text(self.before, self.error)} to {reward_text(self.after, self.error)}"


def running(history: Sequence[Step]) -> list[Step]:
    """The last steps that follow one another without a gap."""
    steps = list(history)
    # The history has the first steps and the last: what lies before the hole between them is no part of a trend.
    for i in range(len(steps) - 1, 0, -1):
        if steps[i].index != steps[i - 1].index + 1:
            return steps[i:]
    return steps


def ends(values: Sequence[float], at: int, count: int) -> tuple[tuple[float, float], float]:
    """((mean of `count` values from `at` on, mean of the last `count`), standard error of their difference)."""
    # Each of the two means has the variance scatter / count.
    return (average(values[at : at + count]), average(values[-count:])), (scatter(values) * 2 / count) ** 0.5


def trend(history: Sequence[Step], name: str, least: int) -> Trend | None:
    """The trend over the last steps without a gap; None where fewer than `least` of them have the gauge."""
    values = running_values(history, name)
    # Thirds of fewer than six steps would be single values.
    if len(values) < max(least, 6):
        return None
    (before, after), error = ends(values, 0, len(values) // 3)
    return Trend(before, after, error, len(values))


def reward_text(x: float, error: float | None = None) -> str:
    """A reward in the text of a rule, exact to about its error."""
    return number_text(x, ".3g", error)


def rounded(lr: float) -> str:
    """A learning rate with one digit, as it is written on the command line: 3e-4, not Python's 3e-04."""
    return f"{lr:.0e}".replace("e-0", "e-").replace("e+00", "")
