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
    """One checked row, with what was judged in it; or why it is left out, where `leave_out` says so.

    Raises:
        DataError: the row is not what its columns say; the message has its place.
    """
    # First the forms of known data sets, which name their columns otherwise; then the kind by the columns.
    data = c.with_fields(data)
    try:
        if format_of(data, c):
            row = _steps(place, standard(place, data, c), c)
            return replace(row, judged=row.judged and replace(row.judged, zero_is_neutral=True))
        kind = kind_of(place, data, c)
        return _demonstration(place, data, c) if kind == "none" else READERS[kind](place, data, c)
    except UnfitRow as unfit:
        if unfit.finding in c.left_out:
            return unfit
        raise


def kind_of(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> str:
    """Returns the kind of judgement that a row has, by its columns; `none` where it was not judged."""
    if c.judged != "auto":
        return c.judged

    def has(column: str) -> bool:
        return data.get(column) is not None

    sides = [c.chosen_column, c.rejected_column]
    # From the most certain sign to the least: a pair has columns that nothing else has, while a label beside a
    # completion may be any column of that name.
    if any(has(x) for x in sides):
        if missing := [x for x in sides if not has(x)]:
            other = next(x for x in sides if x not in missing)
            raise DataError(
                f"{place}: there is {other!r} and no {missing[0]!r}: give both sides of the pair (env.args."
                f"chosen_column, env.args.rejected_column), or set env.args.judged=none if {other!r} is no judgement"
            )
        return "pair"
    if isinstance(data.get(c.completions_column), list):
        return "steps" if has(c.labels_column) else "ranking"
    if not has(c.completion_column):
        return "none"
    rated = has(c.ratings_column) or any(_is_number(data.get(a)) for a in c.rated)
    labelled = isinstance(data.get(c.label_column), bool) or data.get(c.label_column) in (0, 1)
    if rated and labelled:
        raise DataError(f"{place}: the completion has a label and ratings: say which, env.args.judged=label or rating")
    return "rating" if rated else "label" if labelled else "none"


def misread(row: PromptRow, c: JudgedColumns) -> str:
    """Returns the reason why a row that was not judged has a column of judgements; '' where it has none."""
    info, good = row.task.info, "true or false, 1 or 0 (no text)"
    wanted = {c.label_column: good, c.ratings_column: "an object of numbers", c.completions_column: "a list"}
    for name, want in {**dict.fromkeys(c.rated, "a number"), **wanted}.items():
        if (value := info.get(name)) is not None:
            alone = f"; and there is no {c.completion_column!r} (env.args.completion_column)"
            more = "" if row.completion is not None or name == c.completions_column else alone
            return f"{row.place}: {name!r} is {kind_words(value)} ({value!r:.40}), and a judgement is {want}{more}"
    return ""


def also_judged(row: PromptRow, c: JudgedColumns) -> str:
    """The other kind as which a row could be read, by its columns; '' where there is none, or the settings say."""
    if row.judged is None or c.judged != "auto":
        return ""
    # The kind is asked for again without the columns that decided it. A pair may have a demonstration beside
    # it, which was taken out of `info`, so an empty one stands for it.
    single = row.completion is not None or row.task.info.get(c.completion_column) is not None
    left = {k: v for k, v in row.task.info.items() if k not in (c.chosen_column, c.rejected_column)}
    other = kind_of(row.place, {**left, **({c.completion_column: ""} if single else {})}, c)
    return "" if other in ("none", row.judged.kind) else other


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(place: Place, column: str, value: Any) -> float:
    """A finite number of a row."""
    if not _is_number(value):
        raise DataError(f"{place}: {column!r} is {kind_words(value)}, wanted a number")
    try:
        found = float(value)
    except OverflowError:
        raise DataError(f"{place}: {column!r} is a whole number of {value.bit_length()} bits, too large") from None
    if not math.isfinite(found):
        raise DataError(
            f"{place}: {column!r} is {found}, wanted a finite number; leave the row out, or give its number"
        )
    return found


# --- each kind --------------------------------------------------------------------------------------------------------


def _pair(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    names = (c.chosen_column, c.rejected_column)
    for name in names:
        _required(place, data, name)
    found = sides(place, _prompt(place, data, c), [(n, data[n]) for n in names], c.prompt_column)
    chosen, rejected = found.completions
    if chosen == rejected:
        raise UnfitRow(place, "identical", f"{names[0]!r} and {names[1]!r} are the same text")
    margin, weight = (
        number(place, n, data[n]) if n and data.get(n) is not None else None for n in (c.margin_column, c.weight_column)
    )
    for name, value in ((c.margin_column, margin), (c.weight_column, weight)):
        if value is not None and value < 0:
            raise DataError(f"{place}: {name!r} is {value:g}, below 0: the chosen side would count as the worse one")
    judged = JudgedRow("pair", found.completions, (1.0, 0.0), margin=margin, weight=1.0 if weight is None else weight)
    row = _row(place, data, c, found, judged, {*names, c.margin_column, c.weight_column, c.completion_column})
    shown = data.get(c.completion_column)  # a demonstration beside the pair
    return row if shown is None else replace(row, completion=completion_of(place, shown, c))


def _ranking(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    given = _several(place, data, c)
    found = sides(place, _prompt(place, data, c), given, c.prompt_column)
    columns = [n for n in (c.scores_column, c.ranks_column) if data.get(n) is not None]
    if len(columns) > 1:
        raise DataError(f"{place}: there are {columns[0]!r} and {columns[1]!r}; give one of them")
    # Without numbers the order of the list is the judgement: the first is worth most. Ranks count the other way
    # round, so they are negated.
    values = tuple(float(len(given) - i) for i in range(len(given)))
    if columns:
        order = _each(place, data, columns[0], len(given), lambda n, v: number(place, n, v))
        values = tuple(order) if columns[0] == c.scores_column else tuple(-x for x in order)
    # Equal texts of equal worth say nothing wrong; of different worth they contradict each other.
    worth: dict[str, float] = {}
    for text, value in zip(found.completions, values, strict=True):
        if worth.setdefault(text, value) != value:
            raise UnfitRow(place, "identical", f"two of {c.completions_column!r} are the same text, judged differently")
    if len(set(values)) == 1:
        raise UnfitRow(
            place, "unpaired", f"all of {columns[0]!r} are {number(place, columns[0], data[columns[0]][0]):g}"
        )
    scored = columns == [c.scores_column]
    read = {c.completions_column, c.scores_column, c.ranks_column}
    return _row(place, data, c, found, JudgedRow("ranking", found.completions, values, scored=scored), read)


def _label(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    found, column = _single(place, data, c)
    good = data.get(c.label_column)
    if not isinstance(good, bool) and good not in (0, 1):
        raise DataError(f"{place}: {c.label_column!r} is {kind_words(good)}, wanted true or false, 1 or 0")
    judged = JudgedRow("label", found.completions, (float(good),))
    return _row(place, data, c, found, judged, {column, c.label_column})


def _rating(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    found, column = _single(place, data, c)
    given = data.get(c.ratings_column)
    if given is None:
        given = {a: data[a] for a in c.rated if data.get(a) is not None}
    if not isinstance(given, Mapping) or not given:
        raise DataError(
            f"{place}: no ratings: give {c.ratings_column!r}, an object with a number for each attribute, or columns of"
            " numbers (env.args.attributes)"
        )
    ratings = {without_halves(place, c.ratings_column, str(a)): number(place, str(a), v) for a, v in given.items()}
    # Which attribute makes a completion better is only known where there is one, or where it was named.
    # Otherwise the row is read, and no pair can be made of it.
    by = c.attribute or (next(iter(ratings)) if len(ratings) == 1 else "")
    if by and by not in ratings:
        raise DataError(f"{place}: env.args.attribute={by!r} is not among the ratings {', '.join(ratings)}")
    judged = JudgedRow("rating", found.completions, (ratings[by],) if by else (), scored=True, ratings=ratings)
    return _row(place, data, c, found, judged, {column, c.ratings_column, *c.rated})


def _steps(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    prompt = _prompt(place, data, c)
    if prompt is None:
        raise DataError(f"{place}: no column {c.prompt_column!r} (env.args.prompt_column); give the prompt")
    given = data.get(c.completions_column)
    steps = _each(place, data, c.completions_column, None, lambda n, v: _step(place, n, v))
    if not steps:
        raise DataError(f"{place}: {c.completions_column!r} is {kind_words(given)}, wanted at least one step")
    labels = _each(place, data, c.labels_column, len(steps), lambda n, v: _step_label(place, n, v, c))
    chances: list[float] = []
    if data.get(c.values_column) is not None:
        chances = _each(place, data, c.values_column, len(steps), lambda n, v: _chance(place, n, v))
    found = SharedPrompt(prompt, tuple(steps))
    judged = JudgedRow("steps", found.completions, labels=tuple(labels), chances=tuple(chances))
    return _row(place, data, c, found, judged, {c.completions_column, c.labels_column, c.values_column})


READERS: dict[str, Callable[[Place, Mapping[str, Any], JudgedColumns], PromptRow]] = {
    "pair": _pair,
    "ranking": _ranking,
    "label": _label,
    "rating": _rating,
    "steps": _steps,
}
"""The reader of each kind of row."""


# --- parts of a row ---------------------------------------------------------------------------------------------------


def _prompt(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> str | tuple[Message, ...] | None:
    """The row's own prompt; None where it stands in the completions alone."""
    if data.get(c.prompt_column) is None:
        return None
    prompt, answer = prompt_of(place, data, c)
    if answer is not None:
        raise DataError(
            f"{place}: {c.prompt_column!r} ends with the assistant's message, and what was judged comes after it: take"
            " the message out, or move it into each completion"
        )
    return prompt


def _demonstration(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> PromptRow:
    """A row in which nothing was judged. The tools beside a completion belong to its prompt."""
    row = row_of(place, data, c)
    if row.completion is None and row.conversation is None:
        return row
    tools, info = _offered(place, data, c, row.task.prompt), dict(row.task.info)
    if tools:
        info.pop(c.tools_column)
    key = digest(row.task.prompt, tools) if tools else row.key
    return replace(row, task=replace(row.task, tools=tools, info=info), key=key)


def _row(
    place: Place, data: Mapping[str, Any], c: JudgedColumns, found: SharedPrompt, judged: JudgedRow, read: set[str]
) -> PromptRow:
    tools = _offered(place, data, c, found.prompt)
    task = replace(task_of(place, data, c, found.prompt, read | ({c.tools_column} if tools else set())), tools=tools)
    return PromptRow(task, None, digest(task.prompt, tools), place, judged)


def _offered(
    place: Place, data: Mapping[str, Any], c: JudgedColumns, prompt: str | tuple[Message, ...]
) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, whose prompt is messages."""
    tools = tools_of(place, data, c)
    if tools and isinstance(prompt, str):
        raise DataError(
            f"{place}: {c.tools_column!r} offers tools, which a chat template writes, and the prompt is text: write it"
            " as messages, or set env.args.tools_column= where the column holds something else"
        )
    return tools


def tools_of(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of the tools that a row offers: a list of objects with a name, flat or under `function`, or that
    list as JSON text."""
    given: Any = data.get(c.tools_column) if c.tools_column else None
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except ValueError as error:
            raise DataError(f"{place}: {c.tools_column!r} is text that is no JSON ({error}): write a list") from None
    if given is None or given in ([], ""):
        return ()
    if not isinstance(given, list) or not all(isinstance(t, Mapping) for t in given):
        raise DataError(
            f"{place}: {c.tools_column!r} is {kind_words(given)}, wanted a list of tools, each an object;"
            " set env.args.tools_column= where the column holds something else"
        )
    for i, tool in enumerate(given):
        inner = tool.get("function", tool)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise DataError(f"{place}: {c.tools_column!r}[{i}] has no name: give a JSON schema of a function")
    return tuple(without_nulls(t) for t in given)


def _required(place: Place, data: Mapping[str, Any], column: str) -> None:
    if data.get(column) is None:
        raise DataError(f"{place}: no column {column!r}")


def _single(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> tuple[SharedPrompt, str]:
    """The prompt and the one completion of a row, and the name of its column."""
    column = c.completion_column
    _required(place, data, column)
    return sides(place, _prompt(place, data, c), [(column, data[column])], c.prompt_column), column


def _several(place: Place, data: Mapping[str, Any], c: JudgedColumns) -> list[tuple[str, Any]]:
    name = c.completions_column
    given = _each(place, data, name, None, lambda _, value: value)
    if len(given) < 2:
        raise DataError(f"{place}: {name!r} has {len(given)} completions, and a ranking orders at least 2")
    return [(f"{name}[{i}]", value) for i, value in enumerate(given)]


def _each(
    place: Place, data: Mapping[str, Any], column: str, count: int | None, read: Callable[[str, Any], T]
) -> list[T]:
    """The entries of a list, each read with its name; `count`: how many there must be."""
    value = data.get(column)
    if not isinstance(value, list):
        raise DataError(f"{place}: {column!r} is {kind_words(value)}, wanted a list")
    if len(value) > MOST_COMPLETIONS:
        raise DataError(f"{place}: {column!r} has {len(value)} entries, and at most {MOST_COMPLETIONS} are read")
    if count is not None and len(value) != count:
        raise DataError(f"{place}: {column!r} has {len(value)} entries for {count} completions; give one for each")
    return [read(f"{column}[{i}]", one) for i, one in enumerate(value)]


def _step(place: Place, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {name!r} is {kind_words(value)}, wanted the text of a step")
    return without_halves(place, name, value)


def _chance(place: Place, name: str, value: Any) -> float:
    found = number(place, name, value)
    if not 0 <= found <= 1:
        raise DataError(f"{place}: {name!r} is {found:g}, wanted a chance from 0 to 1 (env.args.values_column)")
    return found


def _step_label(place: Place, name: str, value: Any, c: JudgedColumns) -> int:
    if isinstance(value, bool):
        return 1 if value else -1
    if type(value) is not int or value not in (-1, 0, 1):
        raise DataError(
            f"{place}: {name!r} is {kind_words(value)} ({value!r:.40}), wanted true or false, or 1, 0 or -1"
        )
    return -1 if value == 0 and c.zero_label == "wrong" else value
