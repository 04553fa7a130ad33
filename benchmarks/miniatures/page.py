"""docs/research/miniatures.md: what was claimed, what was predicted, what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.miniatures.miniature import Figures, Miniature, Statement

HEAD = """# Published effects in miniature

For people who want to see a published effect with their own eyes. After this page you can replay each in \
seconds, and know which way it
points.

Each effect below was published for large models and is replayed here in seconds on one core. The policy is a tabular
softmax or a small network, and answers are short. It is driven through the library's own `credit_step`, `weigh`,
`choose` and `objective`: the thing under test is the algorithm that `posttrain run` uses and not a copy of it.

The sign was predicted before anything was measured; it is the survey's. Worlds, step sizes and the margins of what is
asserted were settled afterwards. Where a first world did not show the effect, the section says which and what it gave.
So these are demonstrations that can be rerun, not blind tests. A miniature shows that a mechanism exists and which way
it points; it says nothing about its size in a large model.

Written by `python -m benchmarks.miniatures all`; `make prove` repeats every one on its seeds and asserts the statements
under "asserted". For some effects a second world was made, because the first did not show them. What was written down
before those runs is in [miniatures-registered.md](miniatures-registered.md). Length bias (F.3.1) and the KL table
(A34) are in `tests/laws/`.
"""


def number(x: float, digits: int) -> str:
    """Short and honest: `never` for a target that was not reached in every seed."""
    if math.isinf(x):
        return "never"
    if abs(x) > 1e-9 and (abs(x) < 10**-digits or abs(x) >= 1e5):
        return f"{x:.2e}"
    return f"{x:.0f}" if abs(x) >= 1000 or (float(x).is_integer() and abs(x) >= 10) else f"{x:.{digits}f}"


def table(figures: Figures, digits: int) -> list[str]:
    """One row an arm, one column a figure."""
    columns = list(dict.fromkeys(name for row in figures.values() for name in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    return lines + [
        f"| {arm} | " + " | ".join(number(row[c], digits) if c in row else "" for c in columns) + " |"
        for arm, row in figures.items()
    ]


def named(seeds: Sequence[int]) -> str:
    """`0, 1, 2`, or `0 to 7`."""
    run = len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if run else ", ".join(str(s) for s in seeds)


def section(
    m: Miniature, figures: Figures, statements: Sequence[Statement], seeds: Sequence[int], seconds: float
) -> str:
    told = named(seeds)
    lines = [
        f"## {m.picture.title}",
        "",
        f"`python -m benchmarks.miniatures {m.name}` ({m.item}; {seconds:.0f} s for seeds {told})",
        "",
        f"**Claim.** {m.claim} Source: {m.source}.",
        "",
        f"**Set-up.** {m.setup}",
        "",
        f"**Predicted.** {m.predicted}",
        "",
        f"**Measured**, mean of seeds {told}:",
        "",
        *table(figures, m.digits),
        "",
        f"![{m.picture.title}](miniatures/{m.name}.svg)",
        "",
        f"**Verdict.** {m.verdict}",
        "",
        *(f"{note}\n" for note in m.notes),
        "Asserted:",
        "",
        *(f"- {s.text}" + ("" if s.true else " (**not so in this run**)") for s in statements),
        "",
    ]
    return "\n".join(lines)


def page(sections: Mapping[str, str], overview: Sequence[tuple[Miniature, str]]) -> str:
    """The whole page: an overview with one line each, then the sections."""
    rows = ["| effect | item | verdict |", "|---|---|---|"]
    rows += [
        f"| [{m.picture.title}](#{anchor}) | {m.item} | {m.verdict.split('. ')[0].rstrip('.')} |"
        for m, anchor in overview
    ]
    return HEAD + "\n" + "\n".join(rows) + "\n\n" + "\n".join(sections.values())
