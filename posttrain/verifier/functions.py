"""Users' reward functions as sources of verdicts. A function that fails cannot stop the run or count as a low score.

Two signatures are accepted. They are told apart by their parameters when the run is built:

- ours: `def reward(task: Task, text: str) -> float | Verdict | None`
- TRL's: `def reward(prompts, completions, **columns) -> list[float | None]`, called by keyword with lists of one

None abstains. An error (an exception, a NaN, a wrong count, a timeout) gives a `failed` verdict: the sample leaves the
batch and is never counted as a wrong answer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.core.content import plain
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.ports import Attempt
from posttrain.core.redact import redacted
from posttrain.core.spread import RESOLUTION
from posttrain.core.types import Message, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.verifier.builtin import ANSWERED, BUILTIN
from posttrain.verifier.calls import TimedOut, call
from posttrain.verifier.formats import gold_calls
from posttrain.verifier.user_code import where

Form = Literal["ours", "trl"]
RewardFunction = Callable[..., Any]

TIMEOUT = 30.0
"""Default for the seconds that one call of a reward function may take."""
_TRL_UNSUPPORTED = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainer also passes. A reward here cannot have them: it judges text after the episode, without
a trainer."""
_TRL_ALWAYS = ("prompts", "completions")


@dataclass(frozen=True)
class FunctionSource:
    """A reward function with its name, weight and form.

    `timeout`: the seconds one call may run, after which the verdict is failed("timeout"). A synchronous function that
    hangs keeps its thread, so a verifier that can hang should have worker processes (`Reward.workers`). `resolution`:
    `Reward.resolution`, for a function that asks a model.
    """

    name: str
    function: RewardFunction
    weight: float
    form: Form
    timeout: float = TIMEOUT
    resolution: float = RESOLUTION

    async def __call__(self, attempt: Attempt) -> Judged:
        return Judged(self.name, self.weight, redacted(await self.verdict(attempt)), resolution=self.resolution)

    async def verdict(self, attempt: Attempt) -> Verdict:
        """The function's verdict about one attempt. Does not raise an Exception."""
        try:
            args, kwargs = self.arguments(attempt)
            return self.read(await call(self.function, self.timeout, *args, **kwargs))
        except TimedOut:
            return Verdict.failed("timeout", f"no result within {self.timeout:g} s")
        except Exception as error:
            return Verdict.failed("raised", where(error, self.function))

    def arguments(self, attempt: Attempt) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of the call."""
        return ((attempt.task, attempt.text), {}) if self.form == "ours" else ((), self._keywords(attempt))

    def read(self, returned: Any) -> Verdict:
        """The function's return value as a verdict."""
        return as_verdict(returned) if self.form == "ours" else _only(returned)

    def _keywords(self, attempt: Attempt) -> dict[str, list[Any]]:
        """TRL's keyword arguments for one sample: lists of length 1, and only the columns that the function accepts."""
        task = attempt.task
        given: dict[str, Any] = {
            **columns(task),
            "prompts": _plain(task.prompt),
            "completions": _completion(attempt),
            "state": attempt.state,
        }
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return {k: [v] for k, v in given.items()}
        return {p.name: [given[p.name]] for p in parameters if p.name in given}

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that the tasks have what the function requires.

        Raises:
            ConfigError: a task lacks a column that the function requires, or the answer that a built-in requires.
            DataError: `tool_call` cannot read the calls that a task wants.
        """
        required = _required(self.function) if self.form == "trl" else ["answer"] if self.name in ANSWERED else []
        for task in tasks:
            if self.function is BUILTIN["tool_call"]:
                gold_calls(task)
            have = {*columns(task), *_TRL_ALWAYS, "state"}
            missing = [p for p in required if p not in have]
            if missing:
                raise ConfigError(
                    f"reward {self.name!r} requires column {missing[0]!r}, which task {task.id!r} does not have:"
                    f" {nearest(missing[0], sorted(have))}"
                )


def source(
    function: RewardFunction, *, name: str | None = None, weight: float = 1.0, timeout: float = TIMEOUT
) -> FunctionSource:
    """A Python function as a reward source. Raises ConfigError if its signature has neither form."""
    called = name or getattr(function, "__name__", type(function).__name__)
    return FunctionSource(called, function, weight, form(function, called), timeout)


def form(function: RewardFunction, name: str) -> Form:
    """Which of the two signatures a function has."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r} has no readable signature ({error}); wrap it in a function (task, text)"
        ) from error
    unsupported = [p for p in _required(function) if p in _TRL_UNSUPPORTED]
    if unsupported:
        raise ConfigError(
            f"reward {name!r} requires {unsupported[0]!r}, which is not available here: rewards judge text. Use"
            " prompts, completions and columns"
        )
    kinds = {p.kind for p in parameters.values()}
    keywords = inspect.Parameter.VAR_KEYWORD in kinds
    if set(parameters) & set(_TRL_ALWAYS):
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
            raise ConfigError(
                f"reward {name!r}: a batch reward is called by keyword, so no parameter may be positional-only"
            )
        return "trl"
    if inspect.Parameter.VAR_POSITIONAL not in kinds and _takes_two(function):
        return "ours"
    if keywords and not _takes_two(function):
        return "trl"
    raise ConfigError(
        f"reward {name!r} has the signature {inspect.signature(function)}, which is neither of the two understood: "
        "(task, text) -> float | Verdict | None, or (prompts, completions, **columns) -> list[float | None]"
    )


def _takes_two(function: RewardFunction) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _required(function: RewardFunction) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def columns(task: Task) -> Mapping[str, Any]:
    """A task's columns by name, as a batch reward receives them: its id, its answer if it has one, and its info."""
    answer = {} if task.answer is None else {"answer": task.answer}
    return {"id": task.id, **answer, **task.info}


def _plain(prompt: str | tuple[Message, ...]) -> str | list[dict[str, Any]]:
    return prompt if isinstance(prompt, str) else [{**m, "content": plain(m["content"])} for m in prompt]


def _completion(attempt: Attempt) -> str | list[Message]:
    """Text for a text prompt; for a conversation, one assistant message for each turn, as in TRL."""
    if isinstance(attempt.task.prompt, str):
        return attempt.text
    return [Message(role="assistant", content=t) for t in attempt.turns]


def as_verdict(value: Any) -> Verdict:
    """The verdict for a value that a reward function returned. Numbers of any library are accepted. Text and truth
    values are not numbers here."""
    if value is None:
        return Verdict.abstain()
    if isinstance(value, Verdict):
        return value
    if not hasattr(value, "__float__"):
        return Verdict.failed(
            "type", f"returned {type(value).__name__} {value!r:.80}, wanted a number, a Verdict or None"
        )
    if _truth(value):
        return Verdict.failed(
            "type",
            f"returned the truth value {value!r:.80}, wanted a number: return float(...) of it, or None to abstain",
        )
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Verdict.failed("type", f"returned {type(value).__name__}, which is not one number: {error}")
    if not math.isfinite(score):
        return Verdict.failed("nan", f"returned {score}")
    return Verdict.value(score)


def _truth(value: Any) -> bool:
    """Whether it is a truth value of Python, NumPy or torch: the result of a comparison and not a score."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _only(returned: Any) -> Verdict:
    """The verdict from what a batch reward returned for a batch of one."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        return Verdict.failed(
            "type", f"returned {type(returned).__name__}, wanted a list of one number or None per completion"
        )
    try:
        values = list(returned)
    except TypeError as error:
        return Verdict.failed("type", f"returned {type(returned).__name__}, which is not a list: {error}")
    if len(values) != 1:
        return Verdict.failed("count", f"returned {len(values)} rewards for 1 completion")
    return as_verdict(values[0])
