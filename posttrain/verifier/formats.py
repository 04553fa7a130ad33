"""Rewards for the form of a response: thoughts in their tags, and tool calls that are exactly the wanted ones
(Tool-N1).

All of it reads text as data: nothing is evaluated, the time is linear, and no response raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.verifier.calling import reading
from posttrain.verifier.calling.reading import Unreadable

Calls = Counter[tuple[str, str]]
"""A multiset of (name, arguments as JSON with sorted keys)."""
BEGIN, END = "<tool_call>", "</tool_call>"


def think_format(task: Task, text: str) -> Verdict:
    """1 where the response is `<think>thought</think>` and then an answer, each tag once, else 0."""
    return _form(text, _thought_and_rest(text)[1].strip() != "")


def answer_format(task: Task, text: str) -> Verdict:
    """1 where the response is `<think>thought</think><answer>answer</answer>` and nothing else (DeepSeek-R1's form),
    else 0."""
    rest = _thought_and_rest(text)[1].strip()
    inside = rest.removeprefix("<answer>").removesuffix("</answer>")
    whole = (
        rest.startswith("<answer>")
        and rest.endswith("</answer>")
        and len(rest) == len(inside) + len("<answer></answer>")
    )
    return _form(text, whole and inside.strip() != "" and "<answer>" not in inside and "</answer>" not in inside)


def tool_call(task: Task, text: str) -> Verdict:
    """Tool-N1 (2505.00024): 1 where there is a thought, the last `<tool_call>` holds a JSON list of calls, and these
    are the wanted ones, each as often, in any order; else 0. Arguments are compared as JSON: 1 is not "1", nor 1.0; the
    order of keys does not count.

    What is wanted stands in the task's column `calls`, else in its answer: a list of `{"name", "arguments"}`, or its
    JSON.
    """
    wanted = gold_calls(task)
    if "<think>" not in text or "</think>" not in text:
        return Verdict.value(0.0, "no_thought", "there is no <think>...</think>")
    _, begun, rest = text.rpartition(BEGIN)
    inside, ended, _ = rest.partition(END)
    if not begun or not ended:
        return Verdict.value(0.0, "no_call", f"there is no {BEGIN}...{END}")
    try:
        said = _calls(reading.json_value(inside))
    except Unreadable as error:
        return Verdict.value(0.0, "malformed", str(error)[:200])
    if said == wanted:
        return Verdict.value(1.0)
    return Verdict.value(0.0, "wrong", f"called {_shown(said)}, wanted {_shown(wanted)}")


def gold_calls(task: Task) -> Calls:
    """The calls that a task wants; DataError where it does not say them."""
    said: Any = task.info.get("calls", task.answer)
    try:
        return _calls(reading.json_value(said) if isinstance(said, str) else said)
    except Unreadable as error:
        raise DataError(
            f"task {task.id!r}: reward 'tool_call' wants a column 'calls', or an answer, that is a list of {{'name',"
            f" 'arguments'}} or its JSON: {error}"
        ) from None


def _calls(listed: Any) -> Calls:
    if not isinstance(listed, list | tuple):
        raise Unreadable("calls are a JSON list")
    out: Calls = Counter()
    for one in listed:
        if not isinstance(one, Mapping) or set(one) != {"name", "arguments"}:
            raise Unreadable("a call is an object with name and arguments")
        name, arguments = reading.object_call(dict(one), "name", "arguments")
        out[name, json.dumps(arguments, sort_keys=True)] += 1
    return out


def _thought_and_rest(text: str) -> tuple[str, str]:
    """('', '') where the response does not begin with one thought that ends."""
    stripped = text.strip()
    if not stripped.startswith("<think>") or stripped.count("<think>") != 1 or stripped.count("</think>") != 1:
        return "", ""
    thought, _, rest = stripped.removeprefix("<think>").partition("</think>")
    return thought, rest


def _form(text: str, good: bool) -> Verdict:
    return Verdict.value(1.0) if good else Verdict.value(0.0, "form", f"the response is not in the form: {text[:60]!r}")


def _shown(calls: Calls) -> str:
    return ", ".join(f"{name}({arguments})" for name, arguments in calls.elements())[:200] or "nothing"
