"""Formulas of the loss of the policy term: ratio, trust region, weight, correction, pull."""

from __future__ import annotations

from posttrain.core.algorithm import Aggregate, Algorithm, Anchor, Ratio
from posttrain.core.formula.words import times
from posttrain.core.pieces.correction import BinaryKL, Correction, Mask, NegativeMask, Reject, Truncate, Veto
from posttrain.core.pieces.pull import KL, Pull, SequenceL2, TokenL2
from posttrain.core.pieces.trust import Cap, Clip, Divergence, FutureKL, Geometric, Hump, Soft, Taper, TrustRegion

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


def trust(c: TrustRegion | None) -> str:
    """The push, of rho and the sign of A."""
    match c:
        case None:
            return "rho"
        case Clip(low=low, high=high, cap=cap):
            loud = "" if cap is None else f", or rho > {cap:g} with A < 0"
            return f"rho; 0 where rho > {1 + high:g} with A > 0, or rho < {1 - low:g} with A < 0{loud}"
        case Cap(low=low, high=high):
            return f"rho within [{low:g}, {high:g}]"
        case Taper(cap=cap):
            return f"min(rho, {cap:g}) where A < 0, else 1"
        case Soft(tau=up, tau_negative=down):
            return f"4 rho s (1 - s), s = sigmoid(tau (rho - 1)), tau = {up:g} where A > 0, else {down:g}"
        case Geometric(low=low, high=high):
            return f"exp(mean over y of log rho, at most {high:g} where A > 0, at least -{low:g} where A < 0); 0 for a bounded token"
        case Divergence():
            over = f"the sampler's {c.top} most probable tokens, the said one and the rest" if c.top else "the said token and the rest"
            far = "TV(mu, pi)" if c.measure == "tv" else "KL(mu || pi)"
            return f"min(rho, {c.cap:g}); 0 where D > {c.delta:g} and the push leads further away, D = {far} over {over}"
        case FutureKL():
            band = f"within [{1 - c.band_low:g}, {1 + c.band_high:g}]"
            return (
                f"f rho; 0 where rho > {1 + c.high:g} with A > 0, or rho < {1 - c.low:g} with A < 0; "
                f"f = exp(sum_(k>=t) 2^(-(k-t)/{c.half_life:g}) log rho_k) {band}, not above 1 where A < 0 and rho > {c.loud:g}"
            )
        case Hump():
            return f"rho^{c.k:g} exp({c.fade:g} (1 - rho)) where A > 0, rho^{c.k_negative:g} exp({c.fade_negative:g} (1 - rho)) where A < 0"


def push(a: Algorithm) -> str:
    """The push with its ratio written out."""
    rho = importance(a.ratio, _NAME[a.anchor])
    return rho if a.clip is None else f"{trust(a.clip)};  rho = {rho}"


AGGREGATE: dict[Aggregate, str] = {
    "token_mean": "1 / tokens of the minibatch",
    "prompt_mean": "1 / (prompts of the minibatch * tokens of the prompt's group)",
    "sequence_mean": "1 / (responses of the minibatch * |y|)",
    "sequence_sum": "1 / responses of the minibatch",
    "constant": "1 / (responses of the minibatch * max_tokens)",
}


def weight(a: Algorithm) -> str:
    return AGGREGATE[a.aggregate]


def corrected(c: Correction) -> str:
    """One factor of c."""
    match c:
        case Truncate(cap=cap, level=level):
            return ("start/mu" if cap is None else f"min(start/mu, {cap:g})") + f" per {level}"
        case Mask(low=low, high=high, level=level):
            return f"start/mu within [{low:g}, {high:g}], else 0, per {level}"
        case BinaryKL(phi=phi):
            return f"start/mu, and 0 where KL between start and mu on the said token exceeds {phi:g} in either direction"
        case Reject(low=low, high=high):
            return f"1, and 0 for responses with (start(y)/mu(y))^(1/|y|) outside [{low:g}, {high:g}]"
        case Veto(below=below):
            return f"1, and 0 for responses with a token of start/mu < {below:g}"
        case NegativeMask(delta=delta):
            return f"1, and 0 for responses with A < 0 and mean over t of log(mu/pi) > {delta:g}"


_ESTIMATOR = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d", "rk3": "rho (exp(-d) - 1 + d)"}
_PLACE = {
    "reward": "charged to the reward",
    "loss": "in the loss",
    "both": "charged to the reward and in the loss",
    "token": "charged to the token alone",
}


def pulled(p: Pull | None) -> str:
    match p:
        case None:
            return "0"
        case SequenceL2(coef=coef):
            return f"{coef:g} / 2 (log pi(y) / anchor(y))^2, once a response"
        case TokenL2(coef=coef):
            return f"{times(coef)}(log pi / anchor)^2"
        case KL():
            adapts = f"; the coefficient follows KL = {p.target:g}" if p.target is not None else ""
            fresh = f"; ref is renewed every {p.refresh} steps" if p.refresh else ""
            return f"{times(p.coef)}{p.estimator}, {p.estimator} = {_ESTIMATOR[p.estimator]}, d = log pi - log ref; {_PLACE[p.placement]}{adapts}{fresh}"
