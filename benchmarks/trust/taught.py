"""Do live rules stay silent in runs that nothing is wrong with? Runs of a policy that can do its task half, drawn at
random; none is drawn twice or again.

    python -m benchmarks.trust.taught                        # 600 runs from seed 0
    python -m benchmarks.trust.taught --kept benchmarks/trust/results/taught.jsonl  # goes on after these runs
    python -m benchmarks.trust.taught --count 12 --seed 7    # fewer, with a seed of its own
    python -m benchmarks.trust.taught --seed 7 --only 12     # one of them, with its output

`benchmarks/trust/healthy.py` draws runs from everything that starts, untaught policies and absurd learning rates
included: there a rule may speak, and be right. Here a run is healthy before it is drawn: the policy is right in a tenth
to nine tenths of its answers, the learning rate lies within a factor three of the recipes', and nothing is cut off,
repeated or leaked. A finding of any live rule, at any step, is a false note; but where the policy ends at less than
half of the reward that it began with, the run did not stay healthy, and `collapse` is right. Writes
results/taught.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.trust.healthy import BEST, HINTED, ROOT, SHOWN, TEACHERS, TURNS
from benchmarks.trust.situations import SENTENCES, Setting, Stage
from posttrain.core import seeds
from posttrain.diagnose.rules.notes_once import findings_of
from posttrain.ladder.policy_rows import LADDER
from posttrain.record import run_reader

RESULTS = ROOT / "benchmarks/trust/results/taught.json"
LR = 5e-4
ALGORITHMS = tuple(n for n in LADDER if n not in (*TEACHERS, *HINTED, *TURNS, *SHOWN))
WORLDS = (
    Setting("max", "so ", "qwen3", 32, 8, 8, "grpo", LR, 50),
    Setting("min", "= ", "llama", 40, 8, 8, "grpo", LR, 51),
    Setting("max", "it is ", "gpt2", 32, 8, 8, "grpo", LR, 52),
)
"""Start policies, each made once."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    index: int
    words: list[str]
    seconds: float
    steps: int
    rewards: tuple[float, float]
    """Mean of the first and of the last four steps."""
    found: dict[str, str] = field(default_factory=dict[str, str])
    """Findings of live rules, each with its message."""
    stopped: str = ""


def draw(seed: int, index: int) -> tuple[Setting, list[str]]:
    """Run number `index` of `seed`: its world, and its words beside the usual ones."""
    rng = seeds.generator(seed, "taught", index)

    def one(*choices: object) -> object:
        return choices[int(rng.integers(len(choices)))]

    world = WORLDS[int(rng.integers(len(WORLDS)))]
    algorithm = str(ALGORITHMS[int(rng.integers(len(ALGORITHMS)))])
    prompts, minibatches = ((6, 1), (8, 1), (8, 2), (12, 1), (16, 1), (16, 4))[int(rng.integers(6))]
    setting = replace(
        world,
        algorithm=algorithm,
        prompts=prompts,
        siblings=int(one(6, 8) if algorithm in BEST else one(4, 6, 8)),  # type: ignore[call-overload]
        lr=LR * 10 ** rng.uniform(-0.5, 0.5),
    )
    words = [
        f"seed={int(rng.integers(1 << 20))}",
        f"rl.steps={one(12, 20, 36)}",
        f"rl.minibatches={minibatches}",
        f"rl.epochs={one(1, 1, 2)}",
        "rl.refill=2",
        f"rl.optimizer.warmup={one(0, 3, 10)}",
        f"rl.sampling.temperature={one(0.8, 1.0, 1.0, 1.2)}",
        f"rl.eval_every={one(0, 6)}",
    ]
    return setting, words


def play(seed: int, index: int, folder: Path) -> tuple[Outcome, str]:
    """Play one run; `folder` holds the start policies. Returns what became of it, and its output."""
    begun = time.perf_counter()
    setting, words = draw(seed, index)
    home = folder / f"{setting.word}-{setting.arch}"
    stage = Stage(setting, home)
    before = set(home.glob("run-*"))
    try:
        output, stopped = stage.rl(*words), ""
    except Exception:
        output, stopped = "", traceback.format_exc()
    (run,) = set(home.glob("run-*")) - before or {home}
    steps = list(run_reader.steps(run)) if (run / "run.json").exists() else []
    found = {s.rule: s.message for s in findings_of(steps)}
    found |= {k: words for k, words in SENTENCES.items() if words in " ".join(output.split()) and k not in found}
    if not stopped and "\nposttrain: " in output:
        stopped = output.partition("\nposttrain: ")[2]
    # A policy that has learned every task leaves a curriculum nothing to ask, and the run says so.
    if stopped.startswith("curriculum: every one of"):
        stopped = ""
    each = [s.gauges["rollout/reward"].mean for s in steps]
    ends = (sum(each[:4]) / 4, sum(each[-4:]) / 4) if len(each) >= 4 else (0.0, 0.0)
    return Outcome(
        index, [*told_of(setting), *words], time.perf_counter() - begun, len(steps), ends, found, stopped
    ), output


def is_false(o: Outcome) -> bool:
    """Whether a note was wrong: any but that of a collapse, in a run that lost more than half of its reward."""
    return bool(set(o.found) - {"collapse"}) or (bool(o.found) and o.rewards[1] >= 0.5 * o.rewards[0])


def line(o: Outcome) -> str:
    note = "FALSE NOTE" if is_false(o) else "TRUE NOTE"
    told = f"STOPPED {o.stopped[:300]}" if o.stopped else f"{note} {o.found}" if o.found else "silent"
    return f"run {o.index} {o.seconds:.1f} s, reward {o.rewards[0]:.2f} to {o.rewards[1]:.2f}: {told} {o.words}"


def many(seed: int, count: int, folder: Path, kept: Path | None = None) -> list[Outcome]:
    """Play runs 0 to `count`; `kept` holds a line for each that is played, and those that it holds are not played
    again."""
    known = recalled(kept, seed) if kept else {}
    out: list[Outcome] = []
    for i in range(count):
        if i not in known:
            outcome = play(seed, i, folder)[0]
            print(line(outcome), flush=True)
            known[i] = outcome
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(as_row(seed, outcome) + "\n")
        out.append(known[i])
    return out


def recalled(kept: Path, seed: int) -> dict[int, Outcome]:
    """Runs of `seed` that a file of earlier calls holds, by their number."""
    rows = [json.loads(row) for row in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    known: dict[int, Outcome] = {}
    for row in rows:
        if row.pop("seed") == seed:
            setting, words = draw(seed, row["index"])
            row |= {"words": [*told_of(setting), *words], "rewards": tuple(row["rewards"])}
            known[row["index"]] = Outcome(**row)
    return known


def as_row(seed: int, outcome: Outcome) -> str:
    """A run as a line of a file; its words are drawn again from the seed."""
    row = {k: v for k, v in asdict(outcome).items() if k != "words"}
    row |= {"seconds": round(outcome.seconds, 1), "rewards": [round(r, 4) for r in outcome.rewards]}
    return json.dumps({"seed": seed, **row})


def told_of(setting: Setting) -> list[str]:
    """What a run's setting has beside its words."""
    return [
        f"rl.algorithm={setting.algorithm}",
        f"prompts={setting.prompts}x{setting.siblings}",
        f"lr={setting.lr:.2g}",
    ]


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    return {
        "runs": len(outcomes),
        "steps": sum(o.steps for o in outcomes),
        "false_notes": sum(is_false(o) for o in outcomes),
        "true_notes": sum(bool(o.found) and not is_false(o) for o in outcomes),
        "stopped": sum(bool(o.stopped) for o in outcomes),
        "rules": dict(Counter(rule for o in outcomes for rule in o.found)),
        "rose": sum(o.rewards[1] > o.rewards[0] for o in outcomes),
        "told": [asdict(o) for o in outcomes if o.found or o.stopped],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--kept", type=Path, help="a file that keeps each run as a line; with it a call goes on")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.only is not None:
            outcome, output = play(args.seed, args.only, Path(scratch))
            print(output, line(outcome), sep="\n")
            return
        outcomes = many(args.seed, args.count, Path(scratch), args.kept)
    told = {"seed": args.seed, "date": time.strftime("%Y-%m-%d"), "seconds": round(sum(o.seconds for o in outcomes))}
    told |= summary(outcomes)
    print(json.dumps({k: v for k, v in told.items() if k != "told"}, indent=1))
    if not args.dry:
        RESULTS.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if told["false_notes"] or told["stopped"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
