"""`gym:TASK`: the procedural tasks of reasoning-gym. Training and held-out tasks share no question."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

from posttrain.config.env import Scalar
from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Attempt, TaskSource
from posttrain.core.seeds import key as seed_key
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.adapters import gym_scoring
from posttrain.environment.adapters.gym_scoring import CHUNK, ScoringRequest
from posttrain.environment.single import HELDOUT_SEED, Generated, SingleTurn
from posttrain.system.errors import ConfigError, DataError, nearest
from posttrain.verifier.workers.worker_pool import WorkerPool

REFUSED = {
    "composite": "it is a mixture of other tasks; name one of them",
    "game_of_life_halting": "its scorer compares truth values of texts, so that any answer at all scores 1",
}
"""Tasks not offered, and why."""
NO_GOLD: Mapping[str, str] = dict.fromkeys(("boxnet", "rush_hour"), "it has many solutions and gives none")
"""Tasks whose data have no correct answer, so that their scorers cannot be tested with one."""
# Tasks whose right answer stands in the metadata of an entry, each with its key there.
_GOLD_KEY = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}

RETRIES = 100
"""How often a training item is drawn again whose question is held out."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Gym(SingleTurn):
    """One reasoning-gym task. Its settings (`Env.args`) are the task's own configuration fields with plain values.

    The answer is the content of the last `<answer>...</answer>`, else the whole response, stripped. The task's own
    scorer may give partial credit. Each chunk of 1000 training items has its own seed.
    """

    task: str
    args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])

    @staticmethod
    def of(task: str, args: Mapping[str, Scalar], **common: Any) -> Gym:
        """A checked environment: a known task, known settings with valid values, and enough distinct questions."""
        offered = [n for n in _factory().DATASETS if n not in REFUSED]
        if task in REFUSED:
            raise ConfigError(f"env.name='gym:{task}' is not offered: {REFUSED[task]}")
        if task not in offered:
            raise ConfigError(f"reasoning-gym has no task {task!r}: {nearest(task, offered)}")
        _check_args(task, args)
        env = Gym(task=task, args=dict(args), **common)
        try:
            # The package checks settings when it makes a data set, so the first one is made at once.
            env._data("train", 0)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(f"gym:{task} refuses env.args {dict(args)}: {error}") from error
        return env

    @property
    def name(self) -> str:
        return f"gym:{self.task}"

    @property
    def train(self) -> TaskSource:
        return Generated(self._train)

    def _train(self, index: int) -> Task:
        chunk, item = divmod(index, CHUNK)
        for attempt in range(RETRIES):
            # A held-out question is replaced from a data set of another seed, so that no other training task changes.
            side = "train" if attempt == 0 else f"again {attempt}"
            task = self._task(f"{self.name}-{index}", side, chunk, item)
            if task.prompt not in self._held:
                return task
        raise DataError(
            f"gym:{self.task}: {RETRIES} draws in a row were held-out questions; it has too few: lower env.heldout"
        )

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        tasks: dict[Any, Task] = {}
        # If so many draws do not give enough distinct questions, the task has too few of them for a split.
        for draw in range(20 * self.heldout_count):
            if len(tasks) == self.heldout_count:
                break
            task = self._task(f"{self.name}-heldout-{len(tasks) + 1}", "heldout", *divmod(draw, CHUNK))
            tasks.setdefault(task.prompt, task)
        if len(tasks) < self.heldout_count:
            raise ConfigError(
                f"gym:{self.task}: {20 * self.heldout_count} draws gave {len(tasks)} distinct questions; set"
                " env.heldout to half of that"
            )
        return tuple(tasks.values())

    @cached_property
    def _held(self) -> frozenset[Any]:
        return frozenset(t.prompt for t in self.heldout)

    @cached_property
    def alphabet(self) -> str:
        """Printable ASCII, line breaks, and all characters of the held-out questions and answers."""
        written = "".join(f"{t.prompt}{t.answer or ''}" for t in self.heldout)
        return "".join(sorted({chr(c) for c in range(32, 127)} | {"\n"} | set(written)))

    def _task(self, task_id: str, side: str, chunk: int, item: int) -> Task:
        entry = self._entry(side, chunk, item)
        info = {"side": side, "chunk": chunk, "item": item}
        return Task(id=task_id, prompt=entry["question"], answer=self._gold(entry), info=info)

    def _gold(self, entry: Mapping[str, Any]) -> str | None:
        """The right answer of an entry as text; None if the data have none."""
        gold = entry["metadata"].get(_GOLD_KEY[self.task]) if self.task in _GOLD_KEY else entry["answer"]
        return gold if gold is None or isinstance(gold, str) else json.dumps(gold)

    @cached_property
    def _data(self) -> Any:
        """(side, chunk) -> the task's data set with the seed of that chunk. The last few are cached."""

        @lru_cache(maxsize=8)
        def data(side: str, chunk: int) -> Any:
            return _factory().create_dataset(self.task, seed=self._seed(side, chunk), size=CHUNK, **self.args)

        return data

    def _seed(self, side: str, chunk: int) -> int:
        # reasoning-gym takes seeds of 31 bits.
        return seed_key(HELDOUT_SEED if side == "heldout" else self.seed, "gym", self.task, side, chunk) % 2**31

    @cached_property
    def _entry(self) -> Any:
        """(side, chunk, item) -> the entry that reasoning-gym generated. Tasks have this place in their info and not
        the entry, which may contain objects that a record cannot store."""

        @lru_cache(maxsize=4096)
        def entry(side: str, chunk: int, item: int) -> Any:
            return self._data(side, chunk)[item]

        return entry

    @cached_property
    def _pool(self) -> WorkerPool:
        return gym_scoring.workers()

    async def verdict(self, attempt: Attempt) -> Verdict:
        """The verdict of the task's own scorer, in a worker: some scorers search for long, and some evaluate text."""
        return await gym_scoring.verdict(self._pool, self._asked(attempt))

    def _asked(self, attempt: Attempt) -> ScoringRequest:
        """The request that scores an attempt, with the gold answer or, without one, a wrong answer."""
        place = attempt.task.info
        entry = self._entry(place["side"], place["chunk"], place["item"])
        # Behind the last end tag nothing can match, and a search there would begin anew at each begin tag.
        tagged = _ANSWER.findall(attempt.text[: attempt.text.rfind("</answer>") + len("</answer>")])
        answer = (tagged[-1] if tagged else attempt.text).strip()
        (gold,) = self.gold(attempt.task) if self.knows_gold(attempt.task) else self.distractor(attempt.task)
        return ScoringRequest(
            self.task, tuple(self.args.items()), self._seed(place["side"], place["chunk"]), entry, answer, gold
        )

    def gauges(self) -> Gauges:
        return merge(super().gauges(), self._pool.gauges() if "_pool" in vars(self) else {})

    def close(self) -> None:
        super().close()
        vars(self).pop("_pool", None)  # the pool ends when no environment refers to it

    def key(self, task: Task) -> Any:
        return task.prompt

    def knows_gold(self, task: Task) -> bool:
        return task.answer is not None

    @property
    def pays_parts(self) -> bool:
        """True, because many scorers give a small score to a wrong answer, such as 0.01 if it is well-formed."""
        return True

    def gold(self, task: Task) -> tuple[str, ...]:
        if task.answer is None:
            raise DataError(f"gym:{self.task} holds no correct answer: {NO_GOLD.get(self.task, 'none is given')}")
        return (str(task.answer),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return ("no answer",)


def _factory() -> ModuleType:
    """reasoning-gym's module that makes data sets. ConfigError if the package is missing."""
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ConfigError("gym: environments need the package reasoning-gym: pip install reasoning-gym") from error


def _check_args(task: str, args: Mapping[str, Scalar]) -> None:
    """Check the names and types of the settings. Only plain values are accepted. The task checks their range."""
    config = _factory().DATASETS[task][1]
    fields = [f for f in dataclasses.fields(config) if isinstance(f.default, str | int | float) and f.name != "size"]
    plain = {f.name: f.default for f in fields}
    for name, value in args.items():
        if name not in plain:
            raise ConfigError(f"env.args.{name}: gym:{task} has no such plain setting: {nearest(name, plain)}")
        wanted = type(plain[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(
                f"env.args.{name}={value!r}: gym:{task} wants {wanted.__name__}, got {type(value).__name__}"
            )
