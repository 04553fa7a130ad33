"""Learning from pairs beside TRL's `DPOTrainer` and `RewardTrainer`: the same model, the same pairs, the same updates.

    python -m benchmarks.speed.preference                       # all of it; half an hour on 2 calm cores
    python -m benchmarks.speed.preference --sizes 1m --what dpo --regimes heavy --repeats 9
    python -m benchmarks.speed.preference --memory              # only the memory of an update at 151 k ids
    python -m benchmarks.speed.preference --quick               # 1m, 8 pairs, 2 repeats, nothing written: does it run?
    python -m benchmarks.speed.preference --show                # the table of the last results

Each side is a process of its own that runs its library's whole stage (`preference_ours.py`, `preference_trl.py`):
rows, reference, update, its own records and checks. Ours runs at the shipped defaults with every check on, TRL at the
micro-batch that a search in the same run finds fastest by CPU seconds. The sides take updates in turns, and the ratios
are medians over the pairs of updates. Both must have the same gradient norm at each of the first updates.

Three contests: DPO where both sides pass the pairs through the reference at each update, DPO where both did so before
the first update, and a reward model. Tokens are those of prompts and completions of both sides of a pair, without
padding; a prompt counts twice, as it does for TRL.

Goals, set before the first run: tokens/s at heavy-tailed lengths at least 2 times TRL's at 1 M parameters and 1.3
times at 26 M, at equal lengths 1.1 times; at a vocabulary of 151 k a quarter of the memory of an update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.speed.grpo_work import REGIMES, SIZES, save_checkpoint
from benchmarks.speed.preference_table import table
from benchmarks.speed.preference_work import WHAT, PairJob, write_pairs
from benchmarks.speed.side import Worker, machine

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "preference.json"
PAIRS: Mapping[str, int] = {"1m": 64, "26m": 16}
"""Pairs of an update."""
MICROS = (4, 8, 16, 32, 64)
SMALLER = (2, 1)
NORMS = 1e-3
"""Largest relative difference of the gradient norms of the two sides."""
FIRST = 2
"""Updates at which the norms are compared: the second one follows from the first."""
MEMORY = "1m"
"""The size whose memory is measured, with `VOCABULARY` rows in its embedding in place of 1024."""
VOCABULARY = 151_936
MEMORY_PAIRS = 8
PEERS = ("torch", "transformers", "trl", "accelerate", "numpy")


def worker(name: str, job: PairJob, folder: Path) -> Worker:
    command = [sys.executable, "-m", f"benchmarks.speed.preference_{name}", job.dump()]
    return Worker(name, command, job.threads, folder / f"{name}.err")


def search(job: PairJob, folder: Path) -> list[dict[str, Any]]:
    """CPU seconds of TRL's update by micro-batch, fastest first: upwards from 4 pairs, then downwards, as long as it
    is at most a quarter slower than the fastest so far."""
    rows = list[dict[str, Any]]()
    with worker("trl", job, folder) as trl:
        for direction in ([m for m in MICROS if m <= job.pairs], list(SMALLER)):
            for micro in direction:
                trl.ask(do="configure", micro=micro)
                trl.ask(do="step")
                told = trl.timed(do="step")
                rows.append({"micro": micro, "seconds": told["seconds"], "cpu_seconds": told["cpu_seconds"]})
                print(f"    TRL at {micro} pairs a pass: {told['cpu_seconds']:.2f} CPU s", flush=True)
                if told["cpu_seconds"] > 1.25 * min(r["cpu_seconds"] for r in rows):
                    break
    return sorted(rows, key=lambda r: r["cpu_seconds"])


def alternate(job: PairJob, micro: int, repeats: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The updates of each side, in turns.

    Raises:
        SystemExit: their gradients differ.
    """
    with worker("ours", job, folder) as ours, worker("trl", job, folder) as trl:
        ours.listen()
        trl.ask(do="configure", micro=micro)
        sides = (ours, trl)
        first = {side.name: [side.timed(do="step") for _ in range(FIRST)] for side in sides}
        for a, b in zip(first["ours"], first["trl"], strict=True):
            if abs(a["norm"] / b["norm"] - 1) > NORMS:
                raise SystemExit(f"the sides have other gradients: norms {a['norm']} and {b['norm']}")
        told: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for turn in range(repeats):
            for side in sides:
                told[side.name].append(side.timed(do="step"))
            a, b = told["ours"][-1], told["trl"][-1]
            print(
                f"    {turn + 1}/{repeats}: {a['seconds']:.2f} s and {b['seconds']:.2f} s, CPU {a['cpu_seconds']:.2f}"
                f" and {b['cpu_seconds']:.2f} (others {max(a['others'], b['others']):.0%})",
                flush=True,
            )
    return told


def contest(size: str, what: str, regime: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One size, one loss, one table of lengths: search TRL's micro-batch, then alternate."""
    pairs = args.pairs or PAIRS[size]
    data = folder / f"{regime}-{pairs}.jsonl"
    tokens = write_pairs(data, regime, pairs)
    job = PairJob(what, str(folder), str(data), pairs, args.threads)
    print(f"\n{size} {what} {regime}: {pairs} pairs, {tokens:,} tokens", flush=True)
    searched = search(job, folder)
    told = alternate(job, searched[0]["micro"], args.repeats, folder)
    return {
        "size": size,
        "what": what,
        "regime": regime,
        "date": date.today().isoformat(),
        "threads": args.threads,
        "pairs": pairs,
        "tokens": tokens,
        "micro": searched[0]["micro"],
        "search": searched,
        "steps": told,
        **summary(told, tokens),
    }


def summary(told: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """Medians of each side, and of TRL's updates by ours."""
    sides = {
        name: {
            "median_s": statistics.median(r["seconds"] for r in rows),
            "cpu_s": statistics.median(r["cpu_seconds"] for r in rows),
            "tokens_per_s": tokens / statistics.median(r["seconds"] for r in rows),
            "others": statistics.mean(r["others"] for r in rows),
            "roles_s": {n: statistics.median(r["roles"].get(n, 0.0) for r in rows) for n in rows[0].get("roles", {})},
        }
        for name, rows in told.items()
    }
    both = list(zip(told["ours"], told["trl"], strict=True))
    ratio = {
        how: statistics.median(b[key] / a[key] for a, b in both)
        for how, key in (("wall", "seconds"), ("cpu", "cpu_seconds"))
    }
    spread = [min(b["seconds"] / a["seconds"] for a, b in both), max(b["seconds"] / a["seconds"] for a, b in both)]
    return {"sides": sides, "ratio": ratio, "spread": spread, "shared": told["ours"][-1]["shared"]}


def memory(what: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Resident MiB of the sides at a large vocabulary: before an update, at its highest, and the difference; TRL with
    one pair a pass, where it takes the least, and with four."""
    data = folder / "memory.jsonl"
    tokens = write_pairs(data, "heavy", MEMORY_PAIRS)
    job = PairJob(what, str(folder), str(data), MEMORY_PAIRS, args.threads)
    found = dict[str, dict[str, float]]()
    for name, micro in (("ours", 0), ("trl, 1 pair a pass", 1), ("trl, 4 pairs a pass", 4)):
        with worker(name.split(",")[0], job, folder) as side:
            if micro:
                side.ask(do="configure", micro=micro)
            else:
                side.listen()
            rows = [side.ask(do="step") for _ in range(2)][1:]
        found[name] = {
            "before_mb": max(r["before_mb"] for r in rows),
            "peak_mb": max(r["peak_mb"] for r in rows),
            "step_mb": max(r["peak_mb"] - r["before_mb"] for r in rows),
        }
        print(f"    {what}, {name}: {found[name]}", flush=True)
    ours = found["ours"]
    return {
        "what": what,
        "date": date.today().isoformat(),
        "pairs": MEMORY_PAIRS,
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "sides": found,
        "share": {
            name: {key: ours[key] / x[key] for key in ("peak_mb", "step_mb")}
            for name, x in found.items()
            if name != "ours"
        },
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--what", default=",".join(WHAT), help=f"comma-separated, of {', '.join(WHAT)}")
    parser.add_argument("--regimes", default=",".join(REGIMES), help=f"comma-separated, of {', '.join(REGIMES)}")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of updates (default: 5)")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of an update (default: 64 at 1m, 16 at 26m)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--memory", action="store_true", help="only the memory at a large vocabulary")
    parser.add_argument("--no-memory", action="store_true", help="all but that")
    parser.add_argument("--quick", action="store_true", help="1m, 8 pairs, 2 repeats; nothing is written")
    parser.add_argument("--show", action="store_true", help="the table of the last results; nothing is run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.pairs, args.repeats, args.no_memory = "1m", 8, 2, True
    for name, known in (("sizes", SIZES), ("what", WHAT), ("regimes", REGIMES)):
        asked = getattr(args, name).split(",")
        if unknown := [x for x in asked if x not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        setattr(args, name, asked)
    return args


def merged(kept: list[dict[str, Any]], new: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """New results, and older ones of contests that were not held."""
    whole = {tuple(c[k] for k in keys): c for c in (*kept, *new)}
    order = [list(SIZES), list(WHAT), list(REGIMES)][-len(keys) :] if len(keys) == 3 else [list(WHAT)]
    return sorted(whole.values(), key=lambda c: [o.index(c[k]) for o, k in zip(order, keys, strict=True)])


def write(contests: list[dict[str, Any]], memories: list[dict[str, Any]], out: Path, threads: int) -> dict[str, Any]:
    """The results file; after each contest, so that a run that is cut short leaves what it found."""
    kept = json.loads(out.read_text()) if out.exists() else {}
    found = {
        "machine": machine(threads),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PEERS}},
        "contests": merged(kept.get("contests", []), contests, ("size", "what", "regime")),
        "memory": merged(kept.get("memory", []), memories, ("what",)),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.show:
        print(table(json.loads(args.out.read_text())))
        return 0
    contests, memories = list[dict[str, Any]](), list[dict[str, Any]]()
    scratch = tempfile.TemporaryDirectory()
    out = Path(scratch.name) / "quick.json" if args.quick else args.out
    found: dict[str, Any] = {}
    with scratch:
        for size in () if args.memory else args.sizes:
            folder = Path(scratch.name) / size
            folder.mkdir()
            save_checkpoint(SIZES[size], folder)
            for what in args.what:
                for regime in args.regimes:
                    contests.append(contest(size, what, regime, args, folder))
                    found = write(contests, memories, out, args.threads)
        for what in () if args.no_memory else args.what:
            folder = Path(scratch.name) / "memory"
            folder.mkdir(exist_ok=True)
            save_checkpoint(SIZES[MEMORY], folder, rows=VOCABULARY)
            memories.append(memory(what, args, folder))
            found = write(contests, memories, out, args.threads)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
