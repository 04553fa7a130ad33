"""An environment's optional abilities, beyond playing and judging. It declares them in `Environment.abilities`.

A caller that needs an ability reads its field and does without it if the field is None. Each field says what it is for
and what is lost without it. A misspelt field is an error, because otherwise nothing would ever read it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from posttrain.core.conversation import LearnedConversation
from posttrain.core.gauge import Gauges
from posttrain.core.judgements import Judgement, Kind
from posttrain.core.stop import StepNumber
from posttrain.core.types import Group, Message, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.system.errors import ConfigError, nearest

if TYPE_CHECKING:
    from posttrain.core.ports import Attempt

Turns = tuple[str, ...]
"""The policy's turns in one episode, in order."""


class Declared:
    """A dataclass whose constructor, given an unknown field, raises a ConfigError that names the nearest field."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: object, **given: object) -> Self:
        # `__new__` runs before the dataclass's `__init__`, whose TypeError would not name the nearest field.
        known = tuple(cls.__dataclass_fields__)
        if strange := [name for name in given if name not in known]:
            raise ConfigError(f"{cls.__name__}({strange[0]}=...): there is no such field: {nearest(strange[0], known)}")
        return super().__new__(cls)


class Verify(Protocol):
    """Returns a verdict about one attempt."""

    def __call__(self, attempt: Attempt) -> Awaitable[Verdict]: ...


class Together(Protocol):
    """Judges the finished attempts of one group by the sources that compare or batch them. Returns the verdicts of each
    attempt, in order, and what the sources logged."""

    async def __call__(
        self, attempts: Sequence[Attempt], at: StepNumber
    ) -> tuple[list[tuple[Judged, ...]], Gauges]: ...


def _none(task: Task) -> tuple[Turns, ...]:
    """No paraphrases are known."""
    return ()


@dataclass(frozen=True, kw_only=True)
class GoldAnswers(Declared):
    """Right answers that an environment knows. They are judged before the first step and again at every step. If a
    score differs later, the verifier has changed or is broken."""

    right: Callable[[Task], Turns | None]
    """The turns of a right answer; None if none is known for this task."""
    wrong: Callable[[Task], Turns] | None = None
    """The turns of an answer that looks right and is not. Without it, the verifier is not tested on such answers."""
    paraphrases: Callable[[Task], tuple[Turns, ...]] = _none
    """Further right answers, each as turns."""
    verdict: Verify | None = None
    """The environment's own verifier. `judge` reports its verdict under the environment's name. With it the environment
    promises that `right` scores 1, and that `wrong` and an empty answer score 0. A run that finds this untrue does not
    start, or stops. Without it `right` may be the data's answer, whose form is not known. Then any score is accepted as
    long as it stays the same."""
    pays_parts: bool = False
    """Whether there is partial credit. If so, `wrong` and an empty answer need only score less than 1."""

    def known(self, tasks: Iterable[Task]) -> list[tuple[Task, Turns]]:
        """The tasks for which a right answer is known, each with that answer."""
        return [(task, turns) for task in tasks if (turns := self.right(task)) is not None]


class Write(Protocol):
    """Writes one demonstration: (prompt, completion without stop token). With probability `wrong` the completion is
    plausible and false. A tuple of completions is the turns of an episode: it is played, and the environment's messages
    between the turns come from that."""

    def __call__(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str | tuple[str, ...]]: ...


def _alone(task: Task, style: str) -> LearnedConversation | None:
    """Only the completion is learned."""
    return None


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Declared):
    """Texts to imitate, for supervised stages."""

    styles: tuple[str, ...]
    """Names of the kinds of text, such as answer or cot. A `document` has no prompt."""
    write: Write
    false: bool = True
    """Whether `write` can also write false texts (`wrong` > 0)."""
    conversation: Callable[[Task, str], LearnedConversation | None] = _alone
    """The conversation of a task's demonstration in a style, where more than its completion may be learned; or None."""

    def __post_init__(self) -> None:
        if isinstance(self.styles, str) or not self.styles:
            raise ConfigError(
                f"Demonstrations(styles={self.styles!r}): give the names of the styles, such as ('answer',); where"
                " there is none, leave demonstrations out of the abilities"
            )


class Draw(Protocol):
    """Gives one judgement of a kind about a task. Rows of data give their own; worlds write and judge completions."""

    def __call__(self, task: Task, kind: Kind, rng: np.random.Generator) -> Judgement: ...


@dataclass(frozen=True, kw_only=True)
class Judgements(Declared):
    """Completions that somebody judged, for stages that learn from preferences."""

    kinds: tuple[Kind, ...]
    """The kinds that `draw` can give."""
    draw: Draw
    every: Callable[[Task, Kind], Sequence[Judgement]] | None = None
    """Judgements that hold every completion which `draw` may give of a task, where it chooses among several: each has
    to fit into a model's context. None: any draw holds them all, or they are without end."""
    utility: Callable[[Task, str], float] | None = None
    """The true value of a completion, where the environment knows it: a judge without error would prefer the higher
    value. No loss and no reward model reads it; it measures what they learned."""
    features: Callable[[Task, str], Mapping[str, float]] | None = None
    """The parts of the value from `utility`, by name, each in 0..1."""
    good: float = 0.5
    """A completion of at least this value is good."""

    def __post_init__(self) -> None:
        if isinstance(self.kinds, str) or not self.kinds:
            raise ConfigError(
                f"Judgements(kinds={self.kinds!r}): give the kinds of judgement, such as ('pair',); where there is"
                " none, leave judgements out of the abilities"
            )


@dataclass(frozen=True, kw_only=True)
class Judging(Declared):
    """How a policy that learned this environment judges the answers of another one (`env.rewards=judge:PATH`)."""

    sides: int
    """Completions that one judgement sees: 1 or 2."""
    prompt: Callable[[str, Sequence[str]], str]
    """Function that writes the text the judge is shown, from the question and the completions, in this order."""
    read: Callable[[str], tuple[float, ...] | None]
    """The verdict's score of each completion; None where a text has no verdict."""
    ends: tuple[str, ...]
    """The words of a verdict: for the first side and for the second, or good and not good."""
    regraded: Callable[[Task], Task]
    """The same task as if the other verdict were right. What a policy sees of the task must stay the same."""
    better: Callable[[Task], int]
    """The place of the better completion; of one completion, 1 good and 0 not good."""
    separator: str = ""
    """The text that ends a step, where one judgement is about an answer up to there. '': it is about whole answers."""


class Measures(Protocol):
    """Measures held-out episodes beside their outcomes. The names of its gauges begin with `eval/`."""

    def __call__(self, groups: Sequence[Group]) -> Gauges: ...


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """One finding of a look at the user's data, with figures and advice."""

    name: str = field(kw_only=False)
    seen: str = field(kw_only=False)
    """The finding, in figures."""
    warns: bool = False
    """Whether somebody should look at it."""
    advice: str = ""
    """Advice to the user, where the finding warns."""


class Lint(Protocol):
    """Looks at the user's data before training. `length` counts the tokens of a prompt with a completion, and `context`
    is the most that a model reads; without them nothing is said of the context."""

    def __call__(self, length: Callable[[Task, str], int] | None = None, context: int = 0) -> Sequence[LintFinding]: ...


class DataRow(Protocol):
    """A task of the user's data, with its demonstration (`completion`), the whole conversation where more than the
    completion may be learned, its judgement, and its place (`file:line`, for messages)."""

    @property
    def task(self) -> Task: ...
    @property
    def completion(self) -> str | None: ...
    @property
    def conversation(self) -> LearnedConversation | None: ...
    @property
    def judged(self) -> Any: ...
    @property
    def place(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Abilities(Declared):
    """An environment's optional abilities. With `Abilities()` it can be played and judged, and nothing more."""

    key: Callable[[Task], Hashable] | None = None
    """Tasks with equal keys are one task, so that no held-out task is trained on. Without it prompts are compared."""
    alphabet: str | None = None
    """Every character in prompts, answers and demonstrations. A model that the run builds itself gets a tokenizer of
    these characters; without them, a tokenizer of bytes."""
    contained: tuple[str, ...] = ()
    """Names of the sandboxes in which programs of the policy run, for `run.json`. With the sandbox `none` every verdict
    says that the programs were not contained. Without it a record does not show that programs ran."""
    gold: GoldAnswers | None = None
    """Right answers. Without them a verifier that is broken, or breaks later, is not found by its answers."""
    demonstrations: Demonstrations | None = None
    """Texts to imitate. Without them there is no supervised stage, and no group gets a demonstration."""
    judgements: Judgements | None = None
    """Completions that somebody judged. Without them no stage can learn from preferences here."""
    judges: bool = True
    """Whether it judges answers at all. False for data without a reward: then nothing is evaluated by sampling, and no
    stage learns from reward here."""
    rows: Sequence[DataRow] | None = None
    """The rows of the user's data, if the tasks come from there. The length of each is checked before the first step,
    and an error names the row's place. Without them a prompt that is too long is found only when it is used."""
    lint: Lint | None = None
    """Looks for what may be wrong with the data. Its findings are printed before training and by `posttrain check`."""
    together: Together | None = None
    """Reward sources that get all answers to a prompt in one call. The rollout calls it once all of them have ended.
    Without it each answer is judged alone. `judge` still asks them, with one answer, where an answer comes alone."""
    tools: Callable[[Task], Sequence[Mapping[str, Any]]] | None = None
    """JSON schemas of the tools in a conversation about a task, if they are known before it is played. Without it the
    length that they add to a prompt is known only when the prompt is used."""
    judging: Judging | None = None
    """How to judge as this environment does. Without it a policy that was trained here cannot be a reward."""
    measures: Measures | None = None
    """Measures of held-out episodes beside accuracy and reward. Without it nothing more is measured."""
    seats: Callable[[Task], Mapping[str, Turns]] | None = None
    """Turns of the other seats of an episode, for a policy that is a script. Without it none can play with them."""
    hint: Callable[[Task], str | tuple[Message, ...] | None] | None = None
    """The prompt of a task with its answer as a hint; None for a task that has no such prompt. The policy's answer to
    it is judged like any answer to the task, and is learned under the task's own prompt. So nothing that the
    environment says later in the episode may repeat the hint. It is also called with a task whose `Task.answer` is the
    text of another right answer. Without it no stage can rationalise here, and no teacher can be shown a hint."""

    def __post_init__(self) -> None:
        if isinstance(self.contained, str):
            raise ConfigError(
                f"Abilities(contained={self.contained!r}): give a tuple of names, such as ({self.contained!r},)"
            )

    @property
    def vouched(self) -> bool:
        """True where the environment promises that its right answers score 1."""
        return self.gold is not None and self.gold.verdict is not None


def declared(environment: Any) -> Abilities:
    """The abilities of an environment. Raises ConfigError, which says what to add, if it declares none."""
    abilities = getattr(environment, "abilities", None)
    if isinstance(abilities, Abilities):
        return abilities
    class_name = type(environment).__name__
    # A frequent mistake, a method without @property, gets a message of its own.
    if callable(abilities):
        raise ConfigError(
            f"environment {class_name}: abilities is a method. Write @property above it, so that it can be read"
        )
    problem = (
        "declares no abilities"
        if abilities is None
        else f"has abilities of type {type(abilities).__name__}, not Abilities"
    )
    raise ConfigError(
        f"environment {class_name} {problem}: derive it from posttrain.core.ports.Environment, or write `abilities ="
        " Abilities()` into it (posttrain.core.abilities) and name in it what the environment can do beside playing and"
        " judging"
    )


def _having(environment: Any, ability: str, why: str) -> Any:
    """An ability of an environment. Raises ConfigError, which says why it is needed, if it has none."""
    value = getattr(declared(environment), ability)
    if value is None:
        raise ConfigError(f"environment {environment.name!r} {why}")
    return value


def demonstrations(environment: Any) -> Demonstrations:
    """The demonstrations of an environment; ConfigError where it has none."""
    return _having(
        environment,
        "demonstrations",
        "writes no demonstrations. Give it abilities with demonstrations=Demonstrations(styles, write)"
        " (posttrain.core.abilities), or leave out what imitates",
    )


def judgements(environment: Any) -> Judgements:
    """The judgements of an environment; ConfigError where it has none."""
    for_own_class = ", or give it abilities with judgements=Judgements(kinds, draw) (posttrain.core.abilities)"
    further = "; docs/guides/preference_data.md has every form" if environment.name == "prompts" else for_own_class
    why = "has no judged completions. Give rows with the columns chosen and rejected: env=prompts env.prompts=FILE"
    return _having(environment, "judgements", why + further)


def hints(environment: Any) -> Callable[[Task], str | tuple[Message, ...] | None]:
    """The function that writes the hinted prompts of an environment; ConfigError where it has none."""
    return _having(
        environment,
        "hint",
        "writes no hints, and a stage with method.rationalise=true asks with the answer as a hint, as one with"
        " algorithm.hint shows it to the teacher. Set method.rationalise=false or hint=none, give your prompts an"
        " answer and env.args.hint, or give the environment abilities with hint=... (posttrain.core.abilities)",
    )
