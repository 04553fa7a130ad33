"""Checks that tokens that were said ahead of the updates have the log-probs of the weights that said them.

A sample is learned from when its weights are gone. But there is a moment at which both sides still hold them: between
a push and the next optimizer step. What has been said since the push, in groups of this step or of later ones that wait
in the queue, is compared with the learner then. `AheadCheck` sees that it does not change until it is learned from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from posttrain.checks.sampling.sampler_checks import keeps_caches, said_by_these_weights, sampler_agrees
from posttrain.checks.sampling.sampler_draws import PACKED, PROBED, Bets, draws_are_true, looked_at
from posttrain.core import seeds
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.streams import START
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.role.episode_conversation import shorter
from posttrain.role.events import DifferentiatedEvent, Event, Observer, ObserverReport, PackedEvent, PlayedEvent
from posttrain.role.group_queue import GroupQueue
from posttrain.role.learner_passes import Needs
from posttrain.role.learning.logprob_tolerance import Exact, Gap, allowed, as_sampled
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError


def fresh_segments(groups: Sequence[Group], version: int, stale: bool = False) -> list[Segment]:
    """Segments with tokens of `version`, the learner's present one, as many as a check reads. Segments that other
    weights began come first: their caches are most at risk. With `stale`, where caches are kept on purpose
    (engine.update=stale), they are left out."""
    mixed, pure = list[Segment](), list[Segment]()
    for s in (s for g in groups for e in g.episodes if e.own for s in e.segments):
        versions = s.version[s.mask]
        if (versions == version).any():
            (pure if (versions == version).all() else mixed).append(s)
    out, tokens, packed = list[Segment](), 0, 0
    # Until there are enough tokens. At least one segment is taken, however long.
    for s in (*(() if stale else mixed), *pure):
        if tokens >= PROBED or (out and packed + len(s.ids) > PACKED):
            break
        out.append(s)
        tokens, packed = tokens + int((s.version[s.mask] == version).sum()), packed + len(s.ids)
    return out


def start_is_the_learner(batch: Batch, learner_M: np.ndarray, dtype: str, exact: Exact) -> None:
    """The stream `START`, which a proximal ratio divides by, has the learner's own log-probs.

    It is called before the step's first optimizer step.
    """
    gap = Gap.of(batch[START], learner_M)
    bound = allowed(dtype, gap, learner_M, exact, batch.sampling.temperature)
    if not gap.within(bound):
        raise InvariantError(
            f"the log-probs of the start of the step are not the learner's: worst gap {gap.worst:.3g} (bound"
            f" {bound.worst:.2g} in {dtype}), mean gap {gap.mean:.3g} (bound {bound.mean:.2g}) over {len(learner_M)}"
            " tokens, before the first optimizer step. The proximal ratio must be 1 there: were they computed with"
            " other weights, in an earlier step, or taken from the sampler?"
        )


class FreshCheck(Observer):
    """Tokens of groups asked ahead agree with the learner while it still has the weights that said them; draws too.

    In the first 16 steps and in every eighth later one, and wherever a turn went on under new weights.
    """

    def __init__(self, bets: Bets) -> None:
        self._bets = bets

    def needs(self, roles: ReinforceRoles, event: PackedEvent) -> Needs:
        return Needs(logp=event.first and START in event.batch)

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e) if roles.stage.most_behind:
                return self._agree(roles, e)
            case DifferentiatedEvent(packed, passes) if packed.first and START in packed.batch:
                # The first minibatch of a step: no update has moved the learner yet.
                for micro, logp_M in zip(passes.micros, passes.logp, strict=True):
                    exact = lambda batch=micro: roles.learner.exact(batch)  # noqa: E731
                    start_is_the_learner(micro, logp_M.astype(np.float32), roles.run.model.dtype, exact)
        return None

    def _agree(self, roles: ReinforceRoles, e: Experience) -> ObserverReport | None:
        """Compare what the learner's present weights have said, in this step's groups and in those that wait."""
        # Groups that have ended and wait: what they say is learned from later, when this learner is gone.
        waiting = roles.groups.queued()[1] if isinstance(roles.groups, GroupQueue) else ()
        groups, version = (*e.played, *waiting), roles.trainer.version
        segments = fresh_segments(groups, version, keeps_caches(roles.run.engine))
        # Caches of other weights are a risk of their own, looked at in every step. Such a segment would be the first.
        if not segments or not (looked_at(e.index) or (segments[0].version[segments[0].mask] != version).any()):
            return None
        # In the mixed segments only the tokens of this version can be compared.
        fresh = np.concatenate([s.version[s.mask] for s in segments]) == version
        gauges = _compare_segments(roles, segments, fresh)
        # Draws are tested on whole episodes of this version, whose places are known from the start.
        own_episodes = [x for g in groups for x in g.episodes if x.own]
        whole_episodes = [x for x in own_episodes if all((s.version[s.mask] == version).all() for s in x.segments)]
        if whole_episodes and roles.sync.sampler.draws_by_place:
            # Draws are repeated and never bet on here: which answers have ended already depends on their lengths.
            gauges = merge(gauges, draws_are_true(roles, self._bets, whole_episodes, 0, roles.stream))
        if roles.run.deterministic and roles.stage.staleness:
            return None  # which groups have ended depends on time, and a gauge of it would differ between equal runs
        return ObserverReport(merge(gauges, {"canary/fresh": Gauge(float(fresh.sum()), 1)}))


def _compare_segments(roles: ReinforceRoles, segments: Sequence[Segment], fresh_M: np.ndarray) -> Gauges:
    """Compare the sampler's log-probs of these segments with the learner's, at the spoken tokens that are `fresh_M`."""
    packed, learner, dtype = Packed.of(segments), as_sampled(roles.learner), roles.run.model.dtype
    mu_M, learner_M = np.concatenate([s.logp[s.mask] for s in segments]), learner.score(packed)
    exact, same = lambda: learner.exact(packed), roles.run.exact
    return sampler_agrees(packed, mu_M, learner_M, fresh_M, dtype=dtype, exact=exact, text=roles.text, same=same)


TURNS = 4
"""Turns that are sampled after a push, each of them after a different prompt of the last step."""
TOKENS = 16
"""Most tokens of one of them."""
PATIENCE = 8
"""After this many steps whose turns did not end in time, the learner waits for them."""
PROBE = Task("probe of the checks", "")


class ProbeCheck(Observer):
    """Samples a few turns after each push, and compares them with the learner before its weights change again.

    The learner does not wait for them, so where the engine is busy a step may pass without. With `deterministic=true`
    it waits, because what a run computes may not depend on time.
    """

    def __init__(self, bets: Bets) -> None:
        self._bets = bets
        self._prompts: list[np.ndarray] = []
        self._saying: asyncio.Task[list[Group]] | None = None
        self._version = 0
        """Version of the weights that both sides had when the turns were asked."""
        self._missed = 0
        """Steps whose turns did not end in time, since the last comparison."""

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or not roles.stage.most_behind:
            return None
        segments = [e.segments[0] for g in event.experience.played for e in g.episodes[:1] if e.own]
        # The text up to the first spoken token is a prompt that the sampler can be given again.
        self._prompts = [s.ids[: int(np.argmax(s.mask))] for s in segments if s.mask.any()][:TURNS]
        if self._saying is None:
            return None
        if roles.trainer.version != self._version:  # with sync_every the learner may be ahead of the last push
            self._saying.cancel()
            self._saying = None
            return None
        if not self._saying.done():
            # The engine was busy. They may go on: the weights are still those of the push.
            self._missed += 1
            return ObserverReport({"canary/probed": Gauge(0, 1)})
        return self._compare(roles, self._saying)

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        # Without a push both sides hold different weights. After the last step there is no later one to compare in.
        if not self._prompts or roles.sync.sampler.version != roles.trainer.version or step.index == roles.stage.steps:
            return None
        await self._stop()
        self._version = roles.trainer.version
        self._saying = asyncio.ensure_future(self._say(roles, step.index))
        # Wait where time must not matter, or where so many probes were missed that the check would say nothing.
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
        """Sample the turns of the probe, each as a group of one episode."""
        sampler, stream = roles.sync.sampler, _stream(roles)

        async def turn(i: int, prompt: np.ndarray) -> Group:
            transcript = Transcript(roles.sampling)
            transcript.see(prompt)
            # A place of their own: task, step and turn, which no rollout has.
            place = seeds.key(roles.run.seed, stream, PROBE.id, index, i, 0)
            sampled = await sampler.generate(prompt, shorter(roles.sampling, TOKENS), place)
            transcript.say(sampled)
            episode = Episode(PROBE, index, i, (transcript.segment(),), Stop.LENGTH, (), turns=(len(sampled.ids),))
            return Group(PROBE, index, (episode,))

        return list(await asyncio.gather(*(turn(i, p) for i, p in enumerate(self._prompts))))

    def _compare(self, roles: ReinforceRoles, turns: asyncio.Task[list[Group]]) -> ObserverReport:
        """Compare turns that have ended with the learner, test their draws, and forget them."""
        # Forgotten first: a task that is compared is not compared again.
        self._saying, self._missed = None, 0
        with roles.clock.of("check"):
            groups = turns.result()
            said_by_these_weights(groups, (roles.trainer.version,))
            episodes = [e for g in groups for e in g.episodes]
            segments = [s for e in episodes for s in e.segments]
            gauges = _compare_segments(roles, segments, np.ones(sum(s.spoken for s in segments), bool))
            draws = draws_are_true(roles, self._bets, episodes, 0, _stream(roles))
            return ObserverReport(merge(gauges, draws, {"canary/probed": Gauge(1, 1)}))


def _stream(roles: ReinforceRoles) -> str:
    """The stream of the random numbers of these turns, which no rollout uses."""
    return f"probe/{roles.stage.name}"
