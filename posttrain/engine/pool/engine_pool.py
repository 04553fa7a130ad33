"""`core.ports.Sampler` over several engines in processes of their own. Any of them may die at any time.

An answer is a function of its question, the weights and its place (law 8), so a turn whose engine died is asked again
from another one, and a synchronous run ends as if nobody had died. All engines serve one version: while new weights
come, no new turn is given away.

A turn may cause a limited number of deaths. When only one is left, it is asked alone. If that engine dies too, the turn
is guilty: it raises `UnanswerableTurn`, which fails its episode only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from posttrain.core.exchange.request_owner import UnanswerableTurn, asker
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.pool.parent_side import EngineDied, EngineHost, NewHost, PoolSender, has_started
from posttrain.engine.pool.pool_turns import PooledEngine, PooledTurn, measured, summary, unassigned
from posttrain.engine.pool.pool_waits import WaitList, aside, attended, briefly
from posttrain.engine.pool.turn_router import choose
from posttrain.engine.pool.worker_side import EngineFacts, EngineReport
from posttrain.engine.transfer.parcel import Parcel
from posttrain.system.errors import EngineError, InvariantError

T = TypeVar("T")
WATCH_EVERY = 1.0
"""Seconds between two looks at who waits."""
SILENT = 0.1
"""Share of the time-out after which an engine without any sign of life is replaced."""


class EnginePool:
    """Samples from `count` engines.

    Args:
        new: begins an engine in a process of its own.
        sender: publishes weights for them.
        timeout: seconds that a turn, an update or a start may take.
        deaths: engines that one turn may kill.
        tolerance: nats by which two engines may differ in the log-prob of one token; 0: not at all.
        say: tells people what happened to an engine.
        end: ends what the engines share, after them.

    Raises:
        EngineError: an engine does not start; the message has its first cause. ConfigError: the same, as the engine
            itself raised it.
    """

    def __init__(
        self,
        new: NewHost,
        sender: PoolSender,
        *,
        count: int,
        timeout: float,
        deaths: int,
        tolerance: float = 0.0,
        say: Callable[[str], None] = lambda line: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._new, self._sender, self._timeout, self._deaths = new, sender, timeout, deaths
        self._tolerance, self._say, self._end = tolerance, say, end
        # All begin before the first one is waited for, so they start side by side. If one fails, none is left behind.
        begun = list[tuple[EngineHost, Future[EngineFacts]]]()
        try:
            for i in range(count):
                begun.append(new(i))
            facts = [has_started(f"engine {i}", *pair, timeout) for i, pair in enumerate(begun)]
        except BaseException:
            for host, _ in begun:
                host.close()
            raise
        self._facts, self._version = facts[0], facts[0].version
        self.keeps_sets, self.draws_by_place = facts[0].keeps_sets, facts[0].draws_by_place
        self.context = facts[0].context
        self._engines = [PooledEngine(f"engine {i}", host, self._version) for i, (host, _) in enumerate(begun)]
        self._parcel: Parcel | None = None
        self._probe: np.ndarray | None = None
        self._loads = self._turns = self._tokens = self._deadly = 0
        self._waits = WaitList(timeout)
        self._lost = EngineReport()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = list[asyncio.Future[None]]()
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def engines(self) -> tuple[PooledEngine, ...]:
        return tuple(self._engines)

    def describe(self) -> str:
        """The line that a run prints about its engines."""
        n = len(self._engines)
        return f"{n} engine{'s' * (n > 1)} in processes of {'their' if n > 1 else 'its'} own; {self._facts.described}"

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """Sample one turn; see `core.ports.Sampler`. It is asked again where its engine dies.

        Raises:
            UnanswerableTurn: it has killed as many engines as a turn may.
            EngineError: nobody answered in time, or engines do not start any more.
        """
        self._attend()
        turn = PooledTurn(ids, sampling, place, asker())
        while True:
            engine = await self._given(turn)
            try:
                answer = await self._asked(engine, turn)
            except EngineDied as death:
                self._survive(turn, str(death))
                continue
            self._delivered(engine, turn, answer)
            return answer

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`. Every engine is asked, and they must agree.

        Raises:
            InvariantError: two engines differ by more than the tolerance.
        """
        self._attend()
        self._probe = ids  # the next weights are scored with it where they are installed
        # Engines that scored these ids when they installed the weights are not asked again. `scores` has the order of
        # the engines.
        early_scores = [engine.scored(ids) for engine in self._engines]
        coming = [
            self._of(e, "score", ids) for e, early in zip(self._engines, early_scores, strict=True) if early is None
        ]
        new_scores = iter(await asyncio.gather(*coming))
        scores = [next(new_scores) if early is None else early for early in early_scores]
        gaps = [float(np.abs(x.astype(np.float64) - scores[0]).max(initial=0.0)) for x in scores]
        at = int(np.argmax(gaps))  # argmax finds a NaN where there is one, and `max` may pass over it
        # Written as `not <=`, so that NaN is refused as well.
        if not gaps[at] <= self._tolerance:
            raise InvariantError(
                f"{self._engines[at].name} gives other log-probs than {self._engines[0].name} for the same tokens (by"
                f" {gaps[at]:.3g} nats) although both serve version {self._version}: one of them computes with stale"
                " caches or on another device. Start the run again, with placement.engines=1 if this comes back"
            )
        return scores[0]

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version` on every engine; returns their fingerprint. Turns that are asked meanwhile
        wait.

        Raises:
            InvariantError: the engines do not serve the same weights. EngineError: the version is not newer.
        """
        self._attend()
        if version <= self._version:
            raise EngineError(f"weights of version {version} after version {self._version}: versions only increase")
        # From here until `finally` no turn is given away (`_held`). Turns that run are not stopped: their engines
        # finish them, and each token carries the version that it was drawn with.
        self._loads += 1
        try:
            # The new parcel is known before any engine has it: an engine that dies now is started with it.
            before, self._parcel = self._parcel, self._sender.publish(version, tensors)
            await asyncio.gather(*(self._install(engine, self._parcel) for engine in self._engines))
            self._agree()
            # Last, when all engines have said that they serve the same.
            self._version = version
            # No engine can want the previous parcel any more: an engine that starts anew takes the newest one.
            if before is not None:
                self._sender.retire(before.version)
        finally:
            self._loads -= 1
            self._notify()
        return self._engines[0].served

    def gauges(self) -> Gauges:
        """`engine/tokens` of delivered turns. What engines did for them depends on time and is in `clock`."""
        taken = {"engine/tokens": Gauge(self._tokens, self._turns)}
        self._turns = self._tokens = 0
        return taken

    def clock(self) -> Mapping[str, float]:
        """Measurements of all engines together since the last call: seconds, counters, the share of time without a
        turn, tokens in flight, and deaths."""
        counted, self._lost, sent = measured(self._engines, self._lost), EngineReport(), self._sender.clock()
        deaths, self._deadly = self._deadly, 0
        # What sender and engines both measure, such as sync/install, is added up.
        added = {name: spent + counted[name] for name, spent in sent.items() if name in counted}
        return {**sent, **counted, **added, "engine/deaths": float(deaths)}

    def line(self) -> str:
        """Returns in a few words what all engines do now."""
        return summary(self._engines)

    def rows(self) -> list[RoleRow]:
        """Returns what each engine does now, and the turns that none of them has yet. It may be called from any
        thread."""
        return [*(e.row() for e in self._engines), unassigned(self._waits.owners(), self._engines)]

    def close(self) -> None:
        """End all engines."""
        for engine in self._engines:
            engine.host.close()
        self._sender.close()
        self._end()

    # --- turns -------------------------------------------------------------------------------------------------------

    async def _given(self, turn: PooledTurn) -> PooledEngine:
        """The engine that says the turn. It is the turn's from here on."""
        # A turn that may cause n deaths and has seen n - 1 is asked alone, so that the last death tells whether it was
        # the turn or a neighbour. With n = 1 that cannot be told.
        turn.since, turn.alone = time.monotonic(), turn.deaths >= self._deaths - 1 > 0
        while True:
            self._waits.check()
            self._revive()
            # Asked anew in each round: while this turn waited, an engine may have died, been reserved or come back.
            at = None if self._held() else choose(turn.tokens, [e.load(turn.ids) for e in self._engines])
            if at is None:
                on = "new weights on every engine" if self._loads else "an engine that can be asked"
                await self._change(turn, on)
            # No await lies between the choice of an engine and `take`, unless the turn is asked alone: then the engine
            # is reserved, and `_emptied` has looked again at what may have changed.
            elif not turn.alone or await self._emptied(turn, self._engines[at]):
                engine = self._engines[at]
                engine.take(turn)
                turn.version, turn.since, turn.during = self._version, time.monotonic(), self._loads > 0
                return engine

    def _held(self) -> bool:
        """Returns whether new turns wait, because engines may serve different versions now."""
        return self._loads > 0

    async def _emptied(self, turn: PooledTurn, engine: PooledEngine) -> bool:
        """Reserve an engine and wait until its other turns have ended. False: it died, or new weights came."""
        # Reserved first and waited for then, or new turns would keep it busy for ever.
        engine.reserved = True
        try:
            while engine.ready and not self._loads and engine.turns:
                await self._change(turn, f"the other turns of {engine.name}, to be asked alone")
                self._waits.check()
            empty = engine.ready and not self._loads
        except BaseException:
            self._free(engine)
            raise
        if not empty:
            self._free(engine)
        return empty

    async def _asked(self, engine: PooledEngine, turn: PooledTurn) -> SampledTurn:
        """The engine's answer to the turn. EngineDied where the engine dies first."""
        try:
            future = engine.host.call("generate", turn.ids, turn.sampling, turn.place)
            # The callback runs in the thread that reads answers. The event loop may take the answer up much later,
            # while the learner computes in it, and that time is not the engine's.
            future.add_done_callback(lambda _: engine.meter.end(turn))
            return await self._answer(future, turn, engine.name, turn.since)
        finally:
            engine.leave(turn)
            if turn.alone:
                self._free(engine)
            # Somebody waits until this engine has no turn.
            elif engine.reserved:
                self._notify()

    def _survive(self, turn: PooledTurn, cause: str) -> None:
        """Count the death of an engine that had the turn."""
        turn.deaths += 1
        if turn.deaths >= self._deaths and (turn.alone or self._deaths == 1):
            raise UnanswerableTurn(turn.who, turn.deaths, cause)

    def _delivered(self, engine: PooledEngine, turn: PooledTurn, said: SampledTurn) -> None:
        """Count an answer, whose tokens must be of versions that the pool served meanwhile."""
        first, last = (int(said.version.min()), int(said.version.max())) if len(said.ids) else (turn.version,) * 2
        # While new weights come, a turn may end with tokens of the version that its engine has just installed.
        newest = self._parcel.version if self._parcel is not None and self._loads else self._version
        if turn.during or not turn.version <= first <= last <= newest:
            raise InvariantError(
                f"{engine.name} sampled with weights of version {first} to {last}, and the pool served version"
                f" {turn.version} when it was asked and {self._version} when it answered ({turn}): it missed a push, or"
                " was asked while others had another version. What siblings say would be of different policies. Go on"
                " from the last checkpoint (--resume)"
            )
        engine.beginnings.add(np.concatenate([turn.ids, said.ids]))
        self._turns, self._tokens = self._turns + 1, self._tokens + len(said.ids)

    # --- engines -----------------------------------------------------------------------------------------------------

    async def _install(self, engine: PooledEngine, parcel: Parcel) -> None:
        """Make an engine serve a parcel. One that is started anew meanwhile has it already."""
        while engine.version != parcel.version:
            arguments = parcel, self._probe
            answer = await self._of(engine, "install", *arguments, unless=lambda: engine.version == parcel.version)
            if answer is not None:
                engine.serves(parcel.version, answer.served, answer.probe, answer.scores)

    async def _of(self, engine: PooledEngine, method: str, *given: Any, unless: Callable[[], bool] = bool) -> Any:
        """The answer of one engine. Where it dies, the new one in its place is asked. None where `unless` is true when
        the engine could be asked."""
        while True:
            self._revive()
            # `_restart` holds the lock, but waiting for a lock is no wait that `WaitList` knows of. So it is waited for
            # here, with an owner and a reason.
            if engine.starting is not None and not engine.starting.done():
                await self._change(f"{method} of {engine.name}", "its new process")
                self._waits.check()
                continue
            async with engine.lock:
                if unless():
                    return None
                try:
                    return await self._answer(engine.host.call(method, *given), "the run", f"{method} of {engine.name}")
                except EngineDied:
                    self._waits.check()

    def _agree(self) -> None:
        """InvariantError where the engines do not all serve the same weights."""
        if len({e.served for e in self._engines}) != 1:
            raise InvariantError(
                f"engines serve different weights: {', '.join(f'{e.name} {e.served}' for e in self._engines)}. Nothing"
                " sampled after this could be trusted: go on from the last checkpoint (--resume)"
            )

    def _revive(self) -> None:
        """Begin to replace every engine that has died."""
        for engine in self._engines:
            if engine.host.died and (engine.starting is None or engine.starting.done()):
                engine.starting = attended(self._restart(engine), self._waits.lose)

    async def _restart(self, engine: PooledEngine) -> None:
        """A new process in the place of a dead one, with the newest weights."""
        async with engine.lock:
            number = self._engines.index(engine)
            # What the dead engine had counted stays in the measurements.
            self._deadly, self._lost = self._deadly + 1, self._lost + engine.host.take_report()
            self._say(f"{engine.name} died: {engine.host.died}\nWhat it had not answered is asked again")
            host: EngineHost | None = None
            try:
                # Ends and starts of processes block, so threads do them; the loop goes on with the other engines.
                await self._waits.until(aside(engine.host.close), "the run", f"the end of {engine.name}")
                new = aside(self._new, number)
                host, started = await self._waits.until(new, "the run", f"a new {engine.name}")
                await self._answer(started, "the run", f"the start of a new {engine.name}")
                if self._parcel is not None:
                    # A new process holds no base, so a delta would be of no use to it.
                    parcel = self._sender.whole(self._parcel.version)
                    answer = await self._answer(host.call("install", parcel), "the run", f"install of {engine.name}")
                    engine.serves(parcel.version, answer.served)
                    # While new weights come, others may still serve the version before; `load` compares all of them at
                    # its end.
                    if not self._loads:
                        self._agree()
                # Only now the engine counts as ready, with a new process that has the weights.
                engine.begin(host)
            except EngineDied as error:
                # The dead new process takes the place of the dead old one, so that the next `_revive` finds a death and
                # tries again.
                engine.failed, engine.host = engine.failed + 1, host or engine.host
                if engine.failed >= self._deaths:
                    self._waits.lose(EngineError(f"{engine.name} dies whenever it is started anew: {error}"))
            finally:
                if host is not None and engine.host is not host:
                    await self._waits.until(aside(host.close), "the run", f"the end of a new {engine.name}")
        self._notify()

    def _free(self, engine: PooledEngine) -> None:
        """End the reservation of an engine."""
        engine.reserved = False
        self._notify()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Begin to watch in the loop of now. What an earlier loop left is forgotten."""
        self._waits.check()
        # A run may ask from one event loop after the other. Futures, locks and tasks of an earlier loop cannot be
        # waited for in this one, so they are made anew.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._changed, self._watching, self._loads = loop, [], None, 0
            self._waits.begin()
            for engine in self._engines:
                engine.rest()
        if self._watching is None or self._watching.done():
            self._watching = attended(self._watch(), self._waits.lose)

    async def _answer(self, future: Future[T], owner: object, on: str, since: float | None = None) -> T:
        """The result of a call to an engine. Owner and reason of the wait are recorded."""
        return await self._waits.until(asyncio.wrap_future(future), owner, on, since)

    async def _change(self, owner: object, on: str) -> None:
        """Wait until an engine, a turn or the weights have changed. Where something changes, nothing has stalled."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(waiter)
        await self._waits.until(waiter, owner, on)

    def _notify(self) -> None:
        """Wake all that wait in `_change`."""
        # All are woken, and each looks again whether its own condition holds, as with a condition variable.
        waiting, self._changed = self._changed, []
        for waiter in [w for w in waiting if not w.done()]:
            waiter.set_result(None)

    async def _watch(self) -> None:
        """While somebody waits: replace engines without a sign of life, and stop where a wait takes too long."""
        # Whoever started the watch has not registered its wait yet.
        await asyncio.sleep(0)
        while self._waits:
            for engine in self._engines:
                if (silent := engine.silent()) > SILENT * self._timeout:
                    why = f"it gave no sign of life for {silent:.0f} s and was ended (placement.timeout)"
                    await briefly(aside(engine.host.kill, why), WATCH_EVERY)
            if stalled := self._waits.look(WATCH_EVERY):
                raise EngineError(
                    f"the rollout engines have stalled: nothing may take more than {self._timeout:g} s"
                    f" (placement.timeout)\n{stalled}\n" + "\n".join(e.row().line() for e in self._engines)
                )
            await asyncio.sleep(WATCH_EVERY)
