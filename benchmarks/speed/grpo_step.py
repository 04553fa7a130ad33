"""One GRPO step, side by side with TRL's `GRPOTrainer`: the same checkpoint, prompts, lengths, reward and optimizer.

    python -m benchmarks.speed.grpo_step            # all of it, about a quarter of an hour on 2 calm cores
    python -m benchmarks.speed.grpo_step --sizes 1m --regimes heavy --repeats 9
    python -m benchmarks.speed.grpo_step --quick                          # 1m, 8 prompts, 2 repeats: does it run?

Each side lives in a process of its own, so that peak memory is its own; the other one sleeps meanwhile. Steps
alternate (A B A B ...). Wall time is what counts; the share of the cores that other programs took meanwhile and the CPU
time of each side stand beside it, since a shared machine can make wall time mean little.

What is equal: 32 prompts x 8 siblings, temperature 1, no KL, one AdamW step, float32, the same threads. Lengths are
forced on both sides. OpenMP threads wait as the environment says (`side.Worker`), the same on both.
What differs: TRL runs at the fastest setting a search in the same run finds, ours at its shipped defaults with every
check on, and once more with `model.share_prefixes=false`, where each sibling's prompt is computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.grpo_table import show
from benchmarks.speed.grpo_work import PROMPT, REGIMES, SIBLINGS, SIZES, Job, lengths_PG, save_checkpoint
from benchmarks.speed.side import Worker, machine, sgemm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "grpo_step.json"
WARM = 4
"""Longest completion of TRL's warm-up step, so that warming up costs little."""
PEERS = ("torch", "transformers", "trl", "accelerate", "numpy")


def _worker(program: str, job: Job, errors: Path, name: str = "") -> Worker:
    return Worker(
        name or program, [sys.executable, "-m", f"benchmarks.speed.grpo_{program}", job.dump()], job.threads, errors
    )


def candidates(samples: int) -> list[dict[str, Any]]:
    """First round: the micro-batch, with one `generate` for all samples of the step."""
    return [{"micro": m, "generation": samples} for m in (256, 128, 64, 32, 16, 8) if m <= samples][:5]


def refinements(best: dict[str, Any], samples: int, regime: str) -> list[dict[str, Any]]:
    """Second round, from the best micro-batch: a static cache; where lengths differ, also what could waste less on the
    longest: smaller generation batches, and continuous batching."""
    static = best | {"cache": "static"}
    if regime == "equal":
        return [static]
    smaller = [{"micro": min(best["micro"], n), "generation": n} for n in (samples // 2, samples // 4)]
    return [static, *smaller, best | {"continuous": True}]


def search(job: Job, tries: int, errors: Path) -> list[dict[str, Any]]:
    """Step time of TRL at each candidate setting, fastest first: one short step to warm up, then the best of `tries`
    full ones."""

    def measured(how: dict[str, Any]) -> dict[str, Any]:
        worker.ask(do="configure", **how)
        worker.timed(do="step", at_most=WARM)
        told = min((worker.timed(do="step") for _ in range(tries)), key=lambda t: t["seconds"])
        print(f"    {_words(how)}: {told['seconds']:.2f} s (others {told['others']:.0%})", flush=True)
        return {"how": how, **{k: told[k] for k in ("seconds", "cpu_seconds", "roles", "others")}}

    samples = job.prompts * SIBLINGS
    with _worker("trl", job, errors) as worker:
        rows = [measured(how) for how in candidates(samples)]
        best = min(rows, key=lambda r: r["seconds"])["how"]
        rows += [measured(how) for how in refinements(best, samples, job.regime)]
    return sorted(rows, key=lambda r: r["seconds"])


def _words(how: dict[str, Any]) -> str:
    more = [f"{k} {v}" if v is not True else k for k, v in how.items() if k not in ("micro", "generation")]
    return ", ".join([f"micro-batch {how['micro']}", f"generation batch {how['generation']}", *more])


def scaled(how: dict[str, Any], searched: int, samples: int) -> dict[str, Any]:
    """A setting found on fewer samples: the micro-batch as it is, the generation batch as the same share of the
    step."""
    return how | {"generation": how["generation"] * samples // searched}


def contest(name: str, regime: str, args: argparse.Namespace, folder: Path, parameters: int) -> dict[str, Any]:
    """One size in one regime: search TRL's setting, then alternate the three sides."""
    size = SIZES[name]
    job = Job(str(folder / name), regime, args.prompts, args.threads)
    smaller = Job(job.checkpoint, regime, min(size.search, args.prompts), args.threads)
    print(f"\n{name} {regime}: searching TRL's fastest setting on {smaller.prompts * SIBLINGS} completions", flush=True)
    rows = search(smaller, size.tries, folder / "search.err")
    how = scaled(rows[0]["how"], smaller.prompts * SIBLINGS, job.prompts * SIBLINGS)
    repeats = args.repeats or size.repeats
    loaded, told, gemm = alternate(job, how, repeats, folder)
    lengths = lengths_PG(regime, job.prompts)
    spoken = int(lengths.sum())
    seen = lengths.size * PROMPT
    return {
        "size": name,
        "parameters": parameters,
        "regime": regime,
        "date": date.today().isoformat(),
        "prompts": args.prompts,
        "lengths": {
            "mean": float(lengths.mean()),
            "cv": float(lengths.std() / lengths.mean()),
            "max": int(lengths.max()),
            "spoken": spoken,
            "prompts": seen,
        },
        "gflop": (2 * spoken + 6 * (spoken + seen)) * parameters / 1e9,
        "gemm_gflops": gemm,
        "trl_setting": how,
        "search_samples": smaller.prompts * SIBLINGS,
        "search": rows,
        "loaded_mb": loaded,
        "steps": told,
        **summary(told, spoken),
    }


def alternate(
    job: Job, how: dict[str, Any], repeats: int, folder: Path
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]], list[dict[str, float]]]:
    """MiB of each side once loaded, its steps in turn, and the rate of a matrix product before each turn."""
    plain = replace(job, share=False)
    gemm: list[dict[str, float]] = []
    with (
        _worker("ours", job, folder / "ours.err") as ours,
        _worker("ours", plain, folder / "unshared.err", "unshared") as unshared,
        _worker("trl", job, folder / "trl.err") as trl,
    ):
        sides = (ours, unshared, trl)
        loaded = {side.name: side.listen()["now_mb"] for side in (ours, unshared)}
        loaded["trl"] = trl.ask(do="configure", **how)["now_mb"]
        for side in (ours, unshared):
            side.timed(do="step")
        trl.timed(do="step", at_most=WARM)
        told: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for turn in range(repeats):
            gemm.append(sgemm())
            for side in sides:
                told[side.name].append(side.timed(do="step"))
            last = [f"{side.name} {told[side.name][-1]['seconds']:.2f} s" for side in sides]
            others = max(told[side.name][-1]["others"] for side in sides)
            print(f"    {turn + 1}/{repeats}: {', '.join(last)} (others at most {others:.0%})", flush=True)
    return loaded, told, gemm


def summary(told: dict[str, list[dict[str, Any]]], spoken: int) -> dict[str, Any]:
    """Medians and minima per side, and the ratios of TRL to each of ours."""
    sides: dict[str, Any] = {}
    for side, steps in told.items():
        seconds = [s["seconds"] for s in steps]
        median, least = statistics.median(seconds), min(seconds)
        sides[side] = {
            "median_s": median,
            "min_s": least,
            "roles_median_s": {role: statistics.median(s["roles"][role] for s in steps) for role in steps[0]["roles"]},
            "roles_of_fastest_s": min(steps, key=lambda s: s["seconds"])["roles"],
            "cpu_s": statistics.median(s["cpu_seconds"] for s in steps),
            "tokens_per_s": spoken / median,
            "peak_mb": max(s["peak_mb"] for s in steps),
            "others": float(np.mean([s["others"] for s in steps])),
        }
    return {"sides": sides, "ratio": ratio(sides, told, "ours"), "ratio_unshared": ratio(sides, told, "unshared")}


def ratio(sides: dict[str, Any], told: dict[str, list[dict[str, Any]]], ours: str) -> dict[str, Any]:
    """How many times as long TRL takes as our side of this name."""
    a, b = sides[ours], sides["trl"]
    return {
        "median": b["median_s"] / a["median_s"],
        "min": b["min_s"] / a["min_s"],
        "cpu": b["cpu_s"] / a["cpu_s"],
        "pairs": [t["seconds"] / o["seconds"] for o, t in zip(told[ours], told["trl"], strict=True)],
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default=",".join(SIZES), help=f"comma-separated, of {', '.join(SIZES)} (default: all)"
    )
    parser.add_argument(
        "--regimes",
        default=",".join(REGIMES),
        help="comma-separated: equal (64 tokens each), heavy (log-normal, mean 40, cap 256)",
    )
    parser.add_argument("--repeats", type=int, default=0, help="alternations per size and regime (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step, 8 siblings each (default: 32)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="CPU threads of either side (default: all cores)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="1m only, 8 prompts, 2 repeats; the results file is left alone"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="where the JSON goes (default: benchmarks/speed/results/grpo_step.json)",
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.prompts, args.repeats = "1m", 8, 2
    args.sizes, args.regimes = args.sizes.split(","), args.regimes.split(",")
    if unknown := [n for n in args.sizes if n not in SIZES] + [n for n in args.regimes if n not in REGIMES]:
        parser.error(f"unknown: {', '.join(unknown)}. Sizes: {', '.join(SIZES)}; regimes: {', '.join(REGIMES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    import torch

    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(args.threads),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PEERS}},
        "work": {
            "siblings": SIBLINGS,
            "prompt_tokens": PROMPT,
            "temperature": 1.0,
            "kl": None,
            "optimizer_steps": 1,
            "dtype": "float32",
        },
        "contests": [],
    }
    begun = time.perf_counter()
    whole: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in args.sizes:
            (folder / name).mkdir()
            parameters = save_checkpoint(SIZES[name], folder / name)
            for regime in args.regimes:
                found["contests"].append(contest(name, regime, args, folder, parameters))
                found["seconds"] = time.perf_counter() - begun
                whole = conclude(found, None if args.quick else args.out)
    show(whole)
    return 0


def conclude(found: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """What was found so far with what spans the contests; written, so that a run that is cut short leaves what it
    found.

    Contests of the file that this run did not hold stay, with the date they have.
    """
    contests = (
        {(c["size"], c["regime"]): c for c in json.loads(out.read_text())["contests"]} if out and out.exists() else {}
    )
    contests |= {(c["size"], c["regime"]): c for c in found["contests"]}
    ordered = [contests[size, regime] for size in SIZES for regime in REGIMES if (size, regime) in contests]
    rates = [rate for c in ordered for rate in c["gemm_gflops"]]
    roofline = {"wall": max(r["wall"] for r in rates), "cpu": statistics.median(r["cpu"] for r in rates)}
    whole = found | {"contests": ordered, "sgemm_gflops": roofline}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole


if __name__ == "__main__":
    sys.exit(main())
