"""The stage that learns from preferences between its own samples: ask, judge, pair, one optimizer step, push."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Step, merge
from posttrain.core.ports import Reference
from posttrain.core.scored import Credit
from posttrain.core.stop import StepNumber
from posttrain.core.streams import REFERENCE, START
from posttrain.diagnose.gauges.rollout_gauges import rollout_gauges
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.episode_conversation import Player
from posttrain.role.events import PlayedEvent
from posttrain.role.roles import OnlineRoles
from posttrain.stages.loop import AskAndLearn, Driver
from posttrain.stages.preference.sampled_pairs import batch_of_pairs, sampled_pairs
from posttrain.stages.progress import StageState
from posttrain.stages.role_parts import frozen_start, same_reference, sampling_parts
from posttrain.stages.training_step import DataBatch, learn_from, learn_nothing


@dataclass
class OnlineState(StageState):
    """State that the next step needs of the steps before it."""

    cursor: int = 0
    """Tasks that were asked so far."""
    running: dict[str, float] = field(default_factory=dict[str, float])
    """Moving averages of the algorithm."""


class OnlineDriver(Driver[OnlinePreference, OnlineState, Experience], stage=OnlinePreference, state=OnlineState):
    """Learns from pairs of its own samples."""

    measures_before = True

    async def open(self, checkpoint: Path | None) -> AskAndLearn[Experience]:
        parts, stage, rollout = self.parts, self.stage, self.setting.rollout
        parts.say(
            f"{stage.name}: {stage.algorithm.name} ({stage.algorithm.paper}); {stage.prompts} prompts x"
            f" {stage.samples} samples = {stage.prompts * stage.samples} episodes a step, at most {stage.pairs} pairs"
        )
        reference = self._reference(checkpoint)
        opponent = None
        if stage.share is not None:
            assert reference is not None  # a draw with an opponent reads it
            opponent = parts.oppose(reference, stage.share)
            # The siblings `stage.opposed` of each prompt are the opponent's completions; the others are the policy's.
            player = Player(opponent.sampler, rollout.dialogue, parts.sampling(stage))
            rollout = replace(rollout, opponents=dict.fromkeys(stage.opposed, player))
        self.roles = OnlineRoles(
            **sampling_parts(self, self.state.cursor, rollout), reference=reference, opponent=opponent
        )
        await parts.publish()
        if opponent is not None:
            await opponent.follow(parts.version)
        await self.watch.begin(self.roles)
        return self._ask, self._learn

    async def _ask(self, index: int) -> Experience:
        roles, stage, version = self.roles, self.stage, self.trainer.version
        request = RolloutRequest(
            groups=stage.prompts, siblings=stage.samples, at=StepNumber(index, stage.steps), most=1
        )
        with self.clock.of("rollout"):
            played, passed = await roles.rollout.until(roles.prompts, request, roles.sampling, f"train/{stage.name}")
        return Experience(
            index, version, played, passed, stage.prompts, roles.sync.sampler.gauges(), roles.prompts.cursor
        )

    async def _learn(self, e: Experience) -> Step:
        """One optimizer step on the pairs of an experience. A step without a pair changes nothing."""
        roles, a = self.roles, self.stage.algorithm
        roles.watch.emit(PlayedEvent(e))
        pairs_of_step = sampled_pairs(e.groups, a, roles.place)
        played = merge(rollout_gauges(e, Credit((), 0.0)), e.engine, pairs_of_step.gauges())
        if self.parts.run.record_episodes:
            # Also in a step without a pair: the record has every answer.
            with self.clock.of("book"):
                self.parts.book.write_episodes(self.stage.name, e.index, Credit((), 0.0), e.groups)
        if not pairs_of_step.pairs:
            note = f"no prompt gave a pair: {pairs_of_step.tied} were judged alike, {pairs_of_step.unjudged} not judged"
            return await learn_nothing(roles, e.index, played, (note,))
        batch = batch_of_pairs(pairs_of_step.pairs, a)
        with self.clock.of("score"):
            if a.reads_reference:
                assert roles.reference is not None
                batch = batch.having({REFERENCE: roles.reference.score(batch)})
            if a.reads_start:
                batch = batch.having({START: roles.learner.score(batch)})
            batch, self.state.running = prepared(a, batch, self.state.running)
        step = await learn_from(roles, DataBatch(e.index, batch), PreferenceLoss(a), "completion", sampled=played)
        with self.clock.of("sync"):
            await roles.sync.follow(self.trainer.version)
            if roles.opponent is not None:
                # The opponent is a mixture with the policy, so it gets the policy's weights too.
                await roles.opponent.follow(self.trainer.version)
        return step

    def remember(self, asked: Experience, step: Step) -> Step:
        self.state.cursor = asked.walked
        return step

    def _reference(self, checkpoint: Path | None) -> Reference | None:
        """Returns the model that the policy is compared with: a named model, or the policy as the stage began."""
        parts, stage = self.parts, self.stage
        if not stage.algorithm.reads_reference:
            return None
        if stage.reference is not None:
            return same_reference(self, parts.teacher(stage.reference))
        return frozen_start(self, checkpoint)
