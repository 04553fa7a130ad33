"""Settings of the stages that learn from preferences between completions: given ones, or of what the policy says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.config.stages.stage import LearnsRows, Optimizer, Stage
from posttrain.core.sampling import Sampling
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import DPO, OAIF
from posttrain.system.errors import ConfigError, at_least

if TYPE_CHECKING:
    from posttrain.core.judgements import Kind


@dataclass(frozen=True, kw_only=True)
class Preference(LearnsRows):
    """A stage that learns from judged completions: pairs, or single ones with a label. It samples nothing."""

    models = ("reference",)
    harmless = ("too_long", "ahead")

    algorithm: PreferenceAlgorithm = DPO
    optimizer: Optimizer = Optimizer(lr=5e-5)
    batch: int = 32
    """Judgements per optimizer step. A pair is one judgement, and so is a labelled completion."""
    reference: str | None = None
    """Model that the algorithm compares with: a model directory with the policy's tokenizer. None: the policy at the
    beginning of the stage."""
    ahead: bool | None = None
    """Compute the reference's log-probs of all completions before the first step and keep them in the run folder, so
    that no second model is held in memory. None: where the data is finite and the model has no adapter, which is its
    own reference when it is switched off."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """Judgements with a completion that does not fit into the context after its prompt. refuse: the run does not start.
    skip: leave the whole judgement out, and say how many. No completion is ever cut, because cutting one side alone
    would change what was judged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.online:
            raise ConfigError(
                f"{self.name}.algorithm={self.algorithm.name} draws its own pairs, and this stage learns from given"
                " ones. Use a stage of kind OnlinePreference, or draw=none, or an algorithm such as dpo"
            )
        if self.reference is not None and not self.algorithm.reads_reference:
            raise ConfigError(
                f"{self.name}.reference={self.reference}: {self.algorithm.name} reads no reference. Set reference=none"
            )
        if self.ahead is not None and not self.algorithm.reads_reference:
            raise ConfigError(f"{self.name}.ahead: {self.algorithm.name} reads no reference; leave it out")

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @property
    def judged(self) -> Kind:
        return self.algorithm.kind

    @property
    def leaves_out_long(self) -> bool:
        return self.too_long == "skip"


@dataclass(frozen=True, kw_only=True)
class OnlinePreference(Stage):
    """A stage that learns from preferences between its own samples: the environment, or a reward model, judges them.

    With an algorithm that plays against an opponent (xpo, nash_md) one of two samples is the opponent's, and with rso
    all are the reference's.
    """

    models = ("reference",)

    algorithm: PreferenceAlgorithm = OAIF
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer(lr=5e-5)
    prompts: int = 32
    """Prompts per step. Each gives one pair (rso: `draw.keep` / 2), or none where its completions are judged alike."""
    reference: str | None = None
    """Model that the algorithm compares with, and that an opponent is made of: a model directory with the policy's
    tokenizer. None: the policy at the beginning of the stage."""
    max_failed: float = 0.5
    """Stop the run when more than this share of a step's samples could not be judged."""
    eval_every: int = 20
    checkpoint_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        a = self.algorithm
        at_least(self, f"{self.name}.", prompts=1)
        if not a.online:
            raise ConfigError(
                f"{self.name}.algorithm={a.name} learns from given judgements, and this stage samples its own. Set"
                " draw=twosamples, draw=bestworst or draw=rejectionsampled, or use a stage of kind Preference"
            )
        if self.share is not None and self.sampling.repetition_penalty != 1:
            raise ConfigError(
                f"{self.name}.sampling.repetition_penalty={self.sampling.repetition_penalty}: {a.name} plays against a"
                " mixture of two models, and a penalty that depends on a logit's sign has none. Set it to 1"
            )
        if a.weights is not None or a.reads_mismatched:
            raise ConfigError(
                f"{self.name}.algorithm={a.name}: weights=wpo and shift=mismatched are for given judgements; leave them"
                " out"
            )
        if self.reference is not None and not a.reads_reference:
            raise ConfigError(
                f"{self.name}.reference={self.reference}: {a.name} reads no reference. Set reference=none"
            )
        self.sampling.for_training()

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @property
    def contract(self) -> Sampling:
        return self.sampling

    @property
    def samples(self) -> int:
        """Completions drawn for each prompt."""
        return 0 if self.algorithm.draw is None else self.algorithm.draw.samples()

    @property
    def share(self) -> float | None:
        """The reference's share in what the opponent says; None without one."""
        return None if self.algorithm.draw is None else self.algorithm.draw.opponent()

    @property
    def opposed(self) -> range:
        """The completions of a prompt that the opponent says: the second, or with draw=rejectionsampled all."""
        return range(0) if self.algorithm.draw is None else self.algorithm.draw.opposed()

    @property
    def pairs(self) -> int:
        """The most pairs of a step."""
        return 0 if self.algorithm.draw is None else self.prompts * self.algorithm.draw.pairs()
