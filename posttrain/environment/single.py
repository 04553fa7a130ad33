"""What environments share: settings as fields, a task source, see-and-say, and rewards added by the user."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from posttrain.core.abilities import Abilities, Demonstrations, GoldAnswers
from posttrain.core.env import SandboxSettings
from posttrain.core.errors import ConfigError
from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.spread import RESOLUTION
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.verifier.source import ContainedSource, Source, SourceWithProcesses

HELDOUT_SEED = 20_240_229
"""Seed of every generated held-out set: never the run's, so that runs of different seeds answer the same questions."""


@dataclass(frozen=True)
class Generated:
    """Tasks without end: task i is a pure function of the index."""

    make: Callable[[int], Task]

    @property
    def count(self) -> int | None:
        return None

    def task(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"task index {index} is negative")
        return self.make(index)


@dataclass(frozen=True)
class Listed:
    """A finite list of tasks."""

    tasks: tuple[Task, ...]

    @property
    def count(self) -> int | None:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        if not 0 <= index < len(self.tasks):
            raise IndexError(f"task index {index} of {len(self.tasks)} tasks")
        return self.tasks[index]


@dataclass(frozen=True, kw_only=True)
class SingleTurn(ABC):
    """One question, one answer, one verifier: the base of every environment here.

    A subclass is a frozen dataclass. Fields it adds are its settings (`Env.args`); the fields below are set by
    whoever builds it. It gives `name`, `train`, `heldout`, `verify` (or `verdict`), and for its proof `key`, `gold` and
    `distractor`. A task of several turns overrides `play`.
    """

    seed: int = 0
    """Of the training tasks."""
    heldout_count: int = 200
    rewards: tuple[Source, ...] = ()
    """Sources judged beside the environment's own verifier."""
    limits: EpisodeLimits = EpisodeLimits()
    """Of its episodes; those on turns, tokens and time hold whatever the environment does."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where programs run that the policy wrote."""
    resolution: float = RESOLUTION
    """Of its own verdicts (`core.spread`); larger where a model gives them."""

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Names that `Env.args` may set."""
        own = {f.name for f in fields(SingleTurn)}
        return tuple(f.name for f in fields(cls) if f.name not in own)

    def __init_subclass__(cls) -> None:
        """ConfigError where a class gives one half of its demonstrations: the other has another name, or is missing."""
        super().__init_subclass__()
        given = [f"{n}()" for n in ("styles", "demonstrate") if getattr(cls, n) is not getattr(SingleTurn, n)]
        if len(given) == 1:
            raise ConfigError(
                f"environment class {cls.__name__} has {given[0]} alone: an environment that writes texts to imitate"
                " has styles and demonstrate()"
            )

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def train(self) -> TaskSource: ...

    @property
    @abstractmethod
    def heldout(self) -> Sequence[Task]: ...

    @property
    @abstractmethod
    def alphabet(self) -> str:
        """Every character that prompts, gold answers and demonstrations use, for a character tokenizer."""

    def verify(self, attempt: Attempt) -> Verdict:
        """The environment's own verdict, at once; what the policy says may make it 0 but never makes it raise."""
        raise NotImplementedError(
            f"environment {self.name!r} has neither verify() nor, where judging has to wait, verdict()"
        )

    async def verdict(self, attempt: Attempt) -> Verdict:
        """`verify`; given instead of it where judging waits for a sandbox or a server."""
        return self.verify(attempt)

    @abstractmethod
    def key(self, task: Task) -> Hashable:
        """What makes two tasks the same; no held-out key occurs in train."""

    @abstractmethod
    def gold(self, task: Task) -> tuple[str, ...]:
        """Turns that earn full reward."""

    def paraphrases(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Other turns that must earn as much as `gold`; `posttrain check` tries them."""
        return ()

    def knows_gold(self, task: Task) -> bool:
        """Whether `gold` has an answer to this task."""
        return True

    @property
    def vouches_for_gold(self) -> bool:
        """Whether `gold` earns full reward by the environment's own word. Not where it is only the data's answer, in no
        known form."""
        return True

    @property
    def contained(self) -> tuple[str, ...]:
        """Names of the sandboxes that programs of the policy run in here."""
        return tuple(sorted({s.contained for s in self.rewards if isinstance(s, ContainedSource)}))

    @property
    def pays_parts(self) -> bool:
        """Whether the verifier may pay a part of the reward for an answer that is not right."""
        return False

    @abstractmethod
    def distractor(self, task: Task) -> tuple[str, ...]:
        """Turns that look like gold and earn nothing."""

    @property
    def styles(self) -> tuple[str, ...]:
        """Kinds of text to imitate that `demonstrate` writes; both are given, or none."""
        return ()

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str | tuple[str, ...]]:
        """See `core.abilities.Write`."""
        raise ConfigError(
            f"environment {self.name!r} writes no demonstrations: give its class styles and demonstrate()"
        )

    @property
    def abilities(self) -> Abilities:
        """What everybody else reads of the methods above."""
        return self._abilities

    @cached_property
    def _abilities(self) -> Abilities:
        gold = GoldAnswers(
            right=lambda task: self.gold(task) if self.knows_gold(task) else None,
            wrong=self.distractor,
            paraphrases=self.paraphrases,
            verdict=self.verdict if self.vouches_for_gold else None,
            pays_parts=self.pays_parts,
        )
        texts = Demonstrations(styles=self.styles, write=self.demonstrate) if self.styles else None
        return Abilities(
            key=self.key, alphabet=self.alphabet, contained=self.contained, gold=gold, demonstrations=texts
        )

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        return (await talk.say()).stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        own = Judged(self.name, 1.0, await self.verdict(attempt), resolution=self.resolution)
        return (own, *self.steps(attempt), *await self.added(attempt))

    def steps(self, attempt: Attempt) -> tuple[Judged, ...]:
        """Verdicts about parts of the answer (`Judged.end`), for algorithms that give credit by step."""
        return ()

    async def added(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The verdicts of the user's rewards, asked at the same time."""
        return tuple(await asyncio.gather(*(source(attempt) for source in self.rewards)))

    def gauges(self) -> Gauges:
        """Queue and latency of the verifiers that run in workers, since the last call."""
        return merge(*(s.gauges() for s in self.rewards if isinstance(s, SourceWithProcesses)))

    def close(self) -> None:
        """End what the verifiers keep running; it also ends by itself with the program."""
        vars(self).pop("_abilities", None)  # they hold the environment, which holds them
        for s in self.rewards:
            if isinstance(s, SourceWithProcesses):
                s.close()


def require(condition: bool, name: str, message: str) -> None:
    """A setting's check: ConfigError that names the environment and says what to change."""
    if not condition:
        raise ConfigError(f"env {name}: {message}")
