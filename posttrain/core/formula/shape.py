"""Formulas of the shaping of rewards."""

from __future__ import annotations

from posttrain.core.pieces.shape import (
    BestOf,
    Cosine,
    DropTruncated,
    Gate,
    Overlong,
    RankLength,
    RateLength,
    RelativeLength,
    Repetition,
    Shaping,
    Signed,
    TargetLength,
)


def shaping(s: Shaping) -> str:
    """What r becomes."""
    match s:
        case Signed():
            return "2 r - 1"
        case Overlong(cache=c):
            return f"r + clip(({1 - c:g} L - |y|) / ({c:g} L), -1, 0), L = max_tokens"
        case DropTruncated():
            return "r; a response cut off at its length carries no gradient"
        case BestOf(k=k, gain=gain):
            best = "best r - best r without this one" if gain else "best r"
            return f"{k} mean({best}) over the subsets of {k} siblings that hold this one"
        case RankLength(coef=c):
            return f"r + {c:g} b, b = 1/2 - (|y| - shortest) / (longest - shortest), at most 0 where not solved"
        case TargetLength(target=t, alpha=a, form=form):
            return f"r - {a:g} | {t} - |y| |" if form == "exact" else f"r clip({a:g} ({t} - |y|) + 1/2, 0, 1)"
        case RateLength(beta=b):
            return f"r - {b:g} max(share of the group solved, 1/G) |y|"
        case Cosine():
            return (
                f"half a cosine of |y| / max_tokens: {s.solved_short:g} to {s.solved_long:g} solved, {s.wrong_short:g} to {s.wrong_long:g} "
                f"not, {s.exceeded:g} cut off"
            )
        case Repetition(n=n, penalty=p):
            return f"r - {p:g} (1 - distinct {n}-grams / {n}-grams)"
        case Gate(source=source, otherwise=o):
            return f"r where source {source} gave 1, else {o:g}"
        case RelativeLength(coef=c):
            return f"reference_length / |y| - 1 + {c:g} (r - reference_accuracy)"
