"""`verifiers:ID`: environments written for PrimeIntellect's `verifiers` package, played on the run's own engine.

The package's own loop runs, with its set-up, stop conditions and clean-up. Only the model is replaced: each request is
shown to the policy as tokens, and its turn is returned as a message, with its tool calls parsed in the format of the
chat template. The package's rubric judges. Each of its functions is one source.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from posttrain.config.env import Scalar
from posttrain.core.ports import Attempt, Talk, TaskSource
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.adapters.verifiers_judge import (
    environments,
    rebuilt_state,
    recordable,
    rubrics,
    score,
    weights,
)
from posttrain.environment.adapters.verifiers_talk import PolicyClient, bounded, from_package
from posttrain.environment.rows.own_prompts import HELDOUT_SHARE
from posttrain.environment.single import Listed, SingleTurn
from posttrain.system.errors import ConfigError
from posttrain.verifier.user_code import load

INSTALL = 'pip install "posttrain[verifiers]"'
PREFIX = "verifiers:"
WAITING = 65_536
"""The most ended episodes whose state is kept until they are judged."""


@dataclass(frozen=True, kw_only=True)
class Verifiers(SingleTurn):
    """One environment of the package. Its settings (`Env.args`) are the arguments of its `load_environment`.

    Held-out tasks come from its evaluation set. Without one, they are chosen by their digests, at most a fifth. No
    training task equals a held-out one in prompt, answer and info.
    """

    env_id: str
    inner: Any = field(repr=False)
    """The loaded environment."""

    @staticmethod
    def of(env_id: str, args: Mapping[str, Scalar], **common: Any) -> Verifiers:
        """Load it by the name of its installed module, or from a file: `verifiers:my_env`, `verifiers:path/my_env.py`.

        Raises:
            ConfigError: the package, the environment or an argument is missing, or its rubric needs whole groups.
        """
        package()
        with _signals_stay():
            inner = _loaded(env_id, dict(args))
        if any(e.rubric.has_group_rewards for e in environments(inner)):
            raise ConfigError(
                f"{PREFIX}{env_id}: its rubric compares the answers of a group with one another, and here every answer"
                " is judged by itself. Use an algorithm that compares siblings, and a reward for one answer"
            )
        env = Verifiers(env_id=env_id, inner=inner, **common)
        if not any(w for e in environments(inner) for w in weights(e.rubric)) and not env.rewards:
            raise ConfigError(
                f"{PREFIX}{env_id}: its rubric has no reward function with a weight; add one, or give env.rewards"
            )
        # The package calls tools by `tool_map`, so each tool gets its time limit there, once.
        for member in environments(inner):
            for name, tool in getattr(member, "tool_map", {}).items():
                member.tool_map[name] = bounded(tool, name, env.limits.tool_seconds)
        return env

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.env_id}"

    @cached_property
    def _sets(self) -> Mapping[str, Any]:
        """Its data sets by side. If there is only one, it is `train`."""
        train, evaluation = self.inner.build_dataset(), self.inner.build_eval_dataset()
        if train is None or evaluation is None:
            return {"train": evaluation if train is None else train}
        return {"train": train, "eval": evaluation}

    @cached_property
    def _tasks(self) -> Mapping[str, tuple[Task, ...]]:
        return {
            side: tuple(self._task(side, i, row) for i, row in enumerate(rows)) for side, rows in self._sets.items()
        }

    def _task(self, side: str, index: int, row: Mapping[str, Any]) -> Task:
        if isinstance(row["prompt"], str):
            raise ConfigError(
                f"{self.name}: its prompts are plain text (message_type='completion'), which the package gave up; use"
                " messages"
            )
        answer = None if row.get("answer") == "" else row.get("answer")
        prompt, info = tuple(map(from_package, row["prompt"])), {"side": side, "row": index, "key": _digest(row)}
        return Task(id=f"{self.env_id}-{side}-{index}", prompt=prompt, answer=answer, info=info)

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        if "eval" in self._tasks:
            # A dict keeps the last of equal tasks; reversed before and after, the first one, in the same order.
            distinct = {self.key(t): t for t in reversed(self._tasks["eval"])}
            return tuple(reversed(distinct.values()))[: self.heldout_count]
        by_digest = {self.key(t): t for t in reversed(self._tasks["train"])}
        most = min(self.heldout_count, max(1, len(by_digest) // HELDOUT_SHARE))
        return tuple(by_digest[k] for k in sorted(by_digest)[:most])

    @cached_property
    def train(self) -> TaskSource:
        held_keys = {self.key(t) for t in self.heldout}
        return Listed(tuple(t for t in self._tasks["train"] if self.key(t) not in held_keys))

    def key(self, task: Task) -> str:
        """Prompt, answer and info together. Environments with hidden information give all tasks the same prompt."""
        return task.info["key"]

    @cached_property
    def _ended(self) -> dict[int, tuple[Any, Any]]:
        """By id of a recorded state: that state, and the package's own state, which only the first judging may use."""
        return {}

    def _row(self, task: Task) -> dict[str, Any]:
        return dict(self._sets[task.info["side"]][task.info["row"]])

    async def play(self, task: Task, talk: Talk) -> Stop:
        """Run the package's loop with our policy. A tool error that ends it is the policy's, any other an outage."""
        policy = PolicyClient(talk, task.id, self.limits)
        try:
            state = await self.inner.rollout(self._row(task), policy.client(), "policy", {})
            error = state.get("error")
            # An error of a tool is a result of what the policy did. Any other shows nothing about the policy.
            if error is not None and not isinstance(error, package().ToolError):
                raise error
        except BaseException:  # a cancelled episode too
            if policy.state is not None:
                await self.inner.rubric.cleanup(policy.state)
            raise
        record = recordable(state)
        talk.leave(record)
        # While the recorded state is kept, no other object can have its id.
        self._ended[id(record)] = (record, state)
        while len(self._ended) > WAITING:
            # The oldest one is judged from its record, if it is judged at all, so its own state ends here.
            _, oldest = self._ended.pop(next(iter(self._ended)))
            await self.inner.rubric.cleanup(oldest)
        return policy.stop(state)

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """The verdicts of the rubric's functions with their weights, and its metrics with weight 0. A function that
        raises gives `failed` and not 0."""
        # There is no live state if the episode was judged before, or comes from a record. It is then rebuilt, if all of
        # its entries could be stored.
        record, state = self._ended.pop(id(attempt.state), (None, None))
        if state is None:
            if isinstance(attempt.state, Mapping) and (missing := attempt.state["lost"]):
                why = f"its state held {', '.join(missing)}, which no record can keep, so it is judged once, as it ends"
                broken = Judged(self.name, 1.0, Verdict.failed("state", why), measured=self.measured)
                return (broken, *await self.added(attempt))
            state = await rebuilt_state(self.inner, self._row(attempt.task), attempt)
        try:
            verdicts = [x for rubric in rubrics(self.inner.rubric, state) for x in await score(rubric, state)]
        finally:
            # A rebuilt state opened nothing, so nothing is cleaned up.
            if record is not None:
                await self.inner.rubric.cleanup(state)
        named = (replace(j, resolution=self.resolution, measured=self.measured) for j in _named(verdicts))
        return (*named, *await self.added(attempt))

    def verify(self, attempt: Attempt) -> Verdict:
        return Verdict.abstain("its rubric judges")

    # --- what is right ------------------------------------------------------------------------------------------------

    @property
    def vouches_for_gold(self) -> bool:
        """False: the data has answers, but not the form in which the rubric wants them."""
        return False

    @property
    def pays_parts(self) -> bool:
        return True

    def knows_gold(self, task: Task) -> bool:
        """True if an episode has one turn and the data has the answer."""
        return task.answer is not None and all(getattr(e, "max_turns", None) == 1 for e in environments(self.inner))

    def gold(self, task: Task) -> tuple[str, ...]:
        return (str(task.answer or ""),)

    def distractor(self, task: Task) -> tuple[str, ...]:
        return (f"{self.gold(task)[0]}?",)


def _digest(row: Mapping[str, Any]) -> str:
    """16 hex digits of the prompt, answer and info of a row."""
    parts = [row["prompt"], row.get("answer"), row.get("info")]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _named(judged: Sequence[Judged]) -> Iterator[Judged]:
    """The verdicts, with a number behind a source's name that occurred before: `check.2`."""
    seen: dict[str, int] = {}
    for j in judged:
        seen[j.source] = seen.get(j.source, 0) + 1
        yield j if seen[j.source] == 1 else replace(j, source=f"{j.source}.{seen[j.source]}")


def package() -> Any:
    """The package's module of errors. ConfigError if the package is missing, or is a version that cannot be used."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{PREFIX} environments need the package verifiers: {INSTALL}") from None
    try:
        importlib.import_module("verifiers.envs.environment")
        return importlib.import_module("verifiers.errors")
    except ImportError as error:
        raise ConfigError(
            f"verifiers {version} cannot be used: {error}. From 0.4 on it has no SingleTurnEnv, MultiTurnEnv and"
            f" ToolEnv any more: {INSTALL}"
        ) from error


def _loaded(env_id: str, args: dict[str, Any]) -> Any:
    """The environment of the package with this id or file, made with these arguments."""
    try:
        if env_id.endswith(".py"):
            return load(Path(env_id), "load_environment", "environment")(**args)
        return importlib.import_module("verifiers.utils.env_utils").load_environment(env_id, **args)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{PREFIX}{env_id}: {error} Environments are Python packages: install it (prime env install OWNER/{env_id},"
            f" or pip), or name its file: {PREFIX}path/{env_id}.py"
        ) from error
    except Exception as error:  # an environment's own code may raise anything
        raise ConfigError(
            f"{PREFIX}{env_id} with env.args {args} does not load: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _signals_stay() -> Iterator[None]:
    """Keeps the package's environments from setting signal handlers when they are created.

    Their handlers of SIGINT and SIGTERM would end a run without a checkpoint. They can be set in the main thread only.
    """
    module = importlib.import_module("verifiers.envs.environment")
    real_signal: Any = module.signal  # type: ignore[attr-defined]
    members = {name: getattr(real_signal, name) for name in dir(real_signal) if not name.startswith("_")}
    module.signal = SimpleNamespace(**{**members, "signal": lambda *_: None})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.signal = real_signal  # type: ignore[attr-defined]
