"""One batch for several optimizer steps: what each trust region makes of it. Sixteen of them at a mild and at a hot
learning rate, and four on samples that are four steps old.

    python -m benchmarks.learning.updates  # all arms, seeds 0, 1, 2, both rates, and old samples
    python -m benchmarks.learning.updates --only clip,gspo --seeds 0 --rates hot
    python -m benchmarks.learning.updates --rates stale            # old samples alone
    python -m benchmarks.learning.updates --rates game,tool,hint   # lines that sums do not show, in worlds of their own
    python -m benchmarks.learning.updates --seconds 300            # what is missing, as far as the time goes

For each seed one SFT on arithmetic (40 % of the demonstrations wrong) makes the start. Every arm then takes the same
number of steps on the same prompts: 8 prompts x 8 answers, cut into 4 minibatches, 4 times. The arms and what they are
to show are in `updates_regions.py`, those on old samples in `updates_stale.py`, those of other worlds in
`updates_worlds.py`, written before the runs. Writes
benchmarks/learning/results/updates.json after each run, from which it goes on, and docs/research/several-updates.md.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import platform
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from benchmarks.learning import updates_stale, updates_worlds
from benchmarks.learning.algorithms import accuracies, teacher
from benchmarks.learning.from_start import run_from
from benchmarks.learning.updates_regions import (
    ARMS,
    ASIDE,
    EPOCHS,
    LATER,
    LEARNED,
    LINES,
    MINIBATCHES,
    PREDICTIONS,
    PROMPTS,
    RATES,
    SEEDS,
    SIBLINGS,
    STEPS,
    TOKENS,
    Prediction,
    drift_correlation,
)
from posttrain.config.run import Run
from posttrain.core.gauge import Step
from posttrain.ladder.algorithm import Algorithm
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/updates.json"
PAGE = ROOT / "docs/research/several-updates.md"
WORKS: Mapping[str, Mapping[str, Algorithm]] = {
    "mild": {**ARMS, **LATER, **LINES, **TOKENS},
    "hot": {**ARMS, **LATER},
    "stale": updates_stale.ARMS,
    **{name: world.arms for name, world in updates_worlds.WORLDS.items()},
}
"""The arms at each learning rate. Samples of `stale` are old; those of the last ones are of other worlds, at the mild
rate."""
EVERY = tuple(dict.fromkeys(arm for arms in WORKS.values() for arm in arms))
"""All arms, in the order of the results."""
TEACHING = 40
"""Steps of the teacher."""
LAST = 3
"""Steps over whose rollouts the last accuracy on training prompts is taken."""


@dataclass(frozen=True)
class ArmRow:
    """One arm on one seed at one learning rate."""

    arm: str
    rate: str
    seed: int
    before: float
    """Held-out accuracy of the start."""
    after: float
    peak: float
    """Largest share of right answers in a step's rollouts."""
    last: float
    """Share of right answers in the rollouts of the last steps."""
    clipped: float
    """Share of tokens without a policy gradient, mean over the steps."""
    tail: float
    """Mean of the squared ratio, largest step."""
    ess: float
    """(mean ratio)^2 / mean squared ratio over tokens, smallest step."""
    moved: float | None
    """KL from the start of a step during its updates, nats a token, mean over the steps; None: it forms no ratio, or
    none with that start. With staleness 0 the sampler is that start too."""
    share: float
    """Share of the learning rate that was used, mean over the steps."""
    stopped: str
    """Why the run stopped early; '' where it did not."""
    seconds: float
    heard: float | None = None
    """Of a line that learns what it is told: by how much the mean log-prob of that rose, last steps less first step."""


def run_of(arm: str, rate: str, seed: int, model: Path, steps: int | None = None) -> Run:
    """The run of one arm. The teacher of a line that learns from one is made beside the start."""
    algorithm, old, world = WORKS[rate][arm], rate == "stale", updates_worlds.WORLDS.get(rate)
    taught = algorithm.taught
    reference = teacher(seed, TEACHING, model, model.parent / f"teacher-{seed}") if taught else None
    batch = {"prompts": PROMPTS, "siblings": SIBLINGS, "minibatches": MINIBATCHES, "epochs": EPOCHS}
    more: dict[str, Any] = {**(updates_stale.BATCH if old else batch), "reference": reference}
    if world is not None:
        more |= {"base": world.run(), "ema": world.ema}
    lr, most = (updates_stale.RATE, updates_stale.STEPS) if old else (RATES.get(rate, RATES["mild"]), STEPS)
    return run_from(model, algorithm, name=arm, seed=seed, rate=lr, steps=steps or most, **more)


def play(arm: str, rate: str, seed: int, model: Path, folder: Path, steps: int | None = None) -> ArmRow:
    """One arm from the start."""
    begun, stopped = time.perf_counter(), ""
    out, run = folder / f"{arm}-{rate}-{seed}", run_of(arm, rate, seed, model, steps)
    try:
        posttrain.run(run, out=out, quiet=True)
    except posttrain.PosttrainError as error:
        stopped = str(error).split(":")[0][:80]
        print(f"{arm} {rate} {seed}: {error}", flush=True)
    lines, before = run_reader.steps(out), list(accuracies(out, 0).values())
    after = [] if stopped else list(accuracies(out, run.stages[-1].steps).values())
    learned = [s for s in lines if "policy/ratio" in s.gauges]
    solved = [s.gauges["rollout/solved"].mean for s in learned]
    return ArmRow(
        arm,
        rate,
        seed,
        float(np.mean(before)),
        float(np.mean(after)) if not stopped else 0.0,
        max(solved),
        float(np.mean(solved[-LAST:])),
        silenced(learned),
        max(s.gauges["policy/ratio_square"].mean for s in learned),
        min(s.gauges["policy/ratio"].mean ** 2 / s.gauges["policy/ratio_square"].mean for s in learned),
        drift(WORKS[rate][arm].forms_ratio and rate != "stale", learned),
        mean(learned, "optim/share") if any("optim/share" in s.gauges for s in learned) else 1.0,
        stopped,
        time.perf_counter() - begun,
        rise(learned, "policy/heard"),
    )


def rise(steps: Sequence[Step], gauge: str) -> float | None:
    """By how much a gauge's mean is higher in the last steps than in the first; None where no step has it."""
    found = [s.gauges[gauge].mean for s in steps if gauge in s.gauges]
    return float(np.mean(found[-LAST:])) - found[0] if found else None


def drift(fresh: bool, learned: Sequence[Step]) -> float | None:
    """`ArmRow.moved`. fresh: whether the ratio is to the start of a step, whatever the anchor is called."""
    if any("policy/kl_start" in s.gauges for s in learned):
        return mean(learned, "policy/kl_start")
    return mean(learned, "policy/kl_anchor") if fresh else None


def silenced(steps: Sequence[Step]) -> float:
    """Share of tokens without a policy gradient: outside of the trust region, or masked by the choice of tokens. No arm
    has both."""
    return sum(
        mean(steps, name)
        for name in ("policy/clip_low", "policy/clip_high", "policy/masked")
        if any(name in s.gauges for s in steps)
    )


def mean(steps: Sequence[Step], gauge: str) -> float:
    """Mean over the steps of a gauge's mean; NaN where no step has it."""
    found = [s.gauges[gauge].mean for s in steps if gauge in s.gauges]
    return float(np.mean(found)) if found else math.nan


def means(rows: Sequence[ArmRow]) -> dict[tuple[str, str], dict[str, float]]:
    """Means over seeds, by (arm, rate); `tail` by the largest seed, `ess` and `worst` by the smallest."""
    out: dict[tuple[str, str], dict[str, float]] = {}
    for key in dict.fromkeys((r.arm, r.rate) for r in rows):
        mine = [r for r in rows if (r.arm, r.rate) == key]
        fields = ("before", "after", "peak", "last", "clipped", "share", "seconds")
        each = {f: float(np.mean([getattr(r, f) for r in mine])) for f in fields}
        out[key] = each | {
            "moved": float(np.mean([math.nan if r.moved is None else r.moved for r in mine])),
            "tail": max(r.tail for r in mine),
            "ess": min(r.ess for r in mine),
            "worst": min(r.after for r in mine),
            "seeds": float(len(mine)),
            "stopped": float(sum(bool(r.stopped) for r in mine)),
            "heard": float(np.mean([math.nan if r.heard is None else r.heard for r in mine])),
        }
    return out


def table(found: Mapping[tuple[str, str], Mapping[str, float]], rate: str, arms: Iterable[str] = ARMS) -> list[str]:
    lines = [
        "| arm | after | worst seed | last rollouts | clipped | ratio tail | least ESS | moved | step share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm in arms:
        if (f := found.get((arm, rate))) is None:
            continue
        moved = "-" if math.isnan(f["moved"]) else f"{f['moved']:.2g}"
        few = "" if f["seeds"] == len(SEEDS) else f" ({f['seeds']:.0f} of {len(SEEDS)} seeds)"
        stopped = f" ({f['stopped']:.0f} stopped)" if f["stopped"] else ""
        lines.append(
            f"| {arm}{few}{stopped} | {f['after']:.3f} | {f['worst']:.3f} | {f['last']:.3f} | {f['clipped']:.3f} |"
            f" {f['tail']:.3g} | {f['ess']:.3f} | {moved} | {f['share']:.2f} |"
        )
    return lines


def page(rows: Sequence[ArmRow]) -> str:
    """docs/research/several-updates.md."""
    found, missing = means(rows), sum(map(len, WORKS.values())) * len(SEEDS) - len(rows)
    before = float(np.mean([r.before for r in rows if r.rate in RATES]))
    rates = " and ".join(f"{lr:g} ({n})" for n, lr in RATES.items())
    lines = [
        "# Several updates on one batch",
        "",
        "For people who take several optimizer steps on one batch. After this page you know where trust regions part,",
        "and which of them keep what was learned.",
        "",
        "With one optimizer step a batch every trust region is silent (law 3), and algorithms that differ in nothing",
        "else coincide ([side by side](algorithm-table.md)). Here they part: each batch is used for"
        f" {MINIBATCHES * EPOCHS} optimizer steps",
        f"({PROMPTS} prompts x {SIBLINGS} answers, {MINIBATCHES} minibatches, {EPOCHS} epochs), {STEPS} batches,"
        " arithmetic after the same SFT,",
        f"AdamW at {rates}. Every arm is `grpo` without KL with another trust region: credit,",
        "weights and data are shared, so what parts two arms is the factor of a token's gradient. Held-out accuracy of",
        f"the start: {before:.3f}. Means over seeds {', '.join(map(str, SEEDS))}. Written by"
        " `python -m benchmarks.learning.updates`; the arms, one line each, are in",
        "`benchmarks/learning/updates_regions.py`. Seeds of one arm lie .1 to .3 apart: differences of .05 mean"
        " nothing here.",
        "",
        "| column | what it is |",
        "|---|---|",
        "| after | held-out accuracy after the last batch, sampled at temperature 1; 0 where a check stopped the run |",
        "| worst seed | the same, of the seed that ended lowest |",
        f"| last rollouts | share of right answers on training prompts, last {LAST} batches |",
        "| clipped | share of tokens with a push of exactly 0 by the trust region; the rows of `m2po` are older than"
        " the gauge of what it masks (`policy/masked`), which is not in them |",
        "| ratio tail | mean squared ratio of the arm's own ratio, largest batch and seed; the ratio is that of whole"
        " answers for `gspo`, `luspo`, `vespo`, `seq_is`, `vcpo`, else of tokens |",
        "| least ESS | effective sample size as a share: (mean ratio)^2 / mean squared ratio over tokens, smallest"
        " batch and seed |",
        "| moved | k3 from the start of the batch, nats a token, while its updates are made |",
        "| step share | share of the learning rate that was used; only VCPO uses less than all of it |",
        "",
    ]
    for name in RATES:
        lines += [
            f"## {name.capitalize()}: learning rate {RATES[name]:g}",
            "",
            *table(found, name, (*ARMS, *LATER)),
            "",
        ]
    lines += ["## Lines with credit of their own, mild", "", *table(found, "mild", (*LINES, *TOKENS)), ""]
    lines += ["## Predicted before the runs", "", *predicted(PREDICTIONS, found), ""]
    lines += ["## What parts them", "", *learned(found), "", *old_samples(found), *other_worlds(found)]
    lines += ["## Not arms of their own", ""]
    lines += [f"- `{n}`: {why}." for n, why in ASIDE.items()]
    if missing:
        whole = len(rows) + missing
        lines += [
            "",
            f"**Incomplete:** {missing} of {whole} runs are missing; `python -m benchmarks.learning.updates` makes"
            f" them.",
        ]
    return "\n".join(lines) + "\n"


def predicted(predictions: Sequence[Prediction], found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    whole = {key: f for key, f in found.items() if f["seeds"] == len(SEEDS)}
    return [f"{i}. {p.text} **{judged(p.holds, whole)}**" for i, p in enumerate(predictions, 1)]


def old_samples(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """The part of the page about batches that are old as well."""
    batch = updates_stale.BATCH
    return [
        f"## Several updates on samples that are {updates_stale.STALENESS} steps old",
        "",
        f"`staleness={updates_stale.STALENESS}`, {batch['minibatches'] * batch['epochs']} optimizer steps a batch"
        f" ({batch['prompts']} prompts x {batch['siblings']} answers, {batch['minibatches']} minibatches,"
        f" {batch['epochs']} epochs),",
        f"{updates_stale.STEPS} batches, AdamW at {updates_stale.RATE:g}. Sampler, start of the batch and policy are"
        " three now. `blind` clips around the start",
        "of the batch and does not see the age, `clip` around the sampler; the others are lines of the ladder, with"
        " credit of their own",
        "where they have it. *Clipped* and *ratio tail* are of the clip's ratio: a correction by start/sampler is not",
        "in them. The arms are in `benchmarks/learning/updates_stale.py`.",
        "",
        *table(found, "stale", updates_stale.ARMS),
        "",
        "Predicted before the runs:",
        "",
        *predicted(updates_stale.PREDICTIONS, found),
        "",
        *(textwrap.fill(f"- {text}", 118, subsequent_indent="  ") for text in updates_stale.LEARNED),
        *([""] if updates_stale.LEARNED else []),
    ]


def other_worlds(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """The part of the page about lines that sums do not show."""
    lines = ["## Lines that need a world of their own", ""]
    lines += [f"{MINIBATCHES * EPOCHS} updates a batch, {STEPS} batches and {RATES['mild']:g}, as above.", ""]
    for name, world in updates_worlds.WORLDS.items():
        of = [found[key] for key in found if key[1] == name]
        before = f" Accuracy of the start: {np.mean([f['before'] for f in of]):.3f}." if of else ""
        told = textwrap.fill(f"`{name}`: {world.what}.{before}", 118)
        lines += [*told.split("\n"), "", *table(found, name, world.arms), ""]
    lines += ["Predicted before the runs:", "", *predicted(updates_worlds.PREDICTIONS, found), ""]
    said = [textwrap.fill(f"- {text}", 118, subsequent_indent="  ") for text in updates_worlds.LEARNED]
    return [*lines, *said, *([""] if said else [])]


def learned(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """What the runs showed, as a list."""
    if not {(a, r) for a in ARMS for r in RATES} <= found.keys():
        return ["Not every arm is measured yet."]
    both = {rate: drift_correlation(found, rate) for rate in RATES}
    return [textwrap.fill(f"- {text.format(**both)}", 118, subsequent_indent="  ") for text in LEARNED]


def judged(holds: object, found: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    assert callable(holds)
    try:
        return "Came." if holds(found) else "Did not come."
    except KeyError:
        return "Not measured yet."


def written() -> list[ArmRow]:
    return [ArmRow(**r) for r in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []


def keep(row: ArmRow) -> None:
    """Add a row to the results, which another call may be writing too."""
    with PAGE.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        others = [r for r in written() if (r.arm, r.rate, r.seed) != (row.arm, row.rate, row.seed)]
        write([*others, row])


def write(rows: list[ArmRow]) -> None:
    order = {name: i for i, name in enumerate(EVERY)}
    rows = sorted((r for r in rows if r.arm in WORKS[r.rate]), key=lambda r: (order[r.arm], r.rate, r.seed))
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "rows": [asdict(r) for r in rows],
    }
    RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--only", help="comma-separated arms; all of them if left out")
    parser.add_argument("--rates", default=",".join(WORKS), help="of them, comma-separated")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--keep", type=Path, help="folder for the starts, which further calls then find made")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results, run nothing")
    args = parser.parse_args()
    rows, begun = [] if args.dry else written(), time.perf_counter()
    if args.page:
        write(rows)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for seed in map(int, args.seeds.split(",")):
            for rate in args.rates.split(","):
                for arm in args.only.split(",") if args.only else WORKS[rate]:
                    if arm not in WORKS[rate]:
                        continue
                    done = any((r.arm, r.rate, r.seed) == (arm, rate, seed) for r in rows)
                    if done or time.perf_counter() - begun > args.seconds:
                        continue
                    model = updates_worlds.begin(rate, seed, args.keep or Path(scratch))
                    row = play(arm, rate, seed, model, Path(scratch))
                    if not args.dry:
                        keep(row)
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}, flush=True)


if __name__ == "__main__":
    main()
