"""Runs whose rewards are grades: does every number and claim of the terminal hold against the record?

    nice python -m benchmarks.trust.graded --count 200             # healthy runs: graded, negative, huge, mixed
    python -m benchmarks.trust.graded --seed 7 --only 12 --keep f  # one of them, with its output; its folder stays in f

Each run trains a tiny model on words of digits, paid by rewards whose kind, scale and number are drawn. What is printed
is held against the recorded episodes, counted a second way: the band before RL, the rewards of the steps, the held-out
means, the gain and its prompts, the word of the verdict; and nothing may speak of right answers, an accuracy or a pass
rate. Goes on after the runs in benchmarks/trust/results/graded.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import posttrain
from posttrain.record import run_reader

RESULTS = Path(__file__).parent / "results/graded.jsonl"
REWARDS = """
def rubric(task, text):
    return 0.9 * min(1.0, sum(c.isdigit() for c in text) / 4)

def letters(completions, **kw):
    return [float(len(set(c))) + 12 for c in completions]

def negative(task, text):
    return -abs(len(text) - 5.0)

def huge(task, text):
    return 1e6 + 1e4 * sum(c.isdigit() for c in text)

def signs(task, text):
    return 1.0 if text[:1].isdigit() else -1.0

def logit(task, text):
    return 3.0 - 0.7 * len(text) + 0.4 * len(set(text))
"""
KINDS = ("rubric", "letters", "negative", "huge", "signs", "logit")
FORBIDDEN = ("accuracy", "are right", "are wrong", "was right", "too easy", "too hard", "pass rate", "pass@")
NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?)"


def draw(seed: int, index: int, folder: Path) -> list[str]:
    """The words of one run."""
    rng = random.Random(f"graded/{seed}/{index}")
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)))
    rewards = ",".join(f"{folder / 'rewards.py'}:{k}" for k in kinds)
    weights = [f"env.rewards.{i}.weight={rng.choice((0.5, 1, 2))}" for i in range(len(kinds))]
    return [
        f"env.rewards={rewards}",
        *weights,
        *(
            "model.hidden=32",
            "model.ffn=64",
            "model.heads=2",
            "model.kv_heads=1",
            "env.prompts=" + str(folder / "p.jsonl"),
        ),
        f"seed={rng.randrange(1 << 20)}",
        f"rl.steps={rng.choice((6, 10, 16))}",
        f"rl.prompts={rng.choice((4, 6))}",
        f"rl.siblings={rng.choice((3, 4, 6))}",
        f"rl.optimizer.lr={rng.choice((3e-4, 1e-3, 3e-3))}",
        f"rl.sampling.max_tokens={rng.choice((6, 10))}",
        f"rl.eval_every={rng.choice((0, 4))}",
        f"rl.algorithm={rng.choice(('grpo', 'dr_grpo', 'rloo', 'dapo'))}",
        f"env.heldout={rng.choice((8, 20, 30))}",
        f"evaluation.samples={rng.choice((1, 2, 4))}",
        "evaluation.greedy=false",
    ]


def play(words: list[str], folder: Path) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        posttrain.run("grpo", *words, out=folder)
    return text.getvalue()


def means(folder: Path, index: int) -> dict[str, list[float]]:
    """The outcomes of a held-out evaluation by prompt, from the verdicts alone."""
    out: defaultdict[str, list[float]] = defaultdict(list)
    for r in run_reader.episodes(folder, "rl", index, "eval"):
        out[str(r.episode.task.prompt)].append(sum(j.weight * (j.verdict.score or 0.0) for j in r.episode.verdicts))
    return dict(out)


def near(said: str, true: float, digits: float = 6e-4) -> bool:
    """Whether a number is the true one, to the last digit that was printed."""
    decimals = len(said.partition(".")[2])
    printed = 0.51 * 10.0**-decimals if decimals or abs(true) >= 1e4 else 6e-4 * abs(true)
    return abs(float(said) - true) <= max(digits, printed)


def false_claims(folder: Path, output: str) -> list[str]:
    """What was printed and is not so."""
    steps = max(s.index for s in run_reader.steps(folder) if s.stage == "rl")
    flat, out = re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(output.split())), list[str]()
    told = flat.split("next: ")[0].split("run folder: ")
    spoken = told[0].split("right: a reward")[0] + " ".join(told[1:])
    before, after = means(folder, 0), means(folder, steps)
    full = max(x for of in (before, after) for own in of.values() for x in own) == 1  # then 1 is right: some got it
    out += [f"speaks of {w!r}" for w in FORBIDDEN[full:] if w in spoken]
    mean = {k: {p: sum(v) / len(v) for p, v in x.items()} for k, x in (("before", before), ("after", after))}
    start, end = (sum(mean[k].values()) / len(mean[k]) for k in ("before", "after"))
    told_start = re.search(rf"mean reward before RL: {NUMBER}", flat)
    if told_start is None or not near(told_start[1], start):
        out.append(f"the mean before RL is {start}: {told_start and told_start[0]}")
    if m := re.search(r"differ in reward on (\d+)% of the prompts", flat):
        share = sum(max(v) - min(v) > 1e-9 * max(map(abs, v)) for v in before.values()) / len(before)
        out += [] if abs(float(m[1]) - 100 * share) <= 0.51 else [f"{m[0]} of {share}"]
    verdict = re.search(
        rf"Did it learn\? (.*?): held-out mean reward {NUMBER} -> {NUMBER} \(before -> step (\d+)(?: of \d+)?\),"
        rf" gain \+?{NUMBER} \[\+?{NUMBER}, \+?{NUMBER}\], paired over (\d+) prompts",
        flat,
    )
    if verdict is None:
        return [*out, "no verdict by the mean reward"]
    word, was, now, at, gain, low, high, prompts = verdict.groups()
    if not (near(was, start) and near(now, end) and near(gain, end - start, 2e-3 + 1e-6 * abs(end))):
        out.append(f"{verdict[0]}: {start} -> {end}")
    out += [] if int(prompts) == len(before.keys() & after.keys()) else [f"{prompts} prompts"]
    out += [] if int(at) == steps else [f"step {at}"]
    lower, upper = float(low), float(high)
    wanted = "learned" if lower > 0 else "got worse" if upper < 0 else None
    if not lower <= float(gain) <= upper or (wanted and wanted not in word) or (not wanted and word == "rl learned"):
        out.append(f"{word!r} of [{low}, {high}]")
    lines = {s.index: s.gauges["rollout/reward"].mean for s in run_reader.steps(folder) if s.stage == "rl"}
    for index, said in re.findall(rf"rl (\d+)/\d+ reward {NUMBER}", flat):
        out += [] if near(said, lines[int(index)]) else [f"reward {said} of step {index}: {lines[int(index)]}"]
    most = json.loads((folder / "run.json").read_text()).get("prompts", math.inf) / 5
    for wanted_heldout in re.findall(r"env\.heldout=(\d+)\)", flat.split("Did it learn?")[1]):
        out += [] if int(wanted_heldout) <= most else [f"env.heldout={wanted_heldout}, at most {most}"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    known = [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(r["seed"], r["index"]) for r in known}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards.py").write_text(REWARDS)
        rows = [json.dumps({"prompt": f"say {i:03d} in words or not: "}) + "\n" for i in range(300)]
        (folder / "p.jsonl").write_text("".join(rows))
        for index in range(args.count) if args.only is None else args.only:
            if (args.seed, index) in done and args.only is None:
                continue
            words, begun = draw(args.seed, index, folder), time.perf_counter()
            out = folder / f"run-{index}"
            output = play(words, out)
            false = false_claims(out, output)
            rules = sorted(
                {note.split(":")[0] for s in run_reader.steps(out) for note in s.notes if note.startswith("rule ")}
            )
            row = {"seed": args.seed, "index": index, "false": false, "rules": rules}
            print(json.dumps({**row, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
            if args.keep is not None:
                (folder / f"run-{index}.txt").write_text(output)
            if args.only is not None:
                print(output)
            else:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
