"""Engines in processes: how they start, die, stall and are told of. Real processes run where they are the point."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config.engines import VLLM, Embedded
from posttrain.config.placement import Local, Processes, Ray, check_machine
from posttrain.core.exchange.request_owner import RequestOwner, UnanswerableTurn, asked_for
from posttrain.core.types import SampledTurn
from posttrain.engine.pool import supervised_processes
from posttrain.engine.pool.engine_process import _answer
from posttrain.engine.pool.parent_side import all_started
from posttrain.engine.pool.pool_turns import PooledEngine
from posttrain.engine.pool.ray_actor import must_answer
from posttrain.engine.transfer.parcel import Parcel
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.system.errors import ConfigError, EngineError, InvariantError
from tests.engine.pool_parts import (
    PLAIN,
    Ends,
    KnownSampler,
    Refuses,
    Script,
    ScriptedHost,
    Unreadable,
    known,
    process_pool,
    prompt,
    scripted_pool,
)
from tests.tiny import tiny_run

ROOT = Path(__file__).parents[2]


@pytest.mark.prove
def test_an_engine_in_a_process_answers_and_is_replaced_when_killed() -> None:
    said: list[str] = []
    pool = process_pool(count=2, say=said.append)
    first = pool.engines[0].host.pid

    async def play() -> list[SampledTurn]:
        assert await pool.load(3, [("w", torch.tensor(2.0))]) == "weight 2"
        assert (await pool.score(prompt()) == -2).all()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        found = await asyncio.gather(*(pool.generate(prompt(t), PLAIN, t) for t in range(40)))
        await pool.score(prompt())  # waits for the new one
        return found

    found = asyncio.run(play())
    assert all((s.ids == known(prompt(t), t, 2.0)).all() and (s.version == 3).all() for t, s in enumerate(found))
    assert pool.engines[0].host.pid != first
    assert "engine 0 died: it was killed by SIGKILL (the system may have run out of memory)" in said[0]
    assert "its memory was" in said[0], "the last reading came with the weights"
    assert pool.clock()["engine/deaths"] == 1 and pool.clock()["engine/deaths"] == 0
    pids = [e.host.pid for e in pool.engines]
    pool.close()
    assert not any(alive(p) for p in pids)


def alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


LONG = pytest.mark.prove


@LONG
@pytest.mark.parametrize(
    ("how", "says", "error"),
    [
        ("raises", "there is no such model: give another path", ConfigError),
        ("exits", "engine 0 did not start: it ended with exit code 3. Its last words:\nabout to fail", EngineError),
        ("killed", "engine 0 did not start: it was killed by SIGKILL", EngineError),
    ],
)
def test_a_start_that_fails_tells_its_first_cause(how: str, says: str, error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        process_pool(partial(Refuses, how))
    assert says in str(found.value)


@LONG
def test_an_engine_that_stands_still_is_replaced() -> None:
    """SIGSTOP: the process lives and answers nothing. Its turns are said by the next one."""
    said: list[str] = []
    pool = process_pool(timeout=20.0, say=said.append)
    first = pool.engines[0].host.pid

    async def play() -> SampledTurn:
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        return await pool.generate(prompt(5), PLAIN, 5)

    assert (asyncio.run(play()).ids == known(prompt(5), 5, 0.0)).all()
    assert "gave no sign of life for" in said[0] and "placement.timeout" in said[0]
    pool.close()
    assert not alive(first)


class SlowReceiver(ParcelReceiver):
    """Weights that need longer than an engine may be silent."""

    def read(self, parcel: Parcel) -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(3.0)
        return super().read(parcel)


@LONG
def test_an_engine_that_reads_large_weights_gives_signs_of_life() -> None:
    said: list[str] = []
    pool = process_pool(timeout=15.0, say=said.append, receiver=SlowReceiver)

    async def play() -> tuple[str, SampledTurn]:
        loading = asyncio.ensure_future(pool.load(1, [("w", torch.tensor(2.0))]))
        return await loading, await pool.generate(prompt(5), PLAIN, 5)

    served, turn = asyncio.run(play())
    assert served == "weight 2" and (turn.ids == known(prompt(5), 5, 2.0)).all()
    assert not said and pool.engines[0].restarts == 0
    pool.close()


@LONG
def test_an_engine_that_can_never_answer_again_is_replaced(tmp_path: Path) -> None:
    """Its process lives, and what it depends on does not, such as its vLLM server."""
    said: list[str] = []
    pool = process_pool(partial(Ends, str(tmp_path / "dead")), say=said.append)
    first = pool.engines[0].host.pid

    async def play() -> list[SampledTurn]:
        await pool.load(3, [("w", torch.tensor(2.0))])
        return await asyncio.gather(*(pool.generate(prompt(t), PLAIN, t) for t in range(10)))

    found = asyncio.run(play())
    assert all((s.ids == known(prompt(t), t, 2.0)).all() and (s.version == 3).all() for t, s in enumerate(found))
    assert len(said) == 1 and "engine 0 died: its server has ended" in said[0]
    assert not alive(first)
    pool.close()


@LONG
def test_engines_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    """Also where it is killed and cannot tell them."""
    program = (
        "import os, time\nfrom tests.engine.pool_parts import process_pool\n"
        "pool = process_pool()\nprint(pool.engines[0].host.pid, flush=True)\ntime.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert alive(pid)
    child.kill()
    child.wait()
    child.stdout.close()
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_stall_says_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lives, gives signs of life and never answers a turn."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.05)
    pool = scripted_pool(Script(deaf={"generate"}), timeout=0.3)

    async def play() -> None:
        with asked_for(RequestOwner("train", "t7", 0, 2)):
            await pool.generate(prompt(), PLAIN, 1)

    with pytest.raises(EngineError) as found:
        asyncio.run(play())
    assert "task 't7', visit 0, sibling 2 (train) waits for engine 0" in str(found.value)
    assert "placement.timeout" in str(found.value) and "engine 0: ready, 1 turns" in str(found.value)
    with pytest.raises(EngineError, match="stalled"):
        asyncio.run(play())


BACKGROUND = [(what, how) for what in ("close", "new", "kill") for how in ("fails", "hangs")] + [("say", "fails")]
"""What a pool does in the background, for which nobody waits."""


@pytest.mark.parametrize(("what", "how"), BACKGROUND)
def test_what_a_pool_does_in_the_background_ends_no_run_unseen(
    what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing a dead engine, or ending a silent one, fails or never returns: who waits for a turn is told."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.05)
    pool = scripted_pool(Script(lives=[0], deaf={"generate"} if what == "kill" else set()), 1, timeout=0.5)

    def bad(*given: Any) -> Any:
        if how == "hangs":
            time.sleep(20)
        raise OSError("there is no room")

    if what == "kill":
        monkeypatch.setattr(PooledEngine, "silent", lambda self: 99.0)
    if what in ("new", "say"):
        monkeypatch.setattr(pool, f"_{what}", bad)
    else:
        monkeypatch.setattr(ScriptedHost, what, bad)
        monkeypatch.setattr(ScriptedHost, "kill", bad) if what == "kill" else None

    async def play() -> None:
        await pool.generate(prompt(), PLAIN, 1)

    begun = time.monotonic()
    with pytest.raises((EngineError, OSError), match="there is no room" if how == "fails" else "have stalled"):
        asyncio.run(play())
    assert time.monotonic() - begun < 5


async def test_an_answer_that_cannot_be_sent_is_an_error() -> None:
    """Else nobody would answer, and only the deadline would tell."""
    sent = list[bytes]()

    class Hosted:
        async def answer(self, method: str, given: tuple[Any, ...]) -> tuple[Any, None]:
            return threading.Lock(), None

    await _answer(Hosted(), SimpleNamespace(send_bytes=sent.append), 7, "moves", ())  # type: ignore[arg-type]
    number, value, error, report = pickle.loads(sent[0])
    assert (number, value, report) == (7, None, None) and "cannot pickle" in str(error)


def test_a_process_that_met_a_time_limit_while_it_started_is_believed() -> None:
    """Only one that did not start in time is told so."""
    started: Future[Any] = Future()
    started.set_exception(TimeoutError("the data base did not answer"))
    host: Any = SimpleNamespace(close=lambda: None)
    with pytest.raises(TimeoutError, match="the data base did not answer"):
        all_started("environment", lambda number: (host, started), 1, 60.0)


@pytest.mark.prove
def test_an_answer_that_cannot_be_read_ends_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would be answered any more, and only the deadline would tell."""
    pool = process_pool(Unreadable, timeout=300.0)

    async def play() -> None:
        await pool.generate(prompt(), PLAIN, 1)

    with pytest.raises(UnanswerableTurn, match="could not be read"):
        asyncio.run(asyncio.wait_for(play(), 100))
    pool.close()


@pytest.mark.prove
def test_time_in_which_the_learner_computes_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner computes in the event loop. Turns cannot be taken meanwhile, and nobody is to blame."""
    monkeypatch.setattr(supervised_processes, "WATCH_EVERY", 0.02)
    pool = scripted_pool(Script(), timeout=0.5)

    async def play() -> list[SampledTurn]:
        turns = [asyncio.ensure_future(pool.generate(prompt(t), PLAIN, t)) for t in range(4)]
        for _ in range(3):
            await asyncio.sleep(0.05)
            time.sleep(0.7)
        return await asyncio.gather(*turns)

    assert len(asyncio.run(play())) == 4


def test_siblings_share_an_engine_and_turns_follow_what_is_cached() -> None:
    script = Script()
    pool = scripted_pool(script, 3)
    tasks = [np.full(20, t, np.int32) for t in range(6)]

    async def play() -> None:
        await asyncio.gather(*(pool.generate(ids, PLAIN, 10 * t + g) for t, ids in enumerate(tasks) for g in range(4)))
        said = [known(ids, 10 * t, 0.0) for t, ids in enumerate(tasks)]
        longer = [np.concatenate([ids, s, np.zeros(3, np.int32)]) for ids, s in zip(tasks, said, strict=True)]
        await asyncio.gather(*(pool.generate(ids, PLAIN, 100 + t) for t, ids in enumerate(longer)))

    asyncio.run(play())
    at = {place: id(host) for place, host in script.given}
    assert all(len({at[10 * t + g] for g in range(4)}) == 1 for t in range(6)), "siblings are together"
    assert len({at[10 * t] for t in range(6)}) == 3, "and groups are spread"
    assert all(at[100 + t] == at[10 * t] for t in range(6)), "a later turn is where its beginning is"


def test_a_turn_that_is_given_up_frees_its_engine() -> None:
    pool = scripted_pool(Script(deaf={"generate"}), 1)

    async def play() -> None:
        turn = asyncio.ensure_future(pool.generate(prompt(), PLAIN, 1))
        await asyncio.sleep(0.02)
        assert pool.engines[0].busy == 3 + PLAIN.max_tokens
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        assert not pool.engines[0].held

    asyncio.run(play())


@pytest.mark.parametrize("weight", [5.0, float("nan")])
def test_engines_that_differ_are_refused(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = scripted_pool(Script(), 2)
    odd: Any = pool.engines[1].host
    odd._engine._engine.weight = weight
    with pytest.raises(InvariantError, match="engine 1 gives other log-probs than engine 0"):
        asyncio.run(pool.score(prompt()))

    async def behind() -> None:
        await pool.load(2, [("w", 1.0)])
        odd._engine._engine.version = 1
        await asyncio.gather(*(pool.generate(prompt(t), PLAIN, t) for t in range(30)))

    with pytest.raises(InvariantError, match="engine 1 sampled with weights of version 1 to 1"):
        asyncio.run(behind())
    load = KnownSampler.load

    async def wrong(self: KnownSampler, version: int, tensors: Any) -> str:
        return await load(self, version, tensors) + ("!" if self is odd._engine._engine else "")

    monkeypatch.setattr(KnownSampler, "load", wrong)
    with pytest.raises(InvariantError, match="engines serve different weights"):
        asyncio.run(pool.load(3, [("w", 2.0)]))


def test_settings_that_cannot_work_are_refused_before_anything_is_loaded() -> None:
    run = tiny_run()
    for placement, engine, says in (
        (Processes(), Embedded(timeline=True), "engine.timeline=false"),
        (Processes(), VLLM(url="http://127.0.0.1:1"), "leave out engine.url"),
    ):
        with pytest.raises(ConfigError, match=says):
            replace(run, placement=placement, engine=engine)
        replace(run, placement=Local(), engine=engine)
    for how, says in (
        ({"engines": 0}, "placement.engines=0"),
        ({"cores": -1}, "placement.cores=-1"),
        ({"deaths": 0}, "placement.deaths=0"),
        ({"timeout": 0.0}, "placement.timeout=0"),
    ):
        with pytest.raises(ConfigError, match=says):
            Processes(**how)
    with pytest.raises(ConfigError, match=r"placement.cores=100 for placement.engines=2 are 200 cores"):
        check_machine(Processes(engines=2, cores=100))


def test_ray_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.config.placement.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "posttrain\[ray\]"'):
        check_machine(Ray())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_where_no_cluster_is_says_so_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"placement.address={address}: no Ray cluster answers there"):
        must_answer(address, 1.0)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_an_address_without_a_port_is_left_to_ray(address: str) -> None:
    must_answer(address, 1.0)


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        must_answer(f"127.0.0.1:{server.getsockname()[1]}", 1.0)
