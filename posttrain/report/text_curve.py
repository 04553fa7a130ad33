"""A curve in plain characters, for a terminal of 80 columns and for a log file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.measure.number_text import number_text
from posttrain.diagnose.run_outcome import Curve, StageOutcome

WIDTH, HEIGHT = 60, 9
"""Columns and rows of the field, without its labels."""
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
    """Returns the curves that are drawn of a stage: its reward (or its loss) at each step, and the held-out score that
    leads."""
    out: list[CurveLine] = []
    if s.rewards:
        out.append(CurveLine("reward in training", ".", s.rewards, averaged=True))
        if s.graded and s.heldout_reward:
            return [*out, CurveLine("held-out reward", "o", s.heldout_reward)]
    elif s.losses:
        out.append(CurveLine("loss", ".", s.losses, averaged=True))
        held = {"held-out loss": s.heldout_losses, "held-out pairs ordered as judged": s.agreements}
        return [*out, *(CurveLine(name, "X", curve) for name, curve in held.items() if curve)]
    if s.heldout:
        out.append(CurveLine("held-out accuracy", "X", s.heldout))
    return out


def picture(lines: Sequence[CurveLine], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """The curves as lines of text, the legend last; no lines where there are fewer than two steps to draw."""
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
    middle = str(round(last / 2))
    axis = "0" + middle.rjust(width // 2 + len(middle) // 2 - 1)
    axis += str(last).rjust(width - len(axis))
    legend = "   ".join(f"{line.mark} {line.name}" for line in lines)
    pad = " " * (label + 2)
    return [*rows, f"{' ' * label} +{'-' * width}", pad + axis, f"{pad}{legend}   (by step)"]


def _drawn(x: int, y: float) -> bool:
    """True where a point can be drawn: a record that is damaged or somebody else's may hold any number."""
    return x >= 0 and abs(y) <= LARGEST


def _columns(line: CurveLine, last: int, width: int) -> list[tuple[int, float]]:
    """(column, value) of what is drawn of a line."""
    placed = [(round(x / last * (width - 1)), y) for x, y in line.points if _drawn(x, y)]
    if not line.averaged:
        return placed
    columns: dict[int, list[float]] = {}
    for column, y in placed:
        columns.setdefault(column, []).append(y)
    return [(column, float(np.mean(ys))) for column, ys in columns.items()]


def _ends(low: float, high: float) -> tuple[float, float]:
    """The scale: [0, 1] where the values are in it and use a good part of it, else a little wider than the values."""
    # On the scale of all shares, so that two runs compare by eye; not where that would press the curve flat.
    if low >= 0 and high <= 1 and (high - low > 0.2 or high == low):
        return 0.0, 1.0
    if low >= 0 and low < (high - low):
        low = 0.0
    # A flat curve has no scale of its own: the space on either side makes one.
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = max(0.5, abs(high) / 2)
        return low - pad, high + pad
    return low, high


def _number(x: float, span: float) -> str:
    """A label of the axis, exact enough to differ from the others."""
    usual = f"{x:.2f}" if abs(x) < 100 else f"{x:.3g}"
    # Close labels need more digits, or two of them would read alike.
    return number_text(x, "z.2f", span / 4) if span < 0.02 * max(1.0, abs(x)) else usual
