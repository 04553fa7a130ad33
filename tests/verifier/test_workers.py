"""Verifiers in processes: hangs, crashes, floods and ends, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.env import Reward
from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.stop import StepNumber
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State, Verdict
from posttrain.environment.make import environment
from posttrain.system.errors import ConfigError
from posttrain.verifier.configured import sources
from posttrain.verifier.reward_source import BatchSource
from posttrain.verifier.workers.worker_pool import begin_workers
from posttrain.verifier.workers.worker_process import Spec, WorkerError, WorkerProcess, scrubbed

FUNCTIONS = """
import ctypes, os, subprocess, sys, time, threading, signal

def judge(task, text):
    print("a verifier may print")
    kind, _, rest = text.partition(" ")
    if kind == "spin":
        while True: pass
    if kind == "power":
        9**9**9
    if kind == "sleep":
        time.sleep(1000)
    if kind == "exit":
        os._exit(int(rest or 3))
    if kind == "quit":
        sys.exit(0)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "hog":
        return len(bytearray(int(rest) << 20))
    if kind == "raise":
        raise ValueError(rest)
    if kind == "env":
        return float(rest in os.environ)
    if kind == "pid":
        return float(os.getpid())
    if kind == "child":
        return float(subprocess.Popen(["sleep", "1000"]).pid)
    if kind == "once":
        if not os.path.exists(rest):
            open(rest, "w").close()
            os._exit(1)
        return 1.0
    if kind == "alarm":
        signal.signal(signal.SIGALRM, lambda *a: None)
        return float(threading.current_thread() is threading.main_thread())
    return float(text == task.answer)

def never(task, text):
    while True: pass

async def later(prompts, completions, **columns):
    return [float(completions[0] == columns["answer"][0])]

def longest(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    if "die" in completions:
        os._exit(3)
    log_metric("answers", len(completions))
    log_extra("size", [len(c) for c in completions])
    return [float(len(c) == max(map(len, completions))) * trainer_state.global_step for c in completions]

def length(task, text):
    return float(len(text))

def brittle(task, text):
    if os.path.exists(task.info["broken"]):
        os._exit(9)
    return 1.0
"""
TASK = Task(id="t", prompt="p", answer="12")


def said(text: str, task: Task = TASK) -> Attempt:
    return Attempt(task=task, turns=(text,), stop=Stop.SAID)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def made(rewards: Path, function: str = "judge", workers: int = 1, timeout: float = 1.0) -> Any:
    return sources([Reward(function=f"{rewards}:{function}", workers=workers, timeout=timeout)])[0]


@pytest.fixture(scope="module")
def judge(rewards: Path) -> Iterator[Any]:
    source = made(rewards)
    yield source
    source.close()


def ask(source: Any, *texts: str, task: Task = TASK) -> list[Verdict]:
    async def go() -> list[Verdict]:
        return [j.verdict for j in await asyncio.gather(*(source(said(t, task)) for t in texts))]

    return asyncio.run(go())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    for _ in range(100):
        if not any(alive(p) for p in pids):
            return True
        time.sleep(0.05)
    return False


def test_answers_exceptions_and_exits_mean_what_they_mean_in_a_thread(judge: Any) -> None:
    right, wrong, raised, quit_ = ask(judge, "12", "13", "raise no such file", "quit")
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert (raised.state, raised.kind) == (
        State.FAILED,
        "raised",
    ) and "ValueError: no such file (rewards.py:" in raised.why
    assert (quit_.state, quit_.kind) == (State.FAILED, "raised") and "SystemExit" in quit_.why
    assert [v.score for v in ask(judge, "alarm", "12")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [pytest.param("power", "timeout", marks=pytest.mark.prove), ("segfault", "crash"), ("exit 0", "crash")],
)
def test_a_text_that_hangs_or_kills_a_working_verifier_is_worth_nothing(judge: Any, text: str, kind: str) -> None:
    assert ask(judge, "12")[0].score == 1.0
    (v,) = ask(judge, text)
    assert (v.state, v.score, v.kind) == (State.VALUE, 0.0, kind), v.why
    assert ask(judge, "12")[0].score == 1.0


@pytest.mark.prove
@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["asked at once", "asked later"])
def test_a_worker_that_is_killed_between_two_requests_mixes_up_no_answers(rewards: Path, pause: float) -> None:
    """By the system, for example. The next process finds the request that nobody has read, and answers it too."""
    source = made(rewards, "length")
    assert ask(source, "x")[0].score == 1
    for _ in range(3):
        answering = source.pool.processes()[1]
        os.kill(answering, signal.SIGKILL)
        time.sleep(pause)
        assert [ask(source, "x" * n)[0].score for n in (2, 5, 3, 4)] == [2, 5, 3, 4]
    source.close()


def test_a_worker_that_is_killed_while_it_starts_is_started_again_at_once(
    rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails by itself is remembered for a second; one that was killed says nothing about the next."""
    begin, begun = subprocess.Popen, list[Any]()

    def killed(*args: Any, **kwargs: Any) -> Any:
        begun.append(begin(*args, **kwargs))
        if len(begun) == 1:
            begun[0].kill()
        return begun[-1]

    monkeypatch.setattr("posttrain.verifier.workers.worker_process.subprocess.Popen", killed)
    source = made(rewards, "length")
    first, second = ask(source, "xx")[0], ask(source, "xx")[0]
    assert (first.state, first.kind) == (State.FAILED, "worker") and "SIGKILL" in first.why
    assert second.score == 2 and len(begun) == 2
    source.close()


def test_memory_is_bounded(judge: Any) -> None:
    assert ask(judge, "hog 100")[0].score == 100 << 20
    (v,) = ask(judge, "hog 100000")
    assert (v.state, v.score, v.kind) == (State.VALUE, 0.0, "memory"), v.why


def test_waiting_is_ours(rewards: Path) -> None:
    source = made(rewards, timeout=0.1)
    source.pool._shared.spec.__dict__["wall"] = 0.4
    (v,) = ask(source, "sleep")
    assert (v.state, v.kind) == (State.FAILED, "timeout") and source.pool.gauges()["verifier/judge/start_s"].count == 1
    source.close()


def test_a_crash_that_does_not_repeat_loses_nothing(judge: Any, tmp_path: Path) -> None:
    assert ask(judge, f"once {tmp_path / 'tried'}")[0].score == 1.0


@pytest.mark.prove
def test_a_verifier_that_never_answered_is_an_outage(rewards: Path) -> None:
    source = made(rewards, "never")
    (v,) = ask(source, "anything")
    assert (v.state, v.kind) == (State.FAILED, "timeout") and "not answered anything yet" in v.why
    source.close()


def test_a_verifier_that_stopped_answering_is_an_outage(rewards: Path, tmp_path: Path) -> None:
    source = made(rewards, "brittle")
    task = Task(id="t", prompt="p", answer="12", info={"broken": str(tmp_path / "broken")})
    assert ask(source, "x", task=task)[0].score == 1.0
    (tmp_path / "broken").touch()
    (v,) = ask(source, "x", task=task)
    assert (v.state, v.kind) == (State.FAILED, "crash") and "no longer answers" in v.why
    source.close()


def test_a_worker_that_cannot_start_is_an_outage(rewards: Path) -> None:
    source = made(rewards)
    source.pool._shared.spec.__dict__["argument"] = "nowhere.py:judge"
    (v,) = ask(source, "12")
    assert (v.state, v.kind) == (State.FAILED, "worker") and "no such file" in v.why
    source.close()


@pytest.mark.prove
def test_workers_elsewhere_that_are_lost_are_ours(rewards: Path) -> None:
    """Workers that live on other machines take the place of those here. One that is lost is asked again from another;
    a text that loses two proves nothing, and is never worth 0."""
    begun, lose = list[WorkerProcess](), list[str]()

    class Elsewhere(WorkerProcess):
        def ask(self, request: bytes) -> dict[str, Any]:
            if lose:
                self.kill()
                raise WorkerError("lost", lose.pop(), killed=True)
            return super().ask(request)

    def begin(spec: Spec) -> WorkerProcess:
        begun.append(Elsewhere(spec))
        return begun[-1]

    source = made(rewards)
    assert ask(source, "12")[0].score == 1
    here = source.pool.processes()
    back = begin_workers(begin)
    try:
        assert ask(source, "12")[0].score == 1 and len(begun) == 1 and gone(*here)
        lose.append("its machine is gone")
        assert ask(source, "12")[0].score == 1 and len(begun) == 2
        lose += ["its machine is gone"] * 2
        verdict = ask(source, "13")[0]
        assert (verdict.state, verdict.kind, verdict.why) == (State.FAILED, "worker", "its machine is gone")
        assert ask(source, "12")[0].score == 1
    finally:
        back()
    assert ask(source, "13")[0].score == 0 and gone(*(p for w in begun for p in w.processes))
    source.close()


@pytest.mark.prove
def test_two_hundred_at_once_with_hangs_and_crashes_among_them(rewards: Path) -> None:
    source = made(rewards, workers=2)
    texts = ["12" if i % 2 else "13" for i in range(200)]
    texts[50], texts[100] = "spin", "exit 5"

    async def go() -> tuple[list[Verdict], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.02)
                beats += 1

        pulse = asyncio.create_task(beat())
        judged = await asyncio.gather(*(source(said(t)) for t in texts))
        pulse.cancel()
        return [j.verdict for j in judged], beats

    began = time.monotonic()
    verdicts, beats = asyncio.run(go())
    assert beats > (time.monotonic() - began) / 0.02 / 4, "the event loop was held up"
    kinds = {"spin": "timeout", "exit 5": "crash"}
    assert [(v.score, v.kind) for v in verdicts] == [(float(t == "12"), kinds.get(t, "")) for t in texts]
    g = source.pool.gauges()
    assert g["verifier/judge/queue"].count == 200 and g["verifier/judge/queue"].sum > 1000
    assert g["verifier/judge/kind/timeout"].mean > 1.0 > g["verifier/judge/kind/answered"].mean
    pids = source.pool.processes()
    assert source.pool.gauges() == {} and len(pids) == 4
    source.close()
    assert gone(*pids)


def test_a_batch_reward_gets_all_answers_in_one_call(rewards: Path) -> None:
    """As in a thread: the same verdicts, steps and logged numbers. Where the call fails, nobody is worth nothing."""
    source, thread = made(rewards, "longest"), made(rewards, "longest", workers=0)

    def together(of: Any, *texts: str) -> Any:
        return asyncio.run(of.batch([said(t) for t in texts], StepNumber(2, 8)))

    assert isinstance(source, BatchSource) and source.batched
    judged, logged = together(source, "12", "123", "1", "999")
    assert (judged, logged) == together(thread, "12", "123", "1", "999")
    assert [j.verdict.score for j in judged] == [0, 2, 0, 2] and logged["metric/answers"].sum == 4.0
    assert judged[1].verdict.why == "size: 3" and source.pool.gauges()["verifier/longest/work_s"].count == 1
    judged, logged = together(source, "12", "die")
    assert [(j.verdict.state, j.verdict.kind) for j in judged] == [(State.FAILED, "crash")] * 2 and logged == {}
    assert "one call for 2 answers" in judged[0].verdict.why
    assert together(source, "12")[0][0].verdict.score == 2.0
    source.close()


def test_secrets_reach_neither_worker_nor_record(judge: Any, monkeypatch: pytest.MonkeyPatch, rewards: Path) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-verysecret")
    source = made(rewards)
    assert [v.score for v in ask(source, "env JUDGE_API_KEY", "env PATH")] == [0.0, 1.0]
    assert ask(source, "raise 401 for sk-verysecret")[0].why.startswith("ValueError: 401 for [JUDGE_API_KEY] (")
    source.close()
    thread = made(rewards, workers=0)
    assert "[JUDGE_API_KEY]" in ask(thread, "raise 401 for sk-verysecret")[0].why
    assert redacted(Verdict.value(0.0, "wrong", "said ab"), {"MY_TOKEN": "ab"}).why == "said ab"
    assert "AWS_SECRET_ACCESS_KEY" not in scrubbed({"AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"})


def test_what_a_verifier_started_ends_with_it(rewards: Path) -> None:
    source = made(rewards)
    pid, child = (int(v.score or 0) for v in ask(source, "pid", "child"))
    pids = source.pool.processes()
    assert alive(pid) and alive(child) and pid in source.pool.processes()
    source.close()
    assert gone(*pids, child)
    (v,) = ask(source, "12")
    assert (v.state, v.kind) == (State.FAILED, "worker")


def test_closing_answers_everything_that_waits(rewards: Path) -> None:
    source = made(rewards, timeout=30)

    async def go() -> list[Verdict]:
        waiting = [asyncio.ensure_future(source(said(t))) for t in ("spin", "12", "12")]
        while not source.pool.processes():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        source.close()
        return [j.verdict for j in await asyncio.gather(*waiting)]

    assert {(v.state, v.kind) for v in asyncio.run(go())} == {(State.FAILED, "worker")}


@pytest.mark.prove
def test_a_forgotten_pool_leaves_no_process(rewards: Path) -> None:
    source = made(rewards)
    pid = int(ask(source, "pid")[0].score or 0)
    del source
    gc.collect()
    assert gone(pid)


PROGRAM = """
import asyncio, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
from posttrain.core.ports import Attempt
from posttrain.config.env import Reward
from posttrain.core.types import Stop, Task
from posttrain.verifier.configured import sources

source, = sources([Reward(function=sys.argv[1] + ":judge", workers=2, timeout=60)])
task = Task(id="t", prompt="p", answer="12")

async def go():
    pid = (await source(Attempt(task=task, turns=("pid",), stop=Stop.SAID))).verdict.score
    print(int(pid), flush=True)
    if sys.argv[2] == "normal":
        return
    await asyncio.gather(*(source(Attempt(task=task, turns=("spin",), stop=Stop.SAID)) for _ in range(2)))

asyncio.run(go())
"""


@pytest.mark.parametrize("how", ["normal", "SIGINT", "SIGTERM", "SIGKILL"])
def test_however_the_trainer_ends_no_process_is_left(rewards: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rewards), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as trainer:
        assert trainer.stdout is not None
        first = int(trainer.stdout.readline())
        workers = {first}
        if how != "normal":
            until = time.monotonic() + 10
            while len(workers) < 4 and time.monotonic() < until:
                guardians = children(trainer.pid)
                workers |= {*guardians, *(c for g in guardians for c in children(g))}
                time.sleep(0.05)
            trainer.send_signal(getattr(signal, how))
        trainer.wait(timeout=20)
    assert gone(*workers), f"{how} left {[w for w in workers if alive(w)]}"


def children(pid: int) -> list[int]:
    out: list[int] = []
    for task in Path("/proc").glob(f"{pid}/task/*"):
        with contextlib.suppress(FileNotFoundError):
            out += [int(c) for c in (task / "children").read_text().split()]
    return out


def test_configured_by_a_reward_and_refused_where_it_means_nothing(rewards: Path, tmp_path: Path) -> None:
    env = environment(
        Env(rewards=(Reward(function=f"{rewards}:later", workers=1), Reward(function=f"{rewards}:judge", workers=1))), 0
    )
    task = env.heldout[0]
    judged = asyncio.run(env.judge(said(str(task.answer), task)))
    assert [(j.source, j.verdict.score) for j in judged] == [("arithmetic", 1.0), ("later", 1.0), ("judge", 1.0)]
    assert env.gauges()["verifier/later/work_s"].count == 1
    env.close()
    with pytest.raises(ConfigError, match="needs no workers"):
        sources([Reward(function="exact", workers=1)])
    with pytest.raises(ConfigError, match="workers=-1 must be >= 0"):
        Reward(function="exact", workers=-1)
    assert os.getpid() not in env.rewards[0].pool.processes()  # type: ignore[attr-defined]
