"""The formulas of algorithms: what each choice means, and what an algorithm's choices give together. One line each.

Here are the algorithms that learn from reward; `preference_formula` has the others.

    R     raw outcome of a response y           r    reward after shaping        |y|  its spoken tokens
    pi    the policy being differentiated       mu   what the sampler stored
    start the learner at the start of the step
    ref   the reference (or teacher)            rho  pi / anchor                 sg[x]  x, not differentiated
    phi   the implicit process reward model

The ladder's pages and the terminal print these. A piece has its own formula (`Piece.words`); a class without one cannot
be used.
"""

from __future__ import annotations

from typing import Any

from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.formula.override_words import compact, credit_words, patches, source, word, year
from posttrain.ladder.formula.policy_formula import (
    AGGREGATE,
    ANCHOR,
    REWARDS,
    SCALE,
    WHITEN,
    credit,
    importance,
    push,
    reward,
    weight,
)
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.piece import Piece

__all__ = ["FORM", "compact", "credit_words", "formula", "formulas", "patches", "source", "word", "year"]

FORM = """\
A    = (r - baseline) / scale                     credit
push = trust_region(rho, A), rho = pi / anchor    how loudly a token may speak; not differentiated
loss = sum over tokens of weight * ( -sg[c * push] * A * log pi + pull )"""


_NONE = {
    "whiten": "A stays as it is",
    "clip": "push = rho",
    "pull": "pull = 0",
    "filter": "every group is learned from",
    "curriculum": "every task in turn",
    "tokens": "every token speaks",
    "entropy": "no entropy term",
    "imitate": "no imitation",
    "shown": "every sibling is the policy's",
    "distill": "no distillation",
    "hint": "the teacher reads the policy's own prompt",
    "step_scale": "every step uses the whole learning rate",
}
"""The meaning of a choice that is none."""
# Words before the formula of a piece, by choice.
_LEADS = {"clip": "push = ", "pull": "pull = "}


def formula(choice: str, value: Any) -> str:
    """One line for `value` of the field `choice` of an algorithm."""
    if value is None:
        return _NONE[choice]
    match choice:
        case "baseline":
            return _baseline(value)
        case "scale":
            return f"A / {SCALE[value]}" + (" (ddof 1, no epsilon)" if value in ("group_std", "batch_std") else "")
        case "rewards":
            return REWARDS[value]
        case "whiten":
            return f"A <- {WHITEN[value]}"
        case "ratio":
            return f"rho = {importance(value, 'anchor')}"
        case "anchor":
            return f"anchor = {ANCHOR[value]}"
        case "aggregate":
            return f"weight = {AGGREGATE[value]}"
        case "correction":
            return "c = " + (" * ".join(c.words() for c in value) or "1")
        case "filter":
            return "only groups whose R differ; asks again until the step is full"
        case "shape":
            return "r = " + "; then r <- ".join(["R", *(s.words() for s in value)])
        case _:
            return _LEADS.get(choice, "") + value.words()


def _baseline(b: Baseline) -> str:
    """The line of a baseline, with the rule by which its tokens pay a KL."""
    charged = "; a token answers only for the KL paid from it on" if b.to_go and not b.per_token else ""
    return f"A = {b.words()}{charged}"


def formulas(a: Algorithm) -> list[tuple[str, str]]:
    """The formulas of an algorithm as (name, line), without lines that are empty."""
    rows = [("r", reward(a)), ("A", credit(a)), ("push", push(a))]
    if a.correction:
        rows.append(("c", " * ".join(c.words() for c in a.correction)))
    rows.append(("weight", weight(a)))
    further = (
        ("pull", a.pull),
        ("tokens", a.tokens),
        ("values", a.learns_values and a.learns_values.loss_words()),
        ("entropy", a.entropy),
        ("imitate", a.imitate),
        ("distill", a.distill),
        ("teacher", a.hint),
        ("step", a.step_scale),
        ("shown", a.shown),
        ("filter", a.filter and formula("filter", a.filter)),
        ("tasks", a.curriculum),
    )
    return rows + [
        (name, piece_or_line.words() if isinstance(piece_or_line, Piece) else piece_or_line)
        for name, piece_or_line in further
        if piece_or_line
    ]
