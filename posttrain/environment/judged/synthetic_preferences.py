"""Judgements whose truth is known: by a taste (`Taste`), or made of right and false demonstrations (`judgements_of`).

A taste judges completions by a weighted sum of features, with the errors that people make. `Taste.utility` is what the
judge wanted, so what a preference loss or a reward model learned can be compared with the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.core.abilities import Judgements, Write
from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.system.errors import ConfigError, DataError, InvariantError

Features = Callable[[Task, str], Mapping[str, float]]
"""The features of a completion by name, each in 0..1."""
Writer = Callable[[Task, np.random.Generator], str]
"""Writes one completion of a task, of any quality."""

ANNOTATORS_SEED = 20_240_301
"""Seed of the annotators' weights. It is not the run's seed, so runs of different seeds have the same annotators."""
LEAST = 0.05
"""The least weight of a feature for any annotator, or half of the true weight where that is less."""
TRIES = 1000
"""After this many completions for one judgement, an error says that they do not differ enough."""
SCALE = 4
"""Ratings are whole numbers from 0 to this."""
# The kinds of judgement that a taste gives.
KINDS: tuple[Kind, ...] = ("pair", "ranking", "label", "rating")


@dataclass(frozen=True, kw_only=True)
class Taste:
    """The preferences of judges, and how well the judges keep to them. Without noise, temperature and further
    annotators every judgement follows the truth, `utility`, a weighted sum of features in 0..1."""

    features: Features
    weights: Mapping[str, float]
    """Weight of each feature. They sum to 1, so a utility lies in 0..1."""
    noise: float = 0.0
    """Share of judgements that are flipped: two places of a pair or ranking are exchanged, a label is the other one,
    and a rating is counted from the other end of the scale."""
    temperature: float = 0.0
    """Judges decide by Bradley-Terry: a is preferred with probability sigmoid((u_a - u_b) / temperature). Rankings are
    drawn by Plackett-Luce, labels with sigmoid((u - good) / temperature), and ratings get normal noise of this standard
    deviation on the scale 0..1. 0: the better one always wins."""
    annotators: int = 1
    """Number of judges, each with weights of its own; one of them, drawn at random, gives a judgement. Their mean
    weights are those of the truth, so a single judge has the weights of the truth."""
    ranked: int = 4
    """Completions in a ranking."""
    good: float = 0.5
    """A completion of at least this utility is labelled good."""
    margins: bool = False
    """Whether pairs say by how much the judge preferred one."""

    def __post_init__(self) -> None:
        def error(message: str) -> ConfigError:
            return ConfigError(f"Taste: {message}")

        if not self.weights or min(self.weights.values()) < 0 or not abs(sum(self.weights.values()) - 1) <= 1e-9:
            raise error(f"weights={dict(self.weights)}: weights of at least one feature, none below 0, with the sum 1")
        if not 0 <= self.noise <= 0.5:
            raise error(f"noise={self.noise}: the share of flipped judgements, in 0..0.5 (0.5 says nothing)")
        if not 0 <= self.temperature < float("inf"):
            raise error(f"temperature={self.temperature}: must be finite and not below 0")
        if self.annotators < 1:
            raise error(f"annotators={self.annotators}: at least 1")
        if not 2 <= self.ranked <= 64:
            raise error(f"ranked={self.ranked}: a ranking has 2 to 64 completions")

    def utility(self, task: Task, text: str) -> float:
        """The true value of a completion, in 0..1."""
        return self._value(task, text, self.weights)

    @cached_property
    def annotator_weights(self) -> tuple[Mapping[str, float], ...]:
        """The weights of each annotator. Each sums to 1, none is negative, and their mean is the truth."""
        truth = np.array(list(self.weights.values()))
        generators = (generator(ANNOTATORS_SEED, "taste/annotators", k) for k in range(self.annotators))
        # Each row of `drawn` [annotators, features] sums to 1. `away` is `drawn` minus its mean row, so its rows and
        # its columns sum to 0. For any factor s, the rows of truth + s * away sum to 1 and their mean is the truth. The
        # factor is the largest one up to 1 with which no weight falls below `least`.
        drawn = np.array([rng.dirichlet(np.full(len(truth), 2.0)) for rng in generators])
        away = drawn - drawn.mean(0)
        least = np.minimum(truth / 2, LEAST)
        largest_factors = (truth - least)[None] / np.maximum(-away, 1e-12)
        weights = truth + min(1.0, float(largest_factors.min())) * away
        return tuple(dict(zip(self.weights, (float(w) for w in row), strict=True)) for row in weights)

    def judgements(self, write: Writer) -> Judgements:
        """The ability of an environment whose completions `write` writes."""

        def draw(task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
            return self.draw(task, kind, rng, write)

        return Judgements(kinds=KINDS, draw=draw, utility=self.utility, features=self.features, good=self.good)

    def draw(self, task: Task, kind: Kind, rng: np.random.Generator, write: Writer) -> Judgement:
        """A judgement of completions that `write` writes, a function of the task, the kind and `rng`."""
        weights = self.annotator_weights[int(rng.integers(self.annotators))]
        match kind:
            case "pair":
                texts, values = self._written(task, 2, weights, rng, write)
                best, other = self._order(values, rng)
                gap = abs(values[best] - values[other]) if self.margins else None
                return Pair(task=task, chosen=texts[best], rejected=texts[other], margin=gap)
            case "ranking":
                texts, values = self._written(task, self.ranked, weights, rng, write)
                return Ranking(task=task, completions=tuple(texts[i] for i in self._order(values, rng)))
            case "label":
                text = write(task, rng)
                return Label(task=task, completion=text, good=self._good(self._value(task, text, weights), rng))
            case "rating":
                text = write(task, rng)
                return Rating(task=task, completion=text, ratings=self._ratings(task, text, weights, rng))
            case _:
                raise ConfigError(f"a taste gives judgements of the kinds {', '.join(KINDS)}, not {kind!r}")

    def _value(self, task: Task, text: str, weights: Mapping[str, float]) -> float:
        """The utility of a completion with these weights."""
        features = self.features(task, text)
        return float(sum(weight * features[name] for name, weight in weights.items()))

    def _written(
        self, task: Task, count: int, weights: Mapping[str, float], rng: np.random.Generator, write: Writer
    ) -> tuple[list[str], list[float]]:
        """(different completions, the utility of each to this annotator).

        With temperature 0 no two utilities are equal, because nothing would decide which completion is better.
        """
        texts: list[str] = []
        values: list[float] = []
        for _ in range(TRIES):
            text = write(task, rng)
            value = self._value(task, text, weights)
            tied = not self.temperature and any(abs(value - v) < 1e-9 for v in values)
            if text not in texts and not tied:
                texts.append(text)
                values.append(value)
            if len(texts) == count:
                return texts, values
        raise ConfigError(
            f"task {task.id!r}: {TRIES} completions gave {len(texts)} of {count} that differ for the judge. Let the"
            " writer vary more, or lower `ranked`"
        )

    def _order(self, values: list[float], rng: np.random.Generator) -> list[int]:
        """Indices of the completions, the preferred one first, after the judge's errors."""
        # Sorted by u / temperature + Gumbel noise, the completions have the distribution of Plackett-Luce, which is
        # Bradley-Terry for two. Both terms are multiplied by the temperature here, so that 0 is allowed too.
        noisy = np.array(values) + self.temperature * rng.gumbel(size=len(values))
        order = [int(i) for i in np.argsort(-noisy, kind="stable")]
        if rng.random() < self.noise:
            i, j = (int(k) for k in rng.choice(len(order), size=2, replace=False))
            order[i], order[j] = order[j], order[i]
        return order

    def _good(self, value: float, rng: np.random.Generator) -> bool:
        """Whether the annotator calls a completion of this utility good, after the annotator's errors."""
        # P(value + temperature * logistic noise >= good) is sigmoid((value - good) / temperature). Both random numbers
        # are always drawn, so that a change of `noise` or `temperature` does not change the draws of the other.
        drawn, flipped = rng.logistic(), rng.random() < self.noise
        return bool(value + self.temperature * drawn >= self.good) != flipped

    def _ratings(
        self, task: Task, text: str, weights: Mapping[str, float], rng: np.random.Generator
    ) -> dict[str, float]:
        """Each feature and `overall`, in whole numbers from 0 to `SCALE`."""
        values = {**self.features(task, text), "overall": self._value(task, text, weights)}
        flipped = rng.random() < self.noise
        ratings: dict[str, float] = {}
        for name, value in values.items():
            rated = float(np.clip(np.rint(SCALE * (value + self.temperature * rng.normal())), 0, SCALE))
            ratings[name] = SCALE - rated if flipped else rated
        return ratings


DEMONSTRATED: tuple[Kind, ...] = ("pair", "label")
"""The kinds of judgement that demonstrations give."""


def judgements_of(write: Write, style: str) -> Judgements:
    """Judgements of the demonstrations of one style: pairs of a right and a false one, and labels of single ones."""

    def draw(task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
        if kind not in DEMONSTRATED:
            raise ConfigError(f"demonstrations give judgements of kind {' and '.join(DEMONSTRATED)}, and not {kind!r}")
        # Both texts are written with one seed. A pair that differed in more than the error would teach that difference.
        seed = int(rng.integers(1 << 62))
        right, false = (_text(write, task, style, seed, wrong) for wrong in (0.0, 1.0))
        if kind == "label":
            good = bool(rng.random() < 0.5)
            return Label(task=task, completion=right if good else false, good=good)
        if right == false:
            raise DataError(f"the right and the false demonstration of task {task.id!r} are the same text: {right!r}")
        return Pair(task=task, chosen=right, rejected=false)

    return Judgements(kinds=DEMONSTRATED, draw=draw)


def _text(write: Write, task: Task, style: str, seed: int, wrong: float) -> str:
    """The text of a demonstration with this seed."""
    _, completion = write(task, style, np.random.default_rng(seed), wrong)
    if not isinstance(completion, str):
        raise InvariantError(
            f"style {style!r} writes episodes of several turns, and a judgement is about one completion: set the"
            " environment's judged_style to a style of one turn, or to ''"
        )
    return completion
