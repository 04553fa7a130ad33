"""Rewards for the form of a response: thoughts in tags, and tool calls that equal the wanted ones (Tool-N1).

The text is only parsed and never evaluated. The time is linear in its length, and no response makes them raise.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.system.errors import DataError
from posttrain.verifier.calling import read_data
from posttrain.verifier.calling.read_data import Unreadable
from posttrain.verifier.thoughts import spoken, tags

Calls = Counter[tuple[str, str]]
"""A multiset of (name, arguments as JSON with sorted keys)."""
BEGIN, END = "<tool_call>", "</tool_call>"


def think_format(task: Task, text: str) -> Verdict:
    """1 if the response is `<think>thought</think>` followed by an answer, with each tag once, else 0."""
    return _form(text, _after_thought(text) != "")


def answer_format(task: Task, text: str) -> Verdict:
    """1 if the response is `<think>thought</think><answer>answer</answer>` and nothing else, else 0 (DeepSeek-R1)."""
    enclosed = re.fullmatch(r"<answer>(.*)</answer>", _after_thought(text), re.DOTALL)
    inside = enclosed[1] if enclosed else ""
    return _form(text, inside.strip() != "" and "<answer>" not in inside and "</answer>" not in inside)


def tool_call(task: Task, text: str) -> Verdict:
    """Tool-N1 (2505.00024): 1 if there is a thought and the last `<tool_call>` is a JSON list with exactly the wanted
    calls, else 0. The order of the calls does not matter, but the number of each does. Arguments are compared as JSON:
    1 is neither "1" nor 1.0. The order of their keys does not matter.

    The wanted calls are the task's column `calls`, else its answer: a list of `{"name", "arguments"}`, or its JSON.
    """
    wanted = gold_calls(task)
    marks = [tag[0] for tag in tags(text)]
    if "<think>" not in marks or "</think>" not in marks[marks.index("<think>") :]:
        return Verdict.value(0.0, "no_thought", "there is no <think>...</think>")
    # Only text outside thoughts is searched: a call inside a thought was considered and not made.
    _, begin_tag, rest = spoken(text).rpartition(BEGIN)
    inside, end_tag, _ = rest.partition(END)
    if not begin_tag or not end_tag:
        return Verdict.value(0.0, "no_call", f"there is no {BEGIN}...{END}")
    try:
        called = _calls(read_data.json_value(inside))
    except Unreadable as error:
        return Verdict.value(0.0, "malformed", str(error)[:200])
    if called == wanted:
        return Verdict.value(1.0)
    return Verdict.value(0.0, "wrong", f"called {_shown(called)}, wanted {_shown(wanted)}")


def gold_calls(task: Task) -> Calls:
    """The calls that a task wants. Raises DataError if they are missing or cannot be read."""
    column: Any = task.info.get("calls", task.answer)
    try:
        return _calls(read_data.json_value(column) if isinstance(column, str) else column)
    except Unreadable as error:
        raise DataError(
            f"task {task.id!r}: reward 'tool_call' wants a column 'calls', or an answer, that is a list of {{'name',"
            f" 'arguments'}} or its JSON: {error}"
        ) from None


def _calls(listed: Any) -> Calls:
    """The multiset of the calls in a list. Raises Unreadable if an entry is no call."""
    if not isinstance(listed, list | tuple):
        raise Unreadable("calls are a JSON list")
    calls: Calls = Counter()
    for entry in listed:
        if not isinstance(entry, Mapping) or set(entry) != {"name", "arguments"}:
            raise Unreadable("a call is an object with name and arguments")
        name, arguments = read_data.object_call(dict(entry), "name", "arguments")
        try:  # arguments of a row may be Python values that JSON does not have
            calls[name, json.dumps(arguments, sort_keys=True, allow_nan=False)] += 1
        except (TypeError, ValueError) as error:
            raise Unreadable(f"arguments of {name} are no JSON: {error}") from None
    return calls


def _after_thought(text: str) -> str:
    """The text after the thought; empty unless the response begins with `<think>`, and has one closed thought."""
    marks = [tag[0] for tag in tags(text)]
    # `tags` leaves quoted tags out, so a response that mentions "<think>" keeps its form.
    begins = text.lstrip().startswith("<think>") and marks == ["<think>", "</think>"]
    return spoken(text).strip() if begins else ""


def _form(text: str, good: bool) -> Verdict:
    """1 if the form is right, else 0 with the begin of the response."""
    return Verdict.value(1.0) if good else Verdict.value(0.0, "form", f"the response is not in the form: {text[:60]!r}")


def _shown(calls: Calls) -> str:
    """The calls for a message, at most 200 characters."""
    return ", ".join(f"{name}({arguments})" for name, arguments in calls.elements())[:200] or "nothing"
