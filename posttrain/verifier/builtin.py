"""Built-in rewards that need no process: those that compare with the answer, and those of `format_rewards`."""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.system.errors import DataError
from posttrain.verifier.format_rewards import answer_format, think_format, tool_call
from posttrain.verifier.integers import last_integer
from posttrain.verifier.reward_source import graded
from posttrain.verifier.thoughts import spoken

Builtin = Callable[[Task, str], Verdict]


def exact(task: Task, text: str) -> Verdict:
    """1 if the response, without thoughts and white space at its ends, equals the answer or any of a list."""
    wanted, response = answers(task), spoken(text).strip()
    return graded(response in wanted, repr(response), _or(wanted))


def integer(task: Task, text: str) -> Verdict:
    """1 if the last integer of the response equals that of the answer, or of any of a list, all normalised."""
    wanted, number = integers(task), last_integer(text)
    return graded(number in wanted, number, " or ".join(wanted), kind="no_integer" if number is None else "wrong")


def contains(task: Task, text: str) -> Verdict:
    """1 if the answer, or any of a list, occurs outside thoughts as whole words: `12` is not in `312`, `12.5` or `-12`.

    A policy that lists every candidate earns 1, so use it only if responses are short.
    """
    wanted, response = answers(task), spoken(text)
    # A number is whole only where neither a digit nor a point or comma with a digit goes on from it. A minus is its
    # sign where nothing stands before the minus to subtract from.
    sign = r"(?<!(?<![\w)])[-\u2212])"
    either = "|".join(f"{sign if x[0].isdigit() else ''}{re.escape(x)}" for x in wanted)
    pattern = rf"(?<!\w)(?<!\d[.,])(?:{either})(?!\w)(?![.,]\d)"
    return graded(re.search(pattern, response) is not None, repr(response[-80:]), _or(wanted))


def answers(task: Task) -> tuple[str, ...]:
    """The texts that are right answers to a task. DataError if its answer is not text, a number or a list of them."""
    if task.answer is None:
        raise DataError(f"task {task.id!r} has no answer to compare with")
    listed = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not listed or not all(
        isinstance(x, str | int | float) and not isinstance(x, bool) and str(x).strip() for x in listed
    ):
        raise DataError(
            f"the answer {task.answer!r:.80} of task {task.id!r} is not one that some responses equal and others do"
            " not: give text or a number, or a list of them; for true and false, the word that you ask for"
        )
    return tuple(str(x).strip() for x in listed)


def integers(task: Task) -> tuple[str, ...]:
    """The integers that are right. DataError if an answer is none."""
    wanted = answers(task)
    numbers = [n for n in map(last_integer, wanted) if n is not None]
    if len(numbers) < len(wanted):
        raise DataError(
            f"the answer {task.answer!r:.80} of task {task.id!r} is no integer, so no response can equal it"
        )
    return tuple(numbers)


def _or(wanted: tuple[str, ...]) -> str:
    """The right answers for a message: `'3' or '4'`."""
    return " or ".join(map(repr, wanted))


BUILTIN: dict[str, Builtin] = {
    "exact": exact,
    "last_integer": integer,
    "contains": contains,
    "think_format": think_format,
    "answer_format": answer_format,
    "tool_call": tool_call,
}
ANSWERED = {"exact": answers, "last_integer": integers, "contains": answers}
"""The built-in rewards that require the task's answer, each with what reads it."""
NAMES = (*BUILTIN, "math", "code", "code_fraction")
"""The names that `Reward.function` accepts, besides `path.py:function`."""
