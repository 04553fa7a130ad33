"""Reward functions in worker processes. They have the same signatures and meaning as in a thread, but can be killed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt
from posttrain.core.redact import redacted
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.verifier.functions import FunctionSource, source
from posttrain.verifier.user_code import load, where
from posttrain.verifier.workers.pool import WorkerPool, reply_of
from posttrain.verifier.workers.process import Spec


@dataclass(frozen=True)
class PooledSource:
    """A reward function of a file, called in worker processes. `local` is the same function in this process. It is
    inspected but never called."""

    local: FunctionSource
    pool: WorkerPool = field(repr=False)

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def weight(self) -> float:
        return self.local.weight

    async def __call__(self, attempt: Attempt) -> Judged:
        try:
            verdict = await self.pool.ask((attempt.task, attempt.turns, attempt.stop, attempt.state, attempt.ids))
        except Exception as error:  # a column that cannot be pickled, a pool that was closed
            verdict = Verdict.failed("worker", f"{type(error).__name__}: {error}")
        return Judged(self.name, self.weight, redacted(verdict), resolution=self.local.resolution)

    def check(self, tasks: Sequence[Task]) -> None:
        self.local.check(tasks)

    def gauges(self) -> Gauges:
        return self.pool.gauges()

    def close(self) -> None:
        self.pool.close()


def pooled(local: FunctionSource, file: Path, attribute: str, workers: int, timeout: float) -> PooledSource:
    """`file:attribute` in a pool. `timeout`: most seconds of processor time of a call. Its limit in wall-clock time is
    twice that and 20 s more."""
    spec = Spec(
        f"{__name__}:handler", f"{file.resolve()}:{attribute}", cpu=max(1, round(timeout)), wall=2 * timeout + 20
    )
    return PooledSource(local, WorkerPool(spec, workers, local.name))


def handler(argument: str) -> Callable[[Any], dict[str, Any]]:
    """Runs in the worker: the function of `path.py:name` as a handler of (task, turns, stop, state,
    ids)."""
    path, _, attribute = argument.rpartition(":")
    judge = source(load(Path(path), attribute))

    def answer(request: Any) -> dict[str, Any]:
        task, turns, stop, state, ids = request
        return reply_of(_verdict(judge, Attempt(task=task, turns=turns, stop=stop, state=state, ids=ids)))

    return answer


def _verdict(judge: FunctionSource, attempt: Attempt) -> Verdict:
    """Runs in the main thread of the worker. SystemExit is handled like other exceptions. MemoryError is raised to the
    caller."""
    args, kwargs = judge.arguments(attempt)
    try:
        returned = judge.function(*args, **kwargs)
        return judge.read(asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return Verdict.failed("raised", where(error, judge.function))


async def _awaited(work: Any) -> Any:
    return await work
