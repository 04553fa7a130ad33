"""Does an adapter learn what full weights learn? The RL stage of the ladder, both ways, from the same weights.

    python -m benchmarks.learning.lora                     # three seeds, about ten minutes on two calm cores
    python -m benchmarks.learning.lora --seeds 0 --dry     # one seed, print, write nothing

For each seed the ladder runs to the end of `cot`; its RL stage then trains all weights (as the recipe does) and, from
the same checkpoint, an adapter. Accuracy is on the ladder's held-out tasks. The learning rate of the adapter is ten
times the full one, which is what a real model's default is too; it was not searched. Beside it stand the numbers that
train, the bytes of a push and of a checkpoint, the seconds, and the memory. Writes results/lora.json.

Memory is resident memory. Each side's run is played in a process of its own, and `taken_mb` is its highest minus what
the process held before, torch, transformers and PEFT imported. A model of .1 M numbers is lost among them, so one
optimizer step of 26 M parameters is measured both ways too (`step_26m`, the trajectories of `learner.py`). There
`before_mb` has what the process keeps of the memory that the step before it freed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import posttrain
from benchmarks.speed.grpo_work import SIZES, Job, StepMemory, save_checkpoint
from benchmarks.speed.side import Worker
from posttrain.build.open_model import built_policy
from posttrain.engine.learner.learner import HFLearner
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import run_file

RESULTS = Path(__file__).parent / "results" / "lora.json"
TAUGHT = ("pretrain", "sft", "cot", "dpo", "sft_continued")
RANK = 16
FULL_LR = 5e-4
"""Learning rate of the recipe's RL stage."""
ADAPTER = (f"model.lora.rank={RANK}", f"rl.optimizer.lr={10 * FULL_LR:g}")
CLOSE = 0.03
"""Difference of accuracy that counts as the same."""
PROMPTS = 8
"""Of the step at 26 M, 8 siblings each."""


def taught(seed: int, folder: Path) -> Path:
    """The ladder up to the stage that RL begins with."""
    posttrain.run("ladder", f"seed={seed}", "dpo=none", "rl=none", "sft_continued=none", out=folder, quiet=True)
    return folder


def trained(base: Path, seed: int, folder: Path, *settings: str) -> dict[str, Any]:
    """The RL stage from these weights, and what it took, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_trained, base, seed, folder, settings).result()


def _trained(base: Path, seed: int, folder: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    import peft  # noqa: F401  # so that neither side's memory holds the import

    memory, begun = StepMemory(), time.monotonic()
    memory.begin()
    without = [f"{name}=none" for name in TAUGHT]
    result = posttrain.run("ladder", f"model={base}", *without, f"seed={seed}", *settings, out=folder, quiet=True)
    seconds, told = time.monotonic() - begun, memory.told()
    learner = HFLearner(built_policy(folder, run_file(folder).run))
    checkpoint = find(folder, "last").folder
    return {
        "accuracy": result.stages[-1].accuracy,
        "train": sum(p.numel() for p in learner.parameters().values()),
        "pushed_bytes": sum(s.tensor.numel() * s.tensor.element_size() for s in learner.shards()),
        "checkpoint_bytes": sum(f.stat().st_size for f in checkpoint.iterdir()),
        "seconds": round(seconds, 1),
        "peak_mb": round(told["peak_mb"], 1),
        "taken_mb": round(told["peak_mb"] - told["before_mb"], 1),
    }


def stepped(rank: int, folder: Path, threads: int = 1) -> dict[str, float]:
    """Memory of the second optimizer step of a 26 M model, when the optimizer has its state: what the process holds
    before it, and the highest in it. `rank` 0: all weights train."""
    job = Job(str(folder), "heavy", PROMPTS, threads, rank=rank)
    command = [sys.executable, "-m", "benchmarks.speed.learner_side", "ours", job.dump()]
    with Worker("ours", command, threads, folder / f"rank-{rank}.err") as side:
        side.ask(do="step")
        told = side.timed(do="step")
    held = ("before_mb", "peak_mb", "process_seconds")
    return {name: round(told[name], 1) for name in held} | {"step_mb": round(told["peak_mb"] - told["before_mb"], 1)}


def measured(seed: int, folder: Path) -> dict[str, Any]:
    base = taught(seed, folder / f"base-{seed}")
    full = trained(base, seed, folder / f"full-{seed}")
    lora = trained(base, seed, folder / f"lora-{seed}", *ADAPTER)
    apart = lora["accuracy"][0] - full["accuracy"][0]
    print(f"seed {seed}: full {full['accuracy'][0]:.3f}, adapter {lora['accuracy'][0]:.3f} ({apart:+.3f})", flush=True)
    return {"seed": seed, "full": full, "lora": lora, "difference": round(apart, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [measured(int(s), Path(scratch)) for s in args.seeds.split(",")]
        large = Path(scratch) / "26m"
        parameters = save_checkpoint(SIZES["26m"], large)
        step = {"parameters": parameters} | {what: stepped(n, large) for what, n in (("full", 0), ("lora", RANK))}
    within = all(r["difference"] >= -CLOSE for r in rows)
    told = {"date": str(date.today()), "adapter": ADAPTER, "within": CLOSE if within else None, "seeds": rows}
    told["step_26m"] = step
    print(json.dumps(told, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
