"""Episodes played in processes of their own: the same conversation as in this process, whoever dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from posttrain.build.build_environments import make_environment, own_environments
from posttrain.build.spawn_engines import _sent, placed_environments
from posttrain.config.env import Env, Reward
from posttrain.config.placement import Local, Processes
from posttrain.core.exchange.request_owner import RequestOwner, UnanswerableTurn, asked_for
from posttrain.core.ports import Sampler
from posttrain.core.stop import Stop
from posttrain.core.types import Task
from posttrain.engine.pool import supervised_processes
from posttrain.engine.pool.engine_process import ProcessHost
from posttrain.engine.pool.environment_pool import EnvironmentPool, PlayedDifferentlyError
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.remote_environment import EnvironmentStart
from posttrain.system.errors import ConfigError, EngineError, InvariantError
from tests.engine.pool_parts import KnownSampler
from tests.environment.environment_parts import MARKS, Counts, WrittenTalk, counting
from tests.tiny import tiny_run


@contextmanager
def pool_of(count: int = 2, *, make: Callable[[], Any] = counting, **how: Any) -> Iterator[EnvironmentPool]:
    start = pickle.dumps(EnvironmentStart(make))

    def new(number: int) -> tuple[EngineHost, Future[Any]]:
        host = ProcessHost(f"environment {number}", start, threads=1, cores=None)
        return host, host.started

    pool = EnvironmentPool(new, count=count, **{"timeout": 60.0, "deaths": 3} | how)
    try:
        yield pool
    finally:
        pool.close()


async def outcome(playing: Any) -> tuple[str, str]:
    """What an episode ended with, as text."""
    try:
        return "stop", str(await playing)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MARKS, str(tmp_path))
    return tmp_path


LONG = pytest.mark.prove
KINDS = ("plain", "raises", "seats", "refused")


def task(kind: str, number: int) -> Task:
    return Task(f"{kind} {number}" if kind != "refused" else "plain refused", "prompt", answer=number)


@pytest.mark.prove
def test_an_episode_elsewhere_is_the_one_played_here() -> None:
    """Words, turns, seats, payments, the last state, the error and the reason, of many episodes at once."""
    tasks = [task(KINDS[i % len(KINDS)], i) for i in range(24)]

    async def play() -> None:
        here, there = [WrittenTalk() for _ in tasks], [WrittenTalk() for _ in tasks]
        found = [await outcome(Counts().play(t, talk)) for t, talk in zip(tasks, here, strict=True)]
        with pool_of() as pool:
            playing = [outcome(pool.play(0, t, talk)) for t, talk in zip(tasks, there, strict=True)]
            assert await asyncio.gather(*playing) == found
            assert all(not p.held for p in pool.processes)
        assert [t.log for t in there] == [t.log for t in here]
        assert [t.state for t in there] == [t.state for t in here]
        assert {kind for kind, _ in found} == {"stop", "ValueError", "InvariantError"}

    asyncio.run(play())


@LONG
def test_whoever_is_killed_no_turn_is_said_twice(marks: Path) -> None:
    """Every third episode kills its process once: all conversations are those of a run that lost nobody."""
    tasks = [task("dies" if i % 3 == 0 else "plain", i) for i in range(12)]

    async def play() -> None:
        here, there = [WrittenTalk() for _ in tasks], [WrittenTalk(pause=0.01) for _ in tasks]
        for t, talk in zip(tasks, here, strict=True):
            await Counts().play(Task(t.id.replace("dies", "plain"), t.prompt), talk)
        said = list[str]()
        with pool_of(deaths=8, say=said.append) as pool:
            for at in range(0, len(tasks), 3):
                playing = [pool.play(0, t, talk) for t, talk in zip(tasks[at : at + 3], there[at:], strict=False)]
                assert await asyncio.gather(*playing) == [Stop.SAID] * 3
            assert pool.clock() == {"environment/deaths": 4.0} and pool.clock() == {"environment/deaths": 0.0}
            assert len(list(marks.iterdir())) == 4
        assert [t.log for t in there] == [t.log for t in here]
        assert len(said) == 4 and all("killed by SIGKILL" in s and "played again" in s for s in said)

    asyncio.run(play())


@LONG
def test_a_deadly_episode_fails_alone_and_by_name() -> None:
    async def one(pool: EnvironmentPool, t: Task) -> tuple[str, str]:
        with asked_for(RequestOwner("train", t.id, 1, 2)):
            return await outcome(pool.play(0, t, WrittenTalk()))

    async def play() -> None:
        with pool_of(deaths=2) as pool:
            found = await asyncio.gather(*(one(pool, task("deadly" if i == 3 else "plain", i)) for i in range(6)))
            assert [kind for kind, _ in found] == ["stop"] * 3 + [UnanswerableTurn.__name__] + ["stop"] * 2
            assert "task 'deadly 3', visit 1, sibling 2 (train): 2 processes of environments died" in found[3][1]
            assert "killed by SIGKILL" in found[3][1]
        with pool_of(1, deaths=1) as pool:
            assert (await one(pool, task("deadly", 0)))[0] == UnanswerableTurn.__name__

    asyncio.run(play())


@LONG
def test_an_episode_that_blocks_its_process_fails_alone_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without end, for instance. It ends the process that plays it alone too, and not the run."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.1)

    async def play() -> None:
        with pool_of(1, deaths=2, timeout=20.0) as pool:
            with pytest.raises(UnanswerableTurn, match="gave no sign of life"):
                await pool.play(0, task("blocks", 0), WrittenTalk())
            assert await pool.play(0, task("plain", 1), WrittenTalk()) is Stop.SAID

    asyncio.run(play())


@LONG
def test_an_environment_that_plays_otherwise_the_second_time_fails_its_episode_by_name() -> None:
    async def play() -> None:
        with pool_of() as pool:
            with pytest.raises(PlayedDifferentlyError, match=r"move 5 .*what it.*writes follow"):
                await pool.play(0, task("fickle", 1), WrittenTalk())
            assert await pool.play(0, task("plain", 1), WrittenTalk()) is Stop.SAID

    asyncio.run(play())


@LONG
def test_a_state_that_cannot_travel_is_refused_by_name() -> None:
    async def play() -> None:
        sentence = r"leaves a state that cannot be sent .*placement.environments=0"
        with pool_of(1) as pool, pytest.raises(ConfigError, match=sentence):
            await pool.play(0, task("strange", 1), WrittenTalk())

    asyncio.run(play())


@LONG
def test_an_episode_that_is_given_up_is_given_up_there_too() -> None:
    async def play() -> None:
        with pool_of(1) as pool:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await pool.play(0, task("hangs", 1), WrittenTalk())
            talk = WrittenTalk(pause=5)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await pool.play(0, task("plain", 1), talk)
            assert not pool.processes[0].held and not pool._waits
            assert talk.log == [("see", "", "begin 1")]
            assert await pool.play(0, task("plain", 2), WrittenTalk()) is Stop.SAID

    asyncio.run(play())


@LONG
def test_a_stall_names_the_episode_and_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a turn that is being said does not count."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.1)

    async def play() -> None:
        with pool_of(1) as pool, asked_for(RequestOwner("train", "a task", 0, 1)):
            pool._waits.timeout = 2.0  # a process may need longer to start
            assert await pool.play(0, task("plain", 1), WrittenTalk(pause=1.5)) is Stop.SAID
            begun = time.monotonic()
            with pytest.raises(EngineError, match=r"environments have stalled.*\ntask 'a task'.* for environment 0"):
                await pool.play(0, task("hangs", 1), WrittenTalk())
            assert 1.5 < time.monotonic() - begun < 30

    asyncio.run(play())


@LONG
def test_a_process_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.1)

    async def play() -> None:
        with pool_of(1, timeout=20.0) as pool:
            assert await pool.play(0, task("plain", 1), WrittenTalk()) is Stop.SAID
            stopped = pool.processes[0].host.pid
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            assert await pool.play(0, task("plain", 2), WrittenTalk()) is Stop.SAID
            assert pool.processes[0].restarts == 1 and pool.processes[0].host.pid != stopped

    asyncio.run(play())


@pytest.mark.prove
@pytest.mark.parametrize("what", ["close", "new", "say", "stopped"])
def test_what_a_pool_does_in_the_background_ends_no_run_unseen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies, and replacing it fails, or its successor is stopped while it starts: the episode that waits for a
    process is told."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.1)
    begin, fails = ProcessHost.__init__, what != "stopped"

    def bad(*given: Any) -> Any:
        raise OSError("there is no room")

    def stopped(self: ProcessHost, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)

    async def play() -> None:
        with pool_of(1) as pool, asked_for(RequestOwner("train", "a task", 0, 1)), monkeypatch.context() as patched:
            pool._waits.timeout = 2.0
            os.kill(pool.processes[0].host.pid or 0, signal.SIGKILL)
            if what in ("new", "say"):
                patched.setattr(pool, f"_{what}", bad)
            else:
                patched.setattr(ProcessHost, "close" if fails else "__init__", bad if fails else stopped)
            words = "there is no room" if fails else r"environments have stalled.*\n.*\n?.*a task.* for a process"
            with pytest.raises((EngineError, OSError), match=words):
                await asyncio.wait_for(pool.play(0, task("plain", 1), WrittenTalk()), 30)

    asyncio.run(play())


def broken() -> list[Any]:
    raise ConfigError("there is no such world")


@LONG
def test_a_start_that_fails_tells_its_cause() -> None:
    with pytest.raises(ConfigError, match="there is no such world"), pool_of(make=broken):
        pass
    with pytest.raises(ConfigError, match="placement.environments=-1: must be >= 0"):
        Processes(environments=-1)


@LONG
def test_each_environment_of_a_run_is_played_by_its_own_twin() -> None:
    """A stage may have an environment of its own."""
    run = tiny_run(steps=1)
    rl = run.stages[1]
    own = replace(rl, name="own", env=Env(name="calculator", heldout=4))
    run = replace(run, stages=(rl, own), placement=Processes(environments=1))
    env = make_environment(run)
    others = own_environments(run, env)
    elsewhere = placed_environments(run, env, others, cast("Sampler", KnownSampler()))
    try:
        for each in (env, others["own"]):
            player, here, there = elsewhere.player(each), WrittenTalk(), WrittenTalk()
            assert player is not None
            one = each.train.task(0)
            stops = [asyncio.run(x) for x in (each.play(one, here), player.play(one, there, False))]
            assert stops[0] == stops[1] and here.log == there.log and here.log and here.state == there.state
    finally:
        elsewhere.close()
    assert placed_environments(replace(run, placement=Local()), env, others, cast("Sampler", None)).player(env) is None


def test_what_is_sent_of_an_environment() -> None:
    """Its configuration without what judges; one that a program handed as it is, where that can be imported there."""
    config = Env(name="arithmetic", rewards=(Reward(function="a.py:f"),))
    assert _sent(config, Counts()) == replace(config, rewards=())
    handed = Env(name="inline:mine")
    assert _sent(handed, Counts()) == Counts()

    class Local(Counts):
        pass

    for env in (Local(), Counts(name=cast("str", lambda: ""))):
        with pytest.raises(ConfigError, match=r"env=inline:mine cannot be sent .*path.py:Class"):
            _sent(handed, env)


@LONG
def test_a_limit_of_the_conversation_ends_the_episode() -> None:
    """What the conversation refuses is raised as it is."""

    async def play() -> None:
        with pool_of(1) as pool, pytest.raises(InvariantError, match="this is not shown"):
            await pool.play(0, task("refused", 0), WrittenTalk())

    asyncio.run(play())
