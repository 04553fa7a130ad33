"""`posttrain plan --against RUN` and `--budget RUN` in the terminal: each term of a plan beside what the run took, and
what to make faster first."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from posttrain.api.plan_against import SHAPES, PlanAgainst, faster, plan_against
from posttrain.cli.plan import options_of, size
from posttrain.plan.of_run.against import Compared
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

TERMS = 3
"""How many terms of a plan a line names."""
HEAD = f"  {'':<13}{'predicted':>10}{'measured':>10}{'ratio':>7}"
"""The head of a table, with the widths of `_row`."""


def against(o: Namespace) -> None:
    """Print a run beside its plan."""
    words = [*([o.recipe] if o.recipe else []), *o.overrides]
    comparison = plan_against(o.against, words, options_of(o))
    if o.json:
        tell(json.dumps(as_data(comparison), indent=1))
        return
    for line in lines(comparison, o.against):
        tell(line)


def budget(o: Namespace) -> None:
    """Print what to make faster first in a run."""
    if words := [*([o.recipe] if o.recipe else []), *o.overrides]:
        raise ConfigError(f"{words[0]}: a run has its settings; only options go with its folder")
    stage, seconds, changes = faster(o.budget, options_of(o))
    step_seconds = sum(seconds.values())
    parts = ", ".join(f"{role} {x:.3g}" for role, x in sorted(seconds.items(), key=lambda row: -row[1]))
    if o.json:
        tell(json.dumps({"stage": stage.name, "seconds": seconds, "changes": [asdict(c) for c in changes]}, indent=1))
        return
    tell(f"stage {stage.name}: {step_seconds:.3g} s a step in the mean ({parts})")
    tell("what each change alone would bring, the most first:")
    width = max((len(c.words) for c in changes), default=0)
    for c in changes:
        tell(f"  {c.words:<{width}}  -{c.saves:.3g} s ({c.saves / step_seconds:.0%})  {c.source}; {c.price}")
    if not changes:
        tell("  none is known that this run does not have and that saves a hundredth of a step")
    tell("make the first, run again, and ask again: another role is the longest then")


def as_data(comparison: PlanAgainst) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "stage": comparison.stage.name,
        "steps": comparison.steps,
        "machine": comparison.machine.name,
        "held": comparison.held,
        "memory": [{**asdict(x), "terms": {t.name: t.bytes for t in x.terms}} for x in comparison.memory],
        "seconds": [{"name": x.name, "predicted": x.predicted, "measured": x.measured} for x in comparison.time],
        "own": dict(comparison.own),
    }


def lines(comparison: PlanAgainst, folder: str) -> Iterable[str]:
    """The comparison in lines."""
    yield (
        f"{comparison.run.recipe}, stage {comparison.stage.name}, {comparison.steps} steps, on"
        f" {comparison.machine.name}"
    )
    yield "lengths, spread and what the learner leaves out are those of the run"
    yield ""
    yield from _memory(comparison)
    yield ""
    yield from _time(comparison, folder)


def _memory(comparison: PlanAgainst) -> Iterable[str]:
    if not comparison.memory:
        yield "memory: this run recorded no peaks, or not what its process held before (an older version wrote it)"
        return
    above = f" above the {size(comparison.held)} that the process held before its model" if comparison.held else ""
    yield f"memory by role and phase{above}"
    yield f"{HEAD}  at, and the largest terms there"
    for x in comparison.memory:
        terms = ", ".join(f"{t.name} {size(t.bytes)}" for t in x.terms[:TERMS])
        yield _row(x, size(x.predicted), size(x.measured), f"{x.instant}: {terms}")
    if comparison.held:
        yield f"  a processor's libraries keep more for each new size: up to {size(SHAPES)} where lengths vary much"


def _time(comparison: PlanAgainst, folder: str) -> Iterable[str]:
    if not comparison.time:
        yield "time: this machine's speed is not known. posttrain plan --probe measures it once; or give machine=H100"
        return
    yield "seconds of a step, in the middle of its steps but the first"
    yield HEAD
    for x in comparison.time:
        yield _row(x, f"{x.predicted:.3g}", f"{x.measured:.3g}", "")
    if comparison.own:
        uncounted = ", ".join(f"{name} {seconds:.2g}" for name, seconds in comparison.own.items())
        yield f"  within them what no plan counts: {uncounted}"
    yield f"  {comparison.machine.device.source}"
    yield f"plans of this machine with these factors: posttrain plan RECIPE ... --calibrate {folder}"


def _row(x: Compared, predicted: str, measured: str, more: str) -> str:
    """A row of a table: predicted, measured, their ratio, and `more`."""
    ratio = f"{x.ratio:.2f}" if x.predicted > 1e-4 else "-"  # to nearly 0 there is none
    return f"  {x.name:<13}{predicted:>10}{measured:>10}{ratio:>7}  {more}".rstrip()
