"""Compares a plan with a run that was measured, term by term.

The plan gets its lengths, their spread and the share of tokens that the learner leaves out from the run's record. So
each difference is the plan's own error. On a processor, measured memory is resident memory less what the process held
before the model was there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.core.gauge import Gauge, Step, merge
from posttrain.plan.lengths import Lengths
from posttrain.plan.memory import Instant, Place, Term
from posttrain.plan.throughput import Throughput
from posttrain.plan.work import Work

PACKED = "learner/shared"
"""Gauge of all positions of the learner (its count), and of those that shared beginnings saved (its sum)."""
SPOKEN = ("sft/tokens", "preference/tokens", "ranking/tokens")
"""Gauges of the tokens that are learned from, for stages that do not sample."""
PHASES: Mapping[str, tuple[Instant, ...]] = {
    "rollout": ("rollout",),
    "score": ("first scoring", "scoring"),
    "learn/passes": ("first scoring", "forward", "backward", "gradients"),
    "learn/update": ("first update", "update"),
    "learn": ("first scoring", "forward", "backward", "gradients", "first update", "update"),
    "sync": ("sync",),
}
"""For each role and phase of the record, the instants of a plan that lie in it."""
CLOCK: Mapping[str, tuple[str, ...]] = {
    "rollout": ("rollout", "reward"), "score": ("reference",), "learn": ("learn",), "sync": ("sync",)
}  # fmt: skip
"""For each role of the record, the times of a plan that belong to it. The rollout contains the reward, because answers
are judged while others are still sampled."""
OWN = ("check", "book", "data")
"""Roles of the record that no plan counts: the checks of a run, its record, and its reading of data."""


@dataclass(frozen=True)
class Compared:
    """One figure of a plan beside the measured one, in bytes or seconds."""

    name: str
    predicted: float
    measured: float
    terms: tuple[Term, ...] = ()
    """The terms that are in memory at `instant` by the plan, the largest first; empty for times."""
    instant: str = ""

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return self.measured / self.predicted if self.predicted > 0 else float("inf")


def recorded_work(work: Work, steps: Sequence[Step]) -> Work:
    """The stage's sizes, with the lengths and the share of computed tokens that these steps had."""
    gauges = merge(*(s.gauges for s in steps))
    packed, taken = gauges.get(PACKED, Gauge(0, 0)), sum(PACKED in s.gauges for s in steps)
    if work.samples_answers:
        lengths = _sampled(work, gauges)
    else:
        spoken, rows = sum(gauges[n].sum for n in SPOKEN if n in gauges), taken * work.sequences
        if not spoken or not taken:
            return work
        # Positions that are not learned from are prompts.
        prompt, answer = max(1, round((packed.count - spoken) / rows)), max(1.0, spoken / rows)
        lengths = Lengths(prompt=prompt, mean=answer, most=max(1, round(answer)))
    with_lengths = replace(work, lengths=lengths, learned=1.0)
    if packed.count <= packed.sum:
        return with_lengths
    # The share of tokens that the learner computed: groups without spread are left out of its passes.
    all_tokens = with_lengths.prompts * with_lengths.group_tokens * max(1, taken) * with_lengths.epochs
    return replace(with_lengths, learned=min(1.0, (packed.count - packed.sum) / all_tokens))


def _sampled(work: Work, gauges: Mapping[str, Gauge]) -> Lengths:
    """The lengths of a stage that samples, from its record.

    Prompts are as long as the engine's requests. The spread is the one at which the expected longest answer of a step
    is as long as the run's.
    """
    said, prompts, tail = (gauges.get(n, Gauge(0, 0)) for n in ("rollout/tokens", "engine/shared", "engine/straggler"))
    if not said.count:
        return work.lengths
    prompt = max(1, round(prompts.count / said.count)) if prompts.count else work.lengths.prompt
    mean = max(1.0, said.mean)
    even = Lengths(prompt=prompt, mean=mean, most=max(work.lengths.most, round(mean)))
    # The smallest spread of a fine grid whose longest answer is nearest. It is no search by halves, because answers are
    # cut at a limit: from some spread on the longest answer of a wider one is no longer.
    longest = tail.mean * mean if tail.count else mean
    spreads = (replace(even, cv=i / 50) for i in range(201))
    return min(spreads, key=lambda x: abs(x.longest(work.sequences) - longest))


def largest_step(steps: Iterable[Step]) -> list[Step]:
    """A list of the step whose learner computed the most tokens, at which memory is compared; empty without any."""
    counted = [s for s in steps if PACKED in s.gauges]
    return sorted(counted, key=lambda s: s.gauges[PACKED].sum - s.gauges[PACKED].count)[:1]  # minus what was computed


def memory_terms(place: Place, steps: Sequence[Step], held: float) -> list[Compared]:
    """The peak of memory in each role and phase, predicted and measured, less what was `held` before the model was."""
    out: list[Compared] = []
    for name, instants in PHASES.items():
        measured = [s.memory[name] for s in steps if name in s.memory]
        if not measured:
            continue
        # A run measures resident bytes, or those that torch's allocator gave out; and of a phase the peak, so it is
        # compared with the largest of its instants.
        counted = {i: place.total(i) - (place.slack(i) if place.accelerator else 0.0) for i in instants}
        at = max(instants, key=lambda i: counted[i])
        out.append(Compared(name, counted[at], max(measured) - held, tuple(place.held(at)), at))
    return out


def time_terms(timed: Throughput, steps: Sequence[Step]) -> list[Compared]:
    """The time of each role and of the step, predicted and measured. Measured times are medians over steps."""
    # The first step is left out where there are others: it also compiles, and makes the checks of a first step.
    steps = steps[1:] if len(steps) > 1 else steps
    times = timed.times
    if timed.topology == "asynchronous":
        # The clock's rollout is the time that the learner waits for groups. Verdicts come with them.
        waits = max(0.0, timed.step - times.reference - times.learn - times.sync)
        times = replace(times, rollout=waits, reward=0.0)
    out: list[Compared] = []
    for role, parts in CLOCK.items():
        measured = [s.clock[role] for s in steps if role in s.clock]
        if measured:
            out.append(Compared(role, sum(getattr(times, p) for p in parts), statistics.median(measured)))
    return [*out, Compared("step", sum(x.predicted for x in out), step_seconds(steps))] if out else []


def step_seconds(steps: Sequence[Step]) -> float:
    """The median time of a step's roles together."""
    return statistics.median(sum(s.clock.get(role, 0.0) for role in CLOCK) for s in steps)


def time_factors(rows: Iterable[Compared]) -> dict[str, float]:
    """Measured / predicted for each role of a plan (`Assumed.factors`)."""
    ratios = {x.name: x.ratio for x in rows if x.name in CLOCK and 0 < x.ratio < float("inf")}
    return {part: ratios[role] for role, parts in CLOCK.items() if role in ratios for part in parts}
