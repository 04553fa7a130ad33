"""Measures how a judge's verdicts depend on what should not matter: the order of the two sides, and their length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from posttrain.core.gauge import Gauge, Gauges
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
                longer.append(float(side == most) - float(best == most))
    both = [a and b for each in orders.values() if len(each) == 2 for a, b in zip(*each, strict=False)]
    gauges = {
        "eval/first_chosen": Gauge(sum(first), len(first)),
        "eval/length_bias": Gauge(sum(longer), len(longer)),
        "eval/both_orders": Gauge(float(sum(both)), len(both)),
        "eval/unread": Gauge(sum(unread), len(unread)),
    }
    return {name: gauge for name, gauge in gauges.items() if gauge.count}
