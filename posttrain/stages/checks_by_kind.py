"""The checks that observe a stage, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.checks.data_checks import TaskCheck
from posttrain.checks.judging.generative_judge_checks import JudgingCheck, VotesCheck
from posttrain.checks.judging.reward_model_scores import RewardModelCheck
from posttrain.checks.judging.step_label_checks import StepJudgeCheck, StepLabelCheck
from posttrain.checks.judging.verdict_checks import EvaluationCheck, VerifierCheck
from posttrain.checks.learning.credit_checks import CreditCheck
from posttrain.checks.learning.expert_balance_checks import BalanceCheck
from posttrain.checks.learning.expert_checks import ExpertsCheck
from posttrain.checks.learning.gradient_and_update_checks import FrozenCheck, UpdateCheck
from posttrain.checks.learning.hint_checks import HintCheck
from posttrain.checks.learning.implicit_reward_checks import ImplicitCheck
from posttrain.checks.learning.loss_checks import LossCheck
from posttrain.checks.learning.precision_checks import ScaleCheck, scale_was_checked
from posttrain.checks.live_rules import LiveRules, PhasePeaks
from posttrain.checks.resume_checks import OptimizerResumeCheck, RestoreCheck, ResumeCheck
from posttrain.checks.sampling.policy_change import ChangeGauges
from posttrain.checks.sampling.sampler_checks import SamplerCheck
from posttrain.checks.sampling.sampler_draws import Bets, DrawsCheck
from posttrain.checks.sampling.stale_logprobs import FreshCheck, ProbeCheck
from posttrain.checks.sampling.staleness_checks import AheadCheck, ReplayCheck
from posttrain.checks.stage_history import StageHistory
from posttrain.config.run import Reinforce, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.gauge import Step
from posttrain.role.events import Observer, Observers
from posttrain.stages.preference.online_checks import OnlineLossCheck, OpponentCheck, SampledPairCheck
from posttrain.stages.preference.preference_data import JudgementCheck
from posttrain.stages.preference.preference_loss_checks import PreferenceLossCheck
from posttrain.stages.preference.preference_reference import ReferenceCheck
from posttrain.stages.rejection.rejection_checks import RejectionCheck, RoundVerifierCheck
from posttrain.stages.reward_model.reward_model_checks import RankingCheck
from posttrain.stages.supervised.imitation_checks import ImitationCheck


def reinforcement(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a reinforcement stage, in the order in which they get events."""
    # `steps` is empty where the stage begins. In a resumed one, checks made only once look here whether they passed.
    history, bets = StageHistory(steps), Bets.of(kept.get("bets"))
    return [
        ResumeCheck(history),
        LossCheck(),
        *updates(steps),
        CreditCheck(),
        ImplicitCheck(),
        SamplerCheck(fresh=not steps),
        ExpertsCheck(),
        BalanceCheck(),
        HintCheck(),
        TaskCheck(),
        # None: the stage begins here. {}: it is resumed, and its checkpoint has no state of this check.
        AheadCheck(kept.get("ahead", {}) if steps else None),
        ReplayCheck(kept.get("replayed", {}) if steps else None),
        FreshCheck(bets),
        DrawsCheck(bets),
        ProbeCheck(bets),
        VerifierCheck(history),
        RewardModelCheck(),
        JudgingCheck(),
        VotesCheck(),
        StepJudgeCheck(),
        ChangeGauges(),
        LiveRules(history),
    ]


def updates(steps: Sequence[Step], always: bool = False) -> list[Observer]:
    """The checks of every stage that trains. `always`: every step has something to learn, so the
    first one has shown that weights move."""
    moved = bool(steps) if always else any("canary/moved" in s.gauges for s in steps)
    return [UpdateCheck(moved=moved), ScaleCheck(done=scale_was_checked(steps)), FrozenCheck()]


def imitation(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a supervised stage."""
    return [*updates(steps, always=True), ImitationCheck(first=not steps), JudgingCheck()]


def ranking(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that trains a reward model."""
    return [*updates(steps, always=True), RankingCheck(first=not steps)]


def labels(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that labels steps of its own answers."""
    return [StepLabelCheck()]


def preference(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that learns from preferences."""
    return [
        OptimizerResumeCheck(StageHistory(steps)),
        JudgementCheck(),
        ReferenceCheck(first=not steps),
        PreferenceLossCheck(kept.get("preference", {}) if steps else None),
        *updates(steps),
    ]


def online(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that learns from preferences between its own samples."""
    history = StageHistory(steps)
    # `fresh=False`, here and in `rejection`: what it compares comes with a ScoredEvent, and these stages emit none.
    return [
        OptimizerResumeCheck(history),
        SampledPairCheck(),
        OpponentCheck(),
        ReferenceCheck(first=not steps),
        OnlineLossCheck(),
        *updates(steps),
        SamplerCheck(fresh=False),
        TaskCheck(),
        VerifierCheck(history),
        LiveRules(history),
    ]


def rejection(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that imitates the best of its own samples."""
    history = StageHistory(steps)
    return [
        *updates(steps),
        SamplerCheck(fresh=False),
        TaskCheck(),
        RejectionCheck(history, kept.get("rejection", {}).get("start", "") if steps else ""),
        RoundVerifierCheck(history),
        LiveRules(history),
    ]


def of_run() -> Observers:
    """The checks of events between steps, such as evaluations and resumes; they live over all stages."""
    return Observers([RestoreCheck(), EvaluationCheck()])


OF: dict[type, Callable[[Sequence[Step], Mapping[str, Any]], list[Observer]]] = {
    Reinforce: reinforcement,
    Supervised: imitation,
    Preference: preference,
    RewardModel: ranking,
    OnlinePreference: online,
    Rejection: rejection,
    StepLabeling: labels,
}
"""The function that makes a stage's checks, by its type. Stages of other, underived types have only `PhasePeaks`."""


def checks_of(stage: Stage, steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of `stage`, which has taken these steps already. `kept`: the observers' state in a checkpoint."""
    # A derived stage type has the checks of the nearest kind that it derives from.
    kind = next((k for k in type(stage).__mro__ if k in OF), None)
    return [PhasePeaks(), *([] if kind is None else OF[kind](steps, kept))]


def observers(stage: Stage, steps: Sequence[Step], kept: Mapping[str, Any]) -> Observers:
    """The checks of `stage` (`checks_of`) joined into one `Observers`."""
    return Observers(checks_of(stage, steps, kept))
