"""A preference algorithm as data: DPO plus a list of patches. Torch-free; the mathematics is in
`posttrain.algorithm.preference.preference_loss`.

    h    = statistic(log pi - log ref), through the divergence           of each completion
    x    = beta h_chosen - beta h_rejected - margin                      of each pair
    loss = sum over pairs of weight * coef * link(x) + what is added

Every field is one choice, as in `ladder.algorithm`, and combinations that mean nothing are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from posttrain.ladder.algorithm import choices
from posttrain.ladder.pieces.link import Link, LogSigmoid, PreferencePiece
from posttrain.ladder.pieces.pair_source import PairSource
from posttrain.ladder.pieces.piece import positive
from posttrain.ladder.pieces.preference_pieces import (
    Added,
    DataMargin,
    Desensitized,
    FDivergence,
    LabelNoise,
    MarginTerm,
    ReverseKL,
    Statistic,
    Total,
)
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.judgements import Kind

Rows = Literal["pair", "label", "triple"]
"""The content of one row. pair: a chosen and a rejected completion. label: one completion, good or bad. triple: a gold
completion, a chosen and a rejected one, in this order."""
Match = Literal["margins", "rewards"]
"""Optimal transport over the minibatch (AOT). margins: the sorted margins of the policy against those of the reference.
rewards: the sorted log-ratios of the chosen against those of the rejected."""
Shift = Literal["mismatched", "running"]
"""The number that is subtracted from a reward. mismatched: beta times the mean log-ratio of completions under other
prompts, at least 0 (KTO's z). running: the mean of all rewards seen so far (BCO's delta)."""

KINDS: dict[Rows, Kind] = {"pair": "pair", "label": "label", "triple": "ranking"}
"""The kind of judgement that the rows of each form are read from."""
SIDES: dict[Rows, tuple[int, ...]] = {"pair": (1, 0), "label": (), "triple": (2, 1, 0)}
"""The `SIDE` of the completions of a unit, in order; () where each completion is a unit of its own."""


@dataclass(frozen=True, kw_only=True)
class PreferenceAlgorithm:
    """One preference algorithm. The defaults are DPO; `posttrain.ladder.preference_rows` has the others."""

    name: str
    """Its name, by which the ladder and run.json call it."""
    paper: str
    """Its publication: an arXiv id, or author and year."""
    rows: Rows = "pair"
    statistic: Statistic = Total()
    """How the log-probs of a completion become one number."""
    against: Literal["reference", "nothing"] = "reference"
    """reference: log-probs are compared with those of a frozen model, the policy as the stage began. nothing: they are
    taken as they are."""
    divergence: FDivergence = ReverseKL()
    """The divergence to the reference."""
    beta: float = 0.1
    """Scale of the reward: the weight of the divergence in the problem that the loss solves."""
    link: Link = LogSigmoid()
    """How a margin, or a reward, becomes a loss."""
    noise: LabelNoise | None = None
    """The correction for wrong labels; none: they are taken as they are."""
    margin: MarginTerm | None = None
    """The amount by which the chosen completion must be ahead; none: nothing."""
    shift: Shift | None = None
    match: Match | None = None
    weights: Literal["wpo"] | None = None
    """wpo: each pair counts by how likely the policy itself would say it (2406.11827)."""
    coef: float = 1.0
    """Weight of the preference term."""
    good: float = 1.0
    """Weight of completions labelled good (rows=label)."""
    bad: float = 1.0
    """Weight of completions labelled bad (rows=label)."""
    add: tuple[Added, ...] = ()
    """Further terms, added to the preference term."""
    draw: PairSource | None = None
    """Where pairs come from; none: from given judgements."""
    note: str = ""
    """Where the paper and popular code differ, and what this library does."""
    parent: PreferenceAlgorithm | None = None
    """The algorithm that it is a patch of."""

    def __post_init__(self) -> None:
        positive("beta", self.beta)
        positive("coef", self.coef)
        positive("good", self.good)
        positive("bad", self.bad)
        # As in `ladder.algorithm`: what an absent piece refuses is not known.
        for reason in () if self.absent else _meaningless(self):
            raise ConfigError(f"preference algorithm {self.name!r}: {reason}")

    @cached_property
    def pieces(self) -> tuple[PreferencePiece, ...]:
        """All its pieces, in the order of the choices."""
        chosen = [getattr(self, name) for name in PREFERENCE_CHOICES]
        flat = [x for c in chosen for x in (cast("tuple[Any, ...]", c) if isinstance(c, tuple) else (c,))]
        return tuple(x for x in flat if isinstance(x, PreferencePiece))

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of its pieces whose classes this program does not have. What they refuse is then not known."""
        return tuple(type(p).__name__ for p in self.pieces if p.absent)

    @property
    def kind(self) -> Kind:
        """The kind of judgement that it learns from. rows=triple reads rankings of three."""
        return KINDS[self.rows]

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that must be known before the loss: subset of {reference, start, collision, margin}. All but
        `margin`, which the data gives, are scored by models."""
        # START is needed only for streams that are made over the whole minibatch
        # before the loss. The loss itself has the policy's log-probs.
        need = {stream for p in self.pieces for stream in p.reads()}
        if self.against == "reference":
            need.add("reference")
        if self.shift == "running" or self.match is not None:
            need.add("start")
        if self.weights == "wpo":
            need |= {"start", "collision"}
        return frozenset(need)

    @property
    def reads_reference(self) -> bool:
        return "reference" in self.reads

    @property
    def reads_start(self) -> bool:
        """True where the policy's log-probs at the start of the optimizer step must be scored before the loss."""
        return "start" in self.reads

    @property
    def reads_collision(self) -> bool:
        """True where `COLLISION` must be scored, for the weights of wpo."""
        return "collision" in self.reads

    @property
    def reads_margin(self) -> bool:
        """True where each pair needs `MARGIN`: the data's margin, or for link=nash the probability that the chosen one
        is preferred."""
        return "margin" in self.reads

    @property
    def reads_mismatched(self) -> bool:
        """True where completions under other prompts must be scored by policy and reference (KTO's z)."""
        return self.shift == "mismatched"

    @property
    def online(self) -> bool:
        """True where each step draws its own pairs, of completions of the policy, of an opponent, or of both."""
        return self.draw is not None

    def lineage(self) -> tuple[PreferenceAlgorithm, ...]:
        """All algorithms from DPO to this one, each a patch of the one before."""
        return (*self.parent.lineage(), self) if self.parent else (self,)


def _meaningless(a: PreferenceAlgorithm) -> Iterator[str]:
    """Yields the reasons why a combination of choices means nothing, with what to change. The pieces add their own."""
    for piece in a.pieces:
        yield from piece.refuses(a)
    if a.rows == "label" and a.link.of != "sides":
        yield (
            f"link={type(a.link).__name__.lower()} reads pairs, and rows=label has single completions. Set"
            " link=prospect, binary or anchoredzero, or rows=pair"
        )
    if a.rows != "label" and (a.good, a.bad) != (1.0, 1.0):
        yield f"good and bad weigh single completions, and rows={a.rows} has pairs. Set good=1, bad=1"
    if a.weights is not None and a.rows != "pair":
        yield "weights=wpo is a product over the two sides of a pair. Set weights=none, or rows=pair"
    # In a difference the shift s cancels: (u_c - s) - (u_r - s) = u_c - u_r.
    if a.shift is not None and (a.rows != "label" or a.link.of != "sides"):
        yield (
            f"shift={a.shift} moves the reward of single completions; a difference cancels it. Set shift=none, or"
            " rows=label with link=prospect or binary"
        )
    if a.shift == "mismatched" and a.against == "nothing":
        yield "shift=mismatched is a mean of log-ratios to the reference. Set against=reference"
    if a.shift == "mismatched" and not isinstance(a.statistic, Total):
        yield "shift=mismatched is a mean of log-ratios of whole completions. Set statistic=total"
    if a.match is not None:
        yield from _meaningless_match(a)
    if isinstance(a.margin, DataMargin) and a.draw is not None:
        yield "margin=datamargin reads the margin of a row, and drawn pairs have none. Set margin=none"
    # The gold completion costs a forward pass, so some term must read it.
    if a.rows == "triple" and not any(x.of == "gold" for x in a.add):
        yield "rows=triple has a gold completion that nothing reads. Set add=goldnll, or rows=pair"
    if a.draw is not None and a.rows != "pair":
        yield f"draw=... makes pairs, and rows={a.rows} reads none. Set rows=pair, or draw=none"
    names = [type(x).__name__ for x in a.add]
    if len(set(names)) < len(names):
        yield "add=... has the same term twice. Keep one, with the sum of their weights"


def _meaningless_match(a: PreferenceAlgorithm) -> Iterator[str]:
    """The reasons that concern `match`."""
    if a.rows != "pair" or a.link.of != "difference":
        yield f"match={a.match} sorts what a link of differences reads. Set rows=pair, link=logsigmoid, or match=none"
    if a.against == "nothing":
        yield f"match={a.match} sorts log-ratios to the reference. Set against=reference"
    if a.weights is not None:
        yield f"match={a.match} joins sides of different pairs, whose weights are then nobody's. Set weights=none"
    # `Desensitized` scores a completion by the length of the other side, and sorting compares it with another pair's.
    if isinstance(a.statistic, Desensitized):
        yield f"match={a.match} joins sides of different pairs, and desensitized compares lengths within one"


PREFERENCE_CHOICES = choices(PreferenceAlgorithm)
"""The choices of a preference algorithm."""
