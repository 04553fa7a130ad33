"""A pool of workers that can be killed. It decides by experiment who is to blame if a request gets no answer.

A request that hangs or kills its worker proves nothing by itself, because the machine may be overloaded or the worker
broken. So there are three cases:

- It used up its processor time. The candidate is to blame if the verifier still answers (see below).
- The worker crashed or ran out of memory. The request is tried again in a fresh worker. If it fails twice, the
  candidate is to blame if the verifier still answers.
- It exceeded its wall-clock time (a lock, a network, an overloaded machine), or the worker did not start, or workers on
  other machines were lost twice. The verdict is `failed`, and the rollout asks again.

A verifier *still answers* if a fresh worker answers the last request that had an answer. If it never answered or no
longer does, that is an outage: the verdict is `failed` and never a wrong answer, whatever the text was.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.verdict import State, Verdict
from posttrain.system.worker_threads import WorkerThreads, settle
from posttrain.verifier.workers.worker_process import BeginWorker, Spec, Worker, WorkerError, WorkerProcess, packed

RETRY_SECONDS = 1.0
"""Seconds after a failed start in which requests get that failure. Then a new start is tried."""
KINDS = {"cpu": "timeout", "wall": "timeout", "memory": "memory", "crash": "crash", "start": "worker", "lost": "worker"}
"""The kind of the verdict for each kind of `WorkerError`."""

_begin: list[BeginWorker] = [WorkerProcess]
"""Functions that begin a worker. The last one is used."""


def begin_workers(begin: BeginWorker) -> Callable[[], None]:
    """All pools of this program begin their workers with this function from now on, and replace their present ones
    before they ask them again. Returns a function that undoes the change."""
    _begin.append(begin)
    return lambda: _begin.remove(begin) if begin in _begin else None


@dataclass(frozen=True)
class WorkerAnswer:
    """The answer to a request: a verdict on each attempt that it holds, or one alone where the worker did not answer;
    and what the function logged."""

    verdicts: tuple[Verdict, ...]
    logged: Gauges = field(default_factory=dict[str, Gauge])

    @property
    def one(self) -> Verdict:
        """The verdict on a request's only attempt."""
        return self.verdicts[0]

    @property
    def failed(self) -> Verdict | None:
        """The first verdict that failed."""
        return next((v for v in self.verdicts if v.state is State.FAILED), None)


@dataclass
class _Call:
    """A request. `asked`: when it was submitted, in seconds of `time.monotonic`."""

    request: bytes
    future: Future[WorkerAnswer]
    asked: float

    def begin(self) -> bool:
        return self.future.set_running_or_notify_cancel()

    def refuse(self) -> None:
        settle(self.future.set_result, _failed_answer("worker", "the pool was closed"))


class _PoolState:
    """The state that the pool shares with its threads. It does not refer to the pool, so that an unused pool is
    garbage-collected and closed."""

    def __init__(self, spec: Spec, size: int, name: str, witness: Any) -> None:
        self.spec = spec
        self.threads = WorkerThreads[_Call](f"verifier {name}", size, lambda calls: _serve(self, calls))
        self.lock = self.threads.lock
        self.workers = dict[Worker, BeginWorker]()
        """All present workers, each with the function that began it."""
        self.witness = None if witness is None else packed(witness)
        """The last request that had an answer, pickled: a working verifier answers it again."""
        self.failed_start: tuple[float, WorkerError] | None = None
        """When the last start failed, and its error."""
        self.counts = dict[str, list[float]]()

    def count(self, name: str, value: float) -> None:
        with self.lock:
            entry = self.counts.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += 1

    def close(self) -> None:
        """Answer waiting requests with a failure and kill the workers."""
        if not self.threads.close():
            return  # this is a forked child, and the workers are its parent's
        with self.lock:
            running = list(self.workers)
        # Outside of the lock, which a thread needs to forget its worker. The thread that waits for a worker gets a
        # WorkerError when it ends.
        for worker in running:
            worker.end()


class WorkerPool:
    """At most `size` workers of one `spec`. They start when needed, and all event loops and threads share them. `name`
    is that of the verifier in gauges and messages, and `witness` a request that a working verifier answers."""

    def __init__(self, spec: Spec, size: int, name: str, witness: Any = None) -> None:
        self.name = name
        self._shared = _PoolState(spec, size, name, witness)
        # It runs once: when the pool is closed, when it is garbage-collected, or when the program ends.
        self._finalizer = weakref.finalize(self, _PoolState.close, self._shared)

    def submit(self, request: Any) -> Future[WorkerAnswer]:
        """A future of the answer. Raises here if the request cannot be pickled."""
        call = _Call(packed(request), Future(), time.monotonic())
        waiting = self._shared.threads.put(call)
        if waiting is None:
            raise RuntimeError(f"the workers of {self.name!r} were closed")
        self._shared.count("queue", waiting)
        return call.future

    async def ask(self, request: Any) -> WorkerAnswer:
        """The verdicts on the attempts of a request, without blocking the event loop. A request that is cancelled
        while it waits is never run."""
        return await asyncio.wrap_future(self.submit(request))

    def gauges(self) -> Gauges:
        """Since the last call: waiting requests at each new one, seconds of waiting and of work, starts of workers, and
        seconds by kind of verdict."""
        shared = self._shared
        with shared.lock:
            taken, shared.counts = shared.counts, {}
        return {f"verifier/{self.name}/{name}": Gauge(*entry) for name, entry in taken.items()}

    def processes(self) -> tuple[int, ...]:
        """Ids of the current processes of each worker."""
        with self._shared.lock:
            return tuple(p for w in self._shared.workers for p in w.processes)

    def close(self) -> None:
        """Kill every worker. This also happens when the pool is garbage-collected and when the program ends."""
        self._finalizer()


def _serve(shared: _PoolState, calls: Iterator[_Call]) -> None:
    """Runs in each thread: answers requests with one worker, and keeps the worker as long as it works."""
    # At most one worker, in a list, so that the functions below can put one in and take it out.
    held: list[Worker] = []
    try:
        for call in calls:
            began = time.monotonic()
            shared.count("wait_s", began - call.asked)
            try:
                answer = _answer(shared, held, call.request)
            except BaseException as error:  # otherwise this call would never be answered
                answer = _failed_answer("worker", f"{type(error).__name__}: {error}")
            shared.count("work_s", time.monotonic() - began)
            kind = (answer.failed or answer.one).kind
            shared.count(f"kind/{kind or 'answered'}", time.monotonic() - began)
            settle(call.future.set_result, answer)
    finally:
        while held:
            _drop(shared, held)


def _failed_answer(kind: str, why: str) -> WorkerAnswer:
    """The answer to a request that could not be judged."""
    return WorkerAnswer((Verdict.failed(kind, why),))


def _answer(shared: _PoolState, held: list[Worker], request: bytes) -> WorkerAnswer:
    """Ask, ask again if that can help, and decide who is to blame for a missing answer."""
    try:
        return _ask(shared, held, request)
    except WorkerError as error:
        fault = error
    # What ended the worker may have been the machine and not the request, such as a kernel without free memory. A
    # request that used up its processor time would do so again.
    if fault.kind in ("crash", "memory", "lost"):
        try:
            return _ask(shared, held, request)
        except WorkerError as error:
            fault = error
    if shared.threads.closed:
        return _failed_answer("worker", "the pool was closed")
    kind = KINDS[fault.kind]
    # These kinds do not show that the judged text is to blame.
    if fault.kind in ("start", "wall", "lost"):
        return _failed_answer(kind, fault.why)
    if shared.witness is None:
        return _failed_answer(kind, f"{fault.why}, and the verifier has not answered anything yet")
    try:
        # The request broke a verifier that still answers, so its text is worth 0. With a failed verdict, a policy could
        # keep its bad answers out of the batch by texts that kill the verifier.
        if _ask(shared, held, shared.witness).failed is None:
            return WorkerAnswer((Verdict.value(0.0, kind, fault.why),))
    except WorkerError:
        pass
    return _failed_answer(kind, f"{fault.why}, and the verifier no longer answers what it answered before")


def _ask(shared: _PoolState, held: list[Worker], request: bytes) -> WorkerAnswer:
    """One request to this thread's worker. It is started if there is none, and dropped if it has ended or workers are
    begun in another way now."""
    if held and shared.workers.get(held[0]) is not _begin[-1]:
        _drop(shared, held)
    if not held:
        _start(shared, held)
    try:
        answer = _answer_of_reply(held[0].ask(request))
    except BaseException:
        if not held[0].usable:
            _drop(shared, held)
        raise
    # The latest request with an answer is the next witness: it resembles what is asked now.
    if answer.failed is None:
        shared.witness = request
    return answer


def _start(shared: _PoolState, held: list[Worker]) -> None:
    """Begins a worker and puts it into `held`. Raises WorkerError where it does not start."""
    if shared.threads.closed:
        raise WorkerError("start", "the pool was closed")
    # Otherwise each waiting request would wait for another start that fails in the same way.
    if shared.failed_start is not None and time.monotonic() - shared.failed_start[0] < RETRY_SECONDS:
        raise shared.failed_start[1]
    began, begin = time.monotonic(), _begin[-1]
    try:
        worker = begin(shared.spec)
    except WorkerError as error:
        # A worker that was killed (by the kernel without free memory) does not mean that the next one fails too.
        if not error.killed:
            shared.failed_start = (time.monotonic(), error)
        raise
    except OSError as error:
        raise WorkerError("start", f"no process can be started: {error}") from error
    shared.count("start_s", time.monotonic() - began)
    held.append(worker)
    # If the pool was closed during the start, `close` did not know this worker, so it is ended here.
    with shared.lock:
        shared.workers[worker] = begin
        closed_meanwhile = shared.threads.closed
    if closed_meanwhile:
        _drop(shared, held)
        raise WorkerError("start", "the pool was closed")


def _drop(shared: _PoolState, held: list[Worker]) -> None:
    """Kills the worker in `held` and forgets it."""
    worker = held.pop()
    worker.kill()
    with shared.lock:
        shared.workers.pop(worker, None)


def _answer_of_reply(reply: dict[str, Any]) -> WorkerAnswer:
    """A worker's reply; `failed` if it is no verdict and no list of verdicts."""
    try:
        # The process runs foreign code: a wrong form is the verifier's fault and raises nothing here.
        verdicts = [_verdict(part) for part in reply.get("several", [reply])]
        logged = {str(name): Gauge(float(total), float(n)) for name, (total, n) in reply.get("logged", {}).items()}
        # `verdicts[0]` raises for an empty list, which is no answer.
        return WorkerAnswer((verdicts[0], *verdicts[1:]), logged)
    except Exception as error:
        return _failed_answer("worker", f"the worker's reply is no verdict ({type(error).__name__}: {error})")


def _verdict(reply: dict[str, Any]) -> Verdict:
    """The verdict in one part of a reply."""
    return Verdict(State(reply["state"]), reply["score"], str(reply["kind"]), str(reply["why"]))


def reply_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict in the form of a worker's reply."""
    return {"state": verdict.state.value, "score": verdict.score, "kind": verdict.kind, "why": verdict.why}


def reply_of_all(verdicts: Sequence[Verdict], logged: Gauges) -> dict[str, Any]:
    """The verdicts on all attempts of a request in that form, with what the function logged."""
    gauges = {name: [g.sum, g.count] for name, g in logged.items()}
    return {"several": [reply_of(v) for v in verdicts], "logged": gauges}
