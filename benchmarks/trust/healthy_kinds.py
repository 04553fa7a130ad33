"""Do the checks stop runs that nothing is wrong with, of any kind that exists? One script draws over all of them.

    python -m benchmarks.trust.healthy_kinds                       # 600 runs from seed 0, on as many processes as cores
    python -m benchmarks.trust.healthy_kinds --count 20 --seed 7   # what CI does, with a seed of its own
    python -m benchmarks.trust.healthy_kinds --seed 7 --only 12    # one of them, with its output
    python -m benchmarks.trust.healthy_kinds --kinds ranks,placed  # runs of these kinds alone

Run number i of seed s is of one of `KINDS`, and a function of (s, i) alone: RL with settings of the learner, adapters
and optimizers (`healthy`), RL whose groups are asked ahead, mixtures of experts (`healthy_experts`), preferences and
reward models (`healthy_preferences`), the recipes of several stages, and any of these over two ranks or with its roles
in processes of their own. Healthy is what `healthy.py` calls so. Where the settings are refused for a stated rule
before anything runs, they are drawn again, and each sentence is counted. Writes results/healthy_kinds.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.trust import healthy, healthy_experts, healthy_preferences
from benchmarks.trust.healthy import Drawn, Outcome, line, summary
from posttrain.core import seeds

RESULTS = Path(__file__).parent / "results" / "healthy_kinds.json"
KINDS = {"rl": 0.25, "ahead": 0.15, "experts": 0.15, "judged": 0.2, "stages": 0.1, "ranks": 0.08, "placed": 0.07}
"""How often each is drawn."""
AGAIN = 12
"""Most draws of a run whose settings are refused."""
PART = 50
"""Runs that the same processes play."""
SLOW = ("shop", "programs")
"""Recipes that are not played over ranks or in processes: they take longest, for what is not of these."""
STAGES = {
    "rlhf": "sft.steps={taught} sft.batch=16 reward_model.steps={steps} reward_model.batch={batch} {rl}",
    "judge": "sft.steps={taught} sft.batch=16 {rl}",
    "prm": "sft.steps={taught} sft.batch=16 label.steps=1 label.prompts=16 prm.steps={steps} prm.batch={batch} {rl}",
    "reject": "sft.steps={taught} sft.batch=16 reject.rounds=2 reject.prompts=16 reject.steps={steps}"
    " reject.batch={batch} reject.siblings={siblings} reject.optimizer.lr={lr:.3g}",
}
"""Recipes of several stages, with what is drawn of them."""
RL = "rl.steps=5 rl.prompts={prompts} rl.siblings={siblings} rl.eval_every=0 rl.optimizer.lr={lr:.3g}"


@dataclass(frozen=True)
class Play:
    """One run that is to be played: its kind, and what `posttrain.run` is given beside its settings."""

    kind: str
    drawn: Any
    """`healthy.Drawn` or `healthy_preferences.DrawnRun`."""
    over: tuple[tuple[str, Any], ...] = ()

    def played(self, folder: Path, scratch: Path) -> Outcome:
        over = dict(self.over)
        if isinstance(self.drawn, healthy_preferences.DrawnRun):
            return healthy_preferences.play(self.drawn, folder, **over)
        if self.drawn.needs == healthy_experts.MARK:
            return healthy_experts.played(self.drawn, folder)
        return healthy.play(self.drawn, folder, scratch, **over)


def kind_of(seed: int, index: int, kinds: Iterable[str] = KINDS) -> str:
    weights = {k: KINDS[k] for k in kinds}
    total = sum(weights.values())
    rng = seeds.generator(seed, "healthy-kinds", index)
    return str(rng.choice([*weights], p=[w / total for w in weights.values()]))


def draw(seed: int, index: int, attempt: int = 0, kinds: Iterable[str] = KINDS) -> Play:
    """Run number `index` of `seed`. `attempt`: how often its settings were refused for a stated rule."""
    kind = kind_of(seed, index, kinds)
    rng = seeds.generator(seed, f"healthy-kinds/{kind}", index, attempt)
    number = int(rng.integers(1 << 20))
    if kind in ("ranks", "placed"):
        return _elsewhere(kind, rng, number)
    return Play(kind, replace(_drawn(kind, rng, number), index=index))


def _drawn(kind: str, rng: Any, number: int) -> Any:
    if kind == "judged":
        return healthy_preferences.draw(number, number)
    if kind == "experts":
        return healthy_experts.draw(number, next(healthy_experts.drawable(number)))
    if kind == "stages":
        return _stages(rng, number)
    return healthy.draw(number, number, ahead=kind == "ahead")


def _stages(rng: Any, number: int) -> Drawn:
    """A recipe that trains several models in turn."""

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    recipe = one(*STAGES)
    numbers = {
        "taught": one(5, 30, 100),
        "steps": one(5, 20),
        "batch": one(4, 16),
        "prompts": one(2, 4),
        "siblings": one(2, 4),
        "lr": 5e-4 * 10 ** rng.uniform(-1, 1),
    }
    words = STAGES[recipe].format(rl=RL.format(**numbers), **numbers).split()
    arch, adapted = one("qwen3", "llama", "gemma", "gpt2", "mixtral"), rng.random() < 0.3
    words += [f"seed={number}", f"model.arch={arch}", "model.hidden=32", "model.ffn=64", "env.heldout=8"]
    words += ["evaluation.samples=1", "evaluation.greedy=false", "keep_checkpoints=1"]
    words += ["model.lora.rank=2"] if adapted else []
    words += ["model.dtype=bfloat16"] if rng.random() < 0.15 else []
    return Drawn(number, recipe, tuple(words))


def _elsewhere(kind: str, rng: Any, number: int) -> Play:
    """A run of another kind over two ranks, or with its engine, environments and verifiers in processes."""
    inner = str(rng.choice(["rl", "ahead", "experts", "judged"], p=[0.4, 0.2, 0.2, 0.2]))
    for again in itertools.count():
        drawn = _drawn(inner, rng, number + again)
        if getattr(drawn, "recipe", "") not in SLOW and not getattr(drawn, "needs", ""):
            break
    if kind == "placed":
        return Play(kind, replace(drawn, words=(*drawn.words, "placement=processes")))
    parallel = str(rng.choice(["rows", "tensor", "experts"] if inner == "experts" else ["rows", "rows", "tensor"]))
    replicas = 2 if parallel == "rows" and rng.random() < 0.3 else 1
    return Play(kind, drawn, (("nproc", 2), ("parallel", parallel), ("replicas", replicas)))


# --- many -------------------------------------------------------------------------------------------------------------


def played(seed: int, index: int, folder: Path, scratch: Path, kinds: Iterable[str] = KINDS) -> tuple[Play, Outcome]:
    """Run number `index`. While its settings are refused for a stated rule, they are drawn again."""
    rules = list[str]()
    while True:
        run = draw(seed, index, len(rules), kinds)
        outcome = run.played(folder / str(len(rules)), scratch)
        shutil.rmtree(folder / str(len(rules)), ignore_errors=True)
        if not outcome.refused or len(rules) == AGAIN:
            return run, replace(outcome, index=index, redrawn=rules)
        rules.append(outcome.refused[:100])


def _work(job: tuple[int, int, str, tuple[str, ...]]) -> tuple[str, Outcome]:
    seed, index, scratch, kinds = job
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run, outcome = played(seed, index, Path(folder), Path(scratch), kinds)
    return run.kind, outcome


def many(seed: int, indices: Iterable[int], jobs: int, kinds: Iterable[str] = KINDS) -> list[tuple[str, Outcome]]:
    """(kind, what became of it) of these runs, side by side in `jobs` processes."""
    todo, out = list(indices), list[tuple[str, Outcome]]()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="healthy-") as scratch:
        for part in range(0, len(todo), PART):
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                asked = [(seed, i, scratch, tuple(kinds)) for i in todo[part : part + PART]]
                for done in as_completed([pool.submit(_work, job) for job in asked]):
                    kind, outcome = done.result()
                    out.append((kind, outcome))
                    print(f"[{kind}] {line(outcome, len(out), len(todo))}", flush=True)
    return sorted(out, key=lambda row: row[1].index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    kinds = tuple(args.kinds.split(","))
    if args.only is not None:
        with tempfile.TemporaryDirectory() as scratch:
            run, outcome = played(args.seed, args.only, Path(scratch) / "one", Path(scratch), kinds)
        print(run.kind, outcome.recipe, " ".join(outcome.words), dict(run.over), getattr(run.drawn, "needs", ""))
        print("".join(f"drawn again: {rule}\n" for rule in outcome.redrawn) + line(outcome, 1, 1))
        return
    begun = time.perf_counter()
    rows = many(args.seed, range(args.first, args.first + args.count), args.jobs, kinds)
    told = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "wall": time.perf_counter() - begun}
    told |= {"kinds": dict(Counter(kind for kind, _ in rows)), **summary([o for _, o in rows])}
    print(json.dumps({k: v for k, v in told.items() if k != "told"}, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if told["false_alarms"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
