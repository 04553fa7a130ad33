"""A curve in plain characters, for a terminal of 80 columns and for a log file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.measure.number_text import number_text
from posttrain.diagnose.run_outcome import Curve, StageOutcome

WIDTH, HEIGHT = 60, 9
"""Columns and rows of the field in which curves are drawn, without its labels."""
LARGEST = 1e15
"""Values beyond it are not drawn."""


@dataclass(frozen=True)
class CurveLine:
    """One line of the picture."""

    name: str
    mark: str
    points: Curve
    averaged: bool = False
    """Whether points that share a column are drawn as their mean. Else each is drawn at its own height."""


def curve_lines(s: StageOutcome) -> list[CurveLine]:
    """Returns the curves that are drawn of a stage: its reward (or its loss) at each step, and its held-out score."""
    lines: list[CurveLine] = []
    if s.rewards:
        lines.append(CurveLine("reward in training", ".", s.rewards, averaged=True))
        if s.graded and s.heldout_reward:
            return [*lines, CurveLine("held-out reward", "o", s.heldout_reward)]
    elif s.losses:
        lines.append(CurveLine("loss", ".", s.losses, averaged=True))
        heldout = {"held-out loss": s.heldout_losses, "held-out pairs ordered as judged": s.agreements}
        return [*lines, *(CurveLine(name, "X", curve) for name, curve in heldout.items() if curve)]
    if s.heldout:
        lines.append(CurveLine("held-out accuracy", "X", s.heldout))
    return lines


def picture(lines: Sequence[CurveLine], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """The curves as lines of text, the legend last; no line where there are fewer than two steps to draw."""
    values = [y for line in lines for x, y in line.points if _drawn(x, y)]
    last = max((x for line in lines for x, _ in line.points), default=0)
    if not values or last < 2:
        return []
    low, high = _ends(min(values), max(values))
    field = [[" "] * width for _ in range(height)]
    for line in lines:
        for column, y in _columns(line, last, width):
            row = round((high - y) / (high - low) * (height - 1))
            field[row][column] = line.mark
    ticks = {0: high, (height - 1) // 2: (high + low) / 2, height - 1: low}
    texts = {i: _number(tick, high - low) for i, tick in ticks.items()}
    label = max(map(len, texts.values()))
    rows = [f"{texts.get(i, ''):>{label}} |{''.join(row)}".rstrip() for i, row in enumerate(field)]
    # The labels 0, half and last below the field: half is centred on its middle, behind the one column of the 0.
    middle = str(round(last / 2))
    axis = "0" + middle.rjust(width // 2 + len(middle) // 2 - 1)
    axis += str(last).rjust(width - len(axis))
    legend = "   ".join(f"{line.mark} {line.name}" for line in lines)
    pad = " " * (label + 2)
    return [*rows, f"{' ' * label} +{'-' * width}", pad + axis, f"{pad}{legend}   (by step)"]


def _drawn(x: int, y: float) -> bool:
    """True where a point can be drawn. A record that is damaged or somebody else's may hold any number."""
    return x >= 0 and abs(y) <= LARGEST


def _columns(line: CurveLine, last: int, width: int) -> list[tuple[int, float]]:
    """(column, value) of each mark of a line."""
    placed = [(round(x / last * (width - 1)), y) for x, y in line.points if _drawn(x, y)]
    if not line.averaged:
        return placed
    columns: dict[int, list[float]] = {}
    for column, y in placed:
        columns.setdefault(column, []).append(y)
    return [(column, float(np.mean(ys))) for column, ys in columns.items()]


def _ends(low: float, high: float) -> tuple[float, float]:
    """The two ends of the scale, for values from `low` to `high`.

    It is [0, 1] if the values lie in it and use more than a fifth of it, or are all equal. Otherwise it begins at 0 if
    the values are near it, or else at the lowest value. Equal values outside of [0, 1] get space on both sides.
    """
    # Shares get the same scale in every run, so that two runs can be compared by eye. A nearly flat curve does not.
    if low >= 0 and high <= 1 and (high - low > 0.2 or high == low):
        return 0.0, 1.0
    if low >= 0 and low < (high - low):
        low = 0.0
    # A flat curve has no height of its own, so space is added on both sides.
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = max(0.5, abs(high) / 2)
        return low - pad, high + pad
    return low, high


def _number(x: float, span: float) -> str:
    """A label of the axis, exact enough to differ from the others."""
    usual = f"{x:.2f}" if abs(x) < 100 else f"{x:.3g}"
    # Close labels need more digits, or two of them would read alike.
    return number_text(x, "z.2f", span / 4) if span < 0.02 * max(1.0, abs(x)) else usual
