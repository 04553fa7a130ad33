"""The turns that a pool has been asked for, and the engines that say them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from posttrain.core.exchange.request_owner import RequestOwner
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.sampling import Sampling
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.supervised_processes import SupervisedProcess
from posttrain.engine.pool.turn_router import Beginnings, EngineLoad


@dataclass(frozen=True)
class BusyTime:
    """The counts of a meter: seconds, seconds without a turn, and tokens in flight summed over time (tokens times
    seconds). The difference of two readings is what came between them."""

    seconds: float
    idle: float
    flight: float

    def __sub__(self, before: BusyTime) -> BusyTime:
        return BusyTime(self.seconds - before.seconds, self.idle - before.idle, self.flight - before.flight)

    @property
    def idle_share(self) -> float:
        """Share of the time without a turn; 0 where no time has passed."""
        return self.idle / self.seconds if self.seconds > 0 else 0.0

    @property
    def in_flight(self) -> float:
        """Tokens in flight, mean over the time."""
        return self.flight / self.seconds if self.seconds > 0 else 0.0


class BusyMeter:
    """Counts how busy an engine is, from now on. `begin` and `end` tell it of each turn, from any thread.

    A turn ends when its answer has come to this process. The learner may compute then, and take the answer up later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[object, int] = {}
        self._tokens = 0
        self._last_event = time.monotonic()
        self._counted = self._taken = BusyTime(0.0, 0.0, 0.0)

    def begin(self, turn: object, tokens: int) -> None:
        """The engine has this turn from now on, and computes at most `tokens` for it."""
        with self._lock:
            self._count()
            # A turn that is begun twice counts once.
            self._tokens += tokens - self._open.get(turn, 0)
            self._open[turn] = tokens

    def end(self, turn: object) -> None:
        """The engine has this turn no longer. Nothing happens where it had not got it."""
        with self._lock:
            self._count()
            self._tokens -= self._open.pop(turn, 0)

    def clear(self) -> None:
        with self._lock:
            self._count()
            self._open, self._tokens = {}, 0

    def read(self) -> BusyTime:
        """Returns the counts since the meter was made."""
        with self._lock:
            self._count()
            return self._counted

    def take(self) -> BusyTime:
        """Returns the counts since the last call."""
        before, self._taken = self._taken, self.read()
        return self._taken - before

    def _count(self) -> None:
        """Add the time since the last event, in which the state was constant."""
        now = time.monotonic()
        spent, self._last_event = max(0.0, now - self._last_event), now
        idle = 0.0 if self._open else spent
        c = self._counted
        self._counted = BusyTime(c.seconds + spent, c.idle + idle, c.flight + self._tokens * spent)


@dataclass(eq=False)
class PooledTurn:
    """One call of `generate`, from its question to its answer, by however many engines."""

    ids: np.ndarray
    sampling: Sampling
    place: int
    who: RequestOwner | None
    version: int = 0
    """Version of the pool when the turn was given to its engine."""
    during: bool = False
    """Whether it was given away while new weights came."""
    deaths: int = 0
    """Engines that have died with it."""
    alone: bool = False
    """Whether its engine must have no other turn."""
    since: float = field(default_factory=time.monotonic)
    """When it was asked, or given to its present engine."""

    @property
    def tokens(self) -> int:
        """The most tokens that its engine computes for it, prompt included."""
        return len(self.ids) + self.sampling.max_tokens

    def __str__(self) -> str:
        return str(self.who or "a turn outside of an episode")


@dataclass(eq=False)
class PooledEngine(SupervisedProcess[PooledTurn]):
    """One place of the pool: the engine that is there now, and the turns that it says."""

    version: int
    """Version of the weights that the engine serves."""
    served: str = ""
    """The fingerprint of these weights; '' for the weights that it was started with."""
    busy: int = 0
    """Tokens that it was asked for and has not answered yet."""
    meter: BusyMeter = field(default_factory=BusyMeter)
    beginnings: Beginnings = field(default_factory=Beginnings)
    reserved: bool = False
    """Whether one turn has it alone, or will as soon as the others have ended."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are installed or a new process is started."""
    foretold: tuple[np.ndarray, np.ndarray] | None = None
    """(ids, log-probs) that came with the weights that it serves; None once they were given."""

    def serves(
        self, version: int, served: str, probe: np.ndarray | None = None, scores: np.ndarray | None = None
    ) -> None:
        """The engine serves new weights, and has nothing cached. `scores`: their log-probs of the ids `probe`."""
        self.version, self.served = version, served
        self.foretold = None if probe is None or scores is None else (probe, scores)
        self.beginnings.forget()

    def scored(self, ids: np.ndarray) -> np.ndarray | None:
        """The log-probs of these ids that came with the weights, once; None where the engine has to be asked."""
        foretold, self.foretold = self.foretold, None
        return foretold[1] if foretold is not None and np.array_equal(foretold[0], ids) else None

    def begin(self, host: EngineHost) -> None:
        super().begin(host)
        self.foretold = None
        self.beginnings.forget()

    def forget_loop(self) -> None:
        super().forget_loop()
        self.busy, self.reserved, self.lock, self.foretold = 0, False, asyncio.Lock(), None
        self.meter.clear()

    def take(self, turn: PooledTurn) -> None:
        self.held[turn] = None
        self.busy += turn.tokens
        self.meter.begin(turn, turn.tokens)
        self.beginnings.add(turn.ids)

    def leave(self, turn: PooledTurn) -> None:
        """The turn has ended here, well or not."""
        self.meter.end(turn)
        # `forget_loop` may have forgotten it.
        if turn in self.held:
            del self.held[turn]
            self.busy -= turn.tokens

    def load(self, ids: np.ndarray) -> EngineLoad:
        """Returns the load of the engine for a turn after `ids`."""
        return EngineLoad(self.busy, self.beginnings.cached(ids), self.ready and not self.reserved)

    def row(self) -> RoleRow:
        state = "starting" if not self.ready else "alone with one turn" if self.reserved else "ready"
        return RoleRow(
            name=self.name,
            doing=state,
            depth=f"{len(self.held)} turns",
            tokens=self.busy,
            age=self.age(),
            more=f"version {self.version}, {self.restarts} restarts",
        )
