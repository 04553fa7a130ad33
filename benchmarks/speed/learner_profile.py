"""Where the time of the learner's step goes: one step of `learner.py`'s own side, by torch's profiler.

    python -m benchmarks.speed.learner_profile                  # 26 M parameters, half a minute on two calm cores
    python -m benchmarks.speed.learner_profile --size 1m --dry  # print, write nothing

Each operation's own time, without that of operations inside it, is counted for the part of the step that it belongs to.
Parts with matrix products have their operations per second too, as a share of a large product of the same threads timed
before and after. What is between operations is Python, and the profiler itself. Writes `profile` in
benchmarks/speed/results/learner.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.grpo_work import SIZES, Job, save_checkpoint
from benchmarks.speed.learner import RESULTS, needed_gflop
from benchmarks.speed.learner_side import Ours
from benchmarks.speed.side import machine, sgemm

PARTS: dict[str, tuple[str, ...]] = {
    "head": ("TiledHead",),
    "optimizer": ("Optimizer.step", "aten::_fused_adam", "aten::_foreach"),
    "attention": ("aten::scaled_dot_product", "aten::_scaled_dot_product", "ScaledDotProduct"),
    "shared beginnings and rows": ("_Padded", "_Joined", "SelectRows", "SpreadRows", "CollectRows", "LookedUp"),
    "norms, rotations, gate": ("RMSNorm", "Heads", "SwiGLU"),
}
"""Part of the step -> how the names of its operations, or of those around them, begin. The first part that fits counts.
The backward of a function is called after it."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def part_of(event: Any) -> str:
    """The part of the step that an operation belongs to, by its name and those of the operations around it."""
    names, at = list[str](), event
    while at is not None:
        names.append(at.name.removeprefix("autograd::engine::evaluate_function: "))
        at = at.cpu_parent
    for part, begins in PARTS.items():
        if any(name.startswith(begins) for name in names):
            return part
    return "matrix products of the layers" if event.name in PRODUCTS else "everything else"


def profiled(size: str, threads: int, prompts: int) -> dict[str, Any]:
    """One step, after two that are not counted."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(SIZES[size], Path(folder))
        job = Job(folder, "heavy", prompts, threads)
        side = Ours(job)
        plain = [_seconds(side) for _ in range(3)][-1]
        before = sgemm()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
            wall = _seconds(side)
        after = sgemm()
    rate = (before["wall"] + after["wall"]) / 2
    spent, gflop, names = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, float](float)
    for event in seen.events() or ():
        part = part_of(event)
        spent[part] += event.self_cpu_time_total / 1e6
        names[event.name] += event.self_cpu_time_total / 1e6
        if event.name in PRODUCTS:
            gflop[part] += (event.flops or 0) / 1e9
    spent["between operations"] = wall - sum(spent.values())
    parts = {
        part: {"seconds": s, "share": s / wall}
        | ({"gflop": gflop[part], "rate": gflop[part] / s / rate} if gflop[part] else {})
        for part, s in sorted(spent.items(), key=lambda x: -x[1])
    }
    return {
        "size": size,
        "date": date.today().isoformat(),
        "machine": machine(threads),
        "seconds": wall,
        "seconds_unprofiled": plain,
        "gemm_gflops": rate,
        "needed_gflop": needed_gflop(SIZES[size], job),
        "parts": parts,
        "longest": dict(sorted(names.items(), key=lambda x: -x[1])[:12]),
    }


def _seconds(side: Ours) -> float:
    begun = time.perf_counter()
    side.step(0)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="26m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, default=32, help="prompts, 8 siblings each (default: 32)")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    told = profiled(args.size, args.threads, args.prompts)
    roof = told["needed_gflop"] / told["gemm_gflops"]
    print(
        f"{args.size}: {told['seconds']:.2f} s ({told['seconds_unprofiled']:.2f} s before), the roofline {roof:.2f} s"
    )
    for part, found in told["parts"].items():
        of = f", {found['gflop']:.0f} GFLOP at {found['rate']:.0%} of a large product" if "rate" in found else ""
        print(f"  {part}: {found['seconds']:.3f} s, {found['share']:.1%}{of}")
    for name, seconds in told["longest"].items():
        print(f"    {seconds:.3f} s {name}")
    if not args.dry:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        kept = {row["size"]: row for row in (*found.get("profile", []), told)}
        found["profile"] = [kept[size] for size in SIZES if size in kept]
        RESULTS.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
