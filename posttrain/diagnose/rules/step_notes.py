"""Notes for a step that learned little or nothing, in plain words. They are written into its line of the record."""

from __future__ import annotations

from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.request_owner import DEADLY
from posttrain.core.measure.equal_numbers import rounding, spread
from posttrain.core.scored import Credit
from posttrain.core.verdict import resolution, size


def notes(asked: Experience, credit: Credit, wanted: int) -> tuple[str, ...]:
    """The notes on a step that wanted `wanted` groups."""
    out = [f"dead letter: {why}" for why in _deadly(asked)]
    if len(asked.groups) < wanted:
        out.append(
            f"only {len(asked.groups)} of {wanted} groups passed the filter after asking for {len(asked.played)}; "
            "the tasks are too easy or too hard for this policy (raise refill, or change the tasks)"
        )
    rewards = sorted(
        {f"{r:g}": float(r) for g in credit.groups for r in g.group.rewards}.items(), key=lambda row: row[1]
    )
    shown = ", ".join(text for text, _ in rewards[:4])
    if credit.groups and all(g.silent for g in credit.groups):
        out.append(f"no group has spread (all siblings agree; rewards seen: {shown}), so this step carries no credit")
    elif credit.groups and _one_reward(credit):
        out.append(f"every sample got the same reward ({shown}), so nothing in this step tells good from bad")
    return tuple(out)


def _deadly(asked: Experience) -> list[str]:
    """Returns the recorded reasons of the episodes that killed the engines they were given to."""
    judged = [j for g in asked.played for e in g.episodes for j in e.verdicts]
    return [j.verdict.why.splitlines()[0] for j in judged if j.source == DEADLY]


def _one_reward(credit: Credit) -> bool:
    """Returns whether all judged samples have one raw outcome, up to rounding."""
    judged = [e for g in credit.groups for e in g.group.judged]
    noise = rounding([size(e.verdicts) for e in judged], max((resolution(e.verdicts) for e in judged), default=0.0))
    return not spread([e.reward for e in judged if e.reward is not None], noise)
