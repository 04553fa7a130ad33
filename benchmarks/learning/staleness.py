"""Samples that are older than the learner: where each algorithm breaks, and what the gauges said before.

    python -m benchmarks.learning.staleness                         # all arms, seeds 0, 1, 2, staleness 0 to 16
    python -m benchmarks.learning.staleness --only clip --staleness 0,8 --seeds 0
    python -m benchmarks.learning.staleness --seconds 300           # what is missing, as far as the time goes

For each seed one SFT on arithmetic (40 % of the demonstrations wrong) makes the start. Every arm then takes the same
number of steps of one optimizer step each, on samples that are `staleness` steps old. The arms and what they are to
show are in `staleness_arms.py`, written before the runs. Writes results/staleness.json after each run, from
which it goes on, and docs/research/staleness-runs.md with its picture.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

import posttrain
from benchmarks.learning.algorithms import accuracies
from benchmarks.learning.from_start import run_from, start
from benchmarks.learning.staleness_arms import (
    ARMS,
    LEARNED,
    PREDICTIONS,
    PROMPTS,
    RATE,
    SEEDS,
    SIBLINGS,
    STALENESS,
    STEPS,
)
from benchmarks.learning.updates import judged, mean, silenced
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/staleness.json"
PAGE = ROOT / "docs/research/staleness-runs.md"
PICTURE = ROOT / "docs/pictures/staleness.svg"
LAST = 6
"""Steps over whose rollouts the last accuracy on training prompts is taken."""


@dataclass(frozen=True)
class StaleRow:
    """One arm at one staleness on one seed."""

    arm: str
    staleness: int
    seed: int
    before: float
    """Held-out accuracy of the start."""
    after: float
    peak: float
    """Largest share of right answers in a step's rollouts."""
    last: float
    """Share of right answers in the rollouts of the last steps."""
    clipped: float
    """Share of tokens with a push of 0, mean over the last half of the steps."""
    tail: float
    """Mean of the squared ratio, largest step."""
    ess: float
    """(mean ratio)^2 / mean squared ratio over tokens, smallest step."""
    behind: float
    """Steps that tokens were older than the learner, mean over the last half of the steps."""
    stopped: str
    """Why the run stopped early; '' where it did not."""
    seconds: float


def play(arm: str, staleness: int, seed: int, model: Path, folder: Path, steps: int, rate: float) -> StaleRow:
    begun, stopped = time.perf_counter(), ""
    out = folder / f"{arm}-{staleness}-{seed}-{rate:g}"
    batch = {"prompts": PROMPTS, "siblings": SIBLINGS, "staleness": staleness}
    run = run_from(model, ARMS[arm], name=arm, seed=seed, rate=rate, steps=steps, **batch)
    try:
        posttrain.run(run, out=out, quiet=True)
    except posttrain.PosttrainError as error:
        stopped = str(error).split(":")[0][:80]
    lines = [s for s in run_reader.steps(out) if "policy/ratio" in s.gauges]
    before, after = (list(accuracies(out, i).values()) for i in (0, steps))
    solved, late = [s.gauges["rollout/solved"].mean for s in lines], lines[len(lines) // 2 :]
    return StaleRow(
        arm,
        staleness,
        seed,
        float(np.mean(before)),
        float(np.mean(after)) if not stopped else 0.0,
        max(solved),
        float(np.mean(solved[-LAST:])),
        silenced(late),
        max(s.gauges["policy/ratio_square"].mean for s in lines),
        min(s.gauges["policy/ratio"].mean ** 2 / s.gauges["policy/ratio_square"].mean for s in lines),
        mean(late, "rollout/versions_behind"),
        stopped,
        time.perf_counter() - begun,
    )


def means(rows: Sequence[StaleRow]) -> dict[tuple[str, int], dict[str, float]]:
    """Means over seeds, by (arm, staleness); `tail` by the largest seed, `ess` and `worst` by the smallest."""
    out: dict[tuple[str, int], dict[str, float]] = {}
    for key in dict.fromkeys((r.arm, r.staleness) for r in rows):
        mine = [r for r in rows if (r.arm, r.staleness) == key]
        fields = ("before", "after", "peak", "last", "clipped", "behind", "seconds")
        out[key] = {f: float(np.mean([getattr(r, f) for r in mine])) for f in fields} | {
            "tail": max(r.tail for r in mine),
            "ess": min(r.ess for r in mine),
            "worst": min(r.after for r in mine),
            "stopped": float(sum(bool(r.stopped) for r in mine)),
        }
    return out


def tables(found: Mapping[tuple[str, int], Mapping[str, float]]) -> list[str]:
    """One table for each figure, with an arm a row and a staleness a column."""
    lines = list[str]()
    for title, figure, digits in (
        ("Held-out accuracy after the last step, mean over seeds", "after", 3),
        ("The same of the worst seed", "worst", 3),
        (
            "Share of tokens that the trust region silences, last half of the steps; what `m2po` masks is not in it",
            "clipped",
            3,
        ),
        ("Mean squared ratio, largest step and seed", "tail", 2),
        ("Least effective sample size, (mean ratio)^2 / mean squared ratio, smallest step and seed", "ess", 3),
    ):
        lines += [f"**{title}**", "", f"| arm | {' | '.join(f'K = {k}' for k in STALENESS)} |"]
        lines += ["|---|" + "---:|" * len(STALENESS)]
        for arm in ARMS:
            cells = [f"{found[arm, k][figure]:.{digits}f}" if (arm, k) in found else "" for k in STALENESS]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
        lines.append("")
    return lines


def picture(found: Mapping[tuple[str, int], Mapping[str, float]]) -> None:
    """docs/pictures/staleness.svg: accuracy and effective sample size over staleness."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "staleness"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for arm in ARMS:
        ks = [k for k in STALENESS if (arm, k) in found]
        at = [STALENESS.index(k) for k in ks]
        left.plot(at, [found[arm, k]["after"] for k in ks], marker="o", label=arm)
        if arm != "blind":
            right.plot(at, [found[arm, k]["ess"] for k in ks], marker="o", label=arm)
        else:
            right.plot([], [])
    for axis, title in ((left, "held-out accuracy after the last step"), (right, "least effective sample size")):
        axis.set_xticks(range(len(STALENESS)), [str(k) for k in STALENESS])
        axis.set_xlabel("staleness (steps)")
        axis.set_title(title)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)


def page(rows: Sequence[StaleRow]) -> str:
    """docs/research/staleness-runs.md."""
    found, whole = means(rows), len(ARMS) * len(STALENESS) * len(SEEDS)
    before = float(np.mean([r.before for r in rows])) if rows else math.nan
    lines = [
        "# How old may samples be?",
        "",
        "For people who set `staleness=K`. After this page you know where each algorithm breaks when samples are K",
        "steps older than the weights that learn from them, and which gauge said so before.",
        "",
        f"Arithmetic after the same SFT, {PROMPTS} prompts x {SIBLINGS} answers and one optimizer step a batch, {STEPS}"
        " steps,",
        f"AdamW at {RATE:g}. Every arm is `grpo` without KL; they differ in what they make of an older answer.",
        f"Held-out accuracy of the start: {before:.3f}. Seeds {', '.join(map(str, SEEDS))}. Written by"
        " `python -m benchmarks.learning.staleness`; the arms, one line",
        "each, are in `benchmarks/learning/staleness_arms.py`. A run that a check stopped counts as accuracy 0.",
        "",
        "![Accuracy and effective sample size over staleness](../pictures/staleness.svg)",
        "",
        *tables(found),
        "## Predicted before the runs",
        "",
        *(f"{i}. {p.text} **{judged(p.holds, cast('Any', found))}**" for i, p in enumerate(PREDICTIONS, 1)),
        "",
        "## What parts them",
        "",
        *LEARNED,
    ]
    if len(rows) < whole:
        lines += [
            "",
            f"**Incomplete:** {whole - len(rows)} of {whole} runs are missing; `python -m"
            f" benchmarks.learning.staleness` makes"
            " them.",
        ]
    return "\n".join(lines) + "\n"


def written() -> list[StaleRow]:
    return [StaleRow(**r) for r in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []


def write(rows: list[StaleRow]) -> None:
    order = {name: i for i, name in enumerate(ARMS)}
    rows = sorted((r for r in rows if r.arm in order), key=lambda r: (order[r.arm], r.staleness, r.seed))
    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    RESULTS.write_text(json.dumps(facts | {"rows": [asdict(r) for r in rows]}, indent=1, allow_nan=False) + "\n")
    PAGE.write_text(page(rows), encoding="utf-8")
    picture(means(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--only", default=",".join(ARMS), help="comma-separated arms")
    parser.add_argument("--staleness", default=",".join(map(str, STALENESS)))
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate; another one needs --dry")
    parser.add_argument("--steps", type=int, default=STEPS, help="another number needs --dry")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--keep", type=Path, help="folder for the starts, which further calls then find made")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results, run nothing")
    args = parser.parse_args()
    if not args.dry and (args.rate, args.steps) != (RATE, STEPS):
        parser.error("the results file holds one learning rate and one length: add --dry")
    rows, begun = [] if args.dry else written(), time.perf_counter()
    if args.page:
        write(rows)
        return
    wanted = [
        (seed, int(k), arm)
        for seed in map(int, args.seeds.split(","))
        for k in args.staleness.split(",")
        for arm in args.only.split(",")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for seed, k, arm in wanted:
            known = any((r.arm, r.staleness, r.seed) == (arm, k, seed) for r in rows)
            if known or time.perf_counter() - begun > args.seconds:
                continue
            model = start(seed, args.keep or Path(scratch))
            rows.append(play(arm, k, seed, model, Path(scratch), args.steps, args.rate))
            if not args.dry:
                write(rows)
            told = {n: round(v, 4) if isinstance(v, float) else v for n, v in asdict(rows[-1]).items()}
            print(told, flush=True)


if __name__ == "__main__":
    main()
