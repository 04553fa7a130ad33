"""The step, as a sentence: ask, answer, judge, score, credit, pack, learn, publish, write down.

It is two functions, with an `Experience` between them: `ask` plays and judges, `learn` does the rest. Nothing else is
woven in; checks and whoever else wants to know observe the events of `role.events`.

consumes   prompts from `ReinforceRoles.prompts`, weights from the last push
waits for  the rollout (every group of the step), then the learner
unblocked  by the engine finishing the last episode
produces   new weights at the sampler, one `Step` for the record
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from posttrain.algorithm.credit import credit_step, without_credit
from posttrain.algorithm.losses import Likelihood, PolicyLoss
from posttrain.algorithm.steer import AdaptiveState, remember, standing, steered
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError, PosttrainError, RunFolderError
from posttrain.core.experience import Experience, PromptState
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.request import PassRate
from posttrain.core.scored import Credit
from posttrain.core.types import Group
from posttrain.diagnose.gauges import rollout_gauges
from posttrain.diagnose.notes import notes
from posttrain.role.culprits import named
from posttrain.role.events import PlayedEvent, PushedEvent, ScoredEvent
from posttrain.role.pack import pack
from posttrain.role.roles import ReinforceRoles, SupervisedRoles
from posttrain.role.score import score
from posttrain.role.trainer import NAMED, NonFiniteGradient


async def ask(roles: ReinforceRoles, index: int) -> Experience:
    """Play and judge the groups of step `index`, from 1."""
    version, request = roles.trainer.version, roles.stage.algorithm.request(roles.stage)
    with roles.clock.of("rollout"):
        played, passed = await roles.rollout.until(
            roles.prompts, request, roles.sampling, roles.stream, roles.adaptive.rate
        )
        roles.prompts.learn(played)
    prompts = PromptState(roles.prompts.cursor, dict(roles.prompts.rates), dict(roles.prompts.visits))
    return Experience(index, version, played, passed, request.groups, roles.sync.sampler.gauges(), prompts)


@dataclass
class UnfinishedStep:
    """What learning has come to, for the record where it cannot be finished."""

    experience: Experience
    credit: Credit | None = None
    learned: list[Gauges] = field(default_factory=lambda: [{"optim/steps": Gauge(0, 1)}])
    line: Step | None = None


async def learn(roles: ReinforceRoles, e: Experience) -> Step:
    """Up to `stage.optimizer_steps` optimizer steps on what was asked, then the step's line of the record.

    A step that a check or a loss stops is recorded all the same, as far as it came, with what stopped it as its note.
    """
    stage, version, begun = roles.stage, roles.trainer.version, UnfinishedStep(e)
    a = steered(stage.algorithm, roles.adaptive)
    if warming := a.learns_values is not None and e.index <= a.learns_values.warmup:
        a = standing(a)
    with stopped_is_recorded(roles, begun):
        with roles.clock.of("rollout"):
            roles.watch.emit(PlayedEvent(e))
        with roles.clock.of("score"):
            groups = score(e.groups, a, roles.learner, roles.reference, optimizer_steps=stage.optimizer_steps)
            roles.watch.emit(ScoredEvent(e, groups))
            credit = credit_step(a, groups, max_tokens=roles.sampling.max_tokens, ema=roles.adaptive.ema)
            begun.credit = credit = without_credit(credit) if warming else credit
        with roles.clock.of("learn"):
            for minibatch in pack(credit, a, stage, seed=roles.run.seed, step=e.index, version=version):
                if (batch := minibatch.batch) is not None:
                    with named(batch, credit, f"{stage.name} step {e.index}"):
                        seen = roles.trainer.step(
                            batch, PolicyLoss(a, warming), roles.watch, index=e.index, first=minibatch.first
                        )
                    begun.learned.append(seen)
        with roles.clock.of("sync"):
            if roles.trainer.version != version:
                await roles.sync.push(roles.trainer.version)
            roles.watch.emit(PushedEvent(e, credit))
        begun.line = _line(roles, begun, notes(e, credit, stage.prompts))
        roles.adaptive = _memory(roles, begun, credit)
        return await roles.watch.after(begun.line)


def _memory(roles: ReinforceRoles, begun: UnfinishedStep, credit: Credit) -> AdaptiveState:
    """What the algorithm remembers after the step."""
    seen, episodes, e = merge(*begun.learned), sum(len(g.episodes) for g in credit.groups), begun.experience
    before = replace(roles.adaptive, ema=credit.ema)
    return remember(
        roles.stage.algorithm, before, seen, episodes=episodes, asked=PassRate(len(e.played), sum(e.passed))
    )


@contextmanager
def stopped_is_recorded(roles: ReinforceRoles, begun: UnfinishedStep) -> Iterator[None]:
    """The step's line is in the record also where the step is stopped, with why; a record that cannot be written is no
    reason to try again."""
    try:
        yield
    except RunFolderError:
        raise
    except PosttrainError as error:
        line = begun.line or _line(roles, begun, ())
        roles.book.write(replace(line, notes=(*line.notes, f"stopped: {error}")))
        raise


@dataclass(frozen=True, eq=False)
class SupervisedBatch:
    """What one supervised step learns from."""

    index: int
    """The step, from 1."""
    batch: Batch


async def imitate(roles: SupervisedRoles, lesson: SupervisedBatch) -> Step:
    """One supervised step; one that cannot be finished names the demonstrations that make it so, and is in the
    record."""
    index, batch = lesson.index, lesson.batch
    with roles.clock.of("learn"):
        try:
            gauges = roles.trainer.step(batch, Likelihood(), roles.watch, index=index)
        except NonFiniteGradient as error:
            names = [
                f"demonstration {e} ({roles.text(batch.select([e]).ids_N)[:60]!r})" for e in error.culprits[:NAMED]
            ]
            told = error.told(
                [*names, *[""] * (len(error.culprits) - len(names))], f" ({roles.stage.name} step {index})"
            )
            roles.book.write(Step(roles.stage.name, index, roles.trainer.version, {}, notes=(f"stopped: {told}",)))
            raise InvariantError(told) from error
    seen = roles.watch.take()
    return await roles.watch.after(
        Step(roles.stage.name, index, roles.trainer.version, merge(gauges, seen.gauges), roles.clock.take(), seen.notes)
    )


def _write(roles: ReinforceRoles, begun: UnfinishedStep) -> None:
    """The step's episodes; those of a step that came to no credit without any."""
    if not roles.run.record_episodes:
        return
    credit, groups = begun.credit, begun.experience.groups
    rest = groups if credit is None else _unjudged(groups)
    roles.book.write_episodes(roles.stage.name, begun.experience.index, credit or Credit((), roles.adaptive.ema), rest)


def _unjudged(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups no episode of which could be judged: they reach no credit, and the record keeps them."""
    return tuple(g for g in groups if not g.judged)


def _line(roles: ReinforceRoles, begun: UnfinishedStep, notes: tuple[str, ...]) -> Step:
    """The step as a line of the record; its episodes are in theirs."""
    with roles.clock.of("book"):
        _write(roles, begun)
    e, credit, seen = begun.experience, begun.credit or Credit((), roles.adaptive.ema), roles.watch.take()
    gauges = merge(rollout_gauges(e, credit), e.engine, seen.gauges, *begun.learned)
    verifiers = {name: g.mean for name, g in roles.rollout.environment.gauges().items() if g.count}
    clock = {**roles.clock.take(), **roles.sync.sampler.clock(), **verifiers}
    return Step(roles.stage.name, e.index, roles.trainer.version, gauges, clock, (*notes, *seen.notes))
