"""Tables of what `rollout.py` found. `python -m benchmarks.speed.rollout_table` prints those of the last results."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.speed.rollout_claims import rate, ratios

NAMES = {
    "ours": "posttrain",
    "generate": "generate",
    "sorted": "generate, sorted",
    "continuous": "continuous batching",
    "vllm": "vLLM",
}


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """Speeds side by side, then every claim."""
    console = console or Console(width=170)
    for p in found["pieces"].values():
        m, versions = p["machine"], ", ".join(f"{k} {v}" for k, v in p["versions"].items())
        best = max(g["wall"] for g in p["gemm_gflops"])
        console.print(
            f"{p['piece']}: {p['date']}; {m['cpu']}, {m['cores']} cores, {m['threads']} threads; sgemm {best:.0f}"
            f" GFLOP/s; {versions}",
            style="dim",
        )
    console.print(_speeds(found["pieces"]))
    console.print(_claims(found["claims"]))
    console.print(
        "faster: median over the rounds of their time over ours; CPU: the same of CPU seconds. warm-up: first 64"
        " requests. others: share of the cores that other programs took meanwhile.",
        style="dim",
    )


def _speeds(pieces: dict[str, Any]) -> Table:
    table = Table(title="Rollout", box=box.SIMPLE_HEAD)
    for name in ("piece", "side"):
        table.add_column(name)
    for name in (
        "requests",
        "rounds",
        "tokens/s",
        "posttrain is faster by",
        "from-to",
        "CPU",
        "load s",
        "warm-up s",
        "peak MiB",
        "others",
    ):
        table.add_column(name, justify="right")
    for p in pieces.values():
        for i, (side, plays) in enumerate(p["plays"].items()):
            against = "ours" in p["plays"] and side != "ours"
            faster, cpu = (ratios(p, side, key) if against else [] for key in ("seconds", "cpu_seconds"))
            table.add_row(
                "" if i else p["piece"],
                NAMES.get(side, side),
                str(p["requests"]),
                str(p["rounds"]),
                f"{rate(p, side):,.0f}",
                f"{statistics.median(faster):.2f}" if faster else "",
                f"{min(faster):.2f}-{max(faster):.2f}" if faster else "",
                f"{statistics.median(cpu):.2f}" if cpu else "",
                f"{p['warm'][side]['load_s']:.1f}",
                f"{p['warm'][side]['first_s']:.1f}",
                f"{max(x['peak_mb'] for x in plays):,.0f}",
                f"{statistics.mean(x['others'] for x in plays):.0%}",
            )
    return table


def _claims(claims: list[dict[str, Any]]) -> Table:
    table = Table(title="Targets", box=box.SIMPLE_HEAD)
    for name in ("piece", "claim"):
        table.add_column(name)
    for name in ("target", "measured"):
        table.add_column(name, justify="right")
    table.add_column("")
    for c in claims:
        table.add_row(
            c["piece"],
            c["what"],
            f"{c['sign']} {c['target']:.3g}",
            f"{c['measured']:.3g}",
            "holds" if c["holds"] else "[bold]does not hold[/bold]",
        )
    return table


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "rollout.json"
    show(json.loads(path.read_text()))
