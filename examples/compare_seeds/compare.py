"""Runs two algorithms on three seeds each and prints held-out accuracy by seed: `python compare.py A B`."""

from __future__ import annotations

import statistics
import sys

import posttrain

SEEDS = (1, 2, 3)
SETTINGS = ("rl.steps=20",)


def accuracy(algorithm: str, seed: int) -> float:
    """Held-out accuracy of one run, which is kept in `runs/`."""
    out = f"runs/{algorithm}-{seed}"
    result = posttrain.run("arithmetic", f"algorithm={algorithm}", f"seed={seed}", *SETTINGS, out=out, quiet=True)
    assert result.accuracy is not None
    return result.accuracy


def main(first: str, second: str) -> None:
    """Prints a line a seed, and the mean difference with the spread between seeds."""
    differences: list[float] = []
    print(f"{'seed':>4}  {first:>10}  {second:>10}  difference")
    for seed in SEEDS:
        a, b = accuracy(first, seed), accuracy(second, seed)
        differences.append(b - a)
        print(f"{seed:>4}  {a:>10.3f}  {b:>10.3f}  {b - a:>+10.3f}", flush=True)
    print(f"{second} - {first}: {statistics.mean(differences):+.3f}, spread {statistics.stdev(differences):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
