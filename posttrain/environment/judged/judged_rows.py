"""Judged rows of the user's data, read strictly: pairs, ranked lists, labels, ratings, labels of steps.

The kind of a row follows from its columns, by the names that TRL uses; settings (`JudgedColumns`) give other names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.core.types import Message
from posttrain.environment.judged.judged_formats import format_of, standard
from posttrain.environment.judged.shared_prompt import SharedPrompt, UnfitRow, sides
from posttrain.environment.rows.columns import JudgedColumns
from posttrain.environment.rows.row_reader import (
    JudgedRow,
    Place,
    PromptRow,
    completion_of,
    digest,
    kind_words,
    placed,
    prompt_of,
    row_of,
    task_of,
    without_halves,
    without_nulls,
)
from posttrain.system.errors import DataError

MOST_COMPLETIONS = 1024
"""The most completions or steps of a row."""
T = TypeVar("T")


def read_row(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow | UnfitRow:
    """One checked row with its judgement; or an `UnfitRow`, where `leave_out` leaves such rows out. DataError with the
    row's place if it is not what its columns say."""
    with placed(place):
        try:
            return replace(_read(c.with_fields(data), c), place=place)
        except UnfitRow as unfit:
            if unfit.finding in c.left_out:
                return unfit
            raise DataError(str(unfit)) from None


def _read(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """The row, in the form of a known data set, or of the kind that its columns say."""
    if format_of(data, c):
        row = _steps(standard(data, c), c)
        return replace(row, judged=row.judged and replace(row.judged, zero_is_neutral=True))
    kind = kind_of(data, c)
    return _demonstration(data, c) if kind == "none" else READERS[kind](data, c)


def kind_of(data: Mapping[str, Any], c: JudgedColumns) -> str:
    """Returns the kind of judgement that a row has, by its columns; `none` where it was not judged."""
    if c.judged != "auto":
        return c.judged

    def has(column: str) -> bool:
        return data.get(column) is not None

    side_columns = [c.chosen_column, c.rejected_column]
    # The signs come in order, the most certain one first. Only a pair has columns such as `chosen`. A column `label`
    # beside a completion may mean something else.
    if any(has(x) for x in side_columns):
        if missing := [x for x in side_columns if not has(x)]:
            present = next(x for x in side_columns if x not in missing)
            raise DataError(
                f"there is {present!r} and no {missing[0]!r}: give both sides of the pair (env.args."
                f"chosen_column, env.args.rejected_column), or set env.args.judged=none if {present!r} is no judgement"
            )
        return "pair"
    if isinstance(data.get(c.completions_column), list):
        return "steps" if has(c.labels_column) else "ranking"
    if not has(c.completion_column):
        return "none"
    rated = has(c.ratings_column) or any(_is_number(data.get(a)) for a in c.rated)
    labelled = isinstance(data.get(c.label_column), bool) or data.get(c.label_column) in (0, 1)
    if rated and labelled:
        raise DataError("the completion has a label and ratings: say which, env.args.judged=label or rating")
    return "rating" if rated else "label" if labelled else "none"


def misread(row: PromptRow, c: JudgedColumns) -> str:
    """What is wrong with a column of judgements in a row that was read as not judged; '' without such a column."""
    info, truth = row.task.info, "true or false, 1 or 0 (no text)"
    forms = {c.label_column: truth, c.ratings_column: "an object of numbers", c.completions_column: "a list"}
    for name, form in {**dict.fromkeys(c.rated, "a number"), **forms}.items():
        if (value := info.get(name)) is not None:
            no_completion = f"; and there is no {c.completion_column!r} (env.args.completion_column)"
            note = "" if row.completion is not None or name == c.completions_column else no_completion
            return f"{row.place}: {name!r} is {kind_words(value)} ({value!r:.40}), and a judgement is {form}{note}"
    return ""


def also_judged(row: PromptRow, c: JudgedColumns) -> str:
    """Another kind of judgement that the row's columns could mean; '' if there is none, or if the settings say it."""
    if row.judged is None or c.judged != "auto":
        return ""
    # The kind is found again without the columns of the pair. A demonstration beside a pair was taken out of `info`, so
    # an empty completion stands for it.
    has_completion = row.completion is not None or row.task.info.get(c.completion_column) is not None
    other_columns = {k: v for k, v in row.task.info.items() if k not in (c.chosen_column, c.rejected_column)}
    with placed(row.place):
        other = kind_of({**other_columns, **({c.completion_column: ""} if has_completion else {})}, c)
    return "" if other in ("none", row.judged.kind) else other


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(column: str, value: Any) -> float:
    """A finite number of a row."""
    if not _is_number(value):
        raise DataError(f"{column!r} is {kind_words(value)}, wanted a number")
    try:
        finite = float(value)
    except OverflowError:
        raise DataError(f"{column!r} is a whole number of {value.bit_length()} bits, too large") from None
    if not math.isfinite(finite):
        raise DataError(f"{column!r} is {finite}, wanted a finite number; leave the row out, or give its number")
    return finite


def _pair(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row with a chosen and a rejected completion."""
    names = (c.chosen_column, c.rejected_column)
    for name in names:
        _required(data, name)
    shared = sides(_prompt(data, c), [(n, data[n]) for n in names], c.prompt_column)
    chosen, rejected = shared.completions
    if chosen == rejected:
        raise UnfitRow("identical", f"{names[0]!r} and {names[1]!r} are the same text")
    margin, weight = (
        number(n, data[n]) if n and data.get(n) is not None else None for n in (c.margin_column, c.weight_column)
    )
    for name, value in ((c.margin_column, margin), (c.weight_column, weight)):
        if value is not None and value < 0:
            raise DataError(f"{name!r} is {value:g}, below 0: the chosen side would count as the worse one")
    judged = JudgedRow("pair", shared.completions, (1.0, 0.0), margin=margin, weight=1.0 if weight is None else weight)
    row = _row(data, c, shared, judged, {*names, c.margin_column, c.weight_column, c.completion_column})
    demonstration = data.get(c.completion_column)
    return row if demonstration is None else replace(row, completion=completion_of(demonstration, c))


def _ranking(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row with several completions of one prompt, in order or with scores or ranks."""
    name = c.completions_column
    completions = _each(data, name, None, lambda entry, value: (entry, value))
    if len(completions) < 2:
        raise DataError(f"{name!r} has {len(completions)} completions, and a ranking orders at least 2")
    shared = sides(_prompt(data, c), completions, c.prompt_column)
    columns = [n for n in (c.scores_column, c.ranks_column) if data.get(n) is not None]
    if len(columns) > 1:
        raise DataError(f"there are {columns[0]!r} and {columns[1]!r}; give one of them")
    # Without numbers the order of the list is the judgement: the first completion is worth most. A lower rank is
    # better, so ranks are negated.
    values = tuple(float(len(completions) - i) for i in range(len(completions)))
    if columns:
        numbers = _each(data, columns[0], len(completions), number)
        values = tuple(numbers) if columns[0] == c.scores_column else tuple(-x for x in numbers)
    # Equal texts may have equal values. With different values the row contradicts itself.
    worth: dict[str, float] = {}
    for text, value in zip(shared.completions, values, strict=True):
        if worth.setdefault(text, value) != value:
            raise UnfitRow("identical", f"two of {name!r} are the same text, judged differently")
    if len(set(values)) == 1:
        raise UnfitRow("unpaired", f"all of {columns[0]!r} are {number(columns[0], data[columns[0]][0]):g}")
    judged = JudgedRow("ranking", shared.completions, values, scored=columns == [c.scores_column])
    return _row(data, c, shared, judged, {name, c.scores_column, c.ranks_column})


def _label(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row with one completion that is good or bad."""
    shared = _single(data, c)
    good = data.get(c.label_column)
    if not isinstance(good, bool) and good not in (0, 1):
        raise DataError(f"{c.label_column!r} is {kind_words(good)}, wanted true or false, 1 or 0")
    judged = JudgedRow("label", shared.completions, (float(good),))
    return _row(data, c, shared, judged, {c.completion_column, c.label_column})


def _rating(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row with one completion and a number for each attribute."""
    shared = _single(data, c)
    by_attribute = data.get(c.ratings_column)
    if by_attribute is None:
        by_attribute = {a: data[a] for a in c.rated if data.get(a) is not None}
    if not isinstance(by_attribute, Mapping) or not by_attribute:
        raise DataError(
            f"no ratings: give {c.ratings_column!r}, an object with a number for each attribute, or columns of numbers"
            " (env.args.attributes)"
        )
    ratings = {without_halves(c.ratings_column, str(a)): number(str(a), v) for a, v in by_attribute.items()}
    # Completions can be compared by an attribute if it is the only one, or if `attribute` names it. Otherwise the row
    # is read without a value, and no pair can be made of it.
    compared = c.attribute or (next(iter(ratings)) if len(ratings) == 1 else "")
    if compared and compared not in ratings:
        raise DataError(f"env.args.attribute={compared!r} is not among the ratings {', '.join(ratings)}")
    values = (ratings[compared],) if compared else ()
    judged = JudgedRow("rating", shared.completions, values, scored=True, ratings=ratings)
    return _row(data, c, shared, judged, {c.completion_column, c.ratings_column, *c.rated})


def _steps(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row with the steps of one completion and a label for each."""
    prompt = _prompt(data, c)
    if prompt is None:
        raise DataError(f"no column {c.prompt_column!r} (env.args.prompt_column); give the prompt")
    column = data.get(c.completions_column)
    steps = _each(data, c.completions_column, None, _step)
    if not steps:
        raise DataError(f"{c.completions_column!r} is {kind_words(column)}, wanted at least one step")
    labels = _each(data, c.labels_column, len(steps), lambda n, v: _step_label(n, v, c))
    chances: list[float] = []
    if data.get(c.values_column) is not None:
        chances = _each(data, c.values_column, len(steps), _chance)
    judged = JudgedRow("steps", tuple(steps), labels=tuple(labels), chances=tuple(chances))
    read = {c.completions_column, c.labels_column, c.values_column}
    return _row(data, c, SharedPrompt(prompt, tuple(steps)), judged, read)


READERS: dict[str, Callable[[Mapping[str, Any], JudgedColumns], PromptRow]] = {
    "pair": _pair,
    "ranking": _ranking,
    "label": _label,
    "rating": _rating,
    "steps": _steps,
}
"""The reader of each kind of row."""


def _prompt(data: Mapping[str, Any], c: JudgedColumns) -> str | tuple[Message, ...] | None:
    """The row's own prompt; None if the row has no column of it, because the completions begin with the prompt."""
    if data.get(c.prompt_column) is None:
        return None
    prompt, answer = prompt_of(data, c)
    if answer is not None:
        raise DataError(
            f"{c.prompt_column!r} ends with the assistant's message, and what was judged comes after it: take the"
            " message out, or move it into each completion"
        )
    return prompt


def _demonstration(data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row in which nothing was judged. The tools beside a completion belong to its prompt."""
    row = row_of(data, c)
    if row.completion is None and row.conversation is None:
        return row
    tools, info = _offered(data, c, row.task.prompt), dict(row.task.info)
    if tools:
        info.pop(c.tools_column)
    key = digest(row.task.prompt, tools) if tools else row.key
    return replace(row, task=replace(row.task, tools=tools, info=info), key=key)


def _row(
    data: Mapping[str, Any], c: JudgedColumns, shared: SharedPrompt, judged: JudgedRow, read: set[str]
) -> PromptRow:
    """The row of a prompt, its completions and their judgement. `read`: columns that are not in the task's info."""
    tools = _offered(data, c, shared.prompt)
    task = replace(task_of(data, c, shared.prompt, read | ({c.tools_column} if tools else set())), tools=tools)
    return PromptRow(task, None, digest(task.prompt, tools), judged=judged)


def _offered(
    data: Mapping[str, Any], c: JudgedColumns, prompt: str | tuple[Message, ...]
) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row. DataError if there are any and the prompt is text."""
    tools = tools_of(data, c)
    if tools and isinstance(prompt, str):
        raise DataError(
            f"{c.tools_column!r} offers tools, which a chat template writes, and the prompt is text: write it as"
            " messages, or set env.args.tools_column= where the column holds something else"
        )
    return tools


def tools_of(data: Mapping[str, Any], c: JudgedColumns) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of the tools that a row offers: objects with a name, at the top or under `function`, in a list
    or in its JSON text."""
    column: Any = data.get(c.tools_column) if c.tools_column else None
    if isinstance(column, str) and column.strip():
        try:
            column = json.loads(column)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{c.tools_column!r} is text that is no JSON ({error}): write a list") from None
    if column is None or column in ([], ""):
        return ()
    if not isinstance(column, list) or not all(isinstance(t, Mapping) for t in column):
        raise DataError(
            f"{c.tools_column!r} is {kind_words(column)}, wanted a list of tools, each an object;"
            " set env.args.tools_column= where the column holds something else"
        )
    for i, tool in enumerate(column):
        inner = tool.get("function", tool)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise DataError(f"{c.tools_column!r}[{i}] has no name: give a JSON schema of a function")
    return tuple(without_nulls(t) for t in column)


def _required(data: Mapping[str, Any], column: str) -> None:
    """DataError if the row lacks a column."""
    if data.get(column) is None:
        raise DataError(f"no column {column!r}")


def _single(data: Mapping[str, Any], c: JudgedColumns) -> SharedPrompt:
    """The prompt and the one completion of a row."""
    column = c.completion_column
    _required(data, column)
    return sides(_prompt(data, c), [(column, data[column])], c.prompt_column)


def _each(data: Mapping[str, Any], column: str, count: int | None, read: Callable[[str, Any], T]) -> list[T]:
    """The entries of a list, each read by `read` with its name (`labels[0]`). `count`: how many there must be."""
    value = data.get(column)
    if not isinstance(value, list):
        raise DataError(f"{column!r} is {kind_words(value)}, wanted a list")
    if len(value) > MOST_COMPLETIONS:
        raise DataError(f"{column!r} has {len(value)} entries, and at most {MOST_COMPLETIONS} are read")
    if count is not None and len(value) != count:
        raise DataError(f"{column!r} has {len(value)} entries for {count} completions; give one for each")
    return [read(f"{column}[{i}]", entry) for i, entry in enumerate(value)]


def _step(name: str, value: Any) -> str:
    """The text of a step."""
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name!r} is {kind_words(value)}, wanted the text of a step")
    return without_halves(name, value)


def _chance(name: str, value: Any) -> float:
    """The chance of a right answer after a step, in [0, 1]."""
    chance = number(name, value)
    if not 0 <= chance <= 1:
        raise DataError(f"{name!r} is {chance:g}, wanted a chance from 0 to 1 (env.args.values_column)")
    return chance


def _step_label(name: str, value: Any, c: JudgedColumns) -> int:
    """The label of a step: 1 right, 0 neutral, -1 wrong."""
    if isinstance(value, bool):
        return 1 if value else -1
    if type(value) is not int or value not in (-1, 0, 1):
        raise DataError(f"{name!r} is {kind_words(value)} ({value!r:.40}), wanted true or false, or 1, 0 or -1")
    return -1 if value == 0 and c.zero_label == "wrong" else value
