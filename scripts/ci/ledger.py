"""Which suites ran at which landing (`.ci/ledger.json`), written before a landing by `make landing`, and verified by
CI.

CI sees one tree and nothing of earlier landings but what the tree says. So a landing's plan is written down in the
landing
itself: once it is in, that is the record of what it ran. CI computes the same plan from the records before it; where
the two differ (something changed after `make landing`, or nobody called it) the newest record counts for nothing, and
every suite runs that is not known to have run in the last three landings.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.ci.plan import EVERY, Known, Plan, choose
from scripts.ci.reach import seed
from scripts.ci.suites import Inputs, Table

LEDGER = Path(".ci/ledger.json")
KEPT = 2 * EVERY
"""Landings that are kept. Nothing older is asked for."""


@dataclass(frozen=True)
class Landing:
    """One landing: the seed of its tree, and of each suite it chose the digests of what that depended on."""

    landing: int
    seed: int
    ran: dict[str, str]


def parse(text: str) -> list[Landing]:
    """ValueError where it is no record."""
    try:
        found = [
            Landing(int(x["landing"]), int(x["seed"]), {str(k): str(v) for k, v in x["ran"].items()})
            for x in json.loads(text)
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a list of landings: {error!r}") from error
    if [x.landing for x in found] != sorted({x.landing for x in found}):
        raise ValueError("landings are not in order")
    return found


def written(landings: Sequence[Landing]) -> str:
    rows = [json.dumps({"landing": x.landing, "seed": x.seed, "ran": x.ran}) for x in landings[-KEPT:]]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def known(landings: Sequence[Landing]) -> dict[str, Known]:
    """The last run of each suite."""
    return {name: Known(x.landing, Inputs.read(inputs)) for x in landings for name, inputs in x.ran.items()}


def record(plan: Plan, table: Table) -> Landing:
    return Landing(
        plan.landing,
        plan.seed,
        {c.suite.name: str(table.inputs[c.suite.name]) for c in plan.runs if not c.suite.always},
    )


def current(table: Table) -> tuple[Plan, str]:
    """The plan of this tree, and what is wrong with its record ('' where it is right)."""
    path = table.root / LEDGER
    try:
        landings = parse(path.read_text())
    except (OSError, ValueError) as error:
        landings, trouble = [], f"{LEDGER} cannot be read ({error})"
    else:
        trouble = "" if landings else f"{LEDGER} is empty"
    if landings:
        last, before = landings[-1], known(landings[:-1])
        plan = choose(table.suites, before, table.inputs, last.landing, last.seed, table.budget)
        if record(plan, table) == last:
            return plan, ""
        trouble = f"the plan of landing {last.landing} in {LEDGER} is not of this tree"
    number = landings[-1].landing + since(table.root) if landings else 1
    plan = choose(table.suites, known(landings[:-1]), table.inputs, number, seed(table.root), table.budget)
    return (
        plan,
        (
            f"{trouble}: all that is not known to have run in the last {EVERY - 1} landings runs; call `make landing`"
            " and commit"
        ),
    )


def since(root: Path) -> int:
    """At most so many landings lie between the record and this tree: a landing is one commit at least."""
    commit = git(root, "log", "-1", "--format=%H", "--", str(LEDGER))
    count = git(root, "rev-list", "--count", f"{commit}..HEAD") if commit else ""
    shallow = git(root, "rev-parse", "--is-shallow-repository") != "false"
    return EVERY if shallow or not count.isdigit() else max(1, int(count))


def next_landing(table: Table, landed: str) -> tuple[list[Landing], Plan]:
    """The record with the plan of this tree, which goes on from what had landed at the commit `landed`.

    A draft that never landed is thereby forgotten. Landing 0 stands for all before there was a record.
    """
    text = git(table.root, "show", f"{landed}:{LEDGER}")
    landings = parse(text) if text else [x for x in parse((table.root / LEDGER).read_text()) if x.landing == 0]
    number = landings[-1].landing + 1 if landings else 1
    plan = choose(table.suites, known(landings), table.inputs, number, seed(table.root), table.budget)
    return [*landings, record(plan, table)], plan


def landed(root: Path) -> str:
    """The last landing's commit: the main branch of where this clone comes from, or what its branch began with."""
    if found := git(root, "rev-parse", "--verify", "--quiet", "origin/main"):
        return found
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    history = git(root, "log", "--walk-reflogs", "--format=%H", branch).split()
    return history[-1] if history else ""


def git(root: Path, *words: str) -> str:
    """What git says, '' where it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
