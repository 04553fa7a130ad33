"""Checks of groups that are asked ahead of the updates: they come in order, are as old as they say, and do not change.

Groups that are learned from again (replay) are checked too. Every check is exact: nothing in it is left to chance. The
checks also hold without staleness, where they say less.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.config.run import Reinforce
from posttrain.core import seeds
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Step
from posttrain.core.ports import TaskSource
from posttrain.core.types import Group, Segment
from posttrain.role.events import (
    DifferentiatedEvent,
    Event,
    LearnedEvent,
    Observer,
    ObserverReport,
    PackedEvent,
    PlayedEvent,
    PushedEvent,
)
from posttrain.role.group_queue import GroupQueue
from posttrain.role.roles import ReinforceRoles
from posttrain.system.errors import InvariantError

ORDER = "prompt-order"
"""The stream of random numbers that shuffles an epoch, as a checkpoint's cursor means it."""


def next_of_the_walk(played: Sequence[Group], begin: int, source: TaskSource, seed: int) -> None:
    """The groups of a step are the next ones of the walk through the prompts: none is lost, doubled or overtaken.

    The walk is computed again from the seed and the number of prompts before it. A curriculum has a walk of its own,
    which this says nothing of.
    """
    count, order = source.count, dict[int, np.ndarray]()
    for place, g in enumerate(played, begin):
        visit, index = 0, place
        if count is not None:
            # visit: how often the walk went through all tasks before; at: the place in this round of it.
            visit, at = divmod(place, count)
            if visit not in order:
                # Each round has a permutation of its own, computed once.
                order[visit] = seeds.generator(seed, ORDER, visit).permutation(count)
            index = int(order[visit][at])
        if (g.task.id, g.visit) != (wanted := (source.task(index).id, visit)):
            raise InvariantError(
                f"group {place + 1} of the stage is of task {g.task.id!r} (visit {g.visit}), and the next prompt is"
                f" {wanted[0]!r} (visit {wanted[1]}): a group was lost, learned twice, or overtaken by a faster one, so"
                " what is learned depends on more than the seed. Look at who takes groups from the queue, and at the"
                " cursor of a resumed run"
            )


def asks_on(asked: int, cursor: int) -> None:
    """A resumed stage asks for the prompt after the last one that waits in its queue."""
    if asked != cursor:
        raise InvariantError(
            f"{asked} prompts of the stage were asked before it was cut, and it would go on at prompt {cursor}: tasks"
            " and random numbers would repeat or be skipped. The checkpoint's cursor was not restored"
        )


def promised_as_begun(promised: Sequence[int], begun: Sequence[int]) -> None:
    """The versions that samples may have are those of the learner at the beginning of the last steps.

    Args:
        begun: the versions at the beginning of the steps that this check has seen, oldest first. There may be fewer.
    """
    n = min(len(promised), len(begun))
    # What this check has not seen (steps before a resumed run) cannot be compared: only the common end is.
    if list(promised)[len(promised) - n :] != list(begun)[len(begun) - n :]:
        raise InvariantError(
            f"samples may be of versions {list(promised)}, and the last steps began with {list(begun)}: ages are not"
            " counted as the weights changed, so older samples would pass for fresh ones. Look at who notes the"
            " learner's version at the beginning of a step"
        )


def as_old_as_asked(played: Sequence[Group], asked: Sequence[int], exactly: bool) -> None:
    """No token of a group is older than the weights that the sampler had when the group was to be asked.

    Args:
        asked: the sampler's version when each group was to be asked.
        exactly: `deterministic=true` promises that all tokens of the group are of this version.
    """
    for g, version in zip(played, asked, strict=False):
        versions = _own_versions(g)
        if len(versions) and (versions.min() < version or (exactly and versions.max() > version)):
            raise InvariantError(
                f"task {g.task.id!r} has tokens of versions {sorted(set(versions.tolist()))}, and the sampler had"
                f" version {version} when this group was to be asked: it was asked earlier than the bound allows, or"
                " its versions were changed on the way. Ratios, ages and corrections would be those of other weights"
            )


def asked_within_bound(waiting: int, staleness: int, prompts: int, left: int) -> None:
    """No more groups are asked ahead than `staleness` further steps will take.

    Args:
        waiting: groups that were asked and that no step has taken.
        left: steps of the stage after this one.
    """
    # Near the end fewer steps are left to take what waits.
    if waiting > (most := min(staleness, left) * prompts):
        raise InvariantError(
            f"{waiting} groups are asked ahead, and {prompts} prompts a step, staleness={staleness} and {left} steps to"
            f" go allow {most}: the last of them will be learned from when they are older than promised. Look at who"
            " decides how many groups may be asked"
        )


def versions_only_grow(groups: Sequence[Group], drained: bool, whole: bool) -> None:
    """In an episode each token is said by the same weights as the one before it, or by newer ones.

    Args:
        drained: new weights wait for turns that were begun, so a turn has one version.
        whole: they wait for groups that were asked, so a group has one.
    """
    for g in groups:
        versions = _own_versions(g)
        if whole and len(set(versions.tolist())) > 1:
            raise InvariantError(
                f"task {g.task.id!r} has tokens of versions {sorted(set(versions.tolist()))}: with deterministic=true"
                " new weights wait until every group that was asked has ended. They were pushed before, and the run"
                " cannot be repeated"
            )
        for e in g.episodes:
            # In the order in which they were said, across the segments of a rewritten history.
            spoken_versions = _versions(e.segments)
            if not e.own or not len(spoken_versions):
                continue
            fell = np.flatnonzero(np.diff(spoken_versions) < 0)
            if len(e.segments) == 1 and len(fell):
                raise InvariantError(
                    f"task {g.task.id!r}: version {spoken_versions[fell[0]]} said a token, and version"
                    f" {spoken_versions[fell[0] + 1]} the next one. A sampler's version never falls: versions were"
                    " mixed up or lost"
                )
            # Turns are cut out by their lengths, which must add up to what was said.
            if drained and len(e.segments) == 1 and sum(e.turns) == len(spoken_versions):
                ends = np.cumsum(e.turns)[:-1]
                if any(len(set(turn.tolist())) > 1 for turn in np.split(spoken_versions, ends)):
                    raise InvariantError(
                        f"task {g.task.id!r} has a turn of several versions, {sorted(set(spoken_versions.tolist()))}:"
                        " with engine.update=drain new weights wait for turns that were begun. Weights were changed"
                        " under the sampler"
                    )


def ages_as_stamped(recorded: Mapping[str, Gauge], versions: np.ndarray, promised: Sequence[int]) -> None:
    """The recorded ages are those of the tokens' versions: newer steps with other weights, counted for each token."""
    distinct, tokens = np.unique(versions, return_counts=True)
    # Age counts later versions, not steps: a step without an update makes nothing older.
    ages = [sum(v > version for v in {*promised}) for version in distinct.tolist()]
    total = sum(age * n for age, n in zip(ages, tokens.tolist(), strict=True))
    want = {"rollout/versions_behind": float(total), "rollout/most_behind": float(max(ages, default=0))}
    for name, value in want.items():
        if name in recorded and ages and recorded[name].sum != value:
            raise InvariantError(
                f"{name} is recorded as {recorded[name].sum:g}, and the tokens' versions say {value:g}: ages are not"
                " counted from the versions that tokens carry. Whoever reads the record would take old samples for"
                " fresh ones"
            )


def pushed_between_steps(before: int, now: int, pushed: int | None, where: str) -> None:
    """The sampler gets new weights at the end of a step only, and then the learner's newest.

    Args:
        before: the sampler's version when the step's groups had been taken.
        pushed: the learner's version, once it was due to be pushed. None: nothing was due yet.
    """
    if now != (before if pushed is None else pushed):
        raise InvariantError(
            f"{where} the sampler has version {now}, and it should have {before if pushed is None else pushed}."
            " Weights are pushed once a step has ended: in its middle they are no policy that a later step counts"
            " from, and tokens they say have a version that nobody promised. Look at who calls Sync.push"
        )


def digest_of(group: Group) -> str:
    """A digest of what a group said: tokens, log-probs and versions of every episode."""
    out = hashlib.blake2b(digest_size=8)
    for e in group.episodes:
        for s in e.segments:
            # Of log-probs only the spoken ones: NaN elsewhere has many bit patterns.
            for x in (s.ids, s.mask, s.logp[s.mask], s.version[s.mask]):
                out.update(np.ascontiguousarray(x).tobytes())
    return out.hexdigest()


def unchanged_in_the_queue(known: Mapping[str, str], groups: Sequence[Group]) -> None:
    """A group that waited in the queue, or in a checkpoint, has the tokens, log-probs and versions that it ended with.

    Args:
        known: `digest_of` when it had ended, by `name_of`.
    """
    for g in groups:
        # A group that is not known yet has ended since the last look, and cannot be compared.
        if known.get(name_of(g), now := digest_of(g)) != now:
            raise InvariantError(
                f"the group of task {g.task.id!r} (visit {g.visit}) has changed since it ended: its tokens, log-probs"
                " or versions are others now. What is learned from must be what was said. Look at who keeps groups"
                " between asking and learning, and at what a checkpoint stores of them"
            )


def learned_before(replayed: Sequence[Group], learned: Mapping[str, tuple[str, int]], step: int, age: int) -> None:
    """Groups that a step learns from again were learned from at most `age` steps ago, and have not changed since.

    Args:
        learned: (`digest_of`, step) of each group that was learned from, by `name_of`.
    """
    names = [name_of(g) for g in replayed]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InvariantError(f"step {step} replays group {twice[0]!r} twice: a sample counts once in a minibatch")
    unchanged_in_the_queue({n: digest for n, (digest, _) in learned.items()}, replayed)
    for n in names:
        if n not in learned or not 0 < step - learned[n][1] <= age:
            when = f"in step {learned[n][1]}" if n in learned else "in none of the last steps"
            raise InvariantError(
                f"step {step} replays group {n!r}, which was learned from {when}, and replay.age={age}: look at what"
                " leaves the replay buffer, and at what a checkpoint stores of it"
            )


def name_of(g: Group) -> str:
    """A name for a group that no other group of the stage has."""
    return f"{g.task.id}/{g.visit}"


class AheadCheck(Observer):
    """Groups are the next ones of the walk, unchanged, as old as their versions say and as the bound allows.

    Weights are pushed between steps.
    """

    def __init__(self, kept: Mapping[str, Any] | None) -> None:
        """`kept`: what a checkpoint inside the stage stored of this check; None at the beginning of a stage."""
        self._asked = deque[int]((kept or {}).get("asked", ()))
        """The sampler's version when each group was to be asked, of those that no step has taken yet."""
        self._digests = dict[str, str]((kept or {}).get("digests", {}))
        """The digest of each ended group that waits in the queue, by `name_of`."""
        self._asked_known = kept is None or bool(kept)
        """Whether `_asked` is known: not where a stage goes on from a checkpoint that lacks it."""
        self._begin_versions = deque[int]()
        """The learner's versions at the beginning of the last steps."""
        # Prompts that steps have taken, and the sampler's version when the step's groups had been taken.
        self._taken, self._served = 0, 0
        self._roles: ReinforceRoles | None = None
        self._experience: Experience | None = None

    async def begin(self, roles: ReinforceRoles) -> None:
        self._roles, self._taken = roles, roles.groups.cursor
        # As many steps as samples may be old, and this one.
        self._begin_versions = deque[int](maxlen=roles.stage.most_behind + 1)
        unchanged_in_the_queue(self._digests, _ended(roles))
        if isinstance(roles.groups, GroupQueue):
            rows = roles.groups.queued()[0]
            # The cursor behind the last group that was asked; with none on its way, behind the last that was taken.
            asks_on(rows[-1].cursor if rows else roles.groups.cursor, roles.prompts.cursor)

    def end(self) -> None:
        self._roles = self._experience = None

    def state(self) -> dict[str, Any]:
        if self._roles is None or not self._roles.stage.staleness:
            return {"ahead": {}}
        waiting = _ended(self._roles)
        # A digest that is known is kept. Made anew from what is in the queue by then, it could tell of no change.
        self._digests = {name: self._digests.get(name) or digest_of(g) for g in waiting if (name := name_of(g))}
        return {"ahead": {"asked": list(self._asked), "digests": dict(self._digests)}}

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        now = roles.sync.sampler.version
        match event:
            case PlayedEvent(e):
                self._played(roles, e)
                self._served, self._experience = now, e
            case PackedEvent() | DifferentiatedEvent() | LearnedEvent():
                pushed_between_steps(self._served, now, None, "Inside a step")
            case PushedEvent():
                # After a step without a due push the sampler still has what it had.
                due = event.experience.index % roles.stage.sync_steps == 0
                pushed_between_steps(self._served, now, roles.trainer.version if due else None, "After a step")
        return None

    async def after(self, roles: ReinforceRoles, step: Step) -> ObserverReport | None:
        if self._experience is not None and roles.stage.most_behind:
            segments = [s for g in self._experience.played for e in g.episodes if e.own for s in e.segments]
            ages_as_stamped(step.gauges, _versions(segments), self._experience.promised)
        self._experience = None
        return None

    def _played(self, roles: ReinforceRoles, e: Experience) -> None:
        """The checks of a step's groups when they have been taken."""
        stage, run = roles.stage, roles.run
        if stage.algorithm.curriculum is None or roles.prompts.curriculum is None:
            next_of_the_walk(e.played, self._taken, roles.prompts.source, run.seed)
        self._taken = roles.groups.cursor
        self._begin_versions.append(roles.trainer.version)
        promised_as_begun(e.promised, self._begin_versions)
        unchanged_in_the_queue(self._digests, e.played)
        for g in e.played:
            self._digests.pop(name_of(g), None)
        if not stage.staleness:
            return
        whole = run.deterministic
        # deterministic waits for whole groups, which is stricter than drain.
        versions_only_grow(e.played, getattr(run.engine, "update", "") == "drain" or whole, whole)
        if stage.algorithm.filter is None and isinstance(roles.groups, GroupQueue):
            waiting = len(roles.groups.queued()[0])
            asked_within_bound(waiting, stage.staleness, stage.prompts, stage.steps - e.index)
        # A filter takes groups until enough have passed, so their number is no function of the step.
        if stage.algorithm.filter is None and self._asked_known:
            self._note_asked(stage, e.index, roles.sync.sampler.version)
            # The oldest that were asked are the ones that this step took.
            asked = [self._asked.popleft() for _ in e.played]
            as_old_as_asked(e.played, asked, whole)
        # What has ended since then must not change any more.
        for g in _ended(roles):
            self._digests.setdefault(name_of(g), digest_of(g))

    def _note_asked(self, stage: Reinforce, index: int, served: int) -> None:
        """Notes the sampler's version for each group that is asked at the beginning of step `index`.

        Groups are asked until those of this step and of `staleness` further steps are on their way, or those of the
        steps that the stage has left.
        """
        ahead = min(stage.staleness + 1, stage.steps - index + 1) * stage.prompts
        # Only what is missing is added: the others were asked in earlier steps, under earlier weights.
        self._asked.extend([served] * (ahead - len(self._asked)))


class ReplayCheck(Observer):
    """Groups that are learned from again are those that were learned from, unchanged, and not too old."""

    def __init__(self, kept: Mapping[str, Any] | None) -> None:
        """`kept`: what a checkpoint inside the stage stored of this check; None at the beginning of a stage."""
        self._learned = {name: (str(digest), int(step)) for name, (digest, step) in (kept or {}).items()}

    def state(self) -> dict[str, Any]:
        return {"replayed": {name: list(known) for name, known in self._learned.items()}}

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent) or (replay := roles.stage.replay) is None:
            return None
        e = event.experience
        learned_before(e.replayed, self._learned, e.index, replay.age)
        # Groups too old for the next step are forgotten, so the memory stays bounded.
        self._learned = {n: known for n, known in self._learned.items() if e.index + 1 - known[1] <= replay.age}
        self._learned |= {name_of(g): (digest_of(g), e.index) for g in e.fresh}
        return None


def _ended(roles: ReinforceRoles) -> tuple[Group, ...]:
    """The groups that have ended and wait in the queue."""
    return roles.groups.queued()[1] if isinstance(roles.groups, GroupQueue) else ()


def _versions(segments: Sequence[Segment]) -> np.ndarray:
    """The versions of the spoken tokens of these segments."""
    return np.concatenate([np.zeros(0, np.int32), *(s.version[s.mask] for s in segments)])


def _own_versions(g: Group) -> np.ndarray:
    """The versions of a group's tokens that a policy of this run said."""
    versions = _versions([s for e in g.episodes if e.own for s in e.segments])
    return versions[versions >= 0]
