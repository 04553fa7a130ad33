"""The base class of environments, `SingleTurn`: settings as fields, one turn, and the user's own rewards.

Also the two sources of tasks (`Generated`, `Listed`), and the settings that every environment gets from a run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.config.env import Env, SandboxSettings
from posttrain.core.abilities import Abilities, Demonstrations, GoldAnswers, Judgements
from posttrain.core.gauge import Gauges, merge
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.stop import EpisodeLimits, StepNumber
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.judged.synthetic_preferences import judgements_of
from posttrain.system.errors import ConfigError, nearest
from posttrain.verifier.reward_source import BatchSource, Checked, ContainedSource, Source, SourceWithProcesses

HELDOUT_SEED = 20_240_229
"""Seed of every generated held-out set. It is not the run's seed, so runs of different seeds are evaluated alike."""


@dataclass(frozen=True)
class Generated:
    """An endless source of tasks: task i is a pure function of i."""

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
    """One question, one answer, one verifier. Every environment here is a subclass.

    A subclass is a frozen dataclass. The fields it adds are its settings (`Env.args`); those below are set from the
    run's configuration. It defines `name`, `train`, `heldout`, `key` and `verify` (or `verdict`), and where they mean
    something `gold` and `distractor`, by which `posttrain check` tries it, and `alphabet`. An environment of several
    turns overrides `play`.
    """

    seed: int = 0
    """Seed of the training tasks."""
    heldout_count: int = 200
    rewards: tuple[Source, ...] = ()
    """The user's reward sources, judged in addition to the environment's own verifier."""
    limits: EpisodeLimits = EpisodeLimits()
    """Limits of an episode. Those on turns, tokens and time are enforced whatever the environment does."""
    sandbox: SandboxSettings = SandboxSettings()
    """Which sandbox runs programs that the policy wrote."""
    resolution: float = RESOLUTION
    """Relative resolution of its own verdicts (`core.measure.equal_numbers`): larger if a model gives the verdicts."""
    measured: bool = False
    """Whether its own verdict is measured and not paid (`config.env.Env.measured`)."""
    measured_rewards: tuple[str, ...] = ()
    """Names of those of `rewards` that are measured and not paid."""

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Names that `Env.args` may set."""
        common = {f.name for f in fields(SingleTurn)}
        return tuple(f.name for f in fields(cls) if f.name not in common)

    def __init_subclass__(cls) -> None:
        """ConfigError if a class defines only one of `styles` and `demonstrate`: the other is missing or misspelt."""
        super().__init_subclass__()
        defined = [f"{n}()" for n in ("styles", "demonstrate") if getattr(cls, n) is not getattr(SingleTurn, n)]
        if len(defined) == 1:
            raise ConfigError(
                f"environment class {cls.__name__} has {defined[0]} alone: an environment that writes texts to imitate"
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
    def alphabet(self) -> str:
        """Every character in prompts, gold answers and demonstrations, for a character tokenizer. Empty: a model that
        is built on the spot gets a tokenizer of bytes."""
        return ""

    def verify(self, attempt: Attempt) -> Verdict:
        """The environment's own verdict, computed without waiting. It must not raise, whatever the policy wrote."""
        raise NotImplementedError(
            f"environment {self.name!r} has neither verify() nor, where judging has to wait, verdict()"
        )

    async def verdict(self, attempt: Attempt) -> Verdict:
        """Calls `verify`. Override this method instead if judging waits for a sandbox or a server."""
        return self.verify(attempt)

    @abstractmethod
    def key(self, task: Task) -> Hashable:
        """Two tasks with equal keys are the same task. No key of a held-out task occurs in train."""

    def gold(self, task: Task) -> tuple[str, ...]:
        """The turns of an answer that earns full reward. Left out where no answer is known to be right."""
        raise NotImplementedError(f"environment {self.name!r} has no gold()")

    def paraphrases(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Other answers, as turns, that must earn as much as `gold`. `posttrain check` tries them."""
        return ()

    def knows_gold(self, task: Task) -> bool:
        """Returns whether `gold` has an answer to this task."""
        return type(self).gold is not SingleTurn.gold

    @property
    def vouches_for_gold(self) -> bool:
        """True where the environment promises that `gold` earns full reward. False where `gold` comes from the user's
        data, which may be wrong or in another form than the rewards want."""
        return True

    @property
    def contained(self) -> tuple[str, ...]:
        """Names of the sandboxes in which this environment runs programs of the policy."""
        return tuple(sorted({s.contained for s in self.rewards if isinstance(s, ContainedSource)}))

    @property
    def pays_parts(self) -> bool:
        """True where the verifier may give partial credit: a score below 1 for an answer that is not right."""
        return False

    def distractor(self, task: Task) -> tuple[str, ...]:
        """The turns of an answer that looks right and earns nothing. Left out where none is known."""
        raise NotImplementedError(f"environment {self.name!r} has no distractor()")

    @property
    def knows_distractor(self) -> bool:
        """True where the class has a `distractor`."""
        return type(self).distractor is not SingleTurn.distractor

    @property
    def styles(self) -> tuple[str, ...]:
        """Kinds of demonstration that `demonstrate` writes. A class defines both of them or neither."""
        return ()

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str | tuple[str, ...]]:
        """See `core.abilities.Write`."""
        raise ConfigError(
            f"environment {self.name!r} writes no demonstrations: give its class styles and demonstrate()"
        )

    def _check_style(self, style: str) -> None:
        """ConfigError if the environment does not write this style."""
        if style not in self.styles:
            raise ConfigError(f"{self.name} cannot write style {style!r}: {nearest(style, self.styles)}")

    def hinted(self, task: Task) -> str | tuple[Message, ...] | None:
        """The prompt of a task with its answer as a hint (`core.abilities.Abilities.hint`); None where it has none."""
        return None

    @property
    def gives_hints(self) -> bool:
        """True where `hinted` writes prompts. A class that overrides `hinted` says so here, or its settings do."""
        return type(self).hinted is not SingleTurn.hinted

    @property
    def judged_style(self) -> str:
        """The style whose right and false texts make pairs to learn preferences from. '': none does."""
        return ""

    @property
    def judgements(self) -> Judgements | None:
        """Judged completions, for stages that learn from preferences: those of `judged_style`, or of an environment's
        own judges (`environment.judged.synthetic_preferences`). None: no such stage can run here."""
        return judgements_of(self.demonstrate, self.judged_style) if self.judged_style else None

    @property
    def abilities(self) -> Abilities:
        """The methods above in the form that the rest of the library reads."""
        # Cached in `_abilities`, so that `close` can drop it. Subclasses override either property.
        return self._abilities

    @cached_property
    def _abilities(self) -> Abilities:
        gold = GoldAnswers(
            right=lambda task: self.gold(task) if self.knows_gold(task) else None,
            wrong=self.distractor if self.knows_distractor else None,
            paraphrases=self.paraphrases,
            verdict=self.verdict if self.vouches_for_gold else None,
            pays_parts=self.pays_parts,
        )
        texts = Demonstrations(styles=self.styles, write=self.demonstrate) if self.styles else None
        return Abilities(
            key=self.key,
            alphabet=self.alphabet or None,
            contained=self.contained,
            gold=gold,
            demonstrations=texts,
            judgements=self.judgements,
            hint=self.hinted if self.gives_hints else None,
            together=self._together if any(_batched(s) for s in self.rewards) else None,
        )

    async def play(self, task: Task, talk: Talk) -> Stop:
        """Shows the prompt and takes one turn of the policy. Returns its stop reason."""
        talk.see(task.prompt, task.tools)
        return (await talk.say()).stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The environment's own verdict, then those on steps, then those of the user's rewards."""
        verdict = await self.verdict(attempt)
        judged = Judged(self.name, 1.0, verdict, resolution=self.resolution, measured=self.measured)
        return (judged, *self.steps(attempt), *await self.added(attempt))

    def steps(self, attempt: Attempt) -> tuple[Judged, ...]:
        """Verdicts about parts of the answer (`Judged.end`), for algorithms that assign credit to steps."""
        return ()

    async def added(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The verdicts of the user's rewards, which run concurrently. Where the group is judged later (`_together`),
        the sources that judge it are left out."""
        sources = [s for s in self.rewards if not (attempt.batched and _batched(s))]
        return tuple(map(self._with_measured, await asyncio.gather(*(source(attempt) for source in sources))))

    def _with_measured(self, j: Judged) -> Judged:
        """The verdict, marked as measured if its source is one of `measured_rewards`."""
        return replace(j, measured=True) if j.source in self.measured_rewards else j

    async def _together(self, attempts: Sequence[Attempt], at: StepNumber) -> tuple[list[tuple[Judged, ...]], Gauges]:
        """See `core.abilities.Together`."""
        sources = [s for s in self.rewards if isinstance(s, BatchSource) and s.batched]
        by_source = await asyncio.gather(*(s.batch(attempts, at) for s in sources))
        # `by_source` has an entry for each source, with the verdicts on all attempts. The caller gets an entry for each
        # attempt.
        verdicts = [tuple(self._with_measured(judged[i]) for judged, _ in by_source) for i in range(len(attempts))]
        return verdicts, merge(*(logged for _, logged in by_source))

    def gauges(self) -> Gauges:
        """Queue and latency of the verifiers that run in workers, since the last call."""
        return merge(*(s.gauges() for s in self.rewards if isinstance(s, SourceWithProcesses)))

    def close(self) -> None:
        """Stop the processes of the verifiers. They also stop when the program ends."""
        # The environment and its abilities refer to each other, so only the garbage collector would free the two.
        vars(self).pop("_abilities", None)
        for s in self.rewards:
            if isinstance(s, SourceWithProcesses):
                s.close()


def _batched(source: Source) -> bool:
    """Returns whether a source judges all answers of a group in one call."""
    return isinstance(source, BatchSource) and source.batched


def common_settings(config: Env, rewards: Sequence[Checked], seed: int) -> dict[str, Any]:
    """The fields of `SingleTurn`, from a run's configuration and the reward sources made of it."""
    # The run itself scores rewards by a reward model, so they have no source here.
    with_source = [r for r in config.rewards if not r.by_model]
    return {
        "seed": seed,
        "heldout_count": config.heldout,
        "rewards": tuple(rewards),
        "measured": config.measured,
        "measured_rewards": tuple(s.name for r, s in zip(with_source, rewards, strict=True) if r.measured),
        "limits": config.limits,
        "sandbox": config.sandbox,
        "resolution": RESOLUTION if config.resolution is None else config.resolution,
    }


def require(condition: bool, name: str, message: str) -> None:
    """Check a setting. Raises ConfigError with the environment's name and `message` if `condition` is false."""
    if not condition:
        raise ConfigError(f"env {name}: {message}")
