"""Accuracy against tokens spent: every search that there is, with a process reward model, on a run's held-out tasks.

    posttrain run prm rl=none --out runs/prm
    python -m benchmarks.learning.search_curves runs/prm

The policy is the imitation of the run (its stage `sft`), before RL. It is `posttrain eval runs/prm` with the words of
`WORDS`: all ways to make one score of several, votes with and without weights, beams and trees. Then the best search
for so many tokens at most is told by difficulty, which is how often single answers with other random numbers are right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

from posttrain.evaluation.evaluate_search import evaluate_searches
from posttrain.search.curves import SearchPoint

WORDS = (
    "search=best_of.count={counts},aggregate=min,product,mean,last",
    "search=vote.count={counts},weighted=false,true",
    "search=beam.width=2,expand=2",
    "search=beam.width=3,expand=3",
    "search=tree.expansions=6,12",
)
LEVELS = {"hard": (0.0, 1 / 3), "middle": (1 / 3, 2 / 3), "easy": (2 / 3, 1.01)}
"""Tasks by the share of right single answers: from, and below."""
TOKENS = (20, 40, 80, 160)
"""Most tokens a task, in the mean."""
ANSWERS, SEED = 16, 4321
"""Single answers that say how difficult a task is, and the seed of their random numbers."""


def by_difficulty(points: Sequence[SearchPoint], alone: Mapping[Hashable, float]) -> list[str]:
    """Lines: of each level the best search for at most so many tokens. `alone`: how often a task's single answers are
    right. The best of several is better in a table than in truth, by about one standard error."""
    lines = list[str]()
    for level, (low, high) in LEVELS.items():
        tasks = [t for t, share in alone.items() if low <= share < high and all(t in p.values for p in points)]
        if not tasks:
            continue
        lines.append(f"{level}: {len(tasks)} tasks, of which {ANSWERS} answers say so")
        for most in TOKENS:
            given = [(float(np.mean([p.values[t] for t in tasks])), p) for p in points if p.tokens <= most]
            if given:
                accuracy, chosen = max(given, key=lambda x: x[0])
                lines.append(f"  at most {most:>3} tokens: {accuracy:.3f} {chosen.name} ({chosen.tokens:.1f})")
    return lines


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--counts", type=int, nargs="*", default=[2, 4, 8, 16], help="answers of best_of and vote")
    given.add_argument("--runs", type=int, default=2, help="searches of a task")
    given.add_argument("--out", default="search.svg")
    o = given.parse_args()
    begun = time.perf_counter()
    counts = ",".join(map(str, o.counts))
    report = evaluate_searches(o.folder, *(w.format(counts=counts) for w in WORDS), samples=o.runs, out=o.out)
    other = ("search=best_of.count=1", f"evaluation.seed={SEED}")
    alone = evaluate_searches(o.folder, *other, samples=ANSWERS, quiet=True)
    print("\n".join(by_difficulty(report.points, alone.points[0].values)))
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
