"""Which suites a landing runs: a function of the table, of what is known to have run, of what changed, and of a seed.

Two promises hold together. *Each suite runs at least at every fourth landing:* one that the last three did not run is
due and runs, whatever it takes. *The time is kept:* each landing takes at least a quarter of all sampled seconds in
turn, the longest not run first (what is due among it). What three landings took in turn is not due at the fourth, so at
most a quarter ever is. What is left of the time goes to suites whose own files changed, then to those that only common
files changed for, then to any, in an order that the seed draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scripts.ci.suites import Inputs, Suite

EVERY = 4
"""A suite runs at least once in so many landings."""
NEVER = 10**6


@dataclass(frozen=True)
class Known:
    """When a suite last ran, and what it depended on then."""

    landing: int
    inputs: Inputs


@dataclass(frozen=True)
class Choice:
    suite: Suite
    why: str


@dataclass(frozen=True)
class Plan:
    landing: int
    seed: int
    runs: tuple[Choice, ...]
    left: tuple[Choice, ...]
    """What does not run, and since when."""

    @property
    def seconds(self) -> float:
        return sum(c.suite.seconds for c in self.runs)

    @property
    def names(self) -> set[str]:
        return {c.suite.name for c in self.runs}


def place(seed: int, name: str) -> bytes:
    """Where a suite stands in the order that this seed draws."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def choose(
    suites: Sequence[Suite],
    known: Mapping[str, Known],
    inputs: Mapping[str, Inputs],
    landing: int,
    seed: int,
    budget: float,
) -> Plan:
    """The plan of one landing; `known` speaks of the landings before it."""
    sampled = [s for s in suites if not s.always]
    age = {s.name: landing - known[s.name].landing if s.name in known else NEVER for s in sampled}
    near = {s.name for s in sampled if s.name not in known or known[s.name].inputs.near != inputs[s.name].near}
    far = {s.name for s in sampled if s.name in known and known[s.name].inputs != inputs[s.name]} - near
    drawn = sorted(sampled, key=lambda s: place(seed, s.name))
    why = {s.name: "always" for s in suites if s.always}
    seconds = {s.name: s.seconds for s in suites}

    def taken(names: Iterable[str]) -> float:
        return sum(seconds[n] for n in names)

    for s in drawn:
        if age[s.name] >= EVERY:
            why[s.name] = "due: new" if age[s.name] >= NEVER else f"due: last ran {age[s.name]} landings ago"
    in_turn = taken(s.name for s in sampled if s.name in why)
    for s in sorted(drawn, key=lambda s: (-age[s.name], s.name not in near)):
        if s.name not in why and in_turn < taken(s.name for s in sampled) / EVERY:
            why[s.name] = f"its turn: {_left(age[s.name], s.name in near, s.name in far)}"
            in_turn += s.seconds
    for word in sorted({s.one for s in sampled if s.one}):
        group = [s for s in drawn if s.one == word]
        if not any(s.name in why for s in group):
            why[max(group, key=lambda s: age[s.name]).name] = f"one of {word} always runs"
    for names, reason in ((near, "changed"), (far, "common files changed"), (set(age), "drawn")):
        for s in drawn:
            if s.name in names and s.name not in why and taken(why) + s.seconds <= budget:
                why[s.name] = reason
    left = tuple(Choice(s, _left(age[s.name], s.name in near, s.name in far)) for s in suites if s.name not in why)
    return Plan(landing, seed, tuple(Choice(s, why[s.name]) for s in suites if s.name in why), left)


def all_of(suites: Sequence[Suite], seed: int) -> Plan:
    """`make everything`."""
    return Plan(0, seed, tuple(Choice(s, "everything") for s in suites), ())


def _ago(age: int) -> str:
    return "ran at the last landing" if age == 1 else f"last ran {age} landings ago"


def _left(age: int, near: bool, far: bool) -> str:
    return _ago(age) + (
        ", changed since" if near else ", common files changed since" if far else ", nothing it reads changed since"
    )


def shortage(suites: Sequence[Suite], budget: float) -> float:
    """Seconds by which a landing could pass the budget though nothing is due; not above 0 where the promises hold
    together.

    At most a quarter of what is sampled and one suite more is taken in turn, and one of each `one`.
    """
    always = sum(s.seconds for s in suites if s.always)
    sampled = [s.seconds for s in suites if not s.always]
    ones = {s.one for s in suites if s.one}
    return (
        always
        + sum(sampled) / EVERY
        + max(sampled, default=0)
        + sum(max(s.seconds for s in suites if s.one == w) for w in ones)
        - budget
    )


def words(plan: Plan, minutes: float) -> str:
    """The plan as it is printed."""
    width = max(len(c.suite.name) for c in (*plan.runs, *plan.left))
    lines = [f"  {c.suite.name:<{width}}  {c.suite.seconds:5.0f} s  {c.why}" for c in plan.runs]
    lines += [f"  {c.suite.name:<{width}}      -    not now: {c.why}" for c in plan.left]
    total = (
        f"{len(plan.runs)} of {len(plan.runs) + len(plan.left)} suites, about {plan.seconds:.0f} s on two quiet cores"
    )
    return "\n".join([*lines, f"  {total} (at most {60 * minutes:.0f}); seed {plan.seed}, of the tree"])
