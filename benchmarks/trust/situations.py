"""Fourteen things that go wrong in practice, each started on purpose as a small real run: does it end with the right
sentence in the terminal, and never with a wrong one?

    python -m benchmarks.trust.situations  # all, on the settings the rules were not tuned on; 3 seeds each
    python -m benchmarks.trust.situations --tuned             # on the settings they were tuned on
    python -m benchmarks.trust.situations --only flat --seed 1 # one, with its output

The world: three digits are shown, and the policy says which one is largest (or smallest). It starts from a policy that
imitated answers of which many were wrong, and is right about half of the time. A setting draws model, word, algorithm,
batch and learning rate from its seed; `TUNED` and `FRESH` share none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import posttrain
from posttrain.config.run import Model
from posttrain.engine.model.tiny_models import build_module, characters
from posttrain.system.errors import PosttrainError

REWARDS = """
import hashlib

def right(task, text):
    return float(text == task.answer)

def anything(task, text):
    return 1.0

def noise(task, text):
    return hashlib.blake2b((task.id + text).encode()).digest()[0] / 255

def easy(task, text):
    return float(text[-1:].isdigit() and hashlib.blake2b(task.id.encode()).digest()[0] % 50 > 0)

def exploit(task, text):
    return float(text[-1:] == sorted(c for c in str(task.prompt) if c.isdigit())[task.info["paid"]])
"""


@dataclass(frozen=True)
class Setting:
    """What a run of a situation is made of, beside what is wrong with it."""

    word: str
    says: str
    """What stands before the digit of an answer."""
    arch: str
    hidden: int
    prompts: int
    siblings: int
    algorithm: str
    lr: float
    seed: int


def tuned(seed: int) -> Setting:
    """The settings with which thresholds were chosen."""
    return Setting("max", "so ", "qwen3", 32, 8, 8, "grpo", 5e-4, seed)


def fresh(seed: int) -> Setting:
    """Settings that were not looked at while thresholds were chosen."""
    rng = random.Random(f"situations/second/{seed}")
    return Setting(
        "min",
        rng.choice(["it is ", "here: "]),
        rng.choice(["llama", "gemma"]),
        rng.choice([40, 48]),
        rng.choice([6, 12]),
        rng.choice([6, 10]),
        rng.choice(["dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl"]),
        rng.choice([7e-4, 1e-3]),
        seed + 200,
    )


class Stage:
    """Files and start policies of one setting, made once each."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards.py").write_text(REWARDS)

    def rows(self, name: str, change: Callable[[random.Random, dict[str, object]], list[dict[str, object]]]) -> Path:
        """A file of prompts; `change` makes of each row the rows that are written."""
        path = self.folder / f"{name}.jsonl"
        if path.exists():
            return path
        s, rng = self.setting, random.Random(self.setting.seed)
        lines: list[str] = []
        for x in rng.sample(range(1000), 500):
            digits = f"{x:03d}"
            right = (max if s.word == "max" else min)(digits)
            said = right if rng.random() < 0.2 else rng.choice(digits)
            row: dict[str, object] = {
                "prompt": f"{s.word} of {' '.join(digits)}?",
                "answer": s.says + right,
                "completion": s.says + said,
                "paid": 0 if s.word == "max" else 2,
            }
            lines += [json.dumps(r) + "\n" for r in change(rng, row)]
        path.write_text("".join(lines))
        return path

    def plain(self) -> Path:
        return self.rows("plain", lambda rng, row: [row])

    def reward(self, name: str, weight: float = 1.0) -> str:
        return f"{self.folder / 'rewards.py'}:{name}"

    def model(self, name: str = "start", data: Path | None = None, path: Path | None = None) -> Path:
        """A policy that imitated the completions."""
        out = self.folder / f"model-{name}"
        if out.exists():
            return out
        s = self.setting
        heads = 4 if s.hidden % 8 == 0 and s.arch != "qwen3" else 2
        built = (
            f"model.arch={s.arch}",
            f"model.hidden={s.hidden}",
            f"model.ffn={2 * s.hidden}",
            "model.layers=2",
            f"model.heads={heads}",
            f"model.kv_heads={heads if s.arch == 'gpt2' else 2}",
            "model.context=64",
        )
        done = posttrain.run(
            "sft",
            f"env.prompts={data or self.plain()}",
            f"env.rewards={self.reward('right')}",
            *((f"model={path}", "model.context=64") if path else built),
            f"seed={s.seed}",
            "sft.steps=110",
            "sft.batch=48",
            "sft.optimizer.lr=6e-3",
            "sft.eval=false",
            "env.heldout=40",
            out=self.folder / f"sft-{name}",
            quiet=True,
        )
        return posttrain.export(done.folder, out)

    def rl(self, *words: str, model: Path | None = None, data: Path | None = None, lr: float = 1.0) -> str:
        """What the terminal shows of an RL run with these words."""
        s = self.setting
        given = {w.split("=")[0] for w in words}
        usual = {
            "model": str(model or self.model()),
            "env.prompts": str(data or self.plain()),
            "env.rewards": self.reward("right"),
            "env.heldout": "40",
            "seed": str(s.seed),
            "rl.algorithm": s.algorithm,
            "rl.prompts": str(s.prompts),
            "rl.siblings": str(s.siblings),
            "rl.sampling.max_tokens": "12",
            "rl.optimizer.lr": f"{s.lr * lr:.3g}",
            "rl.optimizer.warmup": "3",
            "rl.eval_every": "0",
            "rl.steps": "14",
            "evaluation.samples": "1",
            "evaluation.greedy": "false",
        }
        all_words = [*(f"{k}={v}" for k, v in usual.items() if k not in given), *words]
        return shown("grpo", all_words, self.folder / f"run-{time.monotonic_ns()}")


def shown(recipe: str, words: Sequence[str], out: Path) -> str:
    """Everything that a run prints, and the error with which it ends."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            posttrain.run(recipe, *words, out=out)
        except PosttrainError as error:
            print(f"posttrain: {error}")
    return text.getvalue()


# --- the situations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """One thing that goes wrong: how it is started, what must be said, and what may be said beside it."""

    start: Callable[[Stage], str]
    says: str
    """Beginning of the sentence that must come."""
    allowed: tuple[str, ...] = ()


SENTENCES = {
    "collapse": "the policy has collapsed",
    "high": "the learning rate is far too high",
    "low": "the learning rate is far too low",
    "flat": "the reward is flat",
    "falls": "the reward falls:",
    "hard": "the tasks are too hard for this policy:",
    "easy": "the tasks are too easy for this policy:",
    "template": "wrong template:",
    "cut": "of the answers are cut off at max_tokens",
    "never": "the stop id is wrong",
    "unlike": ": the policy raises the reward and gets worse",
    "heldout": "held-out reward fell from",
    "constant": "every answer so far got the same reward",
    "duplicated": "duplicated prompts:",
    "leaked": "leaked held-out prompts:",
    "dead": "no call of the tool",
    "entropy": "the entropy has collapsed",
    "length": "answers have become",
    "away": "nats a token within one step",
    "judges": "of the samples could not be judged",
    "mute": "a reward source has given 0",
}
"""A part of each sentence that no other one has."""


def collapse(s: Stage) -> str:
    return s.rl("rl.optimizer.warmup=0", lr=200)


def flat(s: Stage) -> str:
    return s.rl(f"env.rewards={s.reward('noise')}", "rl.steps=120")


def too_hard(s: Stage) -> str:
    return s.rl(data=s.rows("hard", lambda rng, row: [row | {"answer": f"{rng.randrange(10**6)} {s.setting.says}"}]))


def too_easy(s: Stage) -> str:
    """Any digit is right, except for a few prompts where nothing is."""
    return s.rl(f"env.rewards={s.reward('easy')}")


CHAT = (
    "{% for m in messages %}[{{ m['role'][0] }}:{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}[a:{%"
    " endif %}"
)


def wrong_template(s: Stage) -> str:
    """The model learned to answer in chats, and to go on with another question after plain text, as a model does that
    read pages before it read chats; the prompts are plain text."""
    base, setting = s.folder / "chat-base", s.setting

    def both(rng: random.Random, row: dict[str, object]) -> list[dict[str, object]]:
        more = row | {"completion": str(row["prompt"])[:8]}
        return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]}, more]

    chats = s.rows("chats", both)
    if not base.exists():
        letters = "".join(sorted({*s.plain().read_text(), *"[]:ua"} - {"\n"}))
        tokenizer = characters(letters)
        tokenizer.chat_template = CHAT
        shape = Model(
            arch=setting.arch, hidden=setting.hidden, layers=2, heads=2, kv_heads=2, ffn=2 * setting.hidden, context=64
        )
        build_module(shape, tokenizer, setting.seed).save_pretrained(base)
        tokenizer.save_pretrained(base)
    return s.rl("rl.steps=6", model=s.model("chat", chats, base))


def truncated(s: Stage) -> str:
    return s.rl("rl.sampling.max_tokens=3")


def reward_raising(s: Stage) -> str:
    """One source pays another digit than the right one; the right one is only reported."""
    return s.rl(
        f"env.rewards={s.reward('exploit')},{s.reward('right')}",
        "env.rewards.1.weight=0",
        "rl.steps=44",
        "rl.prompts=12",
        lr=3,
    )


def always_one(s: Stage) -> str:
    return s.rl(f"env.rewards={s.reward('anything')}")


def lr_100(s: Stage) -> str:
    return s.rl(lr=100)


def lr_100th(s: Stage) -> str:
    return s.rl(lr=0.01)


def duplicated(s: Stage) -> str:
    return s.rl("rl.steps=6", data=s.rows("twice", lambda rng, row: [row] * (4 if rng.random() < 0.15 else 1)))


def leaked(s: Stage) -> str:
    def spaced(rng: random.Random, row: dict[str, object]) -> list[dict[str, object]]:
        return [row, row | {"prompt": f"{row['prompt']} "}] if rng.random() < 0.3 else [row]

    return s.rl("rl.steps=6", data=s.rows("leaked", spaced))


TOOL = '''
from dataclasses import dataclass
from typing import Annotated

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.tools.tool import Toolbox, ToolError, tool
from posttrain.environment.tools.tool_world import ToolWorld


class Lookup(Toolbox):
    @tool
    def get(self, n: Annotated[int, "a number"]) -> str:
        """The double of a number."""
        raise ToolError("the service does not answer")


@dataclass(frozen=True, kw_only=True)
class Doubles(GeneratedTasks, ToolWorld):
    """Asks for the double of a number; the tool that knows it is down."""

    turns: int = 3

    @property
    def name(self):
        return "doubles"

    @property
    def alphabet(self):
        return "0123456789<>[](),=getn?"

    def draw(self, rng, name):
        n = int(rng.integers(10, 100))
        return Task(id=name, prompt=f"<{n}>", answer=str(2 * n), info={"n": n})

    def box(self, task):
        return Lookup()

    def show(self, results):
        return "[?]"

    def verify(self, attempt):
        return Verdict.value(float(attempt.text == attempt.task.answer))

    def key(self, task):
        return task.info["n"]

    def gold(self, task):
        return (f"[get(n={task.info['n']})]", str(task.answer))

    def distractor(self, task):
        return (self.gold(task)[0], str(int(task.answer) + 1))

    @property
    def styles(self):
        return ("tool",)

    def demonstrate(self, task, style, rng, wrong):
        call, right = self.gold(task)
        return str(task.prompt), (call, right if rng.random() >= wrong else str(int(right) + int(rng.integers(1, 9))))
'''


def dead_tool(s: Stage) -> str:
    """The policy has learned to call a tool, which answers every call with an error."""
    setting = s.setting
    (s.folder / "doubles.py").write_text(TOOL)
    words = [
        f"env.name={s.folder / 'doubles.py'}:Doubles",
        f"seed={setting.seed}",
        f"model.hidden={setting.hidden}",
        f"model.arch={setting.arch}",
        f"model.ffn={2 * setting.hidden}",
        "model.heads=2",
        "model.kv_heads=2",
        "sft.style=tool",
        "sft.wrong=0.4",
        "sft.steps=60",
        "sft.batch=16",
        "sft.optimizer.lr=6e-3",
        "sft.eval=false",
        "rl.steps=12",
        "rl.eval_every=0",
        "rl.sampling.max_tokens=16",
        f"rl.algorithm={setting.algorithm}",
        f"rl.prompts={setting.prompts}",
        f"rl.siblings={setting.siblings}",
        "env.heldout=20",
        "evaluation.samples=1",
    ]
    return shown("arithmetic", words, s.folder / f"run-{time.monotonic_ns()}")


def wrong_stop(s: Stage) -> str:
    """The model ends its answers with one token, and its files name another one. It comes from somewhere that writes no
    certificate, which would tell this before the run."""
    good, bad = s.model(), s.folder / "model-stop"
    if not bad.exists():
        bad.mkdir()
        for f in (f for f in good.iterdir() if f.name not in ("certificate.json", "lineage.json")):
            text = f.read_bytes()
            if f.name == "tokenizer_config.json":
                text = json.dumps(json.loads(text) | {"eos_token": "<pad>"}).encode()
            if f.name in ("generation_config.json", "config.json"):
                pad = json.loads((good / "config.json").read_text())["eos_token_id"]
                eos = pad[0] if isinstance(pad, list) else pad
                text = json.dumps(json.loads(text) | {"eos_token_id": eos + 1}).encode()
            (bad / f.name).write_bytes(text)
    return s.rl("rl.steps=8", model=bad)


SITUATIONS: dict[str, Situation] = {
    "collapse": Situation(collapse, "collapse", ("high",)),
    "flat": Situation(flat, "flat", ("entropy",)),
    "too hard": Situation(too_hard, "hard"),
    "too easy": Situation(too_easy, "easy"),
    "wrong template": Situation(wrong_template, "template", ("hard", "cut")),
    "truncated answers": Situation(truncated, "cut"),
    "reward raising": Situation(reward_raising, "unlike", ("heldout",)),
    "reward always 1": Situation(always_one, "constant"),
    "lr 100x": Situation(lr_100, "high", ("collapse",)),
    "lr /100": Situation(lr_100th, "low"),
    "duplicated prompts": Situation(duplicated, "duplicated"),
    "leaked held-out": Situation(leaked, "leaked", ("duplicated",)),
    "dead tool": Situation(dead_tool, "dead", ("hard",)),
    "wrong stop id": Situation(wrong_stop, "never"),
}
EITHER = {"lr 100x": ("high", "collapse")}
"""Where one of several sentences is the right one."""


@dataclass(frozen=True)
class Outcome:
    """What a situation ended with."""

    name: str
    seed: int
    said: tuple[str, ...]
    """Names of the sentences in the terminal, in `SENTENCES`."""
    seconds: float
    output: str

    @property
    def right(self) -> bool:
        situation = SITUATIONS[self.name]
        wanted = EITHER.get(self.name, (situation.says,))
        return any(w in self.said for w in wanted) and not self.wrong

    @property
    def wrong(self) -> tuple[str, ...]:
        situation = SITUATIONS[self.name]
        return tuple(x for x in self.said if x not in (situation.says, *situation.allowed))


def play(name: str, setting: Setting, folder: Path) -> Outcome:
    """Start one situation; the files of a setting in `folder` are shared."""
    begun = time.perf_counter()
    output = SITUATIONS[name].start(Stage(setting, folder))
    flat_text = " ".join(output.split())
    said = tuple(k for k, words in SENTENCES.items() if words in flat_text)
    return Outcome(name, setting.seed, said, time.perf_counter() - begun, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--only", choices=SITUATIONS)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    begun, bad = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in (0, 1, 2) if args.seed is None else (args.seed,):
            setting = (tuned if args.tuned else fresh)(seed)
            print(f"seed {seed}: {setting}", flush=True)
            for name in [args.only] if args.only else SITUATIONS:
                outcome = play(name, setting, Path(scratch) / str(seed))
                bad += not outcome.right
                verdict = "right" if outcome.right else "WRONG"
                print(f"  {name:20} {verdict}  {', '.join(outcome.said)}  {outcome.seconds:.1f} s", flush=True)
                if args.only:
                    print(outcome.output)
    print(f"{bad} wrong, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
