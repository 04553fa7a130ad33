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
    """A completion with how good it is, and the row that says so."""

    completion: str
    value: float
    row: PromptRow


@dataclass(frozen=True)
class JudgedData:
    """The judged rows of a data set, all of one kind.

    A task is a row. What a row gives of its own kind is drawn as it stands. A pair is made of a ranking, of rated
    completions or of labelled ones: two completions of the same prompt of which one was judged better, drawn by
    `JudgedColumns.pairs`. A pair gives a label too: its chosen side is good, its rejected side is not.
    """

    rows: tuple[PromptRow, ...]
    columns: JudgedColumns

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of judgement that every row can give; first the rows' own kind."""
        # All rows are of one kind (`data_rows`), so the first one tells it. A pair is also a ranking of two and
        # two labels; a ranking or rating is no label, since nothing says from where on it is good.
        own = self._judged[0].kind
        out: dict[Kind, bool] = {own: own != "ranking" or self._ordered}
        out["pair"] = own != "steps" and not self.unpaired
        out["ranking"] = out.get("ranking", False) or own == "pair"
        out["label"] = own in ("label", "pair")
        return tuple(kind for kind, can in out.items() if can)

    @cached_property
    def unpaired(self) -> tuple[PromptRow, ...]:
        """Rows of which no pair can be made: nothing of their prompt was judged better than anything else there."""
        found = {key: len({w.value for w in group}) < 2 for key, group in self._groups.items()}
        return tuple(r for r in self.rows if r.judged is not None and found[self._group_of(r)])

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """A text to imitate by the task's id: the chosen side, the best of a ranking, a good completion of the prompt,
        steps that are all right. Tasks without one are missing."""
        out: dict[str, str] = {}
        for row in self.rows:
            if (text := self._best(row)) is not None:
                out[row.task.id] = text
        return out

    def draw(self, task: Task, kind: Kind, rng: np.random.Generator) -> Judgement:
        """A judgement of this kind about a task of the data (`core.abilities.Draw`)."""
        row = self._by_id.get(task.id)
        if row is None or row.judged is None:
            raise DataError(f"task {task.id!r} is no row of the judged data")
        if kind not in self.kinds:
            raise DataError(
                f"{row.place}: rows judged as {row.judged.kind} give no {kind}: {nearest(kind, self.kinds)}"
            )
        found, place = row.judged, row.place
        if kind == "pair":
            return self._pair(row, found, rng)
        if kind == "label":
            i = int(rng.integers(len(found.completions))) if len(found.completions) > 1 else 0
            return Label(task=task, place=place, completion=found.completions[i], good=found.values[i] > 0)
        if kind == "ranking":
            order = sorted(range(len(found.values)), key=lambda i: -found.values[i])
            return Ranking(task=task, place=place, completions=tuple(found.completions[i] for i in order))
        if kind == "rating":
            return Rating(task=task, place=place, completion=found.completions[0], ratings=found.ratings)
        steps, separator = found.completions, self.columns.separator
        return StepLabels(
            task=task, place=place, steps=steps, labels=found.labels, values=found.chances, separator=separator
        )

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _pair(self, row: PromptRow, found: JudgedRow, rng: np.random.Generator) -> Pair:
        if found.kind == "pair":
            chosen, rejected = found.completions
            own = {"margin": found.margin, "weight": found.weight}
            return Pair(task=row.task, place=row.place, chosen=chosen, rejected=rejected, **own)
        group = self._groups[self._group_of(row)]
        values = [w.value for w in group]
        # Indices of possible chosen and rejected completions. Only pairs in which one was judged better are
        # kept; `unpaired` made sure that there is one.
        over = range(len(group)) if self.columns.pairs == "any" else _at(values, max(values))
        under = _at(values, min(values)) if self.columns.pairs == "ends" else range(len(group))
        pairs = [(i, j) for i in over for j in under if values[i] > values[j]]
        i, j = pairs[int(rng.integers(len(pairs)))]
        place = " and ".join(dict.fromkeys((group[i].row.place, group[j].row.place)))
        chosen, rejected = group[i].completion, group[j].completion
        margin = values[i] - values[j] if found.scored else None
        return Pair(task=row.task, place=place, chosen=chosen, rejected=rejected, margin=margin)

    @cached_property
    def _groups(self) -> Mapping[str, Sequence[WorthRow]]:
        """The completions that are compared with each other: those of a row, or all single ones of a prompt."""
        out: dict[str, list[WorthRow]] = {}
        for row, found in zip(self.rows, self._judged, strict=True):
            # a row without values has steps, or ratings of which none was named to compare them by
            worth = zip(found.completions, found.values, strict=True) if found.values else ()
            out.setdefault(self._group_of(row), []).extend(WorthRow(text, value, row) for text, value in worth)
        return out

    def _group_of(self, row: PromptRow) -> str:
        return row.key if row.judged is not None and row.judged.kind in ("label", "rating") else f"row {row.task.id}"

    # --- rows -------------------------------------------------------------------------------------------------------

    @cached_property
    def _judged(self) -> tuple[JudgedRow, ...]:
        return tuple(r.judged for r in self.rows if r.judged is not None)

    @cached_property
    def _by_id(self) -> Mapping[str, PromptRow]:
        return {r.task.id: r for r in self.rows}

    @cached_property
    def _ordered(self) -> bool:
        """True where no two completions of a row were judged equal."""
        return all(len(set(found.values)) == len(found.values) for found in self._judged)

    def _best(self, row: PromptRow) -> str | None:
        found = row.judged
        if found is None or (found.kind == "steps" and min(found.labels) < 0):
            return None
        if found.kind == "steps":
            return joined(found.completions, self.columns.separator)[0]
        group = self._groups[self._group_of(row)]
        if not group:
            return None
        best = max(w.value for w in group)
        if found.kind == "label" and not best:
            return None
        # The row's own text if it is as good as the best of its prompt, else the first best one of another row.
        own = dict(zip(found.completions, found.values, strict=True))
        return next((t for t, v in own.items() if v == best), next(w.completion for w in group if w.value == best))


def _at(values: Sequence[float], value: float) -> list[int]:
    return [i for i, x in enumerate(values) if x == value]
