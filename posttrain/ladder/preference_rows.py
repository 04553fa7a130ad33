"""The second ladder: every preference algorithm is a patch of another one, and the first is DPO. A row has parent,
name, paper, and the changed choices.

`ladder.algorithm_notes` says where papers and other libraries differ. To add one, write a row here; if it needs a new
piece, also one type in `ladder.pieces` and its mathematics in `posttrain.algorithm.preference`.
"""

from __future__ import annotations

from typing import Any

from posttrain.ladder.algorithm import patch
from posttrain.ladder.algorithm_notes import PREFERENCE_NOTES
from posttrain.ladder.pieces.link import (
    AnchoredDown,
    AnchoredZero,
    Binary,
    Discovered,
    Exact,
    Hinge,
    Nash,
    NoiseContrast,
    Prospect,
    SelfPlay,
    Square,
)
from posttrain.ladder.pieces.pair_source import (
    AgainstMixture,
    AgainstReference,
    BestWorst,
    RejectionSampled,
    TwoSamples,
)
from posttrain.ladder.pieces.preference_pieces import (
    Average,
    ChosenNLL,
    Conservative,
    DataMargin,
    Desensitized,
    FixedMargin,
    GoldNLL,
    LogOdds,
    Optimism,
    Robust,
)
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system.errors import ConfigError, nearest


def _patch(parent: PreferenceAlgorithm, name: str, paper: str, **changes: Any) -> PreferenceAlgorithm:
    """The parent with some choices changed, and its note from `ladder.algorithm_notes`."""
    return patch(parent, name, paper, note=PREFERENCE_NOTES.get(name, ""), **changes)


# fmt: off
DPO          = PreferenceAlgorithm(name="dpo", paper="2305.18290", note=PREFERENCE_NOTES["dpo"])
CDPO         = _patch(DPO,    "cdpo",         "Mitchell 2023", noise=Conservative(rate=0.1))
ROBUST_DPO   = _patch(DPO,    "robust_dpo",   "2403.00409",    noise=Robust(rate=0.1))
ODPO         = _patch(DPO,    "odpo",         "2402.10571",    margin=DataMargin())
DPO_NORM     = _patch(DPO,    "dpo_norm",     "2411.15124",    statistic=Average(), beta=5.0)
LD_DPO       = _patch(DPO,    "ld_dpo",       "2409.06411",    statistic=Desensitized(alpha=0.5))
WPO          = _patch(DPO,    "wpo",          "2406.11827",    weights="wpo")

# --- other links of the same margin ----------------------------------------------------------------------------------

IPO          = _patch(DPO,    "ipo",          "2310.12036",    link=Square())
IPO_MEAN     = _patch(IPO,    "ipo_mean",     "2310.12036",    statistic=Average())
SLIC         = _patch(DPO,    "slic",         "2305.10425",    link=Hinge(delta=1.0))
SLIC_HF      = _patch(SLIC,   "slic_hf",      "2305.10425",    against="nothing", beta=1.0, add=(ChosenNLL(coef=0.1),))
RSO          = _patch(SLIC,   "rso",          "2309.06657",    draw=RejectionSampled())
EXO          = _patch(DPO,    "exo",          "2402.00856",    link=Exact(rate=1e-3))
DISCOPOP     = _patch(DPO,    "discopop",     "2406.08414",    link=Discovered(tau=0.05))
AOT          = _patch(DPO,    "aot",          "2406.05882",    match="margins")
AOT_UNPAIRED = _patch(DPO,    "aot_unpaired", "2406.05882",    match="rewards")

# --- links of each side ----------------------------------------------------------------------------------------------

NCA          = _patch(DPO,    "nca",          "2402.05369",    link=NoiseContrast())
SPPO         = _patch(DPO,    "sppo",         "2405.00675",    link=SelfPlay())
APO_ZERO     = _patch(DPO,    "apo_zero",     "2408.06266",    link=AnchoredZero())
APO_ZERO_UNPAIRED = _patch(APO_ZERO, "apo_zero_unpaired", "2408.06266", rows="label")
APO_DOWN     = _patch(DPO,    "apo_down",     "2408.06266",    link=AnchoredDown())
BCO_PAIR     = _patch(DPO,    "bco_pair",     "2404.04656",    link=Binary())
BCO          = _patch(BCO_PAIR, "bco",        "2404.04656",    rows="label", shift="running")
KTO          = _patch(DPO,    "kto",          "2402.01306",    link=Prospect(), rows="label", shift="mismatched")

# --- without a reference ---------------------------------------------------------------------------------------------

CPO          = _patch(DPO,    "cpo",          "2401.08417",    against="nothing", add=(ChosenNLL(),))
SIMPO        = _patch(DPO,    "simpo",        "2405.14734",    against="nothing", statistic=Average(), beta=2.5,
                                                               margin=FixedMargin(gamma=1.375))
CPO_SIMPO    = _patch(SIMPO,  "cpo_simpo",    "2401.08417",    add=(ChosenNLL(),))
ORPO         = _patch(CPO,    "orpo",         "2403.07691",    statistic=LogOdds(), beta=1.0, coef=0.1)
TPO          = _patch(DPO,    "tpo",          "2405.16681",    rows="triple", against="nothing", beta=0.01,
                                                               add=(GoldNLL(),))

# --- pairs of the policy's own ---------------------------------------------------------------------------------------

OAIF         = _patch(DPO,    "oaif",         "2402.04792",    draw=TwoSamples())
ITERATIVE_DPO = _patch(DPO,   "iterative_dpo", "2405.07863",   draw=BestWorst(of=8))
XPO          = _patch(DPO,    "xpo",          "2405.21046",    draw=AgainstReference(), add=(Optimism(coef=1e-5),))
NASH_MD      = _patch(DPO,    "nash_md",      "2312.00886",    draw=AgainstMixture(coef=0.5), link=Nash())

# fmt: on
# By type and in the order of definition, as on the other ladder.
PREFERENCES: dict[str, PreferenceAlgorithm] = {
    a.name: a for a in list(globals().values()) if isinstance(a, PreferenceAlgorithm)
}
"""All preference algorithms above, by name."""


def preference(name: str) -> PreferenceAlgorithm:
    """The preference algorithm of that name, or ConfigError with the nearest one."""
    if name not in PREFERENCES:
        raise ConfigError(f"algorithm={name}: no such preference algorithm; {nearest(name, PREFERENCES)}")
    return PREFERENCES[name]
