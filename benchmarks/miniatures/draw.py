"""Line plots as SVG, without a plotting library: one polyline a curve, ticks, and the curve's name at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from itertools import pairwise

from benchmarks.miniatures.miniature import Curve, Picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 690, 330, 58, 200, 30, 44
COLOURS = ("#1f6fb4", "#d9572b", "#2e8b57", "#8a4fbf", "#b8860b", "#555555", "#c2185b", "#00838f")
DASHES = ("", "7 3", "2 3", "9 3 2 3")


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers from low to high: powers of ten, or about six steps of 1, 2 or 5."""
    if log:
        powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        steps = (1, 2, 5) if len(powers) <= 3 else (1,)
        return [p * s for p in powers for s in steps if low * 0.999 <= p * s <= high * 1.001]
    rough = (high - low) / 6
    base = 10 ** math.floor(math.log10(rough))
    step = next(base * k for k in (1, 2, 5, 10) if base * k >= rough * 0.999)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class _Axis:
    """Numbers to pixels."""

    def __init__(self, values: list[float], start: float, end: float, log: bool) -> None:
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        if not log:
            room = 0.04 * (self.high - self.low)
            self.high += room
            self.low -= room if self.low != 0 else 0.0
        self.log, self.start, self.end = log, start, end

    def __call__(self, value: float) -> float:
        a, b, v = (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (v - a) / (b - a) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return ticks(self.low, self.high, self.log)


def _spread(places: list[float], gap: float) -> list[float]:
    """The places moved apart until neighbours are at least `gap` away, keeping their order."""
    out = list(places)
    order = sorted(range(len(out)), key=out.__getitem__)
    for _ in range(200):
        for i, j in pairwise(order):
            short = gap - (out[j] - out[i])
            if short > 0:
                out[i] -= short / 2
                out[j] += short / 2
    return out


def svg(curves: Mapping[str, Curve], picture: Picture) -> str:
    """The picture as text. Points that are not finite, or not positive on a logarithmic axis, are left out."""
    points = {
        name: [
            (x, y)
            for x, y in zip(c.x, c.y, strict=True)
            if math.isfinite(x)
            and math.isfinite(y)
            and not (picture.log_x and x <= 0)
            and not (picture.log_y and y <= 0)
        ]
        for name, c in curves.items()
    }
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    across = _Axis([x for p in points.values() for x, _ in p], LEFT, right, picture.log_x)
    up = _Axis([y for p in points.values() for _, y in p], bottom, TOP, picture.log_y)
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" {text} font-weight="bold">{escape(picture.title)}</text>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 8}" {text} text-anchor="middle">{escape(picture.x)}</text>',
        (
            f'<text x="14" y="{(TOP + bottom) / 2:.0f}" {text} text-anchor="middle" transform="rotate(-90 14'
            f' {(TOP + bottom) / 2:.0f})">{escape(picture.y)}</text>'
        ),
    ]
    for v in across.ticks():
        out.append(f'<line x1="{across(v):.1f}" y1="{TOP}" x2="{across(v):.1f}" y2="{bottom}" stroke="#eeeeee"/>')
        out.append(f'<text x="{across(v):.1f}" y="{bottom + 15}" {text} text-anchor="middle">{v:g}</text>')
    for v in up.ticks():
        out.append(f'<line x1="{LEFT}" y1="{up(v):.1f}" x2="{right}" y2="{up(v):.1f}" stroke="#eeeeee"/>')
        out.append(f'<text x="{LEFT - 6}" y="{up(v) + 4:.1f}" {text} text-anchor="end">{v:g}</text>')
    out.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888888"/>')
    shown = [name for name, p in points.items() if p]
    labels = _spread([up(points[name][-1][1]) for name in shown], 14)
    for i, (name, y) in enumerate(zip(shown, labels, strict=True)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        path = " ".join(f"{across(x):.1f},{up(v):.1f}" for x, v in points[name])
        end = across(points[name][-1][0])
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        out.append(
            f'<text x="{max(end, right) + 6:.1f}" y="{y + 4:.1f}" font-family="sans-serif" font-size="11"'
            f' fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"
