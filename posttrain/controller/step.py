"""The step, as a sentence: ask, answer, judge, score, credit, pack, learn, publish, write down.

consumes   prompts from `House.prompts`, weights from the last push
waits for  the rollout (every group of the step), then the learner
unblocked  by the engine finishing the last episode
produces   new weights at the sampler, one `Step` for the record
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from posttrain.algorithm.credit import credit_step, without_credit
from posttrain.algorithm.steer import remember, standing, steered
from posttrain.controller.guard import Guard, notes, unjudged_groups
from posttrain.controller.house import House
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError, PosttrainError, RunFolderError
from posttrain.core.pieces.baseline import Greedy
from posttrain.core.streams import MU
from posttrain.core.types import Credit, Gauge, Gauges, Step, merge
from posttrain.diagnose.gauges import rollout_gauges
from posttrain.role.audit import key
from posttrain.role.pack import pack
from posttrain.role.rollout import Asked
from posttrain.role.score import score
from posttrain.role.trainer import NotFinite


@dataclass
class Begun:
    """What a step has come to, for its record where it cannot be finished."""

    index: int
    version: int
    asked: Asked = Asked((), ())
    credit: Credit | None = None
    learned: list[Gauges] = field(default_factory=lambda: [{"optim/steps": Gauge(0, 1)}])
    written: bool = False


async def train_step(h: House, guard: Guard, index: int) -> Step:
    """One controller step: up to `stage.optimizer_steps` optimizer steps on freshly sampled groups.

    A step that a check or a loss stops is recorded all the same, as far as it came, with what stopped it as its note.
    """
    begun = Begun(index, h.trainer.version)
    try:
        return await _step(h, guard, begun)
    except RunFolderError:
        raise
    except PosttrainError as error:
        if begun.asked.played:
            _write(h, begun)
            h.book.write(_told(h, guard, begun, (f"stopped: {error}",)))
        raise


async def checked(h: House, guard: Guard, step: Step) -> Step:
    """What the guard says after a step; one that it stops at is in the record, with why."""
    try:
        return await guard.after(h, step)
    except PosttrainError as error:
        h.book.write(replace(step, notes=(*step.notes, f"stopped: {error}")))
        raise


async def _step(h: House, guard: Guard, begun: Begun) -> Step:
    stage, index, version = h.stage, begun.index, begun.version
    a = steered(stage.algorithm, h.memory)
    if warming := a.learns_values is not None and index <= a.learns_values.warmup:
        a = standing(a)
    with h.clock.of("rollout"):
        asked = await h.rollout.until(
            h.prompts,
            count=stage.prompts,
            siblings=stage.siblings,
            extra=stage.oversample,
            sampling=h.sampling,
            stream=h.stream,
            keep=(lambda group: group.mixed) if a.filter == "mixed" else None,
            most=stage.refill,
            greedy=isinstance(a.baseline, Greedy),
            shown=a.shown,
        )
        begun.asked = asked
        h.prompts.learn(asked.played)
        guard.rolled_out(h, asked)
    with h.clock.of("score"):
        groups = score(asked.groups, a, h.learner, h.reference, optimizer_steps=stage.optimizer_steps)
        guard.scored(h, groups)
        credit = credit_step(a, groups, max_tokens=h.sampling.max_tokens, ema=h.memory.ema)
        if warming:
            credit = without_credit(credit)
        begun.credit = credit
    with h.clock.of("learn"):
        for minibatch in pack(credit, a, stage, seed=h.run.seed, step=index, version=version):
            if minibatch.batch is not None:
                with guard.first_move(h, minibatch.batch), named(minibatch.batch, credit, f"{stage.name} step {index}"):
                    begun.learned.append(h.trainer.policy_step(minibatch.batch, a, guard.observer(h, minibatch), warming=warming))
    with h.clock.of("sync"):
        if h.trainer.version != version:
            await h.sync.push(h.trainer.version)
    with h.clock.of("book"):
        _write(h, begun)
    seen, episodes = merge(*begun.learned), sum(len(g.episodes) for g in credit.groups)
    h.memory = remember(stage.algorithm, replace(h.memory, ema=credit.ema), seen, episodes=episodes)
    return _told(h, guard, begun, (*notes(asked, credit, stage.prompts), *guard.unjudged(asked)))


def _write(h: House, begun: Begun) -> None:
    """The step's episodes, once; those of a step that came to no credit without any."""
    if begun.written or not h.run.record_episodes:
        return
    begun.written = True
    credit, groups = begun.credit, begun.asked.groups
    rest = groups if credit is None else unjudged_groups(groups)
    h.book.write_episodes(h.stage.name, begun.index, credit or Credit((), h.memory.ema), rest)


def _told(h: House, guard: Guard, begun: Begun, notes: tuple[str, ...]) -> Step:
    """The step as a line of the record."""
    asked, credit = begun.asked, begun.credit or Credit((), h.memory.ema)
    gauges = merge(rollout_gauges(asked.played, len(asked.refused), credit, begun.version), guard.take(), *begun.learned)
    verifiers = {name: g.mean for name, g in h.rollout.environment.gauges().items() if g.count}
    clock = {**h.clock.take(), **h.sync.sampler.clock(), **verifiers}
    return Step(h.stage.name, begun.index, h.trainer.version, gauges, clock, notes)


@contextmanager
def named(batch: Batch, credit: Credit, where: str) -> Iterator[None]:
    """A gradient that is not finite, with the episodes that made it by task and sibling."""
    try:
        yield
    except NotFinite as error:
        of = {key(e.episode): e.episode for g in credit.groups for e in g.episodes}
        said = [batch.select([e]) for e in error.culprits]
        found = [of.get(one.target_M.tobytes() + one[MU].tobytes()) for one in said]
        names = [f"task {e.task.id!r} visit {e.visit} sibling {e.sibling} (reward {e.reward:g})" for e in found if e is not None]
        raise InvariantError(error.told(names, f" ({where})")) from error
