"""Runs with a planted fault, and what caught it: the smallest ones that show every fault, each through
`posttrain.run`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import posttrain
from posttrain.build.build_judges import generative_judge
from posttrain.build.build_reward_models import reward_member
from posttrain.config.env import Reward
from posttrain.config.placement import Processes
from posttrain.config.run import Env, Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.rejection import RFT, STAR, Regenerate, Rejection
from posttrain.config.stages.reward_model_settings import HeadShape, RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.exchange.request_owner import asker
from posttrain.core.gauge import Step
from posttrain.core.ports import Talk
from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop, Task
from posttrain.engine.files.reward_folder import write_reward_model
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.model.policy_model import prepared
from posttrain.engine.model.tiny_models import build_module, characters, raw_bytes
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.make import environment
from posttrain.evaluation.evaluate_search import evaluate_searches
from posttrain.ladder.policy_rows import GRPO_PROCESS, PRIME
from posttrain.record import run_reader
from posttrain.role.judges.generative_judge import asked, meta_rows
from posttrain.system.errors import PosttrainError
from tests import families
from tests.mutants import Fault, planted
from tests.tiny import MODEL, tiny_run

STEPS = 20
"""Steps of a run a fault may take to be caught."""
ROOT = Path(__file__).parents[1]
BOUND = 2
"""By how many steps samples may be older in runs of faults between asking and learning."""
AHEAD = ("ahead", "ahead_resume")
RESUMED = ("resume", "ahead_resume")
COMPARED = "posttrain.core.exchange.ranks"
"""Where values of ranks are compared for a check, which is what caught the fault."""
ELSEWHERE = ("worlds", "fickle")
OVER_RANKS = {"ranks": "rows", "rank_experts": "experts"}
"""What faults need that act in a run over ranks, and how these share the model."""
IN_REINFORCEMENT = ("", "tool", "bos", "state", "chat", "resume", "judge", "pool", "ranks", *ELSEWHERE, *AHEAD)
"""What faults need that are planted into a reinforcement stage, or before its first step."""


def acts_ahead(fault: Fault, deterministic: bool) -> bool:
    """Whether a fault can act in a run of reinforcement whose groups are asked ahead.

    A queue plays each group alone, and counts itself what was said for it. A model with a recurrent state cannot be
    `deterministic`. Where a run is, nothing is being said when new weights come, so no turn can be given to an engine
    of other weights.
    """
    if fault.needs not in IN_REINFORCEMENT or fault.name in ("groups_interleaved", "dead_engine_counted_twice"):
        return False
    return not (deterministic and (fault.needs == "state" or fault.name == "router_mixes_versions"))


class Twice(Arithmetic):
    """Arithmetic in two turns: whatever the first answer was, the world shows `=` and asks again."""

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        first = await talk.say()
        if first.stop is not Stop.SAID:
            return first.stop
        talk.see("=")
        return (await talk.say()).stop

    def gold(self, task: Task) -> tuple[str, ...]:
        return super().gold(task) * 2

    def distractor(self, task: Task) -> tuple[str, ...]:
        return super().distractor(task) * 2


class Waits(Twice):
    """The same, with a tool between the turns, whose time no seed decides. So groups do not end in the order
    in which they were asked, and some of them are said by two versions."""

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        first = await talk.say()
        if first.stop is not Stop.SAID:
            return first.stop
        await asyncio.sleep(random.random() * 0.03)
        talk.see("=")
        return (await talk.say()).stop


class Struck(Waits):
    """The same, and one engine of the run is killed while it says the answers of the second step."""

    played = 0

    async def play(self, task: Task, talk: Talk) -> Stop:
        who = asker()
        self.played += who is not None and who.stream.startswith("train")
        if self.played == STRUCK:
            self.played += 1
            os.kill(engine_processes()[-1], signal.SIGKILL)  # those of an earlier run may still be ending
        return await super().play(task, talk)


STRUCK = 30
"""The training episode at whose beginning an engine is killed: in the second step, where turns are on their way."""


def engine_processes() -> list[int]:
    """Processes of engines that this one has started, oldest first."""
    children = {int(p) for t in Path("/proc/self/task").glob("*/children") for p in t.read_text().split()}
    began: dict[int, int] = {}
    for p in children:
        with suppress(OSError):  # it may end meanwhile
            if b"engine_process" in Path(f"/proc/{p}/cmdline").read_bytes():
                began[p] = int(Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[19])
    return sorted(began, key=began.__getitem__)


SUMS = Env(name="arithmetic", args={"max_terms": 2, "max_operand": 9}, heldout=20)
"""Answers of one and of two digits, so that lengths differ."""
GALLERY["twice"], GALLERY["waits"] = f"{__name__}:Twice", f"{__name__}:Waits"
GALLERY["struck"] = f"{__name__}:Struck"


@dataclass(frozen=True)
class Caught:
    """What stopped or named a fault. `step` counts RL (or supervised) steps from 1; 0: before the first one."""

    kind: str
    detector: str
    step: int
    message: str


def start(folder: Path) -> Path:
    """A policy that is right about half of the time, as a Hugging Face directory."""
    sft = Supervised(
        name="sft", style="answer", steps=100, batch=32, wrong=0.3, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
    )
    run = replace(tiny_run(), recipe="start", env=SUMS, stages=(sft,))
    posttrain.run(run, out=folder / "start", quiet=True)
    return Path(posttrain.export(folder / "start", folder / "model"))


def smallest(fault: Fault | None, model: Path, folder: Path, *, steps: int = STEPS, seed: int = 0, **rl: Any) -> Run:
    """The run a fault is shown in: reinforcement from `model`, or from a model and an environment of its own."""
    base = tiny_run(prompts=6, siblings=4, steps=steps, checkpoint_every=0, **rl)
    run = replace(
        base,
        seed=seed,
        env=SUMS,
        model=Model(path=str(model), context=64),
        stages=base.stages[1:],
        record_episodes=False,
        slots=32,
    )
    needs = fault.needs if fault else ""
    if needs in ("tool", *AHEAD):
        run = replace(run, env=replace(run.env, name="twice" if needs == "tool" else "waits"))
    if needs == "pool":
        run = replace(run, env=replace(run.env, name="struck"), placement=Processes(engines=2, timeout=60))
    if needs == "ranks":  # an odd number of units over two ranks, and a push after an update
        run = replace(base, stages=(replace(base.stages[0], steps=3, batch=7), replace(base.stages[1], steps=2)))
    if needs in ELSEWHERE:
        run = dying(run, folder, needs == "fickle")
    if needs == "bos":
        run = replace(run, model=Model(path=str(_begins(folder / "bos")), context=64))
    if needs == "state":
        run = replace(run, model=Model(path=str(_remembers(folder / "state")), context=64))
    if needs in ("chat", "judge_anew"):
        run = _chat(run, folder)
    if needs == "judge_anew":
        run = _judged_anew(run, folder)
    if needs in ("experts", "rank_experts"):
        run = mixture(run)
    if needs in AHEAD:
        stage = run.stages[-1]
        assert isinstance(stage, Reinforce)
        run = replace(run, stages=(replace(stage, staleness=stage.staleness or BOUND),))
    if needs in RESUMED:
        stage = run.stages[-1]
        assert isinstance(stage, Reinforce)
        stage = replace(stage, steps=3 + stage.staleness, checkpoint_every=1)  # the last one is asked after the cut
        run = replace(run, stages=(stage,), keep_checkpoints=10)
    if fault is not None and fault.needs == "sft":
        run = replace(base, stages=base.stages[:1])
    if needs in ("reward_model", "judge"):
        run = _rewarded(run, needs)
    if needs in ("judging", "votes", "yes"):
        run = _judging(run, needs, folder)
    if needs == "verifies":
        run = _verified(run, folder)
    if needs == "process":
        run = _stepwise(run)
    if needs == "implicit":
        run = replace(run, stages=(replace(run.stages[-1], algorithm=PRIME),))
    if needs == "regenerate":
        run = _regenerating(run)
    if needs in ("preference", "online", "reject"):
        run = replace(run, stages=(_stage(needs, steps),))
    return run


def dying(run: Run, folder: Path, fickle: bool = False) -> Run:
    """The same with episodes in two processes, one of which dies; `fickle`: and then its world shows something else."""
    (mark := folder / "marks").mkdir(parents=True, exist_ok=True)
    (mark / "died").unlink(missing_ok=True)
    args: dict[str, Any] = {**run.env.args, "mark": str(mark), "fickle": fickle, "learner": os.getpid()}
    env = replace(run.env, name=f"{ROOT}/tests/dying_world.py:Dies", args=args)
    return replace(run, env=env, placement=Processes(environments=2, timeout=60))


def mixture(run: Run, arch: Literal["qwen3_moe", "mixtral"] = "qwen3_moe") -> Run:
    """The same from a mixture of experts that is built and taught first."""
    sft = Supervised(
        name="sft", style="answer", steps=60, batch=32, wrong=0.3, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
    )
    return replace(run, model=replace(MODEL, arch=arch), stages=(sft, *run.stages))


def _stage(needs: str, steps: int) -> Preference | OnlinePreference | Rejection:
    """The stage of a run that learns from pairs, from pairs of its own samples, or by keeping some of these."""
    optimizer, sampling = Optimizer(lr=1e-3, warmup=1), Sampling(max_tokens=6)
    common: dict[str, Any] = {"steps": steps, "optimizer": optimizer, "eval": False, "checkpoint_every": 0}
    if needs == "preference":
        return Preference(name="dpo", batch=6, **common)
    if needs == "online":
        return OnlinePreference(name="online", prompts=6, sampling=sampling, eval_every=0, **common)
    rounds: dict[str, Any] = {"prompts": 24, "siblings": 4, "batch": 16, "epochs": 1, "eval_every": 0}
    return Rejection(name="reject", method=STAR, sampling=sampling, **rounds, **common)


def _rewarded(run: Run, needs: str) -> Run:
    """A reward model on the world with a planted taste; with `judge` RL against it follows."""
    judged = Env(name="replies", args={"numbers": 2, "margins": True}, heldout=10)
    rm = RewardModel(
        name="rm",
        steps=run.stages[-1].steps if needs == "reward_model" else 3,
        batch=8,
        centre=0.05,
        optimizer=Optimizer(lr=3e-3, warmup=1),
        eval=needs == "judge",
        hands_on=needs == "reward_model",
        checkpoint_every=0,
    )
    model = replace(MODEL, context=64)
    if needs == "reward_model":
        return replace(run, model=model, env=judged, stages=(rm,))
    paid = replace(judged, rewards=(Reward(function="model:stage:rm"),), measured=True)
    rl = replace(run.stages[-1], sampling=Sampling(max_tokens=8))
    return replace(run, model=model, env=paid, stages=(rm, rl))


def _judging(run: Run, needs: str, folder: Path) -> Run:
    """A policy that learns to judge; with `votes` or `yes` one that such a judge, made beforehand, pays."""
    model, sampling = replace(MODEL, context=96), Sampling(max_tokens=24)
    sft = Supervised(
        name="sft", style="verdict", steps=60, batch=16, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
    )
    rl = replace(run.stages[-1], sampling=sampling)
    if needs == "judging":
        return replace(run, model=model, env=Env(name="judge", heldout=8), stages=(sft, rl))
    made = folder / f"judge-{needs}"
    if not (made / "run.json").exists():
        env = Env(name="judge", args={"format": "rm_r1" if needs == "votes" else "genrm"}, heldout=4)
        once = replace(tiny_run(), model=model, env=env, stages=(sft, replace(rl, steps=1)))
        posttrain.run(once, out=made, quiet=True)
    paid = (Reward(function=f"judge:{made}"),)
    env = Env(name="replies", args={"numbers": 2, "max_number": 9}, heldout=10, rewards=paid, measured=True)
    rl = replace(run.stages[-1], sampling=Sampling(max_tokens=8), max_failed=0.9)
    return replace(run, model=replace(MODEL, context=64), env=env, stages=(rl,))


def _verified(run: Run, folder: Path) -> Run:
    """Chains of two sums, paid step by step by a verifier that was made beforehand."""
    made, rl = folder / "judge-verifies", run.stages[-1]
    if not (made / "run.json").exists():
        world = "arithmetic min_terms=3 max_terms=3 max_operand=4"
        sft = Supervised(
            name="sft", style="verdict", steps=60, batch=16, optimizer=Optimizer(lr=5e-3, warmup=5), eval=False
        )
        once = replace(rl, sampling=Sampling(max_tokens=8), steps=1, eval=False)
        env = Env(name="verify", args={"world": world, "world_heldout": 6}, heldout=4)
        taught = replace(tiny_run(), model=replace(MODEL, context=96), env=env, stages=(sft, once))
        posttrain.run(taught, out=made, quiet=True)
    assert isinstance(rl, Reinforce)
    rl = replace(rl, algorithm=GRPO_PROCESS, sampling=Sampling(max_tokens=20), max_failed=0.9, eval=False)
    env = replace(CHAINS, rewards=(Reward(function=f"judge:{made}", votes=2),))
    return replace(run, model=replace(MODEL, context=64), env=env, stages=(_chains(), rl))


CHAINS = Env(name="arithmetic", args={"min_terms": 3, "max_terms": 3, "max_operand": 4}, heldout=6)
"""Answers of two steps."""


def _chains() -> Supervised:
    return Supervised(
        name="sft", style="cot", wrong=0.3, steps=18, batch=64, optimizer=Optimizer(lr=1e-2, warmup=2), eval=False
    )


def _regenerating(run: Run) -> Run:
    """Chains of two sums, of which the wrong ones are said anew from their first wrong step."""
    stage = _stage("reject", run.stages[-1].steps)
    assert isinstance(stage, Rejection)
    method = replace(RFT, weights="last", regenerate=Regenerate(separator=";"))
    stage = replace(stage, method=method, sampling=Sampling(max_tokens=20))
    return replace(run, model=replace(MODEL, context=64), env=CHAINS, stages=(_chains(), stage))


def _stepwise(run: Run) -> Run:
    """Chains of two sums, labels of their steps, a process reward model, and RL with it."""
    sampling = Sampling(max_tokens=20)
    label = StepLabeling(
        name="label",
        separator=";",
        completions=4,
        prompts=8,
        siblings=2,
        steps=2,
        sampling=sampling,
        checkpoint_every=0,
    )
    rm = RewardModel(
        name="rm",
        judgement="steps",
        pool="token",
        separator=";",
        labels_of="label",
        soft=True,
        steps=3,
        batch=8,
        optimizer=Optimizer(lr=3e-3, warmup=1),
        hands_on=False,
        checkpoint_every=0,
    )
    env = replace(CHAINS, rewards=(Reward(function="model:stage:rm"),))
    rl = run.stages[-1]
    assert isinstance(rl, Reinforce)
    rl = replace(rl, algorithm=GRPO_PROCESS, sampling=sampling, eval=False)
    return replace(run, model=replace(MODEL, context=64), env=env, stages=(_chains(), label, rm, rl))


def search_run(run: Run, folder: Path) -> Path:
    """A policy that says chains, and a process reward model of its steps, as a run folder."""
    made = folder / "searched"
    if not (made / "run.json").exists():
        posttrain.run(replace(_stepwise(run), stages=_stepwise(run).stages[:-1]), out=made, quiet=True)
    return made


def catch(
    fault: Fault, model: Path, folder: Path, *, deterministic: bool = False, parallel: str = "", **rl: Any
) -> Caught | None:
    """Run it with the fault planted; what caught it first, or None.

    Args:
        parallel: how two ranks share the model; "": as the fault needs it.
        rl: settings of its reinforcement stage.
    """
    if fault.needs == "search":
        return _caught_searching(fault, model, folder)
    if fault.needs == "meta":
        return _caught_labelling(fault, model, folder)
    run = replace(smallest(fault, model, folder, **rl), deterministic=deterministic)
    out = folder / fault.name
    words = (*fault.shows, f"fault={fault.name}")
    parallel = parallel or OVER_RANKS.get(fault.needs, "")
    over: dict[str, Any] = {"nproc": 2, "rank_timeout": 60.0, "parallel": parallel} if parallel else {}
    try:
        posttrain.run(run, *words, out=out, quiet=True, allow_fault=True, **over)
        if fault.needs in RESUMED:
            second = sorted((out / "checkpoints").glob("*-rl-000002"))[0]
            posttrain.run(resume=second, quiet=True, allow_fault=True)
    except PosttrainError as error:
        return Caught(*detector(error), reached(out, error), of_the_twin(str(error)))
    return named(out)


def _caught_searching(fault: Fault, model: Path, folder: Path) -> Caught | None:
    """What caught a fault of searches at inference, which take no step."""
    made = search_run(smallest(None, model, folder), model.parent)
    try:
        evaluate_searches(made, *fault.shows, f"fault={fault.name}", quiet=True, allow_fault=True)
    except PosttrainError as error:
        return Caught(*detector(error), 0, of_the_twin(str(error)))
    return None


def _caught_labelling(fault: Fault, model: Path, folder: Path) -> Caught | None:
    """What caught a fault of the rows for a meta reward model, which a trained judge's votes about pairs become."""
    made = model.parent / "judge-votes"
    _judging(smallest(None, model, folder), "votes", model.parent)
    run = run_reader.run_file(made).run
    judge = generative_judge(run, Reward(function=f"judge:{made}"), 0.0, reward_member)
    world = environment(run.env, run.seed)
    votes = asyncio.run(asked(judge, [world.train.task(10**6 + i) for i in range(24)], 4))
    judge.close()
    try:
        with planted(fault.name):
            meta_rows(judge.judging, votes)
    except PosttrainError as error:
        return Caught(*detector(error), 0, of_the_twin(str(error)))
    return None


BROKEN = re.compile(r"\b(TypeError|AttributeError|NameError|ImportError|UnboundLocalError)\b")


def of_the_twin(message: str) -> str:
    """The message; AssertionError where the planted function does not fit the code any more, and has merely failed."""
    assert not BROKEN.search(message), f"the planted function is broken: {message}"
    return message


def reached(out: Path, error: BaseException) -> int:
    """The step of its stage in which a run broke; 0 before the first one."""
    inside = {"learn", "learn_from", "ask", "imitate", "_learn", "_ask"} & {
        f.f_code.co_name for f, _ in traceback.walk_tb(error.__traceback__)
    }
    steps = run_reader.steps(out) if (out / "run.json").exists() else []
    if steps and _between_stages(out, steps[-1]):
        return 0
    # the broken step is the last of them
    stopped = bool(steps) and any(note.startswith("stopped: ") for note in steps[-1].notes)
    return len([s for s in steps if s.stage == steps[-1].stage]) + (bool(inside) and not stopped)


def _between_stages(out: Path, last: Step) -> bool:
    """Whether a stage has ended and the next one has not begun: it broke before the first step of that."""
    stages = run_reader.run_file(out).run.stages
    ended = next(s for s in stages if s.name == last.stage)
    return (
        ended is not stages[-1] and last.index == ended.steps and not any(n.startswith("stopped") for n in last.notes)
    )


def named(out: Path) -> Caught | None:
    """The first finding of a live rule in the notes of the record."""
    for step in run_reader.steps(out):
        for note in step.notes:
            if note.startswith("rule "):
                name, _, message = note.removeprefix("rule ").partition(": ")
                return Caught("rule", name, step.index, message)
    return None


def detector(error: BaseException) -> tuple[str, str]:
    """(kind, name) of what raised: the innermost function of ours, by the room it lies in."""
    names = [(f, f.f_globals.get("__name__", "")) for f, _ in traceback.walk_tb(error.__traceback__)]
    frames = [f for f, name in names if "posttrain" in name and name != COMPARED]
    frames = [f for f in frames if f.f_code.co_name != "gradient_agrees"]  # the check that calls it has a name
    code, module = frames[-1].f_code, frames[-1].f_globals["__name__"]
    name = code.co_qualname.removesuffix(".__post_init__")
    if module.startswith("posttrain.core."):
        return "type", name
    if module in ("posttrain.build.preflight_checks", "posttrain.checks.learning.loss_checks"):
        return "proof", name
    return "canary", name


def _begins(folder: Path) -> Path:
    """A small model whose tokenizer begins every text with a token of its own."""
    from tokenizers import processors

    tokenizer = characters(Arithmetic(heldout_count=0).alphabet + "^")
    tokenizer.bos_token = "^"
    bos = tokenizer.convert_tokens_to_ids("^")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="^ $A", special_tokens=[("^", bos)]
    )
    build_module(MODEL, tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _remembers(folder: Path) -> Path:
    """A small model with a recurrent state."""
    families.build(families.config("lfm2")).save_pretrained(folder)
    characters(Arithmetic(heldout_count=0).alphabet).save_pretrained(folder)
    return folder


CHAT = (
    "{% for m in messages %}[{{ m['role'][0] }}:{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}[a:{%"
    " endif %}"
)


def _chat(run: Run, folder: Path) -> Run:
    """A small model with a chat template, prompts that are messages, and answers to imitate."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b), "completion": str(a + b)}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokenizer = characters("0123456789+-[]:ua=")
    tokenizer.chat_template = CHAT
    build_module(MODEL, tokenizer, 0).save_pretrained(folder / "chat")
    tokenizer.save_pretrained(folder / "chat")
    env = Env(name="prompts", prompts=str(folder / "chat.jsonl"), rewards=tiny_rewards(), heldout=4)
    sft = Supervised(name="sft", style="completion", steps=2, batch=4, eval=False)
    return replace(run, model=Model(path=str(folder / "chat"), context=64), env=env, stages=(sft, *run.stages))


def _judged_anew(run: Run, folder: Path) -> Run:
    """The same, paid by a reward model of random weights with a tokenizer and a chat template of its own."""
    tokenizer = raw_bytes()
    tokenizer.chat_template = CHAT
    made = prepared(MODEL, build_module(MODEL, tokenizer, 1), tokenizer, (tokenizer.eos_token_id,), "here", [])
    head = RewardHead(HeadShape(), MODEL.hidden, seed=1)
    write_reward_model(replace(made, reward_head=head), folder / "judge")
    paid = (*run.env.rewards, Reward(function=f"model:{folder / 'judge'}"))
    return replace(run, env=replace(run.env, rewards=paid), stages=run.stages[1:])


def tiny_rewards() -> tuple[Any, ...]:
    from posttrain.config.env import Reward

    return (Reward(function="last_integer"),)


__all__ = ["ROOT", "STEPS", "Caught", "Evaluation", "Sampling", "Sequence", "catch", "detector", "smallest", "start"]
