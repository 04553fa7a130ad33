"""The settings of the stage that learns from reward, and of the buffer from which its later steps learn again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.config.stages.stage import Optimizer, Stage, offered
from posttrain.core.sampling import Sampling
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GRPO
from posttrain.system.errors import ConfigError, at_least


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Groups of earlier steps that a step learns from beside its own.

    Each keeps the log-probs and versions it was sampled with, so an algorithm that compares with the sampler sees how
    old it is.
    """

    size: int = 64
    """Groups that the buffer holds. The oldest leaves for a new one."""
    groups: int = 8
    """Groups of the buffer that a step learns from, fewer while it holds fewer. None comes twice in a step."""
    age: int = 8
    """Steps after which a group leaves the buffer."""
    ratio: float | None = None
    """A group leaves where its tokens have become so much likelier or less likely that the mean of |log(policy /
    sampler)| is above this; measured when it is drawn. None: never."""
    discount: float = 1.0
    """Factor of a group's credit for each step since it was played."""
    balanced: bool = True
    """Draw prompts first, each as often as any other, then one of their groups. False: draw groups."""

    def __post_init__(self) -> None:
        for name in ("size", "groups", "age"):
            if getattr(self, name) < 1:
                raise ConfigError(f"replay.{name}={getattr(self, name)}: must be >= 1; replay=none has no buffer")
        if self.groups > self.size:
            raise ConfigError(f"replay.groups={self.groups} of a buffer of size={self.size}: raise size")
        if self.ratio is not None and not self.ratio > 0:
            raise ConfigError(f"replay.ratio={self.ratio:g}: must be > 0, or none")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"replay.discount={self.discount:g}: a factor in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Reinforce(Stage):
    """A stage that learns from reward. Batch sizes follow from four numbers: `prompts`, `siblings`,
    `minibatches` and `epochs`."""

    models = ("reference",)

    algorithm: Algorithm = GRPO
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer(lr=3e-4)
    prompts: int = 32
    """Groups per step."""
    siblings: int = 8
    """Samples per prompt."""
    oversample: int = 0
    """Start this many more samples per prompt, and abort the rest once `siblings` have ended. It saves the time of the
    longest answers, and it prefers short answers. docs/design/engine.md shows how much."""
    minibatches: int = 1
    """Optimizer steps in one pass over the step's groups; each takes whole groups."""
    epochs: int = 1
    """Passes over the step's groups."""
    target: float | None = None
    """Stop once the mean held-out reward reaches this. It is the accuracy where outcomes are 0 or 1."""
    eval_every: int = 20
    checkpoint_every: int = 20
    refill: int = 8
    """With a filter: play at most this many times `prompts` groups a step, then go on with the groups that passed."""
    reference: str | None = None
    """Model that the algorithm's KL or distillation compares with: a model directory with the policy's tokenizer. None:
    the policy at the beginning of the stage."""
    max_failed: float = 0.5
    """Stop the run when more than this share of a step's samples could not be judged."""
    staleness: int = 0
    """By how many steps samples may be older than the weights that learn from them. 0: samples are played, then learned
    from, in turn. 1: the samples of the next step are played meanwhile. The learner waits rather than exceed it, and
    nothing that was played is thrown away for its age."""
    unfinished: Literal["go_on", "pause", "ask_again"] = "go_on"
    """With staleness: what happens to groups that have not ended when a step has its samples and new weights come.
    go_on: turns are said to their end before the learner computes, and what waits for a tool goes on as `engine.update`
    says. pause: turns stop where they are while the learner computes, and go on under the new weights. ask_again: they
    are given up and asked again under the new weights; that keeps samples fresh, costs what was sampled, and favours
    short answers."""
    replay: Replay | None = None
    """Learn again from groups of earlier steps (`rl.replay.size=64`). None: each group is learned from once."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balance loss of a mixture of experts (GShard, Switch): experts x sum of each expert's share of
    tokens times its mean probability. 0: routers learn from reward alone, because this loss moves every router at every
    step, also where nothing else is learned, and away from what the sampler was. Raise it (.001) where
    `experts/dead` grows."""
    sync_every: int | None = None
    """Optimizer steps after which the sampler gets the new weights: a multiple of minibatches x epochs. None: after
    every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, f"{self.name}.", prompts=1, siblings=1, minibatches=1, epochs=1, refill=1)
        if self.prompts % self.minibatches:
            raise ConfigError(
                f"{self.name}: prompts={self.prompts} cannot be cut into minibatches={self.minibatches} of whole"
                f" groups; use a divisor of {self.prompts}"
            )
        if self.algorithm.group_relative and self.siblings < 2:
            raise ConfigError(
                f"{self.name}.siblings={self.siblings}: {self.algorithm.name} compares siblings, so at least 2 are"
                " needed"
            )
        if self.router_aux_loss_coef < 0:
            raise ConfigError(f"{self.name}.router_aux_loss_coef={self.router_aux_loss_coef:g}: must be >= 0")
        if self.staleness < 0:
            raise ConfigError(f"{self.name}.staleness={self.staleness}: must be >= 0 (0: no sample is older)")
        if self.unfinished != "go_on" and not self.staleness:
            raise ConfigError(
                f"{self.name}.unfinished={self.unfinished}: with staleness=0 every group has ended when new weights"
                f" come. Set {self.name}.staleness, or leave it out"
            )
        self._check_sync()
        if self.oversample < 0:
            raise ConfigError(f"{self.name}.oversample={self.oversample}: must be >= 0 (0 aborts nothing)")
        if self.target is not None and self.eval_every == 0:
            raise ConfigError(f"{self.name}.target={self.target} is never checked with eval_every=0; set eval_every")
        self._check_pieces()
        self.sampling.for_training()

    def _check_sync(self) -> None:
        """Weights are pushed between steps, and where the sampler is evaluated or saved it has the newest ones."""
        if self.sync_every is None:
            return
        if self.sync_every < 1 or self.sync_every % self.optimizer_steps:
            raise ConfigError(
                f"{self.name}.sync_every={self.sync_every}: weights are pushed between steps of"
                f" {self.optimizer_steps} optimizer steps (minibatches x epochs); use a multiple of"
                f" {self.optimizer_steps}"
            )
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) % self.sync_steps:
                raise ConfigError(
                    f"{self.name}.{name}={getattr(self, name)}: the sampler gets new weights every {self.sync_steps}"
                    f" steps (sync_every={self.sync_every}); use a multiple of {self.sync_steps}"
                )

    def _check_pieces(self) -> None:
        """Checks what the algorithm needs of the stage."""
        a = self.algorithm
        # A run of somebody else may have pieces whose code is not here. It can be read and shown, but what
        # the pieces need is unknown.
        if a.absent:
            return
        if a.shown is not None and a.shown.siblings >= self.siblings:
            raise ConfigError(
                f"{self.name}: shown.siblings={a.shown.siblings} of siblings={self.siblings} leaves nothing for the"
                " policy to say; raise siblings"
            )
        if a.shown is not None and self.sampling.truncated:
            raise ConfigError(
                f"{self.name}: {a.name} learns from demonstrations, which no truncated sampler drew. Set top_p=1"
                " top_k=0 min_p=0"
            )
        if a.shown is not None and self.sampling.bans:
            raise ConfigError(
                f"{self.name}: {a.name} learns from demonstrations, and this sampling may ban what they say. Set"
                " allowed_ids=none allowed_words=none bad_ids=none bad_words=none min_tokens=0"
            )
        # Of k siblings there is one subset, and its best is the same for all. With `gain` k siblings are enough: one of
        # them alone raises the best.
        if (best := a.best_of) is not None and self.siblings < best.k + (not best.gain):
            why = "needs as many siblings" if best.gain else "is the same for all siblings, so nothing is learned"
            raise ConfigError(
                f"{self.name}.siblings={self.siblings}: the best of k={best.k} {why}. Raise it, or lower shape.bestof.k"
            )
        if self.reference is not None and not a.reads & {"reference", "teacher"}:
            raise ConfigError(
                f"{self.name}.reference={self.reference}: {a.name} reads no reference. Set reference=none, or pull or"
                " distill"
            )
        if self.reference is not None and a.own_teacher:
            raise ConfigError(
                f"{self.name}.reference={self.reference}: the teacher of {a.name} has the policy's own weights"
                " (hint.weights). Set reference=none, or hint.weights=start"
            )
        if a.hint is not None and a.hint.weights == "average" and self.optimizer.ema is None:
            raise ConfigError(
                f"{self.name}: hint.weights=average, and no moving average is kept. Set {self.name}.optimizer.ema=0.95,"
                " or hint.weights=now"
            )
        if a.hint is not None and a.hint.of == "sibling" and self.siblings < 2:
            raise ConfigError(
                f"{self.name}.siblings={self.siblings}: {a.name} shows the teacher another answer of the group, so at"
                " least 2 are needed"
            )
        if a.taught and self.reference is None:
            raise ConfigError(
                f"{self.name}: {a.name} learns from a teacher alone. Name its model directory:"
                f" {self.name}.reference=PATH"
            )
        # A step multiplies the weight by 1 - .2 * episodes / horizon where the KL is far below
        # its target. From five horizons on that is 0 or less, and no KL has such a weight.
        episodes = self.siblings * (self.prompts + (self.replay.groups if self.replay else 0))
        if isinstance(a.pull, KL) and a.pull.target is not None and episodes >= 5 * a.pull.horizon:
            raise ConfigError(
                f"{self.name}: pull.target with pull.horizon={a.pull.horizon:g} may take all of pull.coef in one step"
                f" of {episodes} episodes. Set pull.horizon above {episodes / 5:g}, or pull.target=none"
            )
        if self.sampling.top not in (0, a.stores_top):
            raise ConfigError(
                f"{self.name}.sampling.top={self.sampling.top}: the algorithm decides it ({a.name}: {a.stores_top})."
                " Leave it out"
            )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per controller step."""
        return self.minibatches * self.epochs

    @property
    def heads(self) -> tuple[str, ...]:
        return () if self.algorithm.learns_values is None else ("value_head.",)

    @property
    def sync_steps(self) -> int:
        """Steps between two pushes of weights."""
        return 1 if self.sync_every is None else self.sync_every // self.optimizer_steps

    @property
    def most_behind(self) -> int:
        """By how many steps a token may be older than the weights that learn from it."""
        return self.staleness + self.sync_steps - 1

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @property
    def contract(self) -> Sampling:
        return self.sampling

    @property
    def stores_top(self) -> int:
        return self.algorithm.stores_top

    @property
    def demonstrated(self) -> bool:
        return self.algorithm.shown is not None

    @property
    def hinted(self) -> bool:
        return self.algorithm.hint is not None

    def refuses(self, env: str, styles: tuple[str, ...]) -> str:
        shown = self.algorithm.shown
        if shown is None or (styles and shown.style in (None, *styles)):
            return ""
        return (
            f"{self.name}: {self.algorithm.name} is shown demonstrations in style {shown.style!r}, and environment"
            f" {env!r} writes {offered(styles)}. Use another algorithm, or give your prompts a column 'completion'"
        )
