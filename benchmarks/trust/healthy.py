"""Do the checks stop runs that nothing is wrong with? Many small runs, drawn at random, none left out for how it went.

    python -m benchmarks.trust.healthy  # 600 runs from seed 0, on as many processes as there are cores
    python -m benchmarks.trust.healthy --count 40 --seed 7    # what CI does, with a seed of its own
    python -m benchmarks.trust.healthy --seed 7 --only 12     # one of them, with its output
    python -m benchmarks.trust.healthy --ahead --count 100    # runs whose groups are asked ahead of the updates
    python -m benchmarks.trust.healthy --learner --count 40  # the first that draw settings of the learner

A run is healthy by definition, before it is drawn: nothing is planted, and where it is stopped the same run with every
check switched off has finite losses to its end. Run number i of seed s is a function of (s, i) alone. A stop of a
healthy run is a false alarm; a finding of a live rule (`diagnose.rules.all_rules`) in the notes of its record is a
false note, and counted apart. Some runs draw settings of the learner too (`healthy_learner.py`); where the program
refuses these for a stated rule, before anything runs, they are drawn again and counted. Writes
benchmarks/trust/results/healthy.json, or healthy_ahead.json: there each run has `staleness`, is free-running or
deterministic, pushes with or without a drain, after one step or two, and may be resumed in its middle.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from benchmarks.trust.blind import unwatched
from benchmarks.trust.healthy_learner import AGAIN, drawn_of, draws_learner, learner_words, rule_of
from posttrain.core import seeds
from posttrain.ladder.pieces.shape import BestOf
from posttrain.ladder.policy_rows import LADDER
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, DataError, PosttrainError, RunFolderError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/trust/results/healthy.json"
AHEAD = RESULTS.with_name("healthy_ahead.json")
STEPS = 10
"""RL steps of a run: most false alarms came in the first ones."""
RECIPES = {"verifiable": 0.4, "arithmetic": 0.34, "calculator": 0.12, "ladder": 0.06, "shop": 0.05, "programs": 0.03}
"""How often each is drawn."""
PART = 100
"""Runs that the same processes play, before new ones take over: what a run leaves behind in memory goes with them."""
RL_LR = 5e-4
"""What the recipes have; a run's lies up to ten times above or below."""
TEACHERS = tuple(name for name, a in LADDER.items() if a.taught)
SHOWN = tuple(name for name, a in LADDER.items() if a.shown is not None)
"""They learn from demonstrations, which no truncated sampler drew."""
HINTED = tuple(name for name, a in LADDER.items() if a.hint is not None)
"""Their teachers read hints, which most of the drawn environments do not write."""
BEST = tuple(name for name, a in LADDER.items() if any(isinstance(s, BestOf) for s in a.shape))
"""They compare the best of four."""
TURNS = ("mt_grpo", "gigpo")
"""Algorithms for worlds of several turns."""


@dataclass(frozen=True)
class Drawn:
    """One run as the command line would have it."""

    index: int
    recipe: str
    words: tuple[str, ...]
    needs: str = ""
    """`teacher` or `draft`: a second model with the policy's tokenizer, trained first."""
    resumed: bool = False
    """Whether it is played again from the checkpoint in its middle."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    index: int
    recipe: str
    words: list[str]
    seconds: float
    steps: int = 0
    stopped: str = ""
    """What a check said; '' where the run went to its end."""
    healthy: bool = True
    """Whether a stopped run has finite losses with every check switched off."""
    refused: str = ""
    """What the configuration was refused for, before anything ran."""
    notes: list[str] = field(default_factory=list)
    """Findings of live rules."""
    redrawn: list[str] = field(default_factory=list)
    """Stated rules by which settings of the learner were refused, once for each draw before this one."""


def draw(seed: int, index: int, ahead: bool = False, attempt: int = 0) -> Drawn:
    """Run number `index` of `seed`. `ahead`: the same one, with groups that are asked ahead of the updates. `attempt`:
    how often the settings of its learner were refused for a stated rule."""
    rng = seeds.generator(seed, "healthy", index)

    def one(*choices: Any, p: Iterable[float] | None = None) -> Any:
        return choices[int(rng.choice(len(choices), p=None if p is None else list(p)))]

    recipe = one(*RECIPES, p=RECIPES.values())
    several = recipe in ("calculator", "shop")
    algorithm = one(*(name for name in LADDER if (several or name not in TURNS) and name not in HINTED))
    dtype = one("float32", "bfloat16", p=(0.88, 0.12))
    arch, heads = one("qwen3", "llama", "gemma", "gpt2", p=(0.4, 0.2, 0.2, 0.2)), one(2, 4)
    prompts, minibatches = one((2, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 1), (8, 2), (8, 4))
    words = [
        f"seed={int(rng.integers(1 << 20))}",
        *(f"model.arch={arch}", "model.hidden=32", "model.ffn=64", f"model.layers={one(1, 2)}"),
        *(f"model.heads={heads}", f"model.kv_heads={heads if arch == 'gpt2' else one(1, 2)}"),
        *(() if dtype == "float32" else ("model.dtype=bfloat16",)),
        *_imitation(recipe, dtype, one),
        *(f"rl.algorithm={algorithm}", f"rl.steps={STEPS}", "rl.eval_every=0", "rl.checkpoint_every=0"),
        *(f"rl.prompts={prompts}", f"rl.siblings={one(6, 8) if algorithm in BEST else one(2, 4, 6, 8)}", "rl.refill=2"),
        *(f"rl.minibatches={minibatches}", f"rl.epochs={one(1, 2, p=(0.75, 0.25))}"),
        f"rl.optimizer.lr={RL_LR * 10 ** rng.uniform(-1, 1):.3g}",
        f"rl.optimizer.warmup={one(0, 5, 50)}",
        f"rl.micro_tokens={one(64, 256, 4096)}",
        *_sampling(rng, one, cut=algorithm not in SHOWN),
        *_rewards(recipe, algorithm, one),
        *((f"rl.oversample={one(1, 2, 4)}",) if rng.random() < 0.15 else ()),
        *(("model.gradient_checkpointing=true",) if rng.random() < 0.08 else ()),
        *(("engine.lookup=3",) if (look := rng.random()) < 0.1 else ()),
        *(
            "env.heldout=8",
            "evaluation.samples=1",
            "evaluation.greedy=false",
            "keep_checkpoints=1",
            "record_episodes=false",
        ),
    ]
    needs = "teacher" if algorithm in TEACHERS else "draft" if 0.1 <= look < 0.16 else ""
    words = list(learner_words(seed, index, attempt, words))
    return Drawn(index, recipe, tuple(words), needs) if not ahead else _asked_ahead(seed, index, recipe, words, needs)


def _asked_ahead(seed: int, index: int, recipe: str, words: list[str], needs: str) -> Drawn:
    """The same run with `staleness`: what a push does to work in flight, how often there is one, and what is promised
    of its bits. Drafts are never deterministic."""
    rng = seeds.generator(seed, "healthy-ahead", index)
    settings = dict(w.split("=", 1) for w in words)
    drafts = needs == "draft" or "engine.lookup" in settings
    deterministic, resumed = rng.random() < 0.4 and not drafts, bool(rng.random() < 0.4)
    update = "drain" if deterministic else str(rng.choice(["drain", "inflight", "stale"], p=[0.45, 0.45, 0.1]))
    many = 2 if rng.random() < 0.25 else 1
    steps = int(settings["rl.minibatches"]) * int(settings["rl.epochs"])
    more = [
        f"rl.staleness={rng.choice([1, 2, 4])}",
        *(("deterministic=true",) if deterministic else ()),
        *((f"engine.update={update}",) if update != "drain" else ()),
        *((f"rl.sync_every={many * steps}",) if many > 1 else ()),
        *(("rl.checkpoint_every=4", "keep_checkpoints=9") if resumed else ()),
    ]
    given = {w.split("=", 1)[0] for w in more}
    return Drawn(index, recipe, (*(w for w in words if w.split("=", 1)[0] not in given), *more), needs, resumed)


def _imitation(recipe: str, dtype: str, one: Any) -> list[str]:
    """From none at all to long past certainty."""
    stage = {"ladder": "cot"}.get(recipe, "sft")
    steps = one(0, 5, 30, 100, 300, p=(0.15, 0.2, 0.3, 0.25, 0.1))
    if dtype == "bfloat16":
        steps = min(steps, 30)
    if recipe == "shop":
        steps = min(steps, 100)
    others = [
        "pretrain.steps=10",
        "pretrain.batch=16",
        "pretrain.eval=false",
        "sft.steps=10",
        "sft.batch=16",
        "sft.eval=false",
    ]
    out = [*(others if recipe == "ladder" else ()), *(("dpo=none", "sft_continued=none") if recipe == "ladder" else ())]
    if not steps:
        return [*out, f"{stage}=none"]
    return [
        *out,
        f"{stage}.steps={steps}",
        f"{stage}.batch=16",
        f"{stage}.eval=false",
        f"{stage}.optimizer.lr={one(1e-3, 4e-3)}",
    ]


def _sampling(rng: np.random.Generator, one: Any, cut: bool) -> list[str]:
    """Temperatures and truncations of every kind (where `cut`), seldom a penalty or a lower end of a turn."""
    out = [f"rl.sampling.temperature={one(0.3, 0.6, 0.8, 1.0, 1.2, 1.5, p=(0.08, 0.15, 0.12, 0.4, 0.15, 0.1))}"]
    kinds = {
        "": 0.55,
        "rl.sampling.top_p=0.9": 0.12,
        "rl.sampling.top_p=0.5": 0.05,
        "rl.sampling.top_k=3": 0.08,
        "rl.sampling.top_k=1": 0.02,
        "rl.sampling.min_p=0.1": 0.08,
        "rl.sampling.top_k=8 rl.sampling.top_p=0.95 rl.sampling.min_p=0.02": 0.1,
    }
    kind = one(*kinds, p=kinds.values())
    out += kind.split() if cut else []
    out += ["rl.sampling.repetition_penalty=1.1"] if rng.random() < 0.06 else []
    out += ["rl.sampling.min_tokens=2"] if rng.random() < 0.06 and cut else []
    return out


def _rewards(recipe: str, algorithm: str, one: Any) -> list[str]:
    """Sparse, graded, or of two sources, on the prompts of `verifiable`; what PRIME is paid lies in 0..1."""
    if recipe != "verifiable":
        return []
    mine = ROOT / "posttrain/recipe/data/rewards.py"
    correct, two = [f"env.rewards={mine}:correct"], [f"env.rewards=last_integer,{mine}:brief"]
    drawn = one([], correct, two, ["env.rewards.1.weight=0.3"])
    if algorithm != "prime" or drawn == correct:
        return drawn
    return [*(two if drawn == two else ()), "env.rewards.0.weight=0.5", "env.rewards.1.weight=0.5"]


# --- playing one ------------------------------------------------------------------------------------------------------


def play(run: Drawn, folder: Path, scratch: Path, **over: Any) -> Outcome:
    """Run it in `folder`; models that several runs need are trained once into `scratch`. `over`: the ranks."""
    begun = time.perf_counter()
    words = list(run.words)
    told: dict[str, Any] = {}
    try:
        if run.needs:
            second = _second(run, scratch)
            words.append(f"rl.reference={second}" if run.needs == "teacher" else f"engine.draft={second}")
        posttrain.run(run.recipe, *words, out=folder / "run", quiet=True, **over)
        if run.resumed:
            posttrain.run(resume=next((folder / "run/checkpoints").glob("*-rl-000004")), quiet=True)
    except ConfigError as error:
        told["refused" if not _begun(folder / "run") else "stopped"] = str(error)
    except Exception as error:
        told["stopped"] = (
            f"{type(error).__name__}: {error}" if isinstance(error, PosttrainError) else traceback.format_exc()
        )
    if "stopped" in told:
        told["healthy"] = _finite(run.recipe, words, folder / "unwatched")
    steps = run_reader.steps(folder / "run") if (folder / "run/run.json").exists() else []
    notes = sorted({n.split(":")[0].removeprefix("rule ") for s in steps for n in s.notes if n.startswith("rule ")})
    count = sum(s.stage == steps[-1].stage for s in steps)
    return Outcome(run.index, run.recipe, words, time.perf_counter() - begun, count, notes=notes, **told)


def _begun(folder: Path) -> bool:
    return (folder / "run.json").exists() and bool(run_reader.steps(folder))


def _finite(recipe: str, words: list[str], folder: Path) -> bool:
    """Whether the run's losses are finite to its end with every check switched off. A run that ends with an error of
    settings or files there too is as healthy as its settings: the error is ours."""
    try:
        with unwatched():
            posttrain.run(recipe, *words, out=folder, quiet=True)
    except (ConfigError, DataError, RunFolderError):
        return True
    except (PosttrainError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        print(f"  with checks off: {error}", flush=True)
        return False
    gauges = [
        s.gauges[n].sum
        for s in run_reader.steps(folder)
        for n in s.gauges
        if n in ("loss/total", "optim/grad_norm", "sft/loss")
    ]
    return bool(np.all(np.isfinite(gauges)))


def _second(run: Drawn, scratch: Path) -> Path:
    """A small model with the tokenizer that `run` will have, trained for a few steps."""
    folder = scratch / f"second-{run.recipe}"
    if not (folder / "config.json").exists():
        words = [w for w in run.words if w.startswith(("env.", "model.arch=qwen3", "model.hidden", "model.ffn"))]
        left_out = ("pretrain=none", "sft=none", "dpo=none", "sft_continued=none")
        stages = ["rl=none", *(left_out if run.recipe == "ladder" else ())]
        stage = "cot" if run.recipe == "ladder" else "sft"
        with tempfile.TemporaryDirectory(dir=scratch) as temporary:
            done = posttrain.run(
                run.recipe,
                *words,
                *stages,
                f"{stage}.steps=30",
                f"{stage}.batch=16",
                out=Path(temporary) / "run",
                quiet=True,
            )
            made = Path(posttrain.export(done.folder, Path(temporary) / "model"))
            with contextlib.suppress(OSError):
                made.rename(folder)
    return folder


# --- many -------------------------------------------------------------------------------------------------------------


def played(seed: int, index: int, ahead: bool, folder: Path, scratch: Path) -> Outcome:
    """Run number `index`. While its learner's settings are refused for a stated rule, they are drawn again."""
    rules = list[str]()
    while True:
        outcome = play(draw(seed, index, ahead, len(rules)), folder / str(len(rules)), scratch)
        rule = rule_of(outcome.refused) if draws_learner(seed, index) and len(rules) < AGAIN else ""
        if not rule:
            return replace(outcome, redrawn=rules)
        rules.append(rule)


def _work(job: tuple[int, int, str, bool]) -> Outcome:
    seed, index, scratch, ahead = job
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return played(seed, index, ahead, Path(folder), Path(scratch))


def many(seed: int, indices: Iterable[int], jobs: int, ahead: bool = False) -> list[Outcome]:
    """Play these runs, side by side in `jobs` processes."""
    scratch = tempfile.mkdtemp(prefix="healthy-")
    todo = [(seed, i, scratch, ahead) for i in indices]
    out: list[Outcome] = []
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for part in range(0, len(todo), PART):
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                for done in as_completed([pool.submit(_work, job) for job in todo[part : part + PART]]):
                    out.append(outcome := done.result())
                    print(line(outcome, len(out), len(todo)), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sorted(out, key=lambda o: o.index)


def line(o: Outcome, done: int, of: int) -> str:
    told = (
        f"FALSE ALARM: {o.stopped}"
        if o.stopped and o.healthy
        else f"ill: {o.stopped}"
        if o.stopped
        else f"refused: {o.refused}"
        if o.refused
        else "fine"
    )
    return (
        f"{done}/{of} run {o.index} {o.recipe} {o.seconds:.1f} s: {told[:400]}{f' notes {o.notes}' if o.notes else ''}"
    )


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts, and whatever was stopped or refused with its words."""
    alarms = [o for o in outcomes if o.stopped and o.healthy]
    return {
        "runs": len(outcomes),
        "healthy": sum(o.healthy and not o.refused for o in outcomes),
        "false_alarms": len(alarms),
        "ill": sum(not o.healthy for o in outcomes),
        "refused": sum(bool(o.refused) for o in outcomes),
        "steps": sum(o.steps for o in outcomes),
        "seconds": sum(o.seconds for o in outcomes),
        "notes": dict(Counter(n for o in outcomes for n in o.notes)),
        "redrawn": dict(Counter(rule for o in outcomes for rule in o.redrawn)),
        "recipes": dict(Counter(o.recipe for o in outcomes)),
        "told": [asdict(o) for o in outcomes if o.stopped or o.refused],
    }


def _write(told: dict[str, Any], ahead: bool, learner: bool) -> None:
    """Into the file of results, beside what other programs and options wrote there."""
    path = AHEAD if ahead else RESULTS
    before = json.loads(path.read_text(encoding="utf-8"))
    others = {name: before[name] for name in ("preferences", "learner") if name in before}
    whole = before | {"learner": told} if learner else told | others
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--ahead", action="store_true", help="groups are asked ahead of the updates")
    parser.add_argument("--learner", action="store_true", help="only runs that draw settings of the learner")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    if args.only is not None:
        run = draw(args.seed, args.only, args.ahead)
        print(f"posttrain run {run.recipe} {' '.join(run.words)}  {run.needs}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            outcome = played(args.seed, args.only, args.ahead, Path(scratch) / "one", Path(scratch))
        if outcome.redrawn:
            print(f"drawn again for {', '.join(outcome.redrawn)}: {' '.join(outcome.words)}", flush=True)
        print(line(outcome, 1, 1))
        return
    begun = time.perf_counter()
    chosen = (i for i in itertools.count() if not args.learner or draws_learner(args.seed, i))
    outcomes = many(args.seed, itertools.islice(chosen, args.count), args.jobs, args.ahead)
    told = {
        "seed": args.seed,
        "date": time.strftime("%Y-%m-%d"),
        "wall": time.perf_counter() - begun,
        **summary(outcomes),
        "drawn": drawn_of(o.words for o in outcomes if draws_learner(args.seed, o.index)),
    }
    print(json.dumps({k: v for k, v in told.items() if k != "told"}, indent=1))
    if not args.dry:
        _write(told, args.ahead, args.learner)
    if told["false_alarms"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
