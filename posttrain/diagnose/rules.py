"""Rules that are tested during a run: a condition on the gauges of the last steps, its meaning, and what to do.
Findings become notes of a step.

A rule warns and never stops a run, because it reads symptoms. What must never happen is a canary (`posttrain.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.gauge import Step
from posttrain.core.run import Reinforce


@dataclass(frozen=True)
class Finding:
    """What a rule found, and what to do, in words."""

    rule: str
    message: str


Condition = Callable[[Sequence[Step], Reinforce], str]

RULES: dict[str, Condition] = {}
"""Every rule by name. A condition returns '' where it does not hold."""


def rule(condition: Condition) -> Condition:
    RULES[condition.__name__] = condition
    return condition


def findings(history: Sequence[Step], stage: Reinforce) -> list[Finding]:
    """The findings of all rules at the end of a stage's record so far."""
    return [
        Finding(name, message)
        for name, condition in RULES.items()
        if history and (message := condition(history, stage))
    ]


def mean(step: Step, name: str) -> float | None:
    """A gauge's mean in a step; None where nothing was counted."""
    gauge = step.gauges.get(name)
    return gauge.mean if gauge is not None and gauge.count else None


def last(history: Sequence[Step], name: str, count: int) -> list[float]:
    """The gauge's means in the last `count` steps; empty where one of them lacks it."""
    found = [mean(s, name) for s in history[-count:]]
    return [x for x in found if x is not None] if len(history) >= count and None not in found else []


@rule
def old_policy_is_the_new_one(history: Sequence[Step], stage: Reinforce) -> str:
    """There are several optimizer steps on the same samples, but no token's log-prob differs from the start of the step
    by more than rounding."""
    if stage.optimizer_steps < 2:
        return ""
    recent = [
        s
        for s in history[-3:]
        if s.gauges["optim/steps"].sum >= 2
        and mean(s, "policy/kl_start") is not None
        and mean(s, "credit/advantage_abs")
    ]
    if len(recent) < 3 or any(s.gauges["policy/kl_start"].sum != 0 for s in recent):
        return ""
    return (
        "later optimizer steps of a step find the policy exactly where it started, for three steps: the old log-probs"
        " are recomputed with the weights of now, so ratios are always 1 and no trust region acts. Score them once,"
        " before the first optimizer step"
    )


@rule
def reference_follows(history: Sequence[Step], stage: Reinforce) -> str:
    """The policy changes, but its distance to the reference is exactly 0."""
    distances = last(history, "policy/kl_reference", 4)
    moved = [s for s in history[-4:] if s.gauges["optim/steps"].sum >= 1 and s.gauges["optim/grad_norm"].mean > 1e-6]
    if len(distances) < 4 or len(moved) < 4 or any(distances):
        return ""
    return (
        "the policy has moved for four steps and its KL to the reference is still exactly 0: the reference is the"
        " policy itself. Freeze a copy"
    )


@rule
def nothing_to_learn(history: Sequence[Step], stage: Reinforce) -> str:
    """No group has spread, eight steps in a row."""
    silent = last(history, "credit/silent", 8)
    if len(silent) < 8 or min(silent) < 1 or not stage.algorithm.group_relative:
        return ""
    rewards = last(history, "rollout/reward", 8)
    return (
        f"for eight steps no group had spread (mean reward {rewards[-1]:.3g}), so nothing was learned. If rewards are"
        " at their floor teach the task first or use easier ones; at their ceiling use harder ones; if the verifier is"
        " new, judge a right answer by hand"
    )


@rule
def cut_off_before_the_answer(history: Sequence[Step], stage: Reinforce) -> str:
    """Most answers are cut off, and very few are right."""
    cut, solved = last(history, "rollout/truncated", 4), last(history, "rollout/solved", 4)
    if len(cut) < 4 or min(cut) < 0.8 or max(solved) > 0.05:
        return ""
    return (
        f"{cut[-1]:.0%} of the answers are cut off at max_tokens={stage.sampling.max_tokens} and {solved[-1]:.0%} are"
        " right: the limit is graded, not the answer. Raise sampling.max_tokens, or teach the policy to stop"
    )


@rule
def judges_fail(history: Sequence[Step], stage: Reinforce) -> str:
    """A noticeable share of samples could not be judged, because a source failed, three steps in a row."""
    failed = last(history, "rollout/failed", 3)
    if len(failed) < 3 or min(failed) < 0.05:
        return ""
    return (
        f"{failed[-1]:.0%} of the samples could not be judged, for three steps. They are left out, so the policy learns"
        " from what is easy to judge: mend the verifier"
    )


@rule
def source_is_mute(history: Sequence[Step], stage: Reinforce) -> str:
    """A reward source gives 0 to every answer, right ones too, five steps in a row."""
    mute = last(history, "canary/mute_sources", 5)
    if len(mute) < 5 or min(mute) <= 0:
        return ""
    return (
        "a reward source has given 0 to every answer of five steps, and to the right answers too: is what it asks for"
        " reachable, and does it raise when it is down?"
    )


@rule
def policy_runs_away(history: Sequence[Step], stage: Reinforce) -> str:
    """The policy is far from the policy at the start of the step."""
    distance = last(history, "policy/kl_start", 2)
    if len(distance) < 2 or min(distance) < 1.0:
        return ""
    return (
        f"the policy moves {distance[-1]:.2g} nats a token within one step: lower the learning rate, the number of"
        " minibatches or the clip"
    )
