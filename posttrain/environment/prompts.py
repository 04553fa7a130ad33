"""The user's own prompts, read strictly: what is wrong with them is said with file and line before anything trains."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.abilities import Abilities
from posttrain.core.content import content_of, mapped, shown, text_of
from posttrain.core.errors import ConfigError, DataError, nearest
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.run import Env
from posttrain.core.types import Gauges, Message, Stop, Task, merge
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.single import Listed, SingleTurn
from posttrain.environment.tools.loop import Loop
from posttrain.environment.tools.offered import OfferedTools
from posttrain.verifier.configured import sources
from posttrain.verifier.source import Checked

HELDOUT_SHARE = 5
"""At most one in this many distinct prompts is held out, however many were asked for."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose messages chat templates know."""
Place = str
"""Where a row stands, for messages: `file:line`, or `name row n`."""


@dataclass(frozen=True)
class PromptRow:
    """One checked row of the user's data. `key` is the digest of its prompt."""

    task: Task
    completion: str | None
    key: str
    place: Place = "a row"


@dataclass(frozen=True, kw_only=True)
class PromptsEnv(SingleTurn):
    """Prompts from a file or data set, judged by reward functions.

    Rows whose prompts are equal always land on the same side of the held-out split, which is decided by the prompts'
    digests alone: reordering the file, or editing answers, moves nothing.
    """

    prompt_column: str = "prompt"
    """Text, or a list of messages."""
    messages_column: str = "messages"
    """Read where there is no prompt column. A last message of the assistant becomes the completion."""
    answer_column: str = "answer"
    completion_column: str = "completion"
    """A text to imitate (stage style `completion`); rewards never see it."""
    id_column: str = "id"
    split: str = "train"
    """Which split of a data set with several."""
    tools: str = ""
    """Tools of every episode, with commas between: calculator, python, files, database, store. Rewards see the world
    they leave as `state`."""
    turns: int = 8
    """With tools: most turns of the policy, the answer included."""
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
        """In order of the prompts' digests, so that it too does not depend on the file's order."""
        return tuple(r.task for r in sorted(self.rows, key=lambda r: (r.key, r.task.id)) if r.key in self._held)

    @cached_property
    def train(self) -> TaskSource:
        return Listed(tuple(r.task for r in self.rows if r.key not in self._held))

    @cached_property
    def alphabet(self) -> str:
        """Every character of prompts, answers and completions."""
        texts = [t for r in self.rows for t in (*_texts(r.task.prompt), str(r.task.answer or ""), r.completion or "")]
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
        """What a conversation about this task is told of its tools."""
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
        """The row's answer, else its completion. What that earns is for the user's rewards to say."""
        return ((self.completion(task) or "") if task.answer is None else str(task.answer),)

    @property
    def vouches_for_gold(self) -> bool:
        return False

    def knows_gold(self, task: Task) -> bool:
        return task.answer is not None or self.completion(task) is not None

    def completion(self, task: Task) -> str | None:
        """The row's text to imitate, where it has one."""
        return self._completions.get(task.id)

    @property
    def abilities(self) -> Abilities:
        """Its completions are right, so there are no false ones; its rows have places."""
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
        """`completion` where the data has any."""
        return ("completion",) if self._completions else ()

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str]:
        """The row's own completion. There are no false ones, so `wrong` must be 0."""
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


def read_tasks(config: Env, args: Mapping[str, Any], seed: int) -> PromptsEnv:
    """The environment of `env.prompts`, judged by `env.rewards`."""
    if not config.prompts:
        raise ConfigError("env.name='prompts' needs env.prompts: a JSONL file, or a data set (local folder or hub id)")
    if not config.rewards:
        raise ConfigError(
            "env.name='prompts' needs env.rewards: path.py:function, or a built-in (exact, last_integer, contains,"
            " math)"
        )
    shape = PromptsEnv(**args)
    rows = read(config.prompts, shape)
    rewards = sources(config.rewards, where=config.sandbox)
    for source in rewards:
        _check(source, rows)
    own = {"seed": seed, "heldout_count": config.heldout, "limits": config.limits, "sandbox": config.sandbox}
    return PromptsEnv(**args, **own, rewards=rewards, rows=rows)


def read(path: str, columns: PromptsEnv | None = None) -> tuple[PromptRow, ...]:
    """All rows of a JSONL or JSON file, a parquet file, a saved data set, or one on the hub.

    Raises:
        DataError: with the place: not JSON, not text, a missing or empty prompt, a wrong type, a key or an id given
            twice, one prompt with two answers, no rows.
    """
    columns = columns or PromptsEnv()
    rows: list[PromptRow] = []
    given: dict[str, Place] = {}
    repeats: dict[str, int] = {}
    answered: dict[str, PromptRow] = {}
    for place, data in _source(path, columns.split):
        row = _row(place, data, columns)
        if row.task.answer is not None:
            _same_answer(answered.setdefault(row.key, row), row, columns.answer_column)
        name = row.task.id
        if not name:
            repeats[row.key] = repeats.get(row.key, 0) + 1
            name = row.key if repeats[row.key] == 1 else f"{row.key}-{repeats[row.key]}"
            row = replace(row, task=replace(row.task, id=name))
        if name in given:
            raise DataError(
                f"{place}: id {name!r} was already given at {given[name]}; ids must differ (or leave the column out,"
                " and ids are made)"
            )
        given[name] = place
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows")
    return tuple(rows)


def _check(source: Checked, rows: Sequence[PromptRow]) -> None:
    """What a reward says against the tasks, with the place of the first it says it of."""
    try:
        source.check([r.task for r in rows])
    except (ConfigError, DataError) as error:
        for row in rows:
            try:
                source.check([row.task])
            except (ConfigError, DataError):
                raise type(error)(f"{row.place}: {error}") from error
        raise


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """What is wrong with a task is said with the place of its row."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{place}: {error}") from error


def _same_answer(first: PromptRow, row: PromptRow, column: str) -> None:
    """DataError where a prompt was answered otherwise before: whatever the policy says, one of the two would call it
    wrong."""
    one, other = first.task.answer, row.task.answer
    if one != other and str(one) != str(other):
        raise DataError(
            f"{row.place}: {column!r} is {other!r:.80}, and the same prompt has {one!r:.80} at {first.place}: one of"
            " the two would score every policy wrong. Keep one row, or give a list of answers and a reward that takes"
            " any of them"
        )


def digest(prompt: str | Sequence[Message]) -> str:
    """16 hex digits of a prompt: equal prompts have equal ones, and nothing else enters."""
    text = (
        prompt
        if isinstance(prompt, str)
        else json.dumps([[m["role"], shown(m["content"])] for m in prompt], ensure_ascii=True)
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _row(place: Place, data: Mapping[str, Any], c: PromptsEnv) -> PromptRow:
    """One row, checked."""
    prompt, completion = _prompt(place, data, c)
    if (written := data.get(c.completion_column)) is not None:
        completion = _completion(place, written, c)
    known = {c.prompt_column, c.messages_column, c.completion_column, c.id_column}
    info = {k: v for k, v in data.items() if k not in known and k != "answer"}
    if c.answer_column != "answer" and "answer" in data:
        info["answer"] = data["answer"]
    answer = data.get(c.answer_column)
    if answer is not None and not isinstance(answer, str | int | float | bool | list):
        raise DataError(f"{place}: {c.answer_column!r} is {_kind(answer)}, wanted text, a number or a list")
    if strange := [
        a for a in (answer if isinstance(answer, list) else [answer]) if isinstance(a, float) and not math.isfinite(a)
    ]:
        raise DataError(
            f"{place}: {c.answer_column!r} is {strange[0]}, which nothing equals; leave the row out, or give it its"
            " answer"
        )
    return PromptRow(
        Task(id=_id(place, data, c), prompt=prompt, answer=answer, info=info), completion, digest(prompt), place
    )


def _id(place: Place, data: Mapping[str, Any], c: PromptsEnv) -> str:
    name = data.get(c.id_column)
    if name is None:
        return ""
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise DataError(f"{place}: {c.id_column!r} is {_kind(name)}, wanted non-empty text or a whole number")
    return _text(place, c.id_column, str(name))


def _prompt(place: Place, data: Mapping[str, Any], c: PromptsEnv) -> tuple[str | tuple[Message, ...], str | None]:
    column = c.prompt_column if data.get(c.prompt_column) is not None else c.messages_column
    value = data.get(column)
    if value is None:
        have = sorted(k for k, v in data.items() if v is not None)
        hint = nearest(c.prompt_column, have) if have else "the row is empty"
        raise DataError(
            f"{place}: no column {c.prompt_column!r} (env.args.prompt_column) nor {c.messages_column!r}: {hint}"
        )
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{place}: {column!r} is empty")
        return _text(place, column, value), None
    if not isinstance(value, list):
        raise DataError(f"{place}: {column!r} is {_kind(value)}, wanted text or a list of messages")
    messages = [_message(place, column, i, m) for i, m in enumerate(value)]
    completion = None
    if messages and messages[-1]["role"] == "assistant":
        with placed(f"{place}: the last message of {column!r}"):
            completion = text_of(messages.pop()["content"])
    if not messages:
        raise DataError(f"{place}: {column!r} has no message for the policy to answer")
    return tuple(messages), completion


def _message(place: Place, column: str, index: int, value: Any) -> Message:
    where = f"{place}: message {index + 1} of {column!r}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {_kind(value)}, wanted an object with role and content")
    if not isinstance(value.get("role"), str):
        raise DataError(f"{where}: 'role' is {_kind(value.get('role'))}, wanted text")
    if not isinstance(value.get("content"), str | list) or value["content"] == []:
        raise DataError(f"{where}: 'content' is {_kind(value.get('content'))}, wanted text or a list of parts")
    if value["role"] not in ROLES:
        raise DataError(
            f"{where} has role {value['role']!r}, which chat templates do not know: {nearest(value['role'], ROLES)}"
        )
    extra = sorted(k for k, v in value.items() if v is not None and k not in ("role", "content"))
    if extra:
        raise DataError(f"{where} has {extra[0]!r}; messages are role and content only")
    with placed(where):
        body = content_of(value["content"])
    return Message(
        role=_text(place, column, value["role"]), content=mapped(body, lambda text: _text(place, column, text))
    )


def _completion(place: Place, value: Any, c: PromptsEnv) -> str:
    if isinstance(value, str):
        return _text(place, c.completion_column, value)
    if isinstance(value, list) and len(value) == 1:
        with placed(f"{place}: {c.completion_column!r}"):
            return text_of(_message(place, c.completion_column, 0, value[0])["content"])
    raise DataError(f"{place}: {c.completion_column!r} is {_kind(value)}, wanted text or a list of one message")


def _text(place: Place, column: str, value: str) -> str:
    """Text that can be written as UTF-8; JSON can smuggle in half a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} has half of a surrogate pair at character {error.start}, which is no text"
        ) from None
    return value


def _kind(value: Any) -> str:
    names = {
        type(None): "missing",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return (
        f"empty {names[type(value)]}"
        if value in ("", []) and not isinstance(value, bool)
        else names.get(type(value), type(value).__name__)
    )


def _texts(prompt: str | Sequence[Message]) -> Iterable[str]:
    return [prompt] if isinstance(prompt, str) else [shown(m["content"]) for m in prompt]


def _source(path: str, split: str) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Rows with their places, from whatever `path` is."""
    from posttrain.environment import tables

    file = Path(path)
    try:
        folder, there = file.is_dir(), file.exists()
    except OSError as error:
        raise DataError(f"env.prompts={path[:200]}: {error.strerror}") from error
    if folder:
        return tables.saved(path, split)
    if there:
        return tables.parquet(file) if file.suffix == ".parquet" else tables.json_rows(file)
    if (
        file.suffix in (".jsonl", ".json", ".parquet", ".ndjson")
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    ):
        raise DataError(f"no such file or folder: {path}")
    return tables.hub(path, split)
