"""Checks that sampler and learner agree when they hold the same weights, where samples are older than the learner.

There the tokens of a step were said by other weights than those that learn from them, so their ratios and draws say
nothing about the engine. After each push some short turns are sampled for this check alone, under the weights that both
sides hold then. They belong to no step and are not learned from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from posttrain.checks.sampling.sampler_checks import said_by_these_weights, sampler_agrees
from posttrain.checks.sampling.sampler_draws import Bets, draws_are_true
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.gauge import Gauge, Step, merge
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, Stop, Task
from posttrain.role.episode_conversation import shorter
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent
from posttrain.role.learning.logprob_tolerance import as_sampled
from posttrain.role.roles import ReinforceRoles

TURNS = 4
"""Turns that are sampled after a push, each after another prompt of the last step."""
TOKENS = 16
"""Most tokens of one of them."""
PATIENCE = 8
"""After so many steps whose turns did not end in time, the learner waits for them."""
PROBE = Task("probe of the checks", "")


class ProbeCheck(Observer):
    """Samples a few turns after each push, and compares them with the learner before its weights change again. The
    learner does not wait for them, so where the engine is busy a step may pass without. With `deterministic=true` it
    waits, because what a run computes may not depend on time."""

    def __init__(self, bets: Bets) -> None:
        self._bets = bets
        self._prompts: list[np.ndarray] = []
        self._saying: asyncio.Task[list[Group]] | None = None
        self._version = 0
        """Version of the weights that both sides had when the turns were asked."""
        self._missed = 0

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or not roles.stage.most_behind:
            return None
        segments = [e.segments[0] for g in event.experience.played for e in g.episodes[:1] if e.own]
        self._prompts = [s.ids[: int(np.argmax(s.mask))] for s in segments if s.mask.any()][:TURNS]
        if self._saying is None:
            return None
        if roles.trainer.version != self._version:  # with sync_every the learner may be ahead of the last push
            self._saying.cancel()
            self._saying = None
            return None
        if not self._saying.done():
            self._missed += 1
            return ObserverReport({"canary/probed": Gauge(0, 1)})
        return self._compare(roles, self._saying)

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        if not self._prompts or roles.sync.sampler.version != roles.trainer.version or step.index == roles.stage.steps:
            return None
        await self._stop()
        self._version = roles.trainer.version
        self._saying = asyncio.ensure_future(self._say(roles, step.index))
        if not roles.run.deterministic and self._missed < PATIENCE:
            return None
        await asyncio.wait([self._saying])
        return self._compare(roles, self._saying)

    def end(self) -> None:
        if self._saying is not None:
            self._saying.cancel()

    async def _stop(self) -> None:
        """Give up the turns of an earlier push, which has other weights."""
        if self._saying is not None:
            self._saying.cancel()
            await asyncio.gather(self._saying, return_exceptions=True)

    async def _say(self, roles: ReinforceRoles, index: int) -> list[Group]:
        sampler, stream = roles.sync.sampler, _stream(roles)

        async def turn(i: int, prompt: np.ndarray) -> Group:
            transcript = Transcript(roles.sampling)
            transcript.see(prompt)
            place = seeds.key(roles.run.seed, stream, PROBE.id, index, i, 0)
            said = await sampler.generate(prompt, shorter(roles.sampling, TOKENS), place)
            transcript.say(said)
            episode = Episode(PROBE, index, i, (transcript.segment(),), Stop.LENGTH, (), turns=(len(said.ids),))
            return Group(PROBE, index, (episode,))

        return list(await asyncio.gather(*(turn(i, p) for i, p in enumerate(self._prompts))))

    def _compare(self, roles: ReinforceRoles, said: asyncio.Task[list[Group]]) -> ObserverReport:
        self._saying, self._missed = None, 0
        with roles.clock.of("check"):
            return self._agree(roles, said.result())

    def _agree(self, roles: ReinforceRoles, groups: Sequence[Group]) -> ObserverReport:
        said_by_these_weights(groups, (roles.trainer.version,))
        episodes = [e for g in groups for e in g.episodes]
        packed = Packed.of([s for e in episodes for s in e.segments])
        mu = np.concatenate([s.logp[s.mask] for e in episodes for s in e.segments])
        learner = as_sampled(roles.learner)
        seen = sampler_agrees(
            packed,
            mu,
            learner.score(packed),
            np.ones(len(mu), bool),
            dtype=roles.run.model.dtype,
            exact=lambda: learner.exact(packed),
            text=roles.text,
            same=roles.run.exact,
        )
        draws = draws_are_true(roles, self._bets, episodes, 0, _stream(roles))
        return ObserverReport(merge(seen, draws, {"canary/probed": Gauge(1, 1)}))


def _stream(roles: ReinforceRoles) -> str:
    """The stream of the random numbers of these turns, which no rollout uses."""
    return f"probe/{roles.stage.name}"
