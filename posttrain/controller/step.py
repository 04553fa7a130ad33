"""The step, as a sentence: ask, answer, judge, score, credit, pack, learn, publish, write down.

consumes   prompts from `House.prompts`, weights from the last push
waits for  the rollout (every group of the step), then the learner
unblocked  by the engine finishing the last episode
produces   new weights at the sampler, one `Step` for the record
"""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithm.credit import credit_step, without_credit
from posttrain.algorithm.steer import remember, standing, steered
from posttrain.controller.guard import Guard, notes, unjudged_groups
from posttrain.controller.house import House
from posttrain.core.pieces.baseline import Greedy
from posttrain.core.types import Gauge, Gauges, Step, merge
from posttrain.diagnose.gauges import rollout_gauges
from posttrain.role.pack import pack
from posttrain.role.score import score


async def train_step(h: House, guard: Guard, index: int) -> Step:
    """One controller step: up to `stage.optimizer_steps` optimizer steps on freshly sampled groups."""
    stage, version = h.stage, h.trainer.version
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
        h.prompts.learn(asked.played)
        guard.rolled_out(h, asked)
    with h.clock.of("score"):
        groups = score(asked.groups, a, h.learner, h.reference, optimizer_steps=stage.optimizer_steps)
        guard.scored(h, groups)
        credit = credit_step(a, groups, max_tokens=h.sampling.max_tokens, ema=h.memory.ema)
        if warming:
            credit = without_credit(credit)
    learned: list[Gauges] = [{"optim/steps": Gauge(0, 1)}]
    with h.clock.of("learn"):
        for minibatch in pack(credit, a, stage, seed=h.run.seed, step=index, version=version):
            if minibatch.batch is not None:
                with guard.first_move(h, minibatch.batch):
                    learned.append(h.trainer.policy_step(minibatch.batch, a, guard.observer(h, minibatch), warming=warming))
    with h.clock.of("sync"):
        if h.trainer.version != version:
            await h.sync.push(h.trainer.version)
    with h.clock.of("book"):
        if h.run.record_episodes:
            h.book.write_episodes(stage.name, index, credit, unjudged_groups(asked.groups))
    seen = merge(*learned)
    h.memory = remember(stage.algorithm, replace(h.memory, ema=credit.ema), seen, episodes=sum(len(g.episodes) for g in credit.groups))
    gauges = merge(rollout_gauges(asked.played, len(asked.refused), credit, version), guard.take(), seen)
    verifiers = {name: g.mean for name, g in h.rollout.environment.gauges().items() if g.count}
    clock = {**h.clock.take(), **h.sync.sampler.clock(), **verifiers}
    return Step(stage.name, index, h.trainer.version, gauges, clock, notes(asked, credit, stage.prompts))
