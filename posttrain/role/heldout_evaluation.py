"""Held-out evaluation: fixed tasks, fixed seeds, and intervals over prompts, since samples of one prompt correlate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from posttrain.config.run import Evaluation
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.measure.interval import Score
from posttrain.core.measure.right import Grades, Right
from posttrain.core.sampling import Sampling
from posttrain.core.types import Group, Task
from posttrain.core.verdict import figure_failed
from posttrain.diagnose.gauges.rollout_gauges import unjudged_words
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.rollout import Rollout
from posttrain.system.concurrency import together


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from c right ones of n (Chen et al. 2107.03374).

    >>> round(pass_at_k(10, 3, 5), 6)
    0.916667
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    # Of all k-subsets of the n samples C(n - c, k) hold no right one. The share of
    # wrong samples to the power k would be too high in the mean, since x^k is convex.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of one evaluation. Each score is over prompts.

    The outcome of an answer is what is paid; or what is measured, where something is measured and not paid
    (`Episode.figure`).
    """

    accuracy: Score
    """Share of answers that are right, which is pass@1. It has no prompts where outcomes are grades from which no
    share of right answers follows (`core.measure.right`)."""
    reward: Score
    """Mean raw outcome. It leads where outcomes are grades."""
    greedy: Score | None
    """Accuracy of one argmax answer a prompt; None if none was asked for."""
    greedy_reward: Score | None
    """Mean raw outcome of the argmax answers."""
    pass_at: dict[int, Score]
    """pass@k, by k; empty where there is no accuracy."""
    failed: int
    """Episodes without an outcome because a source broke."""
    abstained: int
    """Episodes without an outcome because sources abstained."""
    mean_tokens: float
    """Spoken tokens per episode."""
    truncated: float
    """Share of episodes that were cut off by a limit on tokens or time, or by the context (`Stop.cut`)."""
    groups: tuple[Group, ...]
    proxy: Score | None = None
    """Mean of what is paid, where the outcome is what is measured; None elsewhere, and where nothing is paid yet."""
    measures: Gauges = field(default_factory=dict[str, Gauge])
    """Other quantities that the environment measures (`core.abilities.Abilities.measures`)."""

    def __repr__(self) -> str:
        """The scores in one line. The episodes themselves are in `groups`."""
        scores = [f"{n} {g.mean:.4g}" for n, g in self.measures.items()]
        # Each is put in front of those before it, so the accuracy comes first.
        for name, score in (
            ("greedy reward", self.greedy_reward),
            ("mean reward", self.reward),
            ("accuracy", self.accuracy),
        ):
            scores[:0] = [f"{name} {score}"] if score is not None and score.prompts else []
        prompts = f", {self.reward.prompts} prompts" if self.reward.prompts else ""
        return f"EvaluationReport({'; '.join(scores) or 'nothing judged'}{prompts}, {self.unjudged} unjudged)"

    @property
    def unjudged(self) -> int:
        return self.failed + self.abstained

    @property
    def graded(self) -> bool:
        """True where outcomes are grades, not pass or fail. Then the mean reward leads."""
        return self.grades.graded

    @property
    def grades(self) -> Grades:
        return grades_of(self.groups)

    @property
    def unmeasured(self) -> str:
        """The reason why there is no score at all, namely why nothing could be judged; '' if something was."""
        if self.reward.prompts or not self.groups:
            return ""
        return unjudged_words(self.groups) or "what is measured abstained"

    @property
    def words(self) -> str:
        """Other quantities that the environment measures, for a line that people read; '' where it measures nothing."""
        return "".join(f"; {name.removeprefix('eval/')} {g.mean:.3f}" for name, g in self.measures.items())

    def gauges(self) -> Gauges:
        out = {"eval/accuracy": self.accuracy.gauge(), "eval/reward": self.reward.gauge()}
        if self.greedy is not None and self.greedy_reward is not None:
            out |= {"eval/greedy": self.greedy.gauge(), "eval/greedy_reward": self.greedy_reward.gauge()}
        if self.proxy is not None:
            out["eval/proxy"] = self.proxy.gauge()
        for k, s in self.pass_at.items():
            out[f"eval/pass_at_{k}"] = s.gauge()
        logged = merge(*(g.logged for g in self.groups))
        return out | {
            **self.measures,
            **{f"eval/{name}": gauge for name, gauge in logged.items()},
            "eval/unjudged": Gauge(self.unjudged, 1),
            "eval/failed": Gauge(self.failed, 1),
            "eval/abstained": Gauge(self.abstained, 1),
            "eval/tokens": Gauge(self.mean_tokens, 1),
            "eval/truncated": Gauge(self.truncated, 1),
        }


async def evaluate(
    rollout: Rollout, tasks: Sequence[Task], sampling: Sampling, settings: Evaluation
) -> EvaluationReport:
    """Sample every task `settings.samples` times, and once greedily if `settings.greedy`.

    The seeds are the same in every evaluation, so runs can be compared prompt by prompt.
    """
    # Always the evaluation's own seed and visit 0: the same tasks get the same random numbers
    # in every evaluation. Nothing is learned from these episodes, so no top-k tokens are stored.
    fixed, sampling = replace(rollout, seed=settings.seed), replace(sampling, top=0)
    groups = await together(
        [fixed.group(t, 0, RolloutRequest(groups=1, siblings=settings.samples), sampling, "evaluation") for t in tasks]
    )
    greedy = None
    if settings.greedy:
        # Temperature and truncation do not change an argmax, and are set to their neutral values.
        argmax = replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        greedy = await together(
            [fixed.group(t, 0, RolloutRequest(groups=1, siblings=1), argmax, "greedy") for t in tasks]
        )
    measures = rollout.environment.abilities.measures
    return replace(report(groups, greedy), measures={} if measures is None else measures(groups))


def report(groups: Sequence[Group], greedy: Sequence[Group] | None) -> EvaluationReport:
    """The scores of played groups, by distinct task. Unjudged episodes are counted apart, never as wrong answers."""
    judged = _by_task(groups, figures)
    grades = grades_of(groups)
    right = grades.right
    # (judged samples, right ones) of each task. With grades that
    # tell no share of right answers there is no accuracy at all.
    solved = [(len(x), sum(map(right.of, x.tolist()))) for x in judged] if grades.tells else []
    # pass@k needs k judged samples of every task, so the task with the fewest decides which k are possible.
    most = min((n for n, _ in solved), default=0)
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= most} | ({most} if most else set()))
    episodes = [e for g in groups for e in g.episodes]
    broken = sum(figure_failed(e.verdicts) for e in episodes)
    greedy_judged = None if greedy is None else _by_task(greedy, figures)
    # `paid`: only where something is measured. Elsewhere the outcome is what is paid, and it would be reported twice.
    paid = _by_task([g for g in groups if any(e.truth is not None for e in g.episodes)], lambda g: np.array(g.rewards))
    return EvaluationReport(
        accuracy=Score.of([pass_at_k(n, c, 1) for n, c in solved]),
        reward=_rewards(judged, grades),
        greedy=None
        if greedy_judged is None
        else Score.of([right.share(x) for x in greedy_judged] if grades.tells else []),
        # One scale for greedy and sampled answers: for grades its ends are the smallest and the largest of all.
        greedy_reward=None if greedy_judged is None else _rewards(greedy_judged, grades | grades_of(greedy or ())),
        pass_at={k: Score.of([pass_at_k(n, c, k) for n, c in solved]) for k in ks},
        failed=broken,
        abstained=sum(e.figure is None and not figure_failed(e.verdicts) for e in episodes),
        mean_tokens=float(np.mean([e.spoken for e in episodes])) if episodes else math.nan,
        truncated=float(np.mean([e.stop.cut for e in episodes])) if episodes else math.nan,
        groups=tuple(groups),
        proxy=_rewards(paid, Grades.of(np.concatenate(paid), Right(None))) if paid else None,
    )


def _by_task(groups: Sequence[Group], numbers_of: Callable[[Group], np.ndarray]) -> list[np.ndarray]:
    """The numbers of the groups of each task, joined. Tasks without any number are left out."""
    by_task: dict[str, list[np.ndarray]] = {}
    for g in groups:
        # Rows that ask the same are one task, since their answers are
        # not independent: else the interval would be too narrow.
        by_task.setdefault(g.task.asked, []).append(numbers_of(g))
    return [x for each in by_task.values() if len(x := np.concatenate(each))]


def figures(group: Group) -> np.ndarray:
    """float64: the outcomes of the group's episodes (`Episode.figure`), without those that have none."""
    return np.array([x for e in group.episodes if (x := e.figure) is not None], np.float64)


def grades_of(groups: Sequence[Group]) -> Grades:
    """The grades of the groups' outcomes, with the rule of each episode for right answers."""
    return Grades.each((e.figure, e.right) for g in groups for e in g.episodes)


def _rewards(judged: Sequence[np.ndarray], grades: Grades) -> Score:
    """Mean outcome of the answers to each prompt, on their scale."""
    return Score.of([float(x.mean()) for x in judged], *grades.scale)
