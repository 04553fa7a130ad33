"""What the tests of engine pools share: a sampler whose answers are known, and hosts that die when a test says so."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core import seeds
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn, Stop
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.engine_process import ProcessHost
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.worker_side import EngineFacts, EngineStart, HostedEngine
from posttrain.engine.transfer.parcel import Parcel
from posttrain.engine.transfer.receiver import ParcelReceiver
from posttrain.engine.transfer.sender import ParcelSender
from posttrain.engine.transfer.shared_memory import SharedCarrier
from posttrain.system.errors import ConfigError, EndpointError

PLAIN = Sampling(max_tokens=8)


class KnownSampler:
    """A sampler whose turns are a function of the prompt, the place and the weights. A turn takes as many rounds of
    the event loop as it has tokens."""

    keeps_sets, draws_by_place, context = True, True, 512

    def __init__(self) -> None:
        self.version, self.weight = 0, 0.0

    def describe(self) -> str:
        return "an engine whose answers are known"

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = known(ids, place, self.weight)
        version = self.version
        for _ in said:
            await asyncio.sleep(0)
        return SampledTurn(said, np.full(len(said), -1, np.float32), np.full(len(said), version, np.int32), Stop.LENGTH)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids) - 1, -self.weight, np.float32)

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        assert version > self.version
        self.version, self.weight = version, float(next(iter(tensors))[1])
        return f"weight {self.weight:g}"

    def gauges(self) -> Gauges:
        return {"engine/steps": Gauge(1, 1)}

    def clock(self) -> Mapping[str, float]:
        return {"engine/step": 0.0}


def known(ids: np.ndarray, place: int, weight: float) -> np.ndarray:
    """int32 [1 to 8]: what `KnownSampler` says."""
    u = seeds.uniforms(place, 9)
    return ((u[: 1 + int(u[8] * 8)] * 1000 + weight * 7 + int(ids.sum())) % 100).astype(np.int32)


class MemoryWeights:
    """Both sides of a weight transport, for hosts in this process."""

    def __init__(self) -> None:
        self.there = dict[int, list[tuple[str, Any]]]()
        self.retired = list[int]()

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> Parcel:
        self.there[version] = list(tensors)
        return self.whole(version)

    def whole(self, version: int) -> Parcel:
        return Parcel(version, None, "memory", "here", ())

    def read(self, parcel: Parcel) -> Iterator[tuple[str, Any]]:
        return iter(self.there[parcel.version])

    def retire(self, version: int) -> None:
        self.retired.append(version)
        del self.there[version]

    def clock(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self.there.clear()


class ScriptedHost(EngineHost):
    """An engine in this process that dies after a number of answers, at a deadly place, or when `kill` is called."""

    def __init__(self, weights: MemoryWeights, script: Script, make: Callable[[], Any] = KnownSampler) -> None:
        self._engine = HostedEngine(EngineStart(make, lambda: weights))
        super().__init__("scripted")
        self._tasks, self.pid = set[asyncio.Task[None]](), 1
        self._script, self._left = script, script.lives.pop(0) if script.lives else None
        self.asked = 0
        self.started: Future[EngineFacts] = Future()
        self.started.set_result(EngineFacts(0, True, True, 512, "known", 1))

    def call(self, method: str, *given: Any) -> Future[Any]:
        number, future = self._begin()
        self._script.calls.append(method)
        if not future.done() and not (method in self._script.deaf and given):
            task = asyncio.get_running_loop().create_task(self._work(number, method, given))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return future

    async def _work(self, number: int, method: str, given: Any) -> None:
        if method == "generate":
            self.asked += 1
            self._script.given.append((given[2], self))
            if given[2] in self._script.deadly:
                await asyncio.sleep(0)
                return self.kill("a deadly turn")
        try:
            value, report = await self._engine.answer(method, given)
        except Exception as error:
            return self._end(number, None, error, None)
        if method != "report" and self._left is not None:
            self._left -= 1
            if self._left < 0:
                return self.kill("its time had come")
        return self._end(number, value, None, report)

    def kill(self, why: str) -> None:
        self.die(why)
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        self.die("closed")


@dataclass
class Script:
    """What happens to the engines of a pool."""

    lives: list[int | None] = field(default_factory=list[int | None])
    """Answers after which each engine dies, in the order in which they are started; None, and all later ones: never."""
    deadly: set[int] = field(default_factory=set[int])
    """Places whose turns kill their engine."""
    deaf: set[str] = field(default_factory=set[str])
    """Methods that get no answer."""
    given: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    """(place, host) of every turn that reached an engine."""
    said: list[str] = field(default_factory=list[str])
    calls: list[str] = field(default_factory=list[str])
    """The methods that were called, in order."""


def scripted_pool(
    script: Script,
    count: int = 2,
    *,
    deaths: int = 3,
    timeout: float = 30.0,
    weights: MemoryWeights | None = None,
    make: Callable[[], Any] = KnownSampler,
    **how: Any,
) -> EnginePool:
    there = weights or MemoryWeights()

    def new(number: int) -> tuple[ScriptedHost, Future[EngineFacts]]:
        host = ScriptedHost(there, script, make)
        return host, host.started

    return EnginePool(new, there, count=count, timeout=timeout, deaths=deaths, say=script.said.append, **how)


def prompt(*ids: int) -> np.ndarray:
    return np.array(ids or (1, 2, 3), np.int32)


class Refuses(KnownSampler):
    def __init__(self, how: str) -> None:
        print("about to fail", file=sys.stderr, flush=True)
        if how == "raises":
            raise ConfigError("there is no such model: give another path")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)


class NoAnswer(np.ndarray):
    """Pickled like any array, and not to be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Unreadable(KnownSampler):
    """Its answers cannot be unpickled."""

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        said = await super().generate(ids, sampling, place)
        object.__setattr__(said, "ids", said.ids.view(NoAnswer))
        return said


class Ends(KnownSampler):
    """Its server dies in every process but those begun after `file` was made, at the first turn."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file, self._why = file, ""

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        if not os.path.exists(self._file):
            open(self._file, "w").close()
            self._why = "its server has ended"
        if self._why:
            raise EndpointError("rollout: no connection", "rollout", None)
        return await super().generate(ids, sampling, place)

    def ended(self) -> str:
        return self._why


def process_pool(
    engine: Any = KnownSampler, count: int = 1, timeout: float = 60.0, receiver: Any = ParcelReceiver, **how: Any
) -> EnginePool:
    start = pickle.dumps(EngineStart(engine, receiver))

    def new(number: int) -> tuple[ProcessHost, Future[EngineFacts]]:
        host = ProcessHost(f"engine {number}", start, threads=1, cores=None)
        return host, host.started

    return EnginePool(new, ParcelSender(SharedCarrier()), count=count, timeout=timeout, deaths=3, **how)
