"""How far sampler and learner of a mixture of experts are apart, with and without routing replay:
docs/guides/experts.md.

    python -m benchmarks.parity.experts --seeds 3 --steps 12

A tiny mixture (2 layers, 8 experts, 2 of a token) is taught sums and then learns by GRPO, once for each of: float32
and bfloat16, samples 0, 2 and 4 steps old, the learner choosing by itself and following the sampler. Every run measures
both (`experts/gap_alone`, `experts/gap_replayed`), because each step is read a second time; what differs is what it
learns from. It prints a table and writes results/experts.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

import posttrain
from posttrain.config.run import Env, Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.record import run_reader

GAUGES = ("differ", "tokens_differ", "regret", "gap_alone", "gap_replayed", "drift", "rerouted", "dead", "load_entropy")


def run_of(dtype: str, staleness: int, replay: str, steps: int, seed: int) -> Run:
    sft = Supervised(name="sft", style="answer", steps=80, batch=32, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False)
    rl = Reinforce(
        name="rl",
        sampling=Sampling(max_tokens=6),
        optimizer=Optimizer(lr=1e-3, warmup=2),
        prompts=12,
        siblings=6,
        steps=steps,
        staleness=staleness,
        eval_every=0,
        checkpoint_every=0,
    )
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 32, "experts": 8, "context": 64}
    return Run(
        recipe="experts",
        seed=seed,
        model=Model(arch="qwen3_moe", dtype=dtype, router_replay=replay, **sizes),  # type: ignore[arg-type]
        env=Env(name="arithmetic", args={"max_terms": 2, "max_operand": 9}, heldout=10),
        stages=(sft, rl),
        evaluation=Evaluation(samples=2),
        slots=32,
        threads=1,
        record_episodes=False,
    )


def measured(run: Run) -> dict[str, float]:
    """Means over the steps of RL, the first ones that wait for old samples included."""
    with tempfile.TemporaryDirectory() as folder:
        posttrain.run(run, out=Path(folder) / "run", quiet=True)
        steps = [s for s in run_reader.steps(Path(folder) / "run") if s.stage == "rl"]
    found = {n: [s.gauges[f"experts/{n}"].mean for s in steps if f"experts/{n}" in s.gauges] for n in GAUGES}
    reward = [s.gauges["rollout/reward"].mean for s in steps]
    half = len(reward) // 2
    return {n: float(np.mean(x)) for n, x in found.items() if x} | {
        "reward_first": float(np.mean(reward[:half])),
        "reward_last": float(np.mean(reward[half:])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "experts.json")
    given = parser.parse_args()
    rows = list[dict[str, float | str]]()
    for dtype in ("float32", "bfloat16"):
        for staleness in (0, 2, 4):
            for replay in ("none", "sampler"):
                found = [measured(run_of(dtype, staleness, replay, given.steps, s)) for s in range(given.seeds)]
                mean = {n: float(np.mean([f[n] for f in found])) for n in found[0]}
                rows.append({"dtype": dtype, "staleness": staleness, "replay": replay, **mean})
                print({k: v if isinstance(v, str) else float(f"{v:.3g}") for k, v in rows[-1].items()}, flush=True)
                said = {"seeds": given.seeds, "steps": given.steps, "date": time.strftime("%Y-%m-%d"), "rows": rows}
                given.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
