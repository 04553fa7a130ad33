"""The threads under every pool of untrusted programs: how many there are, what is never run, and how they end."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from posttrain.system import worker_threads
from posttrain.system.worker_threads import WorkerThreads, settle


@dataclass(eq=False)
class Question:
    """A call that is answered with the name of its thread once `may_end` is set."""

    answer: Future[str] = field(default_factory=Future[str])
    may_end: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> bool:
        return self.answer.set_running_or_notify_cancel()

    def refuse(self) -> None:
        settle(self.answer.set_result, "refused")


class Crew:
    """What the threads of a test do, and which of them have ended."""

    def __init__(self, most: int, idle_seconds: float | None = None) -> None:
        self.ended = ended = list[str]()

        def work(calls: Iterator[Question]) -> None:
            for call in calls:
                call.may_end.wait(10)
                settle(call.answer.set_result, threading.current_thread().name)
            ended.append(threading.current_thread().name)

        self.threads = WorkerThreads("crew", most, work, idle_seconds)
        weakref.finalize(self, self.threads.close, wait=True)

    def ask(self, ends: bool = True) -> Question:
        question = Question()
        if ends:
            question.may_end.set()
        assert self.threads.put(question) is not None
        return question


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_threads_begin_when_calls_need_them_and_no_more_than_asked() -> None:
    crew = Crew(3)
    for _ in range(20):
        assert crew.ask().answer.result(5) in ("crew 0", "crew 1")  # the next call may come before the thread is free
    held = [crew.ask(ends=False) for _ in range(5)]
    until(lambda: len(crew.threads.running) == 3)
    held.append(Question())
    assert len(crew.threads.waiting) == 2 and crew.threads.put(held[-1]) == 3
    for question in held:
        question.may_end.set()
    assert {q.answer.result(5) for q in held} == {"crew 0", "crew 1", "crew 2"}
    crew.threads.close()


def test_a_call_that_is_cancelled_while_it_waits_is_never_run() -> None:
    crew = Crew(1)
    first, second, third = crew.ask(ends=False), crew.ask(), crew.ask()
    until(lambda: crew.threads.running == [first])
    assert second.answer.cancel()
    first.may_end.set()
    assert third.answer.result(5) == "crew 0" and second.answer.cancelled()
    crew.threads.close()


def test_closing_refuses_what_waits_ends_what_runs_and_waits_for_the_threads() -> None:
    crew = Crew(1)
    runs, waits = crew.ask(ends=False), crew.ask()
    until(lambda: crew.threads.running == [runs])
    assert crew.threads.close(lambda call: call.may_end.set(), wait=True)
    assert crew.ended == ["crew 0"] and runs.answer.result(0) == "crew 0" and waits.answer.result(0) == "refused"
    assert crew.threads.put(Question()) is None


def test_threads_without_work_end_and_begin_again() -> None:
    crew = Crew(2, idle_seconds=0.05)
    assert crew.ask().answer.result(5)
    until(lambda: crew.ended)
    assert crew.ask().answer.result(5)
    crew.threads.close()


@pytest.mark.prove
@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "in one of its threads"])
def test_an_owner_that_nobody_uses_is_collected_and_closed(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a thread of its own collects it while it holds the lock, and is not woken any more."""
    monkeypatch.setattr(worker_threads, "LOOK_SECONDS", 0.2)
    crew = Crew(2)
    lost, ended, threads = [crew], crew.ended, crew.threads
    held = [crew.ask(ends=False), crew.ask(ends=False)]
    del crew
    until(lambda: len(threads.running) == 2)
    if inside:
        wait = threads.lock.wait
        monkeypatch.setattr(threads.lock, "wait", lambda seconds: (lost.clear(), gc.collect(), wait(seconds))[-1])
    for question in held:
        question.may_end.set()
    if not inside:
        lost.clear()
    until(lambda: gc.collect() >= 0 and len(ended) == 2)
    assert threads.closed


def test_a_forked_child_closes_nothing() -> None:
    crew = Crew(1)
    runs, waits = crew.ask(ends=False), crew.ask()
    until(lambda: crew.threads.running == [runs])
    child = os.fork()
    if child == 0:
        os._exit(int(crew.threads.close(lambda call: call.may_end.set(), wait=True) or waits.answer.done()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    runs.may_end.set()
    assert waits.answer.result(5) == "crew 0"
    crew.threads.close(wait=True)
