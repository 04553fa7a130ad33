"""Per-token streams: one number for each spoken token, declared once, with who makes it and who reads it.

`Scored`, `Batch` and the loss's own `Streams` hold streams by their declaration: `batch[START]` is the array or an
error that names what is missing, `START in batch` and `batch.find(START)` ask first. To add one that a model says of
each token, write its `Stream` and its `Maker` here, the latter in `SCORED`; one that is made over a whole minibatch is
written the same way in `algorithm/minibatch.py`. It is then scored or made, packed, selected, split and in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

import numpy as np

from posttrain.core.errors import InvariantError

if TYPE_CHECKING:
    from posttrain.core.algorithm import Algorithm
    from posttrain.core.batch import Packed
    from posttrain.core.ports import Examiner, Learner

X = TypeVar("X")
C = TypeVar("C")


@dataclass(frozen=True)
class Stream:
    """The declaration of one stream. Axes: [M] spoken tokens, [M, K] where it is wide."""

    name: str
    dtype: str
    """Its numpy type in a batch. A wider type of the same kind is taken too: laws compute in float64."""
    what: str
    readers: str
    """Who asks for it: told where it is missing."""
    wide: bool = False

    def check(self, x: np.ndarray, tokens: int) -> None:
        """InvariantError where `x` is not this stream of so many tokens."""
        if len(x) != tokens:
            raise InvariantError(
                f"stream {self.name!r} has {len(x)} entries for {tokens} spoken tokens: it holds one for each, in their"
                " order"
            )
        if x.ndim != 1 + self.wide:
            raise InvariantError(
                f"stream {self.name!r} has {x.ndim} axes, and {'[M, K]' if self.wide else '[M]'} is declared"
            )
        declared = np.dtype(self.dtype)
        if x.dtype.kind != declared.kind or not np.can_cast(declared, x.dtype, "safe"):
            raise InvariantError(
                f"stream {self.name!r} is {x.dtype}, and {declared} is declared: make it with"
                f" astype(np.{declared.name})"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Streamed(Generic[X]):
    """What holds streams, each as an X."""

    HOLDER: ClassVar[str] = "what was read"
    streams: Mapping[Stream, X] = field(default_factory=dict[Stream, X])

    def __getitem__(self, stream: Stream) -> X:
        if stream not in self.streams:
            held = ", ".join(repr(s.name) for s in self.streams) or "none"
            raise InvariantError(
                f"stream {stream.name!r} is missing from {self.HOLDER} (it holds {held}). It is {stream.what}, and is"
                f" read by {stream.readers}. Whoever makes it was not asked to (`wanted`), or it was taken out on"
                " the way"
            )
        return self.streams[stream]

    def __contains__(self, stream: Stream) -> bool:
        return stream in self.streams

    def find(self, stream: Stream) -> X | None:
        """The stream, or None where it is not here."""
        return self.streams.get(stream)

    def having(self, changes: Mapping[Stream, X | None]) -> Self:
        """The same with these streams put in, or taken out where None is given."""
        return replace(self, streams={s: x for s, x in {**self.streams, **changes}.items() if x is not None})


@dataclass(frozen=True)
class Maker(Generic[C]):
    """Who makes streams: where they are wanted, and how. C is what both look at."""

    makes: tuple[Stream, ...]
    wanted: Callable[[C], bool]
    made: Callable[[C], Sequence[np.ndarray]]
    """One array for each of `makes`."""

    def make(self, look: C) -> dict[Stream, np.ndarray]:
        """The streams, or none of them where they are not wanted."""
        return dict(zip(self.makes, self.made(look), strict=True)) if self.wanted(look) else {}


# --- what the sampler said --------------------------------------------------------------------------------------------

MU = Stream(
    "mu",
    "float32",
    "the log-prob of each token in the distribution it was really drawn from",
    "the ratio, corrections and the noise band",
)
VERSION = Stream(
    "version", "int32", "the weights that said each token", "the proximal anchor and the checks of the sampler"
)

# --- what credit and aggregation made ---------------------------------------------------------------------------------

ADVANTAGE = Stream("advantage", "float64", "credit", "the policy's term of every loss with credit")
RETURN = Stream("returns", "float64", "the targets of values", "the value loss")
WEIGHT = Stream(
    "weight", "float64", "the aggregation, written out per token and normalised over the minibatch", "every loss"
)

# --- what models said: forward passes without gradient, in the order of SCORED ----------------------------------------


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a maker of scored streams looks at: the judged episodes of a step packed, and the models."""

    packed: Packed
    algorithm: Algorithm
    learner: Learner
    frozen: Examiner | None
    optimizer_steps: int
    """Optimizer steps that will be taken on these tokens."""

    @property
    def reference(self) -> Examiner:
        if self.frozen is None:
            raise InvariantError(
                f"algorithm {self.algorithm.name!r} reads a reference, and the stage has none: build its roles with"
                " one, or take the pieces away that read it"
            )
        return self.frozen


START = Stream(
    "start",
    "float32",
    "the learner's log-probs at the start of the step",
    "ratios with anchor=start, corrections, V-trace and a KL in the credit. It is left out where the first optimizer"
    " step is the only one: there the policy is its own start",
)
REFERENCE = Stream("reference", "float32", "the frozen reference's log-probs", "a KL to the reference")
VALUE = Stream(
    "values",
    "float32",
    "the value head's estimate before each token, at the start of the step",
    "credit with values and the clipped value loss",
)
ENTROPY = Stream(
    "entropy",
    "float32",
    "the entropy of the distribution each token was drawn from, at the start of the step",
    "tokens=topentropy",
)
ENERGY = Stream(
    "energy", "float32", "|d log pi / d logits|^2 of each token, at the start of the step", "baseline=energymean"
)
TOP_IDS = Stream(
    "top_ids",
    "int32",
    "candidate tokens: the sampler's or the teacher's most probable",
    "a top-k divergence and the distillation of a teacher",
    wide=True,
)
TOP_LOGP = Stream(
    "top_logp",
    "float32",
    "the log-probs of the candidates under whoever named them",
    "a top-k divergence and the distillation of a teacher",
    wide=True,
)


def _start_is_scored(s: Scoring) -> bool:
    """With one optimizer step a step they equal the training forward's own, except where credit already needs them."""
    return s.algorithm.start_before_loss or ("start" in s.algorithm.reads and s.optimizer_steps > 1)


def _teacher(s: Scoring) -> tuple[np.ndarray, np.ndarray]:
    assert s.algorithm.distill is not None
    top = s.reference.top(s.packed, s.algorithm.distill.top)
    return top.ids, top.logp


SCORED: list[Maker[Scoring]] = [
    Maker((START,), _start_is_scored, lambda s: (s.learner.score(s.packed),)),
    Maker((REFERENCE,), lambda s: "reference" in s.algorithm.reads, lambda s: (s.reference.score(s.packed),)),
    Maker((VALUE,), lambda s: "values" in s.algorithm.reads, lambda s: (s.learner.value(s.packed),)),
    Maker((ENTROPY,), lambda s: "entropy" in s.algorithm.reads, lambda s: (s.learner.entropy(s.packed),)),
    Maker((ENERGY,), lambda s: "energy" in s.algorithm.reads, lambda s: (s.learner.energy(s.packed),)),
    Maker((TOP_IDS, TOP_LOGP), lambda s: s.algorithm.distill is not None, _teacher),
]
"""Who scores what, in this order. Every stream made here is cut to episodes for credit, and packed into the
minibatches."""
