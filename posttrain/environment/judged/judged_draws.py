"""Draws pairs, rankings, labels, ratings, labels of steps, and texts to imitate from rows of judged data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.core.judgements import Judgement, Kind, Label, Pair, Ranking, Rating, StepLabels
from posttrain.core.measure.answer_steps import joined
from posttrain.core.types import Task
from posttrain.environment.rows.columns import JudgedColumns
from posttrain.environment.rows.row_reader import JudgedRow, PromptRow
from posttrain.system.errors import DataError, nearest


@dataclass(frozen=True)
class WorthRow:
    """A completion, how good it is (higher is better), and the row that it comes from."""

    completion: str
    value: float
    row: PromptRow


@dataclass(frozen=True)
class JudgedData:
    """The judged rows of a data set, all of one kind. A task is a row.

    A judgement of the rows' own kind is drawn as it stands in the data. A pair can also be made from a ranking, or from
    rated or labelled completions of one prompt: two of which one was judged better, drawn as `JudgedColumns.pairs`
    says. A pair also gives labels: its chosen side is good, its rejected side is not.
    """

    rows: tuple[PromptRow, ...]
    columns: JudgedColumns

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of judgement that every row can give; first the rows' own kind."""
        # A pair is also a ranking of two, and two labels. A ranking or rating gives no label, because the data do not
        # say from which value on a completion is good.
        own_kind = self._judged[0].kind
        can_give: dict[Kind, bool] = {own_kind: own_kind != "ranking" or self._ordered}  # with ties there is no order
        can_give["pair"] = own_kind != "steps" and not self.unpaired
        can_give["ranking"] = can_give.get("ranking", False) or own_kind == "pair"
        can_give["label"] = own_kind in ("label", "pair")
        return tuple(kind for kind, possible in can_give.items() if possible)

    @cached_property
    def unpaired(self) -> tuple[PromptRow, ...]:
        """Rows of which no pair can be made: nothing of their prompt was judged better than anything else there."""
        without_pair = {key: len({w.value for w in group}) < 2 for key, group in self._groups.items()}
        return tuple(r for r in self.rows if r.judged is not None and without_pair[self._group_of(r)])

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """Texts to imitate, by the task's id: the chosen side of a pair, the best completion of a ranking or of the
        prompt, or steps that are all right. A task without one is missing."""
        best = {row.task.id: self._best(row) for row in self.rows}
        return {task_id: text for task_id, text in best.items() if text is not None}

    def draw(self, task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
        """A judgement of this kind about a task of the data (`core.abilities.Draw`)."""
        row = self._by_id.get(task.id)
        if row is None or row.judged is None:
            raise DataError(f"task {task.id!r} is no row of the judged data")
        if kind not in self.kinds:
            raise DataError(
                f"{row.place}: rows judged as {row.judged.kind} give no {kind}: {nearest(kind, self.kinds)}"
            )
        judged, place = row.judged, row.place
        if kind == "pair":
            return self._pair(row, judged, rng)
        if kind == "label":
            i = int(rng.integers(len(judged.completions))) if len(judged.completions) > 1 else 0
            return self._labels(row, judged)[i]
        if kind == "ranking":
            order = sorted(range(len(judged.values)), key=lambda i: -judged.values[i])
            return Ranking(task=task, place=place, completions=tuple(judged.completions[i] for i in order))
        if kind == "rating":
            return Rating(task=task, place=place, completion=judged.completions[0], ratings=judged.ratings)
        steps, separator = judged.completions, self.columns.separator
        return StepLabels(
            task=task, place=place, steps=steps, labels=judged.labels, values=judged.chances, separator=separator
        )

    def every(self, task: Task, kind: Kind) -> Sequence[Judgement]:
        """Judgements that together have every completion that `draw` may give of this task. Empty where `draw` gives
        the row's own judgement, which has them all."""
        row = self._by_id[task.id]
        judged = row.judged
        if judged is not None and kind == "label":
            return self._labels(row, judged)
        if judged is None or kind != "pair" or judged.kind == "pair":
            return ()
        pair_with = {i: pair for pair in self._pairs(row) for i in pair}  # a pair for each completion, by its index
        return [self._pair_of(row, judged, pair) for pair in dict.fromkeys(pair_with.values())]

    def _labels(self, row: PromptRow, judged: JudgedRow) -> list[Label]:
        judged_texts = zip(judged.completions, judged.values, strict=True)
        return [Label(task=row.task, place=row.place, completion=text, good=value > 0) for text, value in judged_texts]

    def _pair(self, row: PromptRow, judged: JudgedRow, rng: np.random.Generator) -> Pair:
        """The pair of a row, or one that is drawn from the completions that belong together with it."""
        if judged.kind == "pair":
            chosen, rejected = judged.completions
            further = {"margin": judged.margin, "weight": judged.weight}
            return Pair(task=row.task, place=row.place, chosen=chosen, rejected=rejected, **further)
        pairs = self._pairs(row)
        return self._pair_of(row, judged, pairs[int(rng.integers(len(pairs)))])

    def _pairs(self, row: PromptRow) -> list[tuple[int, int]]:
        """Indices, in the group of a row, of the pairs that can be made of it."""
        values = [w.value for w in self._groups[self._group_of(row)]]
        # There is at least one pair, because `kinds` has `pair` only where no row is `unpaired`.
        better = range(len(values)) if self.columns.pairs == "any" else _indices_of(values, max(values))
        worse = _indices_of(values, min(values)) if self.columns.pairs == "ends" else range(len(values))
        return [(i, j) for i in better for j in worse if values[i] > values[j]]

    def _pair_of(self, row: PromptRow, judged: JudgedRow, pair: tuple[int, int]) -> Pair:
        better, worse = (self._groups[self._group_of(row)][i] for i in pair)
        place = " and ".join(dict.fromkeys((better.row.place, worse.row.place)))
        chosen, rejected = better.completion, worse.completion
        margin = better.value - worse.value if judged.scored else None
        return Pair(task=row.task, place=place, chosen=chosen, rejected=rejected, margin=margin)

    @cached_property
    def _groups(self) -> Mapping[str, Sequence[WorthRow]]:
        """The completions that are compared with each other: those of a row, or all single ones of a prompt."""
        groups: dict[str, list[WorthRow]] = {}
        for row, judged in zip(self.rows, self._judged, strict=True):
            # A row without values has steps, or several ratings, and the settings name none of them to compare by.
            worth = zip(judged.completions, judged.values, strict=True) if judged.values else ()
            groups.setdefault(self._group_of(row), []).extend(WorthRow(text, value, row) for text, value in worth)
        return groups

    def _group_of(self, row: PromptRow) -> str:
        """The name of the group of a row: its prompt's digest for single completions, else the row itself."""
        return row.key if row.judged is not None and row.judged.kind in ("label", "rating") else f"row {row.task.id}"

    @cached_property
    def _judged(self) -> tuple[JudgedRow, ...]:
        return tuple(r.judged for r in self.rows if r.judged is not None)

    @cached_property
    def _by_id(self) -> Mapping[str, PromptRow]:
        return {r.task.id: r for r in self.rows}

    @cached_property
    def _ordered(self) -> bool:
        """True where no two completions of a row were judged equal."""
        return all(len(set(judged.values)) == len(judged.values) for judged in self._judged)

    def _best(self, row: PromptRow) -> str | None:
        """The text to imitate of a row; None if there is none."""
        judged = row.judged
        if judged is None or (judged.kind == "steps" and min(judged.labels) < 0):
            return None
        if judged.kind == "steps":
            return joined(judged.completions, self.columns.separator)[0]
        group = self._groups[self._group_of(row)]
        if not group:
            return None
        best = max(w.value for w in group)
        if judged.kind == "label" and not best:
            return None
        # A completion of the row itself, if it is as good as the best one of its prompt. Else the first best one of
        # another row.
        values = dict(zip(judged.completions, judged.values, strict=True))
        return next((t for t, v in values.items() if v == best), next(w.completion for w in group if w.value == best))


def _indices_of(values: Sequence[float], value: float) -> list[int]:
    """The indices at which a value stands."""
    return [i for i, x in enumerate(values) if x == value]
