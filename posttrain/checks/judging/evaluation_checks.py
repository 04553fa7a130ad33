"""Checks that a held-out evaluation reports what its verdicts say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from posttrain.checks.sampling.sampler_checks import said_by_these_weights
from posttrain.core.measure.right import Right
from posttrain.core.verdict import Judged, outcome
from posttrain.role.events import EvaluatedEvent, Event, Observer, ObserverReport
from posttrain.role.heldout_evaluation import EvaluationReport, same_task
from posttrain.system.errors import InvariantError


def measured_right(report: EvaluationReport) -> None:
    """Held-out accuracy, mean reward and pass@k, counted a second way from the verdicts themselves."""
    solved: list[tuple[int, int]] = []
    means: list[float] = []
    told: dict[str, list[tuple[float, Right]]] = {}
    for g in report.groups:
        raw = [(r, e.right) for e in g.episodes if (r := _measured(e.verdicts)) is not None]
        told.setdefault(same_task(g.task), []).extend(raw)
    for raw in told.values():
        if raw:
            means.append(math.fsum(r for r, _ in raw) / len(raw))
            solved.append((len(raw), sum(right.of(r) for r, right in raw)))
    if not means:
        return
    wrong = {"mean reward": (report.reward.mean, math.fsum(means) / len(means))}
    if report.accuracy.prompts:
        wrong["accuracy"] = (report.accuracy.mean, math.fsum(c / n for n, c in solved) / len(solved))
    for k, s in report.pass_at.items():
        missed = [math.prod((n - c - i) / (n - i) for i in range(k)) for n, c in solved]
        wrong[f"pass@{k}"] = (s.mean, 1 - math.fsum(missed) / len(missed))
    for name, (said, counted) in wrong.items():
        if not abs(said - counted) <= 1e-9:
            raise InvariantError(
                f"held-out {name} is reported as {said:.6g} and is {counted:.6g} when counted from the"
                f" {sum(n for n, _ in solved)} verdicts: unjudged samples must not count as wrong, and pass@k must be"
                " the unbiased estimate"
            )


def _measured(verdicts: Sequence[Judged]) -> float | None:
    """The sum of what is measured and not paid, where anything is; else what is paid."""
    own = [j for j in verdicts if j.measured]
    if not own:
        return outcome(verdicts)
    given = [j.verdict.score for j in own]
    return None if None in given else math.fsum(j.weight * (j.verdict.score or 0.0) for j in own)


class EvaluationCheck(Observer):
    """Held-out answers were sampled with the weights that are evaluated, and the report agrees with their verdicts."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, EvaluatedEvent):
            said_by_these_weights(event.report.groups, (event.version,))
            measured_right(event.report)
