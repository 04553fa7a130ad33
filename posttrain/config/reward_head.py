"""The shape of a reward model's head: where it reads the hidden states, its numbers, and what its score is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import ConfigError

Pool = Literal["last", "mean", "token"]
"""Where a head reads. last: at the last token of a sequence, the stop token of the completion. mean: the mean over the
completion's tokens. token: at every token of the completion."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The form of a reward model's head. Its score is one number, whatever it computes first."""

    pool: Pool = "last"
    outputs: tuple[str, ...] = ("score",)
    """Names of its numbers. The score is their mean, or with `gate` a weighted mean."""
    gate: bool = False
    """A second linear layer reads the end of the prompt and weighs the outputs for it; the weights are positive and sum
    to 1 (2406.12845)."""
    classes: int = 0
    """A rating in so many classes 0, 1, ...: one logit for each, and the score is the expected class. 0: the outputs
    are numbers."""
    separator: str = ""
    """With pool=token: its numbers are read at the end of each step, and this text ends a step. '': it scores whole
    completions."""

    def __post_init__(self) -> None:
        if not self.outputs or len(set(self.outputs)) != len(self.outputs) or not all(self.outputs):
            raise ConfigError(f"a reward head's outputs need names that differ: got {list(self.outputs)}")
        if self.gate and len(self.outputs) < 2:
            raise ConfigError("a gate weighs several outputs, and this reward head has one: name more, or leave it out")
        if self.classes and (self.classes < 2 or len(self.outputs) > 1 or self.gate):
            raise ConfigError(
                f"a reward head with classes={self.classes}: give at least 2 classes, and one output without a gate"
            )
        if self.pool == "token" and (self.gate or self.classes or len(self.outputs) > 1):
            raise ConfigError("a reward head that reads every token has one output, without gate and classes")

        if self.separator and self.pool != "token":
            raise ConfigError("a reward head that scores steps reads every token: set pool=token")

    @property
    def width(self) -> int:
        """Numbers that its linear layer computes."""
        return self.classes or len(self.outputs)

    @property
    def standard(self) -> bool:
        """True where the head is a last-token head with one output, which transformers' sequence classification reads
        too."""
        return self == HeadShape(outputs=self.outputs) and self.width == 1
