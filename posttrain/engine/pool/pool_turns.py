"""The turns that a pool has been asked for, and the engines that say them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.core.exchange.request_owner import RequestOwner
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.sampling import Sampling
from posttrain.engine.pool.parent_side import EngineHost
from posttrain.engine.pool.supervised_processes import SupervisedProcess
from posttrain.engine.pool.turn_router import Beginnings, EngineLoad
from posttrain.engine.pool.worker_side import EngineReport


@dataclass(frozen=True)
class BusyTime:
    """The counts of a meter until now. The difference of two is what came between them."""

    seconds: float
    idle: float
    """Seconds without a turn, out of `seconds`."""
    flight: float
    """Tokens in flight times the seconds they were."""

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

    A turn ends when its answer has come to this process. The learner may compute at that time and take the answer up
    later.
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
        """The engine has no turn any more."""
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
        now, before = self.read(), self._taken
        self._taken = now
        return now - before

    def _count(self) -> None:
        """Add the time since the last event to the counts."""
        now = time.monotonic()
        # The state since the last event was constant, so time and tokens x time of the interval can be added when the
        # next event comes.
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
    """Their fingerprint; '' for those that it was started with."""
    busy: int = 0
    """Tokens that it was asked for and has not answered yet."""
    meter: BusyMeter = field(default_factory=BusyMeter)
    beginnings: Beginnings = field(default_factory=Beginnings)
    reserved: bool = False
    """Whether one turn has it alone, or will as soon as the others have ended."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are installed or a new process is started."""
    foretold: tuple[np.ndarray, np.ndarray] | None = None
    """(ids, log-probs) that the engine computed when it loaded the weights that it serves; None once they were given.
    """

    def serves(
        self, version: int, served: str, probe: np.ndarray | None = None, scores: np.ndarray | None = None
    ) -> None:
        """The engine serves new weights, and has nothing cached. `scores` are the log-probs of the ids `probe` that it
        computed with them."""
        self.version, self.served = version, served
        self.foretold = None if probe is None or scores is None else (probe, scores)
        self.beginnings.forget()

    def scored(self, ids: np.ndarray) -> np.ndarray | None:
        """The log-probs of these ids that came with the weights that it serves; None where it has to be asked. They are
        given once, so that later calls ask the engine."""
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
        """The turn is given to it."""
        self.held[turn] = None
        self.busy += turn.tokens
        self.meter.begin(turn, turn.tokens)
        self.beginnings.add(turn.ids)

    def leave(self, turn: PooledTurn) -> None:
        """The turn has ended here, well or not."""
        self.meter.end(turn)
        # `rest` may have forgotten it: the loop that gave the turn away has ended.
        if turn in self.held:
            del self.held[turn]
            self.busy -= turn.tokens

    def load(self, ids: np.ndarray) -> EngineLoad:
        """Returns the load of the engine, as the router knows it, for a turn after `ids`."""
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


def summary(engines: Sequence[PooledEngine]) -> str:
    """Returns in a few words what these engines do now."""
    turns, busy, restarts = (sum(x) for x in zip(*((len(e.held), e.busy, e.restarts) for e in engines), strict=True))
    return (
        f"{sum(e.ready for e in engines)} of {len(engines)} engines ready, {turns} turns and {busy} tokens in flight"
        + (f", {restarts} restarts" if restarts else "")
    )


def unassigned(owners: Sequence[object], engines: Sequence[PooledEngine]) -> RoleRow:
    """The row of the turns that no engine has yet. `owners`: all objects that wait for something."""
    taken = {t for e in engines for t in list(e.held)}
    turns = [o for o in owners if isinstance(o, PooledTurn) and o not in taken]
    return RoleRow(
        name="router",
        doing="holds turns back" if turns else "ready",
        depth=f"{len(turns)} turns",
        tokens=sum(t.tokens for t in turns),
        age=time.monotonic() - min(t.since for t in turns) if turns else None,
    )


def measured(engines: Sequence[PooledEngine], report: EngineReport) -> dict[str, float]:
    """Returns the measurements of all engines since the last call: seconds, counters, time without a turn, tokens in
    flight. `report`: what they counted in this time."""
    # The pool itself counts the tokens of delivered turns. The engines' count also has turns that were asked twice.
    counted = {n: g.mean for n, g in report.gauges.items() if g.count and n != "engine/tokens"}
    if "engine/steps" in counted:  # each counts once, so their mean says nothing
        counted["engine/steps"] = report.gauges["engine/steps"].sum
    busy = [e.meter.take() for e in engines]
    return {
        **report.seconds,
        **counted,
        "engine/idle": sum(b.idle_share for b in busy) / len(busy),
        "engine/in_flight": sum(b.in_flight for b in busy),
    }
