"""What `updates.py` runs, and what it is to find, written down before it was run.

Every arm is a patch of `grpo` without its KL, and differs from the others in the factor of a token's gradient alone:
what it makes of pi/anchor when one batch is used for several optimizer steps. Credit, weights, optimizer and data are
shared, so whatever parts two arms is their trust region. Exceptions are named at the arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.algorithm import Algorithm, patch
from posttrain.core.ladder import DR_GRPO, GRPO, VCPO
from posttrain.core.pieces.baseline import GroupMean
from posttrain.core.pieces.pull import TokenL2
from posttrain.core.pieces.trust import Cap, Clip, Divergence, Geometric, Hump, Soft

PROMPTS, SIBLINGS, MINIBATCHES, EPOCHS, STEPS = 8, 8, 4, 4, 12
"""Each step 64 answers, and 16 optimizer steps on them."""
RATES: Mapping[str, float] = {"mild": 5e-4, "hot": 2e-3}
SEEDS = (0, 1, 2)

CLIP = patch(GRPO, "clip", GRPO.paper, pull=None)


def _arm(name: str, **changes: Any) -> Algorithm:
    return patch(CLIP, name, "-", **changes)


ARMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        _arm("no_ratio", ratio="one", clip=None),
        _arm("no_clip", clip=None),
        CLIP,
        _arm("clip_higher", clip=Clip(low=0.2, high=0.28)),
        _arm("cispo", clip=Cap(low=0.0, high=5.0)),
        _arm("sapo", clip=Soft()),
        _arm("gmpo", clip=Geometric()),
        _arm("gspo", ratio="sequence_mean", clip=Clip(low=3e-4, high=4e-4)),
        _arm("luspo", ratio="sequence_mean", clip=Clip(low=2e-3, high=2.5e-3), aggregate="sequence_sum"),
        _arm("vespo", ratio="sequence_product", clip=Hump()),
        _arm("dppo", anchor="behaviour", clip=Divergence(measure="tv", delta=0.15)),
        _arm("dppo_kl", anchor="behaviour", clip=Divergence(measure="kl", delta=0.05)),
        _arm("dro", ratio="one", clip=None, pull=TokenL2(coef=0.025)),
        _arm("seq_is", anchor="behaviour", ratio="sequence_product", clip=Cap(low=0.0, high=8.0)),
        patch(VCPO, "vcpo_step", "-", baseline=GroupMean()),
        VCPO,
    )
}
"""`luspo` weighs tokens by the sum over an answer, which is what it changes of GSPO; `vcpo` has its own baseline,
`vcpo_step` the group's mean, and both its step size; `seq_is` is `vcpo` without either."""
ASIDE: Mapping[str, str] = {
    "tis, icepop, decoupled_ppo": "factors of start/mu, which is 1 where nothing is stale: they are `clip` here",
    "a3po": "its anchor is found by the versions of tokens, which are all equal here: it compares with the sampler",
    "m2po": "its mask is made from start/mu and so chooses every token: it is `no_clip`, against the sampler",
    "aipo": "the cap of `cispo` at 4, not 5, against the sampler",
    "v_trace": "needs values, which none of the other arms learns",
    "dr_grpo": f"credit and weight alone ({DR_GRPO.paper}); its trust region is `clip`",
}
"""Lines of the ladder that are no arm of their own, and why."""


@dataclass(frozen=True)
class Prediction:
    text: str
    holds: Callable[[Mapping[tuple[str, str], Mapping[str, float]]], bool]
    """From the means over seeds, by (arm, rate) -> figure."""


PREDICTIONS: tuple[Prediction, ...] = ()
LEARNED: tuple[str, ...] = ()
"""What the runs showed, in words."""
