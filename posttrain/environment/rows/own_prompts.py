"""The user's own prompts, read strictly: an error names the file and the line, and is raised before training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from posttrain.config.run import Env
from posttrain.core.abilities import Abilities, Judgements, LintFinding
from posttrain.core.content import ContentPart
from posttrain.core.conversation import LearnedConversation
from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.types import Message, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.judged.judged_draws import JudgedData
from posttrain.environment.judged.judged_lint import lint
from posttrain.environment.rows.columns import JudgedColumns
from posttrain.environment.rows.data_rows import read_all
from posttrain.environment.rows.mixed_data import MixedTasks
from posttrain.environment.rows.row_reader import PromptRow, answer_text, digest, texts_of
from posttrain.environment.single import Listed, SingleTurn, common_settings
from posttrain.environment.tools.offered import OfferedTools
from posttrain.environment.tools.tool_loop import Loop
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system.errors import ConfigError, DataError, nearest
from posttrain.verifier.configured import sources
from posttrain.verifier.reward_source import Checked

HELDOUT_SHARE = 5
"""At most one in this many distinct prompts is held out, whatever `env.heldout` asks for."""


@dataclass(frozen=True, kw_only=True)
class PromptsEnv(JudgedColumns, SingleTurn):
    """Prompts from a file or data set, whose answers reward functions judge; or completions that were judged already.

    The held-out split depends on the prompts' digests alone. So rows with equal prompts are on one side of it, and
    neither a new order of the file nor an edited answer changes it.
    A class of the user's may derive from it (`env=mine.py:Class env.prompts=rows.jsonl`): it has `name`, a `play` of
    its own that reads the rows' columns in `Task.info`, and `verify` or `verdict` where it judges besides the rewards.
    """

    tools: str = ""
    """Tools of every episode, separated by commas: calculator, python, files, database, store. Rewards receive the
    tools' final state as `state`."""
    turns: int = 8
    """With tools: the largest number of turns of the policy, the answer included."""
    hint: str = ""
    """Text that is written after a prompt to give its answer as a hint, with {answer} in it, for stages that
    rationalise. Empty: no hints."""
    rows: tuple[PromptRow, ...] = field(default=(), repr=False)
    without: tuple[str, ...] = field(default=(), repr=False)
    """Lines about rows that `leave_out` left out, or that can be read in two ways."""
    mixed: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """Number of rows of each data set, and its weight, where there are several, one behind the other in `rows`."""

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        return tuple(n for n in super().settings() if n not in ("rows", "without", "mixed"))

    @property
    def name(self) -> str:
        return "prompts"

    @cached_property
    def _held(self) -> frozenset[str]:
        """The digests of the held-out prompts: the smallest ones, of each data set its share."""
        if self.mixed:
            # Each set has a share by its weight, and at least one prompt, so every set is evaluated.
            total = sum(w for _, w in self.mixed)
            counts = [max(1, round(self.heldout_count * w / total)) for _, w in self.mixed]
            sets_and_counts = zip(self._sets, counts, strict=True)
            return frozenset(k for rows, n in sets_and_counts if self.heldout_count for k in self._smallest(rows, n))
        return self._smallest(self.rows, self.heldout_count)

    @property
    def _sets(self) -> list[tuple[PromptRow, ...]]:
        """The rows of each data set."""
        ends = list(itertools.accumulate(n for n, _ in self.mixed))
        return [self.rows[end - n : end] for end, (n, _) in zip(ends, self.mixed, strict=True)]

    def _smallest(self, rows: Sequence[PromptRow], count: int) -> frozenset[str]:
        """The `count` smallest digests of these rows, at most one in `HELDOUT_SHARE`."""
        distinct = sorted({r.key for r in rows})
        if count and len(distinct) == 1:
            raise ConfigError(
                "there is one distinct prompt, so none can be held out: set env.heldout=0 to train on it without"
                " evaluation"
            )
        # The smallest digests are a random choice, which neither the order of the rows nor a further row changes much.
        return frozenset(distinct[: min(count, max(1, len(distinct) // HELDOUT_SHARE))])

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        """In order of the prompts' digests, so that the order does not depend on the file's either."""
        rows = sorted((r for r in self.rows if r.key in self._held), key=lambda r: (r.key, r.task.id))
        return tuple(self._with_tools(r.task) for r in rows)

    @cached_property
    def train(self) -> TaskSource:
        lists = [
            tuple(self._with_tools(r.task) for r in rows if r.key not in self._held)
            for rows in (self._sets if self.mixed else [self.rows])
        ]
        if not self.mixed:
            return Listed(lists[0])
        if empty := [rows[0].place for rows, tasks in zip(self._sets, lists, strict=True) if not tasks]:
            raise ConfigError(f"{empty[0]}: all prompts of this data set are held out: lower env.heldout")
        return MixedTasks(tuple(lists), tuple(w for _, w in self.mixed), self.seed)

    @cached_property
    def alphabet(self) -> str:
        """Every character of prompts, answers and completions. Empty where a row is a chat: its template adds more."""
        if any(r.conversation is not None or not isinstance(r.task.prompt, str) for r in self.rows):
            return ""
        # A character tokenizer is built from this alphabet, so the text of the hint has to be in it too.
        texts = self.hint.split("{answer}")
        for r in self.rows:
            answer = "" if (a := r.task.answer) is None else f"{a}{answer_text(a)}"
            texts += [*texts_of(r.task.prompt), answer, r.completion or ""]
            texts += r.judged.completions if r.judged is not None else ()
        return "".join(sorted(set("".join(texts))))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hint and "{answer}" not in self.hint:
            raise ConfigError(f"env.args.hint={self.hint!r}: write {{answer}} where the answer stands in the hint")
        if self.turns < 1:
            raise ConfigError(f"env.args.turns={self.turns}: must be >= 1")
        if self._offered is not None:
            for row in self.rows:
                self._offered.check(row.task)
                if row.task.tools:
                    raise DataError(
                        f"{row.place}: the row offers tools of its own, and env.args.tools={self.tools} offers others:"
                        " leave out env.args.tools, or set env.args.tools_column="
                    )

    @cached_property
    def _offered(self) -> OfferedTools | None:
        return OfferedTools.of(self.tools, self.sandbox, self.limits.tool_seconds) if self.tools else None

    @property
    def contained(self) -> tuple[str, ...]:
        of_tools = self._offered.contained if self._offered is not None else ()
        return tuple(sorted({*super().contained, *of_tools}))

    @cached_property
    def _loop(self) -> Loop:
        return Loop(self.limits, self.turns)

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools in a conversation about this task: its row's, or the environment's. Text prompts
        have none."""
        if self._offered is None:
            return task.tools
        return () if isinstance(task.prompt, str) else self._offered.box(task).schemas

    def _with_tools(self, task: Task) -> Task:
        """The task with the tools that its prompt offers, so that its completion is learned as rollouts see it."""
        return task if self._offered is None else replace(task, tools=tuple(self.tools_of(task)))

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

    @property
    def _verifies(self) -> bool:
        """True where this is a class of the user with a verdict of its own."""
        own_class = type(self)
        return own_class.verify is not PromptsEnv.verify or own_class.verdict is not PromptsEnv.verdict

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The verdicts of the user's rewards. The user's own class may give a verdict before them."""
        return await super().judge(attempt) if self._verifies else await self.added(attempt)

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.abstain("a user's prompt is judged by the user's rewards")

    def key(self, task: Task) -> Hashable:
        # Rows that are texts have an empty prompt, so their ids tell them apart.
        return digest(task.prompt, task.tools) if task.prompt else task.id

    def gold(self, task: Task) -> tuple[str, ...]:
        """The row's answer, else its completion. Only the user's rewards decide what it earns."""
        return ((self.completion(task) or "") if task.answer is None else answer_text(task.answer),)

    @property
    def vouches_for_gold(self) -> bool:
        return False

    def knows_gold(self, task: Task) -> bool:
        return task.answer is not None or self.completion(task) is not None

    @property
    def gives_hints(self) -> bool:
        return bool(self.hint)

    def hinted(self, task: Task) -> str | tuple[Message, ...] | None:
        """The prompt with `hint` after it, or after its last message. None where the row has no answer."""
        if task.answer is None:
            return None
        hint, prompt = self.hint.replace("{answer}", answer_text(task.answer)), task.prompt
        if isinstance(prompt, str):
            return prompt + hint
        *before, last = prompt
        content = last["content"]
        content_with_hint = content + hint if isinstance(content, str) else (*content, ContentPart("text", hint))
        return (*before, cast("Message", {**last, "content": content_with_hint}))

    def completion(self, task: Task) -> str | None:
        """The row's demonstration, or None."""
        return self._completions.get(task.id)

    @property
    def abilities(self) -> Abilities:
        """Those of the base class, and the rows, their judgements and tools. All completions are taken as right."""
        base = super().abilities
        judged = self._judged
        texts = base.demonstrations and replace(
            base.demonstrations, false=False, conversation=lambda task, style: self._conversations.get((task.id, style))
        )
        return replace(
            base,
            demonstrations=texts,
            judgements=judged and Judgements(kinds=judged.kinds, draw=judged.draw, every=judged.every),
            judges=bool(self.rewards) or self._verifies,
            lint=self.lint if judged is not None else None,
            rows=self.rows,
            tools=self.tools_of if self.tools or self._rows_have_tools else None,
        )

    def lint(self, length: Callable[[Task, str], int] | None = None, context: int = 0) -> Sequence[LintFinding]:
        """Returns findings about what may be wrong with the judged rows (`core.abilities.Lint`)."""
        return lint(self.rows, self._held, self.without, length, context)

    @cached_property
    def _rows_have_tools(self) -> bool:
        """True where any row has its own tools. The value is kept, because `abilities` is read once for each task."""
        return any(r.task.tools for r in self.rows)

    @cached_property
    def _judged(self) -> JudgedData | None:
        # All rows were judged in one way, or none was (`data_rows`), so the first one tells.
        return JudgedData(self.rows, self) if self.rows and self.rows[0].judged is not None else None

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (f"{self.gold(task)[0]}?",)

    @cached_property
    def _completions(self) -> Mapping[str, str]:
        return {r.task.id: r.completion for r in self.rows if r.completion is not None}

    @cached_property
    def _conversations(self) -> Mapping[tuple[str, str], LearnedConversation]:
        """Conversations by the task's id and the style."""
        return {(r.task.id, "completion"): r.conversation for r in self.rows if r.conversation is not None}

    @property
    def styles(self) -> tuple[str, ...]:
        """`completion` if the data has any; `chosen` where every row of judged data has a text to imitate."""
        judged = self._judged
        chosen = judged is not None and len(judged.chosen) == len(self.rows)
        texts = self._completions or self._conversations
        return (*(("completion",) if texts else ()), *(("chosen",) if chosen else ()))

    def demonstrate(
        self, task: Task, style: str, rng: np.random.Generator, wrong: float
    ) -> tuple[str | tuple[Message, ...], str]:
        """(prompt, the row's own completion or its chosen one). The data has no false ones, so `wrong` must be 0."""
        if style not in self.styles:
            no_column = f"the data has no column {self.completion_column!r} (env.args.completion_column)"
            reason = nearest(style, self.styles) if self.styles else no_column
            raise ConfigError(f"prompts cannot write style {style!r}: {reason}")
        if wrong:
            raise ConfigError(f"wrong={wrong}: your data has only its own completions; set wrong=0")
        texts = self._judged.chosen if style == "chosen" and self._judged is not None else self._completions
        if task.id not in texts:
            raise DataError(
                f"task {task.id!r} has no completion to imitate; give every row one, or train on a file of those that"
                " have it"
            )
        return task.prompt, texts[task.id]


def read_tasks(
    config: Env,
    args: Mapping[str, Any],
    seed: int,
    given: RuntimeObjects = RuntimeObjects(),
    cls: type[PromptsEnv] = PromptsEnv,
) -> PromptsEnv:
    """The environment of the rows of `env.prompts`, judged by `env.rewards`. Stages that only read rows need no
    rewards. `cls`: a class of the user's that plays the rows in its own way."""
    if not config.prompts:
        raise ConfigError(
            f"env.name={config.name!r} needs env.prompts: a JSONL file, or a data set (local folder or hub id)"
        )
    without_rows = cls(**args)
    data = read_all(config, without_rows, given)
    if config.rewards and (text_rows := [r.place for r in data.rows if not r.task.prompt]):
        raise DataError(
            f"{text_rows[0]}: the row is a text, to which nothing can be answered, and env.rewards judge answers: leave"
            f" env.rewards out (env.rewards=none), or give the row a column {without_rows.prompt_column!r}"
        )
    rewards = sources(config.rewards, where=config.sandbox, given=given)
    for source in rewards:
        _check(source, data.rows)
    common = common_settings(config, rewards, seed)
    return cls(**args, **common, rows=data.rows, without=data.without, mixed=data.mixed)


def _check(source: Checked, rows: Sequence[PromptRow]) -> None:
    """Check the tasks for what a reward requires. An error names the place of the first row that fails."""
    try:
        source.check([r.task for r in rows])
    except (ConfigError, DataError) as error:
        # The whole list was refused. The rows are checked one by one to find the one that is to blame.
        for row in rows:
            try:
                source.check([row.task])
            except (ConfigError, DataError):
                raise type(error)(f"{row.place}: {error}") from error
        raise
