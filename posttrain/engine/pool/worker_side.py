"""The engine inside a process of its own: what the pool asks of it, by name. Both processes and Ray actors run it."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from posttrain.core.gauge import Gauges, merge
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.transfer.parcel import Parcel, WeightReceiver

REPORT_EVERY = 0.25
"""Seconds between two reports that travel with answers."""


@dataclass(frozen=True)
class EngineFacts:
    """The properties of an engine, told once when it has started."""

    version: int
    keeps_sets: bool
    draws_by_place: bool
    context: int
    described: str
    pid: int


@dataclass(frozen=True)
class EngineReport:
    """The counts of an engine since its last report, and its memory now."""

    gauges: Gauges = field(default_factory=Gauges)
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    memory: int = 0
    """Bytes of main memory of its process; 0 where the system does not tell."""

    def __add__(self, later: EngineReport) -> EngineReport:
        names = {*self.seconds, *later.seconds}
        seconds = {n: self.seconds.get(n, 0.0) + later.seconds.get(n, 0.0) for n in names}
        return EngineReport(merge(self.gauges, later.gauges), seconds, later.memory or self.memory)


class EngineEnded(Exception):
    """The engine of this process can never answer again, for example because its vLLM server has died. Its words are
    the cause. The learner's side ends the process and begins a new one."""


class WorkerMethods(Protocol):
    """An object in a process that answers calls by the names of its methods, with a report where one is due."""

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, EngineReport | None]: ...


class HostStart(Protocol):
    """The object with which a process is begun. It is pickled; `host` makes, inside the process, what answers calls."""

    def host(self) -> WorkerMethods: ...


@dataclass(frozen=True)
class EngineStart:
    """Makes the two parts of the process of an engine. It is pickled, so both are functions of modules."""

    engine: Callable[[], Sampler]
    receiver: Callable[[], WeightReceiver]

    def host(self) -> HostedEngine:
        return HostedEngine(self)


class HostedEngine:
    """One engine and the receiver of its weights."""

    def __init__(self, start: EngineStart) -> None:
        self._engine, self._receiver = start.engine(), start.receiver()
        self._reported = self._installed = 0.0

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, EngineReport | None]:
        """The value of one call, with a report where one is due. EngineEnded where the engine never answers again."""
        try:
            value = await getattr(self, method)(*arguments)
        except Exception as error:
            # The cause is the engine's end, and not what this call raised because of it.
            if why := self._ended():
                raise EngineEnded(why) from error
            raise
        # Reports travel with answers. Turns are answered often, all other calls seldom.
        if method == "generate" and time.monotonic() - self._reported < REPORT_EVERY:
            return value, None
        self._reported = time.monotonic()
        seconds, self._installed = {**self._engine.clock(), "sync/install": self._installed}, 0.0
        return value, EngineReport(self._engine.gauges(), seconds, memory())

    async def facts(self) -> EngineFacts:
        e = self._engine
        described = getattr(e, "describe", lambda: f"engine: {type(e).__name__}")()
        return EngineFacts(e.version, e.keeps_sets, e.draws_by_place, e.context, described, os.getpid())

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        return await self._engine.generate(ids, sampling, place)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self._engine.score(ids)

    async def install(self, parcel: Parcel, probe: np.ndarray | None = None) -> tuple[str, np.ndarray | None]:
        """Serve the weights of a parcel; returns (their fingerprint, the log-probs of the ids `probe` under them). All
        tensors are checked before one is loaded. While they come and are checked, turns go on under the version before.
        `probe`: ids that will be asked for next (`score`): this saves a way to the learner and back."""
        begun = time.perf_counter()
        # In a thread: reading and checking blocks, and the engine goes on with its turns meanwhile.
        tensors = await asyncio.to_thread(self._receiver.read, parcel)
        served = await self._engine.load(parcel.version, tensors)
        scores = None if probe is None else await self._engine.score(probe)
        self._installed += time.perf_counter() - begun
        return served, scores

    async def report(self) -> None:
        """A sign of life; the report comes with the answer."""
        if why := self._ended():
            raise EngineEnded(why)

    def _ended(self) -> str:
        """Returns the reason why the engine can never answer again; '' while it can."""
        return getattr(self._engine, "ended", lambda: "")()


def memory() -> int:
    """Bytes of main memory that this process has now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def portable(error: BaseException) -> BaseException:
    """The error where it can travel between processes as it is, else one with its words."""
    try:
        # Both ways: an exception whose __init__ takes other arguments can often be written, and fails when it is read.
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
