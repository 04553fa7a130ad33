"""Asking ahead of learning, beside asking and learning in turn: the same work, tools and lengths, in one run.

    python -m benchmarks.speed.asynchrony                       # staleness 0, 1 and 2; about 8 minutes
    python -m benchmarks.speed.asynchrony --staleness 0,1,4 --rounds 1
    python -m benchmarks.speed.asynchrony --quick               # small and short: does it run?

A step is 32 prompts x 8 answers of 3 turns. After each of the first two turns a tool works for 50 ms to 2 s,
log-uniform; turns have log-normal lengths. Both come from tables, so that every side plays the same work. Without
staleness all answers of a step start at once, and the step waits for the slowest: its idle share is the time in which
nothing could be computed. With staleness K the answers of the K next steps are on their way meanwhile.

The limit of staleness K is min(K + 1, T / W): no more than K + 1 steps are on their way at once, and a step cannot take
less time than its work. T is the time of a synchronous step and W what of it was not idle. With more answers on their
way an engine's steps are fuller and their work is less than W, so a side may exceed the limit.

Each side is a process of its own, one after the other, several rounds; medians over the rounds. The first two steps of
a side are its warm-up, and the last K + 1 are left out, because nothing more is asked then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.speed.grpo_work import Size, save_checkpoint
from benchmarks.speed.side import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "asynchrony.json"
SIZE = Size(hidden=64, layers=2, heads=2, kv_heads=2, ffn=192, search=1, tries=1, repeats=1)
"""A model, and turns, so small that a synchronous step on two cores is idle for a little more than half of its time."""
QUICK = Size(hidden=64, layers=2, heads=2, kv_heads=2, ffn=128, search=1, tries=1, repeats=1)
POSITIONS = 1024
WARM = 2


def side(job: dict[str, Any], threads: int) -> dict[str, Any]:
    """One side, from its start to its end.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    command, asked = (
        [sys.executable, "-m", "benchmarks.speed.asynchrony_side"],
        json.dumps(job | {"threads": threads}) + "\n",
    )
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=HERE.parents[1])
    if done.returncode:
        raise RuntimeError(f"staleness {job['staleness']} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measured(told: dict[str, Any]) -> dict[str, float]:
    """Seconds a step in the steady part of a side, what of it was idle, and how old its tokens were."""
    rows = told["rows"][WARM - 1 : len(told["rows"]) - told["job"]["staleness"]]
    steps, first, last = len(rows) - 1, rows[0], rows[-1]
    seconds = (last["at"] - first["at"]) / steps
    idle = (last["idle"] - first["idle"]) / steps
    return {
        "seconds": seconds,
        "idle": idle,
        "work": seconds - idle,
        "cpu": (last["cpu"] - first["cpu"]) / steps,
        "behind": statistics.mean(r["gauges"].get("rollout/versions_behind", 0.0) for r in rows[1:]),
        "most_behind": max(r["gauges"].get("rollout/most_behind", 0.0) for r in rows),
        "steps": steps,
    }


def summary(rounds: dict[int, list[dict[str, float]]]) -> list[dict[str, float]]:
    """Medians by staleness, beside the synchronous side of the same rounds."""
    sync = {n: statistics.median(r[n] for r in rounds[0]) for n in ("seconds", "work")}
    out = list[dict[str, float]]()
    for staleness, found in sorted(rounds.items()):
        row = {n: statistics.median(r[n] for r in found) for n in found[0]}
        limit = min(staleness + 1, sync["seconds"] / sync["work"])
        faster = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(rounds[0], found, strict=True))
        more = {"staleness": staleness, "idle_share": row["idle"] / row["seconds"], "faster": faster}
        out.append(row | more | {"limit": limit, "of_limit": faster / limit})
    return out


def table(rows: list[dict[str, float]]) -> str:
    lines = [
        "| staleness | s a step | work | idle | faster | limit | of the limit | steps behind, mean | most |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['staleness']} | {r['seconds']:.2f} | {r['work']:.2f} | {r['idle_share']:.0%} | {r['faster']:.2f}x |"
            f" {r['limit']:.2f} | {r['of_limit']:.0%} | {r['behind']:.2f} | {r['most_behind']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="0,1,2", help="comma-separated; 0 is always there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each side, warm-up included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small and short; the results file is left alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    wanted = sorted({0, *(int(k) for k in options.staleness.split(","))})
    small: dict[str, Any] = {"prompts": 2, "siblings": 4, "slots": 16} if options.quick else {}
    steps, rounds = (WARM + 4, 1) if options.quick else (options.steps, options.rounds)
    begun, found = time.perf_counter(), {k: list[dict[str, float]]() for k in wanted}
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_checkpoint(QUICK if options.quick else SIZE, Path(folder), POSITIONS)
        for n in range(rounds):
            for k in wanted:
                job = {"checkpoint": folder, "staleness": k, "steps": steps + 2 * k, "seed": n} | small
                found[k].append(measured(side(job, options.threads)))
                r = found[k][-1]
                print(
                    f"  {n + 1}/{rounds} staleness {k}: {r['seconds']:.2f} s a step, {r['idle']:.2f} idle", flush=True
                )
    rows = summary(found)
    print(f"\n{parameters:,} parameters, {options.threads} threads\n\n{table(rows)}")
    if not options.quick:
        told = {
            "date": date.today().isoformat(),
            "machine": machine(options.threads),
            "parameters": parameters,
            "rows": rows,
        }
        more = {"rounds": {str(k): v for k, v in found.items()}, "seconds": time.perf_counter() - begun}
        options.out.write_text(json.dumps(told | more, indent=1) + "\n")


if __name__ == "__main__":
    main()
