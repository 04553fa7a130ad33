"""Faults between asking and learning, where samples may be older than the weights that learn from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.types import Group
from posttrain.faults.planting import fault
from posttrain.faults.system_faults import restamped

Real = Callable[..., Any]
PROXIMAL = ("rl.algorithm=decoupled_ppo", "rl.minibatches=2")
"""Overrides of a run whose loss reads the log-probs of the start of a step."""


@fault(
    "age_not_counted",
    seam="posttrain.core.exchange.experience:Experience.behind",
    what="every sample counts as new, however old it is",
    harm="the record shows no staleness, and nobody knows why learning breaks",
    source="AReaL's staleness in the queue alone",
    needs="ahead",
)
def _(real: Real) -> Real:
    return lambda self, version: np.zeros(len(version), np.int64)


@fault(
    "bound_of_waiting_groups_alone",
    seam="posttrain.role.group_queue:capacity",
    what="groups that the present step has taken do not count when more are asked",
    harm="samples become older than staleness allows, by more the faster the engine is",
    source="AReaL: admission counts accepted, running and consumed samples",
    needs="ahead",
)
def _(real: Real) -> Real:
    return lambda *, taken, left, **more: real(taken=0, left=left + 1, **more)


@fault(
    "relabelled_a_little_fresher",
    seam="posttrain.role.group_queue:GroupQueue.take",
    what="groups get a version that is one step newer than the weights that said them, when they are taken",
    harm="every age is one too small, and every correction that reads it",
    source="a version read after the push instead of before it",
    needs="ahead",
)
def _(real: Real) -> Real:
    async def take(self: Any, index: int, request: Any, version: int, seen: Any) -> Any:
        taken = await real(self, index, request, version, seen)
        now = [restamped(g, lambda old: np.minimum(old + 1, version)) for g in taken.played]
        return replace(taken, played=tuple(now))

    return take


@fault(
    "proximal_of_older_weights",
    seam="posttrain.stages.training_step:score",
    what="the log-probs of the start of a step are computed with the weights of the step before",
    harm="the trust region is drawn around a policy that is gone",
    source="decoupled PPO (2110.00641): the proximal policy is the newest one",
    shows=PROXIMAL,
    needs="ahead",
)
def _(real: Real) -> Real:
    from posttrain.role.weights.saved_weights import restore, snapshot

    before: list[Any] = []

    def score(groups: Any, a: Any, learner: Any, *args: Any, **kwargs: Any) -> Any:
        now = snapshot(learner)
        restore(learner, before[-1] if before else now)
        before[:] = [now]
        try:
            return real(groups, a, learner, *args, **kwargs)
        finally:
            restore(learner, now)

    return score


@fault(
    "proximal_of_the_sampler",
    seam="posttrain.stages.training_step:score",
    what="the sampler's log-probs stand for those of the start of a step",
    harm="the decoupled loss is the coupled one: old samples are clipped for being old",
    source="decoupled PPO (2110.00641)",
    shows=PROXIMAL,
    needs="ahead",
)
def _(real: Real) -> Real:
    from posttrain.core.streams import START

    def score(*args: Any, **kwargs: Any) -> Any:
        def said(s: Any) -> Any:
            return s.having({START: tuple(x.logp[x.mask] for x in s.episode.segments)})

        return tuple(replace(g, episodes=tuple(map(said, g.episodes))) for g in real(*args, **kwargs))

    return score


@fault(
    "queue_drops_the_oldest",
    seam="posttrain.role.group_queue:GroupQueue.take",
    what="the queue makes room by dropping the group that waited longest",
    harm="what takes long, such as long answers and slow tools, is asked and never learned from",
    source="pain 25: bounded queues that drop",
    needs="ahead",
)
def _(real: Real) -> Real:
    async def take(self: Any, index: int, *args: Any) -> Any:
        if len(self._waiting) >= self.staleness * self.request.groups:
            self._waiting.popleft()
        return await real(self, index, *args)

    return take


@fault(
    "fastest_first",
    seam="posttrain.role.group_queue:GroupQueue.take",
    what="groups with short answers, which end first, are taken before those that were asked earlier",
    harm="short answers are learned from first, and long ones when they are oldest",
    source="PipelineRL and AReaL: a batch of what is ready prefers short answers",
    needs="ahead",
)
def _(real: Real) -> Real:
    async def take(self: Any, *args: Any) -> Any:
        waiting = sorted(self._waiting, key=lambda a: (a.ended is None, a.said.sum))
        self._waiting.clear()
        self._waiting.extend(waiting)
        return await real(self, *args)

    return take


@fault(
    "group_learned_twice",
    seam="posttrain.role.group_queue:GroupQueue.take",
    what="the last group of a step is read and left in the queue, so that the next step takes it too",
    harm="some samples count twice, and never the same share of them",
    source="pain 8: at-least-once queues",
    needs="ahead",
)
def _(real: Real) -> Real:
    async def take(self: Any, *args: Any) -> Any:
        head = [*self._waiting][: self.request.groups]
        taken = await real(self, *args)
        if len(head) == self.request.groups:
            self._waiting.appendleft(head[-1])
        return taken

    return take


@fault(
    "queue_without_versions",
    seam="posttrain.stages.reinforce.reinforce_stage:load_groups",
    what="groups of the queue come back from a checkpoint with the newest version among them",
    harm="a resumed run takes old samples for new ones",
    source="a buffer that stores tokens and rewards, and no versions",
    needs="ahead_resume",
)
def _(real: Real) -> Real:
    def load_groups(*args: Any, **kwargs: Any) -> list[Group]:
        groups: Sequence[Group] = real(*args, **kwargs)
        newest = max((int(s.version.max()) for g in groups for e in g.episodes for s in e.segments), default=0)
        return [restamped(g, lambda old: np.full_like(old, newest)) for g in groups]

    return load_groups


@fault(
    "buffer_without_versions",
    seam="posttrain.role.learning.replay_buffer:ReplayBuffer.draw",
    what="groups of the replay buffer come back as if the newest weights among them had said all of them",
    harm="old samples pass for newer ones, and no correction sees how old they are",
    source="a buffer that stores tokens and rewards, and no versions",
    shows=("rl.replay.size=32", "rl.replay.groups=2"),
    needs="ahead",
)
def _(real: Real) -> Real:
    def draw(self: Any, *args: Any) -> tuple[Group, ...]:
        groups: Sequence[Group] = real(self, *args)
        newest = max((int(s.version.max()) for g in groups for e in g.episodes for s in e.segments), default=0)
        return tuple(restamped(g, lambda old: np.full_like(old, newest)) for g in groups)

    return draw


@fault(
    "pushed_inside_a_step",
    seam="posttrain.stages.reinforce.reinforce_stage:learn",
    what="the sampler gets the weights after each optimizer step, not after the last one of a step",
    harm="answers are said by weights that no step begins with, under versions that nobody promised",
    source="a push between micro-batches or minibatches",
    shows=("rl.minibatches=2", "engine.update=inflight"),
    needs="ahead",
)
def _(real: Real) -> Real:
    async def learn(roles: Any, asked: Any) -> Any:
        trainer = roles.trainer
        whole = type(trainer).step

        def step(*args: Any, **kwargs: Any) -> Any:
            seen = whole(trainer, *args, **kwargs)
            if kwargs["first"]:
                with suppress(StopIteration):  # a load in flight waits for nothing
                    roles.sync._send(trainer.version).send(None)
            return seen

        trainer.step = step
        try:
            return await real(roles, asked)
        finally:
            del trainer.step

    return learn


@fault(
    "inflight_cache_kept",
    seam="posttrain.engine.embedded.schedule.scheduler:Scheduler.renew",
    what="what goes on under new weights, a turn or an episode, goes on over the cache that the old ones made",
    harm="log-probs are of neither version, and the ratio of a token to its own weights is not 1",
    source="PipelineRL (2509.19128): caches kept in flight",
    shows=("engine.update=inflight",),
    needs="ahead",
)
def _(real: Real) -> Real:
    def renew(self: Any, version: int, *, stale: bool = False) -> None:
        self.tree.renew = lambda version: None
        try:
            real(self, version, stale=True)
        finally:
            del self.tree.renew

    return renew
