"""Rewards by name: `exact`, `last_integer`, `contains`, `math`. All compare a response with the task's answer."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable

from posttrain.core.errors import ConfigError
from posttrain.core.types import Task
from posttrain.core.verdict import Verdict
from posttrain.environment.integers import last_integer
from posttrain.environment.single import graded

Builtin = Callable[[Task, str], Verdict]

MATH_SECONDS = 15.0
"""Wall time of one comparison before its worker is killed and the answer counts as wrong, with kind `timeout`."""
MATH_WORKERS = 2


def exact(task: Task, text: str) -> Verdict:
    """1 where the response, stripped of white space, is the answer."""
    return graded(text.strip() == _answer(task), repr(text.strip()), repr(_answer(task)))


def integer(task: Task, text: str) -> Verdict:
    """1 where the last integer of the response is the answer, both normalised."""
    wanted, said = last_integer(_answer(task)), last_integer(text)
    if wanted is None:
        return Verdict.failed("gold", f"the answer {_answer(task)!r} is no integer")
    return graded(said == wanted, said, wanted, kind="no_integer" if said is None else "wrong")


def contains(task: Task, text: str) -> Verdict:
    """1 where the answer occurs in the response as words of its own: `12` is not in `312`, nor in `12.5`.

    A policy that lists every candidate earns 1, so use it only where responses are short.
    """
    wanted = _answer(task)
    pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(wanted)}(?!\w)(?![.,]\d)"
    return graded(re.search(pattern, text) is not None, repr(text[-80:]), repr(wanted))


class Math:
    """1 where math-verify finds the response's last answer (boxed, or the last expression) equal to the task's.

    The comparison runs in worker processes that are killed when they take too long: an expression can keep the algebra
    busy for ever, and math-verify's own time limit works in a process's main thread only.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward 'math' needs the package math-verify: pip install math-verify (or use last_integer or exact)")
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        for _ in range(MATH_WORKERS):
            self._idle.put(None)

    def __call__(self, task: Task, text: str) -> Verdict:
        worker = self._idle.get()
        if worker is None or worker.poll() is not None:
            worker = _worker()
        try:
            return self._ask(worker, _answer(task), text)
        finally:
            self._idle.put(worker)

    def _ask(self, worker: subprocess.Popen[str], gold: str, text: str) -> Verdict:
        assert worker.stdin is not None and worker.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(MATH_SECONDS, give_up)
        timer.start()
        try:
            worker.stdin.write(json.dumps({"gold": gold, "text": text}) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            return Verdict.value(0.0, "timeout", f"comparing took longer than {MATH_SECONDS:g} s")
        if not line:
            return Verdict.failed("worker", f"the math worker ended with exit code {worker.wait()}")
        said = json.loads(line)
        if said["gold"] is None:
            return Verdict.failed("gold", f"math-verify cannot read the answer {gold!r}")
        return graded(said["equal"], said["text"], said["gold"], kind="unparsable" if said["text"] is None else "wrong")

    def close(self) -> None:
        """End the idle workers; the next question starts new ones."""
        for _ in range(MATH_WORKERS):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
                worker.communicate()
            self._idle.put(None)


def _worker() -> subprocess.Popen[str]:
    """A worker leaves by itself when our end of its input closes, so it never outlives the run."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-m", "posttrain.environment.math_worker"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
    )


def _answer(task: Task) -> str:
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to compare with")
    return str(task.answer).strip()


BUILTIN: dict[str, Callable[[], Builtin]] = {
    "exact": lambda: exact,
    "last_integer": lambda: integer,
    "contains": lambda: contains,
    "math": Math,
}
"""Name -> maker, so that what a reward needs is looked for when it is asked for."""
