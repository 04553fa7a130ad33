"""Formulas of the policy term: credit (reward, baseline, scale, whitening) and loss (ratio, anchor, push, weight)."""

from __future__ import annotations

from posttrain.ladder.algorithm import Aggregate, Algorithm, Anchor, Ratio, Rewards, Scale, Whiten
from posttrain.ladder.pieces.piece import times

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
    """Returns the formula that makes r from R, a KL charged to whole responses included."""
    parts = ["R" if a.rewards != "none" else "0", *(s.words() for s in a.shape)]
    # A KL to go is no part of r: `credit` shows it, or with values the branch below.
    if (kl := a.kl_in_credit) is not None and a.charges_answers and not a.baseline.to_go:
        parts.append(f"r - {kl.coef:g} sum_t {kl.estimator}_t")
    elif kl is not None and a.learns_values is not None:
        parts.append(f"r at the last token, and every token pays {kl.coef:g} {kl.estimator}_t")
    return "; then r <- ".join(parts)


def credit(a: Algorithm) -> str:
    """A, whitening and a KL charged to its token included."""
    difference, divisor = a.baseline.words(), SCALE[a.scale].replace("r of the group", a.baseline.of)
    whitened = "" if a.whiten is None else f"; then A <- {WHITEN[a.whiten]}"
    # Each comparison of turns or states has a deviation of its own, so one divisor at the end would be wrong.
    if a.baseline.scaled_apart and a.scale == "group_std":
        return f"{difference}; each difference / std of what it compares{whitened}"
    kl = a.kl_in_credit
    if kl is not None and a.baseline.to_go and not a.baseline.per_token:
        # With a KL to go, the credit shows the KL that a token pays, and the scale the whole KL of an answer:
        # rewards less this KL are what the scale is computed from.
        difference = f"{difference} - {kl.coef:g} sum_(k>=t) {kl.estimator}_k"
        divisor = divisor.replace("(r of", f"(r - {kl.coef:g} sum_k {kl.estimator}_k of")
    advantage = (
        difference
        if a.scale == "one"
        else f"({difference}) / {divisor}"
        if " " in difference
        else f"{difference} / {divisor}"
    )
    if a.rewards == "each":
        advantage = f"sum over sources of w ({advantage})"
    charged = ""
    if kl is not None and a.charges_tokens:
        charged = f"; then A_t <- A - {times(kl.coef)}{kl.estimator}_t" + (f" ({kl.early_words()})" if kl.early else "")
    return advantage + whitened + charged


_NAME: dict[Anchor, str] = {"behaviour": "mu", "start": "start", "proximal": "prox"}
ANCHOR: dict[Anchor, str] = {
    "behaviour": "mu, what the sampler stored",
    "start": "start, the learner at the start of the step",
    "proximal": "prox = mu^(1-a) pi^a, a = (start - said) / (made - said) in versions of the weights",
}


def importance(ratio: Ratio, anchor: str) -> str:
    """rho of a token."""
    match ratio:
        case "one":
            return "1"
        case "token":
            return f"pi(y_t) / {anchor}(y_t)"
        case "sequence_mean":
            return f"(pi(y) / {anchor}(y))^(1/|y|)"
        case "sequence_product":
            return f"pi(y) / {anchor}(y)"
        case "sequence_token":
            return f"sg[(pi(y) / {anchor}(y))^(1/|y|)] pi(y_t) / sg[pi(y_t)]"


def push(a: Algorithm) -> str:
    """The factor of a token's policy gradient, with the ratio that it reads."""
    rho = importance(a.ratio, _NAME[a.anchor])
    return rho if a.clip is None else f"{a.clip.words()};  rho = {rho}"


AGGREGATE: dict[Aggregate, str] = {
    "token_mean": "1 / tokens of the minibatch",
    "prompt_mean": "1 / (prompts of the minibatch * tokens of the prompt's group)",
    "sequence_mean": "1 / (responses of the minibatch * |y|)",
    "sequence_sum": "1 / responses of the minibatch",
    "constant": "1 / (responses of the minibatch * max_tokens)",
}


def weight(a: Algorithm) -> str:
    """The weight of a token in the loss."""
    return AGGREGATE[a.aggregate]
