"""The progress of a run as plain data, which every checkpoint contains: results, and the state of the running stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.exchange.shards import DividedState
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.role.trainer import WeightOptimizer
from posttrain.system import dataclass_json
from posttrain.system.subclass_registry import Open


def state_fingerprint(optimizer: WeightOptimizer) -> str:
    """Exact digest of an optimizer's whole state."""
    # Over ranks no process has the whole state: all of them compute the digest together.
    if isinstance(optimizer, DividedState):
        return optimizer.fingerprint()
    return fingerprint(optimizer.state_tensors().items())


@dataclass(frozen=True)
class StageResult:
    """The result of one stage, in plain numbers (it is part of every later checkpoint's state)."""

    name: str
    kind: str
    steps: int
    optimizer_steps: int
    seconds: float
    roles: Mapping[str, float]
    accuracy: tuple[float, float, float] | None
    """Share of held-out answers that are right (pass@1), as (mean, and the two ends of its 95 % interval). None where
    nothing was measured or judged, or outcomes are grades without such a share (`core.measure.right`)."""
    greedy: float | None
    """Share of right answers where each token is the likeliest one."""
    pass_at: Mapping[str, float]
    before: float | None
    """Accuracy the stage started from."""
    why: str
    """Why it ended."""
    start: str
    """Name of the kept weights that it started from: the name of a stage, or `start`."""
    time_of: str | None = None
    """The earlier stage whose wall time was the limit of this one."""
    hands_on: bool = True
    """Whether the run went on with its weights."""
    reward: tuple[float, float, float] | None = None
    """Mean held-out outcome with its 95 % interval. Where outcomes are grades, it is printed before the accuracy."""
    reward_before: float | None = None
    graded: bool = False
    """Whether held-out outcomes are grades, not pass or fail."""
    peaks: Mapping[str, float] = field(default_factory=dict[str, float])
    """Peak bytes of each role."""
    agreement: tuple[float, float, float] | None = None
    """Share of held-out pairs that its scores order as they were judged, with its 95 % interval."""
    agreement_before: float | None = None
    loss: tuple[float, float, float] | None = None
    """For a stage that imitates: the held-out loss with its 95 % interval."""
    loss_before: float | None = None
    proxy: tuple[float, float, float] | None = None
    """Mean of the reward that is paid, with its 95 % interval, where another reward is measured and not paid."""
    proxy_before: float | None = None


@dataclass
class StageState(Open, begin=True):
    """The state of a stage, of whatever kind. Each kind has a subclass with what it remembers beside this."""

    step: int = 0
    optimizer_steps: int = 0
    before: float | None = None
    reward_before: float | None = None
    proxy_before: float | None = None
    optimizer: str = ""
    """Fingerprint of the optimizer's state at the checkpoint."""
    agreement_before: float | None = None
    loss_before: float | None = None
    reference_digest: str = ""
    """Fingerprint of the reference; '' where the stage reads none."""
    skipped: int = 0
    """Optimizer steps in a row that were left out, up to now."""
    lowest: float | None = None
    """The best held-out figure so far, for `patience`. Lower is better: the loss, or minus the reward or the share of
    pairs."""
    lowest_at: int = 0
    """The step after which it was measured."""
    waited: int = 0
    """Evaluations since then that were not better."""
    ended: str = ""
    """The reason why the stage needs no further step, where a stop condition was met."""
    seconds: float = 0.0
    roles: Mapping[str, float] = field(default_factory=dict[str, float])
    """Wall seconds so far, whole and per role."""
    peaks: Mapping[str, float] = field(default_factory=dict[str, float])
    """Peak bytes so far, per role."""


@dataclass(frozen=True)
class Reopening:
    """Data with which a finished run can go on with its last stage, as if that had been longer from the beginning."""

    progress: Mapping[str, Any]
    """The progress as it was before the stage was ended."""
    gauges: Mapping[str, Any]
    """[sum, count] of each gauge of the last evaluation, by name: a longer stage may evaluate after this step, and then
    has these gauges in its line. Empty where it would not."""


@dataclass
class Progress:
    """The progress of a run. Repeating the run gives the same values, except for `seconds`, `roles` and `peaks`."""

    stage: int = 0
    """Stages that are done."""
    version: int = 0
    weights: str = ""
    """Fingerprint of the policy's weights at the checkpoint."""
    accuracy: tuple[float, float, float] | None = None
    """Last measurement of the run's present weights on its own held-out tasks, with its 95 % interval."""
    reward: tuple[float, float, float] | None = None
    checks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State that the checks of the run keep, over all stages."""
    results: tuple[StageResult, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fingerprints of the weights that stay in the run folder, by their names."""
    running: StageState | None = None
    """State of the stage that is running; None between stages."""
    reopening: Reopening | None = None
    """Set in a finished run whose last stage can be made longer."""

    def plain(self) -> dict[str, Any]:
        return dataclass_json.to_plain(self)
