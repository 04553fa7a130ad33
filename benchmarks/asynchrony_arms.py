"""What of asking ahead brings the time: overlap, the skipped forward, partial rollouts and staleness, each for itself.

    python -m benchmarks.asynchrony_arms times            # seconds a step, on the work of `asynchrony.py`; 12 minutes
    python -m benchmarks.asynchrony_arms accuracy         # accuracy after equal samples; 8 minutes
    python -m benchmarks.asynchrony_arms times --seconds 600      # start no side after this time; a later call goes on
    python -m benchmarks.asynchrony_arms page             # write docs/staleness.md from the results, run nothing

Every arm takes two optimizer steps a batch. The first is synchronous, each of the next four adds one thing, and the
last two leave one of them out again. Times need a machine with nothing beside it and are measured on few steps of 32
prompts x 8 answers. Accuracy is measured on more and smaller steps, with tools four times as fast, and needs no quiet:
all arms learn from equally many samples. Results are written after each side, and a call goes on from them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.asynchrony import POSITIONS, SIZE, measured, side
from benchmarks.grpo_work import save_checkpoint
from benchmarks.side import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/asynchrony_arms.json"
PAGE = ROOT / "docs/staleness.md"
BEGIN = "<!-- arms: written by `python -m benchmarks.asynchrony_arms` -->"
END = "<!-- end of arms -->"


@dataclass(frozen=True)
class AsynchronyArm:
    """What an arm sets, as `asynchrony_side.SideJob` calls it."""

    words: str
    staleness: int = 0
    waits: bool = False
    algorithm: str = "decoupled_ppo"
    update: str = "drain"

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "words"}


ARMS: Mapping[str, AsynchronyArm] = {
    "synchronous": AsynchronyArm("asks, then learns"),
    "overlap": AsynchronyArm("asks the next step while it learns; new weights wait for all answers", 1, True),
    "skipped forward": AsynchronyArm("and no log-probs of the start of a step are computed (`a3po`)", 1, True, "a3po"),
    "partial rollouts": AsynchronyArm("and answers go on under new weights (`inflight`)", 1, False, "a3po", "inflight"),
    "staleness": AsynchronyArm("and a second step is asked ahead", 2, False, "a3po", "inflight"),
    "all, but whole rollouts": AsynchronyArm("new weights wait for all answers", 2, True, "a3po"),
    "all, but the forward": AsynchronyArm("log-probs of the start are computed", 2, False, "decoupled_ppo", "inflight"),
}
SEEDS = (0, 1, 2)
BOTH: Mapping[str, Any] = {"minibatches": 2}
TIMES: Mapping[str, Any] = {"steps": 6}
"""Of the synchronous side; two more for each step that is asked ahead, as in `asynchrony`."""
ACCURACY: Mapping[str, Any] = {
    "prompts": 8,
    "siblings": 8,
    "slots": 64,
    "steps": 40,
    "slow": 0.25,
    "lr": 1e-3,
    "heldout": 32,
}


@dataclass(frozen=True)
class ArmTime:
    """One arm in one round, alone on the machine."""

    arm: str
    seed: int
    seconds: float
    """Of a step."""
    idle: float
    behind: float
    """Steps that tokens were older than the learner, mean."""


@dataclass(frozen=True)
class ArmAccuracy:
    """One arm on one seed."""

    arm: str
    seed: int
    before: float
    """Held-out accuracy: the mean share of right symbols."""
    after: float
    behind: float
    most_behind: float


def time_of(arm: str, seed: int, folder: str, threads: int) -> ArmTime:
    chosen = ARMS[arm]
    steps = TIMES["steps"] + 2 * chosen.staleness
    job = {"checkpoint": folder, "seed": seed, **BOTH, **chosen.settings, "steps": steps}
    found = measured(side(job, threads))
    return ArmTime(arm, seed, found["seconds"], found["idle"], found["behind"])


def accuracy_of(arm: str, seed: int, folder: str, threads: int) -> ArmAccuracy:
    told = side({"checkpoint": folder, "seed": seed, **BOTH, **ACCURACY, **ARMS[arm].settings}, threads)
    gauges = [r["gauges"] for r in told["rows"] if "rollout/tokens" in r["gauges"]]
    behind = [g.get("rollout/versions_behind", 0.0) for g in gauges]
    most = max(g.get("rollout/most_behind", 0.0) for g in gauges)
    return ArmAccuracy(arm, seed, told["before"], told["after"], statistics.mean(behind), most)


def table(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy]) -> Iterator[str]:
    """One line for each arm: medians of times, each beside the synchronous side of its round, and mean accuracies."""
    sync = {t.seed: t.seconds for t in times if t.arm == "synchronous"}
    yield "| arm | s a step | idle | faster | steps behind, mean | accuracy after equal samples | worst seed |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for arm, chosen in ARMS.items():
        mine = [t for t in times if t.arm == arm]
        cells = ["", "", "", ""]
        if mine:
            seconds, idle = (statistics.median(getattr(t, f) for t in mine) for f in ("seconds", "idle"))
            faster = statistics.median(sync[t.seed] / t.seconds for t in mine if t.seed in sync)
            behind = statistics.mean(t.behind for t in mine)
            cells = [f"{seconds:.2f}", f"{idle / seconds:.0%}", f"{faster:.2f}x", f"{behind:.2f}"]
        after = [a.after for a in accuracies if a.arm == arm]
        cells += [f"{statistics.mean(after):.3f}", f"{min(after):.3f}"] if after else ["", ""]
        yield f"| **{arm}**: {chosen.words} | {' | '.join(cells)} |"


def told(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy]) -> list[str]:
    """The part of docs/staleness.md."""
    before = statistics.mean(a.before for a in accuracies) if accuracies else math.nan
    seeds = ", ".join(map(str, sorted({a.seed for a in accuracies})))
    rounds = len({t.seed for t in times})
    return [
        BEGIN,
        "",
        *table(times, accuracies),
        "",
        f"Times: medians of {rounds} rounds of few steps, 32 prompts x 8 answers, nothing beside it. Accuracy: means"
        f" over seeds {seeds} after",
        f"{ACCURACY['steps']} steps of {ACCURACY['prompts']} x {ACCURACY['siblings']} answers with tools four times as"
        f" fast, AdamW at {ACCURACY['lr']:g}; {before:.3f} before. Two optimizer steps a batch in both.",
        "",
        END,
    ]


def read() -> tuple[list[ArmTime], list[ArmAccuracy]]:
    if not RESULTS.exists():
        return [], []
    facts = json.loads(RESULTS.read_text())
    return [ArmTime(**r) for r in facts["times"]], [ArmAccuracy(**r) for r in facts["accuracy"]]


def write(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy], threads: int) -> None:
    """The results, and the part of the page that is made of them."""
    order = list(ARMS)
    times = sorted(times, key=lambda r: (order.index(r.arm), r.seed))
    accuracies = sorted(accuracies, key=lambda r: (order.index(r.arm), r.seed))
    rows = {"times": [asdict(r) for r in times], "accuracy": [asdict(r) for r in accuracies]}
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": machine(threads)} | rows
    RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + "\n".join(told(times, accuracies)) + rest.split(END)[1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "accuracy", "page"))
    parser.add_argument("--only", default=",".join(ARMS), help="comma-separated arms")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no side after this time")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    options = parser.parse_args()
    times, accuracies = read()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(SIZE, Path(folder), POSITIONS)
        for seed, arm in ((int(s), a) for s in options.seeds.split(",") for a in options.only.split(",")):
            known = {(r.arm, r.seed) for r in (times if options.what == "times" else accuracies)}
            late = time.perf_counter() - begun > options.seconds
            if options.what == "page" or (arm, seed) in known or late:
                continue
            if options.what == "times":
                times.append(time_of(arm, seed, folder, options.threads))
            else:
                accuracies.append(accuracy_of(arm, seed, folder, options.threads))
            print((times if options.what == "times" else accuracies)[-1], flush=True)
            if not options.dry:
                write(times, accuracies, options.threads)
    if options.what == "page":
        write(times, accuracies, options.threads)


if __name__ == "__main__":
    main()
