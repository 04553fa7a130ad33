"""Pulls: differentiable regularisers beside the policy term. They have a gradient even where credit is zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.ladder.pieces.piece import Piece, not_negative, positive, times
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm

Estimator = Literal["k1", "k2", "k3", "rk3"]
Placement = Literal["reward", "loss", "both", "token"]
"""Where a KL is applied. reward: subtracted from the reward, so from the credit of the tokens that led there. loss:
differentiated at the token. both: reward and loss. token: subtracted from the credit of the token alone."""

_KL_TRUTH: dict[tuple[Estimator, Placement], str] = {
    # Credit turns a number c into the gradient c * grad log pi; the loss differentiates c itself.
    # With d = log pi - log ref the gradient of KL(pi || ref) is E_pi[d grad log pi], since E_pi[grad log pi] = 0.
    ("k1", "reward"): "exact",
    ("k1", "token"): "exact at each token; no token is charged for the KL of the tokens after it",
    # grad(d^2 / 2) = d grad log pi: what k1 gives as credit, of this token alone.
    ("k2", "loss"): "exact on policy at each token; no token is charged for the KL of the tokens after it",
    (
        # grad k3 = (1 - e^{-d}) grad log pi. Its mean is -sum_v ref_v grad log pi_v, the gradient of KL(ref || pi).
        "k3",
        "loss",
    ): "biased: on policy its gradient is that of the forward KL(ref || pi) at each token, off policy of neither",
    # k3 as credit and k3 in the loss add up to (k3 + 1 - e^{-d}) grad log pi = d grad log pi.
    ("k3", "both"): "exact on policy",
    # grad(rho k3) = rho (k3 + 1 - e^{-d}) grad log pi = rho d grad log pi, which rho weighs from the anchor to pi.
    ("rk3", "loss"): "exact at each token, also off policy; no token is charged for the KL of the tokens after it",
}
_KL_REFUSED: dict[tuple[Estimator, Placement], str] = {
    # grad d = grad log pi, of which the mean is 0.
    ("k1", "loss"): "k1 as a loss has zero expected gradient on policy: it regularises nothing",
    ("k1", "both"): "k1 as a loss has zero expected gradient on policy: beside k1/reward it only adds noise",
    ("k2", "reward"): "k2 in the reward alone misses the path term and does not estimate the KL",
    # (d^2 / 2 + d) grad log pi.
    ("k2", "both"): "its gradient is that of E[k2], which is not the KL",
    ("k3", "reward"): "k3 in the reward alone misses the path term: its gradient can point the wrong way",
    ("rk3", "reward"): "rk3 in the reward alone misses the path term, like k3",
    ("rk3", "both"): "rk3 in the loss is already exact: the reward term on top is a second, wrong one",
}
_ESTIMATOR = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) - 1 + d", "rk3": "rho (exp(-d) - 1 + d)"}
_PLACE = {
    "reward": "charged to the reward",
    "loss": "in the loss",
    "both": "charged to the reward and in the loss",
    "token": "charged to the token alone",
}


class Pull(Piece, begin=True):
    """A regulariser beside the policy term. Its mathematics is in `algorithm.loss.reference_penalty`."""

    reads_silent: ClassVar[bool] = True

    @property
    def truth(self) -> str:
        """Words that say whether its gradient is that of a KL; '' where it is not meant to be a KL."""
        return ""

    def renews(self) -> int:
        """Steps after which the reference is replaced by the current policy; 0: never."""
        return 0


@dataclass(frozen=True, kw_only=True)
class KL(Pull):
    """A KL to the reference. `truth` is whether its gradient is that of KL(pi || ref) (A34).

    d = logp - logp_ref; k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, rk3 = ratio * k3. In rk3 the ratio is that of the
    token, differentiated, whatever ratio the push uses (docs/design/algorithms-notes.md says where TRL differs).
    """

    coef: float = 0.04
    """Weight of the KL."""
    estimator: Estimator = "k3"
    """How the KL is estimated from one token: k1, k2, k3, or rk3."""
    placement: Placement = "loss"
    target: float | None = None
    """Adaptive control (A05): after each step coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * episodes / horizon.
    None: fixed."""
    horizon: float = 10_000.0
    """Episodes over which adaptive control moves the weight; see `target`."""
    early: float = 0.0
    """How much more the first tokens are charged (IW-OPD, 2606.22600): a token's charge is multiplied by
    1 + early * (1 - sum of |d| before it / sum of |d| over the response). It needs placement=token. 0: all alike."""
    refresh: int = 0
    """Steps after which the reference is replaced by the current policy (ProRL, A37). Each time the run folder keeps
    one more copy of the weights, so that any checkpoint can be resumed. 0: never."""

    def __post_init__(self) -> None:
        # `_KL_TRUTH` lists the legal pairs and what their gradient is. `_KL_REFUSED`
        # says why each other pair is wrong: many libraries accept them.
        pair = (self.estimator, self.placement)
        if pair not in _KL_TRUTH:
            why = _KL_REFUSED.get(pair, "there is no such pair")
            legal = ", ".join(f"{e}/{p}" for e, p in _KL_TRUTH)
            raise ConfigError(
                f"pull.estimator={self.estimator} with pull.placement={self.placement}: {why}. Use one of {legal}"
            )
        positive("pull.coef", self.coef, "pull=none")
        positive("pull.horizon", self.horizon)
        not_negative("pull.refresh", self.refresh)
        not_negative("pull.early", self.early)
        if self.early and self.placement != "token":
            raise ConfigError(
                f"pull.early={self.early:g} weighs the charges of single tokens, and pull.placement={self.placement}"
                " makes none. Set pull.placement=token, or pull.early=0"
            )
        if self.target is not None:
            positive("pull.target", self.target, "target=none")

    def words(self) -> str:
        adapts = f"; the coefficient follows KL = {self.target:g}" if self.target is not None else ""
        fresh = f"; ref is renewed every {self.refresh} steps" if self.refresh else ""
        early = f", times {self.early_words()}" if self.early else ""
        name, place = self.estimator, _PLACE[self.placement]
        form = f"{name} = {_ESTIMATOR[name]}, d = log pi - log ref"
        return f"{times(self.coef)}{name}, {form}; {place}{early}{adapts}{fresh}"

    def early_words(self) -> str:
        """The formula of the weight that `early` gives."""
        return f"1 + {self.early:g} (sum_(k>=t) |d_k|) / (sum_k |d_k|)"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        if self.estimator == "rk3" and a.ratio == "one":
            yield "rk3 weights k3 by the ratio, and ratio='one' has none. Set ratio=token, or use k3/both"
        # A refresh would replace the teacher by the policy, and there would be nothing left to learn from it.
        if self.refresh and (a.distill is not None or a.taught):
            yield "the teacher is the reference, and pull.refresh would replace it. Set pull.refresh=0, or distill=none"

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("reference",)

    def reads_start_early(self, a: Algorithm) -> bool:
        # Credit is computed before the loss. With another anchor its KL reads the log-probs that the sampler stored.
        return self.in_credit and a.anchor == "start"

    def renews(self) -> int:
        return self.refresh

    @property
    def truth(self) -> str:
        return _KL_TRUTH[self.estimator, self.placement]

    @property
    def in_credit(self) -> bool:
        """True where the KL is a part of the credit."""
        return self.placement != "loss"


@dataclass(frozen=True, kw_only=True)
class SequenceL2(Pull):
    """coef / 2 * (log pi(y)/anchor(y))^2 of the whole episode, the surrogate of Kimi k1.5 (A20, Eq. 3)."""

    forms_ratio = True

    coef: float = 0.1
    """Weight of the square."""

    def __post_init__(self) -> None:
        positive("pull.coef", self.coef, "pull=none")

    def words(self) -> str:
        return f"{self.coef:g} / 2 (log pi(y) / anchor(y))^2, once a response"


@dataclass(frozen=True, kw_only=True)
class TokenL2(Pull):
    """coef * (log pi/anchor)^2 of every token. It is prime-rl's kl_tau; verl's dro and ROLL's kimi15 differ by a factor
    (A18, A20)."""

    forms_ratio = True

    coef: float = 1e-3
    """Weight of the square."""

    def __post_init__(self) -> None:
        positive("pull.coef", self.coef, "pull=none")

    def words(self) -> str:
        return f"{times(self.coef)}(log pi / anchor)^2"
