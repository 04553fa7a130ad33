"""Per-token streams: one number for each spoken token. Each is declared once, with its maker and its readers.

`Scored`, `Batch` and the loss's `Streams` hold streams by their declaration. `batch[START]` is the array, or an error
that names what is missing. `START in batch` and `batch.find(START)` test whether it is there.

To add a stream that a model computes, write its `Stream` and its `Maker` here, and put the maker into `SCORED`. A
stream that is made over a whole minibatch is added the same way in `algorithm/loss/minibatch_streams.py`. The library
then scores or makes it, packs, selects and splits it, and passes it to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from posttrain.system.errors import InvariantError

if TYPE_CHECKING:
    from posttrain.core.batch import Packed
    from posttrain.core.ports import Examiner, Learner, Scorer

X = TypeVar("X")
C = TypeVar("C")


@dataclass(frozen=True)
class Stream:
    """The declaration of one stream. Its arrays are [M] over spoken tokens, or [M, K] where it is wide."""

    name: str
    dtype: str
    """Its numpy type in a batch. A wider type of the same kind is accepted too, because laws compute in float64."""
    what: str
    readers: str
    """The readers of the stream, in words; the error for a missing stream shows them."""
    wide: bool = False

    def check(self, x: np.ndarray, tokens: int) -> None:
        """Raises InvariantError where `x` has not this stream's type and axes, or not `tokens` entries."""
        declared, what = np.dtype(self.dtype), f"stream {self.name!r}"
        if len(x) != tokens:
            raise InvariantError(
                f"{what} has {len(x)} entries for {tokens} spoken tokens: one for each, in their order"
            )
        if x.ndim != 1 + self.wide:
            raise InvariantError(f"{what} has {x.ndim} axes, and {'[M, K]' if self.wide else '[M]'} is declared")
        # Only a wider type of the same kind can hold every declared number: float64 for float32, never the other way.
        if x.dtype.kind != declared.kind or not np.can_cast(declared, x.dtype, "safe"):
            raise InvariantError(
                f"{what} is {x.dtype}, and {declared} is declared: make it with astype(np.{declared.name})"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Streamed(Generic[X]):
    """Base of classes that hold streams, each as an X."""

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
        """The stream, or None where it is missing."""
        return self.streams.get(stream)

    def having(self, changes: Mapping[Stream, X | None]) -> Self:
        """A copy with these streams added or replaced; one given as None is removed."""
        return replace(self, streams={s: x for s, x in {**self.streams, **changes}.items() if x is not None})


@dataclass(frozen=True)
class Maker(Generic[C]):
    """Makes streams. `wanted` decides whether they are made, `made` computes them; both read the same context C."""

    makes: tuple[Stream, ...]
    wanted: Callable[[C], bool]
    made: Callable[[C], Sequence[np.ndarray]]
    """One array for each of `makes`."""

    def make(self, context: C) -> dict[Stream, np.ndarray]:
        """The streams, or an empty dict where they are not wanted."""
        # `made` may run a model, so it is not called for streams that nobody reads.
        return dict(zip(self.makes, self.made(context), strict=True)) if self.wanted(context) else {}


# --- from the sampler -------------------------------------------------------------------------------------------------

MU = Stream(
    "mu",
    "float32",
    "the log-prob of each token in the distribution it was really drawn from",
    "the ratio, corrections and the noise band",
)
VERSION = Stream(
    "version", "int32", "the weights that said each token", "the proximal anchor and the checks of the sampler"
)

# --- from credit and aggregation --------------------------------------------------------------------------------------

ADVANTAGE = Stream("advantage", "float64", "credit", "the policy's term of every loss with credit")
RETURN = Stream("returns", "float64", "the targets of values", "the value loss")
WEIGHT = Stream(
    "weight", "float64", "the aggregation, written out per token and normalised over the minibatch", "every loss"
)

# --- from judgements and outcomes -------------------------------------------------------------------------------------

SIDE = Stream(
    "side",
    "int32",
    "how its completion was judged: 1 chosen or good, 0 rejected or bad, or to how many of a list it was preferred",
    "losses that learn from preferences",
)
MARGIN = Stream(
    "margin",
    "float64",
    "by how much the chosen completion of its pair was preferred, as the data says",
    "losses with a margin of the data",
)
RATING = Stream(
    "rating",
    "float64",
    "the ratings of its completion, one for each attribute; NaN where it has none",
    "reward models that learn ratings",
    wide=True,
)
STEP = Stream(
    "step",
    "float64",
    "at the last token of each labelled step the chance that the answer becomes right; NaN at all other tokens",
    "reward models that learn labels of steps",
)

OUTCOME = Stream(
    "outcome",
    "float64",
    "the raw outcome of its answer, from 0 to 1",
    "the loss of an implicit process reward model (baseline=implicitothers)",
)

OPPONENT = Stream(
    "opponent",
    "bool",
    "the completions that the policy's opponent said: the reference, or a mixture with it",
    "losses of pairs that are drawn against an opponent (XPO, Nash-MD)",
)

# --- from models, without gradient: by SCORED, in its order; NOW and COLLISION for one minibatch ----------------------


class Distilled(Protocol):
    """How an algorithm learns from a teacher's distribution (`ladder.pieces.token_choice.Distill`)."""

    @property
    def top(self) -> int: ...


class ReadsStreams(Protocol):
    """The properties of an algorithm that say which streams it reads (`ladder.algorithm.Algorithm`)."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Set[str]: ...
    @property
    def start_before_loss(self) -> bool: ...
    @property
    def distill(self) -> Distilled | None: ...


@dataclass(frozen=True, eq=False)
class Scoring:
    """The context of makers of scored streams: the judged episodes of a step, packed, and the models."""

    packed: Packed
    algorithm: ReadsStreams
    learner: Learner
    frozen: Examiner | None
    optimizer_steps: int
    """Optimizer steps that will be taken on these tokens."""
    implicit: Scorer | None = None
    """The implicit process reward model, where the algorithm reads one."""
    hinted: Packed | None = None
    """The same spoken tokens after the teacher's prompts; None: the teacher reads the policy's prompts."""

    @property
    def reference(self) -> Examiner:
        if self.frozen is None:
            raise InvariantError(
                f"algorithm {self.algorithm.name!r} reads a reference, and the stage has none: build its roles with"
                " one, or take the pieces away that read it"
            )
        return self.frozen

    @cached_property
    def own(self) -> Mapping[str, np.ndarray]:
        """The policy's numbers about its own tokens, by the names of `OWN`, from one forward pass."""
        # Cached: four makers read it, and the model runs once. A maker runs only where its condition in `OWN` holds.
        return self.learner.examine(self.packed, [name for name, wanted in OWN.items() if wanted(self)])

    @property
    def read(self) -> Packed:
        """The packed tokens that the reference reads."""
        return self.packed if self.hinted is None else self.hinted


START = Stream(
    "start",
    "float32",
    "the learner's log-probs at the start of the step",
    "ratios with anchor=start, corrections, V-trace and a KL in the credit. It is left out where the first optimizer"
    " step is the only one: there the policy is its own start",
)
NOW = Stream(
    "now",
    "float32",
    "the learner's log-probs before the optimizer step that is made of this minibatch",
    "tokens=secondmoment, in every optimizer step of a batch but the first, where they are those of the start",
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
COLLISION = Stream(
    "collision",
    "float32",
    "the probability that two draws at a token's position are the same, sum_v pi_v^2, at the start of the step",
    "weights=wpo",
)
IMPLICIT = Stream(
    "implicit",
    "float32",
    "the implicit process reward model's log-probs, before it learned from this step",
    "baseline=implicitothers",
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
    """Returns whether the log-probs at the start of the step are scored."""
    # The forward pass of the first optimizer step gives them too. So a step with one scores them only where credit, or
    # the choice of tokens, needs them before that pass. From the second step on the policy is another one.
    return s.algorithm.start_before_loss or ("start" in s.algorithm.reads and s.optimizer_steps > 1)


def _implicit(s: Scoring) -> tuple[np.ndarray]:
    """The implicit process reward model's log-probs; InvariantError where the stage has no such model."""
    if s.implicit is None:
        raise InvariantError(
            f"algorithm {s.algorithm.name!r} reads an implicit process reward model, and the stage has none: build its"
            " roles with one, or set baseline=others"
        )
    return (s.implicit.score(s.packed),)


def _teacher(s: Scoring) -> tuple[np.ndarray, np.ndarray]:
    """The teacher's most probable tokens at each spoken position, and their log-probs."""
    assert s.algorithm.distill is not None  # as the condition in `SCORED` says
    top = s.reference.top(s.read, s.algorithm.distill.top)
    return top.ids, top.logp


OWN: dict[str, Callable[[Scoring], bool]] = {
    "score": _start_is_scored,
    "value": lambda s: "values" in s.algorithm.reads,
    "entropy": lambda s: "entropy" in s.algorithm.reads,
    "energy": lambda s: "energy" in s.algorithm.reads,
}
"""The numbers that the policy gives about its own tokens (`Learner.examine`), and the condition of each."""

# All makers run before the first optimizer step, which "at the start of the step" means.
SCORED: list[Maker[Scoring]] = [
    Maker((START,), OWN["score"], lambda s: (s.own["score"],)),
    Maker((REFERENCE,), lambda s: "reference" in s.algorithm.reads, lambda s: (s.reference.score(s.read),)),
    Maker((VALUE,), OWN["value"], lambda s: (s.own["value"],)),
    Maker((ENTROPY,), OWN["entropy"], lambda s: (s.own["entropy"],)),
    Maker((ENERGY,), OWN["energy"], lambda s: (s.own["energy"],)),
    Maker((IMPLICIT,), lambda s: "implicit" in s.algorithm.reads, _implicit),
    Maker((TOP_IDS, TOP_LOGP), lambda s: s.algorithm.distill is not None, _teacher),
]
"""The makers of scored streams, in the order in which they run. Each stream is cut to episodes for credit, and packed
into the minibatches."""
