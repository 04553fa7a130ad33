"""Tables of what `grpo_step.py` found. `python -m benchmarks.speed.grpo_table` prints those of the last results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

NAMES = {"ours": "posttrain", "unshared": "posttrain, prompts not shared", "trl": "TRL"}
RATIOS = {"ours": "ratio", "unshared": "ratio_unshared"}
"""Of TRL to each side of ours; a file of before has the first alone."""


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """Step times and ratios, time by role, and the search for TRL's setting."""
    console = console or Console(width=170)
    m = found["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    console.print(f"\n{found['date']}; {m['cpu']}, {m['cores']} cores, {m['threads']} threads; {versions}")
    console.print(
        f"1024^3 sgemm: {found['sgemm_gflops']['wall']:.0f} GFLOP/s by wall time at best, {_roofline(found):.0f} by CPU"
        " time (the roofline)"
    )
    console.print(_steps(found))
    console.print(_roles(found))
    console.print(_search(found))
    console.print(
        "roofline: FLOPs / (fastest step x sgemm rate), with 2 x parameters x said tokens for decoding and 6 x"
        " parameters x (prompt + said tokens) for training, the same numerator on both sides; by CPU: with the median"
        " CPU time / threads in place of the step. others: share of the cores that other programs took meanwhile. CPU:"
        " ratio of CPU times, which neighbours hardly touch.",
        style="dim",
    )


def _roofline(found: dict[str, Any]) -> float:
    """GFLOP/s the cores give a matrix product when nobody else uses them."""
    return max(found["sgemm_gflops"].values())


def _steps(found: dict[str, Any]) -> Table:
    table = Table(title="One GRPO step", box=box.SIMPLE_HEAD)
    for name in ("size", "samples", "lengths", "side"):
        table.add_column(name)
    for name in (
        "median s",
        "min s",
        "tokens/s",
        "CPU s",
        "peak MiB",
        "roofline",
        "by CPU",
        "others",
        "TRL/side median",
        "min",
        "CPU",
        "pairs",
    ):
        table.add_column(name, justify="right")
    for c in found["contests"]:
        ideal = c["gflop"] / _roofline(found)
        for side, s in c["sides"].items():
            first = side == "ours"
            ratio = c.get(RATIOS.get(side))
            table.add_row(
                c["size"] if first else "",
                str(c["prompts"] * found["work"]["siblings"]) if first else "",
                c["regime"] if first else "",
                NAMES[side],
                f"{s['median_s']:.2f}",
                f"{s['min_s']:.2f}",
                f"{s['tokens_per_s']:,.0f}",
                f"{s['cpu_s']:.2f}",
                f"{s['peak_mb']:,.0f}",
                f"{ideal / s['min_s']:.0%}",
                f"{ideal * found['machine']['threads'] / s['cpu_s']:.0%}",
                f"{s['others']:.0%}",
                *([f"{ratio[name]:.2f}" for name in ("median", "min", "cpu")] if ratio else ("", "", "")),
                f"{min(ratio['pairs']):.2f}-{max(ratio['pairs']):.2f}" if ratio else "",
            )
    return table


def _roles(found: dict[str, Any]) -> Table:
    table = Table(title="Where the fastest step went (s)", box=box.SIMPLE_HEAD)
    for name in ("size", "lengths", "side", "by role"):
        table.add_column(name)
    for c in found["contests"]:
        for side, s in c["sides"].items():
            first = side == "ours"
            roles = "  ".join(f"{role} {seconds:.3f}" for role, seconds in s["roles_of_fastest_s"].items())
            table.add_row(c["size"] if first else "", c["regime"] if first else "", NAMES[side], roles)
    return table


def _search(found: dict[str, Any]) -> Table:
    table = Table(title="Search for TRL's fastest setting (first row of each: taken)", box=box.SIMPLE_HEAD)
    for name in ("size", "lengths", "completions", "micro-batch", "generation batch", "other"):
        table.add_column(name)
    for name in ("step s", "generation s", "others"):
        table.add_column(name, justify="right")
    for c in found["contests"]:
        for i, row in enumerate(c["search"]):
            how = row["how"]
            other = (
                "continuous batching" if how.get("continuous") else f"{how['cache']} cache" if how.get("cache") else ""
            )
            table.add_row(
                "" if i else c["size"],
                "" if i else c["regime"],
                "" if i else str(c["search_samples"]),
                str(how["micro"]),
                str(how["generation"]),
                other,
                f"{row['seconds']:.2f}",
                f"{row['roles']['generation']:.2f}",
                f"{row['others']:.0%}",
            )
    return table


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "grpo_step.json"
    show(json.loads(path.read_text()))
