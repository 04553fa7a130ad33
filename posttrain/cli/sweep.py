"""`posttrain plan --sweep` in the terminal: a row for each value, and how its time and its tokens are shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.api.swept import SweptValue
from posttrain.cli.screen_text import hanging, screen_width

WIDTH = 8
"""Columns of a bar."""
NEAR, LEAST_LOST = 0.98, 0.005
"""Share of the best rate from which a value counts as nearly the best, and the share of lost tokens that is
mentioned."""


def lines(name: str, rows: Sequence[SweptValue]) -> Iterator[str]:
    """A table with a row for each value: the step, bars of learner and engines (# works, . waits), the age of
    tokens."""
    first = rows[0].plan
    yield f"{first.run.recipe}, stage {first.stage.name}, on {first.machine.name}: {name}, simulated"
    wide = max(len(name), *(len(r.value) for r in rows))
    roles = "  ".join(f"{role:<{WIDTH}}  idle" for role in ("learner", "engines"))
    yield f"  {name:>{wide}}  {'s a step':>9}  {'tokens/s':>9}  {roles}  steps behind"
    for r in rows:
        o, shares = r.loop, "  ".join(f"{bar(r.loop.idle[x])} {r.loop.idle[x]:>5.0%}" for x in ("learner", "engines"))
        rate = f"{o.step:>9.3g}  {rate_of(r):>9,.0f}"
        yield f"  {r.value:>{wide}}  {rate}  {shares}  {o.behind:.2f}, most {max(o.ages, default=0)}"
    for note in _notes(rows):
        yield from hanging("  ", note, screen_width())


def rate_of(r: SweptValue) -> float:
    """Tokens a second from which the learner learns; 0 where no time is known."""
    return 0.0 if r.plan.timed is None else r.plan.timed.said / r.loop.step


def bar(idle: float) -> str:
    """The share of the time in which a role works (#) and waits (.), as `WIDTH` characters.

    >>> bar(0.25)
    '######..'
    """
    works = round((1 - idle) * WIDTH)
    return "#" * works + "." * (WIDTH - works)


def _notes(rows: Sequence[SweptValue]) -> Iterator[str]:
    rates = [rate_of(r) for r in rows]
    # The first value that is nearly as good as the best. Later values often cost more: a larger staleness, for example,
    # means older samples.
    best = next(r for r, rate in zip(rows, rates, strict=True) if rate >= NEAR * max(rates))
    yield (
        f"{best.value} is the first within {1 - NEAR:.0%} of the most tokens a second. Simulated:"
        f" {len(best.loop.seconds)} steps each"
    )
    if any(r.plan.work.staleness and r.plan.timed and r.plan.timed.topology == "colocated" for r in rows):
        yield (
            "placement=local: the engine waits while the learner computes, so asking ahead hides only what tools and"
            " verifiers take; placement=processes lets both work at once"
        )
    if any(r.plan.work.staleness and r.plan.work.engines and r.plan.run.engine.update == "drain" for r in rows):
        yield (
            "engine.update=drain: new weights wait until the engines have said all turns that they were given;"
            " engine.update=inflight lets them come between two tokens"
        )
    if (wasted := max(r.loop.lost for r in rows)) > LEAST_LOST:
        yield f"up to {wasted:.0%} of the tokens are said and not learned from"


def as_data(name: str, rows: Sequence[SweptValue]) -> dict[str, Any]:
    """The sweep as plain data."""
    return {
        "knob": name,
        "rows": [
            {
                "value": r.value,
                "step": r.loop.step,
                "idle": dict(r.loop.idle),
                "behind": r.loop.behind,
                "ages": {str(a): x for a, x in r.loop.ages.items()},
                "tokens_per_second": rate_of(r),
                "lost": r.loop.lost,
            }
            for r in rows
        ],
    }
