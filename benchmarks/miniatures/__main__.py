"""Plays miniatures and writes benchmarks/miniatures/results/miniatures.json, docs/research/miniatures/*.svg and
docs/research/miniatures.md."""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.miniatures import __doc__ as about
from benchmarks.miniatures.draw import svg
from benchmarks.miniatures.miniature import Curve, Figures, Miniature, mean, mean_curves
from benchmarks.miniatures.page import page, section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/miniatures/results/miniatures.json"
NAMES = (
    "rare_token",
    "hard_prompts",
    "entropy",
    "clip_higher",
    "dynamic_sampling",
    "variance",
    "mismatch",
    "many_tokens",
    "staleness",
    "distillation",
    "two_rewards",
    "few_prompts",
    "hard_few",
    "hacking",
    "spurious",
    "long_horizon",
    "step_scores",
    "step_variance",
    "prover",
)


def miniature(name: str) -> Miniature:
    return import_module(f"benchmarks.miniatures.{name}").MINIATURE


NEVER = "never"
"""How the record writes an infinite figure (a target that was not reached): strict JSON has no infinity."""


def short(x: float) -> float:
    """Six digits: enough to draw, and the file stays readable."""
    return float(f"{x:.6g}")


def told(figures: Figures) -> dict[str, dict[str, float | str]]:
    """One seed's figures as strict JSON holds them. NaN is refused when the record is written."""
    return {arm: {k: NEVER if x == float("inf") else x for k, x in row.items()} for arm, row in figures.items()}


def read(figures: dict[str, dict[str, float | str]]) -> Figures:
    """The figures that were told."""
    return {arm: {k: float("inf") if x == NEVER else float(x) for k, x in row.items()} for arm, row in figures.items()}


def figures_of(stored: dict[str, Any]) -> list[Figures]:
    """Every seed's figures of a stored miniature."""
    return [read(f) for f in stored["figures"]]


def measured(m: Miniature, seeds: list[int]) -> dict[str, Any]:
    """One miniature on these seeds, as it is stored."""
    begun = time.process_time()
    played = [m.play(seed) for seed in seeds]
    seconds = time.process_time() - begun
    curves = {
        name: {"x": [short(v) for v in c.x], "y": [short(v) for v in c.y]} for name, c in mean_curves(played).items()
    }
    return {
        "seeds": seeds,
        "seconds": round(seconds, 1),
        "figures": [told(p.figures) for p in played],
        "curves": curves,
    }


def tell(m: Miniature, stored: dict[str, Any]) -> None:
    """What the terminal shows: the mean figures and the statements."""
    each = figures_of(stored)
    figures = mean(each)
    print(f"{m.name}  {stored['seconds']} s of CPU")
    for arm, row in figures.items():
        print(f"  {arm:28s} " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()))
    for s in m.judge(figures, each):
        print(f"  {'yes' if s.true else 'NO '} {s.text}", flush=True)


def write(everything: dict[str, dict[str, Any]]) -> None:
    """The record, one picture each, and the page."""
    RESULTS.write_text(
        json.dumps(
            {"python": platform.python_version(), "torch": torch.__version__, "miniatures": everything},
            indent=1,
            allow_nan=False,
        )
        + "\n"
    )
    (ROOT / "docs/research/miniatures").mkdir(exist_ok=True)
    sections: dict[str, str] = {}
    overview: list[tuple[Miniature, str]] = []
    for name in (n for n in NAMES if n in everything):
        m, stored = miniature(name), everything[name]
        each = figures_of(stored)
        figures = mean(each)
        curves = {k: Curve(c["x"], c["y"]) for k, c in stored["curves"].items()}
        (ROOT / f"docs/research/miniatures/{name}.svg").write_text(svg(curves, m.picture), encoding="utf-8")
        sections[name] = section(m, figures, m.judge(figures, each), stored["seeds"], stored["seconds"])
        overview.append((m, re.sub(r"[^a-z0-9 -]", "", m.picture.title.lower()).replace(" ", "-")))
    (ROOT / "docs/research/miniatures.md").write_text(page(sections, overview), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", help=f"'all', 'page' (write the page again from the record), or comma-separated: {', '.join(NAMES)}"
    )
    parser.add_argument("--seeds", help="comma-separated; default: those fixed for each miniature")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = {"all": list(NAMES), "page": []}.get(args.names, args.names.split(","))
    everything = json.loads(RESULTS.read_text())["miniatures"] if RESULTS.exists() else {}
    for name in names:
        m = miniature(name)
        everything[name] = measured(m, [int(s) for s in args.seeds.split(",")] if args.seeds else list(m.seeds))
        tell(m, everything[name])
    print(f"{sum(everything[name]['seconds'] for name in names):.0f} s of CPU in all")
    if not args.dry:
        write(everything)


if __name__ == "__main__":
    main()
