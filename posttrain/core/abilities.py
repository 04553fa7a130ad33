"""What an environment can do beside playing and judging, declared in one place: `Environment.abilities`.

Whoever needs an ability reads it here and does without it where it is None. So each field says what it is for and what
is lost without it, and a misspelt one is refused instead of never being read.
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
"""What the policy says in one episode, turn by turn."""


class Declared:
    """A dataclass that names the nearest field where it is given one that it does not have."""

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
    """Right answers that an environment knows. They are judged before the first step and again at every step: a
    verifier that gives one another score has changed, or has broken and hides it."""

    right: Callable[[Task], Turns | None]
    """The turns of a right answer; None where none is known to this task."""
    wrong: Callable[[Task], Turns] | None = None
    """Turns that look right and are not. Without them nobody tries whether such an answer is paid."""
    paraphrases: Callable[[Task], tuple[Turns, ...]] = _none
    """Other turns that are as right."""
    verdict: Verify | None = None
    """The environment's own verifier, which `judge` tells under the environment's name. With it the environment
    vouches: `right` scores 1; `wrong` and silence score 0. A run that finds this untrue does not start, or stops.
    Without it `right` may be the data's answer, in no known form, and any score will do as long as it stays the
    same."""
    pays_parts: bool = False
    """Whether an answer that is not right may score a part of 1: then `wrong` and silence must score less than 1."""

    def known(self, tasks: Iterable[Task]) -> list[tuple[Task, Turns]]:
        """Those of the tasks to which a right answer is known, each with it."""
        return [(task, turns) for task in tasks if (turns := self.right(task)) is not None]

    @property
    def vouched(self) -> bool:
        """Whether `right` scores 1 by the environment's word."""
        return self.verdict is not None


class Write(Protocol):
    """Writes one text to imitate."""

    def __call__(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str | tuple[str, ...]]:
        """(prompt, completion without stop token). With probability `wrong` the completion is plausible and false.

        Several completions are the turns of an episode: what the world answers between them comes from playing it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Declared):
    """Texts to imitate."""

    styles: tuple[str, ...]
    """Kinds that it writes, such as answer or cot; a `document` has no prompt."""
    write: Write
    false: bool = True
    """Whether it can write false ones too: `wrong` > 0."""

    def __post_init__(self) -> None:
        if isinstance(self.styles, str) or not self.styles:
            raise ConfigError(
                f"Demonstrations(styles={self.styles!r}): give the names of the styles, such as ('answer',); where"
                " there is none, leave demonstrations out of the abilities"
            )


class DataRow(Protocol):
    """A task of the user's data, with where it stands there."""

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
    """What an environment can do beside playing and judging. All of it is optional: `Abilities()` plays and is
    judged."""

    key: Callable[[Task], Hashable] | None = None
    """What makes two tasks the same, so that no held-out task is trained on. Without it two tasks are the same where
    their prompts
    are: one that is put in other words is not found."""
    alphabet: str | None = None
    """Every character that prompts, answers and demonstrations use. A model that is built on the spot gets a tokenizer
    of these; without it, one of bytes."""
    contained: tuple[str, ...] = ()
    """Names of the sandboxes in which programs of the policy run, for `run.json`; after `none` every verdict says that
    nothing contained them. Without it a record does not tell that programs ran."""
    gold: GoldAnswers | None = None
    """Right answers. Without them no verifier is proved before the first step, and none that breaks later is found by
    its answers."""
    demonstrations: Demonstrations | None = None
    """Texts to imitate. Without them there is no supervised stage, and no group is shown a demonstration."""
    rows: Sequence[DataRow] | None = None
    """The user's data, where tasks come from there. Each row is measured before the first step, and an error names its
    place; without it a prompt that is too long is found when it is asked."""
    tools: Callable[[Task], Sequence[Mapping[str, Any]]] | None = None
    """What a conversation about a task is told of its tools, as JSON schemas, where that is known before it is played.
    Without it the room that they take in a prompt is found when it is asked."""

    def __post_init__(self) -> None:
        if isinstance(self.contained, str):
            raise ConfigError(
                f"Abilities(contained={self.contained!r}): give a tuple of names, such as ({self.contained!r},)"
            )


def declared(environment: Any) -> Abilities:
    """The abilities of an environment; ConfigError where it declares none, which says what to add."""
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
    """The texts to imitate of an environment; ConfigError where it writes none."""
    found = declared(environment).demonstrations
    if found is None:
        raise ConfigError(
            f"environment {environment.name!r} writes no demonstrations. Give it abilities with"
            " demonstrations=Demonstrations(styles, write) (posttrain.core.abilities), or leave out what imitates"
        )
    return found
