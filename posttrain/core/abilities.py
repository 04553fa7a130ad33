"""The optional abilities of an environment, declared in one place: `Environment.abilities`.

Code that needs an ability reads it here, and does without it where it is None. So each field says what it is for and
what is lost without it. A misspelt field is refused, because it would never be read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from posttrain.core.errors import ConfigError, nearest
from posttrain.core.types import Message, Task
from posttrain.core.verdict import Verdict

if TYPE_CHECKING:
    from posttrain.core.ports import Attempt

Turns = tuple[str, ...]
"""The texts of the policy's turns in one episode."""


class Declared:
    """Base of dataclasses whose error for an unknown field names the nearest one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: object, **given: object) -> Self:
        known = tuple(cls.__dataclass_fields__)
        if strange := [name for name in given if name not in known]:
            raise ConfigError(f"{cls.__name__}({strange[0]}=...): there is no such field: {nearest(strange[0], known)}")
        return super().__new__(cls)


class Verify(Protocol):
    """A verdict about one attempt."""

    def __call__(self, attempt: Attempt) -> Awaitable[Verdict]: ...


def _none(task: Task) -> tuple[Turns, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class GoldAnswers(Declared):
    """Right answers that an environment knows. They are judged before the first step and again at every step. If a
    score changes, the verifier has changed, or it fails without an error."""

    right: Callable[[Task], Turns | None]
    """The turns of a right answer; None where none is known for this task."""
    wrong: Callable[[Task], Turns] | None = None
    """Turns that look right but are wrong. Without them it is not tested whether such an answer gets a reward."""
    paraphrases: Callable[[Task], tuple[Turns, ...]] = _none
    """Other turns that are equally right."""
    verdict: Verify | None = None
    """The environment's own verifier, whose verdict `judge` returns under the environment's name. With it the
    environment guarantees that `right` scores 1, and that `wrong` and an empty answer score 0. If this is false, a run
    does not start, or stops. Without it `right` may be the data's answer in any form, and every score is accepted as
    long as it stays the same."""
    pays_parts: bool = False
    """Whether an answer that is not right may score between 0 and 1. Then `wrong` and an empty answer must score less
    than 1."""

    def known(self, tasks: Iterable[Task]) -> list[tuple[Task, Turns]]:
        """The tasks for which a right answer is known, each with that answer."""
        return [(task, turns) for task in tasks if (turns := self.right(task)) is not None]

    @property
    def vouched(self) -> bool:
        """Whether the environment guarantees that `right` scores 1."""
        return self.verdict is not None


class Write(Protocol):
    """Writes one text to imitate."""

    def __call__(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str | tuple[str, ...]]:
        """(prompt, completion without stop token). With probability `wrong` the completion is plausible and false.

        Several completions are the turns of an episode. The observations between them come from playing it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Declared):
    """Texts to imitate."""

    styles: tuple[str, ...]
    """Styles that it can write, such as answer or cot; a `document` has no prompt."""
    write: Write
    false: bool = True
    """Whether it can also write false texts (`wrong` > 0)."""

    def __post_init__(self) -> None:
        if isinstance(self.styles, str) or not self.styles:
            raise ConfigError(
                f"Demonstrations(styles={self.styles!r}): give the names of the styles, such as ('answer',); where"
                " there is none, leave demonstrations out of the abilities"
            )


class DataRow(Protocol):
    """A task of the user's data, with its place there."""

    @property
    def task(self) -> Task: ...

    @property
    def completion(self) -> str | None:
        """The row's text to imitate, where it has one."""
        ...

    @property
    def place(self) -> str:
        """`file:line`, for messages."""
        ...


@dataclass(frozen=True, kw_only=True)
class Abilities(Declared):
    """What an environment can do beside playing and judging. Every field is optional; `Abilities()` has none."""

    key: Callable[[Task], Hashable] | None = None
    """Key of a task; two tasks with equal keys are the same. It keeps held-out tasks out of training. Without it two
    tasks are the same where their prompts are equal, so a task in other words is not found."""
    alphabet: str | None = None
    """Every character that prompts, answers and demonstrations use. A built model gets a tokenizer of these characters;
    without it, a tokenizer of bytes."""
    contained: tuple[str, ...] = ()
    """Names of the sandboxes in which programs of the policy run, for `run.json`. With `none`, every verdict says that
    no sandbox contained them. Without it the record does not show that programs ran."""
    gold: GoldAnswers | None = None
    """Right answers. Without them no verifier is tested before the first step, and a verifier that fails later is not
    found by its scores."""
    demonstrations: Demonstrations | None = None
    """Texts to imitate. Without them there is no supervised stage, and no group contains a demonstration."""
    rows: Sequence[DataRow] | None = None
    """The user's data, where tasks come from there. The length of each row is tested before the first step, and an
    error names its place. Without it a prompt that is too long is found only when it is played."""
    tools: Callable[[Task], Sequence[Mapping[str, Any]]] | None = None
    """JSON schemas of the tools in a conversation about a task, where they are known before it is played. Without it
    their length in a prompt is known only when it is played."""

    def __post_init__(self) -> None:
        if isinstance(self.contained, str):
            raise ConfigError(
                f"Abilities(contained={self.contained!r}): give a tuple of names, such as ({self.contained!r},)"
            )


def declared(environment: Any) -> Abilities:
    """The abilities of an environment. Raises ConfigError where it declares none; the message says what to add."""
    found = getattr(environment, "abilities", None)
    if isinstance(found, Abilities):
        return found
    own = type(environment).__name__
    if callable(found):
        raise ConfigError(f"environment {own}: abilities is a method. Write @property above it, so that it can be read")
    said = "declares no abilities" if found is None else f"has abilities of type {type(found).__name__}, not Abilities"
    raise ConfigError(
        f"environment {own} {said}: derive it from posttrain.core.ports.Environment, or write `abilities = Abilities()`"
        " into it (posttrain.core.abilities) and name in it what the environment can do beside playing and judging"
    )


def demonstrations(environment: Any) -> Demonstrations:
    """The demonstrations of an environment. Raises ConfigError where it writes none."""
    found = declared(environment).demonstrations
    if found is None:
        raise ConfigError(
            f"environment {environment.name!r} writes no demonstrations. Give it abilities with"
            " demonstrations=Demonstrations(styles, write) (posttrain.core.abilities), or leave out what imitates"
        )
    return found
