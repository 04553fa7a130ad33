"""The ladder: every algorithm is a patch on its predecessor. Formulas, defaults and numeric cases: docs/algorithms.md.

Adding one is a line here and, when it needs a new piece, one type in `core.algorithm` and one `case` in the
mathematics.
"""

from __future__ import annotations

from posttrain.core.algorithm import (
    KL,
    Algorithm,
    Clip,
    Ema,
    GroupMean,
    Others,
    Overlong,
    Signed,
    Value,
    patch,
)
from posttrain.core.errors import ConfigError, nearest

REINFORCE = Algorithm(name="reinforce", paper="Williams 1992")
EMA = patch(REINFORCE, "reinforce_ema", "Williams 1992", baseline=Ema(decay=0.95), note="a sample is compared with the baseline as it was before that sample; updating first would bias it")
RLOO = patch(
    REINFORCE,
    "rloo",
    "2402.14740",
    baseline=Others(),
    pull=KL(coef=0.03, estimator="k1", placement="reward"),
    note="sequence sum as in the paper; most peers take a token mean and add a ratio clip",
)
PPO = patch(
    REINFORCE,
    "ppo",
    "1707.06347",
    baseline=Value(gae_lambda=0.95),
    whiten="token",
    ratio="token",
    anchor="start",
    clip=Clip(low=0.2, high=0.2),
    aggregate="token_mean",
)
GRPO = patch(
    PPO,
    "grpo",
    "2402.03300",
    baseline=GroupMean(),
    scale="group_std",
    whiten=None,
    aggregate="sequence_mean",
    pull=KL(coef=0.04, estimator="k3", placement="loss"),
    note="std is ddof 1 with no epsilon; the paper leaves the clip range unstated (0.2 is convention)",
)
DAPO = patch(
    GRPO,
    "dapo",
    "2503.14476",
    clip=Clip(low=0.2, high=0.28),
    filter="mixed",
    aggregate="prompt_mean",
    shape=(Signed(), Overlong(cache=0.2)),
    pull=None,
    note="the paper normalises by each group's tokens (prompt_mean); peers by the whole batch's",
)
DR_GRPO = patch(
    GRPO,
    "dr_grpo",
    "2503.20783",
    scale="one",
    aggregate="constant",
    pull=None,
    note="the objective has no length divisor; the constant (max_tokens) only sets the scale",
)

LADDER: dict[str, Algorithm] = {a.name: a for a in (REINFORCE, EMA, RLOO, PPO, GRPO, DAPO, DR_GRPO)}


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or ConfigError with the nearest one."""
    if name not in LADDER:
        raise ConfigError(f"algorithm={name}: no such algorithm; {nearest(name, LADDER)}")
    return LADDER[name]
