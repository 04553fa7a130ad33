"""Built-in rewards that need no process. `exact`, `last_integer` and `contains` compare with the answer; those of
`formats` judge the form. `math` and `code` are packages of their own."""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.verifier.formats import answer_format, think_format, tool_call
from posttrain.verifier.integers import last_integer
from posttrain.verifier.source import graded

Builtin = Callable[[Task, str], Verdict]


def exact(task: Task, text: str) -> Verdict:
    """1 if the response, without white space at its ends, equals the answer."""
    return graded(text.strip() == _answer(task), repr(text.strip()), repr(_answer(task)))


def integer(task: Task, text: str) -> Verdict:
    """1 if the last integer of the response equals that of the answer, both normalised."""
    wanted, said = last_integer(_answer(task)), last_integer(text)
    if wanted is None:
        return Verdict.failed("gold", f"the answer {_answer(task)!r} is no integer")
    return graded(said == wanted, said, wanted, kind="no_integer" if said is None else "wrong")


def contains(task: Task, text: str) -> Verdict:
    """1 if the answer occurs in the response as whole words: `12` is not in `312`, nor in `12.5`.

    A policy that lists every candidate earns 1, so use it only if responses are short.
    """
    wanted = _answer(task)
    pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(wanted)}(?!\w)(?![.,]\d)"
    return graded(re.search(pattern, text) is not None, repr(text[-80:]), repr(wanted))


def _answer(task: Task) -> str:
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    return str(task.answer).strip()


BUILTIN: dict[str, Builtin] = {
    "exact": exact,
    "last_integer": integer,
    "contains": contains,
    "think_format": think_format,
    "answer_format": answer_format,
    "tool_call": tool_call,
}
ANSWERED = ("exact", "last_integer", "contains")
"""The built-in rewards that require the task's answer."""
NAMES = (*BUILTIN, "math", "code", "code_fraction")
"""The names that `Reward.function` accepts, besides `path.py:function`."""
