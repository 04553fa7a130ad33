"""The noise band: how far sampler and learner differ on the same weights, and whether the algorithm tolerates it.

On policy, a ratio against the sampler is 1 plus this noise. A trust region or a correction that is narrower than the
band clips tokens by their rounding, not because the policy moved. In bfloat16, GSPO's bounds 3e-4 / 4e-4 clipped 72 to
94 % of sequences.
"""

from __future__ import annotations

import numpy as np
import torch

from posttrain.algorithm.loss.mismatch_correction import correct
from posttrain.algorithm.loss.push_factor import TrustInputs, importance, push
from posttrain.algorithm.loss.torch_streams import Streams
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.streams import ADVANTAGE, MU, WEIGHT
from posttrain.ladder.algorithm import Algorithm
from posttrain.system.errors import ConfigError

MOST = 0.01
"""Largest share of tokens that noise alone may clip."""


def noise_band(a: Algorithm, mu_M: np.ndarray, learner_M: np.ndarray, sequence_M: np.ndarray, dtype: str) -> Gauges:
    """The band of a run at its first step, when both sides hold the same weights; ConfigError if `a` is narrower.
    `mu_M, learner_M`: log-probs of the same tokens by sampler and learner. `sequence_M`: the episode of each token,
    ascending."""
    if not len(mu_M):
        return {}
    gap_M = np.asarray(learner_M, np.float64) - mu_M
    band = float(np.quantile(np.abs(gap_M), 0.99))
    mu, learner, sequence = (torch.as_tensor(np.asarray(x, np.float64)) for x in (mu_M, learner_M, sequence_M))
    worst = 0.0
    for sign in (1.0, -1.0):
        batch = Streams(
            sequence.long(),
            int(sequence_M.max()) + 1,
            streams={MU: mu, ADVANTAGE: torch.full_like(mu, sign), WEIGHT: torch.ones_like(mu)},
        )
        if a.anchor == "behaviour" and a.silences and not a.stores_top:
            ratio = importance(a.ratio, learner - mu, batch)
            worst = max(
                worst, _silent(push(a.clip, TrustInputs(ratio, learner - mu, batch[ADVANTAGE], learner, batch)).push_M)
            )
        if a.correction:
            worst = max(worst, _silent(correct(a.correction, learner, learner, batch).used_M))
    if worst > MOST:
        raise ConfigError(
            f"{a.name}: {worst:.1%} of the tokens would fall silent although no weight has moved. Sampler and learner"
            f" differ by up to {band:.2g} nats a token in {dtype} (99 % of tokens), and clip={a.clip},"
            f" correction={a.correction} are narrower than that. Compare with the learner's own log-probs"
            " (anchor=start), widen the bounds, or use model.dtype=float32"
        )
    return {"mismatch/band": Gauge(band, 1)}


def _silent(loudness_M: torch.Tensor) -> float:
    return float((loudness_M == 0).double().mean())
