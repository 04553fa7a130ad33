"""A plan held to a run: its sizes with the lengths that the run's record has, and each term beside what was measured.

Lengths, spread and what the learner leaves out are read from the record, so what differs is the plan's own error. On a
processor memory counts above what the process held before the model was there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.core.gauge import Gauge, Step, merge
from posttrain.plan.lengths import Lengths
from posttrain.plan.memory import Instant, Place, Term
from posttrain.plan.throughput import ROLES, Throughput, Times
from posttrain.plan.work import Work

SPOKEN = ("sft/tokens", "preference/tokens", "ranking/tokens")
"""Gauges of the tokens that a stage learns from where it samples none."""
PHASES: Mapping[str, tuple[Instant, ...]] = {
    "rollout": ("rollout",),
    "score": ("first scoring", "scoring"),
    "learn/passes": ("first scoring", "forward", "backward", "gradients"),
    "learn/update": ("first update", "update"),
    "learn": ("first scoring", "forward", "backward", "gradients", "first update", "update"),
    "sync": ("sync",),
}
"""Role and phase of the record -> the instants of a plan that lie in it."""
CLOCK: Mapping[str, tuple[str, ...]] = {
    "rollout": ("rollout", "reward"), "score": ("reference",), "learn": ("learn",), "sync": ("sync",)
}  # fmt: skip
"""Role of the record -> the times of a plan that it takes. Answers are judged while others are said."""
OWN = ("check", "book", "data")
"""Roles of the record that no plan counts: what a run proves of itself, writes down and reads."""
FIRST = 5
"""Steps by which a plan is calibrated."""


@dataclass(frozen=True)
class Compared:
    """One term of a plan beside what a run took."""

    name: str
    predicted: float
    measured: float
    terms: tuple[Term, ...] = ()
    """What the plan says is in memory then, the largest first."""
    instant: str = ""

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return self.measured / self.predicted if self.predicted > 0 else float("inf")


def recorded_work(work: Work, steps: Sequence[Step]) -> Work:
    """The sizes of these steps: their mean lengths, and the tokens that the learner computed."""
    seen = merge(*(s.gauges for s in steps))
    packed = seen.get("learner/shared", Gauge(0, 0))
    taken = len([s for s in steps if "learner/shared" in s.gauges])
    if work.samples:
        said = seen.get("rollout/tokens", Gauge(0, 0))
        lengths = _sampled(work, said, seen) if said.count else work.lengths
    else:
        spoken = sum(seen[n].sum for n in SPOKEN if n in seen)
        if not spoken or not taken:
            return work
        rows = taken * work.sequences
        # `learner/shared` counts all positions, and its sum is what shared beginnings saved. Positions that are not
        # learned from are prompts.
        prompt, answer = max(1, round((packed.count - spoken) / rows)), max(1.0, spoken / rows)
        lengths = Lengths(prompt=prompt, mean=answer, most=max(1, round(answer)))
    # The share of tokens that the learner computed: groups without spread are left out of its passes.
    now = replace(work, lengths=lengths, learned=1.0)
    whole = now.prompts * now.unit * max(1, taken) * now.epochs
    return replace(now, learned=min(1.0, (packed.count - packed.sum) / whole)) if packed.count > packed.sum else now


def _sampled(work: Work, said: Gauge, seen: Mapping[str, Gauge]) -> Lengths:
    """Prompts are as long as the engine's requests; the spread is the one whose longest answer is that of the run."""
    read, tail = seen.get("engine/shared", Gauge(0, 0)), seen.get("engine/straggler", Gauge(0, 0))
    prompt = max(1, round(read.count / said.count)) if read.count else work.lengths.prompt
    mean = max(1.0, said.mean)
    found = Lengths(prompt=prompt, mean=mean, most=max(work.lengths.most, round(mean)))
    # `longest` rises with the spread, so halving the interval twelve times finds the spread to .001.
    longest, low, high = tail.mean * mean if tail.count else mean, 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if replace(found, cv=middle).longest(work.sequences) < longest else (low, middle)
    return replace(found, cv=low)


def largest_step(steps: Iterable[Step]) -> list[Step]:
    """The step whose learner computed the most tokens, alone: the one that memory is held to."""
    found = [s for s in steps if "learner/shared" in s.gauges]
    return (
        [max(found, key=lambda s: s.gauges["learner/shared"].count - s.gauges["learner/shared"].sum)] if found else []
    )


def memory_terms(place: Place, steps: Sequence[Step], held: float) -> list[Compared]:
    """The peak of each role and phase. `held`: resident bytes before the model was there; 0 on an accelerator."""
    out: list[Compared] = []
    for name, instants in PHASES.items():
        measured = [s.memory[name] for s in steps if name in s.memory]
        if not measured:
            continue
        # A phase is measured by its peak, so it is held to the largest of the instants that lie in it.
        at = max(instants, key=lambda i: _counted(place, i))
        out.append(Compared(name, _counted(place, at), max(measured) - held, tuple(place.held(at)), at))
    return out


def _counted(place: Place, at: Instant) -> float:
    """Bytes as a run measures them: resident ones, or those that torch's allocator gave out."""
    return place.total(at) - (place.slack(at) if place.accelerator else 0.0)


def time_terms(timed: Throughput, steps: Sequence[Step]) -> list[Compared]:
    """The median time of each role and of the step, the first step left out where there are others."""
    # The first step also proves and compiles.
    steps = steps[1:] if len(steps) > 1 else steps
    times = _in_turn(timed)
    out: list[Compared] = []
    for role, parts in CLOCK.items():
        measured = [s.clock[role] for s in steps if role in s.clock]
        if measured:
            out.append(Compared(role, sum(getattr(times, p) for p in parts), statistics.median(measured)))
    return [*out, Compared("step", sum(x.predicted for x in out), step_seconds(steps))] if out else []


def _in_turn(timed: Throughput) -> Times:
    """What a run's clock shows of each role: where samples are asked ahead, the rollout takes what it is waited for."""
    t = timed.times
    if timed.topology != "asynchronous":
        return t
    # Verdicts come with the groups, so they are a part of what is waited for.
    return replace(t, rollout=max(0.0, timed.step - t.reference - t.learn - t.sync), reward=0.0)


def step_seconds(steps: Sequence[Step]) -> float:
    """The median time of a step's roles together."""
    return statistics.median(sum(s.clock.get(role, 0.0) for role in CLOCK) for s in steps)


def time_factors(rows: Iterable[Compared]) -> dict[str, float]:
    """Measured / predicted by role of a plan."""
    by = {x.name: x.ratio for x in rows if x.name in CLOCK and 0 < x.ratio < float("inf")}
    return {part: by[role] for role, parts in CLOCK.items() if role in by for part in parts if part in ROLES}
