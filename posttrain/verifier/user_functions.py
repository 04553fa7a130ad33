"""Users' reward functions as sources of verdicts. A function that fails cannot stop the run or count as a low score.

Two signatures are accepted. They are told apart by their parameters when the run is built:

- ours: `def reward(task: Task, text: str) -> float | Verdict | None`
- TRL's: `def reward(prompts, completions, **columns) -> list[float | None]`, called by keyword with lists that hold all
  answers to one prompt (`verifier.batch_functions`)

None abstains. An error (an exception, a NaN, a wrong count, a timeout) gives a `failed` verdict: the sample leaves the
batch and is never counted as a wrong answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.core.gauge import Gauges
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.stop import StepNumber
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier import batch_functions
from posttrain.verifier.batch_functions import columns
from posttrain.verifier.builtin import ANSWERED, BUILTIN
from posttrain.verifier.format_rewards import gold_calls
from posttrain.verifier.reward_source import as_verdict
from posttrain.verifier.timed_calls import call
from posttrain.verifier.user_code import failed_call

Form = Literal["ours", "trl"]
RewardFunction = Callable[..., Any]

ANSWER_NAMES = (
    "text",
    "response",
    "completion",
    "answer",
    "output",
    "solution_str",
    "prediction",
    "pred",
    "generation",
)
"""Names that functions of other libraries give to what the model wrote, which they take first."""
TRUTH_NAMES = ("task", "ground_truth", "truth", "gold", "label", "reference", "target", "expected")
"""Names that they give to the right answer, which they take second."""
TIMEOUT = 30.0
"""Default for the seconds that one call of a reward function may take."""


@dataclass(frozen=True)
class FunctionSource:
    """A reward function with its name, weight and form.

    `timeout`: the seconds that one call may run. After them the verdict is failed("timeout"). A synchronous function
    that hangs keeps its thread, so a verifier that can hang should have worker processes (`Reward.workers`).
    `resolution`: see `Reward.resolution`, for a function that asks a model.
    """

    name: str
    function: RewardFunction
    weight: float
    form: Form
    timeout: float = TIMEOUT
    resolution: float = RESOLUTION

    async def __call__(self, attempt: Attempt) -> Judged:
        return self._judged(await self.verdict(attempt))

    def _judged(self, verdict: Verdict) -> Judged:
        return Judged(self.name, self.weight, redacted(verdict), resolution=self.resolution)

    async def verdict(self, attempt: Attempt) -> Verdict:
        """The function's verdict about one attempt. Does not raise an Exception."""
        try:
            args, kwargs = self.arguments(attempt)
            return self.read(await call(self.function, self.timeout, *args, **kwargs))
        except Exception as error:
            return failed_call(error, self.function, self.timeout)

    def arguments(self, attempt: Attempt) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of the call."""
        if self.form == "ours":
            return (attempt.task, attempt.text), {}
        # An answer that is judged alone belongs to no step, so what is logged about it is dropped.
        return (), batch_functions.keywords(self.function, [attempt], StepNumber(), batch_functions.Log(1))

    def read(self, returned: Any) -> Verdict:
        """The function's return value as a verdict."""
        return as_verdict(returned) if self.form == "ours" else batch_functions.verdicts(returned, 1)[0]

    @property
    def batched(self) -> bool:
        """True where the function judges all answers to a prompt in one call."""
        return self.form == "trl"

    async def batch(self, attempts: Sequence[Attempt], at: StepNumber) -> tuple[list[Judged], Gauges]:
        """One verdict for each attempt, from one call. Where the call fails, all of them failed."""
        log = batch_functions.Log(len(attempts))
        try:
            kwargs = batch_functions.keywords(self.function, attempts, at, log)
            returned = await call(self.function, self.timeout, **kwargs)
            verdicts = log.all_written(batch_functions.verdicts(returned, len(attempts)))
        except Exception as error:
            verdicts = [failed_call(error, self.function, self.timeout)] * len(attempts)
        return [self._judged(v) for v in verdicts], log.gauges

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that the tasks have what the function requires. ConfigError if one lacks a column or an answer;
        DataError if a built-in cannot read the answer, or the calls that a task wants."""
        # A user's function may have the name of a built-in, so the functions are compared and not only the names.
        read_answer = ANSWERED.get(self.name) if self.function is BUILTIN.get(self.name) else None
        # TRL's form names the columns that it needs. In ours only the built-ins that compare need one.
        required = _required(self.function) if self.form == "trl" else [] if read_answer is None else ["answer"]
        for task in tasks:
            if self.function is BUILTIN["tool_call"]:
                gold_calls(task)
            available = {*columns(task), *batch_functions.GIVEN}
            if missing := [p for p in required if p not in available]:
                raise ConfigError(
                    f"reward {self.name!r} requires column {missing[0]!r}, which task {task.id!r} does not have:"
                    f" {nearest(missing[0], sorted(available))}"
                )
            if read_answer is not None:
                read_answer(task)


def source(
    function: RewardFunction, *, name: str | None = None, weight: float = 1.0, timeout: float = TIMEOUT
) -> FunctionSource:
    """A Python function as a reward source. Raises ConfigError if its signature has neither form."""
    source_name = name or getattr(function, "__name__", type(function).__name__)
    return FunctionSource(source_name, function, weight, form(function, source_name), timeout)


def form(function: RewardFunction, name: str) -> Form:
    """Returns which of the two signatures a function has."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r} has no readable signature ({error}); wrap it in a function (task, text)"
        ) from error
    if "environments" in _required(function):
        raise ConfigError(
            f"reward {name!r} requires 'environments', which is not available here: an environment judges its own"
            " episodes. What it left behind is in 'state'"
        )
    kinds = {p.kind for p in parameters.values()}
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    # The names decide first: `prompts` or `completions` is TRL's form, even of a function that could also be
    # called with two arguments.
    if set(parameters) & set(batch_functions.ALWAYS):
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
            raise ConfigError(
                f"reward {name!r}: a batch reward is called by keyword, so no parameter may be positional-only"
            )
        return "trl"
    # `*args` can be called with two arguments too, but does not show that it expects these two.
    if inspect.Parameter.VAR_POSITIONAL not in kinds and _takes_two(function):
        first, second = (*parameters, "")[:2]
        if first in ANSWER_NAMES or second in TRUTH_NAMES:
            raise ConfigError(
                f"reward {name!r} has the arguments ({first}, {second}), and would be called with (task, text): text is"
                f" what the model wrote, and task.answer is what column 'answer' holds. Write it as {name}(task, text)"
            )
        return "ours"
    # `def reward(**columns)` names no argument and can only be called by keyword.
    if any_keyword and not _takes_two(function):
        return "trl"
    raise ConfigError(
        f"reward {name!r} has the signature {inspect.signature(function)}, which is neither of the two understood: "
        "(task, text) -> float | Verdict | None, or (prompts, completions, **columns) -> list[float | None]"
    )


def _takes_two(function: RewardFunction) -> bool:
    """Returns whether a function can be called with two positional arguments."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _required(function: RewardFunction) -> list[str]:
    """The names of the parameters without a default that can be given by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
