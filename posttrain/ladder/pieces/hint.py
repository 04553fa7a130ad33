"""The hint that the teacher is shown and the policy is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.ladder.pieces.piece import Piece

if TYPE_CHECKING:
    from posttrain.ladder.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class Hint(Piece):
    """The teacher scores the same answer behind another prompt, one with a hint (SDFT 2601.19897, SDPO 2601.20802).

    The environment writes that prompt (`core.abilities.Abilities.hint`). The policy is never asked with it, and learns
    under its own prompt. An answer for which there is no hint has no gradient and is in no batch, as in SDPO.
    """

    of: Literal["sibling", "answer"] = "sibling"
    """The content of the hint. sibling: the first other answer of the group that was judged right (SDPO). answer: the
    answer of the task, or whatever solution its data has (SDFT)."""
    weights: Literal["now", "average", "start"] = "now"
    """The teacher's weights. now: those of the policy, as each step begins. average: the moving average that
    `optimizer.ema` keeps of them; SDPO's decay is 0.95. start: the stage's reference, which is the policy as the stage
    began, or another model."""

    def words(self) -> str:
        shown = "an answer of the same group that is right" if self.of == "sibling" else "the task's answer"
        whose = {"now": "the policy", "average": "a moving average of the policy", "start": "the reference"}[
            self.weights
        ]
        return f"the teacher is {whose}, shown {shown}; where there is none, a response has no gradient"

    def refuses(self, a: Algorithm) -> Iterator[str]:
        if not a.reads & {"reference", "teacher"}:
            yield "hint is for a teacher, and nothing here reads one. Set distill or pull=kl, or hint=none"
        if a.rewards != "none":
            yield (
                "an answer without a hint has no gradient, and would lose that of its reward too. Set rewards=none, or"
                " hint=none"
            )
        # A refresh replaces the reference, and the teachers `now` and `average` are not the reference.
        if self.weights != "start" and a.refresh:
            yield (
                f"hint.weights={self.weights} takes a teacher that moves by itself, so there is nothing to refresh. Set"
                " pull.refresh=0, or hint.weights=start"
            )

    def uses(self) -> str:
        return "prompts with a hint"
