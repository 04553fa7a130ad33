"""The canaries of one stage, in the order of the step. It counts what it saw and stops the run on what must not be.

What costs next to nothing is checked at every step. Second opinions on credit and loss are asked for at the first
steps, then ever more rarely (`due`); what is known only from rest is checked at the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from posttrain.controller.house import House
from posttrain.controller.judges import Judges
from posttrain.core.batch import Batch, Packed
from posttrain.core.errors import InvariantError, RewardError
from posttrain.core.types import Credit, Gauge, Gauges, Group, ScoredGroup, Step, Task, merge
from posttrain.core.verdict import failed
from posttrain.diagnose.gauges import components, unjudged_words
from posttrain.diagnose.rules import findings
from posttrain.role.agreement import Books, everyone_is_scored, loss_agrees, served_is_trained, update_agrees
from posttrain.role.audit import opinions, same_outcome
from posttrain.role.canaries import (
    failures_stay_out,
    filter_reads_outcomes,
    goes_on,
    in_order_of_the_file,
    masks_cover_what_was_said,
    no_distance_yet,
    no_held_out_task,
    reference_unmoved,
    said_by_these_weights,
    sampler_agrees,
    stops_are_true,
)
from posttrain.role.draws import TEMPERATURES, Bets, bet_on_answers, bet_on_siblings, drawn_again, look, uniforms
from posttrain.role.listening import listening
from posttrain.role.movement import gradient_reaches, moved
from posttrain.role.noise import noise_band
from posttrain.role.pack import Minibatch
from posttrain.role.rehearsal import rehearse
from posttrain.role.rollout import Asked
from posttrain.role.rounding import noise, unmeasured

WALK = 16
"""Tasks whose order is compared with that of their source."""


def due(index: int) -> bool:
    """Whether step `index` (from 1) gets its second opinions: the first four, powers of two, then every 32nd."""
    return index <= 4 or index & (index - 1) == 0 or index % 32 == 0


class Guard:
    """Watches one stage. `history` is its record so far: empty where learner, sampler and reference still hold the same weights."""

    def __init__(self, history: Sequence[Step] = (), bets: Bets | None = None) -> None:
        self.bets = bets or Bets()
        """Of the run so far: they go on from stage to stage."""
        self._history = list(history)
        self._index = len(self._history)
        self._fresh = not self._history
        self._moved = any("canary/moved" in s.gauges for s in self._history)
        self._gauges: Gauges = {}
        self._judges = Judges()
        self._held: Mapping[Hashable, str] = {}
        self._asked_before: set[tuple[str, int]] = set()
        self._played: tuple[Group, ...] = ()
        self._groups: tuple[Group, ...] = ()
        self._books: Books | None = None
        self._walk: list[str] = []

    def take(self) -> Gauges:
        """What was seen since the last call."""
        seen, self._gauges = self._gauges, {}
        return seen

    # --- around the steps ------------------------------------------------------------------------------------------

    async def begin(self, h: House) -> None:
        """Before the first step: a resumed stage goes on where it stood, the loss is its definition, what is served is trained."""
        if self._history:
            walked = self._history[-1].gauges.get("rollout/walked")
            taken = sum(s.gauges["optim/steps"].sum for s in self._history if "optim/steps" in s.gauges)
            remembered = h.trainer.optimizer.state_tensors().get("steps")
            goes_on(walked.sum if walked else None, h.prompts.cursor, taken, None if remembered is None else int(remembered))
        rehearse(h.stage.algorithm)
        served_is_trained(dict(h.learner.tensors()), h.trainer.trained())
        gradient_reaches(h.learner, h.sync.canary)
        same = sameness(h)
        self._held = {same(t): t.id for t in h.rollout.environment.heldout}
        await self._judges.begin(h.rollout.environment, self._index)

    async def after(self, h: House, step: Step) -> Step:
        """After a step: the judges say again what they said, and the rules read the record. Their findings become notes."""
        if self._books is not None:
            self._books.complete()
        self._books = None
        with h.clock.of("check"):
            warned = await self._judges.after(h.rollout.environment, self._played)
        seen = {**self._judges.mute(self._played), "rollout/walked": Gauge(h.prompts.cursor, 1)}
        step = replace(step, gauges={**step.gauges, **seen})
        del self._history[:-64]  # a resumed stage read all of it
        before = {f.rule for f in findings(self._history, h.stage)}
        self._history.append(step)
        new = [f for f in findings(self._history, h.stage) if f.rule not in before]
        return replace(step, notes=(*step.notes, *warned, *(f"rule {f.rule}: {f.message}" for f in new)))

    # --- inside a step ---------------------------------------------------------------------------------------------

    def rolled_out(self, h: House, asked: Asked) -> None:
        """What was played is what the engine said, by the weights of now, for tasks that may be trained on; and not too much went unjudged."""
        self._index += 1
        self._played, self._groups = asked.played, asked.groups
        engine = h.sync.sampler.gauges()
        masks_cover_what_was_said(asked.played, int(engine["engine/tokens"].sum))
        self._gauges = merge(self._gauges, engine)
        said_by_these_weights(asked.played, h.trainer.version)
        stops_are_true(asked.played, h.sampling.stop_ids or (), h.sampling.max_tokens)
        failures_stay_out(asked.played)
        no_held_out_task(asked.played, self._held, sameness(h))
        self.never_asked_before(asked.played)
        self._walk += [g.task.id for g in asked.played][: WALK - len(self._walk)]
        in_order_of_the_file(self._walk, h.prompts.source)
        if h.stage.algorithm.filter == "mixed":
            filter_reads_outcomes(asked.groups, asked.refused)
        if not h.stage.oversample:
            apart = unmeasured(h.run.model.dtype, h.sampling.temperature).worst
            self._gauges = merge(self._gauges, bet_on_siblings(self.bets.siblings, asked.played, apart))
        self._enough_judged(h, asked)

    def never_asked_before(self, played: Sequence[Group]) -> None:
        """Every (task, visit) is asked once in a stage: its random numbers belong to it alone."""
        for g in played:
            if (g.task.id, g.visit) in self._asked_before:
                raise InvariantError(
                    f"task {g.task.id!r} is asked a second time as visit {g.visit}: its answers would repeat the random numbers of the first. "
                    "Task ids must be unique, and the walk through the prompts must not turn back"
                )
            self._asked_before.add((g.task.id, g.visit))

    def _enough_judged(self, h: House, asked: Asked) -> None:
        episodes = [e for g in asked.played for e in g.episodes]
        unjudged = sum(e.reward is None for e in episodes)
        if unjudged > h.stage.max_failed * len(episodes):
            raise RewardError(
                f"{unjudged} of {len(episodes)} samples of this step could not be judged: {unjudged_words(asked.played)}. They are no wrong answers, so they were "
                f"left out, and more than {h.stage.name}.max_failed={h.stage.max_failed:g} of a step is too many to go on. Mend "
                f"{', '.join(r.function for r in h.run.env.rewards) or 'the environment'}, then resume: posttrain run --resume {h.book.folder}"
            )

    def unjudged(self, asked: Asked) -> tuple[str, ...]:
        """What could not be judged in this step, where it is of a kind that the last 64 steps did not have."""
        episodes = [e for g in asked.played for e in g.episodes]
        now = {n for n in components(episodes) if n.startswith("failed/")}
        now |= {"rollout/abstained"} if any(e.reward is None and not failed(e.verdicts) for e in episodes) else set()
        known = {n for s in self._history[-64:] for n, g in s.gauges.items() if g.sum and n in now}
        if not now - known:
            return ()
        return (
            f"{sum(e.reward is None for e in episodes)} of {len(episodes)} samples could not be judged: {unjudged_words(asked.played)}. They are left out, as no "
            "wrong answers; rollout/failed and rollout/abstained count them from here on",
        )

    def scored(self, h: House, groups: Sequence[ScoredGroup]) -> None:
        """Before credit: nobody was lost, the sampler draws as it says, the reference stands; in the first step rho = 1 and no distance yet."""
        everyone_is_scored(self._groups, groups)
        if h.reference is not None:
            reference_unmoved(h.reference, h.reference_digest)
        if self._index <= 16 or self._index % 8 == 0:
            self._probe(h)
        if due(self._index):
            mine = opinions(h.stage.algorithm, groups, max_tokens=h.sampling.max_tokens, ema=h.memory.ema)
            self._books = None if mine is None else Books(h.stage.algorithm, mine, h.stage.minibatches, h.sampling.max_tokens)
        episodes = [e for g in groups for e in g.episodes]
        if not self._fresh or not episodes:
            return
        self._fresh = False
        segments = [s for e in episodes for s in e.episode.segments]
        packed = Packed.of(segments, [i for i, e in enumerate(episodes) for _ in e.episode.segments])
        learner = h.learner.score(packed)
        version = np.concatenate([s.version[s.mask] for s in segments])
        mu = np.concatenate([s.logp[s.mask] for s in segments])
        own, dtype = version == h.trainer.version, h.run.model.dtype
        exact = lambda: h.learner.exact(packed)  # noqa: E731
        self._gauges = merge(self._gauges, sampler_agrees(packed, mu, learner, own, dtype=dtype, exact=exact, text=h.text))
        band = noise_band(h.stage.algorithm, mu[own], learner[own], np.unique(packed.sequence_M[own], return_inverse=True)[1], dtype)
        self._gauges = merge(self._gauges, band)
        if h.reference is not None and episodes[0].reference is not None:
            reference = np.concatenate([x for e in episodes for x in e.reference or ()])
            if h.own_reference:
                no_distance_yet(learner, reference, dtype, exact, packed.sampling.temperature)

    def _probe(self, h: House) -> None:
        """Whether some of the step's tokens, whatever became of them, were drawn as the engine says.

        They are of the first groups asked, of which there are always as many: how many others are asked, and which pass the
        filter, hangs on what was said.
        """
        episodes = [e for g in self._played[: h.stage.prompts] for e in g.episodes]
        first, dtype = self._index * 7 % len(episodes), h.run.model.dtype
        if h.sync.sampler.draws_by_place:
            if (looked := look(episodes, first)) is None:
                return
            uniform = uniforms(looked, h.run.seed, h.stream)
            seen = drawn_again(looked, h.learner.odds(looked.packed), uniform, lambda: noise(dtype, h.learner, looked.packed), h.text)
        elif h.stage.oversample:
            return
        else:
            odds = lambda packed: h.learner.odds(packed, TEMPERATURES)  # noqa: E731
            cheap, believed = dtype == "float32", unmeasured(dtype, h.sampling.temperature).worst
            apart = lambda packed: believed if cheap else noise(dtype, h.learner, packed)  # noqa: E731
            seen = bet_on_answers(self.bets.draws, episodes, first, odds, apart)
        self._gauges = merge(self._gauges, seen)

    def observer(self, h: House, minibatch: Minibatch) -> Callable[[Batch, np.ndarray], None] | None:
        """On the first optimizer step after a push, every token the current weights said has rho = 1."""
        if not minibatch.first:
            return None
        version = h.trainer.version

        def observe(batch: Batch, learner_M: np.ndarray) -> None:
            fresh = batch.version_M == version
            exact = lambda: h.learner.exact(batch)  # noqa: E731
            seen = sampler_agrees(batch, batch.logp_mu_M, learner_M, fresh, dtype=h.run.model.dtype, exact=exact, text=h.text)
            self._gauges = merge(self._gauges, seen)

        return observe

    @contextmanager
    def first_move(self, h: House, batch: Batch) -> Iterator[None]:
        """Around an optimizer step: second opinions on the batch and on its gradient where they are due. In the first step of the
        stage that carries credit whatever has a gradient moves, as far as the optimizer's settings say and no further.

        Without credit there may be nothing to follow: the gradient of a KL pull is 0 at the reference itself.
        """
        if self._books is not None:
            self._books.check(batch)
        first = not self._moved and bool(np.any(batch.advantage_M))
        lr, config = h.trainer.optimizer.lr, h.stage.optimizer
        with ExitStack() as stack:
            update = config if first else None
            heard = stack.enter_context(listening(h.trainer, update=update)) if first or due(self._index) else None
            yield
        if heard is None:
            return
        if due(self._index):
            self._gauges = merge(self._gauges, loss_agrees(h.stage.algorithm, batch, heard))
        if heard.handed is None:
            return
        seen = moved(heard.handed, h.trainer.trained(), lr)
        self._gauges = merge(self._gauges, seen)
        self._moved = bool(seen)
        if heard.handed.expected:
            agreed = update_agrees(config, heard.handed, h.trainer.trained(), h.trainer.optimizer.state_tensors())
            self._gauges = merge(self._gauges, agreed)


def sameness(h: House) -> Callable[[Task], Hashable]:
    """When two tasks are the same: as the environment says, else where their prompts are."""
    return getattr(h.rollout.environment, "key", None) or (lambda task: repr(task.prompt))


def notes(asked: Asked, credit: Credit, wanted: int) -> tuple[str, ...]:
    """Plain words for a step that learned little or nothing."""
    out: list[str] = []
    if len(asked.groups) < wanted:
        out.append(
            f"only {len(asked.groups)} of {wanted} groups passed the filter after asking for {len(asked.played)}; "
            "the tasks are too easy or too hard for this policy (raise refill, or change the tasks)"
        )
    rewards = sorted({f"{r:g}": float(r) for g in credit.groups for r in g.group.rewards}.items(), key=lambda row: row[1])
    shown = ", ".join(text for text, _ in rewards[:4])
    if credit.groups and all(g.silent for g in credit.groups):
        out.append(f"no group has spread (all siblings agree; rewards seen: {shown}), so this step carries no credit")
    elif credit.groups and same_outcome([e for g in credit.groups for e in g.group.judged]):
        out.append(f"every sample got the same reward ({shown}), so nothing in this step tells good from bad")
    return tuple(out)


def unjudged_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups no episode of which could be judged: they reach no credit, and the record keeps them."""
    return tuple(g for g in groups if not g.judged)
