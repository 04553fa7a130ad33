"""Curves of runs: `python -m scripts.site.curves [NAME ...]` makes three runs, in some minutes, and draws them into
docs/pictures. It needs posttrain and matplotlib. POSTTRAIN_PICTURES names a folder in which the runs are kept."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.gauge import Step
from posttrain.record.run_reader import steps
from scripts.site.drawings import INTO, staleness
from scripts.site.pictures import printed

RUNS = {
    "healthy": "posttrain run arithmetic rl.steps=60 rl.eval_every=10 --out healthy",
    "collapsed": "posttrain run arithmetic rl.steps=60 rl.eval_every=10 rl.optimizer.lr=0.02 --out collapsed",
    "flat": "posttrain run grpo rl.steps=60 rl.eval_every=10 --out flat",
}
"""A run that learns; the same at a rate that is forty times too high; and RL on a model that is never right."""
BLUE, GREEN, RED = "#0b57d0", "#1a7f37", "#b3261e"


def of(folder: Path) -> list[Step]:
    return [s for s in steps(folder) if s.stage == "rl"]


def curve(taken: Sequence[Step], gauge: str) -> tuple[list[int], list[float]]:
    there = [(s.index, s.gauges[gauge].mean) for s in taken if gauge in s.gauges and s.gauges[gauge].count]
    return [x for x, _ in there], [y for _, y in there]


def three(folder: Path) -> str:
    """The reward, its silent groups and the entropy of three runs, side by side: their first steps."""
    figure, axes = figured(8.6, 5.0, 3, 3)
    titles = ("flat: never right", "collapsed: the rate is too high", "healthy")
    for column, (name, title) in enumerate(zip(("flat", "collapsed", "healthy"), titles, strict=True)):
        taken, (top, middle, low) = of(folder / name)[:FIRST], [row[column] for row in axes]
        top.plot(*curve(taken, "rollout/reward"), color=BLUE)
        top.plot(*curve(taken, "eval/accuracy"), "o", color=GREEN, markersize=4, label="held-out accuracy")
        middle.plot(*curve(taken, "credit/silent"), color=RED)
        low.semilogy(*curve(taken, "rollout/entropy"), color=LIGHT)
        top.set_title(title, fontsize=10)
        low.set_xlabel("step", fontsize=9)
        low.set_ylim(0.01, 10)
        for axis in (top, middle):
            axis.set_ylim(-0.04, 1.04)
    for row, gauge in zip(axes, ("rollout/reward", "credit/silent", "rollout/entropy"), strict=True):
        row[0].set_ylabel(gauge, fontsize=8)
    axes[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    return written(figure)


FIRST = 30
"""Steps that are compared."""
LIGHT = "#8c959f"
WATCHED: tuple[tuple[str, str, tuple[float, float] | None], ...] = (
    ("rollout/reward", "rises", None),
    ("rollout/solved", "0.1 to 0.9", (0.1, 0.9)),
    ("credit/silent", "below 0.5", (0.0, 0.5)),
    ("rollout/entropy", "falls slowly", None),
    ("rollout/truncated", "below 0.1", (0.0, 0.1)),
    ("optim/grad_norm", "steady", None),
)
"""(gauge, its healthy band in words, the band)."""


def gauges(folder: Path) -> str:
    """Six gauges of a run that learns, over their healthy bands."""
    figure, axes = figured(8.6, 3.9, 2, 3)
    for axis, (gauge, words, band) in zip([*axes[0], *axes[1]], WATCHED, strict=True):
        axis.plot(*curve(of(folder / "healthy"), gauge), color=BLUE)
        if band is None:
            axis.set_ylim(bottom=0)
        else:
            axis.axhspan(*band, color=GREEN, alpha=0.12, linewidth=0)
            axis.set_ylim(-0.02, 1.02 if band[1] > 0.2 else 0.3)
        axis.set_title(f"{gauge}: {words}", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("step", fontsize=9)
    return written(figure)


def figured(wide: float, high: float, rows: int, columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "posttrain", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(wide, high), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    return figure, axes


def written(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


CURVES: dict[str, Callable[[Path], str]] = {
    "flat": three,
    "gauges": gauges,
    "waits": lambda folder: staleness(folder / "healthy").svg(),
}


def main() -> None:
    wanted = [n for n in CURVES if n in sys.argv[1:] or not sys.argv[1:]]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.environ.get("POSTTRAIN_PICTURES", made))
        for name, command in RUNS.items():
            if not (folder / name).exists():
                printed(command, folder)
        for name in wanted:
            (INTO / f"{name}.svg").write_text(CURVES[name](folder), encoding="utf-8")
            print(f"docs/pictures/{name}.svg", flush=True)


if __name__ == "__main__":
    main()
