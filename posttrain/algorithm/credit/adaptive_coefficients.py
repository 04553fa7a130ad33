"""The state of an algorithm between steps: adaptive coefficients of KL and entropy, moving baselines, pass rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from posttrain.core.gauge import Gauge
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.rollout_request import PassRate


@dataclass(frozen=True)
class AdaptiveState:
    """State of an algorithm between steps; part of every checkpoint."""

    ema: float = 0.0
    """The moving baseline (`Ema`)."""
    emas: Mapping[str, float] = field(default_factory=dict[str, float])
    """The moving baseline of each source of tasks, where there is one for each."""
    pull: float | None = None
    """The KL coefficient, where it adapts."""
    entropy: float | None = None
    """The entropy coefficient, where it adapts."""
    spread: bool = False
    """Whether the entropy was at or above its target, so that no bonus is applied."""
    played: float = 0.0
    passed: float = 0.0
    """Groups played, and those that passed the filter. Each step counts half as much as the one after it."""

    @property
    def rate(self) -> PassRate:
        return PassRate(self.played, self.passed)


def steered(a: Algorithm, state: AdaptiveState) -> Algorithm:
    """The algorithm with the current values of its adaptive coefficients."""
    if state.pull is not None and isinstance(a.pull, KL):
        a = replace(a, pull=replace(a.pull, coef=state.pull))
    # Above the target the term stays, with the coefficient 0: so the forward pass still measures the entropy that the
    # rule reads. The state keeps the coefficient, and the bonus comes back where it stood.
    if state.entropy is not None and a.entropy is not None:
        a = replace(a, entropy=replace(a.entropy, coef=0.0 if state.spread else state.entropy))
    return a


def standing(a: Algorithm) -> Algorithm:
    """The algorithm without any term that changes the policy; only values are learned (value warm-up, A19)."""
    # The policy term is set to 0 by `step_credit.without_credit`; these terms have a gradient also where credit is 0.
    return replace(a, pull=None, entropy=None, imitate=None, distill=None, hint=None)


def of_step(a: Algorithm, state: AdaptiveState, index: int) -> tuple[Algorithm, bool]:
    """The algorithm of step `index` (from 1), and whether values warm up in it."""
    a = steered(a, state)
    warming = a.learns_values is not None and index <= a.learns_values.warmup
    return standing(a) if warming else a, warming


def remember(
    a: Algorithm, state: AdaptiveState, gauges: Mapping[str, Gauge], *, episodes: int, asked: PassRate = PassRate()
) -> AdaptiveState:
    """The state after a step with these gauges. `a` is the algorithm as configured, not the result of `steered`.
    `asked` counts the step's groups.

    KL (A05): coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon. Entropy (A33): coef rises by delta
    below the target and falls by it above, not below 0; at or above the target it is not applied.
    """
    # Halving before adding weighs step k back by 2^-k: the pass rate
    # follows the policy, and one step with few groups does not decide it.
    if a.filter is not None:
        rate = state.rate.halved().and_then(asked.played, asked.passed)
        state = replace(state, played=rate.played, passed=rate.passed)
    if isinstance(a.pull, KL) and a.pull.target is not None and "policy/kl_reference" in gauges:
        state = replace(
            state, pull=adapted(a.pull, state.pull or a.pull.coef, gauges["policy/kl_reference"].mean, episodes)
        )
    if a.entropy is not None and a.entropy.target is not None and "policy/entropy" in gauges:
        # `a` holds the configured coefficient. It is where the rule begins; from then on the state is read.
        before = a.entropy.coef if state.entropy is None else state.entropy
        up = gauges["policy/entropy"].mean < a.entropy.target
        state = replace(state, entropy=max(0.0, before + (a.entropy.delta if up else -a.entropy.delta)), spread=not up)
    return state


def adapted(pull: KL, coef: float, kl: float, episodes: int) -> float:
    """The KL coefficient after a step that measured `kl` nats a token."""
    assert pull.target is not None
    # Bounded, so that one step far from the target moves the coefficient by 20 % of episodes / horizon at most. It
    # stays above 0, because a stage refuses steps of 5 * horizon or more episodes.
    error = min(0.2, max(-0.2, kl / pull.target - 1))
    return coef * (1 + error * episodes / pull.horizon)
