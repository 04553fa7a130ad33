"""The memory of a stage before it starts: every term by name, its bytes, how they are counted, and when it is there.

A step goes through instants. Each term is counted at the instants at which it is in memory, and the peak is the highest
sum. So training and sampling are added only where both are in memory. Two instants come in the first step alone,
because a run checks its first update and its shared beginnings once (`checks.learning.gradient_and_update_checks`,
`engine.layers.shared_prefixes`).

On a processor the resident memory is counted. glibc keeps blocks below 32 MiB after they were freed
(`system.machine.kept_memory`). So the most bytes of such blocks that were ever in use count at every later instant,
with the unused space between them.

Letters: P parameters, T those that train, V x h the embedding, N tokens of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from posttrain.plan import activations
from posttrain.plan.work import FUSED, QUANTISED, Work

Instant = Literal[
    "first scoring", "first update", "rollout", "scoring", "forward", "backward", "gradients", "update", "sync"
]
"""first scoring, first update: the checks of a run in its first step. forward: the end of a forward pass. backward: the
beginning of a backward pass. gradients: the end of the last backward pass."""
INSTANTS: tuple[Instant, ...] = get_args(Instant)
ONCE, EVERY = INSTANTS[:2], INSTANTS[2:]
"""The instants of the first step alone, and those of every step."""
MOVED: tuple[Instant, ...] = ("first update", *EVERY)
"""The instants at which the optimizer has its state."""
FIRST: tuple[Instant, ...] = ("first scoring", "forward", "backward", "gradients", "first update")
"""The instants of the first step, in their order."""
KEPT: tuple[Instant, ...] = ("forward", "backward")
"""The instants at which what a pass keeps for its backward is in memory."""
SMALL = 32 << 20
"""Blocks of fewer bytes are kept by glibc when they are freed."""
BETWEEN = {"none": 1.15, "selective": 1.6, "full": 1.85}
SEVERAL, SAMPLING, SAMPLING_RANKS, HEADLESS, ADAPTED = 1.52, 1.6, 1.3, 1.5, 1.9
"""Resident bytes of kept blocks for each byte of them that was in use at once. Measured
(docs/research/plans-measured.md).

BETWEEN is by `checkpointing`: where layers are computed again, blocks of many sizes come and go. The factor is at least
SEVERAL with several passes and where a first update is checked, SAMPLING where the process samples too (over ranks,
which prove no shared beginnings, SAMPLING_RANKS), HEADLESS for a reward model, and ADAPTED with an adapter."""
LIBRARIES = 35 << 20
"""Bytes that oneDNN, torch and the tokenizer keep for themselves once a run has worked with its sizes. Measured."""
STATE = {
    "adamw": (8.0, "{:g} T: two moments in float32"),
    "adamw8bit": (2.1, "{:g} T: two moments in 8 bits"),
    "muon": (4.4, "{:g} T: momentum of matrices, two moments of the rest"),
    "sgd": (4.0, "{:g} T: momentum"),
}
"""For each optimizer: bytes of its state for each number that trains, and the formula in words."""
WORTH = 1 << 22
"""Numbers of an embedding from which on a gradient of rows is made (`engine.layers.embedding_gradient`)."""
GROUP = 1 << 24
"""Numbers whose state an offloaded optimizer has on the device at once (`engine.optimizer.optimizer_offload`)."""
IN_FULL = 1 << 21
"""Numbers of the smallest weights whose first update is checked (`checks.learning.gradient_and_update_checks`)."""
BUCKET = 64 << 20
"""Bytes of a bucket of all ranks' weights (`engine.parallel.gather`)."""
RESERVED = 0.05
"""Share of the memory allocated for an instant on an accelerator that its allocator holds and cannot use. Assumed."""


@dataclass(frozen=True)
class Term:
    """Something that takes memory."""

    name: str
    bytes: float
    formula: str
    instants: tuple[Instant, ...] = INSTANTS
    small: float = 0.0
    """Bytes of it that lie in blocks which glibc keeps."""


@dataclass(frozen=True)
class Place:
    """The memory of one process, or of one device."""

    name: str
    terms: tuple[Term, ...]
    accelerator: bool
    between: float = 1.0
    """Resident bytes for each byte in use, of the blocks that glibc keeps."""

    def held(self, at: Instant) -> list[Term]:
        """Returns the terms in memory at this instant, the largest first."""
        return sorted((t for t in self.terms if at in t.instants), key=lambda t: -t.bytes)

    def slack(self, at: Instant) -> float:
        """Bytes that the allocator holds beyond what is in use."""
        # torch's allocator has its own blocks: what lasts was allocated once, and what comes and goes leaves gaps.
        if self.accelerator:
            return RESERVED * sum(t.bytes for t in self.held(at) if not set(EVERY) <= set(t.instants))
        # An instant of the first step knows only the instants before it in that step. Later ones know all: what was in
        # use at any of them stays resident.
        if at in ONCE:
            most = max(self._small(i, first=True) for i in FIRST[: FIRST.index(at) + 1])
            between = max(self.between, SEVERAL) if at == "first update" else self.between
            return between * most - self._small(at, first=True)
        return self.between * max(self._small(i) for i in INSTANTS) - self._small(at)

    def _small(self, at: Instant, first: bool = False) -> float:
        """Bytes in small blocks; `first`: in the first step, whose passes come before the optimizer has its state."""
        terms = (t for t in self.held(at) if not (first and at in EVERY and t.instants == MOVED))
        return sum(t.small for t in terms)

    def total(self, at: Instant) -> float:
        """Bytes at this instant."""
        return sum(t.bytes for t in self.held(at)) + self.slack(at)

    @property
    def peak(self) -> Instant:
        """The instant at which the place takes the most memory."""
        return max(INSTANTS, key=self.total)

    @property
    def most(self) -> float:
        """Bytes at the peak."""
        return self.total(self.peak)


def places(work: Work) -> tuple[Place, ...]:
    """The learner's process, and that of each engine where engines have processes of their own."""
    sampling = SAMPLING if work.ranks == 1 else SAMPLING_RANKS
    least = max(SEVERAL * (work.passes > 1), sampling * work.samples_answers, ADAPTED * (work.adapter_parameters > 0))
    between = max(BETWEEN[work.checkpointing], least, HEADLESS * (not work.head))
    learner, engine = tuple(_learner(work)), tuple(_engine(work))
    if not (work.engines and work.samples_answers):
        return (Place("learner and engine", (*learner, *engine), work.accelerator, between),)
    each = Place("each engine", engine, work.accelerator, BETWEEN["none"])
    return (Place("learner", learner, work.accelerator, between), each)


# --- the learner ------------------------------------------------------------------------------------------------------


def _learner(work: Work) -> Iterator[Term]:
    """Yields the terms of the learner's process, an engine in it left out."""
    yield from _weights(work)
    yield from _training(work)
    yield from _proofs(work)
    yield from _passes(work)
    if work.reference:
        yield _of_tensors(work, "reference", work.width, "{:g} P: a frozen copy")
    if work.judging:
        yield _of_tensors(work, "models that judge", work.width * work.judging, "{:g} P: each as large as the policy")
    if work.accelerator:  # what is on its way to engines lies in the host's memory, which is not planned here
        return
    whole, largest = (n * work.width for n in (work.shape.parameters, work.shape.vocabulary * work.shape.hidden))
    if work.engines and work.samples_answers:
        # `placement.delta` keeps what was sent last, to compare with.
        copies = 1 + work.delta
        formula = f"{copies * work.width} P: a block that engines read"
        yield Term("weights on their way", whole * copies, formula, ("sync",))
    # Rank 0 brings the parts of all ranks together in buckets, and joins the largest weight from its parts
    # (`engine.parallel.gather`).
    if work.copy_ranks > 1 and work.samples_answers:
        received = min(whole, max(largest, BUCKET)) * (1 + 1 / work.copy_ranks) + largest
        yield Term("weights of all ranks on their way", received, "a bucket of all, and the largest weight", ("sync",))
    yield Term("libraries", LIBRARIES, "measured; kernels by shape", small=float(LIBRARIES))


def _weights(work: Work) -> Iterator[Term]:
    """Yields the terms of the learner's weights: of a mapped file the parts that were read stay in memory."""
    s, p, a = work.shape, work.shape.parameters, work.width
    # Only the linear layers of the decoder are held in few bits: embedding, norms and head are as they were loaded.
    if work.quantize is not None:
        bits = QUANTISED[work.quantize]
        quantised = (work.in_linear * bits + (p - work.in_linear) * a) / work.copy_ranks
        yield Term("weights", quantised, f"{bits:g} bytes of a linear layer's numbers, {a} of the others")
    elif work.cut_in_rows and a < 4 and not work.adapter_parameters:
        yield Term("weights", p * 4 * _share(work), f"4 P: float32, rounded where they are computed with{_over(work)}")
    else:
        yield Term("weights", p * a * _share(work), f"{a} P{_over(work)}")
    if work.cut_in_rows:
        # Ranks that hold rows bring together what they compute with: embedding and head, and one layer at a time.
        ends = s.parts["embedding"] + s.parts.get("head", 0)
        together = (ends + (p - s.parts["embedding"]) / s.layers) * a
        yield Term("weights brought together", together, "embedding, head, one layer", ("scoring", *KEPT, "gradients"))
        if not work.adapter_parameters:
            formula = f"{a + 4} V h: a whole one, and the copy that is sent"
            yield Term("gradients on their way", float((a + 4) * ends), formula, ("gradients",))
    if work.adapter_parameters:
        adapter_bytes = 4.0 * work.adapter_parameters
        yield Term("adapter", adapter_bytes / work.copy_ranks, "4 T", small=adapter_bytes)
    elif a < 4 and not work.cut_in_rows:
        yield _of_tensors(work, "float32 copies", 4, "{:g} T: what the optimizer moves")


def _training(work: Work) -> Iterator[Term]:
    """Yields the terms of gradients and of the optimizer."""
    # Gradients are summed in float32 over the passes of a step. With one pass they are there from its end on; with
    # several those of earlier passes lie beside the next forward. Where weights have 2 bytes, a pass makes gradients of
    # 2 bytes that are then added.
    yield _trained(work, "gradients", 4, "{:g} T", ("first update", "gradients", "update"))
    if work.passes > 1:
        yield _trained(work, "gradients of earlier passes", 4, "{:g} T", KEPT)
    if work.width < 4 and not work.adapter_parameters and not work.cut_in_rows:
        yield _trained(work, "gradients before they are summed", work.width, "{:g} T", ("gradients",))
    bytes_each, formula = STATE[work.optimizer]
    if work.offload_optimizer:
        # A tensor is never cut, so one that is larger than a group is a group of its own.
        largest = 0.0 if work.adapter_parameters else max(size for size, _ in tensors(work)) * _share(work)
        at_once = min(work.trained_parameters, max(GROUP, largest))
        yield Term("optimizer state", bytes_each * at_once, "one group at a time", ("update",))
    else:
        yield _trained(work, "optimizer state", bytes_each, formula, MOVED)
    if work.ema:
        yield _trained(work, "average of the weights", 4, "{:g} T", INSTANTS)


def _proofs(work: Work) -> Iterator[Term]:
    """Yields the terms of the checks of the first step.

    One compares the update of the smallest weights, `IN_FULL` numbers together: it holds their update, moments and a
    copy. The other shows that shared beginnings change nothing.
    """
    # An adapter has many small matrices; 64 equal ones stand for them.
    counted_sizes = [(work.adapter_parameters // 64, 64)] if work.adapter_parameters else tensors(work)
    sizes = sorted(size * _share(work) for size, count in counted_sizes for _ in range(int(count)))
    # The smallest first, as long as their sum is within the limit: as the check chooses them.
    checked = sum(size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= IN_FULL)
    yield _small("check of the first update", 28.0 * checked, "28 bytes x numbers of small weights", ("first update",))
    if work.share and work.siblings > 1 and work.parallel == "rows" and work.ranks == 1 and not work.adapter_parameters:
        compared = work.width * (2 * work.shape.parameters + work.shape.vocabulary * work.shape.hidden)
        formula = f"{2 * work.width} P + {work.width} V h: two gradients, and a difference"
        yield Term("proof of shared beginnings", compared, formula, ("first scoring",))


def _passes(work: Work) -> Iterator[Term]:
    """Yields the terms of forward and backward passes."""
    n, n_text, hidden = work.pass_tokens, f"N = {work.pass_tokens:,.0f}", work.shape.hidden
    # The share of a layer's activations that a rank keeps. Tensor parallelism cuts about half of them.
    share = 1.0 if work.parallel != "tensor" or work.ranks == 1 else 0.5 + 0.5 / work.copy_ranks
    if not work.offload_activations:
        bytes_each = activations.kept(work) * share
        layers = n * bytes_each - (n - work.spoken_tokens) * activations.unread(work)
        yield _small("activations", layers, f"{bytes_each:,.0f} bytes x {n_text}", KEPT)
        # Of the tokens that are learned from, also the hidden states as float32 for the head, and their gradient.
        outside = n * activations.ends(work) + 2 * work.spoken_tokens * 4 * hidden
        yield _small("hidden states outside the layers", outside, "first, last, and for the head", KEPT)
    one_layer, formula = n * (activations.layer(work) * share), f"one layer x {n_text}"
    if work.checkpointing != "none":
        yield _small("layer that is computed again", one_layer, formula, ("backward", "gradients"))
    else:
        yield _small("last layer of the backward", one_layer, formula, ("gradients",))
    in_backward = n * activations.backward(work)
    yield _small("gradients of activations", in_backward, f"f + h numbers x {n_text}", ("backward", "gradients"))
    scored = min(activations.SCORE_TOKENS, work.minibatch_tokens * work.minibatches)
    if work.samples_answers:
        yield _small("pass without gradient", scored * activations.scoring(work), f"{scored:,.0f} tokens", ("scoring",))
    if work.head:
        yield _small("head's tiles", activations.tile(work), "scores of a tile", ("scoring", *KEPT))
        if not work.adapter_parameters:
            head_gradient = float(work.shape.vocabulary * hidden * work.width)
            # In a single pass it becomes the gradient of the weight itself, which `gradients` counts; with
            # several it is added to that one.
            when: tuple[Instant, ...] = ("backward",) if work.passes == 1 else ("backward", "gradients")
            yield Term("gradient of the head", head_gradient, f"{work.width} V h", when, _kept_small(head_gradient))


# --- the engine -------------------------------------------------------------------------------------------------------


def _engine(work: Work) -> Iterator[Term]:
    """Yields the terms of one engine."""
    # In the same process learner and engine read the same frozen weights. The engine has an adapter of its own, since
    # the learner's changes before the engine is given it.
    if work.adapter_parameters and not work.vllm and not work.engines:
        yield _small("engine's adapter", 4.0 * work.adapter_parameters, "4 T: the frozen weights are shared", INSTANTS)
        # The compiled decoder joins the layers of one input, and holds those with an adapter merged
        # (`engine.embedded.cache.fused_decoder`).
        if work.width == 4 and not work.accelerator and work.shape.family in FUSED and not work.quantize:
            # 8 and not 4: a block has layers that are joined.
            small = sum(4.0 * i * o * n for i, o, n in work.linear.values() if 8 * i * o < SMALL)
            formula = "4 bytes x numbers of the linear layers"
            yield Term("engine's merged layers", 4.0 * work.in_linear, formula, small=small)
    else:
        yield _of_tensors(work, "engine's weights", work.width, "{:g} P", divided=False)
    if not work.samples_answers:
        return
    cached, formula = _cache(work)
    yield Term("cache of keys and values", cached, formula, ("rollout",) if work.sleep else INSTANTS)
    if not work.vllm:
        drawn, formula = activations.logits(work), f"{work.together} sequences x V"
        yield Term("scores that tokens are drawn from", drawn, formula, ("rollout",), 2 * _kept_small(drawn / 2))
        yield _small("engine's pass", activations.prefill(work), "positions of prompts", ("rollout",))


def _cache(work: Work) -> tuple[float, str]:
    """Bytes of the cache of keys and values, and their formula in words."""
    if work.vllm:
        return work.cache, "engine.cache_gib: taken at the start"
    bytes_a_token = work.shape.cache_bytes(4)  # the embedded engine keeps float32
    # Siblings share the cache of their prompt. The last block of a sequence is half empty in the mean.
    groups = math.ceil(work.together / work.siblings)
    rows = groups * work.lengths.prompt + work.together * (work.lengths.answer + 8)  # blocks of 16 rows
    formula = f"{bytes_a_token:,} bytes x {rows:,.0f} tokens: {work.together} sequences"
    return min(work.cache, bytes_a_token * rows), formula


# --- sizes ------------------------------------------------------------------------------------------------------------


def tensors(work: Work) -> list[tuple[int, int]]:
    """(numbers in a tensor, how many such tensors there are) for the tensors of a model."""
    s, x = work.shape, work.shape.experts
    listed = [(s.vocabulary * s.hidden, 1 + (not s.tied)), *((i * o, n) for i, o, n in work.linear.values())]
    if x is not None and (layers := s.layers - x.dense) > 0:
        # Experts of a layer lie in two tensors, what leads into them and what leads out, taken as equal.
        listed.append((s.parts["experts"] // (2 * layers), 2 * layers))
    # What is left are norms and biases, taken as two tensors of equal size a layer.
    rest = s.parameters - sum(size * count for size, count in listed)
    return [*listed, (max(0, rest) // max(1, 2 * s.layers), 2 * s.layers)]


def _of_tensors(
    work: Work, name: str, each: float, formula: str, instants: tuple[Instant, ...] = INSTANTS, divided: bool = True
) -> Term:
    """The term of something that has `each` bytes for each number of the model; `divided`: whether ranks divide it."""
    share = _share(work) if divided else 1.0
    total = work.shape.parameters * each * share
    # Where no head reads the embedding and it is large, its gradient has a row for each token that was read. How many
    # different ones there are is not known: as many as tokens, and at most a quarter of the vocabulary.
    by_rows = not work.head and work.ranks == 1 and work.shape.vocabulary * work.shape.hidden >= WORTH
    if name.startswith("gradients") and by_rows:
        total -= each * (work.shape.vocabulary - min(work.pass_tokens, work.shape.vocabulary / 4)) * work.shape.hidden
    # glibc decides by the size of a single block. So what counts is the size of one tensor on this rank. 8 bytes are
    # two moments of 4, each a tensor of its own.
    parts = 2 if each == 8 else 1
    small = sum(size * count * each for size, count in tensors(work) if size * each * share / parts < SMALL)
    text = formula.format(each) + (_over(work) if divided else "")
    return Term(name, total, text, instants, min(small * share, total))


def _trained(work: Work, name: str, each: float, formula: str, instants: tuple[Instant, ...]) -> Term:
    """The term of something that has `each` bytes for each number that trains."""
    if work.adapter_parameters:
        return _small(name, each * work.adapter_parameters / work.copy_ranks, formula.format(each), instants)
    return _of_tensors(work, name, each, formula, instants)


def _small(name: str, held: float, formula: str, instants: tuple[Instant, ...]) -> Term:
    """Returns the term of memory in many blocks, none of them large."""
    return Term(name, held, formula, instants, held)


def _kept_small(held: float) -> float:
    """The bytes of one block that glibc keeps: all of a small block, none of a large one."""
    return held if held < SMALL else 0.0


def _share(work: Work) -> float:
    """The share of the weights that a rank holds."""
    if work.parallel == "rows" or work.copy_ranks == 1:
        return 1 / work.copy_ranks
    s, whole = work.shape, work.shape.parameters
    # Expert parallelism cuts the experts alone, tensor parallelism the linear layers too; all else is whole.
    cut = s.parts.get("experts", 0) + work.in_linear * (work.parallel == "tensor")
    return (whole - cut + cut / work.copy_ranks) / whole


def _over(work: Work) -> str:
    """Words for a formula that say over how many ranks the weights are cut; '' where they are whole."""
    return "" if work.copy_ranks == 1 else f", cut over {work.copy_ranks} ranks"
