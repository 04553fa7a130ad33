"""Formulas of credit: reward, baseline, scale, whitening."""

from __future__ import annotations

from posttrain.core.algorithm import Algorithm, Rewards, Scale, Whiten
from posttrain.core.formula.shape import shaping
from posttrain.core.formula.words import times
from posttrain.core.pieces.baseline import (
    TO_GO,
    AnchorMean,
    Baseline,
    Ema,
    EnergyMean,
    Greedy,
    GroupMean,
    LengthMean,
    Others,
    SecondBest,
    SoftMean,
    StepMean,
    ToGo,
    TurnMean,
    Value,
    Zero,
)


def baseline(b: Baseline) -> str:
    """The numerator of A."""
    match b:
        case Zero():
            return "r"
        case ToGo():
            return "r"
        case Ema(decay=d):
            return f"r - b, then b <- {d:g} b + {1 - d:g} r, sample after sample"
        case GroupMean():
            return "r - mean(r of the group)"
        case Others():
            return "r - mean(r of the other siblings)"
        case LengthMean():
            return "r - sum(|y| r) / sum(|y|) over the group"
        case EnergyMean():
            return "r - sum(W_t r) / sum(W_t) over the siblings that still speak at t, W_t = sum_(j<=t) (1 - 2 pi_j + sum_v pi_v^2)"
        case SoftMean(tau=tau):
            return f"r - tau log mean(exp(r / tau)) over the group, tau = {tau:g}"
        case SecondBest():
            return "r - second best r of the group for the best sibling, 0 for the others"
        case Greedy():
            return "r - r of the greedy answer"
        case StepMean():
            return "sum over the steps that end at or after t of v - mean(v of the group's steps)"
        case TurnMean(outcome=weight):
            return (
                f"paid_k - mean(paid_k of the siblings' turn k) + {times(weight)}(R - mean(R of the group)), R without what turns were paid"
            )
        case AnchorMean(gamma=gamma, omega=omega, by=by):
            state = "after the same observation" if by == "observation" else "after the same history"
            return f"r - mean(r of the group) + {times(omega)}(g_k - mean(g of the group's turns {state})), g_k = r_k + {gamma:g} g_(k+1)"
        case Value():
            return _gae(b)


def _gae(b: Value) -> str:
    own = (
        f"max(0, 1 - 1 / ({b.length_alpha:g} |y|))"
        if b.length_alpha is not None
        else f"{b.gae_lambda if b.credit_lambda is None else b.credit_lambda:g}"
    )
    discount = "lambda" if b.gamma == 1 else f"({b.gamma:g} lambda)"
    gamma = "" if b.gamma == 1 else f"{b.gamma:g} "
    trace = f"; V-trace targets, start/mu up to {b.trace:g}" if b.trace is not None else ""
    return f"sum_k {discount}^k delta_(t+k), delta_t = r_t + {gamma}V_(t+1) - V_t, lambda = {own}{trace}"


SCALE: dict[Scale, str] = {
    "one": "1",
    "group_std": "std(r of the group)",
    "batch_std": "std(r of the step)",
    "group_mean": "mean(r of the group)",
    "best_std": "std(best r of k over all k-subsets of the group)",
    "mixed_share": "share of the step's samples whose group has spread",
}
WHITEN: dict[Whiten, str] = {
    "token": "(A - mean) / std over the step, each token counting once",
    "sample": "(A - mean) / std over the step, each response counting once",
    "source": "(A - mean) / std over the step's responses of the same task source",
}
REWARDS: dict[Rewards, str] = {
    "sum": "R = weighted sum of all reward sources",
    "each": "every reward source is compared on its own; their A are summed with the sources' weights",
    "none": "R = 0: nothing is judged, the teacher alone teaches",
}


def reward(a: Algorithm) -> str:
    """How r comes from R, a KL charged to whole responses included."""
    parts = ["R" if a.rewards != "none" else "0", *(shaping(s) for s in a.shape)]
    if a.kl_in_credit is not None and a.kl_in_credit.placement != "token" and not isinstance(a.baseline, TO_GO):
        parts.append(f"r - {a.kl_in_credit.coef:g} sum_t {a.kl_in_credit.estimator}_t")
    elif a.kl_in_credit is not None and isinstance(a.baseline, Value):
        parts.append(f"r at the last token, and every token pays {a.kl_in_credit.coef:g} {a.kl_in_credit.estimator}_t")
    return "; then r <- ".join(parts)


def credit(a: Algorithm) -> str:
    """A, whitening and a KL charged to its token included."""
    b = baseline(a.baseline)
    by = SCALE[a.scale].replace("r of the group", "v of the group's steps") if isinstance(a.baseline, StepMean) else SCALE[a.scale]
    if isinstance(a.baseline, TurnMean | AnchorMean) and a.scale == "group_std":
        return f"{b}; each difference / std of what it compares" + (f"; then A <- {WHITEN[a.whiten]}" if a.whiten is not None else "")
    if (kl := a.kl_in_credit) is not None and isinstance(a.baseline, ToGo | Greedy):
        b = f"{b} - {kl.coef:g} sum_(k>=t) {kl.estimator}_k"
        by = by.replace("(r of", f"(r - {kl.coef:g} sum_k {kl.estimator}_k of")
    whole = b if a.scale == "one" else f"({b}) / {by}" if " " in b else f"{b} / {by}"
    if a.rewards == "each":
        whole = f"sum over sources of w ({whole})"
    if a.whiten is not None:
        whole += f"; then A <- {WHITEN[a.whiten]}"
    if a.kl_in_credit is not None and a.kl_in_credit.placement == "token":
        whole += f"; then A_t <- A - {times(a.kl_in_credit.coef)}{a.kl_in_credit.estimator}_t"
    return whole
