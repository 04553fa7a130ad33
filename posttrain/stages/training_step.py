"""One training step: rollouts, verdicts, scores, credit, minibatches, optimizer steps, weight sync, one record line.

A reinforcement step is two functions with an `Experience` between them. `ask` plays the rollouts and judges them.
`learn` does the rest. A step that learns from data is `learn_from`. The checks are not called here: they observe the
events that a step emits (`role.events`).

consumes   groups from `ReinforceRoles.groups`, and the weights of the last push
waits for  the rollouts of every group of the step, then the learner
produces   new weights at the sampler, and one `Step` for the record
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, of_step, remember
from posttrain.algorithm.credit.step_credit import credit_step, without_credit
from posttrain.algorithm.loss.load_balance_loss import BalancedLoss, to_balance
from posttrain.algorithm.loss.losses import Loss, PolicyLoss
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.ports import Learner
from posttrain.core.scored import Credit
from posttrain.core.stop import StepNumber
from posttrain.core.types import Group
from posttrain.diagnose.gauges.rollout_gauges import rollout_gauges
from posttrain.diagnose.rules.data_notes import notes
from posttrain.ladder.rollout_request import PassRate
from posttrain.role.events import PlayedEvent, PushedEvent, ScoredEvent
from posttrain.role.pack import pack
from posttrain.role.roles import ReinforceRoles, StageRoles
from posttrain.role.score import score
from posttrain.role.trainer import NAMED, NonFiniteGradient, named
from posttrain.stages.skipped_updates import left_out
from posttrain.system.errors import InvariantError, PosttrainError, RunFolderError


async def ask(roles: ReinforceRoles, index: int) -> Experience:
    """Play and judge the groups of step `index`, counted from 1, or take those that were played ahead."""
    asked = roles.stage.algorithm.request(roles.stage)
    request = replace(asked, at=StepNumber(index, roles.stage.steps))
    with roles.clock.of("rollout"):
        taken = await roles.groups.take(index, request, roles.trainer.version, roles.adaptive.rate)
    with roles.clock.of("score"):
        # Timed as scoring: to refuse groups that are too far from the policy, the buffer runs forward passes (`moved`).
        replayed = roles.replay.draw(index, partial(moved, roles.learner)) if roles.replay else ()
    return Experience(
        index,
        taken.begun,
        taken.played,
        taken.passed,
        request.groups,
        taken.engine,
        roles.groups.cursor,
        replayed,
        taken.versions,
    )


def moved(learner: Learner, group: Group) -> float:
    """The mean of |log(policy / sampler)| over the sampled tokens of a group's judged episodes. Demonstrations are left
    out, since no sampler drew them."""
    sampled = [s for e in group.judged if e.own for s in e.segments]
    mu_M = np.concatenate([s.logp[s.mask] for s in sampled])
    return float(np.mean(np.abs(learner.score(Packed.of(sampled)) - mu_M)))


@dataclass
class UnfinishedStep:
    """The results that a step has computed so far. If something stops it, this much still reaches the record."""

    experience: Experience
    credit: Credit | None = None
    learned: list[Gauges] = field(default_factory=lambda: [{"optim/steps": Gauge(0, 1)}])
    """Gauges of its updates. The first entry is of none, so that a step without any records 0 optimizer steps."""
    skipped: list[str] = field(default_factory=list[str])
    """Messages about optimizer steps that were left out."""
    line: Step | None = None


async def learn(roles: ReinforceRoles, e: Experience) -> Step:
    """Take up to `stage.optimizer_steps` optimizer steps on one experience; returns the step's line of the record.
    Where a check or the loss stops the step, the line is written at once, with the reason as its note."""
    stage, version, unfinished = roles.stage, roles.trainer.version, UnfinishedStep(e)
    # Value warm-up: in the first steps only the values learn, and `algorithm` has no term that moves the policy. The
    # credit is computed as always, since the targets of the values come from it; `without_credit` then sets it to 0.
    algorithm, warming = of_step(stage.algorithm, roles.adaptive, e.index)
    # Scores and credit of the whole step come before its first update: else later minibatches would be scored by
    # another policy. `unfinished` holds what is done so far.
    with stopped_is_recorded(roles, unfinished):
        with roles.clock.of("rollout"):
            roles.watch.emit(PlayedEvent(e))
        with roles.clock.of("score"):
            groups = score(
                e.groups,
                algorithm,
                roles.learner,
                roles.reference,
                optimizer_steps=stage.optimizer_steps,
                implicit=roles.implicit,
                hints=roles.hints,
                reroute=roles.run.model.router_replay == "start",
            )
            roles.watch.emit(ScoredEvent(e, groups))
            credit = credit_step(
                algorithm,
                groups,
                max_tokens=roles.sampling.max_tokens,
                ema=roles.adaptive.ema,
                emas=roles.adaptive.emas,
            )
            unfinished.credit = credit = without_credit(credit) if warming else credit
        with roles.clock.of("learn"):
            if roles.implicit is not None:
                unfinished.learned.append(roles.implicit.learn(e.index, groups, roles.watch))
            # `minibatches` is lazy: each minibatch is made after the updates on those before it. An algorithm that
            # chooses tokens by the present log-probs gets them from `now`.
            minibatches = pack(
                credit, algorithm, stage, seed=roles.run.seed, step=e.index, version=version, now=roles.learner.score
            )
            for minibatch in minibatches:
                # None: no episode of the minibatch has credit, so no step is taken.
                if (batch := minibatch.batch) is not None:
                    try:
                        with named(batch, credit, f"{stage.name} step {e.index}"):
                            data, loss = objective_of(roles, batch, PolicyLoss(algorithm, warming))
                            step_gauges = roles.trainer.step(
                                data, loss, roles.watch, index=e.index, first=minibatch.first
                            )
                    except InvariantError as error:
                        # Only a gradient that is not finite may be left out. Any other broken invariant stops the run.
                        if not isinstance(error.__cause__, NonFiniteGradient):
                            raise
                        step_gauges, note = left_out(roles, batch, e.index, error)
                        unfinished.skipped.append(note)
                    unfinished.learned.append(step_gauges)
        with roles.clock.of("rollout"):
            # Groups that are played ahead stood still while the learner computed in this process. Here, before the new
            # weights, they say what they can under the weights that they were asked with.
            await roles.groups.proceed()
        with roles.clock.of("sync"):
            # `follow`, not `push`: where every update was left out there is nothing new to send.
            if e.index % stage.sync_steps == 0:
                await roles.sync.follow(roles.trainer.version)
            roles.watch.emit(PushedEvent(e, credit))
        if roles.replay is not None:
            roles.replay.add(e.index, e.fresh)
        # Made once, because making it also writes the episodes: if an observer stops the run in `after`,
        # `stopped_is_recorded` writes this same line.
        unfinished.line = _line(roles, unfinished, notes(e, credit, stage.prompts))
        roles.adaptive = _adapted(roles, unfinished, credit)
        line = await roles.watch.after(unfinished.line)
        # Behind the sync: groups that it gave up, and further ones, are asked under the weights that the sampler has
        # now. Behind `after`: if an observer stops the run, nothing more is asked. Prompts of later groups are drawn by
        # what this step's groups earned.
        await roles.groups.learned()
        return line


def objective_of(roles: ReinforceRoles, batch: Batch, loss: PolicyLoss) -> tuple[Batch, Loss]:
    """The minibatch and its loss, with the load-balance loss of a mixture of experts where the stage has one."""
    coef, routers = roles.stage.router_aux_loss_coef, roles.learner.routers()
    if not coef or loss.warming or routers is None:
        return batch, loss
    return to_balance(batch, routers.experts), BalancedLoss(loss, coef)


def _adapted(roles: ReinforceRoles, unfinished: UnfinishedStep, credit: Credit) -> AdaptiveState:
    """The adaptive coefficients and moving averages after the step."""
    gauges, episodes, e = merge(*unfinished.learned), sum(len(g.episodes) for g in credit.groups), unfinished.experience
    before = replace(roles.adaptive, ema=credit.ema, emas=credit.emas)
    return remember(
        roles.stage.algorithm, before, gauges, episodes=episodes, asked=PassRate(len(e.played), sum(e.passed))
    )


@contextmanager
def stopped_is_recorded(roles: ReinforceRoles, unfinished: UnfinishedStep) -> Iterator[None]:
    """Around a step: when it is stopped, its line is written to the record, with the reason as a note. A
    `RunFolderError` is raised as it is, since writing again would fail again."""
    try:
        yield
    except RunFolderError:
        raise
    except PosttrainError as error:
        line = unfinished.line or _line(roles, unfinished, ())
        roles.book.write(replace(line, notes=(*line.notes, f"stopped: {error}")))
        raise


@dataclass(frozen=True, eq=False)
class DataBatch:
    """The batch of one step that learns from data."""

    index: int
    """The step, counted from 1."""
    batch: Batch
    running: Mapping[str, float] = field(default_factory=dict[str, float])
    """State that the algorithm remembers after this step."""


async def learn_from(
    roles: StageRoles[Any],
    work: DataBatch,
    loss: Loss,
    called: str,
    sampled: Gauges | None = None,
    first: bool | None = None,
) -> Step:
    """Take one step on a batch of data; returns its line of the record.

    Args:
        called: what an episode of the batch is called in messages, such as `demonstration`.
        sampled: gauges of the rollouts that made the batch, where the policy sampled it.
        first: whether the batch has the sampler's log-probs, drawn with the present weights. None: True if `sampled` is
            given.

    Raises:
        InvariantError: the gradient is not finite. The message names the episodes that make it so, and the record's
            line has it as a note.
    """
    index, batch, fresh = work.index, work.batch, sampled is not None if first is None else first
    with roles.clock.of("learn"):
        try:
            gauges, skipped = roles.trainer.step(batch, loss, roles.watch, index=index, first=fresh), ()
        except NonFiniteGradient as error:
            # Only the culprits that the message names are decoded.
            names = [f"{called} {e} ({roles.text(batch.ids_of(e))[:60]!r})" for e in error.culprits[:NAMED]]
            unnamed = len(error.culprits) - len(names)
            message = error.told(names, f" ({roles.stage.name} step {index})", unnamed)
            try:
                gauges, note = left_out(roles, batch, index, InvariantError(message))
            except InvariantError as stop:
                roles.book.write(Step(roles.stage.name, index, roles.trainer.version, {}, notes=(f"stopped: {stop}",)))
                raise stop from error
            skipped = (note,)
    report = roles.watch.take()
    return await roles.watch.after(
        Step(
            roles.stage.name,
            index,
            roles.trainer.version,
            merge(sampled or {}, gauges, report.gauges),
            roles.clock.take(),
            (*skipped, *report.notes),
        )
    )


async def learn_nothing(roles: StageRoles[Any], index: int, sampled: Gauges, notes: tuple[str, ...]) -> Step:
    """The line of a step whose samples teach nothing: weights and optimizer stay as they are."""
    # The sampler drops what it keeps of earlier turns, as after a push of weights. A resumed run begins with an empty
    # sampler, and both records must be equal.
    roles.sync.forget()
    report = roles.watch.take()
    gauges = merge(sampled, {"optim/steps": Gauge(0, 1)}, report.gauges)
    notes_of_step, version = (*notes, *report.notes), roles.trainer.version
    return await roles.watch.after(Step(roles.stage.name, index, version, gauges, roles.clock.take(), notes_of_step))


def _write(roles: ReinforceRoles, unfinished: UnfinishedStep) -> None:
    """Write the step's episodes to the record. Groups without a judged episode have no credit, and if the step stopped
    before credit was computed, none has any."""
    if not roles.run.record_episodes:
        return
    credit, index, groups = unfinished.credit, unfinished.experience.index, unfinished.experience.fresh
    groups_without_credit = groups if credit is None else tuple(g for g in groups if not g.judged)
    # Replayed groups are in the file of the step that played them.
    replayed_ids = {id(g) for g in unfinished.experience.replayed}
    fresh_credit = credit and replace(credit, groups=tuple(g for g in credit.groups if id(g.group) not in replayed_ids))
    roles.book.write_episodes(
        roles.stage.name, index, fresh_credit or Credit((), roles.adaptive.ema), groups_without_credit
    )


def _line(roles: ReinforceRoles, unfinished: UnfinishedStep, notes: tuple[str, ...]) -> Step:
    """The step as a line of the record. Its episodes are written to files of their own."""
    with roles.clock.of("book"):
        _write(roles, unfinished)
    experience, report = unfinished.experience, roles.watch.take()
    credit = unfinished.credit or Credit((), roles.adaptive.ema)
    replayed = roles.replay.gauges() if roles.replay else {}
    # `gauges` must be the same in a resumed run. So whatever depends on time goes into `clock`.
    gauges = merge(rollout_gauges(experience, credit), experience.engine, replayed, report.gauges, *unfinished.learned)
    time_dependent = dict(roles.rollout.gauges())
    if roles.stage.staleness:  # what the engine did meanwhile depends on time
        time_dependent |= {n: g for n, g in roles.sync.sampler.gauges().items() if n not in experience.engine}
    seconds = {**roles.clock.take(), **roles.sync.sampler.clock(), **roles.groups.clock()}
    seconds |= roles.rollout.clock()
    clock = {**seconds, **{n: g.mean for n, g in time_dependent.items() if g.count}}
    notes_of_step = (*notes, *unfinished.skipped, *report.notes)
    return Step(roles.stage.name, experience.index, roles.trainer.version, gauges, clock, notes_of_step)
