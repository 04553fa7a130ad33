"""Settings of the stage that labels steps of the policy's answers by completing them."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.stages.stage import Stage
from posttrain.core.sampling import Sampling
from posttrain.system.errors import ConfigError, at_least


@dataclass(frozen=True, kw_only=True)
class StepLabeling(Stage):
    """A stage that labels steps of its own answers by completing them, and trains nothing (Math-Shepherd, 2312.08935).

    It samples answers, cuts them into steps, samples completions from the end of each step, and writes how many of them
    the environment judges right. A later stage of kind RewardModel learns from the rows (`labels_of`).
    """

    harmless = ("separator", "early_ends")

    separator: str = "\n"
    """Text that ends a step."""
    completions: int = 8
    """Completions from the end of each step."""
    prover: int = 1
    """The soft label is the chance that the best of so many completions is right: the value of a prover that is best of
    K of the policy (PAV, 2410.08146). 1: of a single one. At most `completions`."""
    early_ends: bool = False
    """Label each answer a second time, as one that ended after one of its earlier steps, drawn at random: the
    environment judges that. A policy that imitates whole answers never stops early, so a model of its answers alone
    does not know what that is worth, and a policy that is paid by the model finds out. Nothing more is sampled."""
    prompts: int = 32
    """Prompts asked in a step."""
    siblings: int = 4
    """Answers per prompt. Equal beginnings are completed once."""
    sampling: Sampling = Sampling()
    """How answers and completions are sampled."""
    max_failed: float = 0.5
    """Stop the run when more than this share of a step's answers could not be judged."""
    steps: int = 8
    eval: bool = False
    """Nothing is trained here, so nothing new is measured at the end."""
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, f"{self.name}.", completions=1, prover=1, prompts=1, siblings=1)
        if self.prover > self.completions:
            raise ConfigError(
                f"{self.name}.prover={self.prover}: the best of {self.prover} is told from as many completions at"
                f" least, and there are {self.completions} (completions)"
            )
        if not self.separator:
            raise ConfigError(
                f"{self.name}.separator is empty: give the text that ends a step, such as ';' or a line's end"
            )

    @property
    def contract(self) -> Sampling:
        return self.sampling
