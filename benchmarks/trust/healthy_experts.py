"""Do the checks stop runs of mixtures of experts that nothing is wrong with? Runs of `healthy.py` from mixtures.

    python -m benchmarks.trust.healthy_experts --count 60             # from seed 0
    python -m benchmarks.trust.healthy_experts --seed 7 --only 12     # one of them, with its output

Run number i of seed s is the one that `healthy.py` draws, with a mixture in place of its model: Qwen3-MoE or Mixtral,
of 4 or 8 experts and 1 to 3 of a token, whose learner chooses by itself, follows the sampler or its own start, in
float32 or bfloat16, with or without a load-balance loss, older samples, frozen or slower routers, and layers that are
computed again. In some of them every router is **undecided**: its experts score alike in groups, so that rounding
decides which of two computes a token (`undecided`), and imitation leaves it so. A run is healthy by the definition of
`healthy.py`; runs of it that draw settings of the learner are left out. Writes results/healthy_experts.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.trust.healthy import Drawn, Outcome, line, play, summary
from benchmarks.trust.healthy import draw as draw_dense
from benchmarks.trust.healthy_learner import draws_learner
from posttrain.core import seeds

RESULTS = Path(__file__).parent / "results" / "healthy_experts.json"
SPREAD = 3e-6
"""Relative differences of the scores of two experts that rounding decides now and then."""
LEFT_OUT = ("shop", "programs")
"""Recipes that take longest; they differ from the others in what is not the model's."""
MARK = "undecided"


def drawable(seed: int) -> Iterator[int]:
    """Numbers of the runs of `healthy.py` that mixtures take over."""
    for index in itertools.count():
        run = draw_dense(seed, index)
        if not draws_learner(seed, index) and run.recipe not in LEFT_OUT and not run.needs:
            yield index


def draw(seed: int, index: int) -> Drawn:
    """Run number `index` of `seed`, from a mixture. `needs` is `MARK` where its routers are undecided."""
    base, rng = draw_dense(seed, index), seeds.generator(seed, "healthy-experts", index)

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    experts = one(4, 8)
    more = [
        f"model.arch={one('qwen3_moe', 'mixtral')}",
        f"model.experts={experts}",
        f"model.experts_per_token={one(1, 2, 2, 3)}",
        "model.ffn=32",
        f"model.router_replay={one('none', 'sampler', 'sampler', 'start')}",
        f"model.dtype={one('float32', 'float32', 'bfloat16')}",
        f"rl.router_aux_loss_coef={one(0, 0, 0.001, 0.03)}",
        *one((), (), (), ("rl.staleness=1",), ("rl.staleness=2",)),
        *one((), (), (), ("rl.optimizer.freeze=mlp.gate",), ("rl.optimizer.rates=mlp.gate:0.1",)),
        *one((), (), ("model.gradient_checkpointing=full",)),
    ]
    given = {w.split("=", 1)[0] for w in more}
    kept = tuple(_shorter(w) for w in base.words if w.split("=", 1)[0] not in given)
    if rng.random() >= 0.4:
        return replace(base, words=(*kept, *more))
    stages = {w.partition(".")[0] for w in kept if ".steps=" in w} - {"rl"}
    frozen = [f"{stage}.optimizer.freeze=mlp.gate" for stage in sorted(stages)]
    return replace(base, words=(*kept, *more, *frozen), needs=MARK)


def _shorter(word: str) -> str:
    """At most 60 steps of imitation: a mixture takes longer."""
    name, _, value = word.partition("=")
    return f"{name}={min(60, int(value))}" if name.endswith((".steps",)) and name != "rl.steps" else word


def tie(module: Any, spread: float, seed: int) -> None:
    """Let the experts of each router score alike in groups, but for `spread`. A group has one expert more than a token
    is given, so that the choice falls within it."""
    import torch

    size = int(module.config.num_experts_per_tok) + 1
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("mlp.gate.weight"):
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p)
                p.copy_(4 * p[torch.arange(len(p)) // size] * (1 + spread * noise))


@contextlib.contextmanager
def undecided() -> Iterator[None]:
    """Models that are built inside have routers whose experts score alike, but for rounding."""
    from posttrain.engine.model import policy_model

    real = policy_model.build_module

    def built(*given: Any) -> Any:
        module = real(*given)
        tie(module, SPREAD, 0)
        return module

    with patch.object(policy_model, "build_module", built):
        yield


def played(run: Drawn, folder: Path) -> Outcome:
    with undecided() if run.needs == MARK else contextlib.nullcontext():
        return play(replace(run, needs=""), folder, folder)


def _work(job: tuple[int, int]) -> Outcome:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return played(draw(*job), Path(folder))


def many(seed: int, count: int, jobs: int) -> list[Outcome]:
    """The first `count` of a seed, side by side in `jobs` processes."""
    todo = [(seed, i) for i in itertools.islice(drawable(seed), count)]
    out = list[Outcome]()
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_work, job) for job in todo]):
            out.append(outcome := done.result())
            print(line(outcome, len(out), len(todo)), flush=True)
    return sorted(out, key=lambda o: o.index)


def drawn_of(seed: int, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """How often each setting of interest was drawn."""
    words = [dict(w.split("=", 1) for w in o.words) for o in outcomes]
    names = ("model.arch", "model.dtype", "model.router_replay", "rl.router_aux_loss_coef", "rl.staleness")
    told = {n: dict(Counter(w[n] for w in words if n in w)) for n in names}
    return told | {MARK: sum(draw(seed, o.index).needs == MARK for o in outcomes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    if args.only is not None:
        run = draw(args.seed, args.only)
        print(f"posttrain run {run.recipe} {' '.join(run.words)}  {run.needs}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(line(played(run, Path(folder)), 1, 1))
        return
    begun = time.perf_counter()
    outcomes = many(args.seed, args.count, args.jobs)
    told = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "wall": time.perf_counter() - begun}
    told |= {**summary(outcomes), "drawn": drawn_of(args.seed, outcomes)}
    print(json.dumps({k: v for k, v in told.items() if k != "told"}, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if told["false_alarms"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
