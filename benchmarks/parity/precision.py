"""How far sampler and learner differ in each number type, in real runs.

    OMP_NUM_THREADS=1 python -m benchmarks.parity.precision           # some minutes on one core
    OMP_NUM_THREADS=1 python -m benchmarks.parity.precision --dry     # print, write nothing

For each size and type a run of the recipe `arithmetic` learns for a few steps from demonstrations and then from reward.
Each reward step compares, token by token, the log-prob that the sampler drew with and the learner's, both with the same
weights. Gaps are in nats: the mean over tokens, the 99 % band of the first step, and the worst token. float16 keeps 11
bits of a number and bfloat16 keeps 8, so its gap should be about 1/8. Two more rows are float32 with
`deterministic=true`, and with `exact=true`, which makes sampler and learner equal bit for bit. Their price is in CPU
seconds of the whole run. On a CPU without a float16 unit torch computes in float32 and rounds each result; the numbers
are those of float16, the seconds are not. Writes benchmarks/parity/results/precision.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import posttrain
from posttrain.record import run_reader

RESULTS = Path(__file__).parent / "results" / "precision.json"
TYPES = ("float32", "bfloat16", "float16")
WAYS = ("deterministic", "exact")
SIZES = {
    "0.1 M": ("model.hidden=64", "model.layers=2", "model.ffn=192"),
    "0.5 M": ("model.hidden=96", "model.layers=4", "model.ffn=288"),
}
SHORT = (
    *("sft.steps=20", "rl.steps=3", "rl.prompts=8"),
    *("sft.eval=false", "rl.eval=false", "rl.eval_every=0", "threads=1"),
)
SEEDS = (0, 1)


def measured(folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """The gaps and seconds of one run."""
    begun = time.process_time()
    posttrain.run("arithmetic", *SHORT, *settings, out=folder, quiet=True)
    seconds = time.process_time() - begun
    steps = [s for s in run_reader.steps(folder) if s.stage == "rl"]
    gauges = [s.gauges for s in steps]
    return {
        "mean": sum(g["canary/logp_gap"].sum for g in gauges) / sum(g["canary/logp_gap"].count for g in gauges),
        "worst": max(g["canary/logp_gap_worst"].mean for g in gauges),
        "band": gauges[0]["mismatch/band"].mean,
        "overflowed": sum(g["optim/overflowed"].sum for g in gauges if "optim/overflowed" in g),
        "cpu_seconds": seconds,
    }


def over_seeds(folder: Path, settings: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Means over the seeds; the worst token of all of them."""
    every = [measured(folder / str(seed), (*settings, f"seed={seed}")) for seed in seeds]
    out = {name: sum(one[name] for one in every) / len(every) for name in every[0]}
    return out | {"worst": max(one["worst"] for one in every), "overflowed": sum(one["overflowed"] for one in every)}


def write(rows: list[dict[str, Any]], seeds: int) -> None:
    unit = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
    RESULTS.write_text(json.dumps({**about, "float16_unit": unit, "seeds": seeds, "rows": rows}, indent=1) + "\n")


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="one seed, the smaller size; write nothing")
    dry = parser.parse_args(args).dry
    sizes, seeds = (dict(list(SIZES.items())[:1]), SEEDS[:1]) if dry else (SIZES, SEEDS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        measured(Path(folder, "first"), SIZES["0.1 M"])  # imports and kernels are paid for by no row
        for size, settings in sizes.items():
            found = {
                dtype: over_seeds(Path(folder, size, dtype), (*settings, f"model.dtype={dtype}"), seeds)
                for dtype in TYPES
            }
            found |= {way: over_seeds(Path(folder, size, way), (*settings, f"{way}=true"), seeds) for way in WAYS}
            ratio = found["bfloat16"]["mean"] / found["float16"]["mean"]
            price = {way: found[way]["cpu_seconds"] / found["float32"]["cpu_seconds"] for way in WAYS}
            rows.append({"size": size, "found": found, "bfloat16_over_float16": ratio, "price": price})
            for dtype, one in found.items():
                print(
                    f"{size:>6} {dtype:<13} mean {one['mean']:.1e}  band {one['band']:.1e}  worst {one['worst']:.1e}"
                    f"  run {one['cpu_seconds']:.1f} s"
                )
            costs = ", ".join(f"{way} {times:.2f}" for way, times in price.items())
            print(f"{size:>6} bfloat16 / float16 = {ratio:.1f}; times the CPU seconds of float32: {costs}", flush=True)
            if not dry:
                write(rows, len(seeds))


if __name__ == "__main__":
    main()
