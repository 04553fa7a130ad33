"""The `math` reward. Our own rules run here. What they cannot decide is compared in a worker process."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from posttrain.core.gauge import Gauges
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.math.grade import Gold, Grade, gold_of, grade
from posttrain.verifier.workers.worker_pool import WorkerAnswer, WorkerPool
from posttrain.verifier.workers.worker_process import Spec

SECONDS = 2.0
"""Most processor time of one comparison by the algebra. Beyond it the answer is wrong, with kind `timeout`."""
WORKERS = 2
"""Worker processes of the algebra, if the settings give no number."""
SHOWN = 5
"""The most refused tasks that a message names."""
WITNESS = ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}")
"""A pair (gold, response) that a working algebra answers."""


@dataclass(frozen=True)
class MathSource:
    """1 if the response's final answer equals the task's answer, else 0.

    A task whose answer cannot be read is refused when the run is built. If the tasks are endless, its verdict is
    `failed`.
    """

    weight: float
    pool: WorkerPool = field(repr=False)
    name: str = "math"

    async def __call__(self, attempt: Attempt) -> Judged:
        verdict_or_gold = self._without_algebra(attempt.task, attempt.text)
        if isinstance(verdict_or_gold, Verdict):
            return Judged(self.name, self.weight, verdict_or_gold)
        # Most answers are settled above. Only the others wait for a process, and the event loop goes on meanwhile.
        try:
            verdict = (await asyncio.wrap_future(self._ask(verdict_or_gold, attempt.text))).one
        except RuntimeError as error:  # the pool was closed
            verdict = Verdict.failed("worker", str(error))
        return Judged(self.name, self.weight, redacted(verdict))

    def verdict(self, task: Task, text: str) -> Verdict:
        """The verdict, for scripts without an event loop. It blocks."""
        settled = self._without_algebra(task, text)
        return settled if isinstance(settled, Verdict) else self._ask(settled, text).result().one

    def _without_algebra(self, task: Task, text: str) -> Verdict | Gold:
        """The verdict if there is one without the algebra, else the gold answer."""
        if task.answer is None:
            return Verdict.failed("gold", f"task {task.id!r} has no answer to compare with")
        gold = gold_of(str(task.answer))
        if gold is None:
            return Verdict.failed("gold", f"the answer {str(task.answer)[:80]!r} of task {task.id!r} says nothing")
        # None: our own rules leave it open, and the algebra has to compare.
        graded: Grade | None = grade(gold, text)
        return gold if graded is None else graded.verdict

    def _ask(self, gold: Gold, text: str | None) -> Future[WorkerAnswer]:
        """Sends a comparison to the algebra. With `text` None it only reads the gold answer."""
        return self.pool.submit((gold.raw, text))

    def check(self, tasks: Sequence[Task]) -> None:
        """Read every gold answer, once. ConfigError if a task has none; DataError with the first few tasks whose answer
        cannot be read, and what is wrong with each."""
        unreadable: list[tuple[Task, str]] = []
        open_questions: dict[str, tuple[list[Task], Future[WorkerAnswer]]] = {}
        # First all questions are sent to the algebra, so that its workers share them. Then their answers are waited
        # for. Equal gold answers are asked once.
        for task in tasks:
            if task.answer is None:
                raise ConfigError(
                    f"reward {self.name!r} requires column 'answer', which task {task.id!r} does not have"
                )
            gold = gold_of(str(task.answer))
            if gold is None:
                unreadable.append((task, "says nothing"))
            elif not gold.certain:
                if gold.raw not in open_questions:
                    open_questions[gold.raw] = ([], self._ask(gold, None))
                open_questions[gold.raw][0].append(task)
        for equal_tasks, future in open_questions.values():
            verdict = future.result().one
            # A worker that does not start does not show that the data are wrong.
            if verdict.kind == "worker":
                raise ConfigError(f"reward {self.name!r} cannot start its algebra: {verdict.why}")
            if verdict.state is State.FAILED or verdict.score != 1.0:
                unreadable += [(task, verdict.why) for task in equal_tasks]
        if unreadable:
            examples = "; ".join(
                f"task {t.id!r}: {str(t.answer)[:60]!r} {why}" for t, why in itertools.islice(unreadable, SHOWN)
            )
            raise DataError(
                f"reward {self.name!r} cannot read the answers of {len(unreadable)} of {len(tasks)} tasks, so no"
                f" response to them could be right: {examples}. Correct or drop these rows, or judge them with another"
                " reward"
            )

    def gauges(self) -> Gauges:
        return self.pool.gauges()

    def close(self) -> None:
        self.pool.close()


def math_source(weight: float = 1.0, workers: int = 0, timeout: float | None = None) -> MathSource:
    """The reward with its pool. Its processes start with the first comparison that needs them.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "reward 'math' needs the package math-verify: pip install math-verify (or use last_integer or exact)"
        )
    # The kernel counts whole seconds of processor time. The wall-clock limit is far longer, because a busy machine is
    # not the fault of a response: a verdict beyond that limit is `failed` and not 0.
    cpu = max(1, round(timeout or SECONDS))
    spec = Spec(
        "posttrain.verifier.math.algebra:handler", cpu=cpu, wall=4.0 * cpu + 30, memory=2048, preload=True, quiet=True
    )
    return MathSource(weight, WorkerPool(spec, workers or WORKERS, "math", witness=WITNESS))
