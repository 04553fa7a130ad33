"""`core.ports.Sampler` over several engines in processes of their own. Any of them may die at any time.

An answer is a function of its question, the weights and its place (law 8), so a turn whose engine died is asked again
from another one, and a synchronous run ends as if nobody had died. All engines serve one version: while new weights
come, no new turn is given away. A turn may cause a limited number of deaths. With one death left, it is asked alone, of
an engine that says no other turn. If that engine dies too, the turn is guilty: it raises `UnanswerableTurn`, which
fails its episode only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from posttrain.core.exchange.request_owner import UnanswerableTurn, asker
from posttrain.core.exchange.role_status import RoleRow
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.sampling import Sampling
from posttrain.core.types import SampledTurn
from posttrain.engine.pool.parent_side import EngineDied, EngineHost, NewHost, all_started
from posttrain.engine.pool.pool_turns import PooledEngine, PooledTurn
from posttrain.engine.pool.supervised_processes import SupervisedProcesses
from posttrain.engine.pool.turn_router import choose
from posttrain.engine.transfer.parcel import Parcel, WeightSender
from posttrain.system.errors import EngineError, InvariantError


class EnginePool(SupervisedProcesses[PooledEngine]):
    """Samples from `count` engines. See `all_started` for what is raised where one does not start.

    Args:
        sender: publishes the weights of `load`, which the engines read by themselves.
        timeout: seconds that a turn, an update or a start may take.
        deaths: engines that one turn may kill.
        tolerance: nats by which two engines may differ in the log-prob of one token; 0: not at all.
        end: ends what the engines share, such as a connection to a Ray cluster; called after they have been closed.
    """

    def __init__(
        self,
        new: NewHost,
        sender: WeightSender,
        *,
        count: int,
        timeout: float,
        deaths: int,
        tolerance: float = 0.0,
        say: Callable[[str], None] = lambda line: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        hosts, (self._facts, *_) = all_started("engine", new, count, timeout)
        self.version = self._facts.version
        engines = [PooledEngine(f"engine {i}", host, self.version) for i, host in enumerate(hosts)]
        words = "the rollout engines", "What it had not answered is asked again"
        super().__init__(engines, new, words, timeout=timeout, starts=deaths, say=say)
        self._sender, self._deaths, self._tolerance, self._end = sender, deaths, tolerance, end
        self.keeps_sets, self.draws_by_place = self._facts.keeps_sets, self._facts.draws_by_place
        self.context = self._facts.context
        self._parcel: Parcel | None = None
        """The newest weights that were published: a new engine starts with them. None before the first `load`."""
        self._probe: np.ndarray | None = None
        self._loads = self._turns = self._tokens = 0  # loads that run now; turns delivered, and their tokens

    @property
    def engines(self) -> tuple[PooledEngine, ...]:
        return tuple(self.processes)

    def describe(self) -> str:
        """The line that a run prints about its engines."""
        n = len(self.processes)
        return f"{n} engine{'s' * (n > 1)} in processes of {'their' if n > 1 else 'its'} own; {self._facts.described}"

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """Sample one turn; see `core.ports.Sampler`. It is asked again where its engine dies. UnanswerableTurn where it
        has killed as many engines as a turn may; EngineError where nobody answers in time or engines do not start."""
        self._attend()
        turn = PooledTurn(ids, sampling, place, asker())
        while True:
            engine = await self._engine_for(turn)
            try:
                answer = await self._ask(engine, turn)
            except EngineDied as death:
                self._survive(turn, str(death))
                continue
            self._count_answer(engine, turn, answer)
            return answer

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: see `core.ports.Sampler`. InvariantError where engines differ by more than the tolerance."""
        self._attend()
        self._probe = ids  # the next weights are scored with it where they are installed

        async def scored(engine: PooledEngine) -> np.ndarray:
            # An engine that scored these ids when it installed the weights is not asked again.
            early = engine.scored(ids)
            return await self._call(engine, "score", ids) if early is None else early

        scores = await asyncio.gather(*map(scored, self.processes))
        gaps = [float(np.abs(x.astype(np.float64) - scores[0]).max(initial=0.0)) for x in scores]
        at = int(np.argmax(gaps))  # argmax finds a NaN where there is one, and `max` may pass over it
        # Written as `not <=`, so that NaN is refused as well.
        if not gaps[at] <= self._tolerance:
            raise InvariantError(
                f"{self.processes[at].name} gives other log-probs than {self.processes[0].name} for the same tokens"
                f" (by {gaps[at]:.3g} nats) although both serve version {self.version}: one of them computes with"
                " stale caches or on another device. Start the run again, with placement.engines=1 if this comes back"
            )
        return scores[0]

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Serve these weights as `version` on every engine; returns their fingerprint. Turns that are asked meanwhile
        wait. InvariantError where the engines do not serve the same, EngineError where the version is not newer."""
        self._attend()
        if version <= self.version:
            raise EngineError(f"weights of version {version} after version {self.version}: versions only increase")
        # No turn is given away until `finally` (`_held`). Turns that run are finished, and each token has its version.
        self._loads += 1
        try:
            # The new parcel is known before any engine has it: an engine that dies now is started with it.
            before, self._parcel = self._parcel, self._sender.publish(version, tensors)
            await asyncio.gather(*(self._install(engine, self._parcel) for engine in self.processes))
            self._check_agree()
            # Last, when all serve the same. No engine can want the previous parcel: a new one takes the newest.
            self.version = version
            if before is not None:
                self._sender.retire(before.version)
        finally:
            self._loads -= 1
            self._waits.notify()
        return self.processes[0].served

    def gauges(self) -> Gauges:
        """`engine/tokens` of delivered turns. What engines did for them depends on time and is in `clock`."""
        taken = {"engine/tokens": Gauge(self._tokens, self._turns)}
        self._turns = self._tokens = 0
        return taken

    def clock(self) -> Mapping[str, float]:
        """Measurements of all engines together since the last call: seconds, counters, the share of time without a
        turn, tokens in flight, and deaths."""
        report = self._take_report()
        busy = [e.meter.take() for e in self.processes]
        # The pool itself counts the tokens of delivered turns: the engines also count turns that are asked twice.
        counted = {n: g.mean for n, g in report.gauges.items() if g.count and n != "engine/tokens"}
        if "engine/steps" in counted:  # each counts once, so their mean says nothing
            counted["engine/steps"] = report.gauges["engine/steps"].sum
        counted = {**report.seconds, **counted}
        counted["engine/idle"] = sum(b.idle_share for b in busy) / len(busy)
        counted["engine/in_flight"] = sum(b.in_flight for b in busy)
        # What sender and engines both measure, such as sync/install, is added up.
        sent = self._sender.clock()
        added = {name: spent + counted[name] for name, spent in sent.items() if name in counted}
        return {**sent, **counted, **added, "engine/deaths": self._take_deaths()}

    def line(self) -> str:
        """Returns in a few words what all engines do now."""
        ready = sum(e.ready for e in self.processes)
        turns = sum(len(e.held) for e in self.processes)
        tokens = sum(e.busy for e in self.processes)
        restarts = sum(e.restarts for e in self.processes)
        line = f"{ready} of {len(self.processes)} engines ready, {turns} turns and {tokens} tokens in flight"
        return f"{line}, {restarts} restarts" if restarts else line

    def rows(self) -> list[RoleRow]:
        """Returns what each engine does now, and the turns that none of them has yet. Any thread may call it."""
        taken = {t for e in self.processes for t in list(e.held)}
        turns = [o for o in self._waits.owners() if isinstance(o, PooledTurn) and o not in taken]
        router = RoleRow(
            name="router",
            doing="holds turns back" if turns else "ready",
            depth=f"{len(turns)} turns",
            tokens=sum(t.tokens for t in turns),
            age=time.monotonic() - min(t.since for t in turns) if turns else None,
        )
        return [*super().rows(), router]

    def close(self) -> None:
        super().close()
        self._sender.close()
        self._end()

    async def _engine_for(self, turn: PooledTurn) -> PooledEngine:
        """The engine that says the turn. It is the turn's from here on."""
        # With one death left a turn is asked alone, so that the last death tells whether it was the turn or a
        # neighbour. Where one death is all it may cause, that cannot be told.
        turn.since, turn.alone = time.monotonic(), turn.deaths >= self._deaths - 1 > 0
        while True:
            self._waits.check()
            self._revive()
            # Anew in each round: while this turn waited, an engine may have died, been reserved or come back.
            at = None if self._held() else choose(turn.tokens, [e.load(turn.ids) for e in self.processes])
            if at is None:
                on = "new weights on every engine" if self._loads else "an engine that can be asked"
                await self._waits.change(turn, on)
            # No await lies between the choice of an engine and `take`, except in `_reserve`, which looks again.
            elif not turn.alone or await self._reserve(turn, self.processes[at]):
                engine = self.processes[at]
                engine.take(turn)
                turn.version, turn.since, turn.during = self.version, time.monotonic(), self._loads > 0
                return engine

    def _held(self) -> bool:
        """Returns whether new turns wait, because engines may serve different versions now."""
        return self._loads > 0

    async def _reserve(self, turn: PooledTurn, engine: PooledEngine) -> bool:
        """Reserve an engine and wait until its other turns have ended. False: it died, or new weights came."""
        # Reserved first and waited for then, or new turns would keep it busy for ever.
        engine.reserved = True
        empty = False
        try:
            while engine.ready and not self._loads and engine.held:
                await self._waits.change(turn, f"the other turns of {engine.name}, to be asked alone")
                self._waits.check()
            empty = engine.ready and not self._loads
        finally:
            if not empty:
                self._end_reservation(engine)
        return empty

    async def _ask(self, engine: PooledEngine, turn: PooledTurn) -> SampledTurn:
        """The engine's answer to the turn. EngineDied where the engine dies first."""
        try:
            future = engine.host.call("generate", turn.ids, turn.sampling, turn.place)
            # In the thread that reads answers: the loop, in which the learner computes, may take it up much later.
            future.add_done_callback(lambda _: engine.meter.end(turn))
            return await self._waits.until(future, turn, engine.name, turn.since)
        finally:
            engine.leave(turn)
            if turn.alone:
                self._end_reservation(engine)
            elif engine.reserved:  # somebody waits until this engine has no turn
                self._waits.notify()

    def _survive(self, turn: PooledTurn, cause: str) -> None:
        """Count the death of an engine that had the turn."""
        turn.deaths += 1
        if turn.deaths >= self._deaths and (turn.alone or self._deaths == 1):
            raise UnanswerableTurn(turn.who, turn.deaths, cause)

    def _count_answer(self, engine: PooledEngine, turn: PooledTurn, said: SampledTurn) -> None:
        """Count an answer, whose tokens must be of versions that the pool served meanwhile."""
        first, last = (int(said.version.min()), int(said.version.max())) if len(said.ids) else (turn.version,) * 2
        # While new weights come, a turn may end with tokens of the version that its engine has just installed.
        newest = self._parcel.version if self._parcel is not None and self._loads else self.version
        if turn.during or not turn.version <= first <= last <= newest:
            raise InvariantError(
                f"{engine.name} sampled with weights of version {first} to {last}, and the pool served version"
                f" {turn.version} when it was asked and {self.version} when it answered ({turn}): it missed a push, or"
                " was asked while others had another version. What siblings say would be of different policies. Go on"
                " from the last checkpoint (--resume)"
            )
        engine.beginnings.add(np.concatenate([turn.ids, said.ids]))
        self._turns, self._tokens = self._turns + 1, self._tokens + len(said.ids)

    async def _install(self, engine: PooledEngine, parcel: Parcel) -> None:
        """Make an engine serve a parcel. One that is started anew meanwhile has it already."""
        while engine.version != parcel.version:
            probe = self._probe
            answer = await self._call(engine, "install", parcel, probe, unless=lambda: engine.version == parcel.version)
            if answer is not None:
                served, scores = answer
                engine.serves(parcel.version, served, probe, scores)

    async def _call(self, engine: PooledEngine, method: str, *arguments: Any, unless: Callable[[], bool] = bool) -> Any:
        """The answer of one engine. Where it dies, the new one in its place is asked. None where `unless` is true when
        the engine could be asked; its default, `bool`, gives False."""
        while True:
            self._revive()
            # `_restart` holds the lock, and `WaitList` knows of no waits for locks: this one has an owner and a reason.
            if engine.replacing:
                await self._waits.change(f"{method} of {engine.name}", "its new process")
                self._waits.check()
                continue
            async with engine.lock:
                if unless():
                    return None
                try:
                    coming = engine.host.call(method, *arguments)
                    return await self._waits.until(coming, "the run", f"{method} of {engine.name}")
                except EngineDied:
                    self._waits.check()

    def _check_agree(self) -> None:
        if len({e.served for e in self.processes}) != 1:
            served = ", ".join(f"{e.name} {e.served}" for e in self.processes)
            raise InvariantError(
                f"engines serve different weights: {served}. Nothing sampled after this could be trusted: go on from"
                " the last checkpoint (--resume)"
            )

    async def _restart(self, number: int, process: PooledEngine) -> None:
        # A `_call` that holds the lock gets EngineDied at once, gives the lock up, and waits for the new process.
        async with process.lock:
            await super()._restart(number, process)

    async def _prepare(self, process: PooledEngine, host: EngineHost) -> None:
        if self._parcel is None:  # no push yet: the new process began with the weights that all others began with
            return
        # A new process holds no base, so a delta would be of no use to it.
        parcel = self._sender.whole(self._parcel.version)
        served, _ = await self._waits.until(host.call("install", parcel), "the run", f"install of {process.name}")
        process.serves(parcel.version, served)
        # While new weights come, others may still serve the version before; `load` compares all of them at its end.
        if not self._loads:
            self._check_agree()

    def _end_reservation(self, engine: PooledEngine) -> None:
        engine.reserved = False
        self._waits.notify()

    def _forget_loop(self) -> None:
        super()._forget_loop()
        self._loads = 0
