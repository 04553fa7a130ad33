"""vLLM of one worker and of two: seconds of a push, tokens a second, and the memory of each worker.

    .venv-vllm/bin/python -m benchmarks.speed.vllm_workers --workers 2 --threads 1 --size 100m

Each push sends new weights, reads back what is served and compares the fingerprints. Memory is what Linux counts for a
process: its own pages (private), and the highest that it had of all pages (peak).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.config.engines import GIB
from posttrain.config.run import Model
from posttrain.core.sampling import Sampling
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.role.sync import whole_tensors
from posttrain.system.terminal_output import tell

SIZES = {
    "1m": Model(hidden=128, layers=4, heads=4, kv_heads=2, ffn=384, context=512),
    "25m": Model(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1536, context=512),
    "100m": Model(hidden=1024, layers=8, heads=16, kv_heads=4, ffn=3072, context=512),
}


def memory(pid: int | str = "self") -> dict[str, int]:
    """MiB of a process: private, shared and peak."""
    kept = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    number = {n: int(v.split()[0]) for n, v in kept.items()}
    peak = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return {
        "private": (number["Private_Dirty"] + number["Private_Clean"]) >> 10,
        "shared": (number["Shared_Dirty"] + number["Shared_Clean"]) >> 10,
        "peak": int(peak.split()[1]) >> 10,
    }


def of_workers(engine: Any) -> list[dict[str, int]]:
    """The memory of each worker: the process itself where it computes."""
    executor = engine._engine.engine_core.engine_core.model_executor
    return [memory(w.proc.pid) for w in getattr(executor, "workers", [])] or [memory()]


async def measured(size: str, workers: int, pushes: int, slots: int, tokens: int) -> dict[str, Any]:
    policy = load_policy(SIZES[size], None, 0)
    policy = replace(policy, module=policy.module.eval())
    learner, without = HFLearner(policy), memory()
    begun = time.perf_counter()
    engine = VLLMEngine(policy, slots=slots, cache_bytes=GIB // 4, eager=True, workers=workers)
    start = time.perf_counter() - begun
    empty, seconds = of_workers(engine), list[float]()
    for version in range(pushes):
        with torch.no_grad():
            for p in policy.module.parameters():
                p.add_(0.001 * torch.randn_like(p))
        begun = time.perf_counter()
        served = await engine.load(version, whole_tensors(learner.shards()))
        seconds.append(time.perf_counter() - begun)
        assert served == learner.fingerprint()
    pushed = of_workers(engine)
    prompt, wanted = np.arange(1, 33, dtype=np.int32), Sampling(max_tokens=tokens, stop_ids=())
    rates = list[float]()
    for turn in range(3):
        begun = time.perf_counter()
        said = await asyncio.gather(*[engine.generate(prompt, wanted, turn * slots + i) for i in range(slots)])
        rates.append(sum(len(s.ids) for s in said) / (time.perf_counter() - begun))
    found = {
        "size": size,
        "workers": workers,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in policy.module.parameters()),
        "start": round(start, 1),
        "push": [round(s, 3) for s in seconds],
        "tokens_a_second": [round(r) for r in rates],
        "memory_without_engine": without,
        "memory_before": empty,
        "memory_after_pushes": pushed,
        "memory_at_the_end": of_workers(engine),
    }
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25m")
    for name, value in (("workers", 2), ("threads", 1), ("pushes", 4), ("slots", 32), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tell(json.dumps(asyncio.run(measured(given.size, given.workers, given.pushes, given.slots, given.tokens))))


if __name__ == "__main__":
    main()
