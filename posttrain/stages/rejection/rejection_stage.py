"""The rejection sampling stage: in rounds it samples, keeps the best samples, and imitates them. The first step of a
round samples ("asks"), and each step imitates a part of what was kept. A round may also select again from the samples
before, with another threshold (an improvement)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.stages.keep_rule import Best, TopShare
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.stage import starts
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core import abilities
from posttrain.core.batch import Batch
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, Step, merge
from posttrain.core.scored import Credit
from posttrain.core.stop import StepNumber
from posttrain.core.types import Group
from posttrain.diagnose.gauges.rollout_gauges import rollout_gauges
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.events import KeptEvent, PlayedEvent, RegeneratedEvent
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.judges.regenerate import RegeneratedAnswer, Regenerator, regenerated_gauges
from posttrain.role.judges.step_completion import StepLabeler, TokenEnds
from posttrain.role.judges.step_judge import StepJudge
from posttrain.role.learning.demonstrations import demonstrated, imitated, imitating
from posttrain.role.learning.rejection_selection import (
    Candidate,
    RoundSamples,
    candidates_of,
    drawn,
    hinted_task,
    read,
    select,
    steps_of,
    to_ask_again,
    write,
)
from posttrain.role.roles import RejectionRoles, stream_of
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.progress import StageState
from posttrain.stages.reinforce.reinforce_stage import productive_band
from posttrain.stages.role_parts import data_parts, sampling_parts
from posttrain.stages.run_parts import load_kept
from posttrain.stages.training_step import DataBatch, learn_from, learn_nothing
from posttrain.system.concurrency import together
from posttrain.system.errors import ConfigError


@dataclass
class RejectionState(StageState):
    """The state of the stage in its rounds. The candidates of a round are a file of the run folder."""

    cursor: int = 0
    """Tasks that were asked so far."""
    round: int = 0
    """Rounds begun."""
    asked: int = 0
    """The round that sampled the candidates in use, from 1; 0: none has sampled yet."""
    improvement: int = 0
    """How many earlier rounds imitated from the same candidates."""
    position: int = 0
    """Steps taken in this round."""
    planned: int = 0
    """Steps of this round."""


@dataclass(frozen=True, eq=False)
class RejectionWork:
    """The data that a step learns from. Only the step that opens a round can have samples: `plain`, `hinted` (prompts
    with their answer as a hint) and `regenerated` (wrong answers said anew from their first wrong step)."""

    index: int
    opens: bool = False
    plain: Experience | None = None
    hinted: Experience | None = None
    regenerated: tuple[RegeneratedAnswer, ...] = ()
    engine: Gauges = field(default_factory=Gauges)
    """The engine's counters of the regeneration."""


class RejectionDriver(Driver[Rejection, RejectionState, RejectionWork], stage=Rejection, state=RejectionState):
    """Imitates the best of its own samples."""

    measures_before = True

    def measured_before(self, report: EvaluationReport | None) -> None:
        if report is not None:
            self.parts.say(productive_band(report).replace("before RL", "before rejection sampling"))

    async def open(self, checkpoint: Path | None) -> AskAndLearn[RejectionWork]:
        parts, stage, s = self.parts, self.stage, self.state
        self._say()
        fields = data_parts(self) | sampling_parts(self, s.cursor, self.setting.rollout)
        self.roles = RejectionRoles(**fields, regenerator=self._regenerator())
        self._asked = RoundSamples((), 0, 0)
        self._kept: tuple[Candidate, ...] = ()
        await parts.publish()
        await self.watch.begin(self.roles)
        # Resumed inside a round: its candidates are read from the file and selected again, with the same result. The
        # weights have changed since the round began. So the event says `selects=False`, and the check does not compare
        # them.
        if s.asked:
            self._asked = read(parts.book.kept(self._file))
            self._kept = select(self._asked.candidates, stage.method, s.improvement).kept
            self.watch.emit(KeptEvent(s.round, s.improvement, self._kept, selects=False))
        return self._ask, self._learn

    def _say(self) -> None:
        stage, m = self.stage, self.stage.method
        rounds = "" if stage.rounds is None else f" in {stage.rounds} rounds"
        extra = "; what was answered wrongly is asked again with the answer as a hint" if m.rationalise else ""
        if m.regenerate is not None:
            extra += "; where nothing is kept, wrong answers are said anew from their first wrong step"
        general = f"; {stage.general:.0%} of a batch are '{stage.style}' demonstrations" if stage.general else ""
        self.parts.say(
            f"{stage.name}: {m.label} ({m.paper}){rounds}; {stage.prompts} prompts x {stage.siblings} samples a round,"
            f" kept: {m.keep.words()}{', once each' if m.distinct else ''}; {stage.epochs} passes of {stage.batch} a"
            f" step, from the {'first' if m.weights == 'start' else 'last'} weights{extra}{general}"
        )
        vouched = abilities.declared(self.setting.environment).vouched
        if isinstance(m.keep, Best | TopShare) and m.keep.above is None and vouched:
            self.parts.say(
                f"{stage.name}: {m.label} keeps the best of each prompt, also where all are wrong. Right answers are"
                f" known here: {stage.name}.method.keep.above=0 leaves such prompts out"
            )

    def _regenerator(self) -> Regenerator | None:
        """Returns the regenerator that says wrong answers anew.

        Raises:
            ConfigError: a model judges the answers, and completions are judged by the environment alone.
        """
        regenerate, stage, rollout = self.stage.method.regenerate, self.stage, self.setting.rollout
        if regenerate is None:
            return None
        by_steps = [j for j in rollout.judges if isinstance(j, StepJudge | GenerativeStepJudge)]
        # A judge that only scores steps pays nothing. So a completion's reward is whole without it.
        free = {id(j) for j in by_steps if j.reward.steps == "score"}
        paying = [j.name for j in rollout.judges if id(j) not in free]
        if paying:
            raise ConfigError(stage.judged_alone(paying[0]))
        sampling = self.parts.sampling(stage)
        labeling = StepLabeling(name=stage.name, separator=regenerate.separator, completions=regenerate.completions)
        ends = TokenEnds(rollout.dialogue("").text)
        return Regenerator(StepLabeler(rollout, labeling, sampling, ends, stream_of(stage)), regenerate)

    @property
    def _file(self) -> str:
        """Name under which the run keeps the candidates of the round that sampled last."""
        return f"{self.stage.name}-asked-{self.state.asked:04d}"

    async def _ask(self, index: int) -> RejectionWork:
        s, m = self.state, self.stage.method
        # In the middle of a round: its candidates are imitated, and nothing is sampled.
        if s.position < s.planned:
            return RejectionWork(index)
        # A new round from the same candidates, with the next threshold (ReST, 2308.08998).
        if self._kept and s.improvement + 1 < m.improvements:
            return RejectionWork(index, opens=True)
        with self.clock.of("rollout"):
            plain = await self._play(index)
            hinted = await self._play_hinted(plain) if m.rationalise else None
            if (regenerator := self.roles.regenerator) is None:
                return RejectionWork(index, True, plain, hinted)
            regenerated = await regenerator.regenerate(to_ask_again(plain.played, m.keep))
        return RejectionWork(index, True, plain, hinted, regenerated, self.roles.sync.sampler.gauges())

    async def _play(self, index: int) -> Experience:
        roles, stage = self.roles, self.stage
        request = RolloutRequest(
            groups=stage.prompts, siblings=stage.siblings, at=StepNumber(index, stage.steps), most=1
        )
        played, passed = await roles.rollout.until(roles.prompts, request, roles.sampling, stream_of(stage))
        return self._experience(index, played, passed)

    async def _play_hinted(self, plain: Experience) -> Experience | None:
        """Samples the prompts without a completion to keep once more, with a hint; None: there are none."""
        roles, stage = self.roles, self.stage
        hint = abilities.hints(roles.environment)
        groups_and_prompts = [(g, hint(g.task)) for g in to_ask_again(plain.played, stage.method.keep)]
        tasks_and_visits = [
            (hinted_task(g.task, prompt), g.visit) for g, prompt in groups_and_prompts if prompt is not None
        ]
        if not tasks_and_visits:
            return None
        request = RolloutRequest(
            groups=len(tasks_and_visits), siblings=stage.siblings, at=StepNumber(plain.index, stage.steps)
        )
        groups = await together(
            [
                roles.rollout.group(task, visit, request, roles.sampling, f"{stream_of(stage)}/hinted")
                for task, visit in tasks_and_visits
            ]
        )
        return self._experience(plain.index, tuple(groups), (True,) * len(groups))

    def _experience(self, index: int, played: tuple[Group, ...], passed: tuple[bool, ...]) -> Experience:
        roles = self.roles
        engine, version = roles.sync.sampler.gauges(), self.trainer.version
        return Experience(index, version, played, passed, len(played), engine, roles.prompts.cursor)

    async def _learn(self, work: RejectionWork) -> Step:
        """One optimizer step on what the round kept. A round that kept nothing is a step that changes nothing."""
        roles, s, stage = self.roles, self.state, self.stage
        sampled, notes = await self._open_round(work) if work.opens else (Gauges(), ())
        # Nothing to imitate. `planned` is 0 then, so the next step asks again.
        if not self._kept:
            return await learn_nothing(roles, work.index, sampled, notes)
        with self.clock.of("learn"):
            candidates = drawn(self._kept, stage.own, s.position, (roles.run.seed, stage.name, s.round))
            batch = await self._batch(candidates, work.index)
        # `first=False`: what is imitated has no log-probs of the sampler to compare with (`imitation`).
        step = await learn_from(
            roles, DataBatch(work.index, batch), Likelihood(), "kept completion", sampled, first=False
        )
        with self.clock.of("sync"):
            await roles.sync.follow(self.trainer.version)
        return step

    async def _open_round(self, work: RejectionWork) -> tuple[Gauges, tuple[str, ...]]:
        """Begins a round: selects what it imitates, and loads the weights that it trains. Returns (gauges, notes)."""
        roles, s, m = self.roles, self.state, self.stage.method
        s.round, s.position = s.round + 1, 0
        sampled = self._take_in(work)
        # Before `select`, which reads it: with a rising rule each improvement has a higher threshold.
        s.improvement = 0 if work.plain is not None else s.improvement + 1
        selection = select(self._asked.candidates, m, s.improvement)
        self._kept, s.planned = selection.kept, steps_of(len(selection.kept), self.stage.own, self.stage.epochs)
        # In the first round the weights are still those that the stage started from.
        if self._kept and m.weights == "start" and s.round > 1:
            self._restart()
        # After the weights are loaded, since the check of this event compares them.
        roles.watch.emit(KeptEvent(s.round, s.improvement, self._kept))
        notes = () if self._kept else (nothing_kept(self.stage, self._asked, s.round),)
        return merge(sampled, selection.gauges(self._asked, s.round)), notes

    def _take_in(self, work: RejectionWork) -> Gauges:
        """Emits the events of the samples, writes their episodes, and keeps the candidates for a resumed run. Returns
        their gauges."""
        roles, s = self.roles, self.state
        if work.plain is None:
            return {}
        roles.watch.emit(PlayedEvent(work.plain))
        gauges = merge(rollout_gauges(work.plain, Credit((), 0.0)), work.plain.engine)
        hinted: tuple[Group, ...] = ()
        if work.hinted is not None:
            roles.watch.emit(PlayedEvent(work.hinted))
            hinted = work.hinted.played
            rewards = [e.reward for g in hinted for e in g.judged if e.reward is not None]
            gauges = merge(gauges, work.hinted.engine, {"reject/hint_reward": Gauge.of(rewards)})
        if roles.regenerator is not None:
            roles.watch.emit(RegeneratedEvent(work.index, work.regenerated))
            gauges = merge(gauges, work.engine, regenerated_gauges(work.regenerated))
        if self.parts.run.record_episodes:
            with self.clock.of("book"):
                groups = (*work.plain.played, *hinted)
                self.parts.book.write_episodes(self.stage.name, work.index, Credit((), 0.0), groups)
        self._asked = candidates_of(work.plain.played, hinted, work.regenerated)
        # Set before `keep`, since the name of the file (`_file`) depends on it.
        s.asked = s.round
        with self.clock.of("book"):
            self.parts.book.keep(self._file, partial(write, asked=self._asked))
        return gauges

    def _restart(self) -> None:
        """The weights that the stage started from, with a new optimizer."""
        parts, trainer = self.parts, self.trainer
        # The weights come first, since a new optimizer may copy them. The version rises, so that the engine does not
        # take these weights for the ones that it has.
        load_kept(parts, self.progress, starts(parts.run.stages, self.stage))
        trainer.version += 1
        trainer.optimizer = parts.optimize(self.stage.optimizer)

    async def _batch(self, candidates: list[Candidate], index: int) -> Batch:
        """The kept completions of a step, and its share of demonstrations behind them."""
        roles, stage = self.roles, self.stage
        segments = [s for c in candidates for s in c.segments]
        # For each segment the number of its completion: a completion of several turns may have several segments. The
        # numbers of the demonstrations come after those of the completions.
        sequence = [i for i, c in enumerate(candidates) for _ in c.segments]
        weights = [np.ones(sum(s.spoken for s in segments))]
        if (settings := imitating(stage)) is not None:
            demonstrations = await demonstrated(
                roles.environment,
                roles.renderer,
                roles.dialogue,
                settings,
                seed=roles.run.seed,
                step=index - 1,  # steps are counted from 1, minibatches of the data from 0
                context=roles.context,
            )
            demonstrations = demonstrations[: stage.shown_beside(len(candidates))]
            weights += [t.weight_M for t in demonstrations]
            sequence += [len(candidates) + i for i, t in enumerate(demonstrations) for _ in t.segments]
            segments += [s for t in demonstrations for s in t.segments]
        return imitated(segments, sequence, np.concatenate(weights))

    def remember(self, asked: RejectionWork, step: Step) -> Step:
        self.state.cursor = self.roles.prompts.cursor
        self.state.position += 1
        return step

    def enough(self, report: EvaluationReport | None) -> str:
        s, rounds = self.state, self.stage.rounds
        if rounds is not None and s.round >= rounds and s.position >= s.planned:
            return f"all {rounds} rounds"
        return super().enough(report)


def nothing_kept(stage: Rejection, asked: RoundSamples, round: int) -> str:
    """Returns the message about a round that kept nothing, with what to change."""
    m, name = stage.method, stage.name
    seen = f"{asked.judged} of {asked.judged + asked.unjudged} completions of {asked.prompts} prompts were judged"
    if not asked.judged:
        return f"round {round} kept nothing: {seen}. Mend what judges them; nothing was learned"
    if asked.cut > 0.5 * asked.judged:
        change = f"most were cut off: raise {name}.sampling.max_tokens (now {stage.sampling.max_tokens})"
    else:
        rule = f"lower {name}.method.keep.at" if m.keep.thresholds else f"lower {name}.method.keep.above"
        more = "" if m.rationalise else f", set {name}.method.rationalise=true where the environment has hints"
        if m.regenerate is None:
            more += f", set {name}.method.regenerate=4 where answers have steps"
        ask = f"ask more with {name}.siblings={4 * stage.siblings}"
        change = f"teach the policy more by imitation first, {ask}, {rule}{more}"
    return f"round {round} kept nothing ({m.keep.words()}): {seen}, {asked.cut} of them were cut off; {change}"
