"""Whether the reward `math` is right: pairs of answers with a verdict known by construction, beside math-verify alone.

    python -m benchmarks.trust.answers                # counts by kind
    python -m benchmarks.trust.answers --show ours    # each pair that is judged wrongly; --show both: by either

The table `answers.txt` has kinds of answers (`=== kind`); each line is a class: the spellings of one answer. Two
spellings of one class are a right pair, in both directions; two of different classes of a kind are a wrong pair. Each
pair is one call of the reward (gold, `so it is \\boxed{said}`), and one of `verify(parse(gold), parse(response))` with
the defaults of math-verify.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from posttrain.core.types import Task
from posttrain.verifier.math.math_reward import math_source

TABLE = Path(__file__).with_suffix(".txt")
RESULTS = Path(__file__).parent / "results" / "answers.json"
Kind = list[list[str]]


def letters() -> Kind:
    """Every letter behind a coefficient: a variable in each place."""
    return [c for v in string.ascii_letters for c in ([f"1+2{v}", f"2{v}+1"], ["3"], [f"5{v}"], ["5"])]


def kinds() -> dict[str, Kind]:
    """The kinds of the table, as classes of equal spellings, and the letters."""
    out = {"every letter": letters()}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("=== "):
            classes = out[line[4:]] = []
        else:
            classes.append(line.split(" ;; "))
    return out


def pairs() -> Iterator[tuple[str, str, str, bool]]:
    """(kind, gold, said, right): the pairs of each class with its first spelling, and of classes next to each other."""
    for kind, classes in kinds().items():
        seen = set[tuple[str, str]]()
        for own in classes:
            for other in own[1:]:
                yield kind, own[0], other, True
                yield kind, other, own[0], True
        for i, (one, two) in enumerate(itertools.pairwise([*classes, classes[0]])):
            for gold, said in ((one[i % len(one)], two[i % len(two)]), (two[0], one[-1])):
                if (gold, said) not in seen:
                    seen.add((gold, said))
                    yield kind, gold, said, False


def ours() -> Callable[[str, str], bool]:
    source = math_source(workers=1)
    return lambda gold, said: source.verdict(Task(id="t", prompt="p", answer=gold), said).score == 1.0


def theirs() -> Callable[[str, str], bool]:
    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    return lambda gold, said: bool(verify(parse(f"${gold}$"), parse(said)))


def measure() -> list[dict[str, Any]]:
    judges = {"ours": ours(), "math_verify": theirs()}
    return [
        {"kind": kind, "gold": gold, "said": said, "right": right}
        | {name: judge(gold, f"so it is \\boxed{{{said}}}") == right for name, judge in judges.items()}
        for kind, gold, said, right in pairs()
    ]


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By kind: right and wrong pairs, and how many of each a judge got wrong."""
    out: dict[str, dict[str, int]] = {}
    for row in rows:
        for kind in (row["kind"], "all"):
            found = out.setdefault(kind, {})
            name = "right" if row["right"] else "wrong"
            for key, one in ((name, True), (f"ours_{name}", not row["ours"]), (f"mv_{name}", not row["math_verify"])):
                found[key] = found.get(key, 0) + one
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=("ours", "both"), help="print the pairs that are judged wrongly")
    parser.add_argument("--out", type=Path, help=f"write the counts to this file ({RESULTS.name} in results/)")
    args = parser.parse_args(argv)
    rows = measure()
    for row in rows:
        if args.show and (not row["ours"] or (args.show == "both" and not row["math_verify"])):
            print(json.dumps(row, ensure_ascii=False))
    found = counts(rows)
    print("| kind | right pairs | refused | by math-verify alone | wrong pairs | paid | by math-verify alone |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, n in found.items():
        print(
            f"| {kind} | "
            + " | ".join(
                str(n.get(key, 0)) for key in ("right", "ours_right", "mv_right", "wrong", "ours_wrong", "mv_wrong")
            )
            + " |"
        )
    if args.out:
        args.out.write_text(json.dumps({"date": date.today().isoformat(), "kinds": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
