"""Do the checks stop runs that learn from judgements, where nothing is wrong? Many small runs, drawn at random.

    python -m benchmarks.trust.healthy_preferences                     # 60 runs from seed 0
    python -m benchmarks.trust.healthy_preferences --seed 7 --only 12  # one of them

Stages of all three kinds, every line of the second ladder, kinds of data, adapters, dtypes, micro-batches, references
and seeds are drawn. Healthy is what `benchmarks/trust/healthy.py` calls so. Writes `preferences` in
benchmarks/trust/results/healthy.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from benchmarks.trust.blind import unwatched
from benchmarks.trust.healthy import RESULTS, Outcome, line, summary
from posttrain.config.env import Env, Reward
from posttrain.config.run import Evaluation, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.recipe.example import PAIRS, TINY
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, DataError, PosttrainError, RunFolderError

STEPS = {10: 0.7, 40: 0.3}
"""Steps of the stage that learns, and how often: most false alarms come in the first ones."""
LR = 1e-3
"""A run's learning rate lies up to ten times above or below."""
DTYPES = {"float32": 0.5, "bfloat16": 0.3, "float16": 0.2}
"""How often each is drawn."""
WORLDS: dict[str, tuple[str, ...]] = {
    "file": ("pair", "label"),
    "arithmetic": ("pair", "label"),
    "replies": ("pair", "ranking", "label", "rating"),
}
"""Kinds of judgement that are drawn of each kind of data."""
MOST_SAMPLES = 8
"""Of a prompt: lines that draw more are left out, for the time they take."""
LOSSES = ("preference/loss", "ranking/loss", "optim/grad_norm", "sft/loss")


@dataclass(frozen=True)
class DrawnRun:
    """One run: what it is made of, and its settings as the command line would have them."""

    index: int
    stage: str
    """preference, online or reward_model."""
    world: str
    words: tuple[str, ...]


def base(stage: str, world: str) -> Run:
    """The run before its settings."""
    kinds: dict[str, Stage] = {
        "preference": Preference(name="learn"),
        "online": OnlinePreference(name="learn", sampling=Sampling(max_tokens=8)),
        "reward_model": RewardModel(name="learn"),
    }
    envs = {
        "file": Env(name="prompts", prompts=PAIRS, rewards=(Reward(function="exact"),)),
        "arithmetic": Env(name="arithmetic", args={"max_terms": 2, "max_operand": 9}),
        "replies": Env(name="replies", args={"ranked": 3}),
    }
    styles = {"file": "chosen", "arithmetic": "answer", "replies": "reply"}
    sft = Supervised(name="sft", style=styles[world], batch=16, eval=False)
    return Run(
        recipe=f"healthy-{stage}", threads=1, model=TINY, env=envs[world], stages=(sft, kinds[stage]), slots=16,
        evaluation=Evaluation(samples=1, greedy=False),
    )  # fmt: skip


def draw(seed: int, index: int) -> DrawnRun:
    """Run number `index` of `seed`."""
    rng = seeds.generator(seed, "healthy/preferences", index)

    def one(*choices: Any, p: Iterable[float] | None = None) -> Any:
        return choices[int(rng.choice(len(choices), p=None if p is None else list(p)))]

    stage = one("preference", "online", "reward_model", p=(0.55, 0.25, 0.2))
    world = one("arithmetic", "replies") if stage == "online" else one(*WORLDS)
    dtype, adapted = one(*DTYPES, p=DTYPES.values()), rng.random() < 0.35
    heads, wide = one(2, 4), one(32, 64)
    steps = one(0, 5, 30, 100, p=(0.2, 0.2, 0.3, 0.3))
    words = [
        f"seed={int(rng.integers(1 << 20))}",
        *(f"model.arch={one('qwen3', 'llama', 'gemma', 'gpt2')}", f"model.hidden={wide}", f"model.ffn={2 * wide}"),
        *(f"model.layers={one(1, 2)}", f"model.heads={heads}", f"model.kv_heads={heads}", f"model.dtype={dtype}"),
        *((f"model.lora={one(2, 8)}",) if adapted else ()),
        *(("model.gradient_checkpointing=true",) if rng.random() < 0.1 else ()),
        *(("model.share_prefixes=false",) if rng.random() < 0.15 else ()),
        *(("deterministic=true",) if rng.random() < 0.1 else ()),
        *((f"sft.steps={steps}", f"sft.optimizer.lr={one(1e-3, 4e-3)}") if steps else ("sft=none",)),
        *(f"learn.steps={one(*STEPS, p=STEPS.values())}", "learn.eval_every=0", "learn.checkpoint_every=0"),
        f"learn.optimizer.lr={LR * 10 ** rng.uniform(-1, 1):.3g}",
        f"learn.optimizer.warmup={one(0, 5, 50)}",
        f"learn.micro_tokens={one(64, 256, 4096)}",
        *LEARNERS[stage](rng, one, world),
        *("env.heldout=8", "keep_checkpoints=1", "record_episodes=false"),
    ]
    return DrawnRun(index, stage, world, tuple(words))


def _preference(rng: np.random.Generator, one: Any, world: str) -> list[str]:
    """Any line that learns from judgements of this data."""
    known = {"pair": ("pair", "triple"), "label": ("label",)} | ({} if world == "replies" else {"pair": ("pair",)})
    rows = {r for kind in WORLDS[world] for r in known.get(kind, ())}
    fits = [
        n
        for n, a in PREFERENCES.items()
        if not a.online and a.rows in rows and (not a.reads_margin or world == "replies")
    ]
    a = PREFERENCES[one(*fits)]
    out = [f"learn.algorithm={a.name}", f"learn.batch={one(4, 8, 16)}"]
    out += ["env.args.margins=true"] if a.reads_margin else []
    out += (
        [f"learn.ahead={one('true', 'false')}"] if a.reads_reference and world == "file" and rng.random() < 0.5 else []
    )
    out += [f"env.args.noise={one(0.1, 0.3)}"] if world == "replies" and rng.random() < 0.5 else []
    return out


def _online(rng: np.random.Generator, one: Any, world: str) -> list[str]:
    """Any line that plays against itself or an opponent, at any temperature."""
    fits = [n for n, a in PREFERENCES.items() if a.online and a.draw is not None and a.draw.samples() <= MOST_SAMPLES]
    out = [f"learn.algorithm={one(*fits)}", f"learn.prompts={one(2, 4, 8)}"]
    out += [f"learn.sampling.temperature={one(0.6, 0.8, 1.0, 1.3, p=(0.15, 0.15, 0.5, 0.2))}"]
    cuts = {"": 0.7, "learn.sampling.top_p=0.9": 0.1, "learn.sampling.top_k=3": 0.1, "learn.sampling.min_p=0.1": 0.1}
    cut = one(*cuts, p=cuts.values())
    return [*out, *([cut] if cut else [])]


def _reward_model(rng: np.random.Generator, one: Any, world: str) -> list[str]:
    """Every kind of judgement, and the heads that fit it."""
    kind = one(*WORLDS[world])
    pool = one("last", "mean", "token") if kind == "label" else one("last", "mean")
    out = [f"learn.judgement={kind}", f"learn.pool={pool}", f"learn.batch={one(4, 8, 16)}"]
    out += ["learn.attributes=politeness,length"] if kind == "rating" else []
    out += [f"learn.centre={one(0.0, 0.01)}"] if kind in ("pair", "ranking") else []
    out += [f"learn.pairs={one('true', 'false')}"] if kind == "ranking" else []
    return out


LEARNERS = {"preference": _preference, "online": _online, "reward_model": _reward_model}


def play(run: DrawnRun, folder: Path, **over: Any) -> Outcome:
    """Run it in `folder`. `over`: the ranks."""
    begun, told = time.perf_counter(), dict[str, Any]()
    name, words = f"{run.stage}/{run.world}", list(run.words)
    try:
        posttrain.run(base(run.stage, run.world), *words, out=folder / "run", quiet=True, **over)
    except ConfigError as error:
        told["stopped" if (folder / "run/run.json").exists() else "refused"] = str(error)
    except PosttrainError as error:
        told["stopped"] = f"{type(error).__name__}: {error}"
    if "stopped" in told:
        told["healthy"] = _finite(run, words, folder / "unwatched")
    steps = run_reader.steps(folder / "run") if (folder / "run/run.json").exists() else []
    notes = sorted({n.split(":")[0].removeprefix("rule ") for s in steps for n in s.notes if n.startswith("rule ")})
    count = sum(s.stage == "learn" for s in steps)
    return Outcome(run.index, name, words, time.perf_counter() - begun, count, notes=notes, **told)


def _finite(run: DrawnRun, words: list[str], folder: Path) -> bool:
    """Whether the run's losses are finite to its end with every check switched off (`healthy`)."""
    try:
        with unwatched():
            posttrain.run(base(run.stage, run.world), *words, out=folder, quiet=True)
    except (ConfigError, DataError, RunFolderError):
        return True
    except PosttrainError as error:
        print(f"  with checks off: {error}", flush=True)
        return False
    gauges = [s.gauges[n].sum for s in run_reader.steps(folder) for n in LOSSES if n in s.gauges]
    return bool(np.all(np.isfinite(gauges)))


def _work(job: tuple[int, int]) -> Outcome:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return play(draw(*job), Path(folder))


def many(seed: int, indices: Iterable[int], jobs: int) -> list[Outcome]:
    """Play these runs, side by side in `jobs` processes."""
    todo, out = [(seed, i) for i in indices], list[Outcome]()
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_work, job) for job in todo]):
            out.append(outcome := done.result())
            print(line(outcome, len(out), len(todo)), flush=True)
    return sorted(out, key=lambda o: o.index)


def drawn_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """How often each setting of interest was drawn."""
    words: list[dict[str, str]] = [{(p := w.partition("="))[0]: p[2] for w in o.words} for o in outcomes]
    return {
        "dtypes": dict(Counter(w["model.dtype"] for w in words)),
        "adapters": sum("model.lora" in w for w in words),
        "algorithms": dict(sorted(Counter(w["learn.algorithm"] for w in words if "learn.algorithm" in w).items())),
    }


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
        print(run.stage, run.world, " ".join(run.words), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(line(play(run, Path(folder)), 1, 1))
        return
    begun = time.perf_counter()
    outcomes = many(args.seed, range(args.count), args.jobs)
    told = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "wall": time.perf_counter() - begun}
    told |= {**summary(outcomes), **drawn_of(outcomes)}
    print(json.dumps({k: v for k, v in told.items() if k != "told"}, indent=1))
    if not args.dry:
        data = json.loads(RESULTS.read_text(encoding="utf-8")) | {"preferences": told}
        RESULTS.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if told["false_alarms"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
