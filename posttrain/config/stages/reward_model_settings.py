"""The shape of a reward model's head (where it reads the hidden states, its numbers, its score), and the settings of
the stage that trains one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from posttrain.config.stages.stage import LearnsRows, Optimizer, Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.judgements import Kind

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
        """True for a last-token head with one output, which transformers' sequence classification reads too."""
        return self == HeadShape(outputs=self.outputs) and self.width == 1


Regulariser = Literal["none", "sft", "dpo", "dpo_free"]


@dataclass(frozen=True, kw_only=True)
class RewardModel(LearnsRows):
    """A stage that trains a reward model: a score of whole completions, from how completions were judged.

    It samples nothing. Its weights are those of a reward model and no longer a policy's: no stage that imitates or
    samples starts from them, and `posttrain export` writes a model for sequence classification.
    """

    harmless = (
        *("judgement", "pool", "attributes", "gate", "margin", "pairs", "regularise", "too_long"),
        *("separator", "soft", "labels_of"),
    )
    leaves_policy: ClassVar[bool] = False

    judgement: Literal["pair", "ranking", "rating", "label", "steps"] = "pair"
    """The kind of judgement that it learns from. pair: Bradley-Terry. ranking: Plackett-Luce, one unit a prompt.
    rating: numbers for the attributes, squared error. label: good and bad completions, logistic. steps: labels of
    steps, logistic at the end of each (a process reward model)."""
    pool: Pool = "last"
    """Where its head reads. last: at the stop token, as transformers' sequence classification does. mean: the mean over
    the completion's tokens. token: every token of the completion, for labels alone (2110.14168)."""
    separator: str = "\n"
    """Text that ends a step, where it learns labels of steps: in what it learns from and in what it scores."""
    soft: bool = False
    """Learn, from labels of steps, the chance of a right answer (the rows' values), in place of whether there is
    one."""
    labels_of: str | None = None
    """The earlier stage of this run that labelled the steps. None: the data has the labels."""
    attributes: tuple[str, ...] = ()
    """Names of the ratings to learn, an output for each. None: one output."""
    gate: bool = False
    """With several attributes: the score weighs them by the prompt (2406.12845). Pairs train the weights, ratings the
    attributes: two stages, the second with optimizer.freeze=reward_head.score."""
    classes: int = 0
    """Number of classes, for one attribute with ratings 0, 1, ..., classes - 1: learn the class, and score the expected
    one. 0: learn the number."""
    margin: bool = True
    """Require that the scores of a pair differ by the margin that the data gives, where it gives one (2307.09288)."""
    centre: float = 0.0
    """Coefficient of (sum of a pair's scores)^2, which keeps scores near 0; 0.01 is usual (2312.09244)."""
    pairs: bool = False
    """Take a ranking as all of its pairs (2203.02155), in place of Plackett-Luce."""
    regularise: Regulariser = "none"
    """The task, for pairs, that the language head, which stays beside the reward head, learns meanwhile, so that the
    hidden states still say of text what they said before, and the score holds on other policies' answers (2406.10216).
    sft: the chosen completion. dpo: DPO with the model that the stage begins with as its reference, the closed form of
    a reward model against its own KL-regularised policy. dpo_free: DPO without a reference."""
    alpha: float = 0.01
    """With regularise: the loss is (1 - alpha) of the pairs' and alpha of the language head's, .01 as in the authors'
    code."""
    beta: float = 0.1
    """With regularise: what multiplies log-probs in the language head's loss, summed over a completion."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """Judgements with a completion that does not fit into the context. refuse: the run does not start. skip: leave the
    whole judgement out, and say how many."""
    batch: int = 32
    """Judgements per optimizer step."""
    optimizer: Optimizer = Optimizer(lr=1e-5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre < 0:
            raise ConfigError(f"{self.name}.centre={self.centre:g}: must be >= 0")
        if not 0 < self.alpha < 1 or not self.beta > 0:
            raise ConfigError(f"{self.name}: alpha={self.alpha:g} must be between 0 and 1, and beta={self.beta:g} > 0")
        for field, wrong, why in self._wrong():
            if wrong:
                raise ConfigError(f"{self.name}.{field}={getattr(self, field)}: {why}")
        try:
            self.shape  # noqa: B018 (its checks)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _wrong(self) -> tuple[tuple[str, bool, str], ...]:
        """(field, whether it means nothing here, why)."""
        kind, ordered = self.judgement, self.judgement in ("pair", "ranking")
        return (
            ("attributes", kind == "rating" and not self.attributes, "name the ratings to learn, such as helpfulness"),
            (
                "attributes",
                kind != "rating" and bool(self.attributes) and not self.gate,
                f"a {kind} judges one score. Set judgement=rating, or gate=true to weigh the attributes by pairs",
            ),
            ("gate", self.gate and kind == "label", "pairs and rankings train the gate, and ratings the attributes"),
            ("classes", bool(self.classes) and kind != "rating", "classes are those of a rating; set it to 0"),
            ("centre", bool(self.centre) and not ordered, "pairs and rankings leave the level open, others set it"),
            ("pairs", self.pairs and kind != "ranking", "it says how rankings are read; set it to false"),
            (
                "regularise",
                self.regularise != "none" and kind != "pair",
                "the language head learns from chosen and rejected completions. Set judgement=pair or regularise=none",
            ),
            (
                "pool",
                self.pool == "token" and kind not in ("label", "steps"),
                "a head that reads every token learns from labels",
            ),
            ("pool", self.pool != "token" and kind == "steps", "steps end inside a completion; set pool=token"),
            ("separator", not self.separator and kind == "steps", "give the text that ends a step, such as ';'"),
            ("soft", self.soft and kind != "steps", "it is about labels of steps; set it to false"),
            ("labels_of", self.labels_of is not None and kind != "steps", "labels of steps are for judgement=steps"),
            ("epochs", self.counts_passes and self.labels_of is not None, "its rows are not made yet; set steps"),
            ("too_long", self.leaves_out_long and self.labels_of is not None, "what a policy said fits; set refuse"),
        )

    @property
    def heads(self) -> tuple[str, ...]:
        return ("reward_head.",)

    @property
    def shape(self) -> HeadShape:
        """The shape of its head."""
        separator = self.separator if self.judgement == "steps" else ""
        return HeadShape(
            pool=self.pool,
            outputs=self.attributes or ("score",),
            gate=self.gate,
            classes=self.classes,
            separator=separator,
        )

    def beside(self, stages: tuple[Stage, ...]) -> str:
        first = next(s for s in stages if isinstance(s, RewardModel))
        if self.labels_of is not None and (why := self._unlabelled(stages)):
            return why
        if self.shape == first.shape:
            return ""
        return (
            f"{first.name} and {self.name} train reward heads of different shapes, and a run has one: give them the"
            " same pool, attributes, gate and classes"
        )

    def _unlabelled(self, stages: tuple[Stage, ...]) -> str:
        """Returns the reason why the stage that should have labelled steps for this one did not; '' where it did."""
        name = self.labels_of
        before = {s.name: s for s in stages[: next(i for i, s in enumerate(stages) if s.name == self.name)]}
        labeling = before.get(name or "")
        if not isinstance(labeling, StepLabeling):
            known = ", ".join(n for n, s in before.items() if isinstance(s, StepLabeling)) or "and there is none"
            return f"{self.name}.labels_of={name}: must name an earlier stage that labels steps, {known}"
        if labeling.separator == self.separator:
            return ""
        return (
            f"{self.name}.separator={self.separator!r} and {name}.separator={labeling.separator!r}: steps must end with"
            f" the same text. Set {self.name}.separator={labeling.separator}"
        )

    @property
    def judged(self) -> Kind | None:
        return self.judgement if self.labels_of is None else None

    @property
    def leaves_out_long(self) -> bool:
        return self.too_long == "skip"


def head_of(stages: tuple[Stage, ...]) -> HeadShape | None:
    """The shape of the reward head of a run with these stages; None where no stage trains one."""
    return next((s.shape for s in stages if isinstance(s, RewardModel)), None)


def trained_at(stages: tuple[Stage, ...], state: Mapping[str, Any]) -> RewardModel | None:
    """The stage whose reward model a checkpoint with this state holds; None where its weights are a policy's."""
    # Inside a stage a checkpoint has that stage's weights; between two, those of the last one with `hands_on`.
    done = int(state.get("stage", 0))
    if state.get("running") is not None and done < len(stages):
        now: Stage | None = stages[done]
    else:
        now = next((s for s in reversed(stages[:done]) if s.hands_on), None)
    return now if isinstance(now, RewardModel) else None
