"""Formulas of the loss of the policy term: ratio, anchor, push, weight."""

from __future__ import annotations

from posttrain.ladder.algorithm import Aggregate, Algorithm, Anchor, Ratio

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
    """The push with its ratio written out."""
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
    return AGGREGATE[a.aggregate]
