"""The parts of a page of the lab.

A lesson is data and one function: `compute(knobs)` returns a `Readout`, by calling the library. It is pure: the same
knobs give the same readout. Where it trains, it is a generator that yields readouts while it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.config.stages.reinforce import Reinforce
from posttrain.core.gauge import Gauge, Step
from posttrain.system.errors import ConfigError, PosttrainError
from posttrain.web.picture import Picture

Values = Mapping[str, Any]
"""The position of every knob, by name."""
Part = Literal["the framework", "the algorithms", "production", "the engineer", "synthesis", "the ladder"]
Force = Literal["signal", "estimator", "cost"]
Pace = Literal["live", "release", "train"]
"""When a page computes: while a knob moves (below 50 ms), when it is let go, or at a press (it trains)."""


# --- knobs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slider:
    """A number between two ends. With `log` equal ways multiply by equal factors. Whole where step and ends are."""

    name: str
    label: str
    default: float
    low: float
    high: float
    step: float = 1.0
    log: bool = False

    def read(self, given: Any) -> float | int:
        """The value as compute receives it. Raises ConfigError where it is none of this knob's."""
        if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
            raise ConfigError(f"{self.name}: {given!r} is not a number")
        if not self.low <= given <= self.high:
            raise ConfigError(f"{self.name}={given} lies outside {self.low}..{self.high}")
        return round(given) if self.whole else float(given)

    @property
    def whole(self) -> bool:
        return all(float(x).is_integer() for x in (self.step, self.low, self.high))

    def tried(self) -> tuple[Any, ...]:
        """Positions that tests and the grid of the site play: both ends, the middle, the default."""
        middle = math.sqrt(self.low * self.high) if self.log else self.low + (self.high - self.low) / 2
        if not self.log:
            middle = self.low + round((middle - self.low) / self.step) * self.step
        return tuple(dict.fromkeys(self.read(x) for x in (self.low, middle, self.high, self.default)))


@dataclass(frozen=True)
class Options:
    """One of several words."""

    name: str
    label: str
    default: str
    options: tuple[str, ...]

    def read(self, given: Any) -> str:
        if given not in self.options:
            raise ConfigError(f"{self.name}: {given!r} is none of {', '.join(self.options)}")
        return given

    def tried(self) -> tuple[Any, ...]:
        return self.options


@dataclass(frozen=True)
class Toggle:
    """On or off."""

    name: str
    label: str
    default: bool

    def read(self, given: Any) -> bool:
        if not isinstance(given, bool):
            raise ConfigError(f"{self.name}: {given!r} is neither true nor false")
        return given

    def tried(self) -> tuple[Any, ...]:
        return (False, True)


@dataclass(frozen=True)
class TextInput:
    """A line of text that somebody types, at most `longest` characters."""

    name: str
    label: str
    default: str
    longest: int = 200

    def read(self, given: Any) -> str:
        if not isinstance(given, str) or len(given) > self.longest:
            raise ConfigError(f"{self.name}: a text of at most {self.longest} characters is needed")
        return given

    def tried(self) -> tuple[Any, ...]:
        return ("", self.default)


Knob = Slider | Options | Toggle | TextInput


# --- what a page shows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speech:
    """A sentence of the library: what a run would print, by whom."""

    name: str
    """Name of the rule, the check or the error."""
    kind: Literal["rule", "check", "refusal"]
    text: str


ALWAYS = {"optim/steps": 1.0, "optim/grad_norm": 0.0}
"""Gauges that every recorded step has."""


def recorded(series: Mapping[str, Sequence[float]], stage: str = "rl") -> list[Step]:
    """Steps of a record with these gauges, as rules read them: one value a step, each counted once.

    >>> [s.gauges["rollout/reward"].mean for s in recorded({"rollout/reward": [0.5, 0.25]})]
    [0.5, 0.25]
    """
    count = max((len(values) for values in series.values()), default=0)
    series = {**{name: [x] * count for name, x in ALWAYS.items()}, **series}
    return [
        Step(stage, i + 1, i + 1, {name: Gauge(float(v[i]), 1) for name, v in series.items() if i < len(v)})
        for i in range(count)
    ]


def by_rules(history: Sequence[Step], stage: Reinforce, *names: str) -> tuple[Speech, ...]:
    """Returns the messages of a run's rules while these steps are made: each rule once, when it speaks first. With
    names, these rules alone."""
    from posttrain.diagnose.rules.all_rules import findings

    said: dict[str, Speech] = {}
    for end in range(1, len(history) + 1):
        for f in findings(history[:end], stage):
            if not names or f.rule in names:
                said.setdefault(f.rule, Speech(f.rule, "rule", f.message))
    return tuple(said.values())


def refusal(call: Callable[[], object], name: str = "") -> tuple[Speech, ...]:
    """The sentence with which the library refuses a call; () where it does not refuse."""
    try:
        call()
    except PosttrainError as error:
        kind = "refusal" if isinstance(error, ConfigError) else "check"
        return (Speech(name or type(error).__name__, kind, str(error)),)
    return ()


@dataclass(frozen=True)
class Readout:
    """The result of one position of the knobs."""

    pictures: Sequence[Picture]
    sentence: str = ""
    """Sentence on what is to be seen, with the values inside, in Markdown of one line."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name, shown as a row; exercises ask for them."""
    says: Sequence[Speech] = ()
    progress: float = 1.0
    """The share of the work that is done. Below 1 more readouts follow."""

    def as_json(self) -> dict[str, Any]:
        return {
            "pictures": [p.as_json() for p in self.pictures],
            "sentence": self.sentence,
            # Six digits are more than the page shows. JSON has no number that is not finite.
            "values": {k: (float(f"{v:.6g}") if math.isfinite(v) else None) for k, v in self.values.items()},
            "says": [[s.name, s.kind, s.text] for s in self.says],
            "progress": self.progress,
        }


# --- what a page asks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Break:
    """The setting that breaks training, and the library's sentence about it."""

    values: Mapping[str, Any]
    """Knobs that leave their default; all others go back to it."""
    what: str
    """Sentence on what one sees."""
    speaks: str | None
    """Name of the rule, check or error that must speak. None: no run would notice this, and the page says so."""
    label: str = ""
    """Text of the button, where a page has several."""


@dataclass(frozen=True)
class Claim:
    """A number of the literature or the curriculum, with ours beside it."""

    text: str
    source: str
    claimed: float
    ours: Callable[[], float]
    within: float = 0.02
    """Share of the claimed number by which ours may differ."""
    why: str = ""
    """Where it does not hold: why."""

    def holds(self, found: float) -> bool:
        return abs(found - self.claimed) <= self.within * max(abs(self.claimed), 1e-12)


@dataclass(frozen=True)
class AskNumber:
    """An exercise whose answer is a number."""

    question: str
    answer: float
    within: float = 0.01
    """Share of the answer by which a reply may differ."""
    why: str = ""


@dataclass(frozen=True)
class AskChoice:
    """An exercise whose answer is one of several."""

    question: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right one."""
    why: str = ""


@dataclass(frozen=True)
class AskKnobs:
    """An exercise that is solved by a position of the knobs: a value of the readout must reach a bound."""

    question: str
    value: str
    at_least: float | None
    at_most: float | None
    solved: Mapping[str, Any]
    """A position that solves it; knobs that are not named keep their default."""
    why: str = ""

    def met(self, values: Mapping[str, float]) -> bool:
        x = values.get(self.value, math.nan)
        low, high = self.at_least, self.at_most
        return math.isfinite(x) and (low is None or x >= low) and (high is None or x <= high)


Exercise = AskNumber | AskChoice | AskKnobs


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One page. What is written as a plain value here is read by the map without an import."""

    number: str
    """As the curriculum counts: 01 to 28, 18a, L1."""
    name: str
    """The word of the address and of `posttrain lab NAME`."""
    title: str
    part: Part
    force: Force
    minutes: int
    question: str
    """One sentence."""
    idea: str
    """Markdown, at most 150 words."""
    formula: str
    knobs: tuple[Knob, ...]
    compute: Callable[[Values], Readout] | Callable[[Values], Iterator[Readout]]
    pace: Pace = "live"
    breaks: tuple[Break, ...] = ()
    claims: tuple[Claim, ...] = ()
    exercises: tuple[Exercise, ...] = ()
    code: tuple[str, ...] = ()
    """Dotted names of the functions that compute here."""
    docs: str = ""
    """The page of the documentation, such as `guides/staleness.md`."""
    command: str = ""
    """Command that does the same in a real run."""
    grid: tuple[str, ...] = ()
    """The one or two knobs that the documentation site has computed readouts for; () means the first."""
    missing: str = ""
    """Thing that the page waits for; '' where it is whole."""

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All knobs, with the default where none is given. Raises ConfigError for what is no knob or no value of it."""
        known = {k.name: k for k in self.knobs}
        if wrong := [name for name in given if name not in known]:
            raise ConfigError(f"{', '.join(map(repr, wrong))}: page {self.number} has the knobs {', '.join(known)}")
        return {name: k.read(given.get(name, k.default)) for name, k in known.items()}

    def readouts(self, values: Values) -> Iterator[Readout]:
        """The readouts of a position; of a page that does not train there is one."""
        result = self.compute(values)
        if isinstance(result, Readout):
            yield result
        else:
            yield from result

    def last(self, values: Values) -> Readout:
        """The final readout of a position."""
        *_, final = self.readouts(values)
        return final
