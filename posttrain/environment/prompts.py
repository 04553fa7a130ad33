"""The user's own prompts, read strictly: an error names the file and the line, and is raised before training."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.core.abilities import Abilities
from posttrain.core.errors import ConfigError, DataError, nearest
from posttrain.core.gauge import Gauges, merge
from posttrain.core.given import Given, is_inline
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.run import Env
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.rows import Place, PromptRow, digest, row_of, source_rows, texts_of
from posttrain.environment.single import Listed, SingleTurn
from posttrain.environment.tools.loop import Loop
from posttrain.environment.tools.offered import OfferedTools
from posttrain.verifier.configured import sources
from posttrain.verifier.source import Checked

HELDOUT_SHARE = 5
"""At most one in this many distinct prompts is held out, whatever `env.heldout` asks for."""


@dataclass(frozen=True, kw_only=True)
class PromptsEnv(SingleTurn):
    """Prompts from a file or data set, judged by reward functions.

    The held-out split depends on the prompts' digests alone. So rows with equal prompts are on the same side of it, and
    neither a new order of the file nor an edited answer changes it.
    """

    prompt_column: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    messages_column: str = "messages"
    """Read if there is no prompt column. If the last message is the assistant's, it becomes the completion."""
    answer_column: str = "answer"
    """The column of the right answer, which rewards receive."""
    completion_column: str = "completion"
    """The column of a demonstration (stage style `completion`). Rewards do not receive it."""
    id_column: str = "id"
    """The column of a name for the row, by which the record calls it; it may be missing."""
    split: str = "train"
    """Which split of the data set is read, if it has several."""
    tools: str = ""
    """Tools of every episode, separated by commas: calculator, python, files, database, store. Rewards receive the
    tools' final state as `state`."""
    turns: int = 8
    """With tools: the largest number of turns of the policy, the answer included."""
    rows: tuple[PromptRow, ...] = field(default=(), repr=False)

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        return tuple(n for n in super().settings() if n != "rows")

    @property
    def name(self) -> str:
        return "prompts"

    @cached_property
    def _held(self) -> frozenset[str]:
        """The prompts with the smallest digests."""
        distinct = sorted({r.key for r in self.rows})
        if self.heldout_count and len(distinct) == 1:
            raise ConfigError(
                "there is one distinct prompt, so none can be held out: set env.heldout=0 to train on it without"
                " evaluation"
            )
        return frozenset(distinct[: min(self.heldout_count, max(1, len(distinct) // HELDOUT_SHARE))])

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        """In order of the prompts' digests, so that the order does not depend on the file's either."""
        return tuple(r.task for r in sorted(self.rows, key=lambda r: (r.key, r.task.id)) if r.key in self._held)

    @cached_property
    def train(self) -> TaskSource:
        return Listed(tuple(r.task for r in self.rows if r.key not in self._held))

    @cached_property
    def alphabet(self) -> str:
        """Every character of prompts, answers and completions."""
        texts = [t for r in self.rows for t in (*texts_of(r.task.prompt), str(r.task.answer or ""), r.completion or "")]
        return "".join(sorted(set("".join(texts))))

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ConfigError(f"env.args.turns={self.turns}: must be >= 1")
        if self._offered is not None:
            for row in self.rows:
                self._offered.check(row.task)

    @cached_property
    def _offered(self) -> OfferedTools | None:
        return OfferedTools.of(self.tools, self.sandbox, self.limits.tool_seconds) if self.tools else None

    @property
    def contained(self) -> tuple[str, ...]:
        own = self._offered.contained if self._offered is not None else ()
        return tuple(sorted({*super().contained, *own}))

    @cached_property
    def _loop(self) -> Loop:
        return Loop(self.limits, self.turns)

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in a conversation about this task. Text prompts have none."""
        return () if self._offered is None or isinstance(task.prompt, str) else self._offered.box(task).schemas

    async def play(self, task: Task, talk: Talk) -> Stop:
        if self._offered is None:
            return await super().play(task, talk)
        async with self._offered.box(task) as box:
            return await self._loop.converse(talk, task.prompt, box)

    def gauges(self) -> Gauges:
        return merge(super().gauges(), self._loop.gauges(), self._offered.gauges() if self._offered is not None else {})

    def close(self) -> None:
        super().close()
        if self._offered is not None:
            self._offered.close()

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The user's rewards only."""
        return await self.added(attempt)

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.abstain("a user's prompt is judged by the user's rewards")

    def key(self, task: Task) -> Hashable:
        return digest(task.prompt)

    def gold(self, task: Task) -> tuple[str, ...]:
        """The row's answer, else its completion. Only the user's rewards decide what it earns."""
        return ((self.completion(task) or "") if task.answer is None else str(task.answer),)

    @property
    def vouches_for_gold(self) -> bool:
        return False

    def knows_gold(self, task: Task) -> bool:
        return task.answer is not None or self.completion(task) is not None

    def completion(self, task: Task) -> str | None:
        """The row's demonstration, or None."""
        return self._completions.get(task.id)

    @property
    def abilities(self) -> Abilities:
        """As the base class, with the rows and the tools. All completions are taken as right, so none can be false."""
        base = super().abilities
        texts = base.demonstrations and replace(base.demonstrations, false=False)
        return replace(base, demonstrations=texts, rows=self.rows, tools=self.tools_of if self.tools else None)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (f"{self.gold(task)[0]}?",)

    @cached_property
    def _completions(self) -> Mapping[str, str]:
        return {r.task.id: r.completion for r in self.rows if r.completion is not None}

    @property
    def styles(self) -> tuple[str, ...]:
        """`completion` if the data has any."""
        return ("completion",) if self._completions else ()

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str]:
        """The row's own completion. The data has no false completions, so `wrong` must be 0."""
        if style not in self.styles:
            absent = f"the data has no column {self.completion_column!r} (env.args.completion_column)"
            known = nearest(style, self.styles) if self.styles else absent
            raise ConfigError(f"prompts cannot write style {style!r}: {known}")
        if wrong:
            raise ConfigError(f"wrong={wrong}: your data has only its own completions; set wrong=0")
        if task.id not in self._completions:
            raise DataError(
                f"task {task.id!r} has no completion to imitate; give every row one, or train on a file of those that"
                " have it"
            )
        return task.prompt, self._completions[task.id]


def read_tasks(config: Env, args: Mapping[str, Any], seed: int, given: Given = Given()) -> PromptsEnv:
    """The environment that reads `env.prompts` and is judged by `env.rewards`."""
    if not config.prompts:
        raise ConfigError("env.name='prompts' needs env.prompts: a JSONL file, or a data set (local folder or hub id)")
    if not config.rewards:
        raise ConfigError(
            "env.name='prompts' needs env.rewards: path.py:function, or a built-in (exact, last_integer, contains,"
            " math); from Python also functions: rewards=[my_function]"
        )
    shape = PromptsEnv(**args)
    rows = read(config.prompts, shape, given)
    rewards = sources(config.rewards, where=config.sandbox, given=given)
    for source in rewards:
        _check(source, rows)
    own = {"seed": seed, "heldout_count": config.heldout, "limits": config.limits, "sandbox": config.sandbox}
    return PromptsEnv(**args, **own, rewards=rewards, rows=rows)


def read(path: str, columns: PromptsEnv | None = None, given: Given = Given()) -> tuple[PromptRow, ...]:
    """All rows of a JSONL or JSON file, a parquet file, a saved data set, one on the hub, or handed by a program.

    Raises:
        DataError: a row is not JSON or not text, has no prompt, an empty one or a value of a wrong type; a key or an
            id occurs twice; one prompt has two answers; there are no rows. The message names the row's place.
    """
    columns = columns or PromptsEnv()
    rows: list[PromptRow] = []
    places: dict[str, Place] = {}
    repeats: dict[str, int] = {}
    answered: dict[str, PromptRow] = {}
    for place, data in given.rows(path) if is_inline(path) else source_rows(path, columns.split):
        row = row_of(place, data, columns)
        if row.task.answer is not None:
            _same_answer(answered.setdefault(row.key, row), row, columns.answer_column)
        name = row.task.id
        if not name:
            repeats[row.key] = repeats.get(row.key, 0) + 1
            name = row.key if repeats[row.key] == 1 else f"{row.key}-{repeats[row.key]}"
            row = replace(row, task=replace(row.task, id=name))
        if name in places:
            raise DataError(
                f"{place}: id {name!r} was already given at {places[name]}; ids must differ (or leave the column out,"
                " and ids are made)"
            )
        places[name] = place
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows")
    return tuple(rows)


def _check(source: Checked, rows: Sequence[PromptRow]) -> None:
    """Check the tasks for what a reward requires. An error names the place of the first row that fails."""
    try:
        source.check([r.task for r in rows])
    except (ConfigError, DataError) as error:
        for row in rows:
            try:
                source.check([row.task])
            except (ConfigError, DataError):
                raise type(error)(f"{row.place}: {error}") from error
        raise


def _same_answer(first: PromptRow, row: PromptRow, column: str) -> None:
    """DataError if an earlier row has the same prompt and another answer: any response would be wrong by one of
    them."""
    one, other = first.task.answer, row.task.answer
    if one != other and str(one) != str(other):
        raise DataError(
            f"{row.place}: {column!r} is {other!r:.80}, and the same prompt has {one!r:.80} at {first.place}: one of"
            " the two would score every policy wrong. Keep one row, or give a list of answers and a reward that takes"
            " any of them"
        )
