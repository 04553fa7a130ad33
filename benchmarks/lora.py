"""Does an adapter learn what full weights learn? The RL stage of the ladder, both ways, from the same weights.

    python -m benchmarks.lora                     # three seeds, about ten minutes on two calm cores
    python -m benchmarks.lora --seeds 0 --dry     # one seed, print, write nothing

For each seed the ladder runs to the end of `cot`; its RL stage then trains all weights (as the recipe does) and, from
the same checkpoint, an adapter. Accuracy is on the ladder's held-out tasks. The learning rate of the adapter is ten
times the full one, which is what a real model's default is too; it was not searched. Beside it stand the numbers that
train, the bytes of a push and of a checkpoint, and the seconds. Writes benchmarks/results/lora.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import posttrain
from posttrain.api.target import built_policy
from posttrain.core.checkpoint import find
from posttrain.core.reader import run_file
from posttrain.engine.learner import HFLearner

RESULTS = Path(__file__).parent / "results" / "lora.json"
TAUGHT = ("pretrain", "sft", "cot", "dpo", "sft_continued")
FULL_LR = 5e-4
"""Learning rate of the recipe's RL stage."""
ADAPTER = ("model.lora.rank=16", f"rl.optimizer.lr={10 * FULL_LR:g}")
CLOSE = 0.03
"""Difference of accuracy that counts as the same."""


def taught(seed: int, folder: Path) -> Path:
    """The ladder up to the stage that RL begins with."""
    posttrain.run("ladder", f"seed={seed}", "dpo=none", "rl=none", "sft_continued=none", out=folder, quiet=True)
    return folder


def trained(base: Path, seed: int, folder: Path, *settings: str) -> dict[str, Any]:
    """The RL stage from these weights, and what it took."""
    begun = time.monotonic()
    without = [f"{name}=none" for name in TAUGHT]
    result = posttrain.run("ladder", f"model={base}", *without, f"seed={seed}", *settings, out=folder, quiet=True)
    seconds = time.monotonic() - begun
    learner = HFLearner(built_policy(folder, run_file(folder).run))
    checkpoint = find(folder, "last").folder
    return {
        "accuracy": result.stages[-1].accuracy,
        "train": sum(p.numel() for p in learner.parameters().values()),
        "pushed_bytes": sum(s.tensor.numel() * s.tensor.element_size() for s in learner.shards()),
        "checkpoint_bytes": sum(f.stat().st_size for f in checkpoint.iterdir()),
        "seconds": round(seconds, 1),
    }


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
    within = all(r["difference"] >= -CLOSE for r in rows)
    told = {"date": str(date.today()), "adapter": ADAPTER, "within": CLOSE if within else None, "seeds": rows}
    print(json.dumps(told, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
