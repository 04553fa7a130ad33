"""Settings that all kinds of stages share: start, environment, length, evaluation, checkpoints.

A kind of stage is a subclass with further settings, and a driver (`posttrain.stages`) that runs its steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal

from posttrain.config.env import Env
from posttrain.core.sampling import Sampling
from posttrain.system.errors import ConfigError, at_least, nearest
from posttrain.system.subclass_registry import Open

if TYPE_CHECKING:
    from posttrain.core.judgements import Kind

START = "start"
"""Value of `Stage.start` that means the model as it was loaded."""


MOMENTUM = {"muon": 0.95, "sgd": 0.9}
"""`Optimizer.momentum` where it is none, by the kinds that have one."""
OF_ADAM = ("beta1", "beta2", "eps")
"""Fields that only kinds with moments read."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The rule by which gradients change weights: the kind, the learning rate over the steps, and which parameters it
    is for.

    The global gradient norm is clipped, and weight decay is decoupled from the gradient, in every kind.
    """

    kind: Literal["adamw", "adamw8bit", "muon", "sgd"] = "adamw"
    """adamw: AdamW. adamw8bit: AdamW with moments of 8 bits (pip install 'posttrain[adamw8bit]'). muon: momentum made
    orthogonal for the matrices between embedding and head, AdamW for all else. It computes in bfloat16 and amplifies
    what is small, so splits, devices and resumed runs elsewhere give other steps; only the part of a step along its
    definition is checked. sgd: gradients with momentum."""
    lr: float = 1e-3
    """Learning rate, after the warm-up."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the root of that mean before dividing by it."""
    weight_decay: float = 0.0
    """Weights shrink by lr times this at each step."""
    clip: float = 1.0
    """A larger global gradient norm is scaled down to this. inf: never."""
    warmup: int = 10
    """Optimizer steps over which lr rises linearly from 0."""
    momentum: float | None = None
    """Decay of what muon and sgd sum up of the gradients. None: 0.95 for muon, 0.9 for sgd."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """lr after the warm-up: constant, or a fall to lr * floor at the horizon along a line or half a cosine."""
    horizon: int | None = None
    """Optimizer steps after which lr is lr * floor and stays there. It does not follow `steps`, so a run that goes on
    for longer keeps the learning rates it had. None: only with a constant schedule."""
    floor: float = 0.1
    """The share of lr at the horizon and after it."""
    rates: tuple[tuple[str, float], ...] = ()
    """Factors of lr by names of parameters, such as value_head:10,embed_tokens:0.1. A pattern is one or more whole
    words of a name, with * and ? (`layers.0`, `mlp.gate`); the first that fits counts."""
    freeze: tuple[str, ...] = ()
    """Patterns, as in `rates`, of parameters that stay as they are."""
    ema: float | None = None
    """Also keep a moving average of the weights with this decay, from the stage's first weights on. It is in the
    checkpoints inside the stage and in the last one of the run, for eval --ema and export --ema. The policy and what it
    samples are the weights themselves. None: none."""
    skips: int = 0
    """Optimizer steps in a row that may be left out because their gradient is not finite. Each is counted, told, and
    its batch is kept. 0: the first one stops the run."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf or not self.clip > 0 or self.warmup < 0:
            raise ConfigError(f"optimizer: lr={self.lr} and clip={self.clip} must be > 0, warmup={self.warmup} >= 0")
        for name, good, says in (
            ("beta1", 0 <= self.beta1 < 1, "must be in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "must be in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "must be > 0, such as 1e-8"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "must be >= 0"),
        ):
            if not good:
                raise ConfigError(f"optimizer.{name}={getattr(self, name):g}: {says}")
        if self.momentum is not None and self.kind not in MOMENTUM:
            raise ConfigError(
                f"optimizer.momentum={self.momentum:g}: {self.kind} has none; its means have beta1 and beta2"
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum:g}: must be in [0, 1)")
        # Only a value that differs from the default was given by somebody; of the default nothing can be said.
        if self.kind == "sgd" and (given := [n for n in OF_ADAM if getattr(self, n) != getattr(Optimizer, n)]):
            raise ConfigError(f"optimizer.{given[0]}={getattr(self, given[0]):g}: sgd does not read it; leave it out")
        self._check_schedule()
        if bad := [f"{p}:{x:g}" for p, x in self.rates if not p or not 0 < x < math.inf]:
            raise ConfigError(f"optimizer.rates={bad[0]}: write PATTERN:FACTOR, factor > 0; optimizer.freeze is for 0")
        if not all(self.freeze):
            raise ConfigError("optimizer.freeze: an empty pattern fits nothing; leave it out")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"optimizer.ema={self.ema:g}: a decay in (0, 1), such as 0.99, or none")
        at_least(self, "optimizer.", skips=0)

    def _check_schedule(self) -> None:
        if self.schedule == "constant" and self.horizon is not None:
            raise ConfigError(
                f"optimizer.horizon={self.horizon}: a constant learning rate has none; set optimizer.schedule=cosine"
                " (or linear) too"
            )
        if self.horizon is not None and self.horizon <= self.warmup:
            raise ConfigError(
                f"optimizer.horizon={self.horizon}: must be greater than warmup={self.warmup}, because lr falls"
                " between the two: set a smaller optimizer.warmup"
            )
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"optimizer.floor={self.floor:g}: a share in [0, 1]")

    @property
    def decay_of_momentum(self) -> float:
        """`momentum`, or the default of the kind."""
        return MOMENTUM.get(self.kind, 0.0) if self.momentum is None else self.momentum

    def share(self, step: int) -> float:
        """The share of lr that optimizer step `step` (from 1) has."""
        if self.warmup and step < self.warmup:
            return step / self.warmup
        if self.schedule == "constant" or self.horizon is None:
            return 1.0
        # The first step after the warm-up has the whole lr, and lr * floor is reached at step horizon + 1.
        gone = min(1.0, max(0.0, (step - 1 - self.warmup) / (self.horizon - self.warmup)))
        left = 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.floor + (1 - self.floor) * left

    def rate(self, name: str) -> float:
        """The factor of lr for a parameter."""
        return next((factor for pattern, factor in self.rates if fits(pattern, name)), 1.0)

    def frozen(self, name: str) -> bool:
        """Returns whether a parameter stays as it is."""
        return any(fits(pattern, name) for pattern in self.freeze)


def fits(pattern: str, name: str) -> bool:
    """Returns whether the words of a pattern fit some words of a name that lie side by side.

    >>> fits("layers.0", "model.layers.0.mlp.up_proj.weight"), fits("layers.0", "model.layers.01.weight")
    (True, False)
    """
    wanted, words = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(word, want) for word, want in zip(words[i:], wanted, strict=False))
        for i in range(len(words) - len(wanted) + 1)
    )


def check_patterns(config: Optimizer, names: Sequence[str], path: str, read: Sequence[str] | None = None) -> None:
    """Refuse a pattern that fits no parameter, and a freeze that leaves none. `path` names the optimizer in messages.

    Args:
        read: the parameters on which the stage's loss depends; None: all.

    Raises:
        ConfigError: as said.
    """
    given = [*(("rates", p) for p, _ in config.rates), *(("freeze", p) for p in config.freeze)]
    for field, pattern in given:
        if not any(fits(pattern, n) for n in names):
            words = sorted({w for n in names for w in n.split(".") if not w.isdigit()})
            raise ConfigError(
                f"{path}.{field}: {pattern!r} fits no parameter that is trained; {nearest(pattern, words)}"
            )
    read = names if read is None else read
    if read and all(config.frozen(n) for n in read):
        raise ConfigError(f"{path}.freeze={','.join(config.freeze)} fits every parameter: nothing would be trained")


@dataclass(frozen=True, kw_only=True)
class Stage(Open, begin=True):
    """One stage of a run. Its kinds are its subclasses; run.json names each by its class."""

    harmless: ClassVar[tuple[str, ...]] = ()
    """Names of the kind's own text and switch fields that reach nothing outside the run folder
    (`posttrain.record.external_access`)."""
    models: ClassVar[tuple[str, ...]] = ()
    """Names of the kind's own text fields that hold a model directory or hub id to load."""

    leaves_policy: ClassVar[bool] = True
    """Whether its weights are a policy's, from which other kinds of stage may start."""

    name: str
    """By which overrides and files address it."""
    start: str | None = None
    """The earlier stage whose weights it starts from, or `start` for the model as loaded. None: the weights of the last
    stage before it with `hands_on`, or the model as loaded."""
    env: Env | None = None
    """Its own environment or data. None: the run's."""
    optimizer: Optimizer = Optimizer()
    micro_tokens: int = 4096
    """Packed tokens per forward and backward pass. What sequences begin with alike counts once where it is computed
    once; a pass is never of more than twice as many tokens. It only splits the work and never changes the gradient."""
    steps: int = 100
    """Most steps; fewer where a time or a target ends the stage first."""
    wall_time: float | None = None
    """Stop after this many seconds (checked between steps)."""
    time_of: str | None = None
    """Name of an earlier stage: stop after the wall time that it took (checked between steps)."""
    eval: bool = True
    """Evaluate held-out accuracy at the end of the stage. A stage that learns from reward also
    evaluates before it begins."""
    eval_every: int = 0
    """Steps between held-out evaluations (0: none during the stage)."""
    patience: int = 0
    """Stop after so many held-out evaluations in a row (`eval_every`) that are not the best so far. Best is the lowest
    loss of a stage that imitates, else the highest mean reward, else the most judged pairs ordered right. 0: never."""
    checkpoint_every: int = 100
    """Steps between checkpoints (0: only at the end of the stage)."""
    hands_on: bool = True
    """Whether the run goes on with the weights of this stage. False: they are evaluated, and kept under its name for
    another stage's `start`; the run goes on with the weights from before, and exports those. Such a stage has no
    checkpoints of its own: after a kill it starts from its beginning."""

    def __post_init__(self) -> None:
        at_least(self, f"{self.name}.", steps=1, micro_tokens=1, eval_every=0, checkpoint_every=0)
        # Kinds of stage that learn from verdicts have this setting.
        if not 0 <= (share := getattr(self, "max_failed", 0)) <= 1:
            raise ConfigError(f"{self.name}.max_failed={share:g}: a share in [0, 1]")
        if self.wall_time is not None and not self.wall_time > 0:
            raise ConfigError(f"{self.name}.wall_time={self.wall_time:g}: must be > 0 seconds, or none")
        if self.wall_time is not None and self.time_of is not None:
            raise ConfigError(
                f"{self.name}: wall_time={self.wall_time:g} and time_of={self.time_of} are two times to stop after;"
                " keep one"
            )
        if self.eval_every and not self.eval:
            raise ConfigError(
                f"{self.name}: eval=false measures nothing, and eval_every={self.eval_every} asks for it; set"
                " eval_every=0"
            )
        if self.patience < 0 or (self.patience and not self.eval_every):
            raise ConfigError(
                f"{self.name}.patience={self.patience}: counts held-out evaluations, so it must be >= 0 and needs"
                f" {self.name}.eval_every, such as {max(1, self.steps // 10)}"
            )
        # With epochs the steps are known once the rows are read; whoever reads them checks the horizon then.
        if not self.counts_passes:
            self.check_horizon()

    @property
    def counts_passes(self) -> bool:
        """Whether its length is a number of passes, so that its steps are known once its rows are read."""
        return False

    def check_horizon(self) -> None:
        """ConfigError where the learning rate has no end to fall to, or reaches 0 before the last step."""
        o, all_steps = self.optimizer, self.steps * self.optimizer_steps
        if o.schedule != "constant" and o.horizon is None:
            raise ConfigError(
                f"{self.name}.optimizer.schedule={o.schedule} needs the number of optimizer steps over which lr falls;"
                f" this stage takes {all_steps}: set {self.name}.optimizer.horizon={all_steps}"
            )
        if o.horizon is not None and o.floor == 0 and all_steps > o.horizon:
            raise ConfigError(
                f"{self.name} takes {all_steps} optimizer steps, and with optimizer.floor=0 those after"
                f" optimizer.horizon={o.horizon} would change nothing: raise the horizon, or set a floor"
            )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per controller step."""
        return 1

    @property
    def contract(self) -> Sampling | None:
        """The sampling settings of the policy in this stage; None where it does not sample."""
        return None

    @property
    def heads(self) -> tuple[str, ...]:
        """The beginnings of the names of parameters that belong to a head of the learner and that this stage trains."""
        return ()

    @property
    def stores_top(self) -> int:
        """Number of the most probable tokens that are stored with each sampled token."""
        return 0

    @property
    def demonstrated(self) -> bool:
        """True where the stage reads demonstrations of the environment."""
        return False

    @property
    def hinted(self) -> bool:
        """True where the stage reads prompts with a hint, which the environment writes."""
        return False

    @property
    def algorithm_name(self) -> str:
        """Name of its algorithm; '' where it has none."""
        return ""

    @property
    def judged(self) -> Kind | None:
        """The kind of judgement that it learns from; None where it learns from something else."""
        return None

    @property
    def leaves_out_long(self) -> bool:
        """True where judgements that do not fit into the context are left out; else such data is refused."""
        return False

    def beside(self, stages: tuple[Stage, ...]) -> str:
        """Returns the reason why this stage cannot be in a run with these stages; '' where it can."""
        return ""

    def refuses(self, env: str, styles: tuple[str, ...]) -> str:
        """Returns the reason why this stage cannot use an environment of this name that writes demonstrations in these
        styles; '' where it can."""
        return ""


@dataclass(frozen=True, kw_only=True)
class LearnsRows(Stage):
    """What the kinds share that take `batch` rows of data a step. It is no kind itself."""

    batch: int = 32
    """Rows per optimizer step."""
    epochs: float | None = None
    """Passes over the training rows. Where it is set it decides `steps`. None: `steps` does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, f"{self.name}.", batch=1)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"{self.name}.epochs={self.epochs:g}: must be > 0, or none")

    @property
    def counts_passes(self) -> bool:
        return self.epochs is not None


# A base of kinds and no kind: no run may name it.
LearnsRows.withdraw()


def offered(styles: Sequence[str]) -> str:
    """The styles of demonstrations that an environment writes, for messages."""
    return ", ".join(styles) or "none: it has no demonstrations"


def refusals(stages: tuple[Stage, ...]) -> Iterator[str]:
    """Yields a message about each fault of these stages in this order. Each message says what to change."""
    names = [s.name for s in stages]
    for i, s in enumerate(stages):
        # Only stages before it can be started from or timed by, because a run plays its stages once and in order.
        before = [START, *names[:i]]
        if s.name == START:
            yield f"a stage cannot be called {START!r}, which stands for the model as loaded; give it another name"
        if s.start is not None and s.start not in before:
            yield (
                f"stage {s.name!r}: start={s.start!r} must name an earlier stage, one of {before}; set {s.name}.start,"
                f" or leave the stage out with {s.name}=none"
            )
        if s.time_of is not None and s.time_of not in before[1:]:
            earlier = f", one of {before[1:]}" if before[1:] else ", and there is none"
            yield (
                f"stage {s.name!r}: time_of={s.time_of!r} must name an earlier stage{earlier}; set"
                f" {s.name}.time_of=none, or leave the stage out with {s.name}=none"
            )
        if not s.hands_on and not s.eval and s.name not in (t.start for t in stages[i + 1 :]):
            yield (
                f"stage {s.name!r}: with hands_on=false and eval=false nothing is measured of it and no later stage"
                f" starts from it; set {s.name}.eval=true or {s.name}.hands_on=true"
            )
        begun = next((t for t in stages[:i] if t.name == starts(stages, s)), None)
        if s.leaves_policy and begun is not None and not begun.leaves_policy:
            yield (
                f"stage {s.name!r} would start from the weights of {begun.name!r}, which are a reward model's and no"
                f" policy's: set {begun.name}.hands_on=false, or {s.name}.start to a stage before it"
            )
        if why := s.beside(stages):
            yield why
    if not any(s.hands_on for s in stages):
        yield (
            "no stage hands its weights on, so the run would end with the model it began with; set"
            f" {names[-1]}.hands_on=true"
        )


def starts(stages: tuple[Stage, ...], stage: Stage) -> str:
    """Name of the kept weights that a stage starts from: an earlier stage's, or `START`."""
    return come_to(stages, stage) if stage.start is None else stage.start


def come_to(stages: tuple[Stage, ...], stage: Stage) -> str:
    """Name of the kept weights that the run has before a stage, whatever the stage's `start` is."""
    earlier = stages[: [s.name for s in stages].index(stage.name)]
    return next((s.name for s in reversed(earlier) if s.hands_on), START)
