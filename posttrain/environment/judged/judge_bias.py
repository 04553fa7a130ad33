"""Measures how verdicts and preferences depend on what should not matter: the order of two sides, their length, or one
other surface feature such as the presence of a word.

A reward model that learns such a feature looks good on held-out pairs and says nothing about the question. So its
accuracy must be compared with the best of these baselines, and judgements that one of them explains teach little else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.judgements import Pair
from posttrain.core.measure.interval import Score
from posttrain.core.types import Group
from posttrain.environment.judged.judge_rules import Scores, chosen


def biases(groups: Sequence[Group], read: Callable[[str], Scores | None]) -> Gauges:
    """Over held-out pairs, each in both orders: how often a verdict names the first side (half is fair), how much more
    often it names the longer one than that is the better one, how often it can be read, and how often both orders of
    a pair are judged right (sample i of one order with sample i of the other).
    """
    first, longer, unread = list[float](), list[float](), list[float]()
    orders: dict[str, list[list[bool]]] = defaultdict(list)
    for group in groups:
        info = group.task.info
        lengths, best = [len(t) for t in info["completions"]], int(info["best"])
        said = [chosen(read(e.text)) for e in group.episodes if not e.shown]
        orders[str(info["pair"])].append([side == best for side in said])
        for side in said:
            unread.append(float(side is None))
            if side is None:
                continue
            first.append(float(side == 0))
            if lengths[0] != lengths[1]:
                most = int(lengths[1] > lengths[0])
                # The difference, because the longer side may truly be the better one more often.
                longer.append(float(side == most) - float(best == most))
    both = [a and b for each in orders.values() if len(each) == 2 for a, b in zip(*each, strict=False)]
    gauges = {
        "eval/first_chosen": Gauge(sum(first), len(first)),
        "eval/length_bias": Gauge(sum(longer), len(longer)),
        "eval/both_orders": Gauge(float(sum(both)), len(both)),
        "eval/unread": Gauge(sum(unread), len(unread)),
    }
    return {name: gauge for name, gauge in gauges.items() if gauge.count}


COUNTED = 9
"""Counts are told apart up to this number."""
FREQUENT = 64
"""The number of words and characters, the most frequent ones, that are looked at one by one."""


@dataclass(frozen=True)
class SurfaceFeature:
    """One feature, and its accuracy on held-out pairs."""

    feature: str
    accuracy: Score
    """Share of pairs in which the chosen side has the value that won more often among other pairs; 1/2 for a tie."""


def surface_features(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each surface feature of a text. A feature that is not named for a text has the value ``.

    >>> dict(surface_features("hi 7"))["length"], dict(surface_features("hi 7"))["count of 'hi'"]
    ('4', '1')
    """
    words = re.findall(r"\w+", text)
    yield "length", str(len(text))
    yield "number of words", str(len(words))
    yield "number of lines", str(text.count("\n"))
    yield "number of digits", str(sum(c.isdigit() for c in text))
    yield "first character", text[:1]
    yield "last character", text[-1:]
    yield "first word", words[0] if words else ""
    yield "last word", words[-1] if words else ""
    for part in dict.fromkeys([*words, *text]):
        count = words.count(part) if len(part) > 1 else text.count(part)
        yield f"count of {part!r}", str(min(count, COUNTED))
        yield f"presence of {part!r}", "1"


def surface_baselines(known: Sequence[Pair], held: Sequence[Pair]) -> list[SurfaceFeature]:
    """Each feature as a baseline, the best on `known` first.

    A value of a feature is worth the share of comparisons that it won in `known`. The side of a held-out pair with the
    better value is then said to be the chosen one. So a baseline can learn that a middle length is best, too.
    """
    # Each value begins with one win in two comparisons, so a value that was never met is worth 1/2, and one
    # that was met once is no certainty.
    wins: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [1.0, 2.0]))
    seen: dict[str, int] = defaultdict(int)
    sides = [_sides(p) for p in known]
    for a, b in sides:
        for name in {*a, *b}:
            seen[name] += 1
    always = dict(surface_features(""))
    # Counts and presences have a name for each word, so without a bound a large data set would have as many
    # features as words. Both features of a word count, hence the factor 2.
    frequent = sorted((n for n in seen if n not in always), key=lambda n: (-seen[n], n))[: 2 * FREQUENT]
    names = [*always, *frequent]
    for a, b in sides:
        for name in names:
            va, vb = a.get(name, ""), b.get(name, "")
            if va != vb:
                for value, won in ((va, 1.0), (vb, 0.0)):
                    tally = wins[name][value]
                    tally[0] += won
                    tally[1] += 1.0
    tested = [_sides(p) for p in held]
    fit = {n: _right(wins[n], n, sides) for n in names}
    # Ordered by what they tell of the known pairs. Chosen by the held-out pairs, the best of hundreds would
    # look good by chance.
    order = sorted(names, key=lambda n: -sum(fit[n]))
    return [SurfaceFeature(n, Score.of(_right(wins[n], n, tested))) for n in order]


def _sides(pair: Pair) -> tuple[dict[str, str], dict[str, str]]:
    return dict(surface_features(pair.chosen)), dict(surface_features(pair.rejected))


def _right(
    tally: dict[str, list[float]], name: str, sides: Sequence[tuple[dict[str, str], dict[str, str]]]
) -> list[float]:
    """For each pair 1 if the baseline prefers the chosen side, 0 if the other, 1/2 if it cannot tell."""

    def worth(side: dict[str, str]) -> float:
        won, met = tally.get(side.get(name, ""), (1.0, 2.0))
        return won / met

    return [1.0 if worth(a) > worth(b) else 0.0 if worth(a) < worth(b) else 0.5 for a, b in sides]
