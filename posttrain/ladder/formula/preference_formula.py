"""The formulas of preference algorithms: what each choice means, and what an algorithm's choices give together.

l   log pi - log ref of a token; log pi without a reference         h   score of a completion
u   beta h, less the shift                                          x   the margin of a pair
f   the link, `link(x)` in PREFERENCE_FORM; f(-x): with the sides of the pair exchanged. In a row f: the f-divergence
"""

from __future__ import annotations

from typing import Any

from posttrain.ladder.pieces.link import Nash, PreferencePiece
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm

PREFERENCE_FORM = """\
h    = statistic(log pi - log ref)                of a completion
x    = beta h_chosen - beta h_rejected - margin   of a pair; u = beta h alone
loss = mean over rows of coef * link(x) + what is added"""

_ROWS = {
    "pair": "a chosen and a rejected completion",
    "label": "one completion, good or bad",
    "triple": "a gold completion, a chosen and a rejected one",
}
_AGAINST = {"reference": "l = log pi - log ref", "nothing": "l = log pi"}
_SHIFT = {
    "mismatched": "u = beta (h - max(0, mean h of completions under other prompts)), not differentiated",
    "running": "u = beta h - mean of beta h over all completions seen so far",
}
_MATCH = {
    "margins": "the margins of pi, in order of size, against those of ref in order of size, over the minibatch",
    "rewards": "the h of the chosen, in order of size, against those of the rejected in order of size",
}
_NONE = {
    "noise": "labels are taken as they are",
    "margin": "margin = 0",
    "shift": "u = beta h",
    "match": "each pair has its own margin",
    "weights": "pairs weigh what their rows say",
    "draw": "from given judgements",
}
"""The meaning of a choice that is none."""


def preference_formula(choice: str, value: Any) -> str:
    """One line for `value` of the field `choice` of a preference algorithm."""
    if value is None:
        return _NONE[choice]
    match choice:
        case "rows":
            return _ROWS[value]
        case "against":
            return _AGAINST[value]
        case "statistic":
            return f"h = {value.words()}"
        case "link":
            return value.words()
        case "beta":
            return f"beta = {value:g}"
        case "noise":
            return f"f <- {value.words()}"
        case "margin":
            return f"margin = {value.words()}"
        case "shift":
            return _SHIFT[value]
        case "match":
            return _MATCH[value]
        case "weights":
            return "each pair times exp(mean of log pi - log sum pi^2) of both sides, not differentiated"
        case "coef":
            return f"coef = {value:g}"
        case "good" | "bad":
            return f"completions labelled {choice} weigh {value:g}"
        case "add":
            return " + ".join(t.words() for t in value) or "nothing is added"
        case _:
            return value.words() if isinstance(value, PreferencePiece) else str(value)


def preference_formulas(a: PreferenceAlgorithm) -> list[tuple[str, str]]:
    """The formulas of a preference algorithm as (name, line), without lines that are empty."""
    loss = a.link.words() if a.coef == 1 else f"{a.coef:g} * ({a.link.words()})"
    if isinstance(a.link, Nash):
        rows = [("l", _AGAINST[a.against]), ("loss", loss)]
    else:
        rows = [("h", f"{a.statistic.words()}, {_AGAINST[a.against]}")]
        if type(a.divergence).__name__ != "ReverseKL":
            # Here f is the divergence: h is not the statistic of the row above, but what this line makes of it.
            rows.append(("f", a.divergence.words()))
        rows.append(_link_input(a))
        rows.append(("loss", loss))
    further = (
        ("noise", a.noise and preference_formula("noise", a.noise)),
        ("match", a.match and _MATCH[a.match]),
        ("weights", a.weights and preference_formula("weights", a.weights)),
        ("labels", "" if (a.good, a.bad) == (1, 1) else f"good ones weigh {a.good:g}, bad ones {a.bad:g}"),
        ("add", " + ".join(t.words() for t in a.add)),
        ("pairs", a.draw and a.draw.words()),
    )
    return rows + [(name, line) for name, line in further if line]


def _link_input(a: PreferenceAlgorithm) -> tuple[str, str]:
    """Returns the input of the algorithm's link as (letter, formula)."""
    if a.link.of != "difference":
        # [4:]: without `u = `, with which each of these lines begins. Here the letter stands apart.
        reward = "beta h" if a.shift is None else _SHIFT[a.shift][4:]
        return ("u", f"{reward}, beta = {a.beta:g}")
    minus_margin = "" if a.margin is None else f" - {a.margin.words()}"
    return ("x", f"beta (h_chosen - h_rejected){minus_margin}, beta = {a.beta:g}")


def preference_reads(a: PreferenceAlgorithm) -> list[str]:
    """Returns the inputs of an algorithm beside the log-probs of the policy, in words."""
    words = {
        "reference": "log-probs of the reference",
        "start": "log-probs at the start of the step",
        "collision": "sum pi^2 at the start of the step",
        "margin": "a number of each row: its margin, or the judge's probability",
    }
    out = [text for name, text in words.items() if name in a.reads]
    return out + (["log-probs of completions under other prompts"] if a.reads_mismatched else [])
