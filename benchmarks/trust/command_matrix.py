"""Every command over every kind of run: is each answer right, or a refusal that says why?

    python -m benchmarks.trust.command_matrix                          # all kinds, all commands
    python -m benchmarks.trust.command_matrix --kinds ppo,lora --keep  # some kinds, whose run folders are kept
    python -m benchmarks.trust.command_matrix --draw 3 --seed 7        # what CI does: some kinds, drawn by a seed

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
import shutil
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

from posttrain.config.stages.rejection import Rejection
from posttrain.core import seeds
from posttrain.record import run_reader
from posttrain.serve.caller_limits import CallerLimits
from posttrain.serve.command import make_served
from posttrain.serve.listen import listening
from posttrain.serve.routes import Server
from posttrain.system.errors import PosttrainError

RESULTS = Path(__file__).parent / "results" / "command_matrix.json"
TINY = "model.hidden=32 model.ffn=64 model.layers=1 model.heads=2 model.kv_heads=2"
HELD = "env.heldout=6 evaluation.samples=2"
SFT = "sft.steps=8 sft.batch=16 sft.eval=false"
RL = "rl.steps=2 rl.prompts=4 rl.siblings=4 rl.eval_every=2 rl.checkpoint_every=1 keep_checkpoints=9"
SHORT = f"{TINY} {HELD} {SFT} {RL}"
BASELINES = {
    "zero": "reinforce", "ema": "reinforce_ema", "sourceema": "rae", "others": "rloo", "greedy": "remax",
    "lengthmean": "opo", "energymean": "otb", "groupmean": "grpo", "softmean": "opmd", "value": "ppo",
    "value_warm": "vapo", "implicit": "prime", "togo": "reinforce_pp", "secondbest": "grpo_passk",
    "offpolicymean": "vcpo",
}  # fmt: skip
"""One algorithm of every baseline that plays a single turn."""
ARITHMETIC = f"arithmetic {SHORT}"
PAIRS = f"dpo {TINY} {HELD} {SFT} dpo.steps=2 dpo.batch=8 dpo.eval_every=2"
REWARD = f"reward_model {TINY} {HELD} reward_model.steps=2 reward_model.batch=8 reward_model.eval_every=0"
KINDS: dict[str, str] = {
    "sft": f"sft {TINY} {HELD} sft.steps=8 sft.batch=16",
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
    "simpo": f"{PAIRS} dpo.algorithm=simpo",
    "unmeasured": f"sft {TINY} {HELD} {SFT}",
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

    @property
    def longer(self) -> Path:
        """Where its copy goes on for more steps."""
        return self.folder.with_name(f"{self.kind}-longer")

    @property
    def words(self) -> list[str]:
        return shlex.split(KINDS[self.kind])

    @property
    def trains_policy(self) -> bool:
        """Whether the last stage left a policy."""
        return self.kind not in REWARD_MODELS

    @property
    def last(self) -> str:
        return run_reader.run_file(self.folder).run.stages[-1].name

    def environment(self) -> list[str]:
        """Words that name its environment where a model alone is measured."""
        env = run_reader.run_file(self.folder).run.env
        named = [f"env={env.name}"] if env.name != "prompts" else [f"env.prompts={env.prompts}"]
        rewards = [f"env.rewards={','.join(r.function for r in env.rewards)}"] if env.rewards else []
        rewards += [f"env.rewards.{i}.weight={r.weight:g}" for i, r in enumerate(env.rewards) if r.weight != 1]
        rewards += [] if env.right is None else [f"env.right={env.right:g}"]
        return [*named, *rewards, *(f"env.args.{n}={json.dumps(v)}" for n, v in env.args.items()), "env.heldout=6"]


REWARD_MODELS = ("reward_model", "prm_alone", "lora_reward", "averaged_reward")


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
    """The rows of measures that `posttrain eval` prints, without how they are drawn."""
    rows = [row for row in text.splitlines() if re.search(r"accuracy|pass@|reward|orders|error", row)]
    return [re.sub(r"\W+", " ", row.partition(": ")[2] or row).strip() for row in rows if "[95 %]" not in row]


def exported(made: Made, *more: str) -> tuple[Ran, str]:
    """Export, and measure what was written as the run is measured: the same words say the same numbers."""
    target = made.scratch / f"model{'-'.join(more)}"
    done = call("export", str(made.folder), str(target), *more)
    if done.code or "--adapter" in more:
        return done, ""
    if not (target / "certificate.json").exists():
        return done, "no certificate"
    run = run_reader.run_file(made.folder).run
    if any(r.function.startswith("model:stage") for r in run.env.rewards):
        return done, ""  # the judge lies in the run folder
    if made.trains_policy:
        same = ["--max-tokens", "12", "--temperature", "1", "--samples", "2"]
    else:
        same = [f"env.prompts={run.env.prompts}"] if run.env.prompts else []
    of_run = call("eval", str(made.folder), *more, *same)
    of_model = call("eval", str(target), *made.environment(), *same, f"seed={run.seed}", f"slots={run.slots}")
    if of_run.code or of_model.code:
        return max(of_run, of_model, key=lambda r: r.code), ""
    ours, theirs = measured(of_run.out), measured(of_model.out)
    merged = run.model.lora is not None or run.model.dtype != "float32"  # other rounding
    differ = len(ours) != len(theirs) or (not merged and ours != theirs)
    return of_model, f"it says {theirs}, and the run {ours}" if differ or not ours else ""


def summary(made: Made, *more: str) -> tuple[Ran, str]:
    """Its last stage is named with a number, a score or how it orders pairs; or it says that they order nothing."""
    done = call("summary", str(made.folder), *more)
    told = re.search(rf"{made.last}\W.*\d\.\d", done.out.replace("\\", ""))
    told = told or "its held-out judgements order nothing" in " ".join(done.out.split())
    return done, "" if told else f"nothing is measured of {made.last}"


def plotted(made: Made) -> tuple[Ran, str]:
    picture = made.scratch / "plot.svg"
    done = call("plot", str(made.folder), "--out", str(picture))
    return done, "" if done.code or "line2d" in picture.read_text(encoding="utf-8") else "an empty picture"


def over(made: Made) -> list[str]:
    """The ranks of a run, which are no setting."""
    return made.words[made.words.index("--nproc") :] if "--nproc" in made.words else []


def resumed(made: Made) -> tuple[Ran, str]:
    """Two more steps, in a copy beside it."""
    shutil.copytree(made.folder, made.longer)
    run: Any = run_reader.run_file(made.folder).run
    stage = run.stage(made.last)
    more = [f"{made.last}.steps={stage.steps + 2}"]
    more += [f"{made.last}.rounds={stage.rounds + 2}"] if isinstance(stage, Rejection) else []
    before = len(run_reader.steps(made.longer))
    done = call("run", "--resume", str(made.longer), *more, *over(made))
    return done, "" if done.code or len(run_reader.steps(made.longer)) > before else "no step more"


def resumed_whole(made: Made) -> tuple[Ran, str]:
    """As it is: there is nothing to do."""
    before = len(run_reader.steps(made.folder))
    done = call("run", "--resume", str(made.folder), *over(made))
    return done, "" if len(run_reader.steps(made.folder)) == before else "steps were added"


def branched(made: Made) -> tuple[Ran, str]:
    """A new run from its weights: RL of a policy, a second reward model of a reward model."""
    out, env = made.scratch / "branch", run_reader.run_file(made.folder).run.env
    words = ["grpo", *shlex.split(RL)] if made.trains_policy else ["reward_model", "reward_model.steps=2"]
    words += [f"env={env.name}"] if made.trains_policy and env.name != "prompts" else []
    done = call("run", *words, *HELD.split(), f"model={made.folder}", "--out", str(out))
    return done, "" if done.code or run_reader.steps(out) else "no step"


def served(made: Made) -> tuple[Ran, str]:
    """One completion over HTTP."""
    try:
        told = asyncio.run(_ask(made.folder))
    except PosttrainError as error:
        return Ran(error.exit_code, "", f"posttrain: {error}"), ""
    return Ran(0, json.dumps(told), ""), "" if "choices" in told else "no completion"


async def _ask(folder: Path) -> dict[str, Any]:
    import aiohttp

    token = "a-token-for-the-matrix"
    model, _ = make_served(folder, token=token, name="it")
    head = {"Authorization": f"Bearer {token}"}
    asked = {"model": "it", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    async with (
        listening(Server(model, CallerLimits()), "127.0.0.1", 0) as url,
        aiohttp.ClientSession(headers=head) as session,
        session.post(f"{url}/completions", json=asked) as reply,
    ):
        return await reply.json()


def simply(*words: str) -> Callable[[Made], tuple[Ran, str]]:
    """A command whose answer is only read."""

    def played(made: Made) -> tuple[Ran, str]:
        places = {"RUN": str(made.folder), "LONGER": str(made.longer), "OUT": str(made.scratch / "search.svg")}
        done = call(*(places.get(word, word) for word in words))
        return done, "" if done.out.strip() or done.code else "no answer"

    return played


COMMANDS: dict[str, Callable[[Made], tuple[Ran, str]]] = {
    "eval": simply("eval", "RUN"),
    "eval --checkpoint best": simply("eval", "RUN", "--checkpoint", "best"),
    "eval --ema": simply("eval", "RUN", "--ema"),
    "eval search=vote": simply("eval", "RUN", "search=vote.count=2", "--out", "OUT"),
    "eval search=best_of": simply("eval", "RUN", "search=best_of.count=2", "search.by=verifier", "--out", "OUT"),
    "eval search=beam": simply("eval", "RUN", "search=beam.width=2", "--out", "OUT"),
    "export": exported,
    "export --checkpoint best": lambda m: exported(m, "--checkpoint", "best"),
    "export --ema": lambda m: exported(m, "--ema"),
    "export --adapter": lambda m: exported(m, "--adapter"),
    "serve": served,
    "show": simply("show", "RUN"),
    "show --eval": simply("show", "RUN", "--eval"),
    "show --episode": simply("show", "RUN", "--episode", "0"),
    "summary": summary,
    "summary --markdown": lambda m: summary(m, "--markdown"),
    "plot": plotted,
    "ladder --on": simply("ladder", "--on", "RUN", "--against", "grpo,ppo"),
    "resume": resumed,
    "compare": simply("compare", "RUN", "LONGER"),
    "show --compare": simply("show", "LONGER", "--compare", "2", "4"),
    "resume, whole": resumed_whole,
    "branch": branched,
}
NO_POLICY = "reward_model|lora_reward|averaged_reward"
SEVERAL_TURNS = "calculator|shop|baseline_turnmean|baseline_anchormean"
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("eval --ema|export --ema", r"(?!averaged).*", "holds no moving average"),
    ("export --adapter", r"(?!lora|quantised|ranks_lora|averaged_reward|reward|prm_alone).*", "trained all weights"),
    ("export --adapter", "lora|quantised|lora_ppo|ranks_lora", "over weights that it made"),
    ("export --adapter", f"{NO_POLICY}|prm_alone", "holds a reward model, whose head is no part of an adapter"),
    ("eval search.*", NO_POLICY, "and no policy before it"),
    ("eval search.*", "judge", "has episodes with other seats"),
    ("eval search.*", SEVERAL_TURNS, "has episodes of several turns"),
    ("eval search=beam", "rlhf", "scores whole answers"),
    ("eval search=beam", r"(?!prm).*", "has no reward model"),
    ("serve", f"{NO_POLICY}|prm_alone", "posttrain serve sample from a policy"),
    ("branch", f"{NO_POLICY}|prm_alone", "no policy starts from it"),
    ("compare", f"{NO_POLICY}|prm_alone", "trained a reward model, which answers no held-out task"),
    ("compare", "unmeasured", "has not been measured on held-out tasks"),
    ("compare|show.*|ladder --on", "no_episodes", "record_episodes=true"),
    ("eval.*|compare", "unjudged", "env.rewards, which judge"),
    ("export|export --checkpoint best", "unjudged", "nothing judges it: environment 'prompts' needs env.rewards"),
    ("eval search.*", "unjudged", "and nothing judges it"),
    ("show --eval|show --compare", "prm_alone|unmeasured|reward_model|.*_reward", "has n"),
    ("show --compare", ".*", "only answers to the same prompts are compared"),
    ("ladder --on", f"{NO_POLICY}|prm_alone|sft|unmeasured|dpo|simpo|reject|unjudged", "has no reinforcement stage"),
    ("ladder --on", "distill_hint|mixture_hint|baseline_implicit", "cannot be evaluated on step"),
)
"""(commands, kinds, both as patterns; what the refusal says)."""


def judged(made: Made, name: str) -> Cell:
    """One command over one run."""
    began = time.perf_counter()
    try:
        done, why = COMMANDS[name](made)
    except Exception:
        done, why = Ran(1, "", traceback.format_exc()), ""
    told = f"{done.out}\n{done.err}"
    never = WRONG.search(told)
    expected = any(re.fullmatch(c, name) and re.fullmatch(k, made.kind) and part in told for c, k, part in REFUSED)
    if done.code:
        state = "refused" if expected and done.code in (2, 4, 5) and not never else "wrong"
        why = f"[{done.code}] {(done.err.strip().splitlines() or [''])[-1]}"
    else:
        why = why or (f"it says {never[0]!r}" if never else "")
        state = "wrong" if why else "right"
    return Cell(made.kind, name, state, why, round(time.perf_counter() - began, 2))


# --- many -------------------------------------------------------------------------------------------------------------


def play(kind: str, folder: Path, commands: Sequence[str]) -> list[Cell]:
    """Play a run of this kind, and the commands over it."""
    run, began = folder / kind, time.perf_counter()
    done = call("run", *shlex.split(KINDS[kind]), "--out", str(run))
    why = "" if done.code == 0 else f"[{done.code}] {done.err.strip()[-1500:]}"
    cells = [Cell(kind, "run", "wrong" if why else "right", why, round(time.perf_counter() - began, 2))]
    if why:
        return cells
    return cells + [judged(Made(kind, run, Path(tempfile.mkdtemp(dir=folder))), name) for name in commands]


def _work(kind: str, folder: str, commands: Sequence[str]) -> list[Cell]:
    import torch

    torch.set_num_threads(1)
    return play(kind, Path(folder), commands)


def many(kinds: Sequence[str], commands: Sequence[str], jobs: int, folder: Path) -> Iterator[Cell]:
    """Each kind in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(_work, kind, str(folder), commands) for kind in kinds]):
            yield from done.result()


def drawn(seed: int, count: int) -> list[str]:
    """So many kinds."""
    chosen = seeds.generator(seed, "command-matrix").choice(len(KINDS), count, replace=False)
    return [list(KINDS)[i] for i in sorted(chosen)]


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
