"""Page 10: PPO's clip as a table, and lambda between one step and the whole answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.algorithm.credit.value_estimates import gae
from posttrain.algorithm.loss.push_factor import TrustInputs, push
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.checks.sampling.sampler_checks import noise_band
from posttrain.core.streams import ADVANTAGE
from posttrain.lab import lesson as lab
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import GRPO
from posttrain.web.picture import Curve, Matrix

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
SIGNS = {"better than expected (A > 0)": 1.0, "worse than expected (A < 0)": -1.0}
BF16 = 2.0**-8
"""The relative rounding of bfloat16."""


def pushed(clip: Clip, ratio: float, advantage: float) -> float:
    """The factor of one token's gradient under this clip."""
    r, a, log = (torch.tensor([x], dtype=torch.float64) for x in (ratio, advantage, np.log(ratio)))
    batch = Streams(torch.zeros(1, dtype=torch.int64), 1, streams={ADVANTAGE: a})
    return float(push(clip, TrustInputs(r, log, a, log, batch)).push_M[0])


def branch(clip: Clip, ratio: float, advantage: float) -> str:
    """Returns in words which of the two terms of min(r A, clip(r) A) is the smaller; the first where they are equal."""
    return "ratio term: gradient" if pushed(clip, ratio, advantage) else "clipped term: no gradient"


def first_token(gae_lambda: float, wrong: float, draws: int = 400) -> tuple[float, float]:
    """(signal, noise) of the advantage of the first of 16 tokens, with one reward at the end that is 1 or 0: how much
    more credit it has where the answer is right, and the standard deviation over all answers. Half of the answers are
    right, so the true value is .5; each learned value differs from it by its own noise of size `wrong`."""
    rng = np.random.default_rng(0)
    rewards = np.zeros((draws, 16))
    rewards[:, -1] = rng.integers(0, 2, draws)
    values = 0.5 + wrong * rng.standard_normal((draws, 16))
    credit = np.array([gae(v, r, gamma=1.0, gae_lambda=gae_lambda)[0][0] for v, r in zip(values, rewards, strict=True)])
    right = rewards[:, -1] == 1
    return float(credit[right].mean() - credit[~right].mean()), float(credit.std())


def width(eps: float) -> Clip:
    """The clip to 1 - eps .. 1 + eps."""
    return Clip(low=eps, high=eps)


def anchored(eps: float) -> Algorithm:
    """GRPO that compares with the sampler's own log-probs, under a clip of this width."""
    return replace(GRPO, anchor="behaviour", clip=width(eps))


def mixed_precision(eps: float) -> None:
    """The check of a run's first step: sampler and learner hold the same weights, one of them in bfloat16. Raises
    ConfigError where the clip is narrower than that rounding."""
    rng = np.random.default_rng(0)
    learner = -rng.gamma(1.0, 1.0, 400)
    mu = learner * (1 + BF16 * rng.uniform(-1, 1, 400))
    noise_band(anchored(eps), mu, learner, np.repeat(np.arange(40), 10), "bfloat16")


def compute(k: lab.Values) -> lab.Readout:
    clip, eps = width(float(k["eps"])), float(k["eps"])
    ratio, advantage = float(k["ratio"]), SIGNS[str(k["sign"])]
    ratios = np.round(np.linspace(0.4, 1.8, 57), 3)
    # A ratio for each row of the table: below the clip, inside, above. Its log is taken, so it must be above 0.
    row_ratios = (1 - eps - 0.1, 1.0, 1 + eps + 0.1)
    row = 0 if ratio < 1 - eps else 2 if ratio > 1 + eps else 1
    push_now = pushed(clip, ratio, advantage)
    by_lambda = [first_token(x, float(k["wrong"])) for x in LAMBDAS]
    table = [[pushed(clip, max(r, 0.01), s) for s in SIGNS.values()] for r in row_ratios]
    return lab.Readout(
        pictures=(
            Matrix("Which term of the minimum wins", tuple(SIGNS),
                   (f"ratio below {1 - eps:.2f}", "between", f"ratio above {1 + eps:.2f}"), table,
                   [[branch(clip, max(r, 0.01), s) for s in SIGNS.values()] for r in row_ratios], low=-2, high=2,
                   chosen=(row, 0 if advantage > 0 else 1)),
            Curve("Push of a token, by its ratio", ratios.tolist(),  # a sign is named by its part in brackets: "A > 0"
                  {n.split(" (")[1][:-1]: [pushed(clip, float(r), s) for r in ratios] for n, s in SIGNS.items()},
                  x_label="ratio new / old", low=0, high=2, at=ratio),
            Curve("Credit of the first of 16 tokens, by lambda", LAMBDAS,
                  {"right minus wrong": [x[0] for x in by_lambda], "standard deviation": [x[1] for x in by_lambda]},
                  x_label="lambda"),
        ),
        sentence=f"At ratio **{ratio:.2f}** this token's gradient is multiplied by **{push_now:.2f}**"
        + (": it is silent." if not push_now else "."),
        values={"push": push_now, "ratio": ratio, "signal at lambda .5": by_lambda[2][0],
                "noise at lambda 1": by_lambda[-1][1]},
        says=lab.refusal(lambda: mixed_precision(eps)),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="10", name="ppo", title="PPO: the clip, and lambda", part="the algorithms", force="estimator", minutes=8,
    question="When does a token of an old sample stop being pushed?",
    idea="""
        Several optimizer steps use one batch of samples, so the policy moves away from the one that sampled them. PPO
        compares: the ratio is the token's probability now over its probability then. A token that was to become more
        likely is pushed until its ratio passes 1 + eps, and one that was to become less likely until it falls below
        1 - eps. Then its gradient is 0. A token that moved the *wrong* way keeps its gradient.

        PPO also learns a value for each token. Lambda says how much of the rest of the answer is believed: 0 reads the
        next value alone, so an early token hears nothing of a reward at the end; 1 reads the whole answer, with all its
        noise.
    """,
    formula="min( r A , clip(r, 1 - eps, 1 + eps) A )          A_t = delta_t + lambda * A_(t+1)",
    knobs=(
        lab.Slider("ratio", "ratio of the token", 1.3, 0.4, 1.8, 0.05),
        lab.Options("sign", "the answer was", "better than expected (A > 0)", tuple(SIGNS)),
        lab.Slider("eps", "eps, half the width of the clip", 0.2, 0.0005, 0.5, log=True),
        lab.Slider("wrong", "error of the learned values", 0.2, 0, 0.5, 0.05),
    ),
    compute=compute,
    breaks=(
        lab.Break({"eps": 0.0005}, "The clip is narrower than the rounding of bfloat16: tokens fall silent although no "
              "weight has moved.", "ConfigError"),
    ),
    claims=(
        lab.Claim("A > 0, ratio 1.3, eps .2: push", "1707.06347", 0.0, lambda: pushed(width(0.2), 1.3, 1.0)),
        lab.Claim("A < 0, ratio 1.3, eps .2: push", "1707.06347", 1.3, lambda: pushed(width(0.2), 1.3, -1.0)),
    ),
    exercises=(
        lab.AskNumber("eps .2, A > 0, ratio 1.1: what is the push?", 1.1, why="Inside the clip the push is the ratio."),

        lab.AskKnobs("Move the ratio until the token is pushed again.", "push", 0.1, None, {"ratio": 1.0}),
        lab.AskChoice("A token of a bad answer became more likely (ratio 1.5). Is it still pushed down?",
                      ("No, it is outside of the clip", "Yes", "Only with a dual clip"), 1,
                      why="The minimum takes the term that punishes more."),
    ),
    code=("posttrain.algorithm.loss.push_factor.push", "posttrain.ladder.pieces.trust_region.Clip",
          "posttrain.algorithm.credit.value_estimates.gae"),
    docs="research/several-updates.md", command="posttrain run arithmetic algorithm=ppo rl.minibatches=4 clip.low=0.2",
    grid=("ratio", "eps"),
)  # fmt: skip
