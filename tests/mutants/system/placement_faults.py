"""Faults between the learner and engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from posttrain.faults.planting import fault

Real = Callable[..., Any]
POOL = "posttrain.engine.pool.engine_pool:EnginePool"
EPISODE = "posttrain.engine.pool.environment_pool:PlayedElsewhere"


@fault(
    "dead_engine_counted_twice",
    seam=f"{POOL}._survive",
    what="turns whose engine died count as said, and count again when another engine has said them",
    harm="tokens and turns of the record are more than what was learned from, so every rate is off",
    source="pain 8",
    needs="pool",
)
def _(real: Real) -> Real:
    def survive(self: Any, turn: Any, cause: str) -> None:
        real(self, turn, cause)
        self._turns, self._tokens = self._turns + 1, self._tokens + turn.sampling.max_tokens

    return survive


@fault(
    "engine_left_on_old_version",
    seam=f"{POOL}._install",
    what="one of several engines does not get the new weights, and is booked as if it had",
    harm="a part of the samples is of an older policy and says that it is new",
    source="pain 4",
    needs="pool",
)
def _(real: Real) -> Real:
    async def install(self: Any, engine: Any, parcel: Any) -> None:
        first = self.engines[0]
        if engine is first:
            return await real(self, engine, parcel)
        while first.version != parcel.version:
            await asyncio.sleep(0.001)
        return engine.serves(parcel.version, first.served)

    return install


@fault(
    "push_timeout_swallowed",
    seam=f"{POOL}._install",
    what="an engine that does not confirm new weights in time counts as if it had",
    harm="the run goes on with samples of the weights before, which only the record calls new",
    source="pain 7",
    needs="pool",
)
def _(real: Real) -> Real:
    async def install(self: Any, engine: Any, parcel: Any) -> None:
        try:
            async with asyncio.timeout(0):
                await real(self, engine, parcel)
        except TimeoutError:
            engine.serves(parcel.version, engine.served)

    return install


@fault(
    "router_mixes_versions",
    seam=f"{POOL}._held",
    what="turns are given away while new weights come, to engines that have them and to engines that do not",
    harm="siblings of one group are said by different policies, and later turns by older ones than earlier turns",
    source="pain 4",
    shows=("rl.staleness=2",),
    needs="pool",
)
def _(real: Real) -> Real:
    return lambda self: False


@fault(
    "dead_environment_played_twice",
    seam=f"{EPISODE}.does",
    what="an episode whose process died is played again into the conversation that it had, from its first word",
    harm="its turns are sampled and learned from twice, and what is judged is not what its environment heard",
    source="pain 8",
    needs="worlds",
)
def _(real: Real) -> Real:
    return lambda self, move, told: real(self, move, len(self.done))


@fault(
    "answer_of_another_visit",
    seam="posttrain.engine.pool.remote_environment:HostedEnvironments.said",
    what="an environment in another process hears what was said in another episode, such as another visit of its task",
    harm="tools answer what the policy did not ask, and nothing in the record shows it",
    source="pain 8",
    needs="worlds",
)
def _(real: Real) -> Real:
    async def said(self: Any, number: int, turn: int, said: Any) -> None:
        first = vars(self).setdefault("_heard_first", {}).setdefault(turn, said)
        await real(self, number, turn, first)

    return said


@fault(
    "played_again_unseen",
    seam=f"{EPISODE}.does",
    what="what an environment does when it is played again is not compared with what it did before its process died",
    harm="the policy learns from answers to words that it never saw, of a world that is in another state",
    source="pain 8",
    needs="fickle",
)
def _(real: Real) -> Real:
    return lambda self, move, told: real(self, move, told) if told >= len(self.done) else None
