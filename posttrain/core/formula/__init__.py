"""Every formula of the family, once: what each choice means, and what an algorithm's choices add up to. One line each.

    R     raw outcome of a response y           r    reward after shaping        |y|  its spoken tokens
    pi    the policy being differentiated       mu   what the sampler stored     start  the learner at the start of the step
    ref   the reference (or teacher)            rho  pi / anchor                 sg[x]  x, not differentiated

The ladder's pages and the terminal print from here. A piece without a formula is a type error, not a gap in a page.
"""

from __future__ import annotations

from typing import Any

from posttrain.core.algorithm import Algorithm
from posttrain.core.formula.beside import asked, bonus, chosen, distilled, imitated, showing, value_loss
from posttrain.core.formula.credit import REWARDS, SCALE, WHITEN, baseline, credit, reward
from posttrain.core.formula.push import AGGREGATE, ANCHOR, corrected, importance, pulled, push, trust, weight
from posttrain.core.formula.shape import shaping
from posttrain.core.formula.words import compact, credit_words, patches, source, word, year
from posttrain.core.pieces.baseline import Greedy, ToGo

__all__ = ["FORM", "compact", "credit_words", "formula", "formulas", "patches", "source", "word", "year"]

FORM = """\
A    = (r - baseline) / scale                     credit
push = trust_region(rho, A), rho = pi / anchor    how loudly a token may speak; not differentiated
loss = sum over tokens of weight * ( -sg[c * push] * A * log pi + pull )"""


def formula(choice: str, value: Any) -> str:
    """One line for `value` of the field `choice` of an algorithm."""
    match choice:
        case "baseline":
            charged = "; a token answers only for the KL paid from it on" if isinstance(value, ToGo | Greedy) else ""
            return f"A = {baseline(value)}{charged}"
        case "scale":
            return f"A / {SCALE[value]}" + (" (ddof 1, no epsilon)" if value in ("group_std", "batch_std") else "")
        case "rewards":
            return REWARDS[value]
        case "whiten":
            return "A stays as it is" if value is None else f"A <- {WHITEN[value]}"
        case "ratio":
            return f"rho = {importance(value, 'anchor')}"
        case "anchor":
            return f"anchor = {ANCHOR[value]}"
        case "clip":
            return f"push = {trust(value)}"
        case "aggregate":
            return f"weight = {AGGREGATE[value]}"
        case "pull":
            return f"pull = {pulled(value)}"
        case "correction":
            return "c = " + (" * ".join(corrected(c) for c in value) or "1")
        case "filter":
            return "every group is learned from" if value is None else "only groups whose R differ; asks again until the step is full"
        case "curriculum":
            return "every task in turn" if value is None else asked(value)
        case "shape":
            return "r = " + ("; then r <- ".join(["R", *(shaping(s) for s in value)]))
        case "tokens":
            return "every token speaks" if value is None else chosen(value)
        case "entropy":
            return "no entropy term" if value is None else bonus(value)
        case "imitate":
            return "no imitation" if value is None else imitated(value)
        case "shown":
            return "every sibling is the policy's" if value is None else showing(value)
        case "distill":
            return "no distillation" if value is None else distilled(value)
        case _:
            raise KeyError(choice)


def formulas(a: Algorithm) -> list[tuple[str, str]]:
    """What an algorithm's choices add up to: (name, line), only those that say something."""
    rows = [("r", reward(a)), ("A", credit(a)), ("push", push(a))]
    if a.correction:
        rows.append(("c", " * ".join(corrected(c) for c in a.correction)))
    rows.append(("weight", weight(a)))
    if a.pull is not None:
        rows.append(("pull", pulled(a.pull)))
    further = (
        ("tokens", a.tokens and chosen(a.tokens)),
        ("values", a.learns_values and value_loss(a.learns_values)),
        ("entropy", a.entropy and bonus(a.entropy)),
        ("imitate", a.imitate and imitated(a.imitate)),
        ("distill", a.distill and distilled(a.distill)),
        ("shown", a.shown and showing(a.shown)),
        ("filter", a.filter and formula("filter", a.filter)),
        ("tasks", a.curriculum and asked(a.curriculum)),
    )
    return rows + [(name, text) for name, text in further if text]
