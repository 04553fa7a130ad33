"""What `updates.py` runs, and what it is to find, written down before it was run.

Every arm is a patch of `grpo` without its KL, and differs from the others in the factor of a token's gradient alone:
what it makes of pi/anchor when one batch is used for several optimizer steps. Credit, weights, optimizer and data are
shared, so whatever parts two arms is their trust region. Exceptions are named at the arms.

The rates come from pilots on seed 7, which is not among the measured ones. Held-out accuracy, .465 at the start:

    clip       3e-4 .690    6e-4 .280    1e-3 .077    2e-3 collapsed
    no_clip    3e-4 .690    6e-4 .033    1e-3 .015
    gspo                    6e-4 .460, of whose tokens it silenced three in four

No other arm was run before this was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import GroupMean
from posttrain.ladder.pieces.pull import TokenL2
from posttrain.ladder.pieces.trust_region import Cap, Clip, Divergence, Geometric, Hump, Soft
from posttrain.ladder.policy_rows import DR_GRPO, GRPO, IW_OPD, M2PO, MOPD, OPD, OTB, PPO, V_TRACE, VCPO

PROMPTS, SIBLINGS, MINIBATCHES, EPOCHS, STEPS = 8, 8, 4, 4, 12
"""Each step 64 answers, and 16 optimizer steps on them."""
RATES: Mapping[str, float] = {"mild": 3e-4, "hot": 6e-4}
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
LINES: dict[str, Algorithm] = {a.name: a for a in (PPO, V_TRACE, OPD, IW_OPD, MOPD)}
"""Lines with credit of their own, as the ladder has them: a row each at the mild rate, to see that they learn. The
teacher of the last three is the start after 40 steps of `dr_grpo` with one update a batch."""
TOKENS: dict[str, Algorithm] = {
    a.name: a for a in (OTB, patch(CLIP, "otb_clip", OTB.paper, baseline=OTB.baseline, scale="one"))
}
"""The baseline of tool turns, at the mild rate, of 2026-11-26: as the ladder has it, without a ratio, and under the
clip that verl has beside it."""
LATER: dict[str, Algorithm] = {M2PO.name: _arm(M2PO.name, clip=None, tokens=M2PO.tokens, anchor="behaviour")}
"""Arms of 2026-11-26, when `m2po` began to make its mask again for every update: before, it was `no_clip` here. The
statements above about every arm are of the others."""
ASIDE: Mapping[str, str] = {
    "tis, icepop, decoupled_ppo": "factors of start/mu, which is 1 where nothing is stale: they are `clip` here",
    "a3po": "its anchor is found by the versions of tokens, which are all equal here: it compares with the sampler",
    "aipo": "the cap of `cispo` at 4, not 5, against the sampler",
    "dr_grpo": f"credit and weight alone ({DR_GRPO.paper}); its trust region is `clip`",
    "hierarchical GRPO, A*-PO": "no line of the ladder; [the notes](../design/algorithms-notes.md) say what one needs",
}
"""Lines of the ladder that are no arm of their own, and why."""


@dataclass(frozen=True)
class Prediction:
    text: str
    holds: Callable[[Mapping[tuple[str, str], Mapping[str, float]]], bool]
    """From the means over seeds, by (arm, rate) -> figure."""


Figures = Mapping[tuple[str, str], Mapping[str, float]]


def _after(found: Figures, arm: str, rate: str = "hot") -> float:
    return found[arm, rate]["after"]


def drift_correlation(found: Figures, rate: str) -> float:
    """Spearman's rank correlation of `moved` and `after` over the arms that form a ratio."""
    arms = [a for a in ARMS if found[a, rate]["moved"] == found[a, rate]["moved"]]
    moved, after = (np.argsort(np.argsort([found[a, rate][f] for a in arms])) for f in ("moved", "after"))
    return float(np.corrcoef(moved, after)[0, 1])


PREDICTIONS: tuple[Prediction, ...] = (
    Prediction(
        "Mild: every arm ends above the start.",
        lambda f: all(f[a, "mild"]["after"] > f[a, "mild"]["before"] for a in ARMS),
    ),
    Prediction(
        "Hot: without a bound (`no_ratio`, `no_clip`) it ends more than .1 below `clip`.",
        lambda f: all(_after(f, a) < _after(f, "clip") - 0.1 for a in ("no_ratio", "no_clip")),
    ),
    Prediction(
        "Hot: `gspo`, `luspo` and `vespo`, which bound whole answers, end above `clip`.",
        lambda f: all(_after(f, a) > _after(f, "clip") for a in ("gspo", "luspo", "vespo")),
    ),
    Prediction(
        "`gspo` silences more than half of the tokens at both rates, `luspo` fewer, `clip` fewer than `luspo`.",
        lambda f: all(
            f["gspo", r]["clipped"] > max(0.5, f["luspo", r]["clipped"])
            and f["luspo", r]["clipped"] > f["clip", r]["clipped"]
            for r in RATES
        ),
    ),
    Prediction(
        "Hot: `cispo` ends within .15 of `no_clip`: few ratios reach 5, and below that they are the same.",
        lambda f: abs(_after(f, "cispo") - _after(f, "no_clip")) < 0.15,
    ),
    Prediction(
        "Hot: `sapo` and `gmpo` end between `no_clip` and `clip`: a soft gate, and a bound of e^.4, come late.",
        lambda f: all(_after(f, "no_clip") < _after(f, a) < _after(f, "clip") for a in ("sapo", "gmpo")),
    ),
    Prediction(
        "Hot: `dppo` and `dppo_kl` end above `no_clip`, and within .15 of `clip`.",
        lambda f: all(
            _after(f, a) > _after(f, "no_clip") and abs(_after(f, a) - _after(f, "clip")) < 0.15
            for a in ("dppo", "dppo_kl")
        ),
    ),
    Prediction(
        "Hot: `vcpo` and `vcpo_step` use less than .8 of the learning rate, and end more than .1 above `seq_is`.",
        lambda f: all(
            f[a, "hot"]["share"] < 0.8 and _after(f, a) > _after(f, "seq_is") + 0.1 for a in ("vcpo", "vcpo_step")
        ),
    ),
    Prediction(
        "Hot: of VCPO's two parts the step size does more than the baseline.",
        lambda f: abs(_after(f, "vcpo") - _after(f, "vcpo_step")) < abs(_after(f, "vcpo_step") - _after(f, "seq_is")),
    ),
    Prediction(
        "Hot: `dro` ends within .15 of `no_ratio`: a beta of .05 is too weak to hold it.",
        lambda f: abs(_after(f, "dro") - _after(f, "no_ratio")) < 0.15,
    ),
    Prediction(
        "Mild: `ppo`, `v_trace`, `opd`, `iw_opd` and `mopd` end above the start (added while the arms above were"
        " running).",
        lambda f: all(f[a, "mild"]["after"] > f[a, "mild"]["before"] for a in LINES),
    ),
    Prediction(
        "Hot: the further an arm moves from the start of its batch, the lower it ends (rank correlation below -.5).",
        lambda f: drift_correlation(f, "hot") < -0.5,
    ),
    Prediction(
        "`m2po`, an arm of 2026-11-26, ends above `no_clip` at both rates: its mask acts now.",
        lambda f: all(_after(f, "m2po", r) > _after(f, "no_clip", r) for r in RATES),
    ),
    Prediction(
        "`m2po` ends within .15 of `clip` at both rates: a second moment of .04 is a ratio of about e^.2.",
        lambda f: all(abs(_after(f, "m2po", r) - _after(f, "clip", r)) < 0.15 for r in RATES),
    ),
    Prediction(
        "Mild: `otb`, an arm of 2026-11-26 without a ratio, ends below its start, as `no_ratio` did; under a clip"
        " (`otb_clip`) it ends within .1 of `clip`.",
        lambda f: (
            _after(f, "otb", "mild") < f["otb", "mild"]["before"]
            and abs(_after(f, "otb_clip", "mild") - _after(f, "clip", "mild")) < 0.1
        ),
    ),
)

LEARNED: tuple[str, ...] = (
    "**Without a ratio, sixteen updates are too many even when mild.** `no_ratio` takes the batch for fresh each"
    " time and ends below its start at both rates. So does `dro`, which is held by its penalty alone.",
    "**A cap from above is no trust region.** Few ratios reach the 5 of `cispo`, and the soft gate of `sapo`"
    " still passes 1.6 times the gradient at ratio 2. Hot, both end where `no_clip` does, up to .04.",
    "**Whether the ratio is of a token or of the answer parts them most.** Hot, every arm that weighs whole"
    " answers (`gspo`, `luspo`, `vespo`, `seq_is`, `vcpo`) ends above every arm that weighs tokens, clipped or"
    " not. A likely reason, which these runs do not prove: what is rewarded is the answer, and an answer that has"
    " become unlikely loses weight in all its tokens at once, where a clip by tokens goes on with those that have"
    " not moved.",
    "**The share of clipped tokens says nothing about safety.** `gspo` and `luspo` silence about three tokens in"
    " four and learn; `clip`, `gmpo` and `dppo` silence at most one in ten and fall when hot. The bounds of"
    " `luspo` are six times wider than those of `gspo`; hot, it silences as many.",
    "**A step size by the effective sample size adds to what weighs the answers.** From `seq_is` to `vcpo_step`"
    " nothing else changes, and accuracy rises by .13 mild and .08 hot; the off-policy baseline of `vcpo` adds .02"
    " and nothing. About nine tenths of the learning rate are used on average. With `vespo` these two end highest"
    " at both rates.",
    "**Drift orders the arms when mild** (rank correlation of *moved* and *after* {mild:.2f}), **and less so when"
    " hot** ({hot:.2f}): there a mean of k3 is ruled by a few tokens that became far more likely.",
    "**A bound on a mean square bounds no token.** `m2po` masks until the mean of log^2(pi/mu) over the tokens that"
    " are pushed further away is at most .04. Where a share f of them has moved and the rest has not, that lets those"
    " go to |log(pi/mu)| = .2 / sqrt(f): to a ratio of 2.7 at f = .04. That is a likely reason, which these runs do not"
    " prove, why `m2po` ends above `no_clip` by .06 mild and .01 hot, and .2 below `clip`, which holds each token.",
    "The token baseline of tool turns (`otb`) ends below its start without a ratio, though less than `no_ratio`, and"
    " under the clip (`otb_clip`) above `clip`, in the mean of three seeds by .09: no more than seeds lie apart.",
    "`ppo` and `v_trace` begin with values that know nothing and use them sixteen times a batch;"
    " `baseline.warmup` is meant for that, and was off.",
)
"""What the runs showed, in words; with the rank correlations of drift and accuracy at both rates."""
