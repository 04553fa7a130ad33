"""The batch form of reward functions, as TRL's trainers call it: keyword arguments, one list entry for each answer.

One call gets all answers that the policy gave to one prompt in a step. It offers every argument of TRL except
`environments`:

    prompts, completions      text, or lists of messages where the prompt is one
    completion_ids            ids of the tokens that the policy said
    COLUMN                    each further column of the data, repeated for each answer
    trainer_state             global_step and max_steps of the stage; outside training both are the last step's
    log_metric(name, value)   a number for the step's record, as the gauge metric/NAME
    log_extra(name, values)   one value for each answer; `posttrain show` prints it with the verdict

and `state`, what a tool environment left behind (`Talk.leave`).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from posttrain.core.abilities import Together
from posttrain.core.content import plain
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.ports import Attempt
from posttrain.core.stop import StepNumber
from posttrain.core.types import Message, Task
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.verifier.reward_source import as_verdict

ALWAYS = ("prompts", "completions")
"""A function that names one of these has TRL's form."""
LISTS = (*ALWAYS, "completion_ids", "state")
"""Arguments with one entry for each answer."""
SINGLE = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are one object for the whole call."""
GIVEN = (*LISTS, *SINGLE)
"""Arguments that every call offers, beside the columns of the data."""


MOST_NAMES = 100
"""Most different names that one call may log."""
NAME = re.compile(r"[^\W_][\w .:/%@+\-]{0,63}")
"""A name that can be logged: it becomes the name of a gauge, a column of a tracker, a key of the record."""


@dataclass(frozen=True)
class TrainerState:
    """The fields of a trainer's state that a reward can use here."""

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name!r}")


@dataclass
class Log:
    """The log of a batch function in one call."""

    count: int
    """Answers of the call."""
    gauges: Gauges = field(default_factory=dict[str, Gauge])
    extras: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    def metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`: the mean of a step's calls is recorded. NaN and infinite values are left out: a mean with
        one of them says nothing.

        Raises:
            ValueError: the name does not match `NAME`, or there are too many names.
        """
        key, x = f"metric/{_checked_name('log_metric', name)}", float(value)
        if key not in self.gauges and len(self.gauges) >= MOST_NAMES:
            raise ValueError(f"log_metric({name!r:.80}): a call may log at most {MOST_NAMES} different names")
        if math.isfinite(x):
            self.gauges[key] = self.gauges.get(key, Gauge(0.0, 0.0)) + Gauge(x, 1.0)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """TRL's `log_extra`: one value for each answer. Raises ValueError for another number of values, or for a name
        that does not match `NAME`."""
        _checked_name("log_extra", column)
        listed = list(values)
        if len(listed) != self.count:
            raise ValueError(f"log_extra({column!r}) has {len(listed)} values for {self.count} completions")
        self.extras[str(column)] = listed

    def all_written(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts on all answers of the call, each with the extras of its answer in its reason."""
        written: list[Verdict] = []
        for i, verdict in enumerate(verdicts):
            extras = [f"{name}: {str(values[i])[:200]}" for name, values in self.extras.items()]
            written.append(replace(verdict, why="; ".join(filter(None, (verdict.why, *extras)))))
        return written


def _checked_name(what: str, name: object) -> str:
    """The name itself, checked; ValueError says what a name may be."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ValueError(
            f"{what}({name!r:.80}, ...): a name is 1 to 64 letters, digits, spaces or signs of _.:/%@+- and begins with"
            " a letter or a digit"
        )
    return name


def keywords(function: Callable[..., Any], attempts: Sequence[Attempt], at: StepNumber, log: Log) -> dict[str, Any]:
    """The keyword arguments of one call. Without `**kwargs` the function gets only those that it names."""
    # The list of a column has None for a row without it. An argument goes before a column of its name.
    names = list(dict.fromkeys(n for a in attempts for n in columns(a.task)))
    offered: dict[str, Any] = {
        **{n: [columns(a.task).get(n) for a in attempts] for n in names},
        "prompts": [_prompt(a.task) for a in attempts],
        "completions": [_completion(a) for a in attempts],
        "completion_ids": [list(a.ids) for a in attempts],
        "state": [a.state for a in attempts],
        "trainer_state": TrainerState(at.step, at.steps),
        "log_metric": log.metric,
        "log_extra": log.extra,
    }
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def columns(task: Task) -> Mapping[str, Any]:
    """A task's columns by name: its id, its answer if it has one, and its info."""
    answer = {} if task.answer is None else {"answer": task.answer}
    return {"id": task.id, **answer, **task.info}


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    """Text, or the messages of a conversation with their contents as text."""
    return task.prompt if isinstance(task.prompt, str) else [{**m, "content": plain(m["content"])} for m in task.prompt]


def _completion(attempt: Attempt) -> str | list[Message]:
    """Text for a text prompt; for a conversation, one assistant message for each turn, as in TRL."""
    if isinstance(attempt.task.prompt, str):
        return attempt.text
    return [Message(role="assistant", content=t) for t in attempt.turns]


def verdicts(returned: Any, count: int) -> list[Verdict]:
    """One verdict for each answer, from what a batch function returned. A wrong number of values fails all of them."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        wrong = f"returned {type(returned).__name__}, wanted a list of one number or None per completion"
        return [Verdict.failed("type", wrong)] * count
    try:
        values = list(returned)
    except TypeError as error:
        return [Verdict.failed("type", f"returned {type(returned).__name__}, which is not a list: {error}")] * count
    if len(values) != count:
        completions = "1 completion" if count == 1 else f"{count} completions"
        return [Verdict.failed("count", f"returned {len(values)} rewards for {completions}")] * count
    return [as_verdict(v) for v in values]


async def misplaced(together: Together, attempts: Sequence[Attempt], at: StepNumber, seed: int) -> str:
    """How a group's scores depend on the order of its answers. '': not at all. `siblings`: the function mixes its list
    up: the scores are those that the answers get alone, but at other places. `order`: they change in another way."""
    order = Random(seed).sample(range(len(attempts)), len(attempts))
    in_order, _ = await together(attempts, at)
    reordered, _ = await together([attempts[i] for i in order], at)
    moved = not all(same_scores(in_order[i], judged) for i, judged in zip(order, reordered, strict=True))
    # A function that swaps the scores of two answers gives each the same score in both orders: so two are judged alone.
    if not moved and len(attempts) > 2:
        return ""
    alone = [(await together([a], at))[0][0] for a in attempts]
    # The scores of each answer as a text, first in the group and then alone. Texts can be sorted.
    scores = [[str({j.source: j.verdict.score for j in x}) for x in verdicts] for verdicts in (in_order, alone)]
    # `"order" * moved` is '' where they have not moved.
    return "siblings" if scores[0] != scores[1] and sorted(scores[0]) == sorted(scores[1]) else "order" * moved


def same_scores(one: Sequence[Judged], two: Sequence[Judged]) -> bool:
    """Returns whether all sources that count or are measured gave the same score. Those of weight 0 only report a
    number, such as a time. One that failed is left out, because the reason may be the machine."""
    first, second = (
        {j.source: j for j in x if (j.counts or j.measured) and j.weight and j.verdict.state is not State.FAILED}
        for x in (one, two)
    )
    return all(_equal(first[s], second[s]) for s in first.keys() & second.keys())


def _equal(one: Judged, two: Judged) -> bool:
    """Returns whether two scores are equal up to rounding, and up to the resolution of a source that is a model."""
    a, b = one.verdict.score, two.verdict.score
    if a is None or b is None:
        return a == b
    return abs(a - b) <= max(1e-9 * max(1.0, abs(a)), one.resolution * max(abs(a), abs(b)))
