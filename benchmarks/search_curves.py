"""Accuracy against tokens spent: every search that there is, with a process reward model, on a run's held-out tasks.

    posttrain run prm --out runs/prm
    python -m benchmarks.search_curves runs/prm

The policy is the imitation of the run (its stage `sft`), before RL. It is `posttrain eval runs/prm` with the words of
`WORDS`: all ways to make one score of several, votes with and without weights, beams and trees.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from posttrain.api.searched import evaluate_searches

WORDS = (
    "search=best_of.count={counts},aggregate=min,product,mean,last",
    "search=vote.count={counts},weighted=false,true",
    "search=beam.width=2,expand=2",
    "search=beam.width=3,expand=3",
    "search=tree.expansions=6,12",
)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("folder", type=Path)
    given.add_argument("--counts", type=int, nargs="*", default=[4, 8, 16], help="answers of best_of and vote")
    given.add_argument("--runs", type=int, default=2, help="searches of a task")
    given.add_argument("--out", default="search.svg")
    o = given.parse_args()
    begun = time.perf_counter()
    counts = ",".join(map(str, o.counts))
    evaluate_searches(o.folder, *(w.format(counts=counts) for w in WORDS), samples=o.runs, out=o.out)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
