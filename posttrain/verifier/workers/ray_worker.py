"""A worker on some machine of a Ray cluster. Its actor holds a `worker_process.WorkerProcess` there.

So the limits of a request, and the rules of who is to blame for a missing answer, are the same as on this machine.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from posttrain.verifier.workers.worker_process import EndedError, Spec, WorkerError, WorkerProcess

PLACE_SECONDS = 120.0
"""Seconds that the cluster may take to begin an actor, or to carry a request and its reply."""
Told = tuple[dict[str, Any] | None, tuple[type[WorkerError], str, str, bool] | None, bool, tuple[int, ...]]
"""The answer of an actor: (reply or None, parts of the error that its worker raised or None, whether the worker can be
asked again, ids of the processes there)."""


class WorkerActor:
    """Runs in the actor. WorkerErrors are returned, so that Ray's own errors always mean that the actor is lost."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    def start(self, spec: Spec) -> Told:
        try:
            self._worker = WorkerProcess(spec)
        except WorkerError as error:
            return None, _parts(error), False, (os.getpid(),)
        return {}, None, True, (os.getpid(), *self._worker.processes)

    def ask(self, request: bytes) -> Told:
        worker = self._worker
        assert worker is not None
        try:
            reply, error = worker.ask(request), None
        except WorkerError as raised:
            reply, error = None, _parts(raised)
        return reply, error, worker.usable, (os.getpid(), *worker.processes)


class RayWorker:
    """A `worker_process.Worker` in an actor on a cluster, to which this process must be connected already. WorkerError
    where it does not start."""

    def __init__(self, spec: Spec) -> None:
        import ray

        self.usable, self.processes, self._ray = True, tuple[int, ...](), ray
        # During a call the worker may have to start a new process, so the time of a start is added.
        self._seconds = spec.start + spec.wall + PLACE_SECONDS
        # No CPUs: it would wait for those that the engines have reserved. No restart: a new actor would hold no worker,
        # and the pool begins another one itself.
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self._actor: Any = ray.remote(WorkerActor).options(**options).remote()
        try:
            self._answer(self._actor.start.remote(spec))
        except WorkerError as error:
            self.kill()
            raise WorkerError("start", error.why, error.killed) from None

    def ask(self, request: bytes) -> dict[str, Any]:
        """The reply to a pickled request. WorkerError as of `WorkerProcess.ask`, with the kind `lost` where the actor,
        or its machine, is gone."""
        try:
            return self._answer(self._actor.ask.remote(request))
        except BaseException:
            if not self.usable:
                self.kill()
            raise

    def end(self) -> None:
        self.usable = False
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)

    def kill(self) -> None:
        self.end()

    def _answer(self, ref: Any) -> dict[str, Any]:
        """Waits for a call of the actor and returns its reply. Raises the error that its worker raised."""
        try:
            reply, error, usable, self.processes = self._ray.get(ref, timeout=self._seconds)
        except self._ray.exceptions.GetTimeoutError:
            self.usable = False
            raise WorkerError("lost", f"its actor on Ray gave no answer in {self._seconds:g} s") from None
        except Exception as error:  # of Ray: the actor, its machine or the connection is gone
            self.usable = False
            why = str(error).strip().partition("\n")[0]
            raise WorkerError("lost", f"its actor on Ray is lost: {why}", killed=True) from None
        self.usable = self.usable and usable
        if error is not None:
            kind, *arguments = error
            raise kind(*arguments)
        return reply


def _parts(error: WorkerError) -> tuple[type[WorkerError], str, str, bool]:
    """Returns the parts of an error. Exceptions with several arguments cannot be pickled as they are."""
    return EndedError if isinstance(error, EndedError) else WorkerError, error.kind, error.why, error.killed
