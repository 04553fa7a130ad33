"""Held-out evaluation: fixed tasks, fixed seeds, intervals that know samples of one prompt are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.core.run import Evaluation
from posttrain.core.sampling import Sampling
from posttrain.core.types import Gauge, Gauges, Group, Task
from posttrain.core.verdict import SOLVED
from posttrain.role.rollout import Rollout, together

Z95 = 1.959963984540054


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples solves) from c solved of n (Chen et al. 2107.03374).

    >>> round(pass_at_k(10, 3, 5), 6)
    0.916667
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(mean: float, low: float, high: float) -> str:
    """A mean with its interval; `-` where nothing was judged, no interval where one prompt says nothing about others.

    >>> interval(0.5, 0.25, 0.75), interval(0.5, -math.inf, math.inf), interval(math.nan, math.nan, math.nan)
    ('0.500 [0.250, 0.750]', '0.500 [one prompt]', '-')
    """
    if math.isnan(mean):
        return "-"
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]" if math.isfinite(low) and math.isfinite(high) else f"{mean:.3f} [one prompt]"


@dataclass(frozen=True)
class Score:
    """A mean over prompts with its 95 % interval (normal, over prompt means, so siblings do not count twice)."""

    mean: float
    low: float
    high: float
    prompts: int

    @staticmethod
    def of(per_prompt: Sequence[float] | np.ndarray) -> Score:
        x = np.asarray(per_prompt, np.float64)
        if not len(x):
            return Score(math.nan, math.nan, math.nan, 0)
        half = Z95 * float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf
        return Score(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))

    @staticmethod
    def outcomes(per_prompt: Sequence[float] | np.ndarray) -> Score:
        """`of` for outcomes in [0, 1]: where every prompt says 0, or every one 1, the interval is Wilson's, which is not a point.

        >>> str(Score.outcomes([1.0] * 20))
        '1.000 [0.839, 1.000]'
        """
        plain = Score.of(per_prompt)
        off = Z95**2 / (plain.prompts + Z95**2) if plain.prompts > 1 else 0.0
        if plain.low == plain.high == 0.0:
            return replace(plain, high=off)
        return replace(plain, low=1 - off) if plain.low == plain.high == 1.0 else plain

    def __str__(self) -> str:
        return interval(self.mean, self.low, self.high)


@dataclass(frozen=True)
class Report:
    """One evaluation. `accuracy` is the mean raw outcome; `greedy` the same for one argmax answer a prompt."""

    accuracy: Score
    greedy: Score | None
    pass_at: dict[int, Score]
    unjudged: int
    mean_tokens: float
    truncated: float
    groups: tuple[Group, ...]

    def gauges(self) -> Gauges:
        out = {"eval/accuracy": Gauge(self.accuracy.mean * self.accuracy.prompts, self.accuracy.prompts)}
        if self.greedy is not None:
            out["eval/greedy"] = Gauge(self.greedy.mean * self.greedy.prompts, self.greedy.prompts)
        for k, s in self.pass_at.items():
            out[f"eval/pass_at_{k}"] = Gauge(s.mean * s.prompts, s.prompts)
        return out | {
            "eval/unjudged": Gauge(self.unjudged, 1),
            "eval/tokens": Gauge(self.mean_tokens, 1),
            "eval/truncated": Gauge(self.truncated, 1),
        }


async def evaluate(rollout: Rollout, tasks: Sequence[Task], sampling: Sampling, how: Evaluation) -> Report:
    """Sample every task `how.samples` times (and once greedily). The same seeds every time, so runs compare prompt by prompt."""
    fixed, sampling = replace(rollout, seed=how.seed), replace(sampling, top=0)
    groups = await together([fixed.group(t, 0, how.samples, sampling, "evaluation") for t in tasks])
    greedy = None
    if how.greedy:
        argmax = replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        greedy = await together([fixed.group(t, 0, 1, argmax, "greedy") for t in tasks])
    return report(groups, greedy)


def report(groups: Sequence[Group], greedy: Sequence[Group] | None) -> Report:
    """Numbers from played groups; unjudged episodes are counted, and never read as wrong."""
    judged = [g for g in groups if g.judged]
    solved = [(len(g.judged), int(np.sum(g.rewards >= SOLVED))) for g in judged]
    most = min((n for n, _ in solved), default=0)
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= most} | ({most} if most else set()))
    episodes = [e for g in groups for e in g.episodes]
    return Report(
        accuracy=Score.outcomes([float(g.rewards.mean()) for g in judged]),
        greedy=None if greedy is None else Score.outcomes([float(g.rewards.mean()) for g in greedy if g.judged]),
        pass_at={k: Score.outcomes([pass_at_k(n, c, k) for n, c in solved]) for k in ks},
        unjudged=sum(len(g.episodes) - len(g.judged) for g in groups),
        mean_tokens=float(np.mean([e.spoken for e in episodes])) if episodes else math.nan,
        truncated=float(np.mean([e.stop == "length" for e in episodes])) if episodes else math.nan,
        groups=tuple(groups),
    )
