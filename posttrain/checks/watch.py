"""Which checks observe a stage, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.checks.ahead import AheadCheck, ReplayCheck
from posttrain.checks.balance import BalanceCheck
from posttrain.checks.change import ChangeGauges
from posttrain.checks.credit import CreditCheck
from posttrain.checks.data import TaskCheck
from posttrain.checks.draws import Bets, DrawsCheck
from posttrain.checks.experts import ExpertsCheck
from posttrain.checks.fresh import FreshCheck
from posttrain.checks.frozen import FrozenCheck
from posttrain.checks.generative import JudgingCheck, VotesCheck
from posttrain.checks.hint import HintCheck
from posttrain.checks.history import StageHistory
from posttrain.checks.imitation import ImitationCheck
from posttrain.checks.live import LiveRules
from posttrain.checks.measured import EvaluationCheck
from posttrain.checks.outcomes import ImplicitCheck
from posttrain.checks.precision import ScaleCheck, scale_was_checked
from posttrain.checks.preference_data import JudgementCheck
from posttrain.checks.preference_loss import PreferenceLossCheck
from posttrain.checks.preference_online import OnlineLossCheck, OpponentCheck, SampledPairCheck
from posttrain.checks.preference_reference import ReferenceCheck
from posttrain.checks.probe_round import ProbeCheck
from posttrain.checks.ranking import RankingCheck
from posttrain.checks.rejection import RejectionCheck, RoundVerifierCheck
from posttrain.checks.resume import OptimizerResumeCheck, RestoreCheck, ResumeCheck
from posttrain.checks.reward_models import RewardModelCheck
from posttrain.checks.sampler import SamplerCheck
from posttrain.checks.stepwise import StepJudgeCheck, StepLabelCheck
from posttrain.checks.synthetic import LossCheck
from posttrain.checks.update import UpdateCheck
from posttrain.checks.verifier import VerifierCheck
from posttrain.core.gauge import Step
from posttrain.core.preference_stage import OnlinePreference, Preference
from posttrain.core.rejection import Rejection
from posttrain.core.reward_model import RewardModel
from posttrain.core.run import Reinforce, Supervised
from posttrain.core.stage import Stage
from posttrain.core.step_labels import StepLabeling
from posttrain.role.events import Observer, Observers


def reinforcement(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a reinforcement stage, in the order in which they get events."""
    history, bets = StageHistory(steps), Bets.of(kept.get("bets"))
    return [
        ResumeCheck(history),
        LossCheck(),
        UpdateCheck(moved=any("canary/moved" in s.gauges for s in steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
        CreditCheck(),
        ImplicitCheck(),
        SamplerCheck(fresh=not steps),
        ExpertsCheck(),
        BalanceCheck(),
        HintCheck(),
        TaskCheck(),
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


def imitation(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a supervised stage."""
    return [
        UpdateCheck(moved=bool(steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
        ImitationCheck(first=not steps),
        JudgingCheck(),
    ]


def ranking(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that trains a reward model."""
    return [
        UpdateCheck(moved=bool(steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
        RankingCheck(first=not steps),
    ]


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
        UpdateCheck(moved=any("canary/moved" in s.gauges for s in steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
    ]


def online(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that learns from preferences between its own samples."""
    history = StageHistory(steps)
    return [
        OptimizerResumeCheck(history),
        SampledPairCheck(),
        OpponentCheck(),
        ReferenceCheck(first=not steps),
        OnlineLossCheck(),
        UpdateCheck(moved=any("canary/moved" in s.gauges for s in steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
        SamplerCheck(fresh=False),
        TaskCheck(),
        VerifierCheck(history),
        LiveRules(history),
    ]


def rejection(steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of a stage that imitates the best of its own samples."""
    history = StageHistory(steps)
    return [
        UpdateCheck(moved=any("canary/moved" in s.gauges for s in steps)),
        ScaleCheck(done=scale_was_checked(steps)),
        FrozenCheck(),
        SamplerCheck(fresh=False),
        TaskCheck(),
        RejectionCheck(history, kept.get("rejection", {}).get("start", "") if steps else ""),
        RoundVerifierCheck(history),
        LiveRules(history),
    ]


def of_run() -> Observers:
    """The checks of what happens between steps, over all stages."""
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
"""By the type of the stage. A type that is not here, and derives from none that is, is not checked."""


def checks_of(stage: Stage, steps: Sequence[Step], kept: Mapping[str, Any]) -> list[Observer]:
    """The checks of `stage`.

    Args:
        steps: those the stage has taken already.
        kept: what a checkpoint stored of all observers.
    """
    kind = next((k for k in type(stage).__mro__ if k in OF), None)
    return [] if kind is None else OF[kind](steps, kept)


def observers(stage: Stage, steps: Sequence[Step], kept: Mapping[str, Any]) -> Observers:
    """The same as one."""
    return Observers(checks_of(stage, steps, kept))
