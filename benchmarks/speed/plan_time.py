"""Step times of configurations as they ran on this machine, beside a plan after `posttrain plan --probe`.

    python -m benchmarks.speed.plan_time  # all configurations of plan_memory, each in a process of its own
    python -m benchmarks.speed.plan_time --only dpo     # those whose words contain this
    python -m benchmarks.speed.plan_time --again        # prints the table of what was measured

A step is the median of ten, the first one left out, in wall seconds and in the process's CPU seconds; spread is the
distance of its quartiles in medians. The ratio is estimate / CPU seconds, which other programs of the machine change
less. The probe runs before each configuration, in
the same process, with its threads, so both see the same machine; the load of the machine is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.speed.plan_memory import CASES, shape_of_case, words
from benchmarks.speed.plan_work import REWARD, Case, write_rows
from benchmarks.speed.side import machine
from posttrain.api.plan_against import timed_stage
from posttrain.api.planned import REACHED
from posttrain.config import overrides
from posttrain.core.gauge import Gauge, Step, merge
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import Device, Hardware
from posttrain.plan.of_run.against import CLOCK, OWN, recorded_work
from posttrain.plan.throughput import Throughput
from posttrain.plan.work import work_of
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader

RESULTS = Path(__file__).parent / "results" / "plan_time.json"
STEPS = 11
READ = ("learner/shared", "rollout/tokens", "engine/shared", "engine/straggler", "sft/tokens", "preference/tokens",
        "ranking/tokens")  # fmt: skip
"""Gauges that say the sizes of a step."""


def played(case: Case) -> dict[str, Any]:
    """One configuration: the probe, then a run. In a process of its own."""
    import torch

    import posttrain
    from benchmarks.speed.grpo_work import save_checkpoint
    from posttrain.api.machine_speed import probe

    torch.set_num_threads(1)
    clock: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = made
        figures = probe()
        save_checkpoint(case.size, folder / "model", positions=8192, rows=case.vocabulary)
        write_rows(folder / "rows.jsonl", case, 64)
        (folder / "reward.py").write_text(REWARD)
        settings = case.overrides(str(folder / "model"), str(folder / "rows.jsonl"), STEPS)
        note = lambda step: clock.append((time.perf_counter(), time.process_time()))  # noqa: E731
        posttrain.run(case.recipe, *settings, out=folder / "run", quiet=True, on_step=note)
        steps = run_reader.steps(folder / "run")
    walls, cpus = ([b[i] - a[i] for a, b in pairwise(clock)] for i in (0, 1))
    low, middle, high = statistics.quantiles(walls, n=4)
    times = {"wall": middle, "cpu": statistics.median(cpus), "spread": (high - low) / middle}
    roles = {r: statistics.median(s.clock.get(r, 0.0) for s in steps[1:]) for r in (*CLOCK, *OWN)}
    gauges = {n: [g.sum, g.count] for n, g in merge(*(s.gauges for s in steps)).items() if n in READ}
    speed = {k: figures[k] for k in ("memory", "flops", "bandwidth", "latency")}
    return {"case": asdict(case), **times, "roles": roles, "gauges": gauges, "steps": len(steps),
            "load": os.getloadavg()[0], "probe": speed}  # fmt: skip


def plan(row: dict[str, Any]) -> Throughput:
    """The plan of a row, with its lengths and the machine as it was probed."""
    case = case_of(row)
    run = overrides.apply(recipe(case.recipe), case.overrides("model", "rows.jsonl"))
    stage = run.stages[-1]
    base = work_of(run, stage, shape_of_case(case), Lengths(prompt=case.prompt, mean=case.answer, most=case.answer))
    gauges = {n: Gauge(*g) for n, g in row["gauges"].items()}
    parts = {n: Gauge(g.sum / row["steps"], g.count / row["steps"]) for n, g in gauges.items()}
    steps = [Step(stage.name, i, i, parts) for i in range(row["steps"])]
    kept = row["probe"]
    device = Device(kept["memory"], kept["flops"], kept["bandwidth"], "probed", kept["bandwidth"], accelerator=False)
    where = Hardware("here", device, compute=REACHED, reading=1.0, latency=kept["latency"])
    return timed_stage(run, stage, recorded_work(base, steps), where)


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{**row["case"], "more": tuple(row["case"]["more"])})


def measure(case: Case) -> dict[str, Any]:
    """The same in another process."""
    program = [sys.executable, "-m", "benchmarks.speed.plan_time", "--case", json.dumps(asdict(case))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise RuntimeError(f"{words(case)}: {done.stderr[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))


def table(rows: list[dict[str, Any]]) -> list[float]:
    """Print the rows; returns the ratios of plan and CPU seconds."""
    ratios: list[float] = []
    for row in rows:
        t, scale = plan(row).times, row["cpu"] / row["wall"]
        ratios.append(t.total / row["cpu"])
        told = {"rollout": t.rollout + t.reward, "score": t.reference, "learn": t.learn}
        parts = [f"{x / (scale * m):.2f}" if (m := row["roles"].get(r, 0)) and x else "-" for r, x in told.items()]
        cells = (words(case_of(row)), f"{row['wall']:.2f}", f"{row['cpu']:.2f}", f"{row['spread']:.2f}",
                 f"{t.total:.2f}", f"{ratios[-1]:.2f}", *parts, f"{row['load']:.1f}")  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    print(f"estimate / CPU seconds: {min(ratios):.2f}, median {statistics.median(ratios):.2f}, {max(ratios):.2f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose words contain this")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        told = json.loads(args.case)
        print("RESULT " + json.dumps(played(Case(**{**told, "more": tuple(told["more"])}))))
        return 0
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    found = {words(case_of(r)): r for r in told["rows"]}
    for case in CASES:
        if not args.again and args.only in words(case):
            found[words(case)] = measure(case)
            rows = [found[w] for w in map(words, CASES) if w in found]
            about = {"date": date.today().isoformat(), "machine": machine(1), "torch": version("torch")}
            RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            table([found[words(case)]])
    table([found[w] for w in map(words, CASES) if w in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
