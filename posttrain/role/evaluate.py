"""Held-out evaluation: fixed tasks, fixed seeds, and intervals over prompts, since samples of one prompt correlate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.interval import Score
from posttrain.core.request import RolloutRequest
from posttrain.core.run import Evaluation
from posttrain.core.sampling import Sampling
from posttrain.core.types import Group, Task
from posttrain.core.verdict import SOLVED, failed
from posttrain.diagnose.played import unjudged_words
from posttrain.role.concurrency import together
from posttrain.role.rollout import Rollout


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from c right ones of n (Chen et al. 2107.03374).

    >>> round(pass_at_k(10, 3, 5), 6)
    0.916667
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class EvaluationReport:
    """The result of one evaluation. Each score is over prompts."""

    accuracy: Score
    """Share of answers that are right (raw outcome >= 1). It is pass@1."""
    reward: Score
    """Mean raw outcome. It differs from accuracy if some outcome is neither 0 nor 1."""
    greedy: Score | None
    """Accuracy of one argmax answer a prompt; None if none was asked for."""
    greedy_reward: Score | None
    """Mean raw outcome of the argmax answers."""
    pass_at: dict[int, Score]
    """pass@k, by k."""
    failed: int
    """Episodes without a reward because a reward source broke."""
    abstained: int
    """Episodes without a reward because every source abstained."""
    mean_tokens: float
    """Spoken tokens per episode."""
    truncated: float
    """Share of episodes that were cut off at the token limit."""
    groups: tuple[Group, ...]

    @property
    def unjudged(self) -> int:
        return self.failed + self.abstained

    @property
    def graded(self) -> bool:
        """Whether some outcome is neither 0 nor 1. Then mean reward and accuracy differ."""
        return any(r not in (0.0, 1.0) for g in self.groups for r in g.rewards)

    @property
    def unmeasured(self) -> str:
        """Why there is no score at all, namely why nothing could be judged; '' if something was."""
        return "" if self.reward.prompts or not self.groups else unjudged_words(self.groups)

    def gauges(self) -> Gauges:
        out = {"eval/accuracy": self.accuracy.gauge(), "eval/reward": self.reward.gauge()}
        if self.greedy is not None and self.greedy_reward is not None:
            out |= {"eval/greedy": self.greedy.gauge(), "eval/greedy_reward": self.greedy_reward.gauge()}
        for k, s in self.pass_at.items():
            out[f"eval/pass_at_{k}"] = s.gauge()
        logged = merge(*(g.logged for g in self.groups))
        return out | {
            **{f"eval/{name}": gauge for name, gauge in logged.items()},
            "eval/unjudged": Gauge(self.unjudged, 1),
            "eval/failed": Gauge(self.failed, 1),
            "eval/abstained": Gauge(self.abstained, 1),
            "eval/tokens": Gauge(self.mean_tokens, 1),
            "eval/truncated": Gauge(self.truncated, 1),
        }


async def evaluate(rollout: Rollout, tasks: Sequence[Task], sampling: Sampling, how: Evaluation) -> EvaluationReport:
    """Sample every task `how.samples` times, and once greedily if `how.greedy`.

    The seeds are the same in every evaluation, so runs can be compared prompt by prompt.
    """
    fixed, sampling = replace(rollout, seed=how.seed), replace(sampling, top=0)
    groups = await together(
        [fixed.group(t, 0, RolloutRequest(groups=1, siblings=how.samples), sampling, "evaluation") for t in tasks]
    )
    greedy = None
    if how.greedy:
        argmax = replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        greedy = await together(
            [fixed.group(t, 0, RolloutRequest(groups=1, siblings=1), argmax, "greedy") for t in tasks]
        )
    return report(groups, greedy)


def report(groups: Sequence[Group], greedy: Sequence[Group] | None) -> EvaluationReport:
    """The scores of played groups. Unjudged episodes are counted apart, never as wrong answers."""
    judged = [g for g in groups if g.judged]
    solved = [(len(g.judged), int(np.sum(g.rewards >= SOLVED))) for g in judged]
    most = min((n for n, _ in solved), default=0)
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= most} | ({most} if most else set()))
    episodes = [e for g in groups for e in g.episodes]
    broken = sum(failed(e.verdicts) for e in episodes)
    argmax = None if greedy is None else [g for g in greedy if g.judged]
    return EvaluationReport(
        accuracy=Score.of([pass_at_k(n, c, 1) for n, c in solved]),
        reward=_rewards(judged),
        greedy=None if argmax is None else Score.of([float(np.mean(g.rewards >= SOLVED)) for g in argmax]),
        greedy_reward=None if argmax is None else _rewards(argmax),
        pass_at={k: Score.of([pass_at_k(n, c, k) for n, c in solved]) for k in ks},
        failed=broken,
        abstained=sum(e.reward is None for e in episodes) - broken,
        mean_tokens=float(np.mean([e.spoken for e in episodes])) if episodes else math.nan,
        truncated=float(np.mean([e.stop == "length" for e in episodes])) if episodes else math.nan,
        groups=tuple(groups),
    )


def _rewards(judged: Sequence[Group]) -> Score:
    """Mean reward. Its scale runs from the smallest to the largest reward given, and includes 0 and 1."""
    paid = np.concatenate([np.array([0.0, 1.0]), *(g.rewards for g in judged)])
    return Score.of([float(g.rewards.mean()) for g in judged], float(paid.min()), float(paid.max()))
