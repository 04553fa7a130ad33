"""Every rule about the rounds of a rejection sampling stage, on a healthy and on a sick log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from posttrain.checks.stage_history import FIRST, KEPT
from posttrain.config.stages.rejection import RAFT, STAR, Rejection
from posttrain.core.gauge import Gauge, Step
from posttrain.diagnose.rules.all_rules import findings
from posttrain.diagnose.rules.rule import ROUND_RULES

STAGE = Rejection(name="reject", method=RAFT, rounds=6)


def log(steps_of_a_round: int = 12, asked: int = 200, **changed: Sequence[float]) -> list[Step]:
    """A record of six rounds of several steps. `covered=[...]` gives the gauge reject/covered of each round."""
    values = {
        "reject/distinct": [3.0, 2.8, 2.6, 2.5, 2.5, 2.4],
        "reject/covered": [0.6, 0.66, 0.7, 0.72, 0.73, 0.73],
        "reject/hinted": [0.0] * 6,
        "rollout/failed": [0.0] * 6,
    } | {("rollout/" if n == "failed" else "reject/") + n: x for n, x in changed.items()}
    out: list[Step] = []
    for i in range(6 * steps_of_a_round):
        gauges = {"sft/loss": Gauge(0.3, 1), "optim/steps": Gauge(1, 1)}
        if not i % steps_of_a_round:
            number = i // steps_of_a_round
            counts = {n: asked if n == "reject/covered" else 1 for n in values}
            gauges |= {n: Gauge(x[number] * counts[n], counts[n]) for n, x in values.items()}
            gauges |= {"reject/round": Gauge(number + 1, 1)}
        out.append(Step("reject", i + 1, i + 1, gauges))
    return out


def said(steps: Sequence[Step], stage: Rejection = STAGE) -> dict[str, str]:
    """The first finding of each rule while the stage goes on, as `LiveRules` asks for them."""
    out: dict[str, str] = {}
    history: list[Step] = []
    for step in steps:
        history.append(step)
        del history[FIRST:-KEPT]
        for f in findings(history, stage):
            out.setdefault(f.rule, f.message)
    return out


SICK: dict[str, tuple[list[Step], tuple[str, ...]]] = {
    "kept_completions_collapse": (
        log(distinct=[3.0, 2.6, 2.2, 1.9, 1.7, 1.4]),
        ("1.7 different ones a prompt, 3 in the first round", "reject.sampling.temperature (now 1)", "weights=start"),
    ),
    "fewer_prompts_are_covered": (
        log(covered=[0.6, 0.66, 0.7, 0.4, 0.4, 0.4]),
        ("only 40% of the prompts", "70% did before", "reject.optimizer.lr", "reject.epochs (now 2)"),
    ),
    "nothing_is_kept": (
        log(1, covered=[0.0] * 6, distinct=[0.0] * 6),
        ("two rounds have kept nothing", "reject.siblings (now 8)"),
    ),
    "rounds_are_not_judged": (log(failed=[0.0, 0.1, 0.2, 0.1, 0.0, 0.0]), ("20% of the samples", "10% before")),
}


def test_every_rule_has_a_sick_log() -> None:
    assert set(SICK) == set(ROUND_RULES)


@pytest.mark.parametrize("name", SICK)
def test_a_sick_log_is_named_and_nothing_else(name: str) -> None:
    steps, words = SICK[name]
    found = said(steps)
    assert set(found) == {name}, found
    assert not [w for w in words if w not in found[name]], found[name]


HEALTHY = {
    "learns": log(),
    "long rounds": log(80),
    "one right answer a prompt": log(distinct=[1.05, 1.0, 1.02, 1.0, 1.0, 1.0]),
    "loses some variety": log(distinct=[3.0, 2.4, 2.1, 2.0, 1.9, 1.9]),
    "few prompts, which scatter": log(asked=16, covered=[0.5, 0.75, 0.44, 0.62, 0.5, 0.56]),
    "everything is hinted at first": log(covered=[0.0, 0.0, 0.1, 0.3, 0.5, 0.6], hinted=[1.0, 1.0, 0.8, 0.4, 0.2, 0.1]),
    "everything goes on from a step at first": log(
        covered=[0.0, 0.0, 0.1, 0.3, 0.5, 0.6], regenerated=[1.0, 1.0, 0.8, 0.4, 0.2, 0.1]
    ),
    "one round without a judge": log(failed=[0.0, 0.3, 0.0, 0.0, 0.3, 0.0]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_is_left_alone(name: str) -> None:
    assert not said(HEALTHY[name]) and not said(HEALTHY[name], Rejection(name="reject", method=STAR))


def test_where_every_round_begins_anew_that_is_not_advised() -> None:
    steps = SICK["kept_completions_collapse"][0]
    assert "weights=start" not in said(steps, Rejection(name="reject", method=STAR))["kept_completions_collapse"]
