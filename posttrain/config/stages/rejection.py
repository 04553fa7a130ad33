"""Rejection sampling: the published methods as data, and the settings of the stage that runs them.

A round asks the policy, keeps some of what it said, and imitates that with the ordinary likelihood. Imitating what is
right is REINFORCE with reward 0 or 1 and without a baseline, on samples of the round's first weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.config.stages.keep_rule import Best, Keep, Passing, Rising, TopShare
from posttrain.config.stages.stage import Optimizer, Stage, offered
from posttrain.core.conversation import Turns
from posttrain.core.sampling import Sampling
from posttrain.system.errors import ConfigError, at_least, nearest


@dataclass(frozen=True, kw_only=True)
class Regenerate:
    """Wrong answers are said anew from their first wrong step, and what is then right is imitated.

    The steps before it stay as the policy said them. An answer whose first step is wrong is left as it is: to say it
    anew would be one more sample.
    """

    completions: int = 4
    """Completions from the end of a step."""
    separator: str = "\n"
    """Text that ends a step, where completions find the first wrong one."""
    by: Literal["completions", "scores"] = "completions"
    """The method that finds the first wrong step. completions: a step is right while any completion from its end is,
    and the steps are halved until the first wrong one is left (2406.06592). scores: it is the first step that scores
    below `at`, by a process reward model or by the environment; then only the steps before it are completed."""
    at: float = 0.5
    """The score below which a step is wrong, where scores find it."""

    def __post_init__(self) -> None:
        at_least(self, "method.regenerate.", completions=1)
        if not self.separator:
            raise ConfigError(
                "method.regenerate.separator is empty: give the text that ends a step, such as ';' or a line's end"
            )
        if not math.isfinite(self.at):
            raise ConfigError(f"method.regenerate.at={self.at:g}: a finite number, on the scale of the steps' scores")


@dataclass(frozen=True, kw_only=True)
class RejectionMethod:
    """The choice of which completions of a round are kept, and from which weights they are imitated. Fields are
    choices."""

    name: str
    """As `method=NAME` names it."""
    paper: str
    """Its source: an arXiv id."""
    keep: Keep = Passing()
    """Which completions of a prompt are kept."""
    distinct: bool = True
    """Keep equal completions of a prompt once. They are compared by their tokens."""
    most: int | None = None
    """Most completions kept of a prompt; the first sampled ones. None: no limit."""
    weights: Literal["start", "last"] = "last"
    """The weights that a round trains. last: those that the round before left, with their optimizer state. start: those
    that the stage started from, with a new optimizer, so that no round adds to another; the policy that is asked is
    always the newest one."""
    rationalise: bool = False
    """Ask the prompts of which nothing was kept once more with the answer as a hint, and imitate what is then right
    without the hint (STaR). The environment writes the hint (`core.abilities.Abilities.hint`)."""
    regenerate: Regenerate | None = None
    """Say wrong answers to prompts of which nothing was kept anew from their first wrong step. None: they are not."""
    improvements: int = 1
    """Rounds that imitate from the same completions before new ones are asked (ReST's Improve steps to a Grow step)."""

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ConfigError(f"method.most={self.most}: must be >= 1, or none for no limit")
        at_least(self, "method.", improvements=1)
        if self.rationalise and not isinstance(self.keep, Passing):
            raise ConfigError(
                f"method.rationalise=true asks again where no completion reaches a threshold, and"
                f" keep={type(self.keep).__name__.lower()} has none that stays. Set keep=passing, or rationalise=false"
            )

        if self.regenerate is not None and isinstance(self.keep, Best | TopShare) and self.keep.above is None:
            keep = type(self.keep).__name__.lower()
            raise ConfigError(
                f"method.regenerate goes on where nothing of a prompt is kept, and keep={keep}"
                " always keeps something. Set method.keep.above=0, so that wrong answers are not kept, or keep=passing"
            )

    @property
    def label(self) -> str:
        """Its name, with `+user` where a choice is not the published one. The numbers of `keep` belong to the scale of
        the rewards, and change no name."""
        published = METHODS.get(self.name)
        if published is None or type(self.keep) is not type(published.keep):
            return f"{self.name}+user"
        # Compared with its own `keep` put in, so that numbers of the rule do not count.
        return self.name if replace(published, keep=self.keep) == self else f"{self.name}+user"


RFT = RejectionMethod(name="rft", paper="2308.01825", weights="start")
"""Samples k completions of every training prompt, keeps the right and distinct ones, and trains on them once. The paper
compares them by their equations, and trains the model as it was before SFT, on the SFT data (`general`) and the kept
ones together; here they are compared by their tokens, and a stage trains the weights that it starts from."""
RAFT = RejectionMethod(name="raft", paper="2304.06767", keep=Best(), distinct=False)
"""Each round samples k completions of some prompts, keeps the best one of each prompt by its reward, and goes on."""
STAR = RejectionMethod(name="star", paper="2203.14465", distinct=False, most=1, weights="start", rationalise=True)
"""Each round asks every prompt, asks those that were answered wrongly again with the answer as a hint, and trains the
first weights on both. The paper takes one greedy answer a prompt; here it is the first right one of the samples."""
REST = RejectionMethod(name="rest", paper="2308.08998", keep=Rising(), distinct=False, improvements=3)
"""Grow: sample once. Improve: imitate what reaches a threshold, which rises from one round to the next, going on from
the last weights. The paper lowers the learning rate from one Improve step to the next, and mixes in its first data."""
REST_EM = RejectionMethod(name="rest_em", paper="2312.06585", most=10, weights="start")
"""Each round samples from the newest policy, keeps what is right, at most 10 of a prompt, and trains the first weights
on it."""

METHODS: dict[str, RejectionMethod] = {m.name: m for m in (RFT, RAFT, STAR, REST, REST_EM)}
"""The published methods by name."""


def named_method(name: str) -> RejectionMethod:
    """The published method of that name, or ConfigError with the nearest one."""
    if name not in METHODS:
        raise ConfigError(f"method={name}: no such method of rejection sampling; {nearest(name, METHODS)}")
    return METHODS[name]


@dataclass(frozen=True, kw_only=True)
class Rejection(Stage):
    """A stage that imitates the best of its own samples, in rounds. A step is an optimizer step; the first step of a
    round also asks."""

    harmless = ("style", "turns")

    method: RejectionMethod = RFT
    """A published method, which may be changed choice by choice: rft, raft, star, rest, rest_em."""
    sampling: Sampling = Sampling()
    """How completions are sampled. They are imitated under the model's own distribution, at temperature 1."""
    optimizer: Optimizer = Optimizer(lr=1e-4)
    prompts: int = 256
    """Prompts asked in a round."""
    siblings: int = 8
    """Samples per prompt."""
    batch: int = 64
    """Completions per optimizer step, general ones included."""
    epochs: int = 2
    """Passes over the completions that a round kept."""
    rounds: int | None = None
    """Rounds after which the stage ends. None: it ends by `steps` alone."""
    general: float = 0.0
    """Share of each batch that is ordinary demonstrations of the environment, so that what they teach is not
    forgotten."""
    style: str | None = None
    """The style of those demonstrations. None: there are none."""
    turns: Turns = "all"
    """Which turns of those demonstrations are learned, as of a supervised stage."""
    max_failed: float = 0.5
    """Stop the run when more than this share of a round's samples could not be judged."""
    steps: int = 1000
    eval_every: int = 20
    checkpoint_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, f"{self.name}.", prompts=1, siblings=1, batch=1, epochs=1)
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"{self.name}.rounds={self.rounds}: must be >= 1, or none")
        if not 0 <= self.general < 1:
            raise ConfigError(f"{self.name}.general={self.general:g}: a share in [0, 1), since something is to be kept")
        if bool(self.general) != (self.style is not None):
            raise ConfigError(
                f"{self.name}.general={self.general:g} and style={self.style or 'none'}: the share of demonstrations"
                " and their style belong together. Give both, or neither"
            )
        if self.general and not self.batch > self.own >= 1:
            raise ConfigError(
                f"{self.name}.general={self.general:g} of batch={self.batch} leaves {self.own} kept completions and"
                f" {self.batch - self.own} demonstrations: raise batch, so that there is at least one of each"
            )
        self.sampling.for_training()

    @property
    def own(self) -> int:
        """Kept completions of a full batch."""
        return self.batch - round(self.batch * self.general)

    def shown_beside(self, kept: int) -> int:
        """Demonstrations in a batch with so many kept completions. The last batch of a round may be smaller."""
        # In proportion to a full batch, rounded up, so that a small last batch also has some.
        return math.ceil((self.batch - self.own) * kept / self.own)

    @property
    def algorithm_name(self) -> str:
        return self.method.label

    @property
    def contract(self) -> Sampling:
        return self.sampling

    @property
    def demonstrated(self) -> bool:
        return self.style is not None

    @property
    def hinted(self) -> bool:
        return self.method.rationalise

    def judged_alone(self, other: str) -> str:
        """Returns the reason why `other` cannot judge beside the environment: what goes on from a step is judged by the
        environment."""
        return (
            f"{self.name}.method.regenerate: completions are judged by the environment alone, and {other} pays the"
            " answers too. Take it out of env.rewards, or set regenerate=none; a process reward model that scores steps"
            " (steps=score) may stay"
        )

    def refuses(self, env: str, styles: tuple[str, ...]) -> str:
        if self.style is None or self.style in styles:
            return ""
        return (
            f"{self.name}.style={self.style!r}: environment {env!r} writes {offered(styles)}. Give another style, or"
            " general=0"
        )
