"""The inputs of an algorithm, and what a step costs beside rollout and learning, read from its choices. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.ladder.algorithm import Algorithm

ANCHOR = {"behaviour": "sampler", "start": "start", "proximal": "proximal"}
"""The word of each anchor in tables."""


@dataclass(frozen=True)
class Cost:
    """Costs beside one rollout, one forward and one backward pass per token."""

    forwards: int
    """Forward passes without gradient over every token of the step."""
    late: int
    """Further such passes where a step has several optimizer steps."""
    passes: tuple[str, ...]
    """Each of these passes in words."""
    generation: tuple[str, ...]
    memory: tuple[str, ...]


def anchor(a: Algorithm) -> str:
    """The denominator of the ratio; '' where no ratio is computed."""
    return ANCHOR[a.anchor] if a.forms_ratio else ""


def reads(a: Algorithm) -> tuple[str, ...]:
    """Returns the inputs of credit and loss beside those that the sampler stores with every sampled token."""
    inputs = (
        ("log-probs at the start of the step", "start" in a.reads),
        ("reference", "reference" in a.reads),
        ("values", "values" in a.reads),
        ("entropy", "entropy" in a.reads or a.entropy is not None),
        ("energies", "energy" in a.reads),
        ("implicit process rewards", "implicit" in a.reads),
        # With rewards=none the reference of a KL is the teacher.
        ("teacher", "teacher" in a.reads or a.rewards == "none"),
        *((p.uses(), True) for p in a.pieces if p.uses()),
        ("each reward source", a.rewards == "each"),
        ("versions of the weights", a.anchor == "proximal"),
    )
    return tuple(name for name, yes in inputs if yes)


def cost(a: Algorithm) -> Cost:
    """The costs of a step of this algorithm."""
    # One pass of the layers gives all of the policy's own numbers (`core.streams.OWN`), so they are counted as one.
    outputs = (
        ("the policy at the start of the step", a.start_before_loss),
        ("the values", "values" in a.reads),
        ("the policy's entropies", "entropy" in a.reads),
        ("the policy's energies, |d log pi / d logits|^2", "energy" in a.reads),
    )
    of_policy = " with ".join(name for name, yes in outputs if yes)
    before_loss = (
        (of_policy, of_policy != ""),
        ("the reference", "reference" in a.reads),
        ("the implicit process reward model, which also learns from every token", "implicit" in a.reads),
        ("the teacher's distributions", "teacher" in a.reads),
    )
    passes = [name for name, yes in before_loss if yes]
    late: list[str] = []
    # Where the policy makes a pass anyway, that pass gives START too.
    if "start" in a.reads and not of_policy:
        late.append("the policy at the start of the step, where a step takes several optimizer steps")
    if a.tokens is not None and a.tokens.reads_now:
        late.append("the policy before every optimizer step of a batch but the first")
    return Cost(len(passes), len(late), (*passes, *late), tuple(_generation(a)), tuple(_memory(a)))


def _generation(a: Algorithm) -> list[str]:
    """What the algorithm costs while sampling, in words."""
    of_pieces = [text for p in a.pieces if (text := p.samples())]
    return of_pieces + (["groups asked again until the step is full"] if a.filter is not None else [])


def _memory(a: Algorithm) -> list[str]:
    """What the algorithm keeps in memory, in words."""
    out: list[str] = []
    # A teacher that has the policy's present weights, or averages that the optimizer keeps anyway, needs no copy.
    if a.reads & {"reference", "teacher"} and not a.own_teacher:
        out.append("a copy of the weights")
    if "values" in a.reads:
        out.append("a value head")
    return out + [text for p in a.pieces if (text := p.memory())]
