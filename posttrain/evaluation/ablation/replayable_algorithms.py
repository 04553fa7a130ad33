"""The algorithms that a recorded step can evaluate, and what is missing for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.evaluation.ablation.recorded_step import RecordedStep
from posttrain.ladder.algorithm import Algorithm

_MISSING = {"steps": "no step was judged", "paid": "no turn was paid", "turns": "episodes of one turn"}
"""The note for each fact that a baseline needs of episodes (`Baseline.facts`), where the record does not have it."""


@dataclass(frozen=True)
class RecordedFacts:
    """Facts of one recorded step that some algorithms need."""

    own: Algorithm
    """The run's own algorithm."""
    values: bool
    """Whether it learned values."""
    greedy: bool
    """Whether there are greedy answers."""
    shown: bool
    """Whether there are demonstrations among the siblings."""
    top: int
    """Number of the sampler's most probable tokens that are stored with every token."""
    teacher: bool
    """Whether the stage names a reference model."""
    sources: int
    """Number of reward sources."""
    steps: bool
    """Whether steps of answers have scores that are not paid."""
    paid: bool
    """Whether single turns were paid."""
    turns: bool
    """Whether some episode has several turns."""
    remembered: bool
    """Whether the adaptive state of the run's own algorithm before this step is known."""

    @staticmethod
    def of(recorded: RecordedStep, own: Algorithm, remembered: bool) -> RecordedFacts:
        episodes = [r.episode for r in recorded.records]
        verdicts = [j for e in episodes for j in e.verdicts]
        return RecordedFacts(
            own=own,
            values=own.learns_values is not None,
            greedy=any(s.sampling.greedy for e in episodes for s in e.segments),
            shown=any(e.shown for e in episodes),
            top=recorded.top,
            teacher=recorded.stage.reference is not None,
            sources=len({j.source for j in verdicts if j.counts}),
            steps=any(j.end is not None and not j.paid for j in verdicts),
            paid=any(j.paid for j in verdicts),
            turns=any(len(e.turns) > 1 for e in episodes),
            remembered=remembered,
        )

    def lacks(self, a: Algorithm) -> str:
        """Returns the reason why this record cannot evaluate `a`; '' where it can.

        The reason names the setting that a run would have needed.
        """
        if a.learns_values is not None and not self.values:
            return f"reads values, and {self.own.name} trained none: only a run of an algorithm with values has them"
        if "implicit" in a.reads:
            return "reads an implicit process reward model, and no record stores the weights of one: baseline=others"
        if a.baseline.greedy and not self.greedy:
            return (
                f"reads the greedy answer of each prompt, and {self.own.name} asked for none: baseline=greedy samples"
                " them"
            )
        if (a.shown is not None or (a.imitate is not None and a.imitate.of == "shown")) and not self.shown:
            return (
                f"reads demonstrations among the siblings, and {self.own.name} showed none: shown=shown puts them there"
            )
        if a.stores_top > self.top:
            stored = f"{self.top} were" if self.top else "none were"
            return f"reads the sampler's {a.stores_top} most probable tokens, and {stored} stored: clip.top stores them"
        if a.hint is not None:
            return "its teacher reads prompts with a hint, which only a run's own environment writes"
        if (a.distill is not None or a.rewards == "none") and not self.teacher:
            return "learns from a teacher, and the stage names none: reference=PATH does"
        if a.baseline.moving and not (a == self.own and self.remembered) and (a.shape or "reference" in a.reads):
            return (
                "its moving baseline depends on shaped rewards of earlier steps, which cannot be replayed from the"
                " record"
            )
        return ""

    def caveats(self, a: Algorithm) -> Iterator[str]:
        """Yields the differences between the evaluation of `a` on this record and a run of `a` itself."""
        if a.distill is not None:
            yield "its gradient runs through whole distributions, not through said tokens"
        if a == self.own:
            return
        if self.own.filter == "mixed" and a.filter is None:
            yield "groups without spread were turned away and are not recorded"
        if self.shown and a.shown is None:
            yield "shown siblings left out"
        if a.rewards == "each" and self.sources < 2:
            yield "one reward source"
        has = {"steps": self.steps, "paid": self.paid, "turns": self.turns}
        yield from (_MISSING[fact] for fact in a.baseline.facts if not has[fact])
        if a.entropy is not None and a.entropy.target is not None:
            yield f"entropy coefficient as configured ({a.entropy.coef:g})"
        if a.learns_values is not None and a.learns_values != self.own.learns_values:
            yield f"values trained by {self.own.name}"
