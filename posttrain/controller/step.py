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
from posttrain.core.experience import Experience, Walk
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.request import PassRate
from posttrain.core.scored import Credit
from posttrain.core.types import Group
from posttrain.diagnose.gauges import rollout_gauges
from posttrain.diagnose.notes import notes
from posttrain.role.culprits import named
from posttrain.role.events import AskedEvent, PushedEvent, ScoredEvent
from posttrain.role.pack import pack
from posttrain.role.roles import ReinforceRoles, SupervisedRoles
from posttrain.role.score import score
from posttrain.role.trainer import NAMED, NonFiniteGradient


async def ask(h: ReinforceRoles, index: int) -> Experience:
    """Play and judge the groups of step `index`, from 1."""
    version, request = h.trainer.version, h.stage.algorithm.request(h.stage)
    with h.clock.of("rollout"):
        played, passed = await h.rollout.until(h.prompts, request, h.sampling, h.stream, h.memory.rate)
        h.prompts.learn(played)
    walk = Walk(h.prompts.cursor, dict(h.prompts.rates), dict(h.prompts.visits))
    return Experience(index, version, played, passed, request.groups, h.sync.sampler.gauges(), walk)


@dataclass
class PartialStep:
    """What learning has come to, for the record where it cannot be finished."""

    experience: Experience
    credit: Credit | None = None
    learned: list[Gauges] = field(default_factory=lambda: [{"optim/steps": Gauge(0, 1)}])
    line: Step | None = None


async def learn(h: ReinforceRoles, e: Experience) -> Step:
    """Up to `stage.optimizer_steps` optimizer steps on what was asked, then the step's line of the record.

    A step that a check or a loss stops is recorded all the same, as far as it came, with what stopped it as its note.
    """
    stage, version, begun = h.stage, h.trainer.version, PartialStep(e)
    a = steered(stage.algorithm, h.memory)
    if warming := a.learns_values is not None and e.index <= a.learns_values.warmup:
        a = standing(a)
    with stopped_is_recorded(h, begun):
        with h.clock.of("rollout"):
            h.watch.tell(AskedEvent(e))
        with h.clock.of("score"):
            groups = score(e.groups, a, h.learner, h.reference, optimizer_steps=stage.optimizer_steps)
            h.watch.tell(ScoredEvent(e, groups))
            credit = credit_step(a, groups, max_tokens=h.sampling.max_tokens, ema=h.memory.ema)
            begun.credit = credit = without_credit(credit) if warming else credit
        with h.clock.of("learn"):
            for minibatch in pack(credit, a, stage, seed=h.run.seed, step=e.index, version=version):
                if (batch := minibatch.batch) is not None:
                    with named(batch, credit, f"{stage.name} step {e.index}"):
                        seen = h.trainer.step(
                            batch, PolicyLoss(a, warming), h.watch, index=e.index, first=minibatch.first
                        )
                    begun.learned.append(seen)
        with h.clock.of("sync"):
            if h.trainer.version != version:
                await h.sync.push(h.trainer.version)
            h.watch.tell(PushedEvent(e, credit))
        begun.line = _line(h, begun, notes(e, credit, stage.prompts))
        h.memory = _memory(h, begun, credit)
        return await h.watch.after(begun.line)


def _memory(h: ReinforceRoles, begun: PartialStep, credit: Credit) -> AdaptiveState:
    """What the algorithm remembers after the step."""
    seen, episodes, e = merge(*begun.learned), sum(len(g.episodes) for g in credit.groups), begun.experience
    before = replace(h.memory, ema=credit.ema)
    return remember(h.stage.algorithm, before, seen, episodes=episodes, asked=PassRate(len(e.played), sum(e.passed)))


@contextmanager
def stopped_is_recorded(h: ReinforceRoles, begun: PartialStep) -> Iterator[None]:
    """The step's line is in the record also where the step is stopped, with why; a record that cannot be written is no
    reason to try again."""
    try:
        yield
    except RunFolderError:
        raise
    except PosttrainError as error:
        line = begun.line or _line(h, begun, ())
        h.book.write(replace(line, notes=(*line.notes, f"stopped: {error}")))
        raise


@dataclass(frozen=True, eq=False)
class SupervisedBatch:
    """What one supervised step learns from."""

    index: int
    """The step, from 1."""
    batch: Batch


async def imitate(h: SupervisedRoles, lesson: SupervisedBatch) -> Step:
    """One supervised step; one that cannot be finished names the demonstrations that make it so, and is in the
    record."""
    index, batch = lesson.index, lesson.batch
    with h.clock.of("learn"):
        try:
            gauges = h.trainer.step(batch, Likelihood(), h.watch, index=index)
        except NonFiniteGradient as error:
            names = [f"demonstration {e} ({h.text(batch.select([e]).ids_N)[:60]!r})" for e in error.culprits[:NAMED]]
            told = error.told([*names, *[""] * (len(error.culprits) - len(names))], f" ({h.stage.name} step {index})")
            h.book.write(Step(h.stage.name, index, h.trainer.version, {}, notes=(f"stopped: {told}",)))
            raise InvariantError(told) from error
    seen = h.watch.take()
    return await h.watch.after(
        Step(h.stage.name, index, h.trainer.version, merge(gauges, seen.gauges), h.clock.take(), seen.notes)
    )


def _write(h: ReinforceRoles, begun: PartialStep) -> None:
    """The step's episodes; those of a step that came to no credit without any."""
    if not h.run.record_episodes:
        return
    credit, groups = begun.credit, begun.experience.groups
    rest = groups if credit is None else _unjudged(groups)
    h.book.write_episodes(h.stage.name, begun.experience.index, credit or Credit((), h.memory.ema), rest)


def _unjudged(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups no episode of which could be judged: they reach no credit, and the record keeps them."""
    return tuple(g for g in groups if not g.judged)


def _line(h: ReinforceRoles, begun: PartialStep, notes: tuple[str, ...]) -> Step:
    """The step as a line of the record; its episodes are in theirs."""
    with h.clock.of("book"):
        _write(h, begun)
    e, credit, seen = begun.experience, begun.credit or Credit((), h.memory.ema), h.watch.take()
    gauges = merge(rollout_gauges(e, credit), e.engine, seen.gauges, *begun.learned)
    verifiers = {name: g.mean for name, g in h.rollout.environment.gauges().items() if g.count}
    clock = {**h.clock.take(), **h.sync.sampler.clock(), **verifiers}
    return Step(h.stage.name, e.index, h.trainer.version, gauges, clock, (*notes, *seen.notes))
