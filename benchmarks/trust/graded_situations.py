"""The fourteen situations of `situations.py` with grades for rewards: does each end with the right sentence, no
other one, and not a word of right and wrong?

    python -m benchmarks.trust.graded_situations                      # 3 settings each; results/graded_situations.json
    python -m benchmarks.trust.graded_situations --only flat --seed 1 # one, with its output

A grade is a scale and a shift away from how near an answer comes, so it may be negative, huge or a small difference of
large numbers, and in the third setting two sources are mixed. Runs that end are also held against their own record, as
those of `benchmarks.trust.graded` are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trust import situations
from benchmarks.trust.graded import FORBIDDEN, false_claims
from benchmarks.trust.situations import SENTENCES as PASS_OR_FAIL
from benchmarks.trust.situations import TOOL, Situation, Stage, fresh
from posttrain.record import run_reader

RESULTS = Path(__file__).parent / "results/graded_situations.json"
REWARDS = """
import hashlib

SCALE, SHIFT = {scale}, {shift}

def near(text, says, digit):
    if text[: len(says)] != says or not text[len(says) :].isdigit():
        return 0.0
    return 0.3 + 0.6 * (1 - abs(int(text[len(says) :][:1]) - int(digit)) / 9)

def grade(x):
    return SHIFT + SCALE * x

def chance(*words):
    return hashlib.blake2b("".join(words).encode()).digest()[0] / 255

def right(task, text):
    return grade(near(text, task.answer[:-1], task.answer[-1]) if task.answer[-1:].isdigit() else 0.0)

def exploit(task, text):
    paid = sorted(c for c in str(task.prompt) if c.isdigit())[task.info["paid"]]
    return grade(near(text, task.answer[:-1], paid))

def anything(task, text):
    return grade(0.7)

def noise(task, text):
    return grade(chance(task.id, text))

def easy(task, text):
    return grade(0.9 - 0.2 * (chance(task.id) < 0.1) if text[-1:].isdigit() else 0.1)

def hard(task, text):
    return grade(0.1 * chance(task.id) + 0.9 * (text == "a text that nobody says"))
"""
SCALES: dict[int, tuple[float, float]] = {1: (4.0, -9.5), 2: (1e4, 1e6), 3: (0.9, 0.0)}
"""Scale and shift of a seed: negative as a reward model's logits, huge and far from 0, and a rubric of at most .9 with
a penalty beside it."""
SENTENCES = PASS_OR_FAIL | {
    "agree": "siblings earn the same reward in",
    "exploited": "the reward is exploited",
    "outruns": "the policy learns what is paid and not what is meant",
}


class Graded(Stage):
    """A setting whose rewards are grades."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(fresh(seed), folder)
        self.scale, self.shift = SCALES[seed]
        self.mixed = seed == 3
        (folder / "rewards.py").write_text(REWARDS.format(scale=self.scale, shift=self.shift))
        (folder / "mixed.py").write_text(MIXED)

    def reward(self, name: str, weight: float = 1.0) -> str:
        own = super().reward(name)
        return f"{own},{self.folder / 'mixed.py'}:form" if self.mixed and name == "right" else own


MIXED = """
def form(task, text):
    return -0.1 * (len(text) > 9)
"""


def too_hard(s: Stage) -> str:
    return s.rl(f"env.rewards={s.reward('hard')}")


def flat(s: Stage) -> str:
    """With a small step, since a policy that drifts under chance ends in saying one thing to all siblings."""
    return s.rl(f"env.rewards={s.reward('noise')}", "rl.steps=120", lr=0.3)


def reward_raising(s: Stage) -> str:
    """One source pays the nearness to another digit than the right one, whose own grade is only reported."""
    own = Stage.reward(s, "right")
    return s.rl(f"env.rewards={s.reward('exploit')},{own}", "env.rewards.1.weight=0", "rl.steps=44", "rl.prompts=24")


def dead_tool(s: Stage) -> str:
    assert isinstance(s, Graded)
    exact = "float(attempt.text == attempt.task.answer)"
    grade = f"{s.shift} + {s.scale} * (0.2 + 0.7 * {exact} + 0.05 * attempt.text[:1].isdigit())"
    assert exact in TOOL
    graded = TOOL.replace(exact, grade).replace(
        "    turns: int = 3\n", "    turns: int = 3\n    vouches_for_gold = False\n"
    )
    kept, situations.TOOL = TOOL, graded
    try:
        return situations.dead_tool(s)
    finally:
        situations.TOOL = kept


SITUATIONS: dict[str, Situation] = {
    **situations.SITUATIONS,
    "flat": Situation(flat, "flat"),
    "too hard": Situation(too_hard, "agree"),
    "too easy": Situation(situations.too_easy, "agree"),
    "reward raising": Situation(reward_raising, "unlike", ("heldout",)),
    "dead tool": Situation(dead_tool, "dead", ("agree",)),
    "wrong template": Situation(situations.wrong_template, "template", ("agree", "cut", "constant")),
}


@dataclass(frozen=True)
class Outcome:
    """What a situation with grades ended with."""

    name: str
    seed: int
    said: tuple[str, ...]
    wrong: tuple[str, ...]
    """Sentences of another situation, words of right and wrong, numbers that are not those of the record."""
    seconds: float
    output: str

    @property
    def right(self) -> bool:
        wanted = situations.EITHER.get(self.name, (SITUATIONS[self.name].says,))
        return any(w in self.said for w in wanted) and not self.wrong


def play(name: str, seed: int, folder: Path) -> Outcome:
    """Start one situation; the files of a seed in `folder` are shared."""
    begun, situation = time.perf_counter(), SITUATIONS[name]
    stage = Graded(seed, folder)
    before = set(folder.glob("run-*"))
    output = situation.start(stage)
    text = " ".join(output.split())
    said = tuple(k for k, words in SENTENCES.items() if words in text)
    may = (situation.says, *situation.allowed, *situations.EITHER.get(name, ()), *(("mute",) if stage.mixed else ()))
    other = [f"said {x!r}" for x in said if x not in may]
    (run,) = set(folder.glob("run-*")) - before
    steps = [s for s in run_reader.steps(run) if s.stage == "rl" and "rollout/reward" in s.gauges]
    graded = any(s.gauges["rollout/reward"].mean not in (0.0, 1.0) for s in steps)
    if graded and "paired over" in text:
        other += false_claims(run, output)
    elif graded or not steps:
        other += [f"speaks of {w!r}" for w in FORBIDDEN if w in text]
    return Outcome(name, seed, said, tuple(other), time.perf_counter() - begun, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SITUATIONS, nargs="*")
    parser.add_argument("--seed", type=int, choices=SCALES)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in SCALES if args.seed is None else (args.seed,):
            for name in args.only or SITUATIONS:
                o = play(name, seed, (args.keep or Path(scratch)) / str(seed))
                rows.append({"name": name, "seed": seed, "right": o.right, "said": o.said, "wrong": o.wrong})
                print(json.dumps({**rows[-1], "seconds": round(o.seconds, 1)}), flush=True)
                if args.keep:
                    (args.keep / f"{name.replace('/', '')}-{seed}.txt").write_text(o.output)
                if args.only:
                    print(o.output)
    if not args.only and args.seed is None:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{sum(not r['right'] for r in rows)} of {len(rows)} wrong")


if __name__ == "__main__":
    main()
