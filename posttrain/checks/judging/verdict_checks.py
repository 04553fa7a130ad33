"""Checks that verdicts can be learned from: failed ones give no reward, few are unjudged, and verdicts repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.checks.judging.rejudge import RejudgedAnswers
from posttrain.checks.sampling.sampler_checks import said_by_these_weights
from posttrain.checks.stage_history import StageHistory
from posttrain.config.run import Run
from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Step
from posttrain.core.measure.right import Right
from posttrain.core.stop import StepNumber
from posttrain.core.types import Group
from posttrain.core.verdict import Judged, State, failed, outcome
from posttrain.diagnose.gauges.rollout_gauges import components, unjudged_words
from posttrain.role.events import EvaluatedEvent, Event, Observer, ObserverReport, PlayedEvent
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.roles import JudgedRoles
from posttrain.system.errors import InvariantError, RewardError
from posttrain.system.shell import command_line


def failures_stay_out(groups: Sequence[Group]) -> None:
    """An episode with a verdict that failed on our side has no reward."""
    for g in groups:
        for e in g.episodes:
            # A source that is only measured, or scores single steps, may fail: it is no part of the reward.
            broken = [j for j in e.verdicts if j.counts and j.verdict.state is State.FAILED]
            if broken and e.reward is not None:
                raise InvariantError(
                    f"task {g.task.id!r}: source {broken[0].source!r} failed ({broken[0].verdict.why}) and the episode"
                    f" still has reward {e.reward:g}. What nobody could judge leaves baseline and batch; it is no wrong"
                    " answer"
                )


def enough_judged(
    what: str, groups: Sequence[Group], run: Run, stage: Any, folder: Path, figure: Literal["reward", "figure"]
) -> None:
    """RewardError where more than the share `max_failed` of the samples could not be judged.

    Args:
        what: names the samples in the message.
        figure: the property of an episode that is None where it could not be judged.
    """
    episodes, rewards = [x for g in groups for x in g.episodes], run.env_of(stage).rewards
    unjudged = sum(getattr(x, figure) is None for x in episodes)
    if unjudged <= stage.max_failed * len(episodes):
        return
    # Where services judge, no code of this run changes when the reward is mended. Else the change must be accepted.
    remote = rewards and all(r.judge_url for r in rewards)
    again = command_line("run", "--resume", folder, *([] if remote else ["--accept-changed"]))
    why = f"{unjudged_words(groups)}. They are no wrong answers, so they were left out, and more than"
    raise RewardError(
        f"{unjudged} of {len(episodes)} {what} could not be judged: {why} {stage.name}.max_failed={stage.max_failed:g}"
        " is too many to go on. Mend"
        f" {', '.join(dict.fromkeys(r.function for r in rewards)) or 'the environment'}, then resume: {again}"
    )


class VerifierCheck(Observer):
    """Failed verdicts stay out of baseline and batch, are noted when they start, and are few; verdicts repeat."""

    def __init__(self, history: StageHistory) -> None:
        self._history = history
        self._rejudged = RejudgedAnswers()
        self._experience: Experience | None = None

    async def begin(self, roles: JudgedRoles) -> None:
        self._rejudged.text = roles.text
        await self._rejudged.begin(roles.rollout.environment, self._history.taken)

    def on_event(self, roles: JudgedRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent):
            return None
        e = event.experience
        failures_stay_out(e.played)
        enough_judged("samples of this step", e.played, roles.run, roles.stage, roles.book.folder, "reward")
        # Kept for `after`: judging again calls the environment, and only that hook can wait for it.
        self._experience = e
        return ObserverReport(notes=self._unjudged(e))

    async def after(self, roles: JudgedRoles, step: Step) -> ObserverReport | None:
        """Judge some answers again, and count the sources that gave only 0."""
        if (e := self._experience) is None:
            return None
        with roles.clock.of("check"):
            notes = await self._rejudged.after(
                roles.rollout.environment, e.played, StepNumber(step.index, roles.stage.steps)
            )
        return ObserverReport({**self._rejudged.mute(e.played), "rollout/walked": Gauge(e.walked, 1)}, notes)

    def _unjudged(self, e: Experience) -> tuple[str, ...]:
        """A note on what could not be judged in this step, if it is of a kind that the last 64 steps did not have."""
        episodes = [x for g in e.played for x in g.episodes]
        now = {n for n in components(episodes) if n.startswith("failed/")}
        # Where all sources abstain there is no reward and no failure, so `components` has no name for it.
        now |= {"rollout/abstained"} if any(x.reward is None and not failed(x.verdicts) for x in episodes) else set()
        # A gauge that is 0 in a step is no news: a kind counts as known only where it happened. 64 steps are what
        # `StageHistory.trim` leaves.
        known = {n for s in self._history.steps[-64:] for n, g in s.gauges.items() if g.sum and n in now}
        if not now - known:
            return ()
        return (
            (
                f"{sum(x.reward is None for x in episodes)} of {len(episodes)} samples could not be judged:"
                f" {unjudged_words(e.played)}. They are left out, as no wrong answers; rollout/failed and"
                " rollout/abstained count them from here on"
            ),
        )


def measured_right(report: EvaluationReport) -> None:
    """Held-out accuracy, mean reward and pass@k, counted a second way from the verdicts themselves."""
    # (judged answers, right ones) of each question.
    counts: list[tuple[int, int]] = []
    means: list[float] = []
    by_question: dict[str, list[tuple[float, Right]]] = {}
    # Rows that ask the same are one task: their answers are pooled, and the task counts once in the mean.
    for g in report.groups:
        raw = [(r, e.right) for e in g.episodes if (r := _measured(e.verdicts)) is not None]
        by_question.setdefault(g.task.asked, []).extend(raw)
    for raw in by_question.values():
        if raw:
            means.append(math.fsum(r for r, _ in raw) / len(raw))
            counts.append((len(raw), sum(right.of(r) for r, right in raw)))
    if not means:
        return
    compared = {"mean reward": (report.reward.mean, math.fsum(means) / len(means))}
    # Where outcomes are grades that tell no share of right answers, there is no accuracy to compare.
    if report.accuracy.prompts:
        compared["accuracy"] = (report.accuracy.mean, math.fsum(c / n for n, c in counts) / len(counts))
    for k, s in report.pass_at.items():
        # 1 - C(n - c, k) / C(n, k) as a product: the chance that k of n answers, drawn without return, are all wrong.
        missed = [math.prod((n - c - i) / (n - i) for i in range(k)) for n, c in counts]
        compared[f"pass@{k}"] = (s.mean, 1 - math.fsum(missed) / len(missed))
    for name, (reported, counted) in compared.items():
        # Written so that a NaN fails.
        if not abs(reported - counted) <= 1e-9:
            raise InvariantError(
                f"held-out {name} is reported as {reported:.6g} and is {counted:.6g} when counted from the"
                f" {sum(n for n, _ in counts)} verdicts: unjudged samples must not count as wrong, and pass@k must be"
                " the unbiased estimate"
            )


def _measured(verdicts: Sequence[Judged]) -> float | None:
    """The weighted sum of the verdicts that are only measured; if there is none, the reward. None: unjudged."""
    measured = [j for j in verdicts if j.measured]
    if not measured:
        return outcome(verdicts)
    # One source without a score leaves the answer unmeasured: a sum of the others would be another number.
    scores = [j.verdict.score for j in measured]
    return None if None in scores else math.fsum(j.weight * (j.verdict.score or 0.0) for j in measured)


class EvaluationCheck(Observer):
    """Held-out answers were sampled with the weights that are evaluated, and the report agrees with their verdicts."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        if isinstance(event, EvaluatedEvent):
            said_by_these_weights(event.report.groups, (event.version,))
            measured_right(event.report)
