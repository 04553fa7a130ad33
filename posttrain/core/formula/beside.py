"""Formulas of what stands beside the policy term, and of what is asked."""

from __future__ import annotations

from posttrain.core.formula.words import times
from posttrain.core.pieces.baseline import Value
from posttrain.core.pieces.token import (
    ClipCov,
    Curriculum,
    Distill,
    EntropyBonus,
    Imitate,
    KlCov,
    NoEasy,
    Priority,
    SecondMoment,
    Shown,
    Tokens,
    TopEntropy,
)


def chosen(t: Tokens) -> str:
    match t:
        case ClipCov():
            return f"{t.share:g} of the tokens, drawn among those with {t.low:g} < cov < {t.high:g}, are silent; cov = (A - mean)(log p - mean) before the step"
        case KlCov():
            return f"the {t.share:g} of the tokens with the largest (A - mean)(log p - mean) before the step pay {times(t.coef)}|log pi - log start|"
        case TopEntropy(share=share):
            return f"only the {share:g} of the tokens with the largest entropy speak"
        case SecondMoment(limit=limit):
            return f"the largest |log start/mu| fall silent until the mean of their squares is at most {limit:g}"


def bonus(e: EntropyBonus) -> str:
    rule = (
        f"; c rises by {e.delta:g} a step below H = {e.target:g} and falls above, where it is not applied" if e.target is not None else ""
    )
    return f"-{times(e.coef)}H" + rule if e.target is None else f"-c H, c = {e.coef:g} at first{rule}"


def imitated(i: Imitate) -> str:
    whose = "solved responses" if i.of == "solved" else "shown responses"
    return f"-{i.coef:g} mean over the tokens of {whose} of " + ("sg[p (1 - p)] log pi" if i.unsure else "log pi")


def showing(s: Shown) -> str:
    gradient = (
        "no policy gradient" if s.gamma is None else f"gradient of p / (p + {s.gamma:g}), so push = {s.gamma:g} p / (p + {s.gamma:g})^2"
    )
    style = f" in style {s.style}" if s.style else ""
    return f"{s.siblings} of the siblings written by demonstration{style}; their tokens have {gradient}"


def distilled(d: Distill) -> str:
    over = f"the teacher's {d.top} most probable tokens and the rest" if d.top else "the whole vocabulary"
    return f"{times(d.coef)}JSD_{d.beta:g}(teacher || pi) over {over}"


def asked(c: Curriculum) -> str:
    match c:
        case NoEasy(rate=rate):
            return f"a task solved by {rate:g} of its siblings is not asked again"
        case Priority(floor=floor):
            return f"tasks are drawn in proportion to max(1 - pass rate, {floor:g})"


def value_loss(b: Value) -> str:
    near = "" if b.clip is None else f", V bounded to V_start +- {b.clip:g} where that costs more"
    warm = f"; the first {b.warmup} steps train V alone" if b.warmup else ""
    return f"{b.coef:g} * 1/2 (V - target)^2{near}; target = V + GAE of lambda {b.gae_lambda:g}{warm}"
