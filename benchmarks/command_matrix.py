"""Every command over every kind of run: is each answer right, or a refusal that says why?

    python -m benchmarks.command_matrix                          # all kinds, all commands
    python -m benchmarks.command_matrix --kinds ppo,lora --keep  # some kinds, whose run folders are kept
    python -m benchmarks.command_matrix --draw 3 --seed 7        # what CI does: some kinds, drawn by a seed

A kind is a recipe, a family of algorithms, a form of the weights, or a way to run (`KINDS`). Each is played once, so
small that it learns nothing, and every command (`COMMANDS`) is called over its folder as a user calls it. A cell is
**right** where the command ends with 0 and its answer passes what this file asks of it; **refused** where it ends with
one sentence that `REFUSED` expects; **wrong** in every other case. Writes results/command_matrix.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.core import reader, seeds

RESULTS = Path(__file__).parent / "results" / "command_matrix.json"
TINY = "model.hidden=32 model.ffn=64 model.layers=1 model.heads=2 model.kv_heads=2"
HELD = "env.heldout=6 evaluation.samples=2"
SFT = "sft.steps=8 sft.batch=16 sft.eval=false"
RL = "rl.steps=2 rl.prompts=4 rl.siblings=4 rl.eval_every=0 rl.checkpoint_every=1 keep_checkpoints=9"
SHORT = f"{TINY} {HELD} {SFT} {RL}"
BASELINES = {
    "zero": "reinforce", "ema": "reinforce_ema", "sourceema": "rae", "others": "rloo", "greedy": "remax",
    "lengthmean": "opo", "energymean": "otb", "groupmean": "grpo", "softmean": "opmd", "value": "ppo",
    "value_warm": "vapo", "implicit": "prime", "togo": "reinforce_pp", "secondbest": "grpo_passk",
    "offpolicymean": "vcpo",
}  # fmt: skip
"""One algorithm of every baseline that plays a single turn."""
ARITHMETIC = f"arithmetic {SHORT}"
PAIRS = f"dpo {TINY} {HELD} {SFT} dpo.steps=2 dpo.batch=8 dpo.eval_every=0"
REWARD = f"reward_model {TINY} {HELD} reward_model.steps=2 reward_model.batch=8 reward_model.eval_every=0"
KINDS: dict[str, str] = {
    "sft": f"sft {TINY} {HELD} {SFT}",
    "grpo": f"grpo {TINY} {HELD} {RL}",
    "verifiable": f"verifiable {SHORT}",
    "dpo": PAIRS,
    "reward_model": REWARD,
    "rlhf": f"rlhf {SHORT} reward_model.steps=2 reward_model.batch=8",
    "judge": f"judge {SHORT}",
    "prm": f"prm {SHORT} label.steps=1 label.prompts=8 prm.steps=2 prm.batch=8",
    "prm_alone": f"prm {TINY} {HELD} {SFT} label.steps=1 label.prompts=8 prm.steps=2 prm.batch=8 rl=none",
    "ladder": f"ladder {SHORT} pretrain.steps=8 pretrain.batch=16 cot.steps=8 cot.batch=16 dpo.steps=2 dpo.batch=8"
    " sft_continued=none",
    "arithmetic": ARITHMETIC,
    "reject": f"reject {TINY} {HELD} {SFT} reject.rounds=2 reject.prompts=8 reject.siblings=4 reject.steps=4"
    " reject.batch=8 reject.eval_every=0",
    "calculator": f"calculator {SHORT}",
    "shop": f"shop {SHORT}",
    "programs": f"programs {SHORT}",
    **{f"baseline_{kind}": f"{ARITHMETIC} rl.algorithm={name}" for kind, name in BASELINES.items()},
    "baseline_turnmean": f"calculator {SHORT} rl.algorithm=mt_grpo",
    "baseline_anchormean": f"calculator {SHORT} rl.algorithm=gigpo",
    "distill_hint": f"{ARITHMETIC} rl.algorithm=sdft",
    "shown": f"{ARITHMETIC} rl.algorithm=luffy",
    "kto": f"{PAIRS} dpo.algorithm=simpo",
    "lora": f"{ARITHMETIC} model.lora.rank=2",
    "quantised": f"{ARITHMETIC} model.lora.rank=2 model.quantize=int8",
    "lora_ppo": f"{ARITHMETIC} model.lora.rank=2 rl.algorithm=ppo",
    "lora_reward": f"{REWARD} model.lora.rank=2",
    "averaged": f"{ARITHMETIC} rl.optimizer.ema=0.9 rl.algorithm=ppo",
    "averaged_reward": f"{REWARD} reward_model.optimizer.ema=0.9",
    "bfloat16": f"{ARITHMETIC} model.dtype=bfloat16",
    "muon": f"{ARITHMETIC} rl.optimizer.kind=muon",
    "mixture": f"{ARITHMETIC} model.arch=mixtral model.experts=4",
    "mixture_hint": f"{ARITHMETIC} model.arch=mixtral model.experts=4 rl.algorithm=sdft",
    "ranks": f"{ARITHMETIC} --nproc 2",
    "ranks_tensor": f"{ARITHMETIC} --nproc 2 --parallel tensor",
    "ranks_ppo": f"{ARITHMETIC} rl.algorithm=ppo --nproc 2",
    "ranks_lora": f"{ARITHMETIC} model.lora.rank=2 --nproc 2",
    "stale": f"{ARITHMETIC} rl.staleness=2",
    "processes": f"{ARITHMETIC} placement=processes",
    "processes_stale": f"{ARITHMETIC} placement=processes rl.staleness=1 engine.update=inflight",
    "no_episodes": f"{ARITHMETIC} record_episodes=false",
    "unjudged": f"{PAIRS} env.rewards=none",
}
"""Name -> what is written behind `posttrain run`."""
COST = {"shop": 3, "prm": 2, "ladder": 2}
WRONG = re.compile(r"Traceback|\bnan\b|TypeError|KeyError|ValueError|did you mean '([^']+)'")
"""What no answer holds."""


@dataclass(frozen=True)
class Ran:
    """What a command answered."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Cell:
    """One command over one kind of run."""

    kind: str
    command: str
    words: str
    state: str
    """right, refused or wrong."""
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Made:
    """A run that was played, and where a command may write."""

    kind: str
    folder: Path
    scratch: Path
    other: Path
    """A run of the recipe `arithmetic`."""

    @property
    def words(self) -> list[str]:
        return shlex.split(KINDS[self.kind])

    @property
    def trains_policy(self) -> bool:
        """Whether the last stage left a policy."""
        return self.kind not in REWARD_MODELS

    @property
    def last(self) -> str:
        return reader.run_file(self.folder).run.stages[-1].name

    def environment(self) -> list[str]:
        """Words that name its environment where a model alone is measured."""
        env = reader.run_file(self.folder).run.env
        named = [f"env={env.name}"] if env.name != "prompts" else [f"env.prompts={env.prompts}"]
        rewards = [f"env.rewards={r.function}" for r in env.rewards[:1] if not r.function.startswith("model:stage")]
        return [*named, *rewards, *(f"env.args.{n}={json.dumps(v)}" for n, v in env.args.items()), "env.heldout=6"]


REWARD_MODELS = ("reward_model", "prm_alone", "lora_reward", "averaged_reward")
RL_KINDS = tuple(k for k, words in KINDS.items() if "rl.steps" in words and k not in REWARD_MODELS)


def call(*words: str) -> Ran:
    """A command as a user calls it."""
    from posttrain.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            code = 1
            print(traceback.format_exc(), file=sys.stderr)
    return Ran(code, out.getvalue(), err.getvalue())


# --- commands ---------------------------------------------------------------------------------------------------------


def measured(text: str) -> list[str]:
    """The rows of measures that `posttrain eval` prints."""
    return [
        row for row in text.splitlines() if re.search(r"accuracy|pass@|reward|agree|score", row) and "95 %" not in row
    ]


def exported(made: Made, *more: str) -> tuple[Ran, str]:
    """Export, and measure what was written as the run is measured."""
    target = made.scratch / f"model{'-'.join(more)}"
    done = call("export", str(made.folder), str(target), *more)
    if done.code or "--adapter" in more:
        return done, ""
    if not (target / "certificate.json").exists():
        return done, "no certificate"
    if "--ema" in more:
        return done, ""
    same = [] if not made.trains_policy else ["--max-tokens", "12", "--temperature", "1"]
    of_run = call("eval", str(made.folder), *same)
    of_model = call("eval", str(target), *made.environment(), *same, *_seed(made))
    if of_run.code or of_model.code:
        return max(of_run, of_model, key=lambda r: r.code), ""
    ours, theirs = measured(of_run.out), measured(of_model.out)
    return of_model, "" if ours and len(ours) == len(theirs) else f"rows of {ours} and of {theirs}"


def _seed(made: Made) -> list[str]:
    return [f"seed={reader.run_file(made.folder).run.seed}"]


def summary(made: Made, *more: str) -> tuple[Ran, str]:
    done = call("summary", str(made.folder), *more)
    rows = [r for r in done.out.splitlines() if r.strip().startswith(f"{made.last} ")]
    return done, "" if any(re.search(r"\d\.\d", r) for r in rows) else f"nothing is measured: {rows}"


def plotted(made: Made) -> tuple[Ran, str]:
    picture = made.scratch / "plot.svg"
    done = call("plot", str(made.folder), "--out", str(picture))
    return done, "" if done.code or "<" in picture.read_text(encoding="utf-8") else "an empty picture"


def resumed(made: Made) -> tuple[Ran, str]:
    """Two more steps, in a copy."""
    import shutil

    copy, stage = made.scratch / "copy", made.last
    shutil.copytree(made.folder, copy)
    steps = reader.run_file(made.folder).run.stage(stage).steps + 2
    before = len(reader.steps(copy))
    over = made.words[made.words.index("--nproc") :] if "--nproc" in made.words else []
    done = call("run", "--resume", str(copy), f"{stage}.steps={steps}", *over)
    return done, "" if done.code or len(reader.steps(copy)) > before else "no step more"


def resumed_whole(made: Made) -> tuple[Ran, str]:
    """As it is: there is nothing to do."""
    before = len(reader.steps(made.folder))
    over = made.words[made.words.index("--nproc") :] if "--nproc" in made.words else []
    done = call("run", "--resume", str(made.folder), *over)
    return done, "" if len(reader.steps(made.folder)) == before else "steps were added"


def branched(made: Made) -> tuple[Ran, str]:
    """A new run from its weights: RL of a policy, a second reward model of a reward model."""
    out = made.scratch / "branch"
    new = ["grpo", *shlex.split(RL)] if made.trains_policy else ["reward_model", "reward_model.steps=2"]
    env = [] if "env.prompts" in " ".join(made.environment()) else [f"env={reader.run_file(made.folder).run.env.name}"]
    done = call(
        "run", *new, *(env if made.trains_policy else []), *HELD.split(), f"model={made.folder}", "--out", str(out)
    )
    return done, "" if done.code or reader.steps(out) else "no step"


def served(made: Made) -> tuple[Ran, str]:
    """One completion over HTTP."""
    from posttrain.core.errors import PosttrainError

    try:
        told = asyncio.run(_ask(made.folder))
    except PosttrainError as error:
        return Ran(error.exit_code, "", f"posttrain: {error}"), ""
    return Ran(0, json.dumps(told), ""), "" if told["choices"][0].get("text") is not None else "no text"


async def _ask(folder: Path) -> dict[str, Any]:
    import aiohttp

    from posttrain.serve.app import Server
    from posttrain.serve.command import make_served
    from posttrain.serve.limits import CallerLimits
    from posttrain.serve.listen import listening

    token = "a-token-for-the-matrix"
    model, _ = make_served(folder, token=token, name="it")
    head = {"Authorization": f"Bearer {token}"}
    async with (
        listening(Server(model, CallerLimits()), "127.0.0.1", 0) as url,
        aiohttp.ClientSession(headers=head) as s,
    ):
        asked = {"model": "it", "prompt": "1+2", "max_tokens": 4, "temperature": 0}
        async with s.post(f"{url}/completions", json=asked) as reply:
            return await reply.json()


def simply(*words: str) -> Callable[[Made], tuple[Ran, str]]:
    """A command whose answer is only read."""

    def played(made: Made) -> tuple[Ran, str]:
        done = call(*(w.replace("RUN", str(made.folder)).replace("OTHER", str(made.other)) for w in words))
        return done, "" if done.out.strip() or done.code else "no answer"

    return played


def searched(*words: str) -> Callable[[Made], tuple[Ran, str]]:
    def played(made: Made) -> tuple[Ran, str]:
        return call("eval", str(made.folder), *words, "--out", str(made.scratch / "search.svg")), ""

    return played


COMMANDS: dict[str, Callable[[Made], tuple[Ran, str]]] = {
    "eval": simply("eval", "RUN"),
    "eval --checkpoint best": simply("eval", "RUN", "--checkpoint", "best", "--samples", "2"),
    "eval --ema": simply("eval", "RUN", "--ema"),
    "eval search=vote": searched("search=vote.count=2"),
    "eval search=best_of": searched("search=best_of.count=2", "search.by=verifier"),
    "eval search=beam": searched("search=beam.width=2"),
    "export": exported,
    "export --checkpoint best": lambda m: exported(m, "--checkpoint", "best"),
    "export --ema": lambda m: exported(m, "--ema"),
    "export --adapter": lambda m: exported(m, "--adapter"),
    "serve": served,
    "show": simply("show", "RUN"),
    "show --eval": simply("show", "RUN", "--eval"),
    "show --episode": simply("show", "RUN", "--episode", "0"),
    "show --compare": simply("show", "RUN", "--compare", "0", "2"),
    "summary": summary,
    "summary --markdown": lambda m: summary(m, "--markdown"),
    "compare": simply("compare", "RUN", "OTHER"),
    "compare itself": simply("compare", "RUN", "RUN"),
    "plot": plotted,
    "ladder --on": simply("ladder", "--on", "RUN", "--against", "grpo,ppo"),
    "resume": resumed,
    "resume, whole": resumed_whole,
    "branch": branched,
}
REFUSED: dict[str, tuple[tuple[str, str], ...]] = {}
"""Command -> (kinds, as a pattern; what the refusal says)."""


def judged(made: Made, name: str) -> Cell:
    began = time.perf_counter()
    try:
        done, wrong = COMMANDS[name](made)
    except Exception:
        done, wrong = Ran(1, "", traceback.format_exc()), ""
    told = f"{done.out}\n{done.err}"
    last = done.err.strip().splitlines()[-1] if done.err.strip() else ""
    if done.code == 0:
        found = WRONG.search(told)
        why = wrong or (f"it says {found[0]!r}" if found else "")
        state = "wrong" if why else "right"
    else:
        found = WRONG.search(told)
        expected = any(re.fullmatch(kinds, made.kind) and part in told for kinds, part in REFUSED.get(name, ()))
        state = "refused" if expected and done.code in (2, 4, 5) and not found else "wrong"
        why = f"[{done.code}] {last}"
    return Cell(made.kind, name, "", state, why, round(time.perf_counter() - began, 2))


# --- many -------------------------------------------------------------------------------------------------------------


def play(kind: str, folder: Path, other: Path, commands: Sequence[str]) -> list[Cell]:
    """Play a run of this kind, and the commands over it."""
    run, began = folder / kind, time.perf_counter()
    done = call("run", *shlex.split(KINDS[kind]), "--out", str(run))
    why = "" if done.code == 0 else f"[{done.code}] {done.err.strip()[-1500:]}"
    cells = [Cell(kind, "run", KINDS[kind], "wrong" if why else "right", why, round(time.perf_counter() - began, 2))]
    if why:
        return cells
    for name in commands:
        scratch = Path(tempfile.mkdtemp(dir=folder))
        cells.append(judged(Made(kind, run, scratch, other), name))
    return cells


def _work(kind: str, folder: str, other: str, commands: Sequence[str]) -> list[Cell]:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    return play(kind, Path(folder), Path(other), commands)


def many(kinds: Sequence[str], commands: Sequence[str], jobs: int, folder: Path) -> Iterator[Cell]:
    """Each kind in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        pool.submit(_work, "arithmetic", str(folder), str(folder / "arithmetic"), ()).result()
        (folder / "other").mkdir()
        (folder / "arithmetic").rename(folder / "other" / "arithmetic")
        other = str(folder / "other" / "arithmetic")
        for done in as_completed([pool.submit(_work, kind, str(folder), other, commands) for kind in kinds]):
            yield from done.result()


def drawn(seed: int, count: int) -> list[str]:
    """So many kinds, and one command of a kind as often as another."""
    rng = seeds.generator(seed, "command-matrix")
    return [list(KINDS)[i] for i in sorted(rng.choice(len(KINDS), count, replace=False))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--commands", default=";".join(COMMANDS))
    parser.add_argument("--draw", type=int, help="so many kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.draw is None else drawn(args.seed, args.draw)
    began, cells = time.perf_counter(), list[Cell]()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for cell in many(kinds, args.commands.split(";"), args.jobs, folder):
            cells.append(cell)
            print(f"{cell.kind:22} {cell.command:26} {cell.state:8} {cell.seconds:6.1f} s  {cell.why}", flush=True)
    told = {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.perf_counter() - began), "kinds": len(kinds)}
    told |= {"cells": len(cells), "states": dict(Counter(c.state for c in cells))}
    print(json.dumps(told, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told | {"table": [asdict(c) for c in cells]}, indent=1) + "\n", encoding="utf-8")
    if any(c.state == "wrong" for c in cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
