"""Does the package still compute what it computed? Digests of many short runs, taken from two source trees and
compared.

    PYTHONPATH=TREE python scripts/digests.py take OUT.json   # five minutes of one core; TREE holds `posttrain`
    PYTHONPATH=TREE python scripts/digests.py take OUT.json --only 'algorithm/*'
    python scripts/digests.py compare BEFORE.json AFTER.json           # status 1 where they differ

`take` plays the first steps of each stage of every shipped recipe, of every algorithm, and of a few options, on
whatever `posttrain` is imported. It reads only what a run leaves: weights, checkpoints, the record without its clock,
episodes, and the results of stages. Two takes can be compared where machine, versions of libraries and threads are the
same. What differs is named by run and part. What was renamed, or differs on purpose, is listed in `RENAMED` and
`INTENDED` below; anything else is a difference.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RENAMED: dict[str, str] = {}
"""Regular expression over `RUN PART` of the older take -> what it is called now."""
INTENDED: dict[str, str] = {
    "recipe/sft/* *": "a recipe that the older tree does not have",
    "recipe/grpo/* *": "a recipe that the older tree does not have",
    "recipe/verifiable/* *": "its prompts, held-out tasks and steps are others, so that RL gains on held-out prompts",
    "algorithm/top_entropy *": "it chooses tokens by their entropy, whose last bits are others",
    "algorithm/skywork_or1 *": "its loss reads the entropy, whose last bits are others",
    "* record/*/gauge/learner/*": "a gauge that the older tree does not have",
    "* result/*/loss": "a figure that the older tree does not have",
    "* result/*/loss_before": "a figure that the older tree does not have",
    "option/micro_tokens *": "its micro-batches hold other sequences, so sums of their gradients are rounded otherwise",
}
"""Pattern (of fnmatch) over `RUN PART` of the newer take -> why it may differ."""

Parts = dict[str, list[str]]
"""Name of a part -> one short digest for each step, file or checkpoint it has, in order."""
CLOCKS = ("seconds", "roles", "peaks")
"""What a stage's result says of time and memory."""
CLOCK_TIME = re.compile(r"\b\d+\.\d+ s\b")
"""How long a program ran, in the words of its verdict."""
REWARDS = "def spread(task, text: str) -> float:\n    return sum(text.encode()) % 7 / 7\n"
"""A reward that differs between siblings whatever the policy says, so that untaught policies learn something too."""


# --- what is played ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Play:
    """One run as the command line would have it. `{start}`, `{teacher}` and `{rewards}` stand for files that `take`
    makes."""

    name: str
    recipe: str
    words: tuple[str, ...]
    again_from: str = ""
    """End of a checkpoint's name: the finished run is cut back to it and resumed."""
    nproc: int | None = None
    parallel: str = "rows"
    """How the processes of `nproc` divide the weights."""


MEASURED = ("env.heldout=8", "evaluation.samples=2")
EASY = ("env.args.max_terms=2", "env.args.max_operand=9")
"""Sums that a model of a hundred steps sometimes knows."""
RL = ("rl.steps=3", "rl.prompts=4", "rl.siblings=4", "rl.eval_every=2", "rl.checkpoint_every=2")
REJECTION = (
    "reject.steps=3",
    "reject.prompts=4",
    "reject.siblings=4",
    "reject.method=rft",
    "reject.method.keep.at=0.1",
)
KEPT = ("keep_checkpoints=20",)
START = Play("start", "arithmetic", (*MEASURED, *EASY, "sft.steps=100", "sft.batch=64", "rl=none"))
TAUGHT = (*MEASURED, *EASY, *KEPT, "sft=none", "model.path={start}")
TEACHER = Play("teacher", "arithmetic", (*TAUGHT, *RL, "rl.algorithm=dr_grpo", "rl.optimizer.lr=3e-3"))


def _imitated(stage: str, steps: int) -> tuple[str, ...]:
    return (f"{stage}.steps={steps}", f"{stage}.batch=16", f"{stage}.checkpoint_every=2")


def _first_steps(stage: Any) -> tuple[str, ...]:
    """Settings that cut a stage of a recipe to its first steps, by its kind."""
    from posttrain.config.run import Reinforce
    from posttrain.config.stages.rejection import Rejection
    from posttrain.config.stages.step_labels import StepLabeling

    if isinstance(stage, Reinforce):
        return tuple(w.replace("rl.", f"{stage.name}.", 1) for w in RL)
    if isinstance(stage, Rejection):
        return REJECTION
    if isinstance(stage, StepLabeling):
        return (f"{stage.name}.steps=2", f"{stage.name}.prompts=8", f"{stage.name}.siblings=2")
    return _imitated(stage.name, 3)


def recipes() -> Iterator[Play]:
    """The first steps of each stage of every shipped recipe, seeds 0 and 1."""
    from posttrain.recipe.recipes import RECIPES

    rewards = {
        "verifiable": ("env.rewards=last_integer,{rewards}:spread",),
        "rlhf": (),  # its reward model, which it trains
        "prm": (),  # its process reward model, which it trains
        "reward_model": (),  # nothing is sampled
    }
    for name, recipe in RECIPES.items():
        cut = [w for stage in recipe.build().stages for w in _first_steps(stage)]
        for seed in (0, 1):
            words = (*cut, *rewards.get(name, ("env.rewards={rewards}:spread",)))
            yield Play(f"recipe/{name}/{seed}", name, (f"seed={seed}", *MEASURED, *KEPT, *words))


SEVERAL_TURNS = ("mt_grpo", "gigpo")


def algorithms() -> Iterator[Play]:
    """Two steps of two minibatches of every algorithm: the second minibatch is off policy."""
    from posttrain.ladder.policy_rows import LADDER

    steps = (
        "rl.steps=2",
        "rl.prompts=4",
        "rl.siblings=6",
        "rl.minibatches=2",
        "rl.refill=2",
        "rl.eval_every=0",
        "rl.checkpoint_every=0",
    )
    needs = {
        "opd": ("rl.reference={teacher}",),
        "gkd": ("rl.reference={teacher}",),
        "sdpo": ("rl.optimizer.ema=0.95",),
        "grpo_process": ("env.args.judge_steps=true",),
        "vapo": ("rl.baseline.warmup=1",),
    }
    for name in LADDER:
        yield Play(f"algorithm/{name}", "arithmetic", (*TAUGHT, *steps, f"rl.algorithm={name}", *needs.get(name, ())))
    for name in SEVERAL_TURNS:
        words = (*_imitated("sft", 3), "env.rewards={rewards}:spread", *MEASURED, *KEPT, *steps, f"rl.algorithm={name}")
        yield Play(f"algorithm/{name}/turns", "calculator", words)


def options() -> Iterator[Play]:
    """What a user may set beside the algorithm."""
    told = {
        "passes": "rl.minibatches=2 rl.epochs=2",
        "micro_tokens": "rl.micro_tokens=48 rl.minibatches=2",
        "oversample": "rl.oversample=2",
        "filter": "rl.algorithm=dapo rl.prompts=2 rl.siblings=4 rl.refill=4",
        "top_p": "rl.sampling.temperature=0.7 rl.sampling.top_p=0.9",
        "top_k": (
            "rl.sampling.top_k=5 rl.sampling.min_p=0.02 rl.sampling.repetition_penalty=1.1 rl.sampling.min_tokens=2"
        ),
        "bfloat16": "model.dtype=bfloat16",
        "values": "rl.algorithm=ppo rl.minibatches=2 rl.epochs=2",
        "value_clip": "rl.algorithm=ppo rl.baseline.clip=0.2 rl.minibatches=2 rl.epochs=2 rl.entropy=entropybonus",
        "refresh": "rl.pull.refresh=1 rl.steps=4",
        "kl_in_reward": "rl.algorithm=rloo rl.minibatches=2",
        "truncate": "rl.correction=truncate rl.minibatches=2",
        "overlong": "rl.shape=signed,overlong rl.sampling.max_tokens=8",
        "checkpointing": "model.gradient_checkpointing=true",
        "deterministic": "deterministic=true",
        "few_slots": "slots=5",
        "lookup": "engine.lookup=3",
        "draft": "engine.draft={teacher}",
        "reference": "rl.reference={teacher}",
        "curriculum": "rl.algorithm=scalerl rl.minibatches=2",
        "optimizer": "rl.optimizer.weight_decay=0.1 rl.optimizer.clip=0.1 rl.optimizer.warmup=0 rl.minibatches=2",
        "target": "rl.target=0.01 rl.eval_every=1",
        "unmeasured": "env.heldout=0",
        "no_episodes": "record_episodes=false",
    }
    for name, words in told.items():
        own = words.split()
        yield Play(f"option/{name}", "arithmetic", (*_without(own, (*TAUGHT, *RL)), *own))
    for arch in ("llama", "gemma", "gpt2"):
        words = (
            "env.rewards={rewards}:spread",
            *_imitated("sft", 3),
            *MEASURED,
            *EASY,
            *RL,
            *KEPT,
            f"model.arch={arch}",
        )
        yield Play(f"option/{arch}", "arithmetic", words)
    whole = ("env.rewards={rewards}:spread", *_imitated("sft", 5), *MEASURED, *EASY, *RL, *KEPT, "rl.algorithm=ppo")
    for end in ("sft-000002", "sft-000000", "rl-000002"):
        yield Play(f"resumed/{end}", "arithmetic", whole, end)
    refreshed = (
        *_without(["rl.steps=", "rl.checkpoint_every="], (*TAUGHT, *RL)),
        "rl.steps=4",
        "rl.checkpoint_every=1",
        "rl.pull.refresh=2",
    )
    yield Play("resumed/refreshed", "arithmetic", refreshed, "rl-000003")


def preferences() -> Iterator[Play]:
    """Three steps of every algorithm of preferences, after a few of imitation."""
    from posttrain.ladder.preference_rows import PREFERENCES

    cut = (*_imitated("sft", 3), *_imitated("dpo", 3), "env.heldout=8", "evaluation.samples=2", *KEPT)
    for name in PREFERENCES:
        yield Play(f"preference/{name}", "dpo", (*cut, f"dpo.algorithm={name}"))


def kinds() -> Iterator[Play]:
    """What is computed otherwise than by one process, over all weights, with AdamW, from fresh samples."""
    told = {
        "adamw8bit": "rl.optimizer=adamw8bit",
        "muon": "rl.optimizer=muon",
        "sgd": "rl.optimizer=sgd",
        "staleness": "rl.staleness=2 rl.steps=4",
        "inflight": "rl.staleness=2 rl.steps=4 engine.update=inflight rl.algorithm=decoupled_ppo",
        "processes": "placement=processes rl.staleness=1",
    }
    for name, words in told.items():
        own = words.split()
        yield Play(f"kind/{name}", "arithmetic", (*_without(own, (*TAUGHT, *RL)), *own))
    small = ("env.rewards={rewards}:spread", *_imitated("sft", 3), *MEASURED, *EASY, *RL, *KEPT)
    adapters = {
        "lora": "model.lora.rank=4",
        "dora": "model.lora.rank=4 model.lora.dora=true",
        "mixture": "model.arch=qwen3_moe model.experts=4 model.experts_per_token=2 model.router_replay=sampler",
    }
    for name, words in adapters.items():
        yield Play(f"kind/{name}", "arithmetic", (*small, *words.split()))
    for name, parallel in (("ranks", "rows"), ("ranks_experts", "experts"), ("ranks_tensor", "tensor")):
        own = ("model.arch=qwen3_moe", "model.experts=4", "model.experts_per_token=2") if "experts" in name else ()
        yield Play(f"kind/{name}", "arithmetic", (*small, *own), nproc=2, parallel=parallel)


def _without(own: Iterable[str], words: Iterable[str]) -> list[str]:
    """`words` less those that `own` says too."""
    said = {w.partition("=")[0] for w in own}
    return [w for w in words if w.partition("=")[0] not in said]


# --- what is left of a run --------------------------------------------------------------------------------------------


def short(data: Any) -> str:
    """Twelve hexadecimal digits of bytes, or of plain data as JSON."""
    raw = data if isinstance(data, bytes) else json.dumps(data, sort_keys=True).encode()
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def parts_of(folder: Path, results: Sequence[Any]) -> Parts:
    """Everything that a finished run computed, part by part."""
    out: Parts = {}
    for said in (*_tensors(folder), *_record(folder), *_episodes(folder), *_results(results)):
        out.setdefault(said[0], []).append(said[1])
    return out


def _tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """Kept weights and all checkpoints, optimizer included, by tensor."""
    import torch
    from safetensors.torch import load_file

    for path in sorted(folder.glob("[ck]*/*/*.safetensors")):
        where, name = path.parts[-3], path.parts[-2]
        for tensor, x in load_file(path).items():
            raw = x.reshape(-1).view(torch.uint8).numpy().tobytes()
            yield f"{where}/{name}/{path.stem}/{tensor}", short(raw + str((x.dtype, tuple(x.shape))).encode())


def _record(folder: Path) -> Iterator[tuple[str, str]]:
    """Every line of the record but its clock: each gauge by its name, with the step it stands at."""
    for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        stage, index = step.pop("stage"), step["index"]
        del step["clock"]
        step.pop("memory", None)
        for gauge, value in step.pop("gauges").items():
            yield f"record/{stage}/gauge/{gauge}", f"{index}:{short(value)}"
        for part, value in step.items():
            yield f"record/{stage}/{part}", f"{index}:{short(value)}"


def _episodes(folder: Path) -> Iterator[tuple[str, str]]:
    """Every column of every episode file; what is no column, by its name."""
    import numpy as np

    for path in sorted((folder / "episodes").glob("*.npz")):
        stage, _, end = path.stem.partition("-0")
        kind = "eval" if end.endswith("-eval") else "train"
        with np.load(path) as columns:
            meta = json.loads(columns["meta"].tobytes())
            held = {n: short(columns[n].tobytes()) for n in columns.files if n != "meta"}
            meta["episodes"] = CLOCK_TIME.sub("TIME", json.dumps(meta["episodes"], sort_keys=True))
        for name, digest in (held | {f"meta.{n}": short(x) for n, x in meta.items()}).items():
            yield f"episodes/{stage}/{kind}/{name}", f"0{end}:{digest}"


def _results(results: Sequence[Any]) -> Iterator[tuple[str, str]]:
    for stage in results:
        for name, value in asdict(stage).items():
            if name not in CLOCKS:
                yield f"result/{stage.name}/{name}", short(value)


# --- taking -----------------------------------------------------------------------------------------------------------


def play(one: Play, scratch: Path) -> Parts:
    """Play it in a folder that is removed afterwards. A run that is stopped or refused leaves the words it was stopped
    with."""
    import posttrain

    made = {"start": scratch / "start-model", "teacher": scratch / "teacher-model", "rewards": scratch / "rewards.py"}
    words = [w.format(**made) for w in one.words]
    ranks: dict[str, Any] = {"nproc": one.nproc, "parallel": one.parallel} if one.nproc else {}
    with tempfile.TemporaryDirectory(dir=scratch) as temporary:
        folder = Path(temporary) / "run"
        try:
            done = posttrain.run(one.recipe, *words, out=folder, quiet=True, **ranks)
            if one.again_from:
                (begin,) = (folder / "checkpoints").glob(f"*-{one.again_from}")
                done = posttrain.run(resume=begin, quiet=True)
            if one.name in ("start", "teacher"):
                posttrain.export(done.folder, made[one.name])
        except Exception as error:
            told = f"{type(error).__name__}: {error}".replace(str(scratch), "SCRATCH").replace(temporary, "TEMPORARY")
            return {"stopped": [told]}
        return parts_of(folder, done.stages)


def _work(one: Play, scratch: str) -> tuple[str, Parts, float]:
    begun = time.perf_counter()
    return one.name, play(one, Path(scratch)), time.perf_counter() - begun


def take(only: str, jobs: int) -> dict[str, Parts]:
    """The digests of all runs whose name fits `only`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [
        p for p in (*recipes(), *algorithms(), *options(), *preferences(), *kinds()) if fnmatch.fnmatch(p.name, only)
    ]
    out: dict[str, Parts] = {}
    with (
        tempfile.TemporaryDirectory(prefix="digests-") as scratch,
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        (Path(scratch) / "rewards.py").write_text(REWARDS, encoding="utf-8")
        for first in ([START], [TEACHER], chosen):
            for done in as_completed([pool.submit(_work, p, scratch) for p in first]):
                name, parts, seconds = done.result()
                out[name] = parts
                print(f"{name}: {len(parts)} parts, {seconds:.1f} s {' '.join(parts.get('stopped', ()))}", flush=True)
    return {name: out[name] for name in sorted(out)}


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A part that is not the same, and how."""

    run: str
    part: str
    how: str
    why: str = ""
    """Why it may differ; '' where nobody said so."""


def compare(
    before: Mapping[str, Parts],
    after: Mapping[str, Parts],
    renamed: Mapping[str, str] = RENAMED,
    intended: Mapping[str, str] = INTENDED,
) -> list[Difference]:
    """What differs, by run and part, after the renames."""
    old = {_renamed(f"{run} {part}", renamed): x for run, parts in before.items() for part, x in parts.items()}
    new = {f"{run} {part}": x for run, parts in after.items() for part, x in parts.items()}
    out: list[Difference] = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            run, _, part = name.partition(" ")
            why = next((why for pattern, why in intended.items() if fnmatch.fnmatchcase(name, pattern)), "")
            out.append(Difference(run, part, _how(old.get(name), new.get(name)), why))
    return out


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for pattern, now in renamed.items():
        name = re.sub(pattern, now, name)
    return name


def _how(old: list[str] | None, new: list[str] | None) -> str:
    if old is None or new is None:
        return "is new" if old is None else "is gone"
    first = next((a for a, b in zip(old, new, strict=False) if a != b), None)
    if first is None:
        return f"has {len(new)} entries, had {len(old)}"
    return f"differs at {first.partition(':')[0]}" if ":" in first else "differs"


def told(found: Sequence[Difference], shown: int = 15) -> Iterator[str]:
    """What `compare` prints: run by run, the first differences of each."""
    for run in dict.fromkeys(d.run for d in found):
        mine = [d for d in found if d.run == run]
        yield f"{run}: {len(mine)} parts"
        yield from (f"  {d.part} {d.how}{f' (intended: {d.why})' if d.why else ''}" for d in mine[:shown])
        if len(mine) > shown:
            yield f"  and {len(mine) - shown} more"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take")
    taking.add_argument("out", type=Path)
    taking.add_argument("--only", default="*", help="runs whose name fits this pattern")
    taking.add_argument("--jobs", type=int, default=2)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--only", default="*", help="runs whose name fits this pattern")
    comparing.add_argument("--all", action="store_true", help="every part that differs, and not the first of each run")
    args = parser.parse_args()
    if args.command == "take":
        import posttrain

        print(f"of {Path(posttrain.__file__).parent}", flush=True)
        taken = take(args.only, args.jobs)
        args.out.write_text(json.dumps(taken, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (args.before, args.after))
    before, after = (
        {run: x for run, x in taken.items() if fnmatch.fnmatch(run, args.only)} for taken in (before, after)
    )
    found = compare(before, after)
    for line in told(found, sys.maxsize if args.all else 15):
        print(line)
    wrong = sum(not d.why for d in found)
    print(
        f"{sum(map(len, before.values()))} parts of {len(before)} runs: {len(found) - wrong} differ on purpose, {wrong}"
        " otherwise"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
