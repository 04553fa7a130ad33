"""Learning with tools and verifiers, from a start that mostly fails: the same recipes that `posttrain run` knows, three
seeds each.

    python -m benchmarks.learning.agents                                   # all of it; about an hour on 2 cores
    python -m benchmarks.learning.agents --only calculator --seeds 0 --dry
    python -m benchmarks.learning.agents --add                             # only what the results file lacks

`calculator` is also run with the mask planted off: what the tool shows counts as said by the policy, so that it is
learned from (fault=observation_unmasked). The canaries stop that run at its first step, which is checked first; then
they are switched off, here and nowhere else, to see what such a run would have come to. Writes
docs/research/agents-table.md and benchmarks/learning/results/agents.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import posttrain
from benchmarks.trust.blind import unwatched
from posttrain import faults
from posttrain.config.run import Reinforce
from posttrain.recipe.recipes import recipe
from posttrain.system.errors import InvariantError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/agents.json"
UNMASKED = "observation_unmasked"
TARGETS = {"calculator": (0.3, 0.9), "shop": (0.3, 0.8), "programs": (0.3, 0.8)}
"""At most, before reinforcement; at least, after it."""
LOSS = 0.2
"""How much lower the unmasked run must end."""


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    arm: str
    """`masked`, or `unmasked`."""
    seed: int
    before: float
    after: float
    low: float
    steps: int
    seconds: float
    stopped: str = ""
    """What stopped the same run while the canaries watched."""


def stopped(run: Any, start: Path, folder: Path) -> str:
    """What the canaries say of the unmasked run, which they must stop."""
    try:
        with faults.planted(UNMASKED):
            posttrain.run(
                replace(run, model=replace(run.model, path=str(start)), stages=run.stages[1:]), out=folder, quiet=True
            )
    except InvariantError as error:
        return str(error).split(":")[0][:120]
    raise SystemExit(f"fault {UNMASKED} was planted in {run.recipe} and nothing stopped the run")


def play(task: str, seed: int, arms: tuple[str, ...], scratch: Path) -> list[Row]:
    """One start, and each arm from it."""
    run = replace(recipe(task), seed=seed)
    sft = posttrain.run(replace(run, stages=run.stages[:1]), out=scratch / f"{task}-{seed}-sft", quiet=True)
    start = posttrain.export(sft.folder, scratch / f"{task}-{seed}-start")
    rows: list[Row] = []
    for arm in arms:
        why = stopped(run, start, scratch / f"{task}-{seed}-stopped") if arm == "unmasked" else ""
        begun = time.perf_counter()
        with (
            unwatched() if arm == "unmasked" else nullcontext(),
            faults.planted(UNMASKED if arm == "unmasked" else None),
        ):
            only = replace(run, model=replace(run.model, path=str(start)), stages=run.stages[1:])
            done = posttrain.run(only, out=scratch / f"{task}-{seed}-{arm}", quiet=True)
        (stage,) = done.stages
        assert isinstance(run.stages[1], Reinforce) and stage.accuracy is not None and stage.before is not None
        rows.append(
            Row(
                task,
                arm,
                seed,
                stage.before,
                stage.accuracy[0],
                stage.accuracy[1],
                stage.steps,
                time.perf_counter() - begun,
                why,
            )
        )
        print(
            f"{task} {arm} seed {seed}: {stage.before:.3f} -> {stage.accuracy[0]:.3f} ({rows[-1].seconds:.0f} s)",
            flush=True,
        )
    return rows


def verdicts(rows: list[Row]) -> list[tuple[str, str, bool]]:
    """(claim, measured, whether it holds)."""
    out: list[tuple[str, str, bool]] = []
    for task, (low, high) in TARGETS.items():
        mine = [r for r in rows if r.task == task and r.arm == "masked"]
        if mine:
            before, after = max(r.before for r in mine), min(r.after for r in mine)
            out.append(
                (
                    f"{task}: from <= {low:g} to >= {high:g} in every seed",
                    f"{before:.3f}, {after:.3f}",
                    before <= low and after >= high,
                )
            )
    masked = {r.seed: r.after for r in rows if r.task == "calculator" and r.arm == "masked"}
    off = {r.seed: r.after for r in rows if r.arm == "unmasked"}
    if gaps := [masked[s] - off[s] for s in off if s in masked]:
        out.append(
            (
                f"calculator unmasked: at least {LOSS:g} lower in every seed",
                f"{min(gaps):+.3f} at least",
                min(gaps) >= LOSS,
            )
        )
    return out


def page(rows: list[Row]) -> str:
    """docs/research/agents-table.md."""
    lines = [
        "# Learning with tools and verifiers",
        "",
        (
            "For people who train with tools. After this page you know what the shipped tasks reach with"
            " each arm, and how surely."
        ),
        "",
        (
            "Held-out accuracy at temperature 1 before and after reinforcement, from starts that imitate mostly wrong"
            " demonstrations; tiny models"
        ),
        (
            "built on the spot, one CPU thread. `low` is the lower end of the 95 % interval. Written by `python"
            " benchmarks/learning/agents.py`; the runs are"
        ),
        "the shipped recipes (`posttrain run calculator`, `shop`, `programs`).",
        "",
        "| task | arm | seed | before | after | low | steps | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r.task} | {r.arm} | {r.seed} | {r.before:.3f} | {r.after:.3f} | {r.low:.3f} | {r.steps} |"
            f" {r.seconds:.0f} |"
            for r in rows
        ),
        "",
        "| claim | measured | |",
        "|---|---:|---|",
        *(
            f"| {claim} | {measured} | {'holds' if holds else 'does not hold'} |"
            for claim, measured, holds in verdicts(rows)
        ),
        "",
    ]
    if why := sorted({r.stopped for r in rows if r.stopped}):
        lines += [
            (
                "`unmasked` plants a bug: what the tool shows counts as said by the policy. In a real run the canaries"
                " stop it before its first"
            ),
            f'update ("{why[0]}..."); for this table they were switched off.',
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default=",".join(TARGETS), help=f"comma-separated, of {', '.join(TARGETS)}")
    parser.add_argument(
        "--arms", default="masked,unmasked", help="of masked, unmasked; the second is for calculator alone"
    )
    parser.add_argument("--dry", action="store_true", help="print the table, write nothing")
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of the results file and run only what is missing there"
    )
    args = parser.parse_args()
    if unknown := [t for t in args.only.split(",") if t not in TARGETS] + [
        a for a in args.arms.split(",") if a not in ("masked", "unmasked")
    ]:
        parser.error(f"unknown: {', '.join(unknown)}")
    rows = [Row(**r) for r in json.loads(RESULTS.read_text())["rows"]] if args.add and RESULTS.exists() else []
    for task in args.only.split(","):
        for seed in (int(s) for s in args.seeds.split(",")):
            arms = tuple(a for a in args.arms.split(",") if a == "masked" or task == "calculator")
            missing = tuple(a for a in arms if not any((r.task, r.arm, r.seed) == (task, a, seed) for r in rows))
            if not missing:
                continue
            scratch = Path(tempfile.mkdtemp())
            try:
                rows += play(task, seed, missing, scratch)
            finally:
                shutil.rmtree(scratch)
            if not args.dry:
                rows.sort(key=lambda r: (list(TARGETS).index(r.task), r.arm, r.seed))
                (ROOT / "docs/research/agents-table.md").write_text(page(rows), encoding="utf-8")
                facts = {
                    "date": time.strftime("%Y-%m-%d"),
                    "python": platform.python_version(),
                    "rows": [asdict(r) for r in rows],
                }
                RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(page(rows))


if __name__ == "__main__":
    main()
