"""The ladder's RL stage over four ranks, against one process. Writes benchmarks/parity/results/ranks.json.

    OMP_NUM_THREADS=1 python -m benchmarks.parity.ranks              # seed 0, some ten minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.parity.ranks --seeds 0 1 --dry   # print, write nothing

For each seed the ladder runs to the end of `dpo` in one process. Its RL stage is then played twice from there, in one
process and over four ranks (gloo), both `deterministic` and with nothing shared between segments.

- *float32*: accuracy on the ladder's held-out tasks, how far the weights end apart, and the first step in which a
  sampled token differs (rounding is enough for that, and from there on the two are runs of different samples).
- *float64*: the minibatches of some updates of the run in one process are kept with the weights that they met. Each
  gradient is computed again in float64, in one process and over four ranks: the largest difference, relative to the
  largest number of the gradient, and a digest of the gradient rounded to float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import platform
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import posttrain
from benchmarks.learning.lora import TAUGHT
from posttrain.build.open_model import built_policy
from posttrain.config.run import Optimizer
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import joined
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.record import run_reader, step_format
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import run_file
from posttrain.role.trainer import Trainer
from posttrain.role.weights.saved_weights import WEIGHTS, SavedTensors

RESULTS = Path(__file__).parent / "results" / "ranks.json"
RANKS = 4
KEPT = (1, 10, 40)
"""Steps of RL whose minibatch is kept."""
MICRO_TOKENS = 4096
SAME = ("deterministic=true", "model.share_prefixes=false")
Gradient = dict[str, torch.Tensor]


def taught(seed: int, folder: Path) -> Path:
    """The ladder up to the stage that RL begins with."""
    posttrain.run("ladder", f"seed={seed}", "rl=none", "sft_continued=none", out=folder, quiet=True)
    return folder


def trained(base: Path, seed: int, folder: Path, nproc: int | None) -> dict[str, Any]:
    """The RL stage from these weights."""
    without, begun = [f"{name}=none" for name in TAUGHT], time.monotonic()
    words = (f"model={base}", *without, f"seed={seed}", *SAME)
    result = posttrain.run("ladder", *words, out=folder, quiet=True, nproc=nproc)
    last = result.stages[-1]
    notes = [n for s in run_reader.steps(folder) for n in s.notes if n.startswith(("rule ", "stopped"))]
    return {
        "accuracy": last.accuracy,
        "before": last.before,
        "steps": last.steps,
        "seconds": round(time.monotonic() - begun, 1),
        "notes": notes,
    }


def keeping(folder: Path) -> Any:
    """Inside, the trainer of this process keeps the minibatches of `KEPT` with the weights before them."""
    real = Trainer.step

    def step(self: Trainer, batch: Any, loss: Any, *given: Any, **named: Any) -> Any:
        at, path = named.get("index", 0), folder / f"kept-{named.get('index', 0)}.pickle"
        if at in KEPT and not path.exists():
            weights = {n: p.detach().clone() for n, p in self.learner.parameters().items()}
            path.write_bytes(pickle.dumps((batch, loss, weights)))
        return real(self, batch, loss, *given, **named)

    return patch.object(Trainer, "step", step)


class Seen(StageOptimizer):
    """Keeps the gradient that it is given."""

    seen: Gradient

    def step(self, share: float = 1.0) -> float:
        self.seen = {n: t.grad.clone() for n, t in self.trained().items() if t.grad is not None}
        return super().step(share)


def policy_of(run: Path, weights: dict[str, Any], dtype: torch.dtype) -> Policy:
    """The model of a run with these weights, in this type."""
    policy = built_policy(run, run_file(run).run)
    with torch.no_grad():
        for name, p in policy.module.named_parameters():
            p.copy_(weights[name])
    module: Any = policy.module
    return replace(policy, module=module.to(dtype), share_prefixes=False)


def gradient(folder: Path, run: Path, at: int, dtype: torch.dtype, ranks: Any = None) -> Gradient:
    """Of one kept minibatch, whole on every rank."""
    batch, loss, weights = pickle.loads((folder / f"kept-{at}.pickle").read_bytes())
    policy = policy_of(run, weights, dtype)
    learner = HFLearner(policy) if ranks is None else ShardedLearner(policy, ranks)
    over = {} if ranks is None else {"ranks": ranks}
    optimizer = Seen(learner.parameters(), Optimizer(lr=1e-9, warmup=0), **over)
    Trainer(learner, optimizer, MICRO_TOKENS, **over).step(batch, loss)
    if not isinstance(learner, ShardedLearner):
        return optimizer.seen
    return {n: learner.whole(learner.like(n, g)) for n, g in optimizer.seen.items()}


def serve(rank: int, folder: Path, run: Path) -> None:
    """One of the ranks: writes the gradients that all have together."""
    torch.set_num_threads(1)
    with joined(rank, RANKS, f"file://{folder / 'meet'}", seconds=300) as ranks:
        for at in KEPT:
            for dtype in (torch.float64, torch.float32):
                found = gradient(folder, run, at, dtype, ranks)
                if rank == 0:
                    torch.save(found, folder / f"over-{at}-{str(dtype)[-2:]}.pt")
        ranks.every("finished")


def gradients(folder: Path, run: Path) -> dict[str, Any]:
    """How far the gradients of four ranks are from those of one process."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=serve, args=(r, folder, run)) for r in range(RANKS)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    if any(p.exitcode for p in processes):
        raise RuntimeError(f"ranks ended with {[p.exitcode for p in processes]}")
    out: dict[str, Any] = {}
    for at in KEPT:
        batch = pickle.loads((folder / f"kept-{at}.pickle").read_bytes())[0]
        out[str(at)] = {"episodes": batch.episodes, "tokens": batch.spoken}
        for dtype in (torch.float64, torch.float32):
            word = str(dtype).removeprefix("torch.")
            own = gradient(folder, run, at, dtype)
            over = torch.load(folder / f"over-{at}-{word[-2:]}.pt")
            size = max(float(g.abs().max()) for g in own.values())
            gap = max(float((own[n].double() - over[n].double()).abs().max()) for n in own)
            out[str(at)][word] = {"numbers": sum(g.numel() for g in own.values()), "apart": gap / size}
            if dtype == torch.float64:
                digests = [fingerprint((n, g.float()) for n, g in x.items()) for x in (own, over)]
                out[str(at)]["digests"] = digests
    return out


def apart(a: Path, b: Path) -> float:
    """The largest difference of a weight at the end."""
    one, other = (SavedTensors(find(f, "last").folder / WEIGHTS).whole() for f in (a, b))
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def first_other_token(a: Path, b: Path) -> int | None:
    """The first step in which a sampled token differs."""
    for one, other in zip(run_reader.episode_files(a), run_reader.episode_files(b), strict=True):
        x, y = (step_format.read_columns(row.path)["ids"].tobytes() for row in (one, other))
        if x != y:
            return one.index
    return None


def measured(seed: int, folder: Path) -> dict[str, Any]:
    base = taught(seed, folder / "taught")
    with keeping(folder):
        one = trained(base, seed, folder / "one", None)
    print(f"seed {seed}, one process: {one}", flush=True)
    over = trained(base, seed, folder / "over", RANKS)
    print(f"seed {seed}, {RANKS} ranks: {over}", flush=True)
    found = {
        "one": one,
        "over": over,
        "weights_apart": apart(folder / "one", folder / "over"),
        "first_other_token": first_other_token(folder / "one", folder / "over"),
        "gradients": gradients(folder, folder / "one"),
    }
    print(json.dumps({n: found[n] for n in ("weights_apart", "first_other_token", "gradients")}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dry", action="store_true", help="write nothing")
    asked = parser.parse_args()
    out: dict[str, Any] = {"ranks": RANKS, "kept": KEPT, "date": str(date.today()), "seeds": {}}
    out["machine"] = {"platform": platform.platform(), "torch": torch.__version__, "cores": os.cpu_count()}
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as folder:
            out["seeds"][str(seed)] = measured(seed, Path(folder))
    if not asked.dry:
        RESULTS.write_text(json.dumps(out, indent=1) + "\n")
        print(f"wrote {RESULTS.relative_to(RESULTS.parents[2])}")


if __name__ == "__main__":
    main()
