"""Asynchronous runs beside their simulation: how long each role waits, and how old the tokens are.

    python -m benchmarks.speed.plan_asynchrony --jobs 3   # 9 runs, some nine minutes
    python -m benchmarks.speed.plan_asynchrony --quick    # small and short: does it run?
    python -m benchmarks.speed.plan_asynchrony --table    # simulate again what was measured

Each run has one engine in a process of its own (`placement=processes`, `engine.update=inflight`) and a learner with one
thread. Lengths of turns and the seconds of tools are drawn from tables. Tools and verifiers sleep, and the learner's
thread sleeps before each optimizer step as if it computed: so times are those of larger models, and other programs on
the machine change them little.

The simulator is given these tables, and what the run itself took for a pass of the engine, a step of the learner,
sending weights, and seeing to one turn. It is not given who waited, how old tokens were, or how long a step took. How a
pass grows with its answers is measured once, on a run in one process. It is scaled to each run: its engine's process
computed, or was ready to and had no core, for so many seconds, and made so many passes over so many answers.

Measured waiting of the learner is the time in which it waits for groups and its event loop has nothing to do. Of the
engine it is `engine/idle` of the run's record: the time in which it has no turn.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.speed.asynchrony import POSITIONS, SIZE, WARM, side
from benchmarks.speed.asynchrony_side import SideJob, lengths, waits
from benchmarks.speed.grpo_work import save_checkpoint
from benchmarks.speed.side import machine
from posttrain.plan.simulation.simulated_loop import SimulatedLoop
from posttrain.plan.simulation.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "plan_asynchrony.json"
STALENESS = (1, 2, 4)
WORK: Mapping[str, dict[str, Any]] = {
    "slow tools": {"turns": 3, "slowest": 6.0, "computes": 0.8},
    "slow learner": {"turns": 3, "slowest": 3.0, "computes": 4.0},
    "slow verifiers": {"turns": 1, "judge": 0.15, "judges": 2, "computes": 1.0},
}
COMMON = {"prompts": 8, "siblings": 8, "threads": 1, "apart": True, "update": "inflight", "slots": 64, "drawn": True}
STEPS, SIMULATED = 10, 16
IDLE, BEHIND = 0.05, (0.2, 0.1)
"""Bounds: of idle shares, and of the mean age, in steps and as a share of it; the larger one counts."""


def told_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """What one run measured: the times that the simulator is given, and what it is held to."""
    job, rows = told["job"], told["rows"]
    rows = rows[WARM + job["staleness"] : len(rows) - job["staleness"] - 1]
    pairs = list(pairwise(rows))
    steps, clocks = len(pairs), [b["clock"] for _, b in pairs]
    wall = (rows[-1]["at"] - rows[0]["at"]) / steps
    taking, waited = ((rows[-1]["taking"][i] - rows[0]["taking"][i]) / steps for i in (0, 1))
    learn = [b["at"] - a["at"] - (b["taking"][0] - a["taking"][0]) - b["clock"]["sync"] for a, b in pairs]
    turns = job["prompts"] * job["siblings"] * job["turns"]
    passes = sum(c["engine/steps"] for c in clocks)
    spoken = sum(c["engine/steps"] * c["engine/occupancy"] for c in clocks) * job["slots"]
    return {
        "staleness": job["staleness"],
        "steps": steps,
        "times": {
            "learn": [round(x, 5) for x in learn],
            "sync": fmean(c["sync"] for c in clocks),
            "install": fmean(c["sync/install"] for c in clocks),
            "handle": (taking - waited) / turns,
            "pass": ((rows[-1]["engines"] - rows[0]["engines"]) - sum(c["sync/install"] for c in clocks)) / passes,
            "in a pass": sum(c["engine/step"] for c in clocks) / passes,
            "answers": spoken / passes,
        },
        "measured": {
            "step": wall,
            "learner idle": waited / wall,
            "engine idle": fmean(c["engine/idle"] for c in clocks),
            "behind": fmean(b["gauges"]["rollout/versions_behind"] for _, b in pairs),
        },
    }


def shape_of_passes(told: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds of a pass without answers, and more for each answer: a line through the medians of its passes over few
    answers and over many."""
    ends = [[(n, s) for n, s in told["passes"] if low <= n <= high] for low, high in ((1, 4), (32, 64))]
    (x0, y0), (x1, y1) = ((fmean(n for n, _ in part), median(s for _, s in part)) for part in ends)
    each = (y1 - y0) / (x1 - x0)
    return y0 - each * x0, each


def simulated(work: Mapping[str, Any], shape: tuple[float, float], row: Mapping[str, Any]) -> dict[str, float]:
    """The run as the simulator plays it: the mean over seeds, each of as many steps as the run, after as many others.
    A loop with slow tools has not forgotten its start then: its later steps wait longer."""
    job = SideJob(checkpoint="", steps=0, **{**COMMON, **work, "staleness": row["staleness"]})
    fixed, each = shape
    t = row["times"]
    scale = t["pass"] / (fixed + each * t["answers"])
    count = job.prompts * job.siblings * job.turns
    loop = SimulatedLoop(
        prompts=job.prompts,
        siblings=job.siblings,
        staleness=job.staleness,
        slots=job.slots,
        lengths=lengths(count, job.mean).tolist(),
        passes=lambda n: scale * (fixed + each * n),
        learn=t["learn"],
        sync=t["sync"],
        install=t["install"],
        handle=t["handle"],
        turns=job.turns,
        waits=waits(count, job.slowest).tolist(),
        reward=job.judge,
        judges=job.judges,
    )
    found = [simulate(loop, row["steps"], seed) for seed in range(SIMULATED)]
    return {
        "step": fmean(o.step for o in found),
        "learner idle": fmean(o.idle["learner"] for o in found),
        "engine idle": fmean(o.idle["engines"] for o in found),
        "behind": fmean(o.behind for o in found),
    }


def beside(row: Mapping[str, Any], found: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """(measured, simulated) of what is compared."""
    return {name: (row["measured"][name], ours) for name, ours in found.items()}


def holds(compared: Mapping[str, tuple[float, float]]) -> bool:
    measured, ours = compared["behind"]
    idle = all(abs(a - b) <= IDLE for n, (a, b) in compared.items() if n.endswith("idle"))
    return idle and abs(measured - ours) <= max(BEHIND[0], BEHIND[1] * measured)


def table(told: Mapping[str, Any]) -> str:
    lines = [
        "| work | K | s a step | simulated | learner waits | simulated | engine idle | simulated | steps behind |"
        " simulated | within |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, rows in told["rows"].items():
        for row in rows:
            compared = beside(row, simulated(told["work"][name], told["shape"], row))
            cells = [
                f"{a:{f}} | {b:{f}}" for (a, b), f in zip(compared.values(), (".2f", ".1%", ".1%", ".2f"), strict=True)
            ]
            lines.append(
                f"| {name} | {row['staleness']} | {' | '.join(cells)} | {'yes' if holds(compared) else 'NO'} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short; the results file is left alone")
    parser.add_argument("--table", action="store_true", help="simulate again what was measured, and run nothing")
    parser.add_argument("--work", default=",".join(WORK), help="which of them, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once: they wait for most of their time")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    names = options.work.split(",")
    begun, load = time.perf_counter(), list(os.getloadavg())
    steps = 6 if options.quick else STEPS
    small = {"prompts": 4} if options.quick else {}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(SIZE, Path(folder), POSITIONS)
        here = {"checkpoint": folder, "staleness": 1, "steps": 6, **COMMON, "apart": False, "turns": 1, "mean": 64}
        shape = shape_of_passes(side(here, 1))
        jobs = [
            {"checkpoint": folder, "staleness": k, "steps": steps + WARM + 2 * k, **COMMON, **WORK[name], **small}
            for name in names
            for k in STALENESS
        ]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(lambda job: told_of(side(job, 1)), jobs))
    rows = {name: found[i * len(STALENESS) :][: len(STALENESS)] for i, name in enumerate(names)}
    told = {
        "date": date.today().isoformat(),
        "machine": machine(1),
        "load": load,
        "load_after": list(os.getloadavg()),
        "seconds": time.perf_counter() - begun,
        "shape": shape,
        "work": {name: {**WORK[name], **small} for name in names},
        "rows": rows,
    }
    print(table(told))
    if not options.quick:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
