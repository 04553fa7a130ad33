"""The baseline of PRIME: siblings are compared by their outcomes and by implicit process rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.piece import not_negative, positive

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class ImplicitOthers(Baseline):
    """Leave-one-out of the outcome, plus the return of leave-one-out implicit process rewards (PRIME, 2502.01456).

    A second model phi begins as the policy does. In every step it learns the outcomes of the step's answers: the chance
    that an answer is right is sigmoid(beta * sum_t log phi/ref). A token's implicit process reward is its own term,
    beta * log phi/ref, by phi before it learned from this step (Algorithm 1; "single forward"). A group whose outcomes
    are all equal has credit 0, as the paper filters such prompts out. The authors' code whitens the credit too
    (whiten=token), and compares a token with all siblings where the paper leaves its own answer out.
    """

    relative = True
    per_token = True

    beta: float = 0.05
    """How large an implicit process reward is: the factor of log phi/ref. 0: only outcomes are compared, as in RLOO."""
    lr_factor: float = 2.0
    """The learning rate of phi as a multiple of the policy's (1e-6 and 5e-7 in the paper)."""

    def __post_init__(self) -> None:
        not_negative("baseline.beta", self.beta)
        positive("baseline.lr_factor", self.lr_factor, "baseline=others")

    def words(self) -> str:
        process = f"p_t = {self.beta:g} (log phi_t - log ref_t)"
        return f"r - mean(r of the other siblings) + sum_(k>=t) (p_k - mean(mean p of the other siblings)), {process}"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        # Outcome and process rewards are in different units: dividing
        # their sum by the deviation of outcomes would mix both.
        if a.scale != "one" or a.charges_answers or a.rewards != "sum":
            yield (
                "baseline=implicitothers adds rewards of tokens to outcomes, so one number for an answer cannot scale"
                " it. Set scale=one, rewards=sum, and pull=none or one in the loss"
            )

    def reads(self, a: Algorithm) -> Iterable[str]:
        return ("reference", "implicit")

    def memory(self) -> str:
        return "a second model that trains, with its optimizer"
