"""The settings by which rows of the user's data are read: the names of columns, and how pairs are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from posttrain.system.errors import ConfigError, nearest

FORMS = ("auto", "none", "pair", "ranking", "label", "rating", "steps")
"""Values that `JudgedColumns.judged` may have."""
FORMATS = ("prm800k", "math_shepherd", "processbench")
"""Forms of data sets with labels of steps; they too may be `JudgedColumns.judged`."""
PAIRINGS = ("any", "best", "ends")
"""Values that `JudgedColumns.pairs` may have."""
UNFIT = {
    "identical": "two completions of a row are the same text, and one was judged better",
    "drift": "the two sides do not follow the same prompt",
    "unpaired": "no pair can be made of its prompt, because nothing there was judged better than anything else",
}
"""The reasons why a row teaches nothing, by the word with which `JudgedColumns.leave_out` leaves such rows out."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns of prompts, and the split that is read."""

    prompt_column: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    messages_column: str = "messages"
    """Read if there is no prompt column; without either, `conversations`. If the last message is the assistant's, it
    becomes the completion."""
    text_column: str = "text"
    """Read if there are neither prompt nor messages: a text to imitate, to which nothing can be answered."""
    answer_column: str = "answer"
    """The column of the right answer, which rewards receive: text, a number (12.0 is read as 12), or a list of them, of
    which any is right. A name such as reward_model.ground_truth is a field of an object."""
    completion_column: str = "completion"
    """The column of a demonstration (stage style `completion`), or of a completion that was judged. Rewards do not
    receive it."""
    id_column: str = "id"
    """The column of a name for the row, by which the record calls it; it may be missing."""
    split: str = "train"
    """Which split of the data set is read, if it has several."""

    def with_fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with a column for each field of an object that a name with dots means (`reward_model.ground_truth`).
        A column that has the whole name itself stays."""
        inner_columns: dict[str, Any] = {}
        for setting in fields(self):
            name = getattr(self, setting.name) if setting.name.endswith("_column") else ""
            # If a part is missing the value is None, and the reader reports a missing column, as for any other name.
            if "." in name and name not in row:
                value: Any = row
                for part in name.split("."):
                    value = value.get(part) if isinstance(value, Mapping) else None
                inner_columns[name] = value
        return {**row, **inner_columns} if inner_columns else row


@dataclass(frozen=True, kw_only=True)
class JudgedColumns(Columns):
    """With the columns of what was judged. The defaults are the names that TRL uses."""

    judged: str = "auto"
    """How the rows were judged: pair, ranking, label, rating or steps; or the form of a data set with labels of steps:
    prm800k, math_shepherd or processbench. `auto` finds it out by the columns, and `none` reads no judgements."""
    chosen_column: str = "chosen"
    """The column of the preferred completion: text, its message, or the whole conversation."""
    rejected_column: str = "rejected"
    """The column of the other completion."""
    margin_column: str = "margin"
    """The column that says by how much the chosen one is better; it may be missing."""
    weight_column: str = ""
    """The column that says how much a pair counts; empty: each counts 1."""
    completions_column: str = "completions"
    """The column of several completions, the best one first where no scores or ranks are given; or of steps."""
    scores_column: str = "scores"
    """The column of a score for each completion, higher is better; it may be missing."""
    ranks_column: str = "ranks"
    """The column of a rank for each completion, 1 is the best; it may be missing."""
    label_column: str = "label"
    """The column that says whether the completion is good: true or false, 1 or 0."""
    labels_column: str = "labels"
    """The column of a label for each step: true or false; or 1 right, 0 neutral, -1 wrong."""
    values_column: str = "values"
    """The column of the chance of a right answer after each step, from 0 to 1; it may be missing."""
    separator: str = "\n"
    """Text between two steps in the completion, where a step does not end with it."""
    tools_column: str = "tools"
    """The column of the tools that a prompt of messages offers, of a row with completions: a list of JSON schemas, or
    that list as text. Its chat template writes them, and nothing runs them; empty: the column is one of the further
    ones."""
    zero_label: str = ""
    """Meaning of a step label 0 where the data has no -1: neutral or wrong."""
    ratings_column: str = "ratings"
    """The column of an object with a number for each attribute."""
    attributes: str = "helpfulness,correctness,coherence,complexity,verbosity"
    """Columns that hold a number for an attribute each, separated by commas. They are read where there is no column of
    ratings; those that no row has are passed over."""
    attribute: str = ""
    """The attribute by which ratings are compared where pairs are made of them; empty: the only one."""
    pairs: str = "any"
    """Which two completions of a prompt become a pair, where there are more: any two of which one was judged better;
    best: one of the best with any other; ends: one of the best with one of the worst."""
    leave_out: str = ""
    """Rows to leave out, by what is wrong with them, separated by commas: identical, drift, unpaired. Without it such
    a row is an error. How many were left out is printed."""

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("judged", self.judged, (*FORMS, *FORMATS)),
            ("pairs", self.pairs, PAIRINGS),
            ("zero_label", self.zero_label, ("", "neutral", "wrong")),
            *(("leave_out", word, tuple(UNFIT)) for word in self.left_out),
        ):
            if value not in valid:
                raise ConfigError(f"env.args.{name}={value!r}: {nearest(value, [v for v in valid if v])}")

    @property
    def left_out(self) -> tuple[str, ...]:
        """The words of `leave_out`."""
        return _words(self.leave_out)

    @property
    def rated(self) -> tuple[str, ...]:
        """The columns of `attributes`."""
        return _words(self.attributes)


def _words(text: str) -> tuple[str, ...]:
    """The words of a text, separated by commas."""
    return tuple(word for part in text.split(",") if (word := part.strip()))
