"""Measures how verdicts and preferences depend on what should not matter: the order of two sides, their length, or one
other surface feature such as the presence of a word.

A reward model that learns such a feature looks good on held-out pairs and says nothing about the question. So its
accuracy must be compared with the best of these baselines.
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
    """The gauges of verdicts on held-out pairs, each of which is judged in both orders.

    - `first_chosen`: how often a verdict names the first side. Half is fair.
    - `length_bias`: how often a verdict names the longer side, minus how often the longer side is the better one.
    - `both_orders`: how often both orders of a pair, sample by sample, are judged right.
    - `unread`: how often a verdict cannot be read.
    """
    first, longer, unread = list[float](), list[float](), list[float]()
    orders: dict[str, list[list[bool]]] = defaultdict(list)
    for group in groups:
        info = group.task.info
        lengths, best = [len(t) for t in info["completions"]], int(info["best"])
        verdicts = [chosen(read(e.text)) for e in group.episodes if not e.shown]
        orders[str(info["pair"])].append([side == best for side in verdicts])
        for side in verdicts:
            unread.append(float(side is None))
            if side is None:
                continue
            first.append(float(side == 0))
            if lengths[0] != lengths[1]:
                longer_side = int(lengths[1] > lengths[0])
                # A difference, because the longer side may be the better one in more than half of the pairs.
                longer.append(float(side == longer_side) - float(best == longer_side))
    # Sample k of one order belongs to sample k of the other. A pair whose other order was not judged is left out.
    both_right = [a and b for each in orders.values() if len(each) == 2 for a, b in zip(*each, strict=False)]
    gauges = {
        "eval/first_chosen": Gauge(sum(first), len(first)),
        "eval/length_bias": Gauge(sum(longer), len(longer)),
        "eval/both_orders": Gauge(float(sum(both_right)), len(both_right)),
        "eval/unread": Gauge(sum(unread), len(unread)),
    }
    return {name: gauge for name, gauge in gauges.items() if gauge.count}


COUNTED = 9
"""Greater counts of a word or character count as this number."""
FREQUENT = 64
"""How many of the most frequent words and characters are features of their own."""


@dataclass(frozen=True)
class SurfaceFeature:
    """One feature, and its accuracy on held-out pairs."""

    feature: str
    accuracy: Score
    """Share of pairs in which the chosen side has the better value, by `surface_baselines`. A tie counts 1/2."""


def surface_features(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each surface feature of a text. A feature that is not listed has the empty value.

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
    """Each feature as a baseline, with its accuracy on `held`. The best on `known` comes first.

    The worth of a value is the share of comparisons that it won in `known`, and the side whose value is worth more is
    preferred. So a baseline can also learn that a middle length is best.
    """
    # Each value begins with one win in two comparisons: an unknown one is worth 1/2, and one win alone makes none 1.
    wins: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [1.0, 2.0]))
    occurrences: dict[str, int] = defaultdict(int)
    sides = [_sides(p) for p in known]
    for a, b in sides:
        for name in {*a, *b}:
            occurrences[name] += 1
    always = dict(surface_features(""))
    # Counts and presences have a name for each word, so they are bounded. A word has both features, hence the 2.
    frequent = sorted((n for n in occurrences if n not in always), key=lambda n: (-occurrences[n], n))[: 2 * FREQUENT]
    names = [*always, *frequent]
    for a, b in sides:
        for name in names:
            value_a, value_b = a.get(name, ""), b.get(name, "")
            if value_a != value_b:
                for value, won in ((value_a, 1.0), (value_b, 0.0)):
                    tally = wins[name][value]
                    tally[0] += won
                    tally[1] += 1.0
    held_sides = [_sides(p) for p in held]
    known_results = {n: _results(wins[n], n, sides) for n in names}
    # The order comes from the known pairs: the best of hundreds on the held-out pairs would look good by chance.
    order = sorted(names, key=lambda n: -sum(known_results[n]))
    return [SurfaceFeature(n, Score.of(_results(wins[n], n, held_sides))) for n in order]


def _sides(pair: Pair) -> tuple[dict[str, str], dict[str, str]]:
    """The surface features of the chosen and of the rejected side of a pair."""
    return dict(surface_features(pair.chosen)), dict(surface_features(pair.rejected))


def _results(
    tally: dict[str, list[float]], name: str, sides: Sequence[tuple[dict[str, str], dict[str, str]]]
) -> list[float]:
    """For each pair 1 if the baseline prefers the chosen side, 0 if the other, 1/2 if it cannot tell. `tally`: for each
    value of the feature `name`, the comparisons that it won and all that it was in."""

    def worth(side: dict[str, str]) -> float:
        won, met = tally.get(side.get(name, ""), (1.0, 2.0))
        return won / met

    return [1.0 if worth(a) > worth(b) else 0.0 if worth(a) < worth(b) else 0.5 for a, b in sides]
