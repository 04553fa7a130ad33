"""Rules about what a rejection sampling stage keeps: that it keeps something, keeps variety, and can judge answers."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config.stages.rejection import Rejection
from posttrain.core.gauge import Step
from posttrain.diagnose.rules.rule import UNJUDGED, known, mean, round_rule

VARIOUS = 1.5
"""Different completions kept of a prompt in the first round. Below this there is no variety to lose."""
LEFT = 0.4
"""The variety has collapsed below this share of what it was in the first round. The one completion that every kept
prompt has is not counted. Healthy rounds lose some variety, because imitation makes likely what was kept."""
SURE = 4.0
"""Standard errors by which the share of prompts must have fallen."""
FALLEN = 0.75
"""Fraction of the largest share of prompts before it, below which the share has fallen."""


@round_rule
def kept_completions_collapse(rounds: Sequence[Step], stage: Rejection) -> str:
    """The different completions kept of a prompt fall to less than 40 % of the variety of the stage's first round,
    where that had at least 1.5 a prompt."""
    seen = known(rounds, "reject/distinct")
    # Compared beyond 1: a kept prompt has one completion at least, however little variety is left.
    if len(seen) < 2 or seen[0] < VARIOUS or seen[-1] - 1 >= LEFT * (seen[0] - 1):
        return ""
    anew = "" if stage.method.weights == "start" else f" begin each round anew with {stage.name}.method.weights=start,"
    return (
        f"the kept completions collapse: {seen[-1]:.2g} different ones a prompt, {seen[0]:.2g} in the first round. The"
        f" policy imitates its own favourites, and other right answers are lost: raise"
        f" {stage.name}.sampling.temperature (now {stage.sampling.temperature:g}),{anew} or mix in"
        f" {stage.name}.general=0.3 demonstrations"
    )


@round_rule
def fewer_prompts_are_covered(rounds: Sequence[Step], stage: Rejection) -> str:
    """The share of prompts with any kept completion falls below three quarters of what it was, by more than 4 standard
    errors."""
    seen = [g for s in rounds if (g := s.gauges.get("reject/covered")) is not None and g.count]
    if len(seen) < 2:
        return ""
    best, now = max(seen[:-1], key=lambda g: g.mean), seen[-1]
    # The variances of two shares; the last term keeps the error above 0 where both are 0 or 1.
    error = (sum(g.mean * (1 - g.mean) / g.count for g in (best, now)) + 1 / (best.count * now.count)) ** 0.5
    if now.mean >= FALLEN * best.mean or best.mean - now.mean < SURE * error:
        return ""
    return (
        f"only {now.mean:.0%} of the prompts gave anything to keep, and {best.mean:.0%} did before: imitation made the"
        f" policy worse at them. Lower {stage.name}.optimizer.lr (now {stage.optimizer.lr:g}) or {stage.name}.epochs"
        f" (now {stage.epochs}), and go on from a checkpoint before it"
    )


@round_rule
def nothing_is_kept(rounds: Sequence[Step], stage: Rejection) -> str:
    """Two rounds in a row keep nothing."""
    kept = [g.sum for s in rounds[-2:] if (g := s.gauges.get("reject/covered")) is not None]
    # What was kept of hinted or regenerated answers is kept too.
    others = [mean(s, f"reject/{origin}") or 0.0 for s in rounds[-2:] for origin in ("hinted", "regenerated")]
    if len(kept) < 2 or any(kept) or any(others):
        return ""
    return (
        f"two rounds have kept nothing ({stage.method.keep.words()}), so nothing is learned: the policy never says what"
        f" would be kept. Teach it more by imitation first, or ask easier prompts; {stage.name}.siblings (now"
        f" {stage.siblings}) helps where it is right now and then"
    )


@round_rule
def rounds_are_not_judged(rounds: Sequence[Step], stage: Rejection) -> str:
    """At least 5 % of the samples of two rounds in a row could not be judged, because a source failed."""
    failed = [x for s in rounds[-2:] if (x := mean(s, "rollout/failed")) is not None]
    if len(failed) < 2 or min(failed) < UNJUDGED:
        return ""
    return (
        f"{failed[-1]:.0%} of the samples of this round could not be judged, and {failed[-2]:.0%} before. They are left"
        " out, so the policy imitates what is easy to judge: mend the verifier"
    )
