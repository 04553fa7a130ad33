"""A rewarded token that is rare at first: how many batches each trust region needs to make it likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement, first_at_least
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import CISPO, DAPO, DPPO, GRPO
from posttrain.toy.answers import Answers, logp_of
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import batch_of, loss_of

P0, BATCHES, INNER, STEP = 0.001, 40, 16, 0.05
ARMS: dict[str, Algorithm] = {
    "clip .2": replace(GRPO, pull=None),
    "clip .2/.28": DAPO,
    "CISPO cap 5": CISPO,
    "DPPO TV .15": DPPO,
}
TABLE = {  # after batches 1, 9, 17, 25, 33
    "clip .2": (0.00124, 0.00693, 0.0367, 0.182, 0.716),
    "clip .2/.28": (0.00132, 0.0120, 0.102, 0.661, 0.878),
    "CISPO cap 5": (0.00421, 0.704, 0.885, 0.931, 0.952),
    "DPPO TV .15": (0.00421, 0.704, 0.885, 0.931, 0.952),
}


def probabilities(a: Algorithm, p0: float) -> list[float]:
    """Probability of the token after each batch: credit 1, and the gradient of log p in its logit is 1 - p.

    The token is said once a batch; its log-prob at the start of the batch is what the trust region compares with.
    """
    policy = TabularPolicy(torch.tensor([[[np.log(p0 / (1 - p0)), 0.0]]]))
    out: list[float] = []
    for _ in range(BATCHES):
        said = Answers(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0))
        start = logp_of(policy, said)
        said = replace(said, mu_ET=start)
        batch = batch_of(a, said, np.ones(1), 1, start)
        for _ in range(INNER):
            (gradient,) = torch.autograd.grad(loss_of(a, batch, policy, said)[0], policy.table)
            with torch.no_grad():
                policy.table[0, 0, 0] -= STEP * gradient[0, 0, 0]
        out.append(float(logp_of(policy, said).exp()))
    return out


def play(seed: int) -> Played:
    """Nothing is drawn here, so a seed chooses how rare the token is: .001, .0005, .00025, ..."""
    p0 = P0 / 2**seed
    curves = {arm: probabilities(a, p0) for arm, a in ARMS.items()}
    batches = list(range(1, BATCHES + 1))
    figures = {
        arm: (
            {"batches to p > .5": first_at_least(batches, p, 0.5)}
            | {f"p after {k}": p[k - 1] for k in (1, 9, 17, 25, 33)}
        )
        for arm, p in curves.items()
    }
    return Played(figures, {arm: Curve(batches, p) for arm, p in curves.items()})


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    need = [{arm: f[arm]["batches to p > .5"] for arm in ARMS} for f in each]
    found = [[f[arm][f"p after {k}"] for k in (1, 9, 17, 25, 33)] for f in each[:1] for arm in ARMS]
    close = all(np.allclose(x, t, rtol=0.01) for x, t in zip(found, TABLE.values(), strict=True))
    return [
        Statement("p0 = .001 (seed 0) gives the survey's values F.3.2 within 1 %", close),
        Statement(
            "batches to p > .5, from every p0: DPPO = CISPO < clip-higher < clip .2",
            all(n["DPPO TV .15"] == n["CISPO cap 5"] < n["clip .2/.28"] < n["clip .2"] for n in need),
        ),
    ]


MINIATURE = Miniature(
    name="rare_token",
    item="F.2 item 2, values F.3.2",
    claim=(
        "A symmetric clip locks rare tokens out: a token of probability p may gain only .2 p a batch. Clip-higher"
        " loosens that; CISPO, which silences no token, and DPPO, which compares probabilities and not ratios,"
        " remove it."
    ),
    source="DAPO 2503.14476, CISPO 2506.13585, DPPO 2602.04879",
    setup=(
        "One rewarded token (credit 1) of probability .001 with one logit; 40 batches of 16 inner updates with step"
        " .05; the log-prob the ratio compares with is refreshed each batch. Seeds 1 and 2 start at .0005 and .00025."
    ),
    predicted="Batches until p > .5: DPPO = CISPO < clip .2/.28 < clip .2, and the values of F.3.2 at .001.",
    verdict="Holds, with the survey's values.",
    play=play,
    judge=judge,
    picture=Picture("Rare-token lock-out", "batch", "probability of the rewarded token", log_y=True),
    digits=4,
)
