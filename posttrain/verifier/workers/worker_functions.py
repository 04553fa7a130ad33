"""Reward functions in worker processes. They are written and called as in a thread, but a call can be killed.

Each worker loads the file for itself. So what a function keeps in its module is one worker's, and gone with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.stop import StepNumber
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.verifier import batch_functions
from posttrain.verifier.user_code import load, where
from posttrain.verifier.user_functions import FunctionSource, source
from posttrain.verifier.workers.worker_pool import WorkerAnswer, WorkerPool, reply_of, reply_of_all
from posttrain.verifier.workers.worker_process import Spec

T = TypeVar("T")


@dataclass(frozen=True)
class PooledSource:
    """A reward function of a file, called in worker processes. `local` is the same function in this process, of which
    the signature is read. It is never called."""

    local: FunctionSource
    pool: WorkerPool = field(repr=False)

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def weight(self) -> float:
        return self.local.weight

    @property
    def batched(self) -> bool:
        """True where the function judges all answers to a prompt in one call."""
        return self.local.batched

    async def __call__(self, attempt: Attempt) -> Judged:
        try:
            verdict = (await self.pool.ask(([_attempt_parts(attempt)], None))).one
        except Exception as error:  # a column that cannot be pickled, a pool that was closed
            verdict = Verdict.failed("worker", f"{type(error).__name__}: {error}")
        return self._judged(verdict)

    async def batch(self, attempts: Sequence[Attempt], at: StepNumber) -> tuple[list[Judged], Gauges]:
        """One verdict for each attempt, from one call in one worker. Where it fails, it is not known which answer made
        it fail, so all of them failed."""
        try:
            answer = await self.pool.ask(([_attempt_parts(a) for a in attempts], (at.step, at.steps)))
        except Exception as error:
            answer = WorkerAnswer((Verdict.failed("worker", f"{type(error).__name__}: {error}"),))
        verdicts = list(answer.verdicts)
        # Where the worker did not answer there is one verdict for the whole request.
        if len(verdicts) != len(attempts):
            why = f"{verdicts[0].why} (one call for {len(attempts)} answers)"
            verdicts = [Verdict.failed(verdicts[0].kind or "worker", why)] * len(attempts)
        return [self._judged(v) for v in verdicts], dict(answer.logged)

    def _judged(self, verdict: Verdict) -> Judged:
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
    # Twice the processor time and more, since a worker may have to wait for a core.
    spec = Spec(
        f"{__name__}:handler", f"{file.resolve()}:{attribute}", cpu=max(1, round(timeout)), wall=2 * timeout + 20
    )
    return PooledSource(local, WorkerPool(spec, workers, local.name))


def handler(argument: str) -> Callable[[Any], dict[str, Any]]:
    """Runs in the worker. Returns the function that answers requests by calling the one at `path.py:name`. A request is
    (parts of attempts, (step, steps)) for a batch, or ([parts of one attempt], None)."""
    path, _, attribute = argument.rpartition(":")
    judge = source(load(Path(path), attribute))

    def answer(request: Any) -> dict[str, Any]:
        sent, at = request
        attempts = [
            Attempt(task=task, turns=turns, stop=stop, state=state, ids=ids) for task, turns, stop, state, ids in sent
        ]
        if at is not None:
            return _batch_reply(judge, attempts, StepNumber(*at))
        args, kwargs = judge.arguments(attempts[0])
        return reply_of(_call(judge, args, kwargs, judge.read))

    return answer


def _attempt_parts(a: Attempt) -> tuple[Any, ...]:
    """Returns the parts of an attempt that the worker gets."""
    return (a.task, a.turns, a.stop, a.state, a.ids)


def _batch_reply(judge: FunctionSource, attempts: Sequence[Attempt], at: StepNumber) -> dict[str, Any]:
    """The reply to a batch: one call for all attempts."""
    log, count = batch_functions.Log(len(attempts)), len(attempts)
    kwargs = batch_functions.keywords(judge.function, attempts, at, log)
    judged = _call(judge, (), kwargs, lambda returned: log.all_written(batch_functions.verdicts(returned, count)))
    return reply_of_all([judged] * count if isinstance(judged, Verdict) else judged, log.gauges)


def _call(judge: FunctionSource, args: Any, kwargs: Any, read: Callable[[Any], T]) -> T | Verdict:
    """Returns what `read` makes of the function's return value; a failed verdict where the function raises. SystemExit
    is handled like other exceptions. MemoryError is raised to the caller."""
    try:
        returned = judge.function(*args, **kwargs)
        return read(asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned)
    # On a MemoryError the worker ends with its own exit code (`OUT_OF_MEMORY`), because it reached its memory limit.
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return Verdict.failed("raised", where(error, judge.function))


async def _awaited(work: Any) -> Any:
    """A coroutine that waits for any awaitable, as `asyncio.run` needs it."""
    return await work
