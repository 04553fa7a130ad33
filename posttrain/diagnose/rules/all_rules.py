"""Rules that are tested during a run: a condition on the gauges of the last steps, its meaning, and what to do.

The findings become notes of a step. A rule warns and never stops a run, because it reads symptoms. What must never
happen is a canary (`posttrain.checks`). Rules about the size of updates are in `policy_rules`, rules about rewards and
answers in `reward_rules`, rules about rounds of rejection sampling in `round_rules`. This module has those about broken
machinery, and `findings` asks all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config.run import Reinforce
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step

# The decorators of these modules add their rules when they are imported.
from posttrain.diagnose.rules import policy_rules as policy_rules
from posttrain.diagnose.rules import reward_rules as reward_rules
from posttrain.diagnose.rules import round_rules as round_rules
from posttrain.diagnose.rules.rule import PLAYED_RULES as PLAYED_RULES
from posttrain.diagnose.rules.rule import ROUND_RULES as ROUND_RULES
from posttrain.diagnose.rules.rule import RULES as RULES
from posttrain.diagnose.rules.rule import UNJUDGED, Finding, known, last, mean, played_rule, rule


def findings(history: Sequence[Step], stage: Reinforce | Rejection | OnlinePreference) -> list[Finding]:
    """The findings of all rules for this kind of stage at the end of its record so far."""
    if isinstance(stage, Rejection):
        rounds = [s for s in history if "reject/round" in s.gauges]
        # A round has its gauges at its first step. At the other steps nothing new can be found.
        if not rounds or rounds[-1] is not history[-1]:
            return []
        return [Finding(n, message) for n, condition in ROUND_RULES.items() if (message := condition(rounds, stage))]
    if not history:
        return []
    if isinstance(stage, OnlinePreference):
        return [Finding(n, message) for n, condition in PLAYED_RULES.items() if (message := condition(history, stage))]
    return [Finding(n, message) for n, condition in RULES.items() if (message := condition(history, stage))]


def _still(steps: Sequence[Step]) -> bool:
    """Returns whether these steps were measured and changed nothing that the policy says.

    A policy that is certain of every token, as under top_k=1, does not change, while its values may still learn.
    """
    # Where it was not measured nothing is known, so 1.0 stands for a change: such steps do not count as still.
    return not any(known(steps, "policy/kl_step") or (1.0,))


@rule
def old_policy_is_the_new_one(history: Sequence[Step], stage: Reinforce) -> str:
    """There are several optimizer steps on the same samples, but no token's log-prob differs from the start of the step
    by more than rounding."""
    # With one optimizer step the policy is where it started whenever it is compared.
    if stage.optimizer_steps < 2:
        return ""
    recent = [
        s
        for s in history[-3:]
        if s.gauges["optim/steps"].sum >= 2
        and mean(s, "policy/kl_start") is not None
        and mean(s, "credit/advantage_abs")
    ]
    if len(recent) < 3 or _still(recent):
        return ""
    if any(s.gauges["policy/kl_start"].sum != 0 for s in recent):
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
    # A reference that is the policy is at exactly 0. Even rounding would leave more.
    if len(distances) < 4 or len(moved) < 4 or any(distances) or _still(moved):
        return ""
    return (
        "the policy has moved for four steps and its KL to the reference is still exactly 0: the reference is the"
        " policy itself. Freeze a copy"
    )


@played_rule
def judges_fail(history: Sequence[Step], stage: Stage) -> str:
    """At least 5 % of the samples could not be judged, because a source failed, three steps in a row."""
    failed = last(history, "rollout/failed", 3)
    if len(failed) < 3 or min(failed) < UNJUDGED:
        return ""
    return (
        f"{failed[-1]:.0%} of the samples could not be judged, for three steps. They are left out, so the policy learns"
        " from what is easy to judge: mend the verifier"
    )


@played_rule
def source_is_mute(history: Sequence[Step], stage: Stage) -> str:
    """A reward source gives 0 to every answer, right ones too, five steps in a row."""
    mute = last(history, "canary/mute_sources", 5)
    if len(mute) < 5 or min(mute) <= 0:
        return ""
    return (
        "a reward source has given 0 to every answer of five steps, and to the right answers too. A penalty may have"
        " nothing to take off; of what pays: is what it asks for reachable, and does it raise when it is down?"
    )


CALLS = 4
"""The rule speaks after this many steps in a row in which no call of a tool succeeds."""


@played_rule
def tool_is_dead(history: Sequence[Step], stage: Stage) -> str:
    """A tool is called at every one of the last 4 steps, and each call of it fails or runs out of time."""
    recent = history[-CALLS:]
    if len(recent) < CALLS:
        return ""
    names = {n.removeprefix("tools/failed/") for s in recent for n in s.clock if n.startswith("tools/failed/")}
    # The clock has the share of a tool's calls that failed: 1 is all. One success in these steps is enough for silence.
    dead = sorted(n for n in names if all(s.clock.get(f"tools/failed/{n}", 0.0) >= 1 for s in recent))
    if not dead:
        return ""
    # Which of the two it is tells a user where to look.
    late = any(s.clock.get("tools/timeout", 0.0) > 0 for s in recent)
    why = "some ran out of time: its service may be down or slow" if late else "none ran out of time: it refuses them"
    return (
        f"no call of the tool {', '.join(dead)} has succeeded in {CALLS} steps, and {why}. The policy learns to do"
        " without it. Call it by hand with a call from `posttrain show`; mend it, or raise env.limits.tool_seconds"
    )
