"""Labels of steps in the forms of PRM800K, Math-Shepherd and ProcessBench, as rows with a prompt, steps and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.environment.rows.columns import FORMATS, JudgedColumns
from posttrain.environment.rows.row_reader import kind_words
from posttrain.system.errors import DataError

TAG = "ки"
"""Mark that ends each step in Math-Shepherd's input, where its label has + or -."""
FIRST_STEP = "Step 1:"
"""Where Math-Shepherd's problem ends."""


def format_of(data: Mapping[str, Any], c: JudgedColumns) -> str:
    """The format of a row, by its columns; '' where it is none of these."""
    if c.judged in FORMATS:
        return c.judged
    if c.judged != "auto":
        return ""
    question, label, input_text = data.get("question"), data.get("label"), data.get("input")
    if isinstance(question, Mapping) and "problem" in question and isinstance(label, Mapping) and "steps" in label:
        return "prm800k"
    if isinstance(input_text, str) and isinstance(label, str) and TAG in input_text:
        return "math_shepherd"
    if type(label) is int and isinstance(data.get("steps"), list) and "problem" in data:
        return "processbench"
    return ""


def standard(data: Mapping[str, Any], c: JudgedColumns) -> Mapping[str, Any]:
    """A row of one of these formats, checked: prompt, steps and labels in the columns of `c`, other columns as they
    are."""
    reader, consumed = READERS[format_of(data, c)]
    prompt, steps, labels = reader(data)
    other_columns = {k: v for k, v in data.items() if k not in consumed}
    return {**other_columns, c.prompt_column: prompt, c.completions_column: steps, c.labels_column: labels}


Steps = tuple[str, list[str], list[int]]


def _prm800k(data: Mapping[str, Any]) -> Steps:
    """The path that the labeler took: at each step the chosen completion, else the human's, else the first one, with
    which the path ends. Alternatives to a chosen step are not read. A path ends before a step without a rating."""
    problem = _text("question.problem", _field("question", data.get("question"), "problem"))
    step_entries = _list("label.steps", _field("label", data.get("label"), "steps"))
    steps: list[str] = []
    labels: list[int] = []
    for i, step in enumerate(step_entries):
        name = f"label.steps[{i}]"
        if not isinstance(step, Mapping):
            raise DataError(f"{name} is {kind_words(step)}, wanted an object")
        options = _list(f"{name}.completions", step.get("completions") or [])
        chosen, human = step.get("chosen_completion"), step.get("human_completion")
        if chosen is not None and (type(chosen) is not int or not 0 <= chosen < len(options)):
            raise DataError(f"{name}.chosen_completion is {chosen!r:.40}, and there are {len(options)}")
        taken = human if human is not None else next(iter(options), None)
        if chosen is not None:
            taken = options[chosen]
        if not isinstance(taken, Mapping):
            raise DataError(f"{name} has no completion")
        rating = taken.get("rating")
        if rating is None and chosen is None and human is not None:
            rating = 1  # written by the labeler
        if rating is None:
            break
        if type(rating) is not int or rating not in (-1, 0, 1):
            raise DataError(f"the rating of {name} is {rating!r:.40}, wanted -1, 0 or 1")
        steps.append(_text(f"{name}.text", taken.get("text")))
        labels.append(rating)
        # Nothing was taken up here, so what follows continues another path.
        if chosen is None and human is None:
            break
    if not steps:
        raise DataError("no step has a rating; leave the row out")
    return problem, steps, labels


def _shepherd(data: Mapping[str, Any]) -> Steps:
    """`input` has a tag after each step, and `label` the same text with + or - in its place."""
    input_text, label = _text("input", data.get("input")), _text("label", data.get("label"))
    *pieces, text_after = input_text.split(TAG)
    if not pieces:
        raise DataError(f"'input' has no step tag {TAG!r}")
    labels: list[int] = []
    at = 0
    for i, piece in enumerate(pieces):
        end = at + len(piece)
        # `label` has one sign where `input` has a tag of two letters, so places in it are counted apart.
        sign = label[end : end + 1]
        if label[at:end] != piece or sign not in ("+", "-"):
            raise DataError(
                f"'label' is not 'input' with + or - for each {TAG!r}: they part at step {i + 1} of {len(pieces)}"
            )
        labels.append(1 if sign == "+" else -1)
        at = end + 1
    if label[at:].strip() != text_after.strip():
        raise DataError("'label' and 'input' end differently")
    problem, first, step = pieces[0].partition(FIRST_STEP)
    if not first or not problem.strip():
        raise DataError(f"'input' has no problem before {FIRST_STEP!r}")
    steps = [(first + step).strip(), *(p.strip() for p in pieces[1:])]
    return problem.strip(), steps, labels


def _bench(data: Mapping[str, Any]) -> Steps:
    """`label` is the index of the first wrong step, from 0, and -1 where all are right. Nothing is known of the steps
    behind a wrong one, so they are not read; the column `steps` keeps them."""
    steps = [_text(f"steps[{i}]", s) for i, s in enumerate(_list("steps", data.get("steps")))]
    wrong_at = data.get("label")
    if type(wrong_at) is not int or not -1 <= wrong_at < len(steps):
        raise DataError(f"'label' is {wrong_at!r:.40}, wanted the index of the first wrong step of {len(steps)}, or -1")
    count = len(steps) if wrong_at < 0 else wrong_at + 1
    return _text("problem", data.get("problem")), steps[:count], [1 if i != wrong_at else -1 for i in range(count)]


READERS: dict[str, tuple[Callable[[Mapping[str, Any]], Steps], frozenset[str]]] = {
    "prm800k": (_prm800k, frozenset({"question", "label"})),
    "math_shepherd": (_shepherd, frozenset({"input", "label"})),
    "processbench": (_bench, frozenset({"problem", "label"})),
}
"""The reader of each format, and the columns that are dropped when it has read them."""


def _field(name: str, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise DataError(f"{name!r} is {kind_words(value)}, wanted an object with {key!r}")
    return value.get(key)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{name!r} is {kind_words(value)}, wanted a list")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name!r} is {kind_words(value)}, wanted text")
    return value
