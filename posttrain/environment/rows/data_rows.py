"""Reads all rows of the user's data, and checks what concerns several rows: ids, equal prompts, kinds of judgement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from posttrain.config.env import Env
from posttrain.environment.judged.judged_draws import JudgedData
from posttrain.environment.judged.judged_rows import also_judged, read_row
from posttrain.environment.judged.shared_prompt import UnfitRow
from posttrain.environment.rows.columns import UNFIT, JudgedColumns
from posttrain.environment.rows.row_reader import Place, PromptRow, source_rows
from posttrain.record.runtime_objects import RuntimeObjects, is_inline
from posttrain.system.errors import DataError

NAMED = 3
"""Places of rows that are named in a line about rows left out."""


@dataclass(frozen=True)
class DataRows:
    """The rows of a data set, and lines about those that were left out, or that can be read in two ways."""

    rows: tuple[PromptRow, ...]
    without: tuple[str, ...] = ()
    mixed: tuple[tuple[int, float], ...] = ()
    """Number of rows of each data set, and its weight, where there are several."""


def read_all(config: Env, columns: JudgedColumns, given: RuntimeObjects) -> DataRows:
    """The rows of `env.prompts`, followed by those of `env.mix`. DataError where two sets were judged differently."""
    data_sets = [read_rows(path, columns, given) for path, _ in config.data]
    if len(data_sets) == 1:
        return data_sets[0]
    rows: list[PromptRow] = []
    used_ids: set[str] = set()
    for number, data_set in enumerate(data_sets):
        # All rows of one set are of one kind, so the first rows of two sets are compared.
        _check_same_kind(data_sets[0].rows[0], data_set.rows[0], columns)
        for row in data_set.rows:
            # Ids are unique within a set. Two sets may have the same id, so the second one gets the number of its set,
            # again and again where a row has that id too.
            row_id = row.task.id
            while row_id in used_ids:
                row_id = f"{row_id}@{number}"
            used_ids.add(row_id)
            rows.append(replace(row, task=replace(row.task, id=row_id)))
    sizes = zip(data_sets, config.data, strict=True)
    without = tuple(line for data_set in data_sets for line in data_set.without)
    return DataRows(tuple(rows), without, tuple((len(data_set.rows), weight) for data_set, (_, weight) in sizes))


def read_rows(path: str, columns: JudgedColumns | None = None, given: RuntimeObjects = RuntimeObjects()) -> DataRows:
    """All rows of a JSONL or JSON file, a parquet file, a saved data set, one on the hub, or handed by a program.

    Raises:
        DataError: a row cannot be read, or has no prompt; a key or an id occurs twice; one prompt has two answers; rows
            were judged in different ways; there are no rows. The message names the row's place.
    """
    columns = columns or JudgedColumns()
    rows: list[PromptRow] = []
    unfit: list[tuple[str, Place]] = []
    places: dict[str, Place] = {}
    repeats: dict[str, int] = {}
    answered: dict[str, PromptRow] = {}
    for place, row in checked_rows(path, columns, given):
        if isinstance(row, UnfitRow):
            unfit.append((row.finding, place))
            continue
        if rows:
            _check_same_kind(rows[0], row, columns)
        if row.task.answer is not None:
            _check_same_answer(answered.setdefault(row.key, row), row, columns.answer_column)
        row_id = row.task.id
        if not row_id:
            repeats[row.key] = repeats.get(row.key, 0) + 1
            # A made id depends on the prompt alone, so it does not change with the order of the file. Only rows with
            # equal prompts get numbers, in their order.
            row_id = row.key if repeats[row.key] == 1 else f"{row.key}-{repeats[row.key]}"
            row = replace(row, task=replace(row.task, id=row_id))
        if row_id in places:
            raise DataError(
                f"{place}: id {row_id!r} was already given at {places[row_id]}; ids must differ (or leave the column"
                " out, and ids are made)"
            )
        places[row_id] = place
        rows.append(row)
    if not rows:
        note = f", but {len(unfit)} that were left out (env.args.leave_out)" if unfit else ""
        raise DataError(f"{path} has no rows{note}")
    return _checked_together(path, rows, unfit, columns)


def checked_rows(
    path: str, columns: JudgedColumns, given: RuntimeObjects = RuntimeObjects()
) -> Iterator[tuple[Place, PromptRow | UnfitRow]]:
    """Each row with its place, checked alone."""
    for place, data in given.rows(path) if is_inline(path) else source_rows(path, columns.split):
        yield place, read_row(place, data, columns)


def _checked_together(
    path: str, rows: list[PromptRow], unfit: list[tuple[str, Place]], columns: JudgedColumns
) -> DataRows:
    """The rows, after the checks that need all of them. `unfit`: (finding, place) of each row that was left out."""
    # Whether a pair can be made of a row depends on the other rows with its prompt, so it is known only here.
    kind = rows[0].judged.kind if rows[0].judged is not None else None
    if kind in ("label", "rating") and "unpaired" in columns.left_out:
        unpaired = {r.task.id: r for r in JudgedData(tuple(rows), columns).unpaired}
        if len(unpaired) == len(rows):
            raise DataError(_nothing_paired(path, rows, columns))
        rows = [r for r in rows if r.task.id not in unpaired]
        unfit = [*unfit, *(("unpaired", r.place) for r in unpaired.values())]
    if kind == "steps" and not columns.zero_label:
        _check_zero_is_clear(rows, columns)
    lines = list(_left_out_words(unfit, len(rows) + len(unfit)))
    if other_kind := also_judged(rows[0], columns):
        lines.append(
            f"rows are read as judged by {kind}, and their columns could be read as {other_kind} too: say which with"
            f" env.args.judged={kind} or env.args.judged={other_kind}"
        )
    return DataRows(tuple(rows), tuple(lines))


def _nothing_paired(path: str, rows: list[PromptRow], columns: JudgedColumns) -> str:
    """The message for judged rows of which no pair can be made."""
    rated = next((r.judged.ratings for r in rows if r.judged is not None and r.judged.ratings), {})
    if len(rated) > 1 and not columns.attribute:
        return f"{path}: the ratings are {', '.join(rated)}; say by which of them pairs are made: env.args.attribute"
    return f"{path}: no prompt has two completions of which one was judged better, so that no pair can be made"


def _left_out_words(unfit: list[tuple[str, Place]], count: int) -> Iterator[str]:
    """A line for each reason why rows were left out, with their number and the first places."""
    for finding in dict.fromkeys(f for f, _ in unfit):
        places = [place for f, place in unfit if f == finding]
        more = "" if len(places) <= NAMED else f" and {len(places) - NAMED} more"
        yield (
            f"left out {len(places)} of {count} rows as {finding} ({UNFIT[finding]}): {', '.join(places[:NAMED])}{more}"
        )


def _check_zero_is_clear(rows: list[PromptRow], columns: JudgedColumns) -> None:
    """DataError where a label 0 may mean wrong or neutral."""
    labels = {x for r in rows if r.judged is not None and not r.judged.zero_is_neutral for x in r.judged.labels}
    # If the data have -1, 0 means neutral. Without -1, 0 may mean wrong, and wrong steps would be read as neutral ones.
    if 0 in labels and -1 not in labels:
        place = next(r.place for r in rows if r.judged is not None and 0 in r.judged.labels)
        raise DataError(
            f"{place}: a step of {columns.labels_column!r} has label 0, and no row has -1, so it is not known whether 0"
            " is neutral or wrong: set env.args.zero_label=neutral or env.args.zero_label=wrong"
        )


def _check_same_kind(first: PromptRow, row: PromptRow, columns: JudgedColumns) -> None:
    """DataError where rows were judged in different ways, or have ratings of different attributes."""
    before, now = first.judged, row.judged
    if (before and before.kind) != (now and now.kind):  # None where a row was not judged
        words = [f"judged as {x.kind}" if x else "not judged" for x in (now, before)]
        raise DataError(
            f"{row.place}: the row is {words[0]}, and the one at {first.place} is {words[1]}: make a file of each kind,"
            " or say which it is with env.args.judged"
        )
    if before and now and before.ratings.keys() != now.ratings.keys():
        raise DataError(
            f"{row.place}: the ratings are {', '.join(now.ratings)}, and at {first.place} they are"
            f" {', '.join(before.ratings)}: rate the same attributes in every row"
        )


def _check_same_answer(first: PromptRow, row: PromptRow, column: str) -> None:
    """DataError if an earlier row has the same prompt and another answer: every response would be wrong for one row."""
    before, now = first.task.answer, row.task.answer
    # 12 and "12" are the same answer, because some files write numbers as text.
    if before != now and str(before) != str(now):
        raise DataError(
            f"{row.place}: {column!r} is {now!r:.80}, and the same prompt has {before!r:.80} at {first.place}: one of"
            " the two would score every policy wrong. Keep one row, or give a list of answers and a reward that takes"
            " any of them"
        )
