"""The learner's step beside TRL's loss path and a naive padded Hugging Face step, on the same heavy-tailed answers.

    python -m benchmarks.speed.learner                       # both sizes; a quarter of an hour on a calm machine
    python -m benchmarks.speed.learner --sizes 1m --repeats 9
    python -m benchmarks.speed.learner --sharing             # only: our step with and without shared prefixes
    python -m benchmarks.speed.learner --quick               # 1m, 4 prompts, 2 repeats, nothing written: does it run?
    python -m benchmarks.speed.learner --peer-python ENV/bin/python        # TRL lives in another environment

Each side is a process of its own (`learner_side.py`). Naive and TRL run at the micro-batch that a search in the same
run finds fastest by CPU seconds, ours at its defaults. Steps alternate, and the ratios are medians over the pairs. All
sides must have the same gradient norm at their first step.

Besides, our step is timed with and without shared prefixes, on prompts that are half of every sequence and have 16
siblings, where 1.88 times as many positions are computed without.

The share of the roofline counts needed operations only: three times a forward pass over the positions that differ
and are needed, and the head at spoken tokens. What is computed again, or twice for siblings, counts as nothing. It is
divided by a float32 matrix product of the same threads, timed before and after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.speed.grpo_work import PROMPT, SIBLINGS, SIZES, SYMBOLS, Job, Size, lengths_PG, save_checkpoint
from benchmarks.speed.learner_side import HALF, HALF_SIBLINGS, HALF_TOKENS, IDEAL
from benchmarks.speed.side import Worker, machine, sgemm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "learner.json"
SIDES = ("ours", "naive", "trl")
MICROS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NORMS = 2e-3
"""Largest relative difference of the gradient norms of two sides."""


def worker(name: str, job: Job, peer: str, folder: Path) -> Worker:
    python = peer if name == "trl" else sys.executable
    command = [python, "-m", "benchmarks.speed.learner_side", name, job.dump()]
    return Worker(name, command, job.threads, folder / f"{name}.err")


def fastest(side: Worker, samples: int) -> list[dict[str, Any]]:
    """CPU seconds of a step by micro-batch, fastest first: from 8 sequences up, then down, as long as it is at most a
    quarter slower than the fastest so far."""
    rows = list[dict[str, Any]]()
    side.ask(do="step", micro=8)
    for direction in ([m for m in MICROS if 8 <= m <= samples], [m for m in reversed(MICROS) if m < 8]):
        for micro in direction:
            told = side.ask(do="step", micro=micro)
            rows.append({"micro": micro, "cpu_seconds": told["process_seconds"], "peak_mb": told["peak_mb"]})
            print(f"    {side.name} micro-batch {micro}: {told['process_seconds']:.2f} CPU s", flush=True)
            if told["process_seconds"] > 1.25 * min(r["cpu_seconds"] for r in rows):
                break
    return sorted(rows, key=lambda r: r["cpu_seconds"])


def needed_gflop(size: Size, job: Job) -> float:
    """Operations of a step that cannot be avoided, in 10^9: forward and backward of the positions that differ. The last
    layer needs only keys and values of those whose hidden state is not read."""
    lengths = lengths_PG(job.regime, job.prompts)
    answers = lengths - 1  # an answer's last token predicts nothing
    unique, read = (int(answers.sum()) + job.prompts * begin for begin in (PROMPT, 1))
    head, before = size.hidden // size.heads, size.layers - 1
    seen_by_prompts = job.prompts * (before * PROMPT * (PROMPT + 1) / 2 + PROMPT)
    seen = seen_by_prompts + size.layers * float((answers * PROMPT + answers * (answers + 1) / 2).sum())
    keys = size.hidden * head * 2 * size.kv_heads
    others = size.hidden * head * 2 * size.heads + 3 * size.hidden * size.ffn
    layers = 2 * (size.layers * unique * keys + (before * unique + read) * others) + 4 * seen * size.heads * head
    return 3 * (layers + 2 * int(lengths.sum()) * size.hidden * (len(SYMBOLS) + 3)) / 1e9


def contest(name: str, args: argparse.Namespace, folder: Path, parameters: int) -> dict[str, Any]:
    """One size: search the peers' micro-batches, then alternate."""
    size = SIZES[name]
    job = Job(str(folder), "heavy", args.prompts, args.threads)
    fewer = Job(job.checkpoint, job.regime, min(args.prompts, 32 if name == "1m" else 8), job.threads)
    micro, searched = {"ours": 0}, dict[str, Any]()
    print(f"\n{name}: searching the fastest micro-batch on {fewer.prompts * SIBLINGS} trajectories", flush=True)
    for side in args.sides[1:]:
        with worker(side, fewer, args.peer_python, folder) as one:
            searched[side] = fastest(one, fewer.prompts * SIBLINGS)
            micro[side] = searched[side][0]["micro"]
    told: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    gemm = list[dict[str, float]]()
    running = {side: worker(side, job, args.peer_python, folder) for side in args.sides}
    norms = {side: one.ask(do="step", micro=micro[side])["norm"] for side, one in running.items()}
    if any(abs(n / norms["ours"] - 1) > NORMS for n in norms.values()):
        raise SystemExit(f"the sides have other gradients: norms {norms}")
    for turn in range(args.repeats):
        gemm.append(sgemm())
        for side, one in running.items():
            told[side].append(one.timed(do="step", micro=micro[side]))
        words = ", ".join(f"{side} {rows[-1]['process_seconds']:.2f}" for side, rows in told.items())
        print(f"    {turn + 1}/{args.repeats}: CPU s {words} (others {told['ours'][-1]['others']:.0%})", flush=True)
    gemm.append(sgemm())
    for one in running.values():
        one.__exit__()
    lengths = lengths_PG(job.regime, job.prompts)
    gflop, spoken = needed_gflop(size, job), int(lengths.sum())
    return {
        "size": name,
        "parameters": parameters,
        "date": date.today().isoformat(),
        "trajectories": lengths.size,
        "tokens": spoken + lengths.size * PROMPT,
        "spoken": spoken,
        "needed_gflop": gflop,
        "gemm_gflops": gemm,
        "micro": micro,
        "search": searched,
        "norms": norms,
        "steps": told,
        **summary(told, spoken + lengths.size * PROMPT, gflop, gemm, args.threads),
    }


def sharing(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One size: our step with and without shared prefixes, alternating, on prompts half as long as a sequence."""
    prompts = max(1, args.prompts * SIBLINGS // HALF_SIBLINGS)
    job = Job(str(folder), HALF, prompts, args.threads)
    told: dict[str, list[dict[str, Any]]] = {"ours": [], "unshared": []}
    running = {side: worker(side, replace(job, share=side == "ours"), sys.executable, folder) for side in told}
    norms = [one.ask(do="step")["norm"] for one in running.values()]
    if abs(norms[0] / norms[1] - 1) > NORMS:
        raise SystemExit(f"with and without shared prefixes the gradients differ: norms {norms}")
    for turn in range(args.repeats):
        for side, one in running.items():
            told[side].append(one.timed(do="step"))
        words = ", ".join(f"{side} {rows[-1]['process_seconds']:.2f}" for side, rows in told.items())
        print(f"    {name} sharing {turn + 1}/{args.repeats}: CPU s {words}", flush=True)
    for one in running.values():
        one.__exit__()
    pairs = list(zip(told["ours"], told["unshared"], strict=True))
    return {
        "size": name,
        "date": date.today().isoformat(),
        "trajectories": prompts * HALF_SIBLINGS,
        "tokens": 2 * HALF_TOKENS * prompts * HALF_SIBLINGS,
        "ideal": IDEAL,
        "steps": told,
        "ratio": {
            what: statistics.median(b[key] / a[key] for a, b in pairs)
            for what, key in (("wall", "seconds"), ("cpu", "process_seconds"))
        },
    }


def summary(
    told: dict[str, list[dict[str, Any]]], tokens: int, gflop: float, gemm: list[dict[str, float]], threads: int
) -> dict[str, Any]:
    """Medians of each side, of the pairs' ratios to ours, and ours against the roofline."""
    sides = {
        side: {
            "median_s": statistics.median(r["seconds"] for r in rows),
            "cpu_s": statistics.median(r["process_seconds"] for r in rows),
            "tokens_per_s": tokens / statistics.median(r["seconds"] for r in rows),
            "tokens_per_cpu_s": tokens / statistics.median(r["process_seconds"] for r in rows),
            "peak_mb": max(r["peak_mb"] for r in rows),
            "step_mb": max(r["peak_mb"] - r["before_mb"] for r in rows),
        }
        for side, rows in told.items()
    }
    ratio = {
        side: {
            what: statistics.median(b[key] / a[key] for a, b in zip(told["ours"], rows, strict=True))
            for what, key in (("wall", "seconds"), ("cpu", "process_seconds"))
        }
        for side, rows in told.items()
        if side != "ours"
    }
    around = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in pairwise(gemm)]
    shares = {
        side: {
            "wall": statistics.median(gflop / r["seconds"] / g["wall"] for r, g in zip(rows, around, strict=True)),
            "cpu": statistics.median(
                gflop / (r["process_seconds"] / threads) / g["cpu"] for r, g in zip(rows, around, strict=True)
            ),
        }
        for side, rows in told.items()
    }
    return {"sides": sides, "ratio": ratio, "roofline": shares}


def show(found: dict[str, Any]) -> None:
    for c in found["contests"]:
        print(f"\n{c['size']}: {c['trajectories']} trajectories, {c['tokens']:,} tokens, {c['date']}")
        for side, s in c["sides"].items():
            against = c["ratio"].get(side)
            more = f", {against['wall']:.2f}x ours by wall, {against['cpu']:.2f}x by CPU" if against else ""
            print(
                f"  {side:6} {s['tokens_per_s']:>9,.0f} tokens/s, {s['tokens_per_cpu_s']:>9,.0f} a CPU second, a step"
                f" takes {s['step_mb']:,.0f} MiB (peak {s['peak_mb']:,.0f}){more}; roofline"
                f" {c['roofline'][side]['cpu']:.0%} by CPU"
            )
    for c in found["sharing"]:
        print(
            f"\n{c['size']}: {c['trajectories']} trajectories of which the prompt is half, {c['date']}: without shared"
            f" prefixes a step takes {c['ratio']['wall']:.2f}x as long by wall, {c['ratio']['cpu']:.2f}x by CPU"
            f" ({c['ideal']:.2f}x as many positions)"
        )


def _with(kept: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New results, and older ones of the sizes that have none, in the order of the sizes."""
    whole = {c["size"]: c for c in (*kept, *new)}
    return [whole[name] for name in SIZES if name in whole]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma-separated; ours is always among them")
    parser.add_argument("--repeats", type=int, default=5, help="pairs (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts, 8 siblings each (default: 32)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--sharing", action="store_true", help="only our step with and without shared prefixes")
    parser.add_argument("--quick", action="store_true", help="1m, 4 prompts, 2 repeats; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.prompts, args.repeats = "1m", 4, 2
    args.sizes = args.sizes.split(",")
    args.sides = ["ours", *(s for s in args.sides.split(",") if s != "ours")]
    if unknown := [x for x in args.sizes if x not in SIZES] + [x for x in args.sides if x not in SIDES]:
        parser.error(f"unknown: {', '.join(unknown)}")
    if (
        "trl" in args.sides
        and not args.sharing
        and subprocess.run([args.peer_python, "-c", "import trl"], capture_output=True).returncode
    ):
        parser.error(
            f"{args.peer_python} has no TRL: pip install 'posttrain[bench]', give --peer-python, or --sides ours,naive"
        )
    import torch

    torch.set_num_threads(args.threads)
    begun, contests, shared = time.perf_counter(), list[dict[str, Any]](), list[dict[str, Any]]()
    for name in args.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            parameters = save_checkpoint(SIZES[name], Path(temporary))
            if not args.sharing:
                contests.append(contest(name, args, Path(temporary), parameters))
            shared.append(sharing(name, args, Path(temporary)))
    about = {
        "machine": machine(args.threads),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - begun,
    }
    kept = json.loads(args.out.read_text()) if args.out.exists() and not args.quick else {}
    found = about | {
        what: _with(kept.get(what, []), new)
        for what, new in (("contests", contests), ("sharing", shared), ("profile", list[dict[str, Any]]()))
    }
    if not args.quick:
        args.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
